"""What an engine is given: which model, and how it is loaded and run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llamado.devices.split.placement import SplitOptions


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


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How the model is loaded and run."""

    n_ctx: int = 0
    """0: the model's own."""
    n_slots: int = 4
    unified: bool = True
    """All slots share one context of n_ctx, instead of n_ctx / n_slots each."""
    n_batch: int = 2048
    n_ubatch: int = 512
    cont_batching: bool = True
    n_threads: int | None = None
    n_threads_batch: int | None = None
    type_k: str = "f16"
    type_v: str = "f16"
    mmap: bool = True
    mlock: bool = False
    numa: str | None = None
    chat_template: str | None = None
    split: SplitOptions | None = None
    """Other machines that share the model; None: this one alone."""
    drafting: bool | None = None
    """Whether probable next tokens are evaluated along; None: where the model is split."""
    slot_prompt_similarity: float = 0.1
    context_shift: bool = False
    """Whether a full context drops its older half instead of ending the answer."""
    cache_ram: int = 8192
    """MiB of memory for prompts that no slot holds any more; -1: no limit, 0: none."""
    cache_idle_slots: bool = False
    """Whether idle slots' prompts move there whenever a request starts."""
    max_queue: int = 1024
    """Most requests that wait for a slot; more are turned away."""
    lora: tuple[tuple[str, float], ...] = ()
    """Adapters: path and scale."""
    lora_apply: bool = True
    """Whether adapters work from the start (`--lora-init-without-apply`)."""
    embeddings: bool = False
    reranking: bool = False
    pooling: str | None = None
    """none, mean, cls, last, rank; None: the model's own."""
    embd_normalize: int = 2
    metadata: tuple[tuple[str, int | float | bool | str], ...] = ()
    """Values in place of the file's; `{arch}` in a key stands for the model's architecture."""

    def with_context(self, n_ctx: int) -> EngineOptions:
        """The same with another context size."""
        return replace(self, n_ctx=n_ctx)
