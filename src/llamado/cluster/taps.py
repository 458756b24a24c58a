"""Taps in front of workers, in a separate process: in the engine's process they would compete for the GIL.

`python -m llamado.cluster.taps [--all] HOST:PORT …` prints one line with the ports that it listens on. It then reads
lines, each a JSON list of `LinkSettings`, one per tap; it applies them and prints an empty line. With --all the taps
delay all traffic in both directions, otherwise only graphs.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

from llamado.errors import LlamadoError
from llamado.installation import python_command
from llamado.rpc.endpoint import Endpoint
from llamado.rpc.tap.proxy import Tap, TapOptions


class TapsError(LlamadoError):
    """The process of the taps ended unexpectedly."""


class LinkSettings(NamedTuple):
    """Delay and limit of a link. `bandwidth`: bits per second, None for no limit."""

    latency_ms: float = 0.0
    jitter_ms: float = 0.0
    bandwidth: float | None = None


class Taps:
    """The process with a tap in front of each worker. `both_ways`: delay all traffic, not only graphs."""

    def __init__(self, targets: Sequence[Endpoint], *, both_ways: bool = False) -> None:
        arguments = [*(["--all"] if both_ways else []), *map(str, targets)]
        command = python_command("-m", "llamado.cluster.taps", *arguments)
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            self.endpoints: list[str] = [str(Endpoint("127.0.0.1", int(port))) for port in self._read_line().split()]
        except TapsError:
            self.close()
            raise

    def delay(self, latency_ms: float) -> None:
        """Set the same latency on every link. Raises TapsError."""
        self.set([LinkSettings(latency_ms)] * len(self.endpoints))

    def set(self, links: Sequence[LinkSettings]) -> None:
        """Set the settings of every link. Raises TapsError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{json.dumps(links)}\n")
            self._process.stdin.flush()
        except OSError:
            raise TapsError("the process of the taps ended unexpectedly") from None
        self._read_line()

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.close()
        except OSError:
            pass  # it has ended
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _read_line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise TapsError("the process of the taps ended unexpectedly")
        return line


def main() -> int:
    """Serve taps until standard input ends; return the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    sys.setswitchinterval(0.0005)
    targets = sys.argv[1:]
    if everything := targets[:1] == ["--all"]:
        del targets[0]
    with ExitStack() as running:
        taps = [
            running.enter_context(
                Tap(TapOptions(listen_port=0, target_host=t.host, target_port=t.port, all=everything))
            )
            for t in map(Endpoint.parse, targets)
        ]
        print(*(tap.port for tap in taps), flush=True)
        for line in sys.stdin:
            for tap, settings in zip(taps, json.loads(line), strict=True):
                tap.change(*settings)
            print(flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
