"""Screens that show a streaming answer; the plain one for terminals, files and pipes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Protocol, TextIO

from llamado.commands.chat.backend import Answer, AnswerStats
from llamado.terminal.text import printable

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


@dataclass(slots=True)
class ShownAnswer:
    """Text and statistics of an answer that was shown."""

    text: str = ""
    reasoning: str = ""
    stats: AnswerStats | None = None
    """None if the user stopped the answer."""
    so_far: AnswerStats | None = None
    """Statistics up to the last piece, if the backend counts them."""


class Screen(Protocol):
    """Shows answers."""

    def show(self, answer: Answer) -> ShownAnswer:
        """Show an answer until it ends or Ctrl-C interrupts it. Raises the errors of the answer."""
        ...


@contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """Yield a function to call between pieces, which raises KeyboardInterrupt if Ctrl-C was pressed.

    The KeyboardInterrupt of the signal itself may be lost: Python drops exceptions in destructors and in callbacks of
    weak references.
    """
    is_interrupted = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal is_interrupted
        is_interrupted = True
        raise KeyboardInterrupt

    def check() -> None:
        if is_interrupted:
            raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGINT, note)
    except ValueError:  # not the main thread, which alone receives signals
        yield check
        return
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)


class PlainScreen:
    """Writes text as it streams. Terminals show the reasoning dimmed; files and pipes get only the answer."""

    def __init__(self, out: TextIO) -> None:
        self._out, self._terminal = out, out.isatty()

    def show(self, answer: Answer) -> ShownAnswer:
        shown, thinking = ShownAnswer(), False
        try:
            with interruptible() as check:
                while True:
                    piece = next(answer)
                    shown.so_far = piece.so_far
                    if piece.is_reasoning:
                        shown.reasoning += piece.text
                    else:
                        shown.text += piece.text
                    if not self._terminal:
                        self._write("" if piece.is_reasoning else piece.text)
                    else:
                        if piece.is_reasoning != thinking:
                            self._write(_DIM if piece.is_reasoning else f"{_PLAIN}\n\n")
                            thinking = piece.is_reasoning
                        self._write(printable(piece.text.replace("\r", "")))
                    check()
        except StopIteration as end:
            shown.stats = end.value
        except KeyboardInterrupt:
            self._write(" …")
        finally:
            answer.close()
            self._write(f"{_PLAIN}\n" if thinking else "\n")
        return shown

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
