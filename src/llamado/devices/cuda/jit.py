"""The kernel compiler of a card: traces kernels, makes their machine code, caches it on disk and loads it.

The driver takes 50 ms to 1.6 s to compile a kernel, so the kernels of a graph are compiled on several threads. Cached
code depends on the card's architecture and the driver's version; see `KernelCache`. The least recently used kernels
that no program uses are unloaded beyond `KERNELS`.
"""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from llamado.devices.cuda.api import CudaError
from llamado.devices.cuda.driver import Card, Function, Module
from llamado.devices.cuda.kernel import Image, Images, simt_trace
from llamado.devices.cuda.lowerings import nvptx
from llamado.devices.device import KernelQuota, NoKernelsLeft
from llamado.devices.kernel import Kernel
from llamado.devices.kernel_cache import SHARED_SOURCES, KernelCache

log = logging.getLogger("llamado.devices")

_NAMES = (
    "__init__.py",
    "jit.py",
    "kernel.py",
    "kernels",
    "lanes.py",
    "lowerings/nvptx.py",
    "panel.py",
    "simt.py",
    "teams.py",
)
KERNEL_SOURCES = (*SHARED_SOURCES, *(f"devices/cuda/{name}" for name in _NAMES))
"""Files and folders of the package that decide what a kernel compiles to."""
KERNELS = 1024
"""Loaded kernels beyond which unused ones are unloaded; one model has about two hundred."""
THREADS = 16
"""Most threads that compile."""
_QUIET_S = 1.0
"""Seconds of compiling before a log line tells the user why the start takes long."""


class PtxImages:
    """Machine code that the driver makes of PTX."""

    stored = True

    def __init__(self, card: Card) -> None:
        self._card = card
        major, minor = card.properties.capability
        self._architecture = nvptx.architecture(10 * major + minor)

    @property
    def identity(self) -> str:
        return f"{self._card.properties.capability} {self._card.version} {self._architecture}"

    def trace(self, kernel: Kernel, parameters: Mapping[str, Any], symbol: str, threads: int) -> Image:
        stack: list[int] = []
        fields, trace = simt_trace(kernel, stack)
        text = nvptx.ptx(trace, fields, dict(parameters), symbol, threads, self._architecture)
        return Image(text.encode(), sum(stack))

    def compile(self, image: Image) -> Image:
        return image._replace(code=self._card.link(image.code))


class Variant(NamedTuple):
    """A kernel with these parameters, for blocks of `threads` with `shared_bytes` of shared memory."""

    kernel: Kernel
    parameters: Mapping[str, Any]
    threads: int
    shared_bytes: int = 0

    def key(self) -> tuple[Any, ...]:
        parameters = tuple(sorted(self.parameters.items()))
        return self.kernel.name, self.kernel.fields, parameters, self.threads, self.shared_bytes


_Missing = dict[tuple[Any, ...], Variant]
"""Kernels by their keys."""


class LoadedKernel(NamedTuple):
    """A kernel on the card."""

    function: Function
    stack_bytes: int
    module: Module


