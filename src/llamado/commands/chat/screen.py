"""An answer on the screen while it comes: plain, or as Markdown of which finished blocks stay as they are."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TextIO

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

from llamado.commands.chat.speaker import Answer, Figures

_FRAME = 0.05
"""Seconds between two pictures of an answer that comes, at least."""
_SHARE = 4
"""How many times as long as drawing a picture takes the answer is left alone."""
_THOUGHT_LINES = 5
"""Lines of thoughts that are shown while they come."""
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


def printable(text: str) -> str:
    """Text that cannot steer a terminal, whatever a model writes: escapes and other controls as they are spelled."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else "" if c == "\r" else repr(c)[1:-1] for c in text)


class PlainScreen:
    """Text as it comes. On a terminal thoughts are dimmed; elsewhere there is the answer alone, byte by byte."""

    def __init__(self, out: TextIO) -> None:
        self._out, self._terminal = out, out.isatty()

    def show(self, answer: Answer) -> Shown:
        shown, thinking = Shown(), False
        try:
            while True:
                said = next(answer)
                if said.thought:
                    shown.thoughts += said.text
                else:
                    shown.text += said.text
                if not self._terminal:
                    self._write("" if said.thought else said.text)
                    continue
                if said.thought != thinking:
                    self._write(_DIM if said.thought else f"{_PLAIN}\n\n")
                    thinking = said.thought
                self._write(printable(said.text))
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


class MarkdownScreen:
    """Markdown on a terminal. What a block of it says stays once the next one begins; only the last is drawn anew."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def show(self, answer: Answer) -> Shown:
        shown, drawn, began = Shown(), _Drawing(self._console), time.monotonic()
        due = 0.0
        with _no_echo(), Live(console=self._console, auto_refresh=False, transient=True) as live:
            try:
                live.update(Text("…", style="dim"), refresh=True)
                while True:
                    said = next(answer)
                    if said.thought:
                        shown.thoughts += said.text
                    else:
                        if shown.thoughts and not shown.text:
                            drawn.fold(shown.thoughts, time.monotonic() - began)
                        shown.text += said.text
                        drawn.add(said.text)
                    if (now := time.monotonic()) >= due:
                        drawn.settle()
                        live.update(_Tail(drawn.open if shown.text else _thinking(shown.thoughts)), refresh=True)
                        done = time.monotonic()
                        due = done + max(_FRAME, _SHARE * (done - now))
            except StopIteration as end:
                shown.figures = end.value
            except KeyboardInterrupt:
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

    @property
    def open(self) -> RenderableType:
        """The block that may still change."""
        return _markdown(self._text)

    def add(self, text: str) -> None:
        self._text += printable(text)

    def settle(self) -> None:
        """Print the blocks that are whole."""
        # What stands in a line that has no end yet may become anything.
        whole = self._text[: self._text.rfind("\n") + 1]
        for block in blocks(whole)[:-1]:
            self._print(_markdown(block))
            self._text = self._text[len(block) :]

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


def screen_of(*, markdown: bool) -> Screen:
    """The screen for standard output: Markdown is for terminals that can move the cursor."""
    if not markdown or not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        return PlainScreen(sys.stdout)
    return MarkdownScreen(Console(highlight=False))
