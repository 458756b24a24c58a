"""A model that is loaded once and answers any number of requests, from any thread.

>>> from llamado.engine.loaded_model import LoadedModel
>>> with LoadedModel.load("smollm2") as llama:
...     print(llama.chat([{"role": "user", "content": "Hello!"}], n_predict=32))
...     for piece in llama.generate("Once upon a time", stream=True, seed=1):
...         print(piece, end="", flush=True)
"""

from __future__ import annotations

import logging
import os
import queue
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, overload

from llamado.devices.accelerators import LocalDevices
from llamado.devices.device import Device, DeviceFull, is_accelerator
from llamado.devices.limits import memory
from llamado.devices.split.measure import figures_of
from llamado.engine.cache.disk_cache import check_folder
from llamado.engine.drafts.drafts import DraftManager
from llamado.engine.drafts.load import DraftModel, drafts_for, load_draft_model, open_draft_model
from llamado.engine.embedding.embedder import Embedder
from llamado.engine.embedding.load import NoGeneration, load_embedder
from llamado.engine.engine import Engine, EngineParts
from llamado.engine.errors import EngineError
from llamado.engine.forward.contract import Forward, Scales, as_scales
from llamado.engine.forward.fitting import Fit, before_reading, fit, memory_request, prompt_memory
from llamado.engine.forward.graphs import FEW
from llamado.engine.local_devices import Reserve, with_accelerators
from llamado.engine.lora_scales import DefaultScales, default_scales
from llamado.engine.media.encoder_runner import EncoderRunner
from llamado.engine.media.load import open_projector
from llamado.engine.media.spans import text_tokens
from llamado.engine.media.stage import MediaStage
from llamado.engine.options import FETCHING, EngineOptions, ModelSource, Report
from llamado.engine.request import Defaults, Done, Event, Failure, Result, Token
from llamado.engine.supported import check_supported, check_types, fetch_model, with_projector
from llamado.gguf.metadata import Metadata
from llamado.gguf.reader import GGUFFile
from llamado.media.chunks import MediaPrompt, tokenize
from llamado.media.media import MARKER, Media
from llamado.models import InvalidAdapter, Model, load_adapters, load_control, load_model
from llamado.models.encoders.registry import MediaEncoders
from llamado.models.hparams import override_metadata
from llamado.text.template import rendering
from llamado.text.template.chat import KEY, ChatTemplate
from llamado.text.tokenizer.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from llamado.engine.forward.device_pool import DevicePool
    from llamado.engine.forward.runner import ModelRunner
    from llamado.engine.topology.topology import Topology

log = logging.getLogger(__name__)

Prompt = str | Sequence[int]

_DEFAULTS = EngineOptions()

MOST_TOKENS = 1024
"""Most tokens of an answer if the model has no end-of-answer token."""


