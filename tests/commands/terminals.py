"""Terminal emulator for tests: runs a program, types keys, and reads the screen."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pexpect
import pyte
from waiting import GUARD


class Terminal:
    """A program in its own terminal, which answers the queries of the program."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        program: Sequence[str] = (sys.executable, "-m", "llamado"),
        environ: Mapping[str, str] | None = None,
        rows: int = 40,
        columns: int = 100,
    ) -> None:
        self.screen = pyte.HistoryScreen(columns, rows, history=2000, ratio=1.0)
        self._stream = pyte.ByteStream(self.screen)
        environment = {**os.environ, **(environ or {}), "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"}
        for name in ("NO_COLOR", "COLUMNS", "LINES"):  # of the outer terminal
            environment.pop(name, None)
        self._child: Any = pexpect.spawn(
            program[0], [*program[1:], *arguments], dimensions=(rows, columns), env=environment, timeout=120,
        )  # fmt: skip
        self._child.delaybeforesend = None
        # Answers of the screen, such as the cursor position, go back to the program.
        self.screen.write_process_input = lambda data: self._child.send(data)
        self.raw = b""
        self._awaits_output = False  # True if the program has written nothing since the last keys

    def type(self, text: str) -> None:
        """Send keys."""
        self.read(0.01)
        self._awaits_output = True
        self._child.send(text)

    def paste(self, text: str) -> None:
        """Send text as a bracketed paste."""
        self.type(f"\x1b[200~{text}\x1b[201~")

    def resize(self, rows: int, columns: int) -> None:
        """Change the size of the window."""
        self.screen.resize(rows, columns)
        self._child.setwinsize(rows, columns)

    def read(self, seconds: float = 0.05) -> None:
        """Read the output of the program for some seconds."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            try:
                data = self._child.read_nonblocking(65536, timeout=left)
            except pexpect.TIMEOUT:
                return
            except pexpect.EOF:
                return
            self._awaits_output = False
            self.raw += data
            self._stream.feed(data)

    @property
    def text(self) -> str:
        """Text of the screen and of the lines scrolled off its top."""
        above = ["".join(line[x].data for x in range(self.screen.columns)) for line in self.screen.history.top]
        return "\n".join(line.rstrip() for line in [*above, *self.screen.display]).rstrip()

    @property
    def shown(self) -> str:
        """Text of the screen."""
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip()

    def until(self, pattern: str, seconds: float = 60.0, *, count: int = 1) -> str:
        """Wait until a regular expression matches `count` times in the text, and return the text."""
        end = time.monotonic() + seconds
        while len(re.findall(pattern, self.text, re.MULTILINE)) < count:
            if time.monotonic() > end:
                raise AssertionError(f"no {pattern!r} (x{count}) within {seconds:g} s on:\n{self.text}")
            self.read()
        return self.text

    def prompt(self, seconds: float = 60.0) -> None:
        """Wait for an empty prompt in the last line, after output for the last keys."""
        end = time.monotonic() + seconds
        while self._awaits_output or self.shown.rpartition("\n")[2] != ">" or self.screen.cursor.x != 2:
            if time.monotonic() > end:
                raise AssertionError(f"no prompt within {seconds:g} s on:\n{self.text}")
            self.read()

    def exit_code(self, seconds: float = GUARD) -> int:
        """Wait for the end of the program and return its exit code, negative for a signal."""
        end = time.monotonic() + seconds
        while self._child.isalive():
            if time.monotonic() > end:
                raise AssertionError(f"still running after {seconds:g} s:\n{self.text}")
            self.read()
        self.read(0.2)
        return -self._child.signalstatus if self._child.exitstatus is None else self._child.exitstatus

    def close(self) -> None:
        """Kill the program if it is running."""
        self._child.close(force=True)
