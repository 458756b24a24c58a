"""Loading of a server's model from its settings."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from llamado.devices.cpu.lowerings import of_this_machine
from llamado.engine.embedding.load import pair
from llamado.engine.options import COMPILING, FETCHING, EngineOptions, Report, as_share
from llamado.http.monitoring.logs import EVERYTHING
from llamado.server.model import AdapterInfo, Grammars, ModelInfo, ServedEmbeddings, ServedMedia, ServedModel
from llamado.server.ops.banner import layer_devices
from llamado.server.settings import Settings

if TYPE_CHECKING:
    from llamado.engine.embedding.embedder import Embedder
    from llamado.engine.loaded_model import LoadedModel
    from llamado.gguf.reader import GGUFFile
    from llamado.models import Model
    from llamado.text.template.chat import ChatTemplate
    from llamado.text.tokenizer.tokenizer import Tokenizer

log = logging.getLogger("llamado.server")

# `general.file_type` → name (`llama_ftype` in include/llama.h, b11434).
_FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K - Small",
    12: "Q3_K - Medium", 13: "Q3_K - Large", 14: "Q4_K - Small", 15: "Q4_K - Medium", 16: "Q5_K - Small",
    17: "Q5_K - Medium", 18: "Q6_K", 32: "BF16",
}  # fmt: skip
_COMPILING = "compiling kernels for this processor: the first start takes some seconds for it, later ones find them"
_COMPILE_SECONDS = 2.0  # of compiling before it is logged
_FETCH_SECONDS = 5.0  # between two log lines with the progress of a download
_RERANK_TEMPLATE = "tokenizer.chat_template.rerank"
# `tokenizer.ggml.model` → `llama_vocab_type`.
_VOCAB_TYPES = {"llama": 1, "gpt2": 2, "bert": 3, "t5": 4, "rwkv": 5, "plamo2": 6}


def load_served(settings: Settings, report: Callable[[float, str], None]) -> ServedModel:
    """Load the model of a server and describe it. `report`: called with the share that is done. Raises LlamadoError."""
    from llamado.engine.loaded_model import LoadedModel

    load_log = LoadLog(as_share(report))
    try:
        llama = LoadedModel.load(settings.source, settings.engine, defaults=settings.defaults, progress=load_log)
    finally:
        load_log.end()
    try:
        return serve_llama(settings, llama)
    except BaseException:
        llama.close()
        raise


class LoadLog:
    """A progress callback that logs the slow parts of loading: fetching the model, and compiling kernels."""

    def __init__(self, report: Report, patience: float = _COMPILE_SECONDS) -> None:
        """`report`: called with every progress, too. `patience`: seconds of compiling before it is logged."""
        self._report = report
        self._last_fetch_log: float | None = None
        self._fetched = False
        self._timer = threading.Timer(patience, log.info, [_COMPILING])
        self._timer.daemon = True

    def __call__(self, what: str, done: int, total: int) -> None:
        self._report(what, done, total)
        if what == COMPILING and self._timer.ident is None:
            self._timer.start()
        if what.startswith(FETCHING) and not self._fetched:
            now, self._fetched = time.monotonic(), bool(total) and done == total
            if self._last_fetch_log is None or now - self._last_fetch_log >= _FETCH_SECONDS or self._fetched:
                self._last_fetch_log = now
                log.info("%s: %.1f%s MB", what, done / 1e6, f" of {total / 1e6:.1f}" if total else "")

    def end(self) -> None:
        """Cancel the timer: loading ended."""
        self._timer.cancel()


def serve_llama(settings: Settings, llama: LoadedModel) -> ServedModel:
    """Return the served form of a loaded model."""
    generates = llama.model.generates
    if generates and log.isEnabledFor(EVERYTHING):
        from llamado.engine.forward.runner import ModelRunner

        if isinstance(llama.forward, ModelRunner):
            names = [device.name for device in llama.forward.devices]
            for line in layer_devices(names, llama.forward.placement, llama.model.hparams.n_layer):
                log.log(EVERYTHING, "%s", line)
    return ServedModel(
        engine=llama.engine,
        tokenizer=llama.tokenizer,
        template=llama.template,
        info=describe(settings, llama.file, llama.model, llama.tokenizer, llama.template, llama.engine.n_ctx),
        n_slots=settings.engine.n_slots,
        defaults=settings.defaults,
        grammars=_grammars(settings, llama) if generates else None,
        n_batch=settings.engine.n_batch,
        longest_token=(lambda: llama.tokenizer.longest) if generates else (lambda: 0),
        media=_media(llama),
        embeddings=None if llama.embedder is None else _embeddings(settings.engine, llama, llama.embedder),
        cluster=llama.cluster,
        close=llama.close,
    )


def _media(llama: LoadedModel) -> ServedMedia | None:
    runner = llama.media
    if runner is None:
        return None
    return ServedMedia(prepare=runner.prepare, rates={encoder.kind: encoder.rate for encoder in runner.encoders.each})


def _grammars(settings: Settings, llama: LoadedModel) -> Grammars:
    from llamado.text.grammar.compiler import GrammarCompiler

    grammars = GrammarCompiler(llama.tokenizer)
    if settings.switches.grammar is not None:
        grammars.compile(settings.switches.grammar)  # an invalid one fails the start, not every request
    return grammars


def _embeddings(options: EngineOptions, llama: LoadedModel, embedder: Embedder) -> ServedEmbeddings:
    template = llama.file.metadata.str_(_RERANK_TEMPLATE, "")
    return ServedEmbeddings(
        embedder=embedder,
        pooling=embedder.pooling,
        max_tokens=embedder.max_tokens,
        normalize=options.embd_normalize,
        # As in llama-server, flags decide, not the pooling type of the file.
        reranks=options.reranking or options.pooling == "rank",
        pair=lambda query, document: pair(query, document, llama.tokenizer, template),
    )


def describe(
    settings: Settings, file: GGUFFile, model: Model, tokenizer: Tokenizer, template: ChatTemplate, n_ctx: int
) -> ModelInfo:
    """Return the facts of a model. `n_ctx`: context of a slot, in tokens."""
    metadata = file.metadata
    names = settings.names

    def text(token: int | None) -> str:
        return "" if token is None else tokenizer.piece(token, special=True).decode("utf-8", "replace")

    return ModelInfo(
        name=names[0],
        path=str(file.path),
        aliases=names,
        tags=settings.tags,
        n_ctx=n_ctx,
        n_ctx_train=model.hparams.n_ctx_train,
        n_vocab=tokenizer.n_vocab,
        n_embd=model.hparams.n_embd,
        n_params=sum(tensor.n_elements for tensor in file.tensors.values()),
        size=file.nbytes,
        ftype=_FILE_TYPES.get(metadata.int_("general.file_type", -1), "unknown"),
        vocab_type=_VOCAB_TYPES.get(metadata.str_("tokenizer.ggml.model", ""), 0),
        chat_template=template.source,
        chat_template_caps=template.caps,
        bos_token=text(tokenizer.bos),
        eos_token=text(tokenizer.eos),
        adapters=tuple(
            AdapterInfo(
                str(a.path), a.task_name, a.prompt_prefix, a.invocation, tokenizer.decode(a.invocation, special=True)
            )
            for a in model.adapters
        ),
        instruction_set=of_this_machine().name,
    )
