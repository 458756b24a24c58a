"""From settings to a server that embeds and ranks.

A model that also generates does both; llama-server's `--embeddings` takes nothing away from it either.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from llamado.engine.embedding.embedder import Embedder, cells_for
from llamado.engine.errors import EngineError
from llamado.engine.forward.contract import Scales, as_scales
from llamado.engine.forward.fitting import context_size
from llamado.engine.forward.lora_scales import DefaultScales, default_scales
from llamado.engine.llama import cache_type
from llamado.engine.options import EngineOptions
from llamado.engine.request import Counters, EngineSnapshot, Event, Request, SlotSnapshot
from llamado.engine.supported import check_supported
from llamado.gguf.metadata import Metadata
from llamado.gguf.reader import GGUFFile
from llamado.models import Adapter, Model, Output, Pooling, load_adapters, load_model
from llamado.models.hparams import override_metadata
from llamado.server.load import Report, describe, fetched, load_llama, preparing, serve_llama
from llamado.server.loaded_model import Embeddings, Served
from llamado.server.settings import Settings
from llamado.text.template import rendering
from llamado.text.template.chat import ChatTemplate
from llamado.text.tokenizer.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger("llamado.server")

_RERANK_TEMPLATE = "tokenizer.chat_template.rerank"


class NoGeneration:
    """The engine of a model that has no logits: it refuses, and shows the embedder's state."""

    def __init__(self, embedder: Embedder, n_slots: int, scales: DefaultScales) -> None:
        self._embedder = embedder
        self._n_slots = n_slots
        self._scales = scales

    @property
    def lora(self) -> tuple[float, ...]:
        """Scales of all adapters, in float32."""
        return self._scales.each

    def set_lora(self, scales: Mapping[int, float]) -> None:
        """Change `lora`: adapters by number, those that are not named get 0. Raises InvalidRequest."""
        self._scales.set(scales)

    def submit(self, request: Request, emit: Callable[[Event], None]) -> int:
        """Raises EngineError, in llama-server's words."""
        raise EngineError("the current context does not support logits computation. skipping")

    def cancel(self, task_id: int) -> None:
        """There is nothing to cancel."""

    def snapshot(self) -> EngineSnapshot:
        """Slots that look busy while texts are computed; counters are the embedder's own."""
        busy = self._embedder.snapshot().requests_processing
        slots = tuple(
            SlotSnapshot(i, self._embedder.n_ctx, i < busy, -1, None, 0, 0, 0, False, False, -1, 0)
            for i in range(self._n_slots)
        )
        return EngineSnapshot(slots, Counters(), 0, 0, 0, 0)


def load_embedding_server(settings: Settings, report: Report) -> Served:
    """Load a model for embeddings or reranking, and for generation where it can do that. Raises LlamadoError."""
    options = settings.engine
    if options.split is not None:
        raise EngineError("embeddings are computed on this machine alone: leave out --rpc")
    path = fetched(settings.source, report)
    with GGUFFile.open(path) as file:
        generates = load_model(file).generates
    if not generates:
        return _encoder(settings, path, report)
    llama = load_llama(settings.source, options, settings.defaults, report)
    try:
        embedder, end = load_embedder(
            llama.file, llama.model, options, llama.engine.n_ctx, report, lambda: as_scales(llama.engine.lora)
        )
    except BaseException:
        llama.close()
        raise

    def close(timeout: float) -> None:
        end(timeout)
        llama.close(timeout)

    embeddings = _embeddings(embedder, options, llama.file.metadata, llama.tokenizer)
    return replace(serve_llama(settings, llama), embeddings=embeddings, close=close)


