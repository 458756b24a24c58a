"""Memory fitting: reduce context, batches and cache of a model to the memory of its devices.

Like llama.cpp's `--fit` (common/fit.cpp), for all devices: the context is reduced first, and only if that is not
enough, batches and the type of the cache, if the user did not set them. A context of automatic size is reduced before
layers stay with the CPU that accelerators would have room for otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from llamado.devices.split.placement import (
    ALL_LAYERS,
    DeviceFigures,
    ModelSizes,
    NotEnoughMemory,
    Placement,
    SplitOptions,
    check_memory,
    mib,
)
from llamado.devices.split.rules import place, sharing
from llamado.devices.split.shares import workers
from llamado.engine.errors import EngineError
from llamado.engine.forward.options import RunnerOptions
from llamado.engine.forward.sizes import model_sizes
from llamado.engine.options import EngineOptions, FitOptions
from llamado.gguf.header import ModelFile
from llamado.gguf.types import TensorType
from llamado.models.base import Model
from llamado.models.memory import KV_TYPES, align

_STEP = 256
_BATCHES = (256, 128, 64)
"""Smaller batch sizes to try; with still smaller ones prompts take long, and these take next to no memory."""
_WINDOWS = 3
"""Windows of draft tokens in flight on several devices, behind which states are kept."""


class MemoryRequest(NamedTuple):
    """Requested memory, before it is fitted. `n_ctx`: tokens in all, 0 for as many as the model was trained with."""

    n_ctx: int
    n_slots: int
    unified: bool
    max_batch: int
    type_k: TensorType
    type_v: TensorType
    beyond_training: bool = False
    """True if there are cells for more tokens than all slots can have."""
    fit: FitOptions = FitOptions()
    n_drafted: int = 0
    """States of each sequence behind draft tokens, if layers have states."""
    rotated: bool = True
    """True to rotate keys and values before quantization."""

    @property
    def whole(self) -> bool:
        """True if layers with a window keep all tokens, too."""
        return False

    @property
    def n_streams(self) -> int:
        """Number of separate contexts."""
        return 1 if self.unified else self.n_slots

    def requested_tokens(self, n_train: int) -> int:
        """Return the requested tokens in all, for a model trained with `n_train`: `n_ctx`, or, like llama.cpp, the
        training length for each slot if it may be reduced, otherwise for all slots together.
        """
        return self.n_ctx or n_train * (self.n_streams if self.fit.on else 1)

    def shape(self, n_ctx: int) -> tuple[int, int]:
        """Return the tokens of one sequence, and the cells of the pool, for `n_ctx` tokens in all. Raises
        EngineError.
        """
        return context_size(n_ctx, self.n_slots, self.unified)

    def runner_options(self, n_cells: int, n_ctx: int = 0) -> RunnerOptions:
        """Return the options of a forward pass with so many cells. `n_ctx`: most tokens of a sequence; 0: all."""
        return RunnerOptions(
            n_cells=n_cells,
            n_ctx=n_ctx,
            n_sequences=self.n_slots,
            max_batch=self.max_batch,
            whole=self.whole,
            type_k=self.type_k,
            type_v=self.type_v,
            rotated=self.rotated,
            n_drafted=self.n_drafted,
        )


class Fit(NamedTuple):
    """The result of fitting, with remarks."""

    n_ctx_slot: int
    """Tokens of one sequence."""
    n_cells: int
    sizes: ModelSizes
    placement: Placement
    notes: tuple[str, ...]
    wanted: MemoryRequest
    """The options, with the fitted batch size and cache types."""

    @property
    def runner_options(self) -> RunnerOptions:
        """Options of the forward pass."""
        return self.wanted.runner_options(self.n_cells, self.n_ctx_slot)

    def __str__(self) -> str:
        """Describe the result and its memory."""
        sizes, wanted = self.sizes, self.wanted
        return (
            f"context of {self.n_cells} tokens, {self.n_ctx_slot} for a slot; K/V cache {wanted.type_k.name.lower()}/"
            f"{wanted.type_v.name.lower()}, {mib(sum(sizes.kv))}; weights {mib(sizes.weights)}{read_text(sizes)}; "
            f"batches of {wanted.max_batch} tokens, {mib(sizes.compute + sizes.head_compute)}"
        )


def cache_type(name: str) -> TensorType:
    """Return the type of a flag's value; raises EngineError."""
    try:
        return TensorType[name.upper()]
    except KeyError:
        known = ", ".join(type.name.lower() for type in KV_TYPES)
        raise EngineError(f"a KV cache of type {name!r} is not supported; supported are {known}") from None


def memory_request(options: EngineOptions) -> MemoryRequest:
    """Return the memory that options request. Raises EngineError."""
    return MemoryRequest(
        options.n_ctx,
        options.n_slots,
        options.unified,
        options.max_batch,
        cache_type(options.type_k),
        cache_type(options.type_v),
        options.beyond_training,
        options.fit,
        0 if not options.draft_kinds else 1 if options.split is None else _WINDOWS,
        options.rotated,
    )


