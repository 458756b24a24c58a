"""How much context a model gets: what was asked for, cut to what it was trained with and to what memory holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from llamado.devices.split.placement import (
    DeviceFigures,
    ModelSizes,
    NotEnoughMemory,
    Placement,
    SplitOptions,
    check_memory,
)
from llamado.devices.split.rules import place
from llamado.engine.errors import EngineError
from llamado.engine.forward.sizes import model_sizes
from llamado.gguf.reader import GGUFFile
from llamado.gguf.types import TensorType
from llamado.models.base import Model
from llamado.models.memory import align

LEAST_CONTEXT = 4096
"""Tokens to which a context is cut for want of memory, and no further (llama-server's --fit-ctx)."""
_STEP = 256


class MemoryOptions(NamedTuple):
    """What of a user's wishes takes memory. `n_ctx`: tokens in all, 0 for as many as the model was trained with."""

    n_ctx: int
    n_slots: int
    unified: bool
    max_batch: int
    type_k: TensorType
    type_v: TensorType
    beyond_training: bool = False
    """Whether there are cells for more tokens than all slots can have; see EngineOptions."""

    @property
    def whole(self) -> bool:
        """Whether layers with a window keep all tokens, too."""
        return False

    def shape(self, n_ctx: int) -> tuple[int, int]:
        """Tokens of one sequence, and cells of the pool, for `n_ctx` tokens in all. Raises EngineError."""
        return context_size(n_ctx, self.n_slots, self.unified)


class Fit(NamedTuple):
    """A context that fits, and what there is to say about it."""

    n_ctx_slot: int
    """Tokens of one sequence."""
    n_cells: int
    sizes: ModelSizes
    placement: Placement
    notes: tuple[str, ...]


def context_size(n_ctx: int, n_slots: int, unified: bool) -> tuple[int, int]:
    """Tokens of one slot's context, and cells of the pool, for `n_ctx` tokens in all. Raises EngineError."""
    if n_ctx < n_slots:
        raise EngineError(f"a context of {n_ctx} tokens cannot be divided among {n_slots} slots")
    if unified:
        return n_ctx, align(n_ctx)
    return n_ctx // n_slots, n_slots * align(n_ctx // n_slots)


def sizes_for(file: GGUFFile, model: Model, wanted: MemoryOptions, n_ctx: int) -> ModelSizes:
    """What the model takes with a context of `n_ctx` tokens in all."""
    return model_sizes(
        file,
        model,
        n_cells=wanted.shape(n_ctx)[1],
        n_sequences=wanted.n_slots,
        max_batch=wanted.max_batch,
        whole=wanted.whole,
        type_k=wanted.type_k,
        type_v=wanted.type_v,
    )


def fit(
    file: GGUFFile, model: Model, wanted: MemoryOptions, figures: Sequence[DeviceFigures], split: SplitOptions | None
) -> Fit:
    """The context and the placement that a model gets on devices of these figures.

    Where memory is short the context is cut, to LEAST_CONTEXT tokens if need be. Weights that are mapped from a file
    on this machine may be more than its memory, which is said: they are read again and again. Raises NotEnoughMemory
    for all else that does not fit, and what `place` raises.
    """
    n_train = model.hparams.n_ctx_train
    given = asked = wanted.n_ctx or n_train
    if not wanted.beyond_training:
        asked = min(asked, wanted.n_slots * n_train)
    sizes = sizes_for(file, model, wanted, asked)
    n_ctx, notes = asked, []
    try:
        placement = placed(sizes, figures, split)
    except NotEnoughMemory as error:
        least = min(asked, max(LEAST_CONTEXT, wanted.n_slots))

        def most(figures: Sequence[DeviceFigures]) -> int:
            return _most(least, asked, lambda n: placed(sizes_for(file, model, wanted, n), figures, split))

        n_ctx = most(figures)
        said = str(error)
        if not n_ctx and split is None and file.mapped:
            figures = [replace(figures[0], free=figures[0].free + sizes.weights)]
            n_ctx = most(figures)
            said += ". Weights that memory cannot hold are read from the file again and again, which is slow"
        if not n_ctx:
            raise
        if n_ctx < asked:
            whose = "-c" if wanted.n_ctx else "the model's own"
            said = f"the context is cut from {asked} tokens ({whose}) to {n_ctx}: {said}"
        notes.append(said)
        sizes = sizes_for(file, model, wanted, n_ctx)
        placement = placed(sizes, figures, split)
    slot, n_cells = wanted.shape(n_ctx)
    if slot >= n_train and (whole := wanted.shape(given)[0]) > n_train:
        notes.append(f"a slot's context is cut from {whole} tokens to {n_train}: the model was trained with no more")
    return Fit(min(slot, n_train), n_cells, sizes, placement, tuple(notes))


def placed(sizes: ModelSizes, figures: Sequence[DeviceFigures], split: SplitOptions | None) -> Placement:
    """Where the model lies; raises NotEnoughMemory."""
    if split is not None:
        return place(sizes, figures, split)
    placement = _alone(sizes.n_layer)
    check_memory(sizes, figures, placement)
    return placement


def _alone(n_layer: int) -> Placement:
    return Placement((0,) * n_layer, 0, 0)


def _most(least: int, asked: int, attempt: Callable[[int], object]) -> int:
    """The longest context from `least` to `asked` for which `attempt` finds room, by halving; 0 where there is none."""

    def fits(n_ctx: int) -> bool:
        try:
            attempt(n_ctx)
        except NotEnoughMemory:
            return False
        return True

    if fits(asked):
        return asked
    if least == asked or not fits(least):
        return 0
    low, high = 0, (asked - least - 1) // _STEP  # steps above the least: so many fit, and more than so many do not
    while low < high:
        middle = (low + high + 1) // 2
        if fits(least + middle * _STEP):
            low = middle
        else:
            high = middle - 1
    return least + low * _STEP


def before_reading(figures: DeviceFigures, file: GGUFFile) -> DeviceFigures:
    """This machine's figures as they were before a file was read into its memory; of a mapped file, as they are."""
    return figures if file.mapped else replace(figures, free=figures.free + file.nbytes)


def prompt_memory(limit: int, total: int) -> int:
    """MiB for prompts that no slot holds: the given limit, and at most half of the `total` bytes that the process may
    have, so that in a small container the usual limit is one; -1: no limit.
    """
    return limit if limit < 0 else min(limit, total >> 21)
