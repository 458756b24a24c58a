"""Load a model's embedder, and the replacement of an engine for models without logits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from llamado.devices.accelerators import Accelerators, LocalDevices
from llamado.devices.split.measure import figures_of
from llamado.engine.embedding.embedder import Embedder, cells_for
from llamado.engine.errors import EngineError
from llamado.engine.forward.contract import Scales
from llamado.engine.forward.fitting import Fit, MemoryRequest, before_reading, fit, memory_request
from llamado.engine.lora_scales import DefaultScales
from llamado.engine.options import EngineOptions, Report
from llamado.engine.request import Counters, EngineSnapshot, Event, Request, SlotSnapshot
from llamado.gguf.reader import GGUFFile
from llamado.models import Model, Output, Pooling
from llamado.text.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llamado.engine.forward.runner import ModelRunner

log = logging.getLogger(__name__)


class _Texts(MemoryRequest):
    """Memory options for embedding texts, of which nothing is kept."""

    @property
    def whole(self) -> bool:
        """True: layers with a window keep whole texts."""
        return True

    def shape(self, n_ctx: int) -> tuple[int, int]:
        """Return the tokens of a text, and the cells for it and for a batch of short ones. Raises EngineError."""
        n_ctx, _ = super().shape(n_ctx)
        return n_ctx, cells_for(self.max_batch, n_ctx)


class NoGeneration:
    """The engine of a model without logits: it rejects requests, and reports the embedder's state."""

    def __init__(self, embedder: Embedder, n_slots: int, scales: DefaultScales) -> None:
        self.n_ctx = embedder.n_ctx
        self._embedder = embedder
        self._n_slots = n_slots
        self._scales = scales

    @property
    def lora(self) -> tuple[float, ...]:
        """Scales of all adapters, in float32."""
        return self._scales.each

    def set_lora(self, scales: Mapping[int, float]) -> None:
        """Set `lora`: adapters by number; those that are not listed get 0. Raises InvalidRequest."""
        self._scales.set(scales)

    def submit(
        self, request: Request, emit: Callable[[Event], None], *, flush: Callable[[], None] | None = None
    ) -> int:
        """Raise EngineError with llama-server's message."""
        raise EngineError("the current context does not support logits computation. skipping")

    def cancel(self, task_id: int) -> None:
        """Do nothing: there are no requests."""

    def snapshot(self) -> EngineSnapshot:
        """Slots that look busy while texts are computed; counters are the embedder's own."""
        busy = self._embedder.snapshot().requests_processing
        slots = tuple(
            SlotSnapshot(i, self._embedder.n_ctx, i < busy, -1, None, 0, 0, 0, False, False, -1, 0)
            for i in range(self._n_slots)
        )
        return EngineSnapshot(slots, Counters(), 0, 0, 0, 0)

    def stalled(self) -> float:
        """Return 0: there is no loop that could hang."""
        return 0.0

    def close(self, timeout: float = 0.0) -> None:
        """Do nothing: the embedder is closed separately."""


def load_embedder(
    file: GGUFFile,
    model: Model,
    options: EngineOptions,
    progress: Report | None,
    scales: Callable[[], Scales],
    *,
    accelerators: Accelerators | None = None,
    beside: Fit | None = None,
) -> tuple[ModelRunner, Embedder]:
    """Load a forward pass on this machine and an embedder with it, for texts as long as a slot's context.

    `scales`: returns the current scales of the model's adapters. `accelerators`: devices beside the CPU, if the options
    divide the model. `beside`: the memory of the model's generation engine; its weights serve both. If memory is short,
    the longest text is reduced, with a warning. Raises LlamadoError.
    """
    from llamado.engine.forward.device_pool import DevicePool
    from llamado.engine.forward.runner import ModelRunner

    pooling = chosen_pooling(options, model)
    here = options.device()
    figures = before_reading(figures_of(here), file)
    if beside is not None:
        taken = sum(beside.sizes.kv) + beside.sizes.compute + beside.sizes.head_compute
        figures = replace(figures, free=max(figures.free - taken, 0))
        wanted = _Texts(*beside.wanted._replace(n_ctx=beside.n_ctx_slot, n_slots=1, unified=True))
    else:
        wanted = _Texts(*memory_request(options)._replace(beyond_training=False))
    # a text is read in one batch: smaller batches would reject longer texts
    wanted = wanted._replace(max_batch=options.max_batch, fit=replace(options.fit, batch=False))
    devices_pool = None
    if accelerators is None or options.split is None:
        found = fit(file, model, wanted, [figures], None)
    else:
        devices_pool = DevicePool(options.split, LocalDevices(here, accelerators), file, model, wanted, progress)
        found = devices_pool.fit
    for note in found.notes:
        log.warning("%s", note)
    runner_options = replace(
        found.runner_options,
        n_sequences=1,
        n_drafted=0,
        output=Output.SCORES if pooling is Pooling.RANK else Output.HIDDEN,
        mlock=options.mlock,
    )
    if devices_pool is None:
        forward = ModelRunner(file, model, [here], runner_options, progress=progress)
    else:
        runner_options = replace(runner_options, reconnect=devices_pool.reconnect, replace=devices_pool.replace_lost)
        forward = ModelRunner(file, model, devices_pool.devices, runner_options, found.placement, progress)
        devices_pool.log_placement(found.placement)
    try:
        forward.warm_up([8, forward.max_batch], progress, scales())
        embedder = Embedder(
            forward,
            pooling=pooling,
            causal=model.hparams.causal,
            n_ctx=found.n_ctx_slot,
            max_requests=options.max_queue,
            scales=scales,
        )
    except BaseException:
        forward.close()
        raise
    return forward, embedder


def chosen_pooling(options: EngineOptions, model: Model) -> Pooling:
    """Return the pooling of the options, otherwise that of the file, otherwise none."""
    if options.pooling is not None:
        return Pooling[options.pooling.upper()]
    if options.reranking:
        return Pooling.RANK
    return Pooling.NONE if model.hparams.pooling is None else model.hparams.pooling


def pair(query: str, document: str, tokenizer: Tokenizer, template: str) -> list[int]:
    """Return the tokens of a query and a document for a reranking model.

    `template` is the file's own form, with {query} and {document} to be filled in; without one the texts follow each
    other, each ended as the vocabulary ends texts.
    """
    if template:
        text = template.replace("{query}", query).replace("{document}", document)
        return tokenizer.encode(text, add_special=False, parse_special=True)
    end = tokenizer.eos if tokenizer.eos is not None else tokenizer.sep
    between = (end if tokenizer.add_eos else None, tokenizer.sep if tokenizer.add_sep else None)
    parts = (
        [tokenizer.bos if tokenizer.add_bos else None],
        tokenizer.encode(query, parse_special=False),
        between,
        tokenizer.encode(document, parse_special=False),
        between[:1],
    )
    return [token for part in parts for token in part if token is not None]