def context_size(n_ctx: int, n_slots: int, unified: bool) -> tuple[int, int]:
    """Return the tokens of one slot's context, and the cells of the pool, for `n_ctx` tokens in all. Raises
    EngineError.
    """
    if n_ctx < n_slots:
        raise EngineError(f"a context of {n_ctx} tokens cannot be divided among {n_slots} slots")
    if unified:
        return n_ctx, align(n_ctx)
    return n_ctx // n_slots, n_slots * align(n_ctx // n_slots)


def sizes_for(file: ModelFile, model: Model, wanted: MemoryRequest, n_ctx: int) -> ModelSizes:
    """Return the memory of a model with a context of `n_ctx` tokens in all."""
    return model_sizes(file, model, wanted.runner_options(wanted.shape(n_ctx)[1]))


def fit(
    file: ModelFile, model: Model, wanted: MemoryRequest, figures: Sequence[DeviceFigures], split: SplitOptions | None
) -> Fit:
    """Return the context, batches, cache and placement of a model on devices of these figures.

    If memory is short, the context is reduced, then whatever else `wanted.fit` allows. Weights that are mapped from a
    file on this machine may exceed its memory, with a remark: they are read again and again. Raises NotEnoughMemory for
    everything else that does not fit, and the errors of `place`.
    """
    n_train = model.hparams.n_ctx_train
    given = requested_tokens = wanted.requested_tokens(n_train)
    if not wanted.beyond_training:
        requested_tokens = min(requested_tokens, wanted.n_slots * n_train)
    least = requested_tokens
    if wanted.fit.on:
        # a given number is the minimum for all slots together
        streams = 1 if wanted.n_ctx else wanted.n_streams
        least = min(requested_tokens, max(wanted.fit.least_context * streams, wanted.n_slots))
    short = lacking = None
    for trial in _reductions(file, model, wanted, figures, split):
        one, room, on = trial.wanted, trial.figures, trial.split
        low, high = least, requested_tokens
        if trial.is_whole and wanted.n_ctx:
            low = high
        elif trial.is_partial and not wanted.n_ctx:
            high = low
        n_ctx, all_lacks, least_lacks = _longest_context(
            low,
            high,
            lambda n: placed(sizes_for(file, model, one, n), room, on),  # noqa: B023
        )
        if not trial.changed and (all_lacks or not trial.is_partial or n_ctx == requested_tokens):
            short = all_lacks
        if n_ctx:
            break
        lacking = lacking if trial.from_disk else least_lacks
    else:
        assert lacking is not None
        raise lacking
    sizes, notes = sizes_for(file, model, one, n_ctx), []
    if short is not None:
        changes = []
        if n_ctx < requested_tokens:
            whose = "-c" if wanted.n_ctx else "the model's own"
            changes.append(f"the context is cut from {requested_tokens} tokens ({whose}) to {n_ctx}")
        if one.max_batch < wanted.max_batch:
            changes.append(f"batches are cut from {wanted.max_batch} tokens (-ub) to {one.max_batch}")
        if one.type_k is not wanted.type_k:
            changes.append(f"the K/V cache is {one.type_k.name.lower()} instead of {wanted.type_k.name.lower()} (-ctk)")
        notes.append(f"{', '.join(changes)}{': ' if changes else ''}{short}{trial.remark}")
    slot, n_cells = one.shape(n_ctx)
    if slot >= n_train and (whole := wanted.shape(given)[0]) > n_train:
        notes.append(f"a slot's context is cut from {whole} tokens to {n_train}: the model was trained with no more")
    return Fit(min(slot, n_train), n_cells, sizes, placed(sizes, room, on), tuple(notes), one)


class _Reduction(NamedTuple):
    """One attempt: the reduced options, the device figures, the division, and a remark for its result."""

    wanted: MemoryRequest
    figures: Sequence[DeviceFigures]
    split: SplitOptions | None
    remark: str = ""
    changed: bool = False
    """True if it reduces more than the context."""
    from_disk: bool = False
    """True if the memory of weights counts as free."""
    is_whole: bool = False
    """True if accelerators have to hold all layers; a context of automatic size is reduced for that."""
    is_partial: bool = False
    """True if layers may stay with the CPU, because accelerators cannot hold all of them with the least context."""


