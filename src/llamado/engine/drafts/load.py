"""Make draft sources from options, including a draft model."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from llamado.devices.accelerators import LocalDevices
from llamado.devices.split.measure import figures_of
from llamado.engine.drafts.block import BlockKind, ChainKind
from llamado.engine.drafts.contract import DraftKind
from llamado.engine.drafts.drafts import MOST, DraftManager
from llamado.engine.drafts.head import HeadKind
from llamado.engine.drafts.model import ModelKind, check_vocabularies
from llamado.engine.drafts.ngram_cache import NgramCache
from llamado.engine.drafts.suffix import Suffix
from llamado.engine.errors import EngineError
from llamado.engine.forward.fitting import Fit, before_reading, fit, memory_request, sizes_for
from llamado.engine.local_devices import Reserve, open_accelerators
from llamado.engine.options import DraftOptions, EngineOptions, ModelSource, Report
from llamado.engine.supported import check_before_fetching, check_supported, check_types
from llamado.gguf.header import Header, ModelFile
from llamado.gguf.reader import GGUFFile
from llamado.gguf.sources.resolve import resolve
from llamado.models import Model, load_model
from llamado.models.heads.dflash import DFlashHead
from llamado.models.heads.eagle3 import Eagle3Head
from llamado.models.heads.fused import FusedHead
from llamado.models.heads.head import Head
from llamado.models.heads.next_token import NextTokenHead, has_next_token_head, load_next_token_head
from llamado.text.tokenizer.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from llamado.engine.forward.device_pool import DevicePool
    from llamado.engine.forward.runner import ModelRunner

log = logging.getLogger(__name__)

_TYPE = "tokenizer.ggml.model"

_FUSED: dict[str, type[FusedHead]] = {"draft-eagle3": Eagle3Head, "draft-dflash": DFlashHead}
MODEL_KINDS = ("draft-simple", "draft-mtp", *_FUSED)
"""Draft sources that are models."""


class DraftModel:
    """A loaded draft model: its opened file, and its `runner`."""

    def __init__(self, opened: DraftFile, runner: ModelRunner) -> None:
        self.opened, self.runner = opened, runner

    def kind(self, n_vocab: int, least: float) -> ModelKind:
        """Return it as a source of drafts."""
        opened, runner, ends = self.opened, self.runner, self.opened.tokenizer.eog
        head = opened.model
        if not isinstance(head, Head):
            return ModelKind(runner, n_vocab, name=opened.kind, least=least, ends=ends)
        if isinstance(head, DFlashHead):
            return BlockKind(runner, n_vocab, head, name=opened.kind, least=least, ends=ends)
        if isinstance(head, NextTokenHead) and head.n_stages > 1:
            return ChainKind(runner, n_vocab, head, name=opened.kind, least=least, ends=ends)
        return HeadKind(runner, n_vocab, head, name=opened.kind, least=least, ends=ends)

    def close(self) -> None:
        """Stop its threads, and release memory and file."""
        self.runner.close()
        self.opened.close()


class DraftFile(NamedTuple):
    """A draft model before it is loaded, and its own options."""

    kind: str
    file: GGUFFile
    tokenizer: Tokenizer
    model: Model
    options: EngineOptions
    shared: bool
    """True if the file is that of the target model."""
    features: tuple[int, ...] = ()
    """Layers of the target whose hidden states it needs."""

    def close(self) -> None:
        """Close the file."""
        if not self.shared:
            self.file.close()

    def reserve(self) -> Reserve:
        """Return the least memory that it takes on this machine: with the shortest context that fitting allows."""
        return reserved(self.file, self.model, self.options)


def reserved(file: ModelFile, model: Model, options: EngineOptions) -> Reserve:
    """Return the least memory that a draft model takes on this machine; `options` are its own."""
    if options.networked:
        return Reserve(0, 0)
    wanted = memory_request(options)
    n_train = model.hparams.n_ctx_train
    n_ctx = min(wanted.requested_tokens(n_train), max(wanted.fit.least_context * wanted.n_streams, wanted.n_slots))
    sizes = sizes_for(file, model, wanted, n_ctx)
    working = sum(sizes.kv) + sizes.compute + sizes.head_compute
    if options.split is not None:
        return Reserve(0, sizes.weights + working)
    return Reserve(working + (0 if file.mapped else sizes.weights), 0)


def _lookup_kinds(options: EngineOptions) -> list[DraftKind]:
    """Return the named sources that look up earlier tokens, each once. Raises EngineError.

    llama.cpp's n-gram names select the suffix drafter, because more of its tokens are accepted per step
    (docs/operations.md). Only `ngram-cache` with lookup files differs: the files hold other texts.
    """
    names, wanted = set(options.draft_kinds) - set(MODEL_KINDS), options.drafts
    has_files = bool(wanted.lookup_static or wanted.lookup_dynamic) and "ngram-cache" in names
    kinds: list[DraftKind] = [Suffix()] if names - ({"ngram-cache"} if has_files else set()) else []
    return [*kinds, NgramCache(wanted.lookup_static, wanted.lookup_dynamic)] if has_files else kinds


def drafts_for(options: EngineOptions, model: DraftModel | None, n_vocab: int) -> DraftManager | None:
    """Return the sources that the options name; None if there are none. Raises EngineError."""
    wanted = options.drafts
    kinds = _lookup_kinds(options)
    if isinstance(model, DraftModel):
        kinds.append(model.kind(n_vocab, wanted.p_min))
    if not kinds:
        return None
    return DraftManager(kinds, most=MOST if wanted.most is None else min(wanted.most, MOST), least=wanted.least)


def named_kind(options: EngineOptions) -> str | None:
    """Return the kind of the draft model, as `--spec-type` names it; empty: its file determines it; None: there is
    none.

    Raises EngineError.
    """
    wanted = options.drafts
    named = [name for name in MODEL_KINDS if name in (wanted.kinds or ())]
    if len(named) > 1:
        raise EngineError(f"--spec-type: only one draft model is possible, not {' and '.join(named)}")
    if named:
        return named[0]
    if wanted.model is None or wanted.kinds is not None:
        return None
    return ""


def own_options(options: EngineOptions) -> EngineOptions:
    """Return the options of a draft model for a target with these."""
    wanted = options.drafts
    return replace(
        options,
        n_batch=min(options.n_batch, 256),
        n_ubatch=min(options.n_ubatch, 256),
        n_threads=options.n_threads if wanted.n_threads is None else wanted.n_threads,
        n_threads_batch=options.n_threads_batch if wanted.n_threads_batch is None else wanted.n_threads_batch,
        type_k=wanted.type_k,
        type_v=wanted.type_v,
        split=wanted.split,
        metadata=(),
        lora=(),
        drafts=DraftOptions(kinds=()),
    )


def open_draft_model(target: GGUFFile, tokenizer: Tokenizer, model: Model, options: EngineOptions) -> DraftFile | None:
    """Open and check the draft model for `model` of the file `target`; None if there is none.

    Raises LlamadoError.
    """
    wanted = options.drafts
    kind = named_kind(options)
    if kind is None:
        return None
    own = own_options(options)
    shared = wanted.model is None
    file = (
        target if wanted.model is None else GGUFFile.open(_fetch(wanted.model, own, target.header), mmap=options.mmap)
    )
    try:
        kind = kind or kind_of(file.header, target.header)
        if kind == "draft-simple":
            check_supported(file.header, workers=own.networked)
            own_tokenizer = load_tokenizer(file.metadata)
            types = target.metadata.str_(_TYPE, ""), file.metadata.str_(_TYPE, "")
            check_vocabularies(tokenizer, own_tokenizer, types)
            return DraftFile(kind, file, own_tokenizer, load_model(file, options.rope), own, shared)
        if own.networked:
            raise EngineError(f"--spec-type {kind}: runs on this machine only; leave out --spec-draft-device")
        own = replace(own, split=None)
        head: Head
        if kind == "draft-mtp":
            head = load_next_token_head(file, options.rope)
        else:
            head = _FUSED[kind](file, model, target, options.rope)
        _check_weights(file.header, head)
        if head.hparams.n_vocab != model.hparams.n_vocab:
            raise EngineError(
                f"{file.source}: it drafts for models of {head.hparams.n_vocab} tokens, this one has "
                f"{model.hparams.n_vocab}"
            )
        return DraftFile(kind, file, tokenizer, head, own, shared, head.features(model.hparams))
    except BaseException:
        if not shared:
            file.close()
        raise


def kind_of(header: Header, target: Header) -> str:
    """Return the kind of a draft file, as `--spec-type` names it. A smaller model's own MTP block is not used."""
    architecture = header.metadata.str_("general.architecture", "")
    for kind, head in _FUSED.items():
        if architecture == head.name:
            return kind
    return "draft-mtp" if has_next_token_head(header, target) else "draft-simple"


