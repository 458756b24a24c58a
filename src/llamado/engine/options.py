"""Options of an engine: the model, and how it is loaded and run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from llamado.devices.device import Device
from llamado.devices.limits import cores
from llamado.devices.registry import DeviceOptions, open_device
from llamado.devices.split.placement import SplitOptions
from llamado.models.keys import FILE_ROPE, RopeOptions

if TYPE_CHECKING:
    from llamado.gguf.header import Header
    from llamado.gguf.report import Progress, Warn

Report = Callable[[str, int, int], None]
"""Progress callback: called with the present activity, the amount done, and the total (0: unknown)."""

COMPILING = "compiling kernels"
"""Activity while kernels are compiled."""

FETCHING = "fetching "
"""Prefix of the activity until the file is here."""


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """The source of a model; see `llamado.gguf.sources.resolve.resolve`."""

    spec: str | None = None
    hf_repo: str | None = None
    hf_file: str | None = None

    @property
    def name(self) -> str:
        """The model's name in the API without an alias."""
        return self.spec or self.hf_repo or ""

    def header(self, *, progress: Progress | None = None, warn: Warn | None = None) -> Header:
        """Return the header of the model's file; nothing else of a remote file is fetched. Raises SourceError and
        GgufError.
        """
        from llamado.gguf.sources.resolve import read_header

        return read_header(self.spec, hf_repo=self.hf_repo, hf_file=self.hf_file, progress=progress, warn=warn)


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """Options that may be changed so that a model fits memory (llama.cpp's `--fit`)."""

    on: bool = True
    """True if anything may be changed; otherwise too little memory is an error."""
    target: tuple[int, ...] = (1 << 30,)
    """Bytes to leave free on each worker in order, then on each accelerator and for the CPU; a single value is for
    each. Less stays free if that is impossible.
    """
    least_context: int = 4096
    """Least tokens that a context is reduced to."""
    batch: bool = False
    """True if batches may become smaller, because the user did not set them."""
    cache: bool = False
    """True if the K/V cache may become q8_0, because the user did not set its type."""


DRAFT_KINDS = (
    "suffix", "draft-simple", "draft-mtp", "draft-eagle3", "draft-dflash", "ngram-simple", "ngram-map-k",
    "ngram-map-k4v", "ngram-mod", "ngram-cache",
)  # fmt: skip
"""Names of draft sources."""


