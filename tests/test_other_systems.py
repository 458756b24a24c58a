"""The package works without what Windows lacks: run on a stand-in for it, because there is no Windows to run on.

Python's own modules and those of others are imported first,
    as this system's. Then what Windows has not is taken away,
and llamado is imported and used.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from ports import free_port
from tiny_models import make_llama

pytestmark = pytest.mark.slow

# What of Python there is not on Windows: docs.python.org/3/library, "Availability: Unix" of each.
_AWAY = """
import asyncio, ctypes, errno, importlib, io, json, logging, mmap, multiprocessing, os, pathlib, pkgutil, select
import selectors
import shutil, signal, socket, ssl, subprocess, sys, tempfile, threading, time, urllib.request, webbrowser
import httptools, httpx, jinja2, llguidance, llvmlite.binding, markdown_it, numpy, orjson, prometheus_client
import prompt_toolkit
import prompt_toolkit.output.vt100, prompt_toolkit.input.vt100, prompt_toolkit.shortcuts
import prompt_toolkit.application, prompt_toolkit.completion, prompt_toolkit.history
import rich.console, rich.live, rich.markdown, rich.progress, rich.table, starlette.applications
import starlette.middleware.cors
import starlette.routing, uvicorn, uvicorn.lifespan.off, uvicorn.logging, uvicorn.loops.asyncio, yaml, regex
import uvicorn.protocols.http.httptools_impl, mcp.client.session, mcp.client.stdio, mcp.client.streamable_http
import anyio._backends._asyncio, concurrent.futures.thread

MODULES = {"curses", "fcntl", "grp", "nis", "posix", "pty", "pwd", "readline", "resource", "syslog", "termios",
    "tty", "uvloop"}
for name in MODULES & sys.modules.keys():
    del sys.modules[name]

class Away:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Away())
for name in dir(os):
    if name.startswith(("sched_", "SCHED_", "posix_", "POSIX_", "W", "get", "set", "wait", "spawn", "P_", "EX_",
        "pid")) and name not in {
        "getcwd", "getcwdb", "getenv", "getlogin", "getpid", "getppid", "get_exec_path", "get_inheritable",
            "set_inheritable",
        "get_terminal_size", "get_blocking", "set_blocking", "spawnv", "spawnve", "waitpid", "waitstatus_to_exitcode",
        "P_NOWAIT", "P_NOWAITO", "P_WAIT", "W_OK", "WNOHANG",  # the last is asked for by subprocess of this system
    }:
        delattr(os, name)
for name in [
    "chown", "chroot", "confstr", "ctermid", "fchdir", "fchown", "fork", "forkpty", "fstatvfs", "killpg", "lchown",
    "lockf", "memfd_create", "mkfifo", "mknod", "nice", "openpty", "pread", "preadv", "pwrite", "pwritev", "readv",
        "sendfile",
    "statvfs", "sync", "sysconf", "sysconf_names", "tcgetpgrp", "ttyname", "uname", "writev", "copy_file_range",
        "splice",
    "O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "O_NOCTTY", "O_PATH", "O_SYNC", "O_DSYNC", "O_DIRECT",
        "O_TMPFILE",
    "register_at_fork", "getloadavg", "fdatasync", "geteuid", "getuid", "getpgid", "setsid",
]:
    if hasattr(os, name):
        delattr(os, name)
for name in dir(signal):
    if name.startswith("SIG") and not name.startswith("SIG_") and name not in {
        "SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM",
    }:
        delattr(signal, name)
for name in ["pthread_sigmask", "pthread_kill", "setitimer", "getitimer", "alarm", "pause", "siginterrupt",
    "sigwait", "ITIMER_PROF"]:
    delattr(signal, name)
for name in ["AF_UNIX", "SO_REUSEPORT", "SCM_RIGHTS", "TCP_USER_TIMEOUT", "MSG_DONTWAIT", "MSG_NOSIGNAL",
    "sendmsg_afalg", "send_fds", "recv_fds"]:
    if hasattr(socket, name):
        delattr(socket, name)
del select.poll
for name in [name for name in dir(mmap) if name.startswith(("MADV_", "MAP_", "PROT_"))]:
    delattr(mmap, name)

def no_signals(self, *arguments):
    raise NotImplementedError
asyncio.SelectorEventLoop.add_signal_handler = asyncio.SelectorEventLoop.remove_signal_handler = no_signals

