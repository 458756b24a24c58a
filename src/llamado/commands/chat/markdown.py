"""Render an answer as Markdown while it streams: complete blocks are printed once."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

from llamado.commands.chat.backend import Answer
from llamado.commands.chat.screen import ShownAnswer, interruptible
from llamado.terminal.text import printable

_FRAME = 0.05
"""Minimum seconds between two redraws."""
_PAUSE = 4
"""Minimum pause between two redraws, as a multiple of the time of a redraw."""
_REASONING_LINES = 5
"""Last lines of the reasoning to show while it streams."""


class MarkdownScreen:
    """Shows Markdown on a terminal. Blocks are printed when the next one starts; only the last block is redrawn."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def show(self, answer: Answer) -> ShownAnswer:
        shown, drawn, began = ShownAnswer(), _MarkdownStream(self._console), time.monotonic()
        due, n_visible = 0.0, 0
        live = Live(console=self._console, auto_refresh=False, transient=True)
        with _no_echo(), interruptible() as check, live:
            try:
                live.update(Text("…", style="dim"), refresh=True)
                while True:
                    check()
                    piece = next(answer)
                    shown.so_far = piece.so_far
                    if piece.is_reasoning:
                        shown.reasoning += piece.text
                    else:
                        if shown.reasoning and not shown.text:
                            drawn.fold(shown.reasoning, time.monotonic() - began)
                            due = 0.0
                        shown.text += piece.text
                        drawn.add(piece.text)
                    if (now := time.monotonic()) >= due:
                        n_visible = len(shown.text)
                        drawn.settle()
                        live.update(_Tail(drawn.open if shown.text else _thinking(shown.reasoning)), refresh=True)
                        done = time.monotonic()
                        due = done + max(_FRAME, _PAUSE * (done - now))
            except StopIteration as end:
                shown.stats = end.value
            except KeyboardInterrupt:
                # The user has not seen the text after the last redraw, so it is dropped.
                shown.text = shown.text[:n_visible]
                drawn.cut()
                drawn.add(" …")
            finally:
                answer.close()
                live.update(Text(""), refresh=True)
        if shown.reasoning and not shown.text:
            drawn.fold(shown.reasoning, time.monotonic() - began)
        drawn.finish()
        return shown


class _MarkdownStream:
    """Prints blocks of Markdown as soon as they are complete."""

    def __init__(self, console: Console) -> None:
        self._console, self._text, self._has_output = console, "", False
        self._n_visible = 0

    @property
    def open(self) -> RenderableType:
        """The incomplete last block."""
        return _markdown(self._text)

    def add(self, text: str) -> None:
        self._text += printable(text.replace("\r", ""))

    def settle(self) -> None:
        """Print complete blocks, and count the remaining text as visible."""
        self._n_visible = len(self._text)
        # More text can change the meaning of an incomplete line.
        whole = self._text[: self._text.rfind("\n") + 1]
        for block in blocks(whole)[:-1]:
            self._print(_markdown(block))
            self._text, self._n_visible = self._text[len(block) :], self._n_visible - len(block)

    def cut(self) -> None:
        """Drop the text after the last redraw."""
        self._text = self._text[: self._n_visible]

    def fold(self, reasoning: str, seconds: float) -> None:
        """Print a line that replaces the reasoning."""
        n = len(reasoning.split())
        self._print(Text(f"thought for {seconds:.1f} s, {n} words (/thoughts shows them)", style="dim italic"))

    def finish(self) -> None:
        for block in blocks(self._text):
            self._print(_markdown(block))
        self._text = ""

    def _print(self, what: RenderableType) -> None:
        if self._has_output:
            self._console.print()
        self._console.print(what)
        self._has_output = True


def blocks(text: str) -> list[str]:
    """Split a Markdown text into blocks: paragraphs, lists, tables, code."""
    lines = [f"{line}\n" for line in text.split("\n")]
    lines[-1] = lines[-1][:-1]
    starts = [token.map[0] for token in _PARSER.parse(text) if token.level == 0 and token.map]
    ends = [*starts[1:], len(lines)]
    return ["".join(lines[start:end]) for start, end in zip([0, *starts[1:]], ends, strict=True)] if starts else []


# HTML is shown as text: rich would omit it.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable("strikethrough").enable("table")


def _markdown(text: str) -> Markdown:
    # The targets of links are shown, because a model chose them.
    markdown = Markdown("", hyperlinks=False, code_theme="ansi_dark")
    markdown.markup, markdown.parsed = text, _PARSER.parse(text)
    return markdown


def _thinking(text: str) -> RenderableType:
    return Text("\n".join(printable(text).splitlines()[-_REASONING_LINES:]), style="dim")


class _Tail:
    """Last lines of a renderable, as many as fit on the terminal."""

    def __init__(self, what: RenderableType) -> None:
        self._what = what

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._what, options.update(height=None), pad=False)
        lines = lines[-max(1, console.size.height - 2) :]
        for i, line in enumerate(lines):
            yield from line
            if i < len(lines) - 1:
                yield Segment.line()


@contextmanager
def _no_echo() -> Iterator[None]:
    """Do not echo keys during an answer. They are read by the next prompt."""
    try:
        import termios
    except ImportError:  # Windows
        yield
        return
    try:
        fd = sys.stdin.fileno()
        before = termios.tcgetattr(fd)
    except (termios.error, OSError, ValueError):  # no terminal
        yield
        return
    quiet = [*before]
    quiet[3] = before[3] & ~termios.ECHO
    termios.tcsetattr(fd, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
