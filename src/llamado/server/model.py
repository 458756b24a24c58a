"""The served model, as the HTTP server uses it: engine, tokenizer, chat template, and facts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from llamado.engine.embedding.embedder import Embedding
from llamado.engine.request import Defaults, EngineSnapshot, Event, Request
from llamado.media.markers import server_marker
from llamado.media.media import Media, MediaKind
from llamado.models.hparams import Pooling
from llamado.text.grammar.source import GrammarSource, Trigger
from llamado.text.template.chat import ChatTemplate

if TYPE_CHECKING:
    from llamado.engine.topology.layout import LayoutPart, LayoutPrediction
    from llamado.engine.topology.membership import JoinedWorker
    from llamado.engine.topology.observer import Mark
    from llamado.engine.topology.view import ClusterView
    from llamado.media.chunks import Piece
    from llamado.text.grammar.compiler import Constraint


class ServedEngine(Protocol):
    """The engine of a served model. Methods may be called from any thread and return at once."""

    def submit(
        self, request: Request, emit: Callable[[Event], None], *, flush: Callable[[], None] | None = None
    ) -> int: ...

    def cancel(self, task_id: int) -> None: ...

    def snapshot(self) -> EngineSnapshot: ...

    def stalled(self) -> float: ...


class ServedCluster(Protocol):
    """The machines that a model is split across. Methods may be called from any thread."""

    def view(self) -> ClusterView:
        """Return the current state; returns at once."""

    def mark(self) -> Mark:
        """Return a value that changes with everything in the view but measurements; returns at once."""

    def predict(self, parts: Sequence[LayoutPart]) -> LayoutPrediction:
        """Predict the times of a layout; may block for long."""

    def lay_out(self, parts: Sequence[LayoutPart]) -> None:
        """Move layers; blocks for long."""

    def join(self, endpoint: str, share: float = 1.0, speeds: Sequence[float | None] = ()) -> list[JoinedWorker]:
        """Add a worker; blocks for long."""

    def drain(self, endpoint: str) -> None:
        """Remove a worker; blocks for long."""


@dataclass(frozen=True)
class LabLink:
    """A link of the latency lab, as `/lab` returns it."""

    endpoint: str
    worker: str
    """Address of the worker behind the link."""
    latency_ms: float
    jitter_ms: float
    bandwidth: float | None
    """Bits per second; None for no limit."""
    own: bool
    """The worker can be killed."""
    running: bool
    watched: bool
    """`llamado up` started the worker, and restarts it."""


class ServedLab(Protocol):
    """The latency lab: links with simulated delays, and workers to kill. Methods may be called from any thread.

    They raise a LlamadoError for an endpoint outside of the lab.
    """

    def view(self) -> Sequence[LabLink]:
        """Return the links; returns at once."""

    def link_to(self, worker: str) -> str:
        """Return the endpoint of a worker's link, to which the engine connects, or its address if it has no link."""

    def set(self, links: Mapping[str, tuple[float, float, float | None]]) -> None:
        """Set delay (ms), jitter (ms) and bandwidth (bits per second) of links by endpoint."""

    def kill(self, endpoint: str) -> None: ...

    def start(self, endpoint: str) -> None: ...


class ServedEmbedder(Protocol):
    """The embedder of a served model. Methods may be called from any thread."""

    def submit(self, texts: Sequence[Sequence[int]]) -> Future[list[Embedding]]: ...

    def snapshot(self) -> EngineSnapshot: ...


@dataclass(frozen=True, kw_only=True)
class ServedEmbeddings:
    """Embedding and reranking with a served model."""

    embedder: ServedEmbedder
    pooling: Pooling
    max_tokens: int
    """Most tokens of a text."""
    normalize: int = 2
    """Default norm of embeddings; see `engine.embedding.pooling.normalize`."""
    reranks: bool = False
    pair: Callable[[str, str], list[int]]
    """Return the tokens of a query and a document in the model's form for reranking."""


