"""The environment of tests: the same on every machine, whatever the terminal, the user or the CI job has set."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_KEPT = re.compile(r"LLAMADO_(CACHE|CHROMIUM|CPU|FUZZ|MODELS|PEER_HOME|TEST_CUDA)$")
"""Settings of a test run: folders of caches and programs, the CPU to pretend, deeper searches on or off, and "real" for
tests on this machine's graphics card.
"""

_REMOVED = re.compile(
    r"(LLAMADO|LLAMA|GGML|MTMD|AIP|HF|HUGGINGFACE|HUGGING_FACE|OLLAMA|OPENAI|ANTHROPIC|OTEL|XDG|LC|RAY|CUDA)_"
    r"|(HTTP|HTTPS|ALL|FTP|NO)_PROXY$|(NO_COLOR|FORCE_COLOR|CLICOLOR|CLICOLOR_FORCE|COLORTERM|COLUMNS|LINES|LANGUAGE)$"
    r"|(PYTHONUNBUFFERED|PYTHONIOENCODING|PYTHONUTF8|WORKERS|NOTIFY_SOCKET|LISTEN_FDS|LISTEN_PID)$"
)
_SET = {"TERM": "xterm-256color", "LANG": "C.UTF-8", "TZ": "UTC"}

# Before numpy is imported: after each product of matrices, threads of its library would look for the next one for a
# while, which takes several times as long as the products of tests.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

_original: dict[str, str] = {}
_real_getaddrinfo = socket.getaddrinfo


def neutral(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables that programs look at, with the usual ones set."""
    kept = {name: value for name, value in environ.items() if _KEPT.match(name) or not _REMOVED.match(name.upper())}
    no_card = {} if environ.get("LLAMADO_TEST_CUDA") == "real" else {"LLAMADO_LIBCUDA": "none: tests use no card"}
    return kept | _SET | no_card


def make_neutral() -> None:
    """Make this process's environment neutral. Others' servers and clusters are not seen; no DNS is asked."""
    _original.update(os.environ)
    restore(neutral(os.environ) | {"XDG_RUNTIME_DIR": tempfile.mkdtemp(prefix="llamado-tests-")})
    if hasattr(time, "tzset"):
        time.tzset()
    socket.getaddrinfo = _resolve_here


def _resolve_here(host: Any, port: Any, *arguments: Any, **named: Any) -> Any:
    """`getaddrinfo` without DNS, which may be slow, be missing, or answer for names that do not exist."""
    name = host.decode() if isinstance(host, bytes) else host
    if name and name not in ("localhost", socket.gethostname()):
        try:
            ipaddress.ip_address(name)
        except ValueError:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known") from None
    return _real_getaddrinfo(host, port, *arguments, **named)


def restore(before: Mapping[str, str]) -> None:
    """Make the environment what it was."""
    for name in os.environ.keys() - before.keys() - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]
    for name, value in before.items():
        if name != "PYTEST_CURRENT_TEST" and os.environ.get(name) != value:
            os.environ[name] = value


@contextmanager
def original() -> Iterator[None]:
    """The environment that the test run was started in, for what is fetched: the user's proxy, and names of hosts."""
    before, resolve = dict(os.environ), socket.getaddrinfo
    restore(_original or before)
    socket.getaddrinfo = _real_getaddrinfo
    try:
        yield
    finally:
        socket.getaddrinfo = resolve
        restore(before)
