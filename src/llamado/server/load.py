"""From settings to a loaded model behind the endpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from llamado.devices.limits import memory
from llamado.engine.options import EngineOptions, ModelSource
from llamado.engine.supported import check_supported
from llamado.gguf.sources.resolve import resolve
from llamado.http.logs import EVERYTHING
from llamado.server.loaded_model import AdapterInfo, ModelInfo, Served
from llamado.server.ops.banner import layer_devices
from llamado.server.settings import Settings

if TYPE_CHECKING:
    from llamado.engine.llama import Llama
    from llamado.engine.request import Defaults
    from llamado.gguf.reader import GGUFFile
    from llamado.models import Model
    from llamado.text.template.chat import ChatTemplate
    from llamado.text.tokenizer.tokenizer import Tokenizer

log = logging.getLogger("llamado.server")

Report = Callable[[float, str], None]

# Shares of the progress bar: fetching takes long or no time at all, compiling is the rest.
_FETCHED = 0.5

# `general.file_type` → name (`llama_ftype` in include/llama.h, b11434).
_FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K - Small",
    12: "Q3_K - Medium", 13: "Q3_K - Large", 14: "Q4_K - Small", 15: "Q4_K - Medium", 16: "Q5_K - Small",
    17: "Q5_K - Medium", 18: "Q6_K", 32: "BF16",
}  # fmt: skip
# `tokenizer.ggml.model` → `llama_vocab_type`.
_VOCAB_TYPES = {"llama": 1, "gpt2": 2, "bert": 3, "t5": 4, "rwkv": 5, "plamo2": 6}


def fetched(source: ModelSource, report: Report, *, workers: bool = False) -> Path:
    """The model's file, fetched where it is not here yet. Raises SourceError, and UnsupportedModel before that.

    `workers`: see check_supported.
    """

    def fetching(done: int, total: int) -> None:
        report(_FETCHED * done / total if total else 0.0, f"fetching {source.name}")

    path = resolve(
        source.spec,
        hf_repo=source.hf_repo,
        hf_file=source.hf_file,
        progress=fetching,
        warn=log.warning,
        check=partial(check_supported, workers=workers),
    )
    report(_FETCHED, "opening the model")
    return path


def preparing(report: Report) -> Callable[[str, int, int], None]:
    """Reports what happens after fetching as the second half of the progress."""

    def prepare(what: str, done: int, total: int) -> None:
        report(_FETCHED + (1 - _FETCHED) * done / total if total else _FETCHED, what)

    return prepare


def prompt_memory(limit: int, total: int) -> int:
    """MiB for prompts that no slot holds: the given limit, and at most half of the `total` bytes that the process may
    have, so that in a small container the usual limit is one; -1: no limit.
    """
    return limit if limit < 0 else min(limit, total >> 21)


def load_llama(source: ModelSource, options: EngineOptions, defaults: Defaults, report: Report) -> Llama:
    """Fetch the model where that is needed and load it. Raises LlamadoError."""
    path = fetched(source, report, workers=options.split is not None)

    from llamado.engine.llama import Llama

    return Llama.load(
        path,
        n_ctx=options.n_ctx,
        n_slots=options.n_slots,
        unified=options.unified,
        n_batch=options.n_batch,
        n_ubatch=options.n_ubatch,
        cont_batching=options.cont_batching,
        n_threads=options.n_threads,
        n_threads_batch=options.n_threads_batch,
        type_k=options.type_k,
        type_v=options.type_v,
        mmap=options.mmap,
        mlock=options.mlock,
        numa=options.numa,
        chat_template=options.chat_template,
        metadata=options.metadata,
        split=options.split,
        drafting=options.drafting,
        context_shift=options.context_shift,
        cache_ram=prompt_memory(options.cache_ram, memory().total),
        cache_idle_slots=options.cache_idle_slots,
        slot_prompt_similarity=options.slot_prompt_similarity,
        max_queue=options.max_queue,
        lora=options.lora,
        lora_apply=options.lora_apply,
        defaults=defaults,
        progress=preparing(report),
    )


def load_served(settings: Settings, report: Report) -> Served:
    """Load the model of a server and describe it. Raises LlamadoError."""
    if settings.engine.embeddings or settings.engine.reranking:
        from llamado.server.embedding_load import load_embedding_server

        return load_embedding_server(settings, report)
    llama = load_llama(settings.source, settings.engine, settings.defaults, report)
    report(1.0, "getting ready for grammars")
    return serve_llama(settings, llama)


def serve_llama(settings: Settings, llama: Llama) -> Served:
    """A model that generates, behind the endpoints."""
    from llamado.text.grammar.compiler import GrammarCompiler
    from llamado.text.grammar.source import GrammarError

    grammars = GrammarCompiler(llama.tokenizer)
    # One call that keeps all other threads waiting, up to a second for the largest vocabularies: not once we answer.
    with suppress(GrammarError):  # a vocabulary without an end serves all but grammars, which will say so
        grammars.prepare()
    if settings.switches.grammar is not None:
        grammars.compile(settings.switches.grammar)  # one that cannot be used is found now, not by every request
    info = describe(settings, llama.file, llama.model, llama.tokenizer, llama.template, llama.engine.n_ctx)
    if log.isEnabledFor(EVERYTHING):
        from llamado.engine.forward.runner import ModelRunner

        if isinstance(llama.forward, ModelRunner):
            names = [device.name for device in llama.forward.devices]
            for line in layer_devices(names, llama.forward.placement, llama.model.hparams.n_layer):
                log.log(EVERYTHING, "%s", line)
    return Served(
        engine=llama.engine,
        tokenizer=llama.tokenizer,
        template=llama.template,
        info=info,
        n_slots=settings.engine.n_slots,
        defaults=settings.defaults,
        grammars=grammars,
        n_batch=settings.engine.n_batch,
        longest_token=lambda: llama.tokenizer.longest,
        close=llama.close,
    )


def describe(
    settings: Settings, file: GGUFFile, model: Model, tokenizer: Tokenizer, template: ChatTemplate, n_ctx: int
) -> ModelInfo:
    """Facts about a model whose slots have a context of `n_ctx` tokens."""
    metadata = file.metadata
    names = settings.aliases or (settings.source.name,)

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
        adapters=tuple(AdapterInfo(str(a.path), a.task_name, a.prompt_prefix) for a in model.adapters),
    )