class CudaJit:
    """Compiles and loads kernels for one card, for one caller at a time."""

    def __init__(self, card: Card, images: Images, folder: Path | None = None) -> None:
        """`folder`: of the cache on disk."""
        self._card, self._images = card, images
        self.cache = KernelCache(KERNEL_SOURCES, ["cuda", images.identity], folder)
        self.compiled = 0
        self.quota: KernelQuota | None = None
        """Charged before kernels are made, or loaded from disk."""
        self._loaded: OrderedDict[tuple[Any, ...], LoadedKernel] = OrderedDict()  # the one used last at the end

    def load(self, wanted: Sequence[Variant]) -> list[LoadedKernel]:
        """Return kernels: from memory, from disk, or compiled now. Raises `NoKernelsLeft`, after as many as the quota
        allows are loaded, or `CudaError`.
        """
        keys = [variant.key() for variant in wanted]
        missing = {key: variant for key, variant in zip(keys, wanted, strict=True) if key not in self._loaded}
        allowed, refusal = self._allowed(missing)
        symbols = {key: self._symbol(variant) for key, variant in allowed.items()}
        images = self._make({symbols[key]: variant for key, variant in allowed.items()})
        for key, variant in allowed.items():
            image = images[symbols[key]]
            module = self._card.load(image.code)
            function = module.function(symbols[key], variant.threads, variant.shared_bytes)
            self._loaded[key] = LoadedKernel(function, image.stack_bytes, module)
        if refusal is not None:
            raise refusal
        for key in keys:
            self._loaded.move_to_end(key)
        return [self._loaded[key] for key in keys]

    def _allowed(self, missing: _Missing) -> tuple[_Missing, NoKernelsLeft | None]:
        """Charge the quota. Return the kernels that it allows, and its refusal of the others."""
        allowed: _Missing = {}
        for key, variant in missing.items():
            try:
                if self.quota is not None:
                    self.quota.take()
            except NoKernelsLeft as refusal:
                return allowed, refusal
            allowed[key] = variant
        return allowed, None

    def unload(self, used: Callable[[], Iterable[LoadedKernel]]) -> None:
        """Unload the least recently used kernels down to three quarters of `KERNELS`, if there are more, except those
        that `used` returns.
        """
        if len(self._loaded) <= KERNELS:
            return
        kept = {id(kernel) for kernel in used()}
        self._card.stream.synchronize()  # dropped programs may still run
        for key, kernel in list(self._loaded.items()):
            if len(self._loaded) <= KERNELS * 3 // 4:
                break
            if id(kernel) not in kept:
                del self._loaded[key]
                kernel.module.unload()

    def close(self) -> None:
        """Unload all kernels."""
        for kernel in self._loaded.values():
            kernel.module.unload()
        self._loaded.clear()

    def _symbol(self, variant: Variant) -> str:
        return self.cache.symbol(variant.kernel, variant.parameters, variant.threads)

    def _make(self, wanted: Mapping[str, Variant]) -> dict[str, Image]:
        """Return images by symbol: from disk, or compiled now and stored.

        LLVM makes PTX in this thread only: its context is shared. The driver compiles it in others meanwhile.
        """
        made: dict[str, Image] = {}
        compiling: dict[Future[Image], str] = {}
        progress = _Progress(self._card.name, len(wanted), self.cache.folder)
        with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), "kernels") as pool:
            try:
                for symbol, (kernel, parameters, threads, _) in wanted.items():
                    stored = self.cache.read(symbol) if self._images.stored else None
                    if stored is not None:
                        made[symbol] = Image.unpacked(stored)
                        continue
                    traced = self._images.trace(kernel, parameters, symbol, threads)
                    compiling[pool.submit(self._images.compile, traced)] = symbol
                    progress.log_late(len(made) + sum(future.done() for future in compiling))
                for future in as_completed(compiling):
                    symbol = compiling[future]
                    made[symbol] = self._finish(future, wanted[symbol])
                    if self._images.stored:
                        self.cache.write(symbol, made[symbol].packed())
                    progress.log_late(len(made))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return made

    def _finish(self, future: Future[Image], variant: Variant) -> Image:
        """Return a compiled image."""
        self.compiled += 1
        try:
            return future.result()
        except CudaError as error:
            name = f"kernel {variant.kernel.name} {dict(variant.parameters)}"
            raise CudaError(f"{name} did not compile: {error}", error.code) from error


class _Progress:
    """Logs once that compiling takes long."""

    def __init__(self, card: str, n: int, folder: Path) -> None:
        self._card, self._n, self._folder = card, n, folder
        self._began: float | None = time.monotonic()

    def log_late(self, done: int) -> None:
        """Log the line if it is due and kernels are left."""
        if self._began is not None and done < self._n and time.monotonic() - self._began >= _QUIET_S:
            self._began = None
            log.info(
                "%s: compiling kernels (done=%d, of=%d); later starts read them from %s", self._card, done, self._n,
                self._folder,
            )  # fmt: skip
