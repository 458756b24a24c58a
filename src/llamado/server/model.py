"""What the HTTP room needs of a loaded model: an engine, a tokenizer, a chat template, facts to show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from llamado.engine.embedding.embedder import Embedding
from llamado.engine.request import Defaults, EngineSnapshot, Event, Request
from llamado.models.hparams import Pooling
from llamado.text.grammar.source import GrammarSource, Trigger
from llamado.text.template.chat import ChatTemplate

if TYPE_CHECKING:
    from llamado.engine.topology.layout import LayoutPart, LayoutPrediction
    from llamado.engine.topology.membership import JoinedWorker
    from llamado.engine.topology.observer import Mark
    from llamado.engine.topology.view import ClusterView
    from llamado.text.grammar.compiler import Constraint


class ServedEngine(Protocol):
    """The engine as seen from here; every method may be called from any thread and returns at once."""

    def submit(
        self, request: Request, emit: Callable[[Event], None], *, taken: Callable[[], None] | None = None
    ) -> int: ...

    def cancel(self, task_id: int) -> None: ...

    def snapshot(self) -> EngineSnapshot: ...

    def stalled(self) -> float: ...


class ServedCluster(Protocol):
    """The machines a model is divided among, as seen from here; every method may be called from any thread."""

    def view(self) -> ClusterView:
        """As it is now; returns at once."""

    def mark(self) -> Mark:
        """Another one once something changed that is more than figures; returns at once."""

    def predict(self, parts: Sequence[LayoutPart]) -> LayoutPrediction:
        """What a layout would take; may take long."""

    def lay_out(self, parts: Sequence[LayoutPart]) -> None:
        """Moves layers; takes long."""

    def join(self, endpoint: str, share: float = 1.0, speeds: Sequence[float | None] = ()) -> list[JoinedWorker]:
        """Takes a worker in; takes long."""

    def drain(self, endpoint: str) -> None:
        """Lets a worker go; takes long."""


class ServedLab(Protocol):
    """Links that are made slower, workers that are killed; any thread. Raises a LlamadoError for what is not of it."""

    def view(self) -> list[dict[str, object]]:
        """The links as they are; returns at once."""

    def link_to(self, worker: str) -> str:
        """The link's endpoint, by which the engine knows the worker at an address; the address where there is none."""

    def set(self, links: Mapping[str, tuple[float, float, float | None]]) -> None:
        """Milliseconds of delay and jitter, and bits per second, by endpoint."""

    def kill(self, endpoint: str) -> None: ...

    def start(self, endpoint: str) -> None: ...


class ServedEmbedder(Protocol):
    """What makes vectors of texts, as seen from here; every method may be called from any thread."""

    def submit(self, texts: Sequence[Sequence[int]]) -> Future[list[Embedding]]: ...

    def snapshot(self) -> EngineSnapshot: ...


@dataclass(frozen=True, kw_only=True)
class ServedEmbeddings:
    """How a server embeds and ranks."""

    embedder: ServedEmbedder
    pooling: Pooling
    max_tokens: int
    """The most tokens of a text."""
    normalize: int = 2
    """The norm that embeddings get where a request does not say; see `engine.pooling.normalize`."""
    reranks: bool = False
    pair: Callable[[str, str], list[int]]
    """The tokens of a query and a document, as the model wants them to score the document."""


class ServedTokenizer(Protocol):
    """Text to tokens and back."""

    n_vocab: int
    eog: frozenset[int]
    """The tokens that end an answer."""
    bos: int | None
    add_bos: bool
    fim_pre: int | None
    """The tokens around a hole in code to fill in; None where the model has none."""
    fim_suf: int | None
    fim_mid: int | None
    fim_rep: int | None
    fim_sep: int | None

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = True) -> list[int]: ...

    def decode(self, tokens: Iterable[int], *, special: bool = False) -> str: ...

    def piece(self, token: int, *, special: bool = False) -> bytes: ...


class Grammars(Protocol):
    """Grammars and schemas as text → what the engine can hold an answer to."""

    def compile(
        self, source: GrammarSource, *, triggers: Sequence[Trigger] = (), generation_prompt: str = ""
    ) -> Constraint: ...

    def with_reasoning(
        self, inner: Constraint | None, *, start: str, end: str, open: bool, budget: int = -1, message: str = ""
    ) -> Constraint: ...


class AdapterInfo(NamedTuple):
    """Facts about a LoRA adapter for `/lora-adapters`."""

    path: str
    task_name: str = ""
    prompt_prefix: str = ""
    invocation: tuple[int, ...] = ()
    invocation_text: str = ""
    """Of an activated LoRA: the tokens with which it begins to work, and their text."""


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
    adapters: tuple[AdapterInfo, ...] = ()
    instruction_set: str = ""
    """Which kernels this machine's processor runs."""


@dataclass(frozen=True)
class ModelOrigin:
    """What a model was loaded from."""

    model: str
    files: tuple[tuple[str, str | None], ...]
    """Name and SHA-256 of each file; None for one that is gone meanwhile."""
    instruction_set: str


@dataclass(frozen=True, kw_only=True)
class Served:
    """A loaded model behind the endpoints."""

    engine: ServedEngine
    tokenizer: ServedTokenizer
    template: ChatTemplate
    info: ModelInfo
    n_slots: int
    defaults: Defaults = field(default_factory=Defaults)
    grammars: Grammars | None = None
    """None: the model does not generate."""
    longest_token: Callable[[], int] = lambda: 0
    """The most characters of text that one token stands for; 0: nobody knows."""
    n_batch: int = 2048
    """Tokens of a logical batch; what `/infill` cuts its context to."""
    embeddings: ServedEmbeddings | None = None
    """None: the server was not started for embeddings."""
    cluster: ServedCluster | None = None
    """The machines it is divided among; None where it is not."""
    close: Callable[[float], None] = lambda timeout: None
    """Ends the engine; the argument is the most seconds it may take."""

    def snapshot(self) -> EngineSnapshot:
        """The state of all that computes here."""
        if self.embeddings is None:
            return self.engine.snapshot()
        ours, theirs = self.engine.snapshot(), self.embeddings.embedder.snapshot()
        a, b = ours.counters, theirs.counters
        return ours._replace(
            counters=a._replace(
                prompt_tokens_total=a.prompt_tokens_total + b.prompt_tokens_total,
                prompt_seconds_total=a.prompt_seconds_total + b.prompt_seconds_total,
                n_decode_total=a.n_decode_total + b.n_decode_total,
                n_busy_slots_total=a.n_busy_slots_total + b.n_busy_slots_total,
                n_tokens_max=max(a.n_tokens_max, b.n_tokens_max),
            ),
            requests_processing=ours.requests_processing + theirs.requests_processing,
            requests_deferred=ours.requests_deferred + theirs.requests_deferred,
        )
