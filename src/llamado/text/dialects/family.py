"""A family of models: how its template is recognised and how its answers are written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from llamado.text.dialects.calls import Calls, Tools
from llamado.text.dialects.reading import Reader, Reading
from llamado.text.dialects.thinking import Thinking

Message = Mapping[str, Any]


class Reads(Protocol):
    """A family's own way of reading a whole answer."""

    def __call__(self, reader: Reader, tools: Tools, format: str) -> Reading[None]: ...


@dataclass(frozen=True, kw_only=True)
class Family:
    """How one family's answers are written."""

    name: str
    knows: Callable[[str], bool]
    """Whether a template, by its source, belongs to the family."""
    calls: Calls | None = None
    thinking: Thinking | None = None
    """Tags around thoughts; None: found in the template."""
    adjust: Callable[[Sequence[Message]], Sequence[Message]] | None = None
    """Messages as the template wants them."""
    content: tuple[str, str] | None = None
    """Tags around content."""
    reads: Reads | None = None
    """Reads answers that are not thoughts, content and calls in a row."""
    starts_answer: str = ""
    """What opens the answer in the prompt, where `reads` begins behind it."""
    calls_prefix: str = ""
    """Lark expression of what may stand between thoughts and calls."""
    content_prefix: str = ""
    """Lark expression of what stands before content that a schema rules."""
    opens: tuple[str, str] | None = None
    """What a prompt may end with where the template forgets to open the answer, and what opens it."""
    before_content: str = ""
    """What stands between thoughts and content in an answer that is continued."""
    before_answer: str = ""
    """What `reads` is to read first where content is continued."""
    calls_end_thoughts: bool = False
    """Whether the models call without having closed their thoughts."""
    preserved: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    dialect: str = "peg-native"
    """llama-server's `chat_format`."""


def all_of(*texts: str) -> Callable[[str], bool]:
    return lambda source: all(text in source for text in texts)


def any_of(*texts: str) -> Callable[[str], bool]:
    return lambda source: any(text in source for text in texts)
