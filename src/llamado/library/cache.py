"""Prompt caches by llama-cpp-python's names: they set size and location of the engine's prompt cache.

The engine looks up the longest common prefix itself, so a cache has no states that programs can read.
"""

from __future__ import annotations

import os
from pathlib import Path
from weakref import WeakSet

from llamado.engine.engine import Engine
from llamado.engine.loaded_model import LoadedModel

_BESIDE_DISK = 256 << 20
"""Most bytes of memory for prompts besides a cache on disk."""


class BaseLlamaCache:
    """A cache of sequences that no slot of a model holds any more; see `Llama.set_cache`."""

    def __init__(self, capacity_bytes: int = 2 << 30) -> None:
        self.capacity_bytes = capacity_bytes
        self._models: WeakSet[LoadedModel] = WeakSet()

    @property
    def cache_size(self) -> int:
        """Size in bytes, over all attached models."""
        return sum(self._size(model.engine) for model in self._models if isinstance(model.engine, Engine))

    def attach(self, model: LoadedModel) -> None:
        """Attach a model to this cache. Raises EngineError."""
        self._use(model)
        self._models.add(model)

    def detach(self, model: LoadedModel) -> None:
        """Detach a model from this cache."""
        self._models.discard(model)

    def _use(self, model: LoadedModel) -> None:
        raise NotImplementedError

    def _size(self, engine: Engine) -> int:
        raise NotImplementedError


class LlamaRAMCache(BaseLlamaCache):
    """Keeps up to `capacity_bytes` in memory."""

    def _use(self, model: LoadedModel) -> None:
        model.keep_prompts(self.capacity_bytes)

    def _size(self, engine: Engine) -> int:
        return engine.snapshot().stored_prompt_bytes


LlamaCache = LlamaRAMCache


class LlamaDiskCache(BaseLlamaCache):
    """Keeps up to `capacity_bytes` in a folder, also for later processes.

    Prompts are written when the memory beside it is full, and when the model is closed.
    """

    def __init__(self, cache_dir: str | os.PathLike[str] = ".cache/llama_cache", capacity_bytes: int = 2 << 30) -> None:
        super().__init__(capacity_bytes)
        self.cache_dir = Path(cache_dir)

    def _use(self, model: LoadedModel) -> None:
        self.cache_dir.mkdir(parents=True, exist_ok=True)
        model.keep_prompts(min(self.capacity_bytes, _BESIDE_DISK), self.cache_dir, self.capacity_bytes)

    def _size(self, engine: Engine) -> int:
        disk = engine.snapshot().disk
        return 0 if disk is None else disk.bytes