def _reductions(
    file: ModelFile, model: Model, wanted: MemoryRequest, figures: Sequence[DeviceFigures], split: SplitOptions | None
) -> Iterator[_Reduction]:
    """Yield the attempts in order, from the requested options to the worst."""
    allowed = wanted.fit
    fills = _fills(figures, split)
    if allowed.on:
        modest, remark = _leaving(figures, allowed.target), ""
        if modest != list(figures):
            left = "/".join(mib(n) for n in dict.fromkeys(allowed.target))
            remark = f". Of what is free {left} are left to others (--fit-target)"
        if split is not None and fills:
            yield _Reduction(wanted, modest, replace(split, n_gpu_layers=ALL_LAYERS), remark, is_whole=True)
        if remark:
            yield _Reduction(wanted, modest, split, remark, is_partial=fills)
    yield _Reduction(wanted, figures, split, is_partial=fills)
    batches = [n for n in _BATCHES if n < wanted.max_batch] if allowed.on and allowed.batch else []
    for n in batches:
        yield _Reduction(wanted._replace(max_batch=n), figures, split, changed=True)
    if allowed.on and allowed.cache and wanted.type_k.block_size == wanted.type_v.block_size == 1:
        small = wanted._replace(type_k=TensorType.Q8_0, type_v=TensorType.Q8_0)
        for n in (wanted.max_batch, *batches):
            yield _Reduction(small._replace(max_batch=n), figures, split, changed=True)
    if (split is None or not split.rpc) and file.mapped:
        weights = sizes_for(file, model, wanted, max(wanted.n_slots, 1)).weights
        yield _Reduction(
            wanted,
            [replace(figures[0], free=figures[0].free + weights), *figures[1:]],
            split,
            ". Weights that memory cannot hold are read from the file again and again, which is slow",
            changed=True,
            from_disk=True,
        )


def _fills(figures: Sequence[DeviceFigures], split: SplitOptions | None) -> bool:
    """Return True if the rule of graphics cards places the layers (see `filling`), in a number that it chooses."""
    if split is None or split.tensor_split is not None or split.n_gpu_layers is not None:
        return False
    chosen = [figures[i] for i in sharing(figures, split)]
    return any(device.accelerator for device in chosen) and not any(device.remote for device in chosen)


def _leaving(figures: Sequence[DeviceFigures], target: Sequence[int]) -> list[DeviceFigures]:
    """Return the figures of devices with a margin subtracted: from this machine's total memory, from the free memory of
    workers and accelerators.
    """
    far = [i for i in workers(figures) if not figures[i].local]
    order = [*far, *(i for i, device in enumerate(figures) if device.local)]
    found = list(figures)
    for place_, i in enumerate(order):
        device = figures[i]
        margin = target[0] if len(target) == 1 else target[place_] if place_ < len(target) else 0
        if device.total or device.free:
            free = min(device.free, device.total - margin) if device.local else device.free - margin
            found[i] = replace(device, free=max(free, 0))
    return found


def placed(sizes: ModelSizes, figures: Sequence[DeviceFigures], split: SplitOptions | None) -> Placement:
    """Place the model; raises NotEnoughMemory."""
    if split is not None:
        return place(sizes, figures, split)
    placement = _single_device(sizes.n_layer)
    check_memory(sizes, figures, placement)
    return placement


def _single_device(n_layer: int) -> Placement:
    return Placement((0,) * n_layer, 0, 0)


class _LongestContext(NamedTuple):
    """The longest context that fits, 0 if none; and the shortage of the requested and of the least context."""

    n_ctx: int
    all_lacks: NotEnoughMemory | None
    least_lacks: NotEnoughMemory | None


def _longest_context(least: int, requested_tokens: int, attempt: Callable[[int], object]) -> _LongestContext:
    """Find the longest context from `least` to `requested_tokens` that `attempt` accepts, by bisection."""

    def problem(n_ctx: int) -> NotEnoughMemory | None:
        try:
            attempt(n_ctx)
        except NotEnoughMemory as error:
            return error
        return None

    all_lacks = problem(requested_tokens)
    if all_lacks is None:
        return _LongestContext(requested_tokens, None, None)
    least_lacks = all_lacks if least == requested_tokens else problem(least)
    if least_lacks is not None:
        return _LongestContext(0, all_lacks, least_lacks)
    # steps above the least: `low` fits, more than `high` does not
    low, high = 0, (requested_tokens - least - 1) // _STEP
    while low < high:
        middle = (low + high + 1) // 2
        if problem(least + middle * _STEP) is None:
            low = middle
        else:
            high = middle - 1
    return _LongestContext(least + low * _STEP, all_lacks, None)


def read_text(sizes: ModelSizes) -> str:
    """Describe the part of a mixture's weights that a token reads; empty if it is all of them."""
    read = sum(sizes.layers_read or sizes.layers) + sizes.head
    return f", of which a token reads {mib(read)}" if read < 0.9 * sizes.weights else ""


def before_reading(figures: DeviceFigures, file: ModelFile) -> DeviceFigures:
    """Return this machine's figures from before a file was read into memory; unchanged for a mapped file."""
    return figures if file.mapped else replace(figures, free=figures.free + file.nbytes)


def prompt_memory(limit: int, total: int) -> int:
    """Return the MiB for prompts that no slot holds: the given limit, but at most half of the `total` bytes of this
    process, so that the default suits a small container; -1: no limit.
    """
    return limit if limit < 0 else min(limit, total >> 21)
