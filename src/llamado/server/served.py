"""What the HTTP room needs of a loaded model: an engine, a tokenizer, a chat template, facts to show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from llamado.engine.request import Defaults, EngineSnapshot, Event, Request


class Engine(Protocol):
    """The engine as seen from here; every method may be called from any thread and returns at once."""

    def submit(self, request: Request, emit: Callable[[Event], None]) -> int: ...

    def cancel(self, task_id: int) -> None: ...

    def snapshot(self) -> EngineSnapshot: ...


class Tokenizer(Protocol):
    """Text to tokens and back."""

    n_vocab: int

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = True) -> list[int]: ...

    def decode(self, tokens: Iterable[int], *, special: bool = False) -> str: ...

    def piece(self, token: int, *, special: bool = False) -> bytes: ...


class Template(Protocol):
    """Messages to a prompt."""

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **extra: Any
    ) -> str: ...


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """Facts about the model for `/props` and `/v1/models`."""

    name: str
    path: str
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    n_ctx: int
    """Context of one slot, in tokens."""
    n_ctx_train: int
    n_vocab: int
    n_embd: int
    n_params: int
    size: int
    """Bytes of all tensors."""
    ftype: str
    vocab_type: int
    chat_template: str = ""
    chat_template_caps: Mapping[str, bool] = field(default_factory=dict)
    bos_token: str = ""
    eos_token: str = ""


@dataclass(frozen=True, kw_only=True)
class Served:
    """A loaded model behind the endpoints."""

    engine: Engine
    tokenizer: Tokenizer
    template: Template
    info: ModelInfo
    n_slots: int
    defaults: Defaults = field(default_factory=Defaults)
    close: Callable[[float], None] = lambda timeout: None
    """Ends the engine; the argument is the most seconds it may take."""