def socket_pair(*kind):  # as Python makes one where the system does not
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return one, server.accept()[0]
socket.socketpair = socket_pair

subprocess.Popen.kill = lambda self: self.send_signal(9)  # this system's way, which has a name no more

class Popen(subprocess.Popen):
    def __init__(self, command, **named):
        for name in ("stdin", "stdout", "stderr"):  # a socket is no file there
            assert named.get(name) is None or named[name] < 0, f"{name}={named[name]}"
        super().__init__(command, **named)
subprocess.Popen = Popen

class Library(ctypes.CDLL):
    def __init__(self, name, *arguments, **named):
        if name is None:  # its own names are no library's there
            raise TypeError("bad argument type for built-in operation")
        super().__init__(name, *arguments, **named)
ctypes.CDLL = Library

# No file of Linux's own.
opened = io.open
def no_proc(file, *arguments, **named):
    if str(file).startswith(("/proc", "/sys")):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(file))
    return opened(file, *arguments, **named)
io.open = no_proc
import builtins
builtins.open = no_proc
"""

_IMPORTED = """
sys.platform = "win32"
import llamado
for module in pkgutil.walk_packages(llamado.__path__, "llamado."):
    importlib.import_module(module.name)
    print(module.name)
"""

_SERVED = """
class Windows:  # what is asked of it alone: sysinfoapi.h
    class kernel32:
        @staticmethod
        def GlobalMemoryStatusEx(status):
            assert status._obj.length == 64
            status._obj.total, status._obj.available = 8 << 30, 4 << 30
            return 1

ctypes.windll = Windows
asyncio.ProactorEventLoop = asyncio.SelectorEventLoop
sys.platform = "win32"
from llamado.commands.cli import main
from llamado.devices.limits import memory
assert memory() == (4 << 30, 8 << 30, 8 << 30)

def healthy(url):
    try:
        return urllib.request.urlopen(url + "/health", timeout=10).status == 200
    except OSError:
        return False

def ask():
    url = f"http://127.0.0.1:{sys.argv[2]}"
    def post(path, body):
        request = urllib.request.Request(url + path, json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)
    try:
        while not healthy(url):
            time.sleep(0.05)
        print(json.dumps([
            post("/completion", {"prompt": "Hello", "n_predict": 4, "ignore_eos": True}),
            post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}),
        ]), flush=True)
    except BaseException as error:
        print(repr(error), file=sys.stderr)
    signal.raise_signal(signal.SIGINT)

threading.Thread(target=ask).start()
raise SystemExit(main(["serve", "-m", sys.argv[1], "-c", "256", "--port", sys.argv[2]]))
"""
_REFUSED = """
sys.platform = "win32"
from llamado.cluster.state import ClusterStateError, StateFolder
from llamado.processes.guarded import Watchdog
try:
    with StateFolder("one").locked():
        pass
except ClusterStateError as error:
    print(error)
try:
    Watchdog(1.0).start()
except OSError as error:
    print(error)
"""


def without(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", _AWAY + script, *arguments], capture_output=True, text=True, timeout=300,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """The result of a process that tries what Windows lacks, and then serves a chat."""
    model = make_llama(tmp_path_factory.mktemp("model") / "tiny.gguf")
    return without(_REFUSED + _SERVED, str(model), str(free_port()))


@pytest.mark.full
def test_all_modules_are_imported() -> None:
    done = without(_IMPORTED)
    assert done.returncode == 0, done.stderr
    assert {"llamado.cluster.supervisor", "llamado.http.connections", "llamado.tools.folder"} <= set(
        done.stdout.split()
    )


def test_a_chat_is_answered(done: subprocess.CompletedProcess[str]) -> None:
    """The server starts, renders a template in its child, computes, and ends by Ctrl-C."""
    assert done.returncode == 0, done.stderr
    completion, chat = json.loads(done.stdout.splitlines()[-1])
    assert completion["tokens_predicted"] == 4 and completion["content"]
    assert chat["object"] == "chat.completion" and chat["usage"]["prompt_tokens"] > 4


def test_missing_system_features_are_errors(done: subprocess.CompletedProcess[str]) -> None:
    assert done.stdout.splitlines()[:2] == [
        "llamado up needs Linux or macOS; on Windows start llamado worker and llamado serve --rpc separately",
        "[Errno 38] processes that end with their parent need Linux or macOS",
    ]