@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """Sources of draft tokens (llama.cpp's `--spec-…`)."""

    kinds: tuple[str, ...] | None = None
    """Names of the sources, as in `--spec-type`; empty: none. None: the most useful ones, if drafts help."""
    most: int | None = None
    """Most tokens of a draft; None: as many as pay."""
    least: int = 0
    """Shorter drafts are not evaluated."""
    p_min: float = 0.0
    """Least probability of a token in the draft model."""
    model: ModelSource | None = None
    """The draft model."""
    split: SplitOptions | None = None
    """Other devices for the draft model; None: it runs on the CPU."""
    n_threads: int | None = None
    """None: like the target model."""
    n_threads_batch: int | None = None
    type_k: str = "f16"
    type_v: str = "f16"
    lookup_static: str | None = None
    """Files of `ngram-cache`."""
    lookup_dynamic: str | None = None


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions:
    """Options of slots, batches and the queue."""

    n_ctx: int = 0
    """Tokens of context, shared by all slots or divided among them; 0: as many as the model was trained with."""
    n_slots: int = 1
    """Requests that are answered at a time."""
    unified: bool = True
    """All slots share one context of n_ctx, instead of n_ctx / n_slots each."""
    n_batch: int = 2048
    """Most tokens in a step."""
    prefill_chunk: int = 256
    """Most tokens in a step while some slot is generating; fewer if a step of that many would take longer than
    STEP_SECONDS, so that a long prompt delays the others' tokens little.
    """
    cont_batching: bool = True
    """False: prompts wait until no slot is generating."""
    slot_prompt_similarity: float = 0.1
    """Least share of a prompt that a slot's cells must have in common with it, to be chosen for that."""
    context_shift: bool = False
    """True if an answer that fills the context drops its older half and continues (see Request.n_keep), instead of
    ending.
    """
    max_queue: int = 1024
    """Most requests that wait for a slot; more are rejected."""

    @property
    def n_ctx_slot(self) -> int:
        """Tokens of one slot's context; 0: as many as the memory has."""
        return self.n_ctx if self.unified else self.n_ctx // self.n_slots


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """Options of the prompt cache, and of the checkpoints in models that do not keep all tokens."""

    cache_ram: int = 0
    """MiB of the prompt cache; -1: no limit, 0: none. A loaded model uses at most half of the memory."""
    cache_disk: str | None = None
    """Folder of the prompt cache on disk: for evicted sequences, and for all of them when the engine ends."""
    cache_disk_size: int = 10 << 30
    """Most bytes in that folder."""
    cache_idle_slots: Literal["keep", "clear"] | None = None
    """Treatment of idle slots when a request starts: their sequences are copied to the prompt cache ("keep"), or moved
    there ("clear"); None: nothing before room is needed.
    """
    ctx_checkpoints: int = 32
    """Most checkpoints of a sequence, in this machine's memory; the prompt cache has them, too."""
    checkpoint_min_step: int = 8192
    """Tokens between regular checkpoints; 0: after every forward pass."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions(SchedulerOptions, CacheOptions):
    """Options of loading and running a model (`LoadedModel.load`, `Engine`).

    Each part of the engine takes the base class it needs, so one record is passed down whole.
    """

    beyond_training: bool = False
    """True to have cells for all of n_ctx even if slots use less, for callers that drive the forward pass directly."""
    fit: FitOptions = FitOptions()
    """Options that may be changed if memory is short."""
    n_ubatch: int = 512
    """Most tokens in a forward pass."""
    n_threads: int | None = None
    n_threads_batch: int | None = None
    type_k: str = "f16"
    """The type of the KV cache."""
    type_v: str = "f16"
    rotated: bool = True
    """True to rotate keys and values (Hadamard) before they are quantized."""
    mmap: bool = True
    """True to map the file instead of reading it into memory."""
    mlock: bool = False
    """True to lock the weights in RAM."""
    numa: str | None = None
    """Thread pinning on NUMA machines: distribute, isolate, numactl."""
    mmproj: str | None = None
    """The projector file with the encoders of pictures and sounds, or a name of one as for a model."""
    mmproj_offload: bool = True
    """True to encode on an accelerator that the model may use, if it has the operations."""
    mmproj_device: str = ""
    """Name of the accelerator that encodes; empty: the first one, "none": the CPU."""
    mmproj_auto: bool = False
    """True to use the projector that comes with the model if there is no `mmproj`; otherwise prompts have text only."""
    image_min_tokens: int = 0
    """Least and most tokens of a picture, in models whose pictures differ in size; 0: as the model has it."""
    image_max_tokens: int = 0
    chat_template: str | None = None
    """A template, or the name of one, in place of the file's."""
    split: SplitOptions | None = None
    """Other devices that share the model; None: only the CPU of this machine."""
    drafts: DraftOptions = DraftOptions()
    """Sources of draft tokens; by default only if the model is split over machines."""
    lora: tuple[tuple[str, float], ...] = ()
    """Adapters: path and scale."""
    lora_apply: bool = True
    """True if adapters apply from the start (`--lora-init-without-apply`)."""
    control: tuple[tuple[str, float], ...] = ()
    """Control vectors: path and scale."""
    control_layers: tuple[int, int] = (0, 0)
    """The first and the last layer that they apply to; 0: the model's."""
    embeddings: bool = False
    """True to compute embeddings, beside answers if the model can generate."""
    reranking: bool = False
    pooling: str | None = None
    """none, mean, cls, last, rank; None: the model's own."""
    embd_normalize: int = 2
    metadata: tuple[tuple[str, int | float | bool | str], ...] = ()
    """Values in place of the file's; `{arch}` in a key stands for the model's architecture."""
    rope: RopeOptions = FILE_ROPE
    """RoPE options in place of the file's."""

    @property
    def embeds(self) -> bool:
        """True if embeddings or scores are computed."""
        return self.embeddings or self.reranking

    @property
    def draft_kinds(self) -> tuple[str, ...]:
        """Names of draft sources; a draft model is one of them."""
        asked = self.drafts
        if asked.kinds is not None:
            return asked.kinds
        return ("suffix",) + ("draft-simple",) * (asked.model is not None) if self.networked or asked.model else ()

    @property
    def networked(self) -> bool:
        """True if workers have or may get a part of the model."""
        return self.split is not None and self.split.networked

    @property
    def max_batch(self) -> int:
        """Most tokens in a forward pass."""
        return min(self.n_batch, self.n_ubatch)

    @property
    def leaves_core(self) -> bool:
        """True if the forward pass leaves a core of this machine to other threads."""
        return (self.n_threads or cores()) < cores()

    def device(self) -> Device:
        """Open the CPU device with these threads."""
        return open_device(
            "cpu", DeviceOptions(n_threads=self.n_threads, n_threads_batch=self.n_threads_batch, numa=self.numa)
        )

    def with_context(self, n_ctx: int) -> EngineOptions:
        """Return the options with cells for `n_ctx` tokens, independent of the training length."""
        return replace(self, n_ctx=n_ctx, beyond_training=True)


def as_share(report: Callable[[float, str], None]) -> Report:
    """Make a Report from a callback for the overall progress, of which fetching is half."""

    def report_share(what: str, done: int, total: int) -> None:
        share = done / total if total else 0.0
        report(share / 2 if what.startswith(FETCHING) else (1 + share) / 2, what)

    return report_share
