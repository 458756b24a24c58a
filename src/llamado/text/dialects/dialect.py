"""Types that all dialects share: conversations, prepared prompts, and pieces of an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self

from llamado.text.grammar.source import GrammarSource, Trigger


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's thoughts."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call, or more of it: the first piece of call `index` has its name and id, and all add to its arguments."""

    index: int
    arguments: str
    """JSON text."""
    name: str | None = None
    id: str | None = None


Piece = Content | Reasoning | ToolCall


class Parser(Protocol):
    """Takes an answer's text as it arrives and returns its pieces."""

    def push(self, text: str) -> list[Piece]:
        """Take more text; return the pieces that are final now."""
        ...

    def finish(self, cut: bool = False) -> list[Piece]:
        """End the answer; return the text that was held back. `cut`: a limit ended it, so a broken call is not
        content.
        """
        ...


@dataclass(frozen=True, slots=True)
class ContinuedMessage:
    """A message of the assistant that the answer continues."""

    content: str | None = None
    """None: it has only thoughts so far."""
    reasoning: str = ""

    @classmethod
    def of(cls, message: Mapping[str, Any], part: str | None = None) -> Self:
        """Return the part of a message that is continued: its `part` content or reasoning_content (None: its
        last one).
        """
        content, reasoning = message.get("content") or "", message.get("reasoning_content") or ""
        if part == "reasoning_content" or (part is None and reasoning and not content):
            return cls(None, reasoning)
        if not isinstance(content, str):
            content = "\n\n".join(item["text"] for item in content if item.get("type") == "text")
        return cls(content, reasoning)


StrictTools = Mapping[str, Mapping[str, Any] | None]
"""Tools whose schemas are enforced, by name: the schema, or None for the one that the model is shown."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A conversation and the options of its answer (with OpenAI's names)."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    strict_tools: StrictTools | None = None
    """The tools that are refused if their schemas cannot be enforced; None: those with `strict` set."""
    tool_choice: str = "auto"
    """auto, none, required, or a tool's name after `function:`."""
    parallel_tool_calls: bool | None = None
    """None: yes, if the template supports several calls in one turn."""
    json_schema: Mapping[str, Any] | bool | None = None
    """The schema of the content."""
    grammar: GrammarSource | None = None
    """A grammar of the client for the content."""
    add_generation_prompt: bool = True
    continued: ContinuedMessage | None = None
    """The beginning of the answer as given by the client; it is appended to the prompt."""
    reasoning_format: Literal["none", "auto", "deepseek", "deepseek-legacy"] = "auto"
    enable_thinking: bool | None = None
    """None: the template's default."""
    parse_tool_calls: bool = True
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template (`chat_template_kwargs`)."""


@dataclass(frozen=True, kw_only=True)
class PreparedChat:
    """A prepared conversation: its prompt, the constraint of the answer, and its parser."""

    prompt: str
    """Ends with the continued text."""
    dialect: str
    """llama-server's `chat_format`: peg-native for most families."""
    family: str = "Content-only"
    """llamado's name of the family, e.g. "Hermes 2 Pro"."""
    parser: Callable[[], Parser]
    """Creates a new parser for each answer."""
    generation_prompt: str = ""
    """The end of the prompt that opens the answer, including continued text; the parser takes it into account."""
    given: tuple[Content | Reasoning, ...] = ()
    """The continued text, as the beginning of the answer."""
    grammar: GrammarSource | None = None
    """Grammar of the generated text: it covers neither `generation_prompt` nor thoughts."""
    triggers: tuple[Trigger, ...] = ()
    """Not empty: the grammar is lazy."""
    strict: bool = True
    """True if no answer may be generated when the grammar cannot be compiled."""
    loosened: tuple[str, ...] = ()
    """The parts of the tools' schemas that are not enforced: each tool's name, the location and the keyword."""
    stops: tuple[str, ...] = ()
    preserved: tuple[str, ...] = ()
    """Special tokens, as text, that the parser must receive."""
    thinking: tuple[str, str] | None = None
    """The tags around thoughts, if the model can think."""
    thinking_open: bool = False
    """True if the prompt has opened the thoughts."""
