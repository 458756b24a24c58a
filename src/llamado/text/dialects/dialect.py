"""What all dialects share: what a chat asks for, how its prompt and answer are treated, and pieces of an answer."""

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
    """A tool call, or more of it: the first piece of call `index` has its name and id, all add to its arguments."""

    index: int
    arguments: str
    """JSON text."""
    name: str | None = None
    id: str | None = None


Piece = Content | Reasoning | ToolCall


class Parser(Protocol):
    """Takes an answer's text as it comes and gives its pieces."""

    def push(self, text: str) -> list[Piece]:
        """More text; returns what is certain now."""
        ...

    def finish(self, cut: bool = False) -> list[Piece]:
        """The answer is over; returns what was held back. `cut`: a limit ended it, so a broken call is no content."""
        ...


@dataclass(frozen=True, slots=True)
class Continued:
    """A message of the assistant that the answer goes on with."""

    content: str | None = None
    """None: it has not got beyond its thoughts."""
    reasoning: str = ""

    @classmethod
    def of(cls, message: Mapping[str, Any], part: str | None = None) -> Self:
        """What goes on of a message: its `part` content or reasoning_content (None: the last that it has)."""
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
    """A conversation and what is wanted of the answer (OpenAI's names)."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    strict_tools: StrictTools | None = None
    """The tools that are refused if their schemas cannot be enforced; None: those that say `strict`."""
    tool_choice: str = "auto"
    """auto, none, required, or a tool's name behind `function:`."""
    parallel_tool_calls: bool | None = None
    """None: where the template can show several calls of one turn."""
    json_schema: Mapping[str, Any] | bool | None = None
    """What the content must be an instance of."""
    grammar: GrammarSource | None = None
    """A grammar of the client's own for the content."""
    add_generation_prompt: bool = True
    continued: Continued | None = None
    """The beginning of the answer as the client wants it; it is put behind the prompt."""
    reasoning_format: Literal["none", "auto", "deepseek", "deepseek-legacy"] = "auto"
    enable_thinking: bool | None = None
    """None: as the template does."""
    parse_tool_calls: bool = True
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template (`chat_template_kwargs`)."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A conversation made ready: its prompt, what limits the answer, and how the answer is read."""

    prompt: str
    """Ends with what is continued."""
    dialect: str
    """llama-server's `chat_format`: peg-native for most families."""
    family: str = "Content-only"
    """Our name of the family, e.g. "Hermes 2 Pro"."""
    parser: Callable[[], Parser]
    """A fresh parser for each answer."""
    generation_prompt: str = ""
    """The end of the prompt that opens the answer, what is continued included; the parser knows of it."""
    given: tuple[Content | Reasoning, ...] = ()
    """What is continued, as the beginning of the answer."""
    grammar: GrammarSource | None = None
    """Of what is generated: it does not cover `generation_prompt`, nor thoughts."""
    triggers: tuple[Trigger, ...] = ()
    """Not empty: the grammar is lazy."""
    strict: bool = True
    """Whether an answer must not be generated without the grammar, should it be impossible to compile."""
    loosened: tuple[str, ...] = ()
    """What is not enforced of the tools' schemas: each tool's name, the place and the keyword."""
    stops: tuple[str, ...] = ()
    preserved: tuple[str, ...] = ()
    """Special tokens, as text, that the parser must see."""
    thinking: tuple[str, str] | None = None
    """The tags around thoughts, where the model can think."""
    thinking_open: bool = False
    """Whether the prompt has opened the thoughts."""
