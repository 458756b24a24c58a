"""The two sides of a comparison: models by name, our command and the real llama.cpp's programs, servers of either."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from peer import programs_of
from synthetic import synthetic_model

from llamado.gguf.sources.resolve import resolve

HOST = "127.0.0.1"
SIDES = ("llamado", "llama.cpp")
IK = "ik_llama.cpp"
"""A further peer of speed.py."""
MODELS = ("smollm2", "gemma3", "synthetic-1b")
PROMPTS = (
    "The capital of France is",
    "Once upon a time there was",
    "My favourite season of the year is",
    "def fibonacci(n):",
    "The three primary colours are",
    "A list of ten birds:",
    "The history of the bicycle begins",
)
"""Prompts of the clients of a router, a gateway or a cluster."""
N_PREDICT = 24
"""Tokens that they ask for."""


def model_path(name: str) -> Path:
    """A model by name or path; fetched, or for `synthetic-SHAPE` written, where it is not there yet."""
    if name.startswith("synthetic-"):
        return synthetic_model(name.removeprefix("synthetic-"))
    return resolve(name)


def peer_program(name: str, peer: str = SIDES[1]) -> str:
    """Return the path of a peer's program; end the script if the peer is not installed."""
    program = programs_of(peer) / name
    if not program.exists():
        sys.exit(f"{program} is missing: `benchmarks/peer.sh {peer}` installs it (10 to 15 minutes, once)")
    return str(program)


def our_command(*arguments: str) -> list[str]:
    """`llamado …` of this Python's environment."""
    command = Path(sys.executable).with_name("llamado")
    found = str(command) if command.exists() else shutil.which("llamado")
    if found is None:
        sys.exit("the command llamado is not installed: pip install -e '.[dev]'")
    return [found, *arguments]


class Done(NamedTuple):
    """Standard output of a command, and the most bytes of RAM it had at a time (mapped weights that it touched too)."""

    printed: str
    peak_memory: int


def run(command: Sequence[str], *, timeout: float = 600) -> str:
    """Standard output of a command; ends the script with its errors where it fails."""
    return measured(command, timeout=timeout).printed


def measured(command: Sequence[str], *, timeout: float = 600) -> Done:
    """A command that has run; ends the script with its errors where it fails."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdout=out, stderr=errors)
        late = threading.Timer(timeout, process.kill)
        late.start()
        _, status, used = os.wait4(process.pid, 0)
        late.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            errors.seek(0)
            said = errors.read().decode(errors="replace")[-2000:]
            sys.exit(f"{' '.join(command)}\nended with {process.returncode}:\n{said}")
        out.seek(0)
        return Done(out.read().decode(), 1024 * used.ru_maxrss)


@dataclass(frozen=True)
class Server:
    """A server that answers: where, which process, and seconds from its start to the first 200 of /health."""

    port: int
    pid: int
    start_seconds: float

    def peak_memory(self) -> int:
        """Most bytes of RAM the process has had at a time (VmHWM; mapped weights count as far as they were touched)."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
        raise OSError(f"no VmHWM for process {self.pid}")

    def cpu_seconds(self) -> float:
        """Processor time the process has used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def settle(servers: Iterable[Server], *, timeout: float = 60) -> None:
    """Waits until none of the servers does anything, so that none takes processor time from another.

    A server may use idle time, for example to compile what requests are likely to need.
    """
    still = list(servers)
    deadline = time.monotonic() + timeout
    while still and time.monotonic() < deadline:
        before = [one.cpu_seconds() for one in still]
        time.sleep(0.25)
        still = [one for one, used in zip(still, before, strict=True) if one.cpu_seconds() - used > 0.02]


@contextmanager
def server(
    side: str, model: Path, options: Sequence[str], environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """A running server of one side with `model` loaded; ended when the block is left."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
    arguments = ["-m", str(model), "--host", HOST, "--port", str(port), *options]
    if side == "llamado":
        command = our_command("serve", *arguments)
    else:
        here = [] if "-ngl" in options else ["-ngl", "0"]
        command = [peer_program("llama-server"), *arguments, *here, "--no-webui"]
    with tempfile.TemporaryFile() as log:
        began = time.perf_counter()
        # As users start it: Python keeps its byte code.
        own = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**own, **(environment or {})})
        try:
            while not _healthy(port):
                waited = time.perf_counter() - began
                if process.poll() is not None or waited > 300:
                    log.seek(0)
                    said = log.read().decode(errors="replace")[-2000:]
                    sys.exit(f"{' '.join(command)}\nis not healthy after {waited:.0f} s:\n{said}")
                time.sleep(0.005)
            yield Server(port, process.pid, time.perf_counter() - began)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _healthy(port: int) -> bool:
    """Return True if /health answers 200; costs the server next to nothing."""
    try:
        with socket.create_connection((HOST, port), timeout=5) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            return connection.recv(64).startswith(b"HTTP/1.1 200")
    except OSError:
        return False
