"""Incremental reading of an answer: parsers written as generators that pause while they need more text.

A parser's result depends on the text only, never on how it was cut into pieces: text that may still become a tag is
held back. The length of the held text is bounded (by the tags, the tools' names and `MAX_SPACE`), so that the cost of a
push is proportional to the length of its text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from itertools import groupby
from typing import TypeVar

from llamado.text.dialects.dialect import Content, Piece, Reasoning, ToolCall

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A part of a parser: each `yield` waits for more text."""

MAX_SPACE = 256  # whitespace taken between parts of a call; more of it is not formatting
_SPACE = re.compile(r"[ \t\r\n]*")


class TextCut(Exception):
    """The text was cut off where a parser needs more of it; text that was not emitted by then is dropped."""


class Tags:
    """Texts that end a stretch of plain text. None is a prefix of another."""

    def __init__(self, *tags: str) -> None:
        self.tags = tuple(dict.fromkeys(tag for tag in tags if tag))
        self.longest = max(map(len, self.tags), default=0)
        self._firsts = "".join({tag[0] for tag in self.tags})
        self.pattern = re.compile("|".join(re.escape(tag) for tag in self.tags) if self.tags else r"(?!)")

    def partial_length(self, text: str, start: int) -> int:
        """Return how many characters at the end of `text[start:]` may be the beginning of a tag."""
        at = max(start, len(text) - self.longest + 1)
        tail = text[at:]
        for first in self._firsts:
            if first in tail:
                break
        else:
            return 0
        for i in range(len(tail)):
            if tail[i] in self._firsts:
                end = tail[i:]
                for tag in self.tags:
                    if tag.startswith(end):
                        return len(end)
        return 0


class Reader:
    """The text that arrived and was not read yet, and the pieces found so far."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self.text = ""
        self.at = 0
        self.calls = 0
        """Number of calls that were begun."""
        self.out: list[Piece] = []
        self._ended = False
        self._cut = False
        self._marks: list[int] = []
        self._new_id = new_id

    # text in

    def add(self, text: str) -> None:
        keep = self._marks[0] if self._marks else self.at
        if keep:
            self.text = self.text[keep:]
            self.at -= keep
            self._marks = [mark - keep for mark in self._marks]
        self.text += text

    def end(self, cut: bool = False) -> None:
        """Mark the end of the text; `cut`: a limit ended it, so an incomplete part is not content."""
        self._ended = True
        self._cut = cut

    @property
    def held(self) -> int:
        """Characters that are kept: not read, or read on trial."""
        return len(self.text) - (self._marks[0] if self._marks else self.at)

    def wait_for_more(self) -> Reading[bool]:
        """Wait for more text; False at the end. Raises TextCut."""
        if not self._ended:
            yield
        if self._cut:
            raise TextCut
        return not self._ended

    def at_end(self) -> Reading[bool]:
        """Return True if everything was read and the text has ended."""
        while self.at >= len(self.text):
            if not (yield from self.wait_for_more()):
                return True
        return False

    def drop(self) -> None:
        """Drop the text that was not emitted."""
        self.at = len(self.text)
        self._marks.clear()

    # trial reading: from `mark` on nothing may be emitted before `accept` or `reject`

    def mark(self) -> None:
        self._marks.append(self.at)

    def accept(self) -> None:
        self._marks.pop()

    def reject(self) -> None:
        """Go back to the mark."""
        self.at = self._marks.pop()

    def read(self) -> str:
        """Return the text taken since the mark."""
        return self.text[self._marks[-1] : self.at]

    # peeking and taking

    def peek(self, *literals: str) -> Reading[str | None]:
        """Return the literal that comes next, if any; nothing is taken. Longer literals precede their prefixes."""
        while True:
            left = len(self.text) - self.at
            rest = None
            for literal in literals:
                if left >= len(literal):
                    if self.text.startswith(literal, self.at):
                        return literal
                else:
                    if rest is None:
                        rest = self.text[self.at :]
                    if literal.startswith(rest):
                        break
            else:
                return None
            if not (yield from self.wait_for_more()):
                for literal in literals:
                    if literal and self.text.startswith(literal, self.at):
                        return literal
                return None

    def take(self, *literals: str) -> Reading[str | None]:
        """Like `peek`, and take it."""
        found = yield from self.peek(*literals)
        if found is not None:
            self.at += len(found)
        return found

    def char(self) -> Reading[str]:
        """Return the next character without taking it; "" at the end."""
        while self.at >= len(self.text):
            if not (yield from self.wait_for_more()):
                return ""
        return self.text[self.at]

    def space(self, limit: int = MAX_SPACE) -> Reading[str]:
        """Take whitespace, at most `limit` characters."""
        taken = ""
        while True:
            match = _SPACE.match(self.text, self.at, self.at + limit - len(taken))
            assert match is not None
            taken += match[0]
            self.at = match.end()
            if len(taken) >= limit or self.at < len(self.text) or not (yield from self.wait_for_more()):
                return taken

    def until(self, tags: Tags, show: Callable[[str], None]) -> Reading[str | None]:
        """Emit the text up to the first of the tags and take that tag; None: the text ended without one."""
        search = tags.pattern.search
        while True:
            match = search(self.text, self.at)
            if match is not None:
                if match.start() > self.at:
                    show(self.text[self.at : match.start()])
                self.at = match.end()
                return match[0]
            stop = len(self.text) - tags.partial_length(self.text, self.at)
            if stop > self.at:
                show(self.text[self.at : stop])
                self.at = stop
            if not (yield from self.wait_for_more()):
                if self.at < len(self.text):
                    show(self.text[self.at :])
                    self.at = len(self.text)
                return None

    def word(self, tags: Tags, limit: int) -> Reading[tuple[str, str] | None]:
        """Take at most `limit` characters and the tag behind them; None (nothing taken) if no tag is that close."""
        while True:
            match = tags.pattern.search(self.text, self.at, self.at + limit + tags.longest)
            if match is not None:
                if match.start() - self.at > limit:
                    return None
                word = self.text[self.at : match.start()]
                self.at = match.end()
                return word, match[0]
            if len(self.text) - self.at >= limit + tags.longest or not (yield from self.wait_for_more()):
                return None

    # pieces out

    def content(self, text: str) -> None:
        if text:
            self.out.append(Content(text))

    def reasoning(self, text: str) -> None:
        if text:
            self.out.append(Reasoning(text))

    def call(self, name: str, id: str | None = None) -> None:
        """Begin a call."""
        self.out.append(ToolCall(self.calls, "", name, id or self._new_id()))
        self.calls += 1

    def arguments(self, text: str) -> None:
        """Add to the last call's arguments."""
        if text:
            self.out.append(ToolCall(self.calls - 1, text))

    def rest(self) -> Reading[None]:
        """Emit all remaining text as content."""
        while True:
            if self.at < len(self.text):
                self.content(self.text[self.at :])
                self.at = len(self.text)
            if not (yield from self.wait_for_more()):
                if self.at < len(self.text):
                    self.content(self.text[self.at :])
                    self.at = len(self.text)
                return


