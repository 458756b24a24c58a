"""An answer as Markdown on a terminal while it comes: blocks that are finished stay as they are."""

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

from llamado.commands.chat.screen import Shown, interruptible
from llamado.commands.chat.speaker import Answer
from llamado.terminal.text import printable

_FRAME = 0.05
"""Seconds between two pictures of an answer that comes, at least."""
_SHARE = 4
"""How many times as long as drawing a picture takes the answer is left alone."""
_THOUGHT_LINES = 5
"""Lines of thoughts that are shown while they come."""


class MarkdownScreen:
    """Markdown on a terminal. What a block of it says stays once the next one begins; only the last is drawn anew."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def show(self, answer: Answer) -> Shown:
        shown, drawn, began = Shown(), _Drawing(self._console), time.monotonic()
        due, pictured = 0.0, 0
        live = Live(console=self._console, auto_refresh=False, transient=True)
        with _no_echo(), interruptible() as check, live:
            try:
                live.update(Text("…", style="dim"), refresh=True)
                while True:
                    check()
                    said = next(answer)
                    if said.thought:
                        shown.thoughts += said.text
                    else:
                        if shown.thoughts and not shown.text:
                            drawn.fold(shown.thoughts, time.monotonic() - began)
                            due = 0.0
                        shown.text += said.text
                        drawn.add(said.text)
                    if (now := time.monotonic()) >= due:
                        pictured = len(shown.text)
                        drawn.settle()
                        live.update(_Tail(drawn.open if shown.text else _thinking(shown.thoughts)), refresh=True)
                        done = time.monotonic()
                        due = done + max(_FRAME, _SHARE * (done - now))
            except StopIteration as end:
                shown.figures = end.value
            except KeyboardInterrupt:
                # What came after the last picture nobody saw: it is neither shown nor kept.
                shown.text = shown.text[:pictured]
                drawn.cut()
                drawn.add(" …")
            finally:
                answer.close()
                live.update(Text(""), refresh=True)
        if shown.thoughts and not shown.text:
            drawn.fold(shown.thoughts, time.monotonic() - began)
        drawn.finish()
        return shown


class _Drawing:
    """Markdown of which whole blocks are printed as soon as they are whole."""

    def __init__(self, console: Console) -> None:
        self._console, self._text, self._below = console, "", False
        self._pictured = 0

    @property
    def open(self) -> RenderableType:
        """The block that may still change."""
        return _markdown(self._text)

    def add(self, text: str) -> None:
        self._text += printable(text.replace("\r", ""))

    def settle(self) -> None:
        """Print the blocks that are whole; what is there now is in the picture."""
        self._pictured = len(self._text)
        # What stands in a line that has no end yet may become anything.
        whole = self._text[: self._text.rfind("\n") + 1]
        for block in blocks(whole)[:-1]:
            self._print(_markdown(block))
            self._text, self._pictured = self._text[len(block) :], self._pictured - len(block)

    def cut(self) -> None:
        """Forget what came after the last picture."""
        self._text = self._text[: self._pictured]

    def fold(self, thoughts: str, seconds: float) -> None:
        """Thoughts are over: a line says that there were some."""
        n = len(thoughts.split())
        self._print(Text(f"thought for {seconds:.1f} s, {n} words (/thoughts shows them)", style="dim italic"))

    def finish(self) -> None:
        for block in blocks(self._text):
            self._print(_markdown(block))
        self._text = ""

    def _print(self, what: RenderableType) -> None:
        if self._below:
            self._console.print()
        self._console.print(what)
        self._below = True


def blocks(text: str) -> list[str]:
    """A Markdown text in its blocks: paragraphs, lists, tables, code."""
    lines = [f"{line}\n" for line in text.split("\n")]
    lines[-1] = lines[-1][:-1]
    starts = [token.map[0] for token in _PARSER.parse(text) if token.level == 0 and token.map]
    ends = [*starts[1:], len(lines)]
    return ["".join(lines[start:end]) for start, end in zip([0, *starts[1:]], ends, strict=True)] if starts else []


# HTML is shown as it is written: rich would leave it out.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable("strikethrough").enable("table")


def _markdown(text: str) -> Markdown:
    # Links are spelled out, because nobody sees where a link that a model made goes to.
    made = Markdown("", hyperlinks=False, code_theme="ansi_dark")
    made.markup, made.parsed = text, _PARSER.parse(text)
    return made


def _thinking(text: str) -> RenderableType:
    return Text("\n".join(printable(text).splitlines()[-_THOUGHT_LINES:]), style="dim")


class _Tail:
    """The last lines of something, as many as the terminal has."""

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
    """What is typed while an answer comes does not land in it; it is there for the next prompt."""
    try:
        import termios
    except ImportError:  # a system without terminals of this kind
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