def _check_weights(header: Header, head: Head) -> None:
    """Run `check_types` on the weights of a head."""
    check_types(replace(header, tensors={name: t for name, t in header.tensors.items() if name in head.weights}))


def _fetch(source: ModelSource, options: EngineOptions, target: Header) -> Path:
    """Return the draft model's file, fetched first if necessary and possible. Raises LlamadoError."""

    def check(header: Header) -> None:
        if kind_of(header, target) == "draft-simple":
            check_before_fetching(header, options, log.info)

    return resolve(source.spec, hf_repo=source.hf_repo, hf_file=source.hf_file, check=check)


def load_draft_model(draft: DraftFile, beside: Fit, progress: Report | None) -> DraftModel:
    """Load a draft model beside a target with the memory of `beside`.

    Its context is the target's, reduced if memory is short. Raises LlamadoError.
    """
    from llamado.engine.forward.runner import ModelRunner

    file, model = draft.file, draft.model
    options = replace(draft.options, n_ctx=beside.n_ctx_slot * (1 if draft.options.unified else draft.options.n_slots))
    here = options.device()
    wanted = memory_request(options)
    pool: DevicePool | None = None
    if options.split is None:
        figures = before_reading(figures_of(here), file)
        taken = sum(beside.sizes.kv) + beside.sizes.compute + beside.sizes.head_compute
        found = fit(file, model, wanted, [replace(figures, free=max(figures.free - taken, 0))], None)
    else:
        from llamado.engine.forward.device_pool import DevicePool

        pool = DevicePool(
            options.split, LocalDevices(here, open_accelerators(options.split)), file, model, wanted, progress
        )
        found = pool.fit
    for note in found.notes:
        log.warning("draft model: %s", note)
    log.info("draft model: %s", found)
    runner = ModelRunner(
        file,
        model,
        [here] if pool is None else pool.devices,
        replace(found.runner_options, mlock=options.mlock),
        None if pool is None else found.placement,
        progress,
    )
    try:
        runner.warm_up([*range(1, min(options.n_slots, 8) + 1), runner.max_batch], progress)
    except BaseException:
        runner.close()
        raise
    return DraftModel(draft, runner)
