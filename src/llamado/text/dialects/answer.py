"""Read one answer of a chat: content, thoughts and tool calls, in pieces and as a whole."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llamado.text.dialects.dialect import Content, Parser, Piece, Reasoning, ToolCall

_LETTERS = string.digits + string.ascii_letters


def random_id(n: int = 32) -> str:
    """Return random letters and digits that cannot be guessed."""
    return "".join(secrets.choice(_LETTERS) for _ in range(n))


@dataclass(slots=True)
class PartialCall:
    """The part of a tool call that was read so far."""

    id: str
    name: str
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class CallPart:
    """A piece of a tool call; `head` is set on the first one."""

    index: int
    call: PartialCall
    head: bool
    arguments: str


Part = Content | Reasoning | CallPart


class AnswerReader:
    """Feeds one answer's text to its parser and collects the pieces."""

    def __init__(self, parser: Parser, given: Sequence[Content | Reasoning] = ()) -> None:
        """`given`: the beginning of the answer that the client supplied; it is part of the whole answer."""
        self._parser = parser
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self.calls: list[PartialCall] = []
        self._by_index: dict[int, int] = {}
        self._cut = False
        self._take(given)

    def push(self, text: str) -> list[Part]:
        """Take more text; return the pieces that are final now."""
        return self._take(self._parser.push(text)) if text else []

    def finish(self, cut: bool = False) -> list[Part]:
        """End the answer; return the text that was held back. `cut`: a limit ended it, so a broken call is not
        content.
        """
        self._cut = cut
        return self._take(self._parser.finish(cut))

    @property
    def complete_calls(self) -> list[PartialCall]:
        """The calls, without the last one if a limit ended the answer in its arguments."""
        if self._cut and self.calls and not _is_object(self.calls[-1].arguments):
            return self.calls[:-1]
        return self.calls

    @property
    def content(self) -> str:
        return "".join(self._texts)

    @property
    def reasoning(self) -> str:
        return "".join(self._thoughts)

    def message(self) -> dict[str, Any]:
        """Return the whole answer as a message of OpenAI's chat API."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self._thoughts:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": c.name, "arguments": c.arguments}, "id": c.id}
                for c in self.calls
            ]
        return message

    def _take(self, pieces: Sequence[Piece]) -> list[Part]:
        parts: list[Part] = []
        for piece in pieces:
            if isinstance(piece, ToolCall):
                parts.append(self._call(piece))
            elif piece.text:
                (self._thoughts if isinstance(piece, Reasoning) else self._texts).append(piece.text)
                parts.append(piece)
        return parts

    def _call(self, piece: ToolCall) -> CallPart:
        at = self._by_index.get(piece.index)
        head = at is None
        if at is None:
            at = self._by_index[piece.index] = len(self.calls)
            self.calls.append(PartialCall(piece.id or random_id(), piece.name or ""))
        call = self.calls[at]
        call.arguments += piece.arguments
        return CallPart(at, call, head, piece.arguments)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def delta(part: Part) -> dict[str, Any]:
    """Return a piece of an answer as a delta of OpenAI's chat streams."""
    if isinstance(part, Content):
        return {"content": part.text}
    if isinstance(part, Reasoning):
        return {"reasoning_content": part.text}
    call: dict[str, Any] = {"index": part.index}
    function: dict[str, Any] = {}
    if part.head:
        call |= {"id": part.call.id, "type": "function"}
        function["name"] = part.call.name
    if part.arguments or part.head:
        function["arguments"] = part.arguments
    return {"tool_calls": [{**call, "function": function}]}
