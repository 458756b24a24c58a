"""A family of models: how its template is recognized, and the format of its answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from llamado.text.dialects.calls import Calls, Tools
from llamado.text.dialects.reading import Reader, Reading
from llamado.text.dialects.thinking import ThinkingTags

Message = Mapping[str, Any]


class ReadsAnswer(Protocol):
    """A family's own reader of a whole answer."""

    def __call__(self, reader: Reader, tools: Tools, format: str) -> Reading[None]: ...


@dataclass(frozen=True, kw_only=True)
class Family:
    """The format of one family's answers."""

    name: str
    matches: Callable[[str], bool]
    """Returns True if a template, given by its source, belongs to the family."""
    calls: Calls | None = None
    thinking: ThinkingTags | None = None
    """Tags around thoughts; None: found in the template."""
    adjust: Callable[[Sequence[Message]], Sequence[Message]] | None = None
    """Converts messages to the form that the template needs."""
    content: tuple[str, str] | None = None
    """Tags around content."""
    reads: ReadsAnswer | None = None
    """Reads answers that are not simply thoughts, content and calls in this order."""
    starts_answer: str = ""
    """The text that opens the answer in the prompt, if `reads` begins after it."""
    calls_prefix: str = ""
    """Lark expression of text that may stand between thoughts and calls."""
    content_prefix: str = ""
    """Lark expression of the text before content that a schema constrains."""
    missing_opening: tuple[str, str] | None = None
    """The end of a prompt whose template fails to open the answer, and the text that opens it."""
    before_content: str = ""
    """The text between thoughts and content in an answer that is continued."""
    before_answer: str = ""
    """The text that `reads` reads first if content is continued."""
    calls_end_thoughts: bool = False
    """True if the models call tools without closing their thoughts."""
    preserved: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    dialect: str = "peg-native"
    """llama-server's `chat_format`."""


def all_of(*texts: str) -> Callable[[str], bool]:
    return lambda source: all(text in source for text in texts)


def any_of(*texts: str) -> Callable[[str], bool]:
    return lambda source: any(text in source for text in texts)
