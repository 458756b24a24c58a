"""What an engine is given: which model, and how it is loaded and run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llamado.devices.device import Device
from llamado.devices.registry import DeviceOptions, open_device
from llamado.devices.split.placement import SplitOptions
from llamado.models.keys import FILE_ROPE, RopeOptions

if TYPE_CHECKING:
    from llamado.gguf.header import Header
    from llamado.gguf.report import Progress, Warn

Report = Callable[[str, int, int], None]
"""Hears what is going on, how much of it is done, and how much there is (0: nobody knows)."""

COMPILING = "compiling kernels"
"""What a Report says meanwhile."""

FETCHING = "fetching "
"""What a Report hears begins with this until the file is here."""


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Which model; see `llamado.gguf.sources.resolve.resolve`."""

    spec: str | None = None
    hf_repo: str | None = None
    hf_file: str | None = None

    @property
    def name(self) -> str:
        """How the API calls the model when no alias is given."""
        return self.spec or self.hf_repo or ""

    def header(self, *, progress: Progress | None = None, warn: Warn | None = None) -> Header:
        """What the model's file says of itself; of one that is not here nothing else is fetched. Raises SourceError and
        GgufError.
        """
        from llamado.gguf.sources.resolve import read_header

        return read_header(self.spec, hf_repo=self.hf_repo, hf_file=self.hf_file, progress=progress, warn=warn)


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """What may be changed of a user's wishes so that a model fits memory (llama.cpp's `--fit`)."""

    on: bool = True
    """Whether anything may; else too little memory is an error."""
    target: tuple[int, ...] = (1 << 30,)
    """Bytes that are to stay free on each worker in order, then on this machine; one: on each. Where that is not
    possible less stays free."""
    least_context: int = 4096
    """Tokens to which a context is cut, and no further."""
    batch: bool = False
    """Whether batches may become smaller, since nobody said how large they are."""
    cache: bool = False
    """Whether the K/V cache may become q8_0, since nobody said what it is."""


DRAFT_KINDS = (
    "suffix", "draft-simple", "draft-mtp", "draft-eagle3", "draft-dflash", "ngram-simple", "ngram-map-k",
    "ngram-map-k4v", "ngram-mod", "ngram-cache",
)  # fmt: skip
"""Sources of drafts."""