@dataclass(eq=False, repr=False)
class LoadedModel:
    """A model with everything that answers requests.

    Options of `generate` and `chat` are the fields of Request and Sampling by name: `n_predict`, `stop`, `seed`,
    `temperature`, `top_k` …
    """

    file: GGUFFile
    model: Model
    tokenizer: Tokenizer
    template: ChatTemplate
    forward: Forward
    engine: Engine | NoGeneration
    defaults: Defaults = field(default_factory=Defaults)
    lacks: tuple[str, ...] = ()
    """Features that the model lacks to end its answers (see `lacks`); they end at MOST_TOKENS then."""
    embedder: Embedder | None = None
    """Computes embeddings; its forward pass is `forward`, or its own."""
    cluster: Topology | None = None
    """The devices that the model is divided among; None: only the CPU of this machine."""
    draft: DraftModel | None = None
    media: EncoderRunner | None = None
    """The encoders of pictures and sounds."""

    @classmethod
    def load(
        cls,
        source: str | os.PathLike[str] | ModelSource,
        options: EngineOptions = _DEFAULTS,
        *,
        defaults: Defaults | None = None,
        progress: Report | None = None,
    ) -> Self:
        """Load a model: a path, a spec of `llamado.gguf.sources.resolve.resolve` ("smollm2", "hf:user/repo"), a source.

        If memory is short, the context is reduced, with a warning (see engine.forward.fitting.fit). `progress` is
        called with the progress of fetching and loading. Raises the packages' errors: SourceError, GgufError,
        UnsupportedModel, InvalidAdapter, TokenizerError, TemplateError, EngineError, NotEnoughMemory.
        """
        if options.embeds and options.networked:
            raise EngineError("embeddings are computed on this machine only, not by workers")
        rendering.start()  # it starts while the model is loaded
        if not isinstance(source, ModelSource):
            source = ModelSource(spec=os.fspath(source))
        report = progress or (lambda *_: None)
        fetching = f"{FETCHING}{source.name}"
        with ExitStack() as opened:
            split = options.split
            options, accelerators = with_accelerators(options)
            opened.callback(accelerators.close)
            workers = options.networked
            path = fetch_model(source, options, progress=lambda done, total: report(fetching, done, total))
            options = with_projector(source, options, progress=lambda done, total: report(fetching, done, total))
            report("opening the model", 0, 0)
            memory_request(options)  # reports their errors before the file is opened
            file = GGUFFile.open(path, mmap=options.mmap)
            opened.callback(file.close)
            if options.metadata:
                file.metadata = override_metadata(file.metadata, options.metadata)
            check_supported(file.header, workers=workers)
            model = load_model(file, options.rope)
            for adapter in load_adapters(model, [path for path, _ in options.lora], mmap=options.mmap):
                opened.callback(adapter.file.close)
                check_types(adapter.file.header, workers=workers)
            if options.control:
                if not model.generates:
                    raise InvalidAdapter(
                        "control vectors apply to models that generate text; this one computes embeddings"
                    )
                hp = model.hparams
                model.control = load_control(hp.n_embd, hp.n_layer, options.control, options.control_layers)
            invocations = [adapter.invocation for adapter in model.adapters]
            if options.embeds and any(invocations):
                raise InvalidAdapter("activated LoRA adapters apply to generated text only, not to embeddings")
            scales = default_scales([scale for _, scale in options.lora], options.lora_apply, invocations)
            tokenizer = load_tokenizer(file.metadata)
            template = ChatTemplate.from_metadata(file.metadata, tokenizer, options.chat_template)
            missing: list[str] = []
            embedder: Embedder | None = None
            draft: DraftModel | None = None
            media: EncoderRunner | None = None
            cluster: Topology | None = None
            forward: Forward
            engine: Engine | NoGeneration
            if options.mmproj is not None and not model.generates:
                raise EngineError("--mmproj: this model computes embeddings of text, and takes no pictures or sounds")
            if options.embeds and not model.generates:
                forward, embedder = load_embedder(
                    file, model, options, progress, lambda: scales.now, accelerators=accelerators
                )
                engine = NoGeneration(embedder, options.n_slots, scales)
            else:
                missing = lacks(file.metadata, tokenizer, options.chat_template)
                for what in missing:
                    log.warning("%s", what)
                if options.cache_disk is not None:
                    check_folder(Path(options.cache_disk))
                drafting = open_draft_model(file, tokenizer, model, options)
                if drafting is not None:
                    opened.callback(drafting.close)
                projector = open_projector(model, tokenizer, options)
                here = options.device()
                reserve = Reserve(0, 0) if drafting is None else drafting.reserve()
                if projector is not None:
                    opened.callback(projector.close)
                    projector.open_accelerator(options, split, here)
                    needed = projector.reserve()
                    reserve = Reserve(reserve.cpu + needed.cpu, reserve.accelerators + needed.accelerators)
                features = () if drafting is None else drafting.features
                local = LocalDevices(here, accelerators, reserve.accelerators)
                runner, found, pool = _runner(file, model, options, progress, scales.now, reserve.cpu, features, local)
                forward = runner
                opened.callback(runner.close)
                if drafting is not None:
                    draft = load_draft_model(drafting, found, progress)
                    opened.callback(draft.runner.close)
                drafts = drafts_for(options, draft, runner.n_vocab)
                media = None if projector is None else projector.load(here, progress)
                stage = MediaStage(media, multi_positions=model.multi_positions)
                engine = generating = _engine(runner, tokenizer, options, found.n_ctx_slot, scales, drafts, stage, here)
                opened.callback(engine.close)
                if pool is not None:
                    from llamado.engine.topology.topology import Topology

                    cluster = Topology(pool, runner, generating.between_steps)
                if options.embeds:
                    now = lambda: as_scales(generating.lora)  # noqa: E731
                    alone = replace(options, split=None)
                    _, embedder = load_embedder(file, model, alone, progress, now, beside=found)
            opened.pop_all()
        return cls(
            file,
            model,
            tokenizer,
            template,
            forward,
            engine,
            defaults or Defaults(),
            lacks=tuple(missing),
            embedder=embedder,
            cluster=cluster,
            draft=draft,
            media=media,
        )

    def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = True) -> list[int]:
        """Return the token ids of a text; `add_special` adds the model's begin (and end) token."""
        return self.tokenizer.encode(text, add_special=add_special, parse_special=parse_special)

    @property
    def encoders(self) -> MediaEncoders | None:
        """The encoders of the projector file; None without one."""
        return None if self.media is None else self.media.encoders

    def media_prompt(
        self, text: str, media: Sequence[Media], *, add_special: bool = True, marker: str = MARKER
    ) -> MediaPrompt:
        """Tokenize a text in which each `marker` stands for the next of `media`, as mtmd_tokenize does.

        `add_special` adds the model's begin (and end) token. Raises MediaError, and ValueError if there are more or
        fewer markers than media. Any thread.
        """
        tokenizer = self.tokenizer
        prepare = MediaEncoders().prepare if self.media is None else self.media.prepare
        bos = tokenizer.bos if add_special and tokenizer.add_bos else None
        eos = tokenizer.eos if add_special and tokenizer.add_eos else None
        return tokenize(text, media, tokenizer.encode, tokenizer.find, prepare, bos=bos, eos=eos, marker=marker)

    def detokenize(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Return the text of tokens, without media; `special` includes control tokens."""
        return self.tokenizer.decode(text_tokens(tokens), special=special)

    @overload
    def generate(self, prompt: Prompt, *, stream: Literal[False] = False, **options: Any) -> str: ...
    @overload
    def generate(self, prompt: Prompt, *, stream: Literal[True], **options: Any) -> Iterator[str]: ...
    def generate(self, prompt: Prompt, *, stream: bool = False, **options: Any) -> str | Iterator[str]:
        """Continue a text (or token ids). Return the continuation, or with `stream` an iterator of its pieces.

        Leaving the iterator early (`close()`, or deleting it) ends the request. A model that `lacks` something ends
        after MOST_TOKENS unless `n_predict` is given (-1: no limit). Raises InvalidRequest, ContextExceeded and the
        error that ended the answer.
        """
        if stream:
            return self._stream(prompt, options)
        return self.complete(prompt, **options).content

    def complete(self, prompt: Prompt, **options: Any) -> Result:
        """Like `generate`, but return the whole Result: tokens, probabilities, timings, stop reason."""
        pieces = self.events(prompt, **options)
        try:
            while True:
                next(pieces)
        except StopIteration as end:
            result: Result = end.value
            return result

    @overload
    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, stream: Literal[False] = False,
        template_options: Mapping[str, Any] | None = None, **options: Any,
    ) -> str: ...  # fmt: skip
    @overload
    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, stream: Literal[True],
        template_options: Mapping[str, Any] | None = None, **options: Any,
    ) -> Iterator[str]: ...  # fmt: skip
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        stream: bool = False,
        template_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> str | Iterator[str]:
        """Return the assistant's next message in a conversation (`{"role", "content"}` each), like `generate`.

        If the last message is the assistant's, it is continued, and only the new part is returned. `template_options`
        go to the model's chat template (`tools`, `enable_thinking` …).
        """
        variables = dict(template_options or {})
        if messages and messages[-1]["role"] == "assistant":
            from llamado.text.dialects import ContinuedMessage, Conversation, prepare

            tools, continued = variables.pop("tools", None) or (), ContinuedMessage.of(messages[-1])
            request = Conversation(messages=messages[:-1], tools=tools, continued=continued, template_options=variables)
            text = prepare(self.template, request).prompt
        else:
            text = self.template.render(messages, **variables)
        prompt = self.tokenize(text, add_special=True)
        return self._stream(prompt, options) if stream else self.complete(prompt, **options).content

    def keep_prompts(self, limit: int, folder: Path | None = None, folder_limit: int = 0) -> None:
        """Keep prompts that no slot holds in `limit` bytes of memory, and `folder_limit` bytes of them in a folder.

        Those that were kept before are forgotten, or in their own folder. Raises DiskCacheUnusable, EngineError.
        """
        if not isinstance(self.engine, Engine):
            raise EngineError("a model that only computes embeddings keeps no prompts")
        self.engine.use_prompt_memory(limit, folder, folder_limit)

    def close(self, timeout: float = 0.0) -> None:
        """Stop all computation, after giving running answers `timeout` seconds, then free memory and close the file."""
        if self.embedder is not None:
            self.embedder.close(timeout)
        self.engine.close(timeout)
        if self.draft is not None:
            self.draft.close()
        if self.media is not None:
            self.media.close()
        rendering.end()
        _close(self.forward)
        if self.embedder is not None and id(self.embedder.forward) != id(self.forward):
            _close(self.embedder.forward)
        for opened in (self.file, *(adapter.file for adapter in self.model.adapters)):
            opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stream(self, prompt: Prompt, options: Mapping[str, Any]) -> Iterator[str]:
        for event in self.events(prompt, **options):
            if event.text:
                yield event.text

    def events(self, prompt: Prompt, **options: Any) -> Generator[Token, None, Result]:
        """Like `generate` with `stream`, but yield whole Token events, and return the Result."""
        tokens = self.tokenize(prompt, add_special=True) if isinstance(prompt, str) else prompt
        if self.lacks and options.get("n_predict") is None and self.defaults.n_predict < 0:
            options = {**options, "n_predict": MOST_TOKENS}
        request = self.defaults.request(tokens, **options)
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        task = self.engine.submit(request, events.put)
        try:
            while True:
                event = events.get()
                if isinstance(event, Token):
                    yield event
                elif isinstance(event, Done):
                    return event.result
                elif isinstance(event, Failure):
                    raise event.error
        finally:
            self.engine.cancel(task)


def lacks(metadata: Metadata, tokenizer: Tokenizer, chat_template: str | None) -> list[str]:
    """Return messages about the features that the model lacks to end its answers."""
    found = []
    if chat_template is None and not any(metadata.str_(f"{KEY}{name}", None) for name in ("", ".tool_use")):
        found.append(
            "the model has no chat template: conversations are written as ChatML, which it may not know; "
            "--chat-template gives another"
        )
    if not tokenizer.eog:
        found.append("the model has no end-of-answer token: -n limits its answers")
    return found


def _runner(
    file: GGUFFile,
    model: Model,
    options: EngineOptions,
    progress: Report | None,
    scales: Scales,
    reserved: int,
    features: tuple[int, ...],
    local: LocalDevices,
) -> tuple[ModelRunner, Fit, DevicePool | None]:
    """Load the forward pass of a generating model and prepare batches of all sizes. Return it, the fitted context, and
    the devices it is divided among. `reserved`: bytes of this machine's memory that are left to others; `features`: see
    BatchShape.
    """
    from llamado.engine.forward.runner import ModelRunner

    wanted = memory_request(options)
    pool, here = None, local.cpu
    if options.split is None:
        figures = before_reading(figures_of(here), file)
        found = fit(file, model, wanted, [replace(figures, free=max(figures.free - reserved, 0))], None)
    else:
        from llamado.engine.forward.device_pool import DevicePool

        if progress is not None and options.split.rpc:
            progress("connecting to workers", 0, 0)
        pool = DevicePool(options.split, local, file, model, wanted, progress)
        found = pool.fit
    for note in found.notes:
        log.warning("%s", note)
    log.info("%s", found)
    embeddings = options.mmproj is not None
    runner_options = replace(found.runner_options, mlock=options.mlock, features=features, embeddings=embeddings)
    devices, placement = [here], None
    if pool is not None:
        devices, placement = pool.devices, found.placement
        runner_options = replace(
            runner_options, reconnect=pool.reconnect, replace=pool.replace_lost, wait=pool.split.wait
        )
    try:
        runner = ModelRunner(file, model, devices, runner_options, placement, progress)
    except DeviceFull as error:
        advice = "-ngl with fewer layers or a larger --fit-target leaves more memory free"
        raise DeviceFull(f"{error}; {advice}" if any(map(is_accelerator, devices)) else str(error)) from error
    try:
        drafting = options.draft_kinds and (options.split is None or options.drafts.kinds)
        few = min(max(options.n_slots, 8) if drafting else options.n_slots, FEW)
        runner.warm_up([*range(1, min(few, runner.max_batch) + 1), runner.max_batch], progress, scales)
    except BaseException:
        runner.close()
        raise
    if pool is not None:
        pool.log_placement(runner.placement or found.placement)
    return runner, found, pool


def _engine(
    forward: ModelRunner,
    tokenizer: Tokenizer,
    options: EngineOptions,
    n_ctx: int,
    scales: DefaultScales,
    drafts: DraftManager | None,
    media: MediaStage,
    here: Device,
) -> Engine:
    from llamado.devices.cpu.backend import compiler_of
    from llamado.devices.cpu.top_rows import TopRows

    jit = compiler_of(here)
    top_rows = TopRows(jit)
    jit.release_compiler_pages()
    fitted = replace(
        options,
        n_ctx=n_ctx * (1 if options.unified else options.n_slots),
        cache_ram=prompt_memory(options.cache_ram, memory().total),
    )
    parts = EngineParts(media, top_rows)
    return Engine(forward, tokenizer, fitted, scales=scales, drafts=drafts, parts=parts)


def _close(forward: object) -> None:
    close = getattr(forward, "close", None)
    if close is not None:
        close()
