"""A tap before each worker, all in a process of their own: beside the engine they would wait for its Python.

`python -m llamado.cluster.taps [--all] HOST:PORT …` writes a line with the ports it listens on; then, for each line it
reads, a JSON list with a link's settings for each tap, it delays and limits as they say (with --all everything, both
ways, else graphs alone) and writes an empty one.
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


class TapsEnded(LlamadoError):
    """The process of the taps is gone."""


class LinkSettings(NamedTuple):
    """How slow a link is made; `bandwidth` in bits per second, None: no limit."""

    latency_ms: float = 0.0
    jitter_ms: float = 0.0
    bandwidth: float | None = None


class Taps:
    """The process of the taps before workers; `both_ways`: they delay everything, not graphs alone."""

    def __init__(self, targets: Sequence[Endpoint], *, both_ways: bool = False) -> None:
        given = [*(["--all"] if both_ways else []), *map(str, targets)]
        command = python_command("-m", "llamado.cluster.taps", *given)
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            self.endpoints: list[str] = [str(Endpoint("127.0.0.1", int(port))) for port in self._answer().split()]
        except TapsEnded:
            self.close()
            raise

    def delay(self, latency_ms: float) -> None:
        """From now on graphs take this long on every link."""
        self.set([LinkSettings(latency_ms)] * len(self.endpoints))

    def set(self, links: Sequence[LinkSettings]) -> None:
        """From now on links are like this. Raises TapsEnded."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{json.dumps(links)}\n")
            self._process.stdin.flush()
        except OSError:
            raise TapsEnded("the taps before the workers ended unexpectedly") from None
        self._answer()

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

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise TapsEnded("the taps before the workers ended unexpectedly")
        return line


def main() -> int:
    """Serve taps until standard input ends; returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent sees to it
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