@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """Where drafted tokens come from (llama.cpp's `--spec-…`)."""

    kinds: tuple[str, ...] | None = None
    """Names of the sources, as `--spec-type` has them; empty: none. None: those that help most, where drafts help."""
    most: int | None = None
    """Tokens of a draft at most; None: as many as pay."""
    least: int = 0
    """Shorter drafts are not evaluated."""
    p_min: float = 0.0
    """How probable a token must be for the draft model."""
    model: ModelSource | None = None
    """The model that drafts."""
    split: SplitOptions | None = None
    """Other machines that it is on; None: it is here."""
    n_threads: int | None = None
    """None: as many as the model has."""
    n_threads_batch: int | None = None
    type_k: str = "f16"
    type_v: str = "f16"
    ngram_simple: tuple[int, int, int] = (12, 48, 1)
    """Tokens that are looked for, tokens that are drafted, and how often they must have been found."""
    ngram_map_k: tuple[int, int, int] = (12, 48, 1)
    ngram_map_k4v: tuple[int, int, int] = (12, 48, 1)
    ngram_mod: tuple[int, int, int] = (24, 48, 64)
    """Tokens that are looked for, and how many are drafted at least and at most."""
    lookup_static: str | None = None
    """Files of `ngram-cache`."""
    lookup_dynamic: str | None = None


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How a model is loaded and run: see `LoadedModel.load`, and `Engine` for what goes there."""

    n_ctx: int = 0
    """Tokens of context, shared by all slots or divided among them; 0: as many as the model was trained with."""
    beyond_training: bool = False
    """Whether there are cells for all of n_ctx where slots use less, for one who drives the forward pass directly."""
    fit: FitOptions = FitOptions()
    """What of all this may be changed for want of memory."""
    n_slots: int = 1
    """Requests that are answered at a time."""
    unified: bool = True
    """All slots share one context of n_ctx, instead of n_ctx / n_slots each."""
    n_batch: int = 2048
    """Most tokens in a step."""
    n_ubatch: int = 512
    """Most tokens in a forward pass."""
    cont_batching: bool = True
    n_threads: int | None = None
    n_threads_batch: int | None = None
    type_k: str = "f16"
    """The type of the KV cache."""
    type_v: str = "f16"
    turned: bool = True
    """Whether keys and values are turned (Hadamard) before they are quantised."""
    mmap: bool = True
    """Whether the file is mapped, instead of read into memory."""
    mlock: bool = False
    """Whether it is kept there."""
    numa: str | None = None
    """How threads are placed: distribute, isolate, numactl."""
    chat_template: str | None = None
    """In place of the file's: a template, or the name of one."""
    split: SplitOptions | None = None
    """Other machines that share the model; None: this one alone."""
    drafts: DraftOptions = DraftOptions()
    """Where probable next tokens come from, which are evaluated along; by itself only where the model is split."""
    slot_prompt_similarity: float = 0.1
    context_shift: bool = False
    """Whether a full context drops its older half instead of ending the answer."""
    cache_ram: int = 0
    """MiB of memory for prompts that no slot holds any more, at most half of what there is; -1: no limit, 0: none."""
    cache_disk: str | None = None
    """Folder for what has no room there, and for all of it when the engine ends."""
    cache_disk_size: int = 10 << 30
    """Bytes in that folder, at most."""
    ctx_checkpoints: int = 32
    """Snapshots of a sequence kept there, at most, of a model that does not remember all tokens."""
    checkpoint_min_step: int = 8192
    """Tokens between those that are taken regularly; 0: as often as a forward pass ends."""
    cache_idle_slots: bool = False
    """Whether idle slots' prompts move there whenever a request starts."""
    max_queue: int = 1024
    """Most requests that wait for a slot; more are turned away."""
    lora: tuple[tuple[str, float], ...] = ()
    """Adapters: path and scale."""
    lora_apply: bool = True
    """Whether adapters work from the start (`--lora-init-without-apply`)."""
    control: tuple[tuple[str, float], ...] = ()
    """Control vectors: path and scale."""
    control_layers: tuple[int, int] = (0, 0)
    """The first and the last layer that they work on; 0: the model's."""
    embeddings: bool = False
    """Whether texts are made into vectors, beside answers where the model can give any."""
    reranking: bool = False
    pooling: str | None = None
    """none, mean, cls, last, rank; None: the model's own."""
    embd_normalize: int = 2
    metadata: tuple[tuple[str, int | float | bool | str], ...] = ()
    """Values in place of the file's; `{arch}` in a key stands for the model's architecture."""
    rope: RopeOptions = FILE_ROPE
    """What is wanted of positions in place of what the file says."""

    @property
    def embeds(self) -> bool:
        """Whether texts are made into vectors or scores."""
        return self.embeddings or self.reranking

    @property
    def draft_kinds(self) -> tuple[str, ...]:
        """Sources of drafts by name; the model is one of them where there is one."""
        asked = self.drafts
        if asked.kinds is not None:
            return asked.kinds
        return ("suffix",) + ("draft-simple",) * (asked.model is not None) if self.split or asked.model else ()

    @property
    def max_batch(self) -> int:
        """Most tokens in a forward pass."""
        return min(self.n_batch, self.n_ubatch)

    def device(self) -> Device:
        """This machine's device, opened with these threads."""
        return open_device(
            "cpu", DeviceOptions(n_threads=self.n_threads, n_threads_batch=self.n_threads_batch, numa=self.numa)
        )

    def with_context(self, n_ctx: int) -> EngineOptions:
        """The same with cells for so many tokens, whatever the model was trained with."""
        return replace(self, n_ctx=n_ctx, beyond_training=True)


def as_share(report: Callable[[float, str], None]) -> Report:
    """A Report for one who asks how much of everything is done: fetching is half of it."""

    def said(what: str, done: int, total: int) -> None:
        share = done / total if total else 0.0
        report(share / 2 if what.startswith(FETCHING) else (1 + share) / 2, what)

    return said