def _encoder(settings: Settings, path: Path, report: Report) -> Served:
    """A model that only embeds or ranks."""
    options = settings.engine
    rendering.start()
    file = GGUFFile.open(path, mmap=options.mmap)
    adapters: tuple[Adapter, ...] = ()

    def close_files() -> None:
        for opened in (file, *(adapter.file for adapter in adapters)):
            opened.close()

    try:
        if options.metadata:
            file.metadata = override_metadata(file.metadata, options.metadata)
        check_supported(file.header)
        model = load_model(file)
        adapters = load_adapters(model, [path for path, _ in options.lora], mmap=options.mmap)
        scales = default_scales([scale for _, scale in options.lora], options.lora_apply)
        tokenizer = load_tokenizer(file.metadata)
        template = ChatTemplate.from_metadata(file.metadata, tokenizer, options.chat_template)
        n_ctx_train = model.hparams.n_ctx_train
        n_ctx = min(context_size(options.n_ctx or n_ctx_train, options.n_slots, options.unified)[0], n_ctx_train)
        embedder, end = load_embedder(file, model, options, n_ctx, report, lambda: scales.now)
    except BaseException:
        close_files()
        raise

    def close(timeout: float) -> None:
        end(timeout)
        rendering.end()
        close_files()

    return Served(
        engine=NoGeneration(embedder, options.n_slots, scales),
        tokenizer=tokenizer,
        template=template,
        info=describe(settings, file, model, tokenizer, template, n_ctx),
        n_slots=options.n_slots,
        defaults=settings.defaults,
        embeddings=_embeddings(embedder, options, file.metadata, tokenizer),
        close=close,
    )


def load_embedder(
    file: GGUFFile, model: Model, options: EngineOptions, n_ctx: int, report: Report, scales: Callable[[], Scales]
) -> tuple[Embedder, Callable[[float], None]]:
    """An embedder on this machine for texts of up to `n_ctx` tokens, and what ends it.

    `scales`: how strong the model's adapters are now. Raises LlamadoError.
    """
    from llamado.devices.cpu.device import CpuDevice
    from llamado.engine.forward.runner import ModelRunner

    pooling = chosen_pooling(options, model)
    max_batch = min(options.n_batch, options.n_ubatch)
    progress = preparing(report)
    forward = ModelRunner(
        file,
        model,
        [CpuDevice(options.n_threads, options.n_threads_batch, numa=options.numa)],
        n_cells=cells_for(max_batch, n_ctx),
        max_batch=max_batch,
        output=Output.SCORES if pooling is Pooling.RANK else Output.HIDDEN,
        type_k=cache_type(options.type_k),
        type_v=cache_type(options.type_v),
        mlock=options.mlock,
        progress=progress,
    )
    try:
        forward.warm_up([8, max_batch], progress, scales())
        embedder = Embedder(
            forward,
            pooling=pooling,
            causal=model.hparams.causal,
            n_ctx=n_ctx,
            max_requests=options.max_queue,
            scales=scales,
        )
    except BaseException:
        forward.close()
        raise

    def close(timeout: float) -> None:
        embedder.close(timeout)
        forward.close()

    return embedder, close


def chosen_pooling(options: EngineOptions, model: Model) -> Pooling:
    """What was asked for, else what the file says, else none."""
    if options.pooling is not None:
        return Pooling[options.pooling.upper()]
    if options.reranking:
        return Pooling.RANK
    return Pooling.NONE if model.hparams.pooling is None else model.hparams.pooling


def _embeddings(embedder: Embedder, options: EngineOptions, metadata: Metadata, tokenizer: Tokenizer) -> Embeddings:
    template = metadata.str_(_RERANK_TEMPLATE, "")
    return Embeddings(
        embedder=embedder,
        pooling=embedder.pooling,
        normalize=options.embd_normalize,
        # llama-server ranks where it was told to, whatever the file says.
        reranks=options.reranking or options.pooling == "rank",
        pair=lambda query, document: pair(query, document, tokenizer, template),
    )


def pair(query: str, document: str, tokenizer: Tokenizer, template: str) -> list[int]:
    """The tokens with which a model is asked how well a document answers a query.

    `template` is the file's own form of it, with {query} and {document} to be filled in; without one they follow each
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