class ReadingParser:
    """A `Parser` that runs a reader; text that the reader leaves is content."""

    def __init__(self, read: Callable[[Reader], Reading[None]], new_id: Callable[[], str], before: str = "") -> None:
        """`before`: text of the prompt that belongs to the answer."""
        self._reader = Reader(new_id)
        self._run: Reading[None] | None = self._whole(read)
        self._before = before
        next(self._run)

    def _whole(self, read: Callable[[Reader], Reading[None]]) -> Reading[None]:
        yield
        try:
            yield from read(self._reader)
            yield from self._reader.rest()
        except TextCut:
            self._reader.drop()

    @property
    def held(self) -> int:
        """Characters that arrived and are not final yet."""
        return self._reader.held

    def push(self, text: str) -> list[Piece]:
        reader = self._reader
        if self._before:
            text, self._before = self._before + text, ""
        reader.add(text)
        return self._go()

    def finish(self, cut: bool = False) -> list[Piece]:
        first = self.push("") if self._before else []
        self._reader.end(cut)
        return first + self._go()

    def _go(self) -> list[Piece]:
        if self._run is not None:
            try:
                next(self._run)
            except StopIteration:
                self._run = None
        pieces, self._reader.out = self._reader.out, []
        return pieces if len(pieces) < 2 else _joined(pieces)


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Return pieces with neighbors of the same kind merged."""
    out: list[Piece] = []
    for _, group in groupby(pieces, _kind):
        run = list(group)
        first = run[0]
        if len(run) == 1:
            out.append(first)
        elif isinstance(first, ToolCall):
            arguments = "".join(piece.arguments for piece in run if isinstance(piece, ToolCall))
            out.append(ToolCall(first.index, arguments, first.name, first.id))
        else:
            out.append(type(first)("".join(piece.text for piece in run if not isinstance(piece, ToolCall))))
    return out


def _kind(piece: Piece) -> object:
    return piece.index if isinstance(piece, ToolCall) else type(piece)