class ServedTokenizer(Protocol):
    """The tokenizer of a served model."""

    n_vocab: int
    eog: frozenset[int]
    """End-of-generation tokens."""
    bos: int | None
    eos: int | None
    add_bos: bool
    add_eos: bool
    """`add_…`: the token begins or ends prompts."""
    fim_pre: int | None
    """Fill-in-the-middle tokens; None if the vocabulary lacks them."""
    fim_suf: int | None
    fim_mid: int | None
    fim_rep: int | None
    fim_sep: int | None

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = True) -> list[int]: ...

    def decode(self, tokens: Iterable[int], *, special: bool = False) -> str: ...

    def piece(self, token: int, *, special: bool = False) -> bytes: ...

    def find(self, text: str) -> int | None: ...


@dataclass(frozen=True, kw_only=True)
class ServedMedia:
    """The media encoders of a served model."""

    prepare: Callable[[Media], list[Piece]]
    """Return the pieces of a prompt for a picture or sound; any thread. Raises MediaError."""
    rates: Mapping[MediaKind, int]
    """The kinds of media that the model takes, and the samples a second of sounds; 0 for pictures."""
    marker: str = field(default_factory=server_marker)
    """The marker of prompts with `multimodal_data`."""


class Grammars(Protocol):
    """The compiler of grammars and JSON schemas into the engine's constraints."""

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
    """Tokens that activate an activated LoRA, and their text."""


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
    """The instruction set of the kernels on this machine."""


@dataclass(frozen=True)
class ModelOrigin:
    """The files of a model and the instruction set of its kernels, for receipts."""

    model: str
    files: tuple[tuple[str, str | None], ...]
    """Name and SHA-256 of each file; None for a file that is gone."""
    instruction_set: str


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A loaded model with all that the endpoints need."""

    engine: ServedEngine
    tokenizer: ServedTokenizer
    template: ChatTemplate
    info: ModelInfo
    n_slots: int
    defaults: Defaults = field(default_factory=Defaults)
    grammars: Grammars | None = None
    """None: the model does not generate."""
    longest_token: Callable[[], int] = lambda: 0
    """Return the most characters of one token's text; 0 if unknown."""
    n_batch: int = 2048
    """Tokens of a logical batch, to which `/infill` cuts its context."""
    media: ServedMedia | None = None
    """None: the model takes text only."""
    embeddings: ServedEmbeddings | None = None
    """None: the server was started without embeddings."""
    cluster: ServedCluster | None = None
    """The machines that the model is split across; None for a model on one machine."""
    close: Callable[[float], None] = lambda timeout: None
    """Close the engine within so many seconds."""

    @property
    def media_marker(self) -> str:
        """The marker of prompts with `multimodal_data`, which `/props` shows."""
        return server_marker() if self.media is None else self.media.marker

    @property
    def media_kinds(self) -> Collection[MediaKind]:
        """The kinds of media that prompts may have."""
        return () if self.media is None else self.media.rates.keys()

    def snapshot(self) -> EngineSnapshot:
        """Return the state of the engine, with the counters and requests of the embedder added."""
        if self.embeddings is None:
            return self.engine.snapshot()
        engine, embedder = self.engine.snapshot(), self.embeddings.embedder.snapshot()
        a, b = engine.counters, embedder.counters
        return engine._replace(
            counters=a._replace(
                prompt_tokens_total=a.prompt_tokens_total + b.prompt_tokens_total,
                prompt_seconds_total=a.prompt_seconds_total + b.prompt_seconds_total,
                n_decode_total=a.n_decode_total + b.n_decode_total,
                n_busy_slots_total=a.n_busy_slots_total + b.n_busy_slots_total,
                n_tokens_max=max(a.n_tokens_max, b.n_tokens_max),
            ),
            requests_processing=engine.requests_processing + embedder.requests_processing,
            requests_deferred=engine.requests_deferred + embedder.requests_deferred,
        )
