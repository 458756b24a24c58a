"""An answer as text that comes: on a terminal, in a file or a pipe."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Protocol, TextIO

from llamado.commands.chat.speaker import Answer, Figures
from llamado.terminal.text import printable

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


@dataclass(slots=True)
class Shown:
    """What came of an answer."""

    text: str = ""
    thoughts: str = ""
    figures: Figures | None = None
    """None: it was stopped before its end."""


class Screen(Protocol):
    """Where answers are shown."""

    def show(self, answer: Answer) -> Shown:
        """Show an answer until it ends or is interrupted. Raises what ends it otherwise."""
        ...


@contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """What is called between two pieces raises KeyboardInterrupt where Ctrl-C came and nobody heard of it: Python drops
    exceptions in what it calls by itself (destructors, callbacks of weak references).
    """
    came = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        raise KeyboardInterrupt

    def check() -> None:
        if came:
            raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGINT, note)
    except ValueError:  # not the main thread, the only one that hears signals
        yield check
        return
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)


class PlainScreen:
    """Text as it comes. On a terminal thoughts are dimmed; elsewhere there is the answer alone, byte by byte."""

    def __init__(self, out: TextIO) -> None:
        self._out, self._terminal = out, out.isatty()

    def show(self, answer: Answer) -> Shown:
        shown, thinking = Shown(), False
        try:
            with interruptible() as check:
                while True:
                    said = next(answer)
                    if said.thought:
                        shown.thoughts += said.text
                    else:
                        shown.text += said.text
                    if not self._terminal:
                        self._write("" if said.thought else said.text)
                    else:
                        if said.thought != thinking:
                            self._write(_DIM if said.thought else f"{_PLAIN}\n\n")
                            thinking = said.thought
                        self._write(printable(said.text.replace("\r", "")))
                    check()
        except StopIteration as end:
            shown.figures = end.value
        except KeyboardInterrupt:
            self._write(" …")
        finally:
            answer.close()
            self._write(f"{_PLAIN}\n" if thinking else "\n")
        return shown

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
