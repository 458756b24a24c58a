"""The Python API: a model that is loaded once and answers any number of requests, from any thread.

>>> from llamado.engine.llama import Llama
>>> with Llama.load("smollm2") as llama:
...     print(llama.chat([{"role": "user", "content": "Hello!"}], n_predict=32))
...     for piece in llama.generate("Once upon a time", stream=True, seed=1):
...         print(piece, end="", flush=True)
"""

from __future__ import annotations

import logging
import os
import queue
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, overload

from llamado.devices.split.measure import figures_of
from llamado.devices.split.placement import SplitOptions
from llamado.engine.engine import Engine
from llamado.engine.errors import EngineError
from llamado.engine.forward.contract import Forward
from llamado.engine.forward.fitting import Wanted, before_reading, fit
from llamado.engine.forward.lora_scales import default_scales
from llamado.engine.request import Defaults, Done, Event, Failed, Result, Token
from llamado.engine.supported import check_supported
from llamado.gguf.metadata import Metadata
from llamado.gguf.reader import GGUFFile
from llamado.gguf.sources.resolve import resolve
from llamado.gguf.types import TensorType
from llamado.models import KV_TYPES, Adapter, Model, load_adapters, load_model
from llamado.models.hparams import override_metadata
from llamado.text.template import rendering
from llamado.text.template.chat import KEY, ChatTemplate
from llamado.text.tokenizer.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from llamado.engine.forward.runner import ModelRunner

log = logging.getLogger(__name__)

Prompt = str | Sequence[int]

MOST_TOKENS = 1024
"""Where answers of a model end that cannot end them."""


class Llama:
    """A loaded model: `file`, `model`, `tokenizer`, `template`, `forward`, `engine`, and `defaults` of requests.

    Options of `generate` and `chat` are the fields of Request and Sampling by name: `n_predict`, `stop`, `seed`,
    `temperature`, `top_k` …
    """

    def __init__(
        self,
        file: GGUFFile,
        model: Model,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        forward: Forward,
        engine: Engine,
        defaults: Defaults | None = None,
        *,
        lacks: Sequence[str] = (),
    ) -> None:
        """`lacks`: what a model needs to end its answers and has not (see `lacks`); they end at MOST_TOKENS then."""
        self.file = file
        self.model = model
        self.tokenizer = tokenizer
        self.template = template
        self.forward = forward
        self.engine = engine
        self.defaults = defaults if defaults is not None else Defaults()
        self.lacks = tuple(lacks)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        n_ctx: int | None = None,
        n_slots: int = 1,
        unified: bool = True,
        n_batch: int = 2048,
        n_ubatch: int = 512,
        cont_batching: bool = True,
        n_threads: int | None = None,
        n_threads_batch: int | None = None,
        type_k: str = "f16",
        type_v: str = "f16",
        mmap: bool = True,
        mlock: bool = False,
        numa: str | None = None,
        chat_template: str | None = None,
        metadata: Sequence[tuple[str, int | float | bool | str]] = (),
        split: SplitOptions | None = None,
        drafting: bool | None = None,
        context_shift: bool = False,
        cache_ram: int = 0,
        cache_idle_slots: bool = False,
        slot_prompt_similarity: float = 0.1,
        max_queue: int = 1024,
        lora: Sequence[tuple[str | os.PathLike[str], float]] = (),
        lora_apply: bool = True,
        defaults: Defaults | None = None,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> Self:
        """Load a model: a path, or a spec of `llamado.gguf.sources.resolve.resolve` ("smollm2", "hf:user/repo").

        `n_ctx`: tokens of context (None or 0: as many as the model was trained with), shared by all slots, or with
        `unified=False` divided by `n_slots`; cut, and said, where memory is short (see engine.fitting.fit).
        `n_batch`, `n_ubatch`: most tokens in a step and in a forward pass.
        `type_k`, `type_v`: types of the KV cache. `mmap=False` reads the file into memory, `mlock` keeps it there,
        `numa` places the threads ("distribute", "isolate", "numactl"). `split` divides the model among workers.
        `metadata`: values in place of the file's (see models.hparams.override_metadata).
        `drafting` evaluates probable next tokens along (None: where a model is divided among workers).
        `context_shift`, `cache_ram`, `cache_idle_slots` (with `unified`, their cells are free at once),
        `slot_prompt_similarity`, `max_queue`: see Engine. `lora`: files of adapters with their scales, which count from
        the start unless `lora_apply` is off. `progress(what, done, total)` is told how far loading is. Raises the
        rooms' errors: SourceError, GgufError, UnsupportedModel, InvalidAdapter, TokenizerError, TemplateError.
        """
        rendering.start()  # it gets ready while the model is loaded
        # The compiler takes longest to import, and a file with a wrong name should not wait for it.
        check = partial(check_supported, workers=split is not None)
        file = GGUFFile.open(resolve(path, check=check), mmap=mmap)
        forward: ModelRunner | None = None
        adapters: tuple[Adapter, ...] = ()
        try:
            if metadata:
                file.metadata = override_metadata(file.metadata, metadata)
            check(file.header)
            model = load_model(file)
            adapters = load_adapters(model, [path for path, _ in lora], mmap=mmap)
            scales = default_scales([scale for _, scale in lora], lora_apply)
            tokenizer = load_tokenizer(file.metadata)
            template = ChatTemplate.from_metadata(file.metadata, tokenizer, chat_template)
            missing = lacks(file.metadata, tokenizer, chat_template)
            for what in missing:
                log.warning("%s", what)
            from llamado.devices.cpu.device import CpuDevice
            from llamado.engine.forward.runner import ModelRunner

            max_batch = min(n_batch, n_ubatch)
            types = cache_type(type_k), cache_type(type_v)
            here = CpuDevice(n_threads, n_threads_batch, numa=numa)
            wanted = Wanted(n_ctx or 0, n_slots, unified, max_batch, *types)
            house = None
            if split is None:
                found = fit(file, model, wanted, [before_reading(figures_of(here), file)], None)
            else:
                from llamado.engine.forward.device_pool import House

                if progress is not None:
                    progress("connecting to workers", 0, 0)
                house = House(split, here, file, model, wanted)
                found = house.fit
            for note in found.notes:
                log.warning("%s", note)
            forward = ModelRunner(
                file,
                model,
                [here] if house is None else house.devices,
                None if house is None else found.placement,
                n_cells=found.n_cells,
                max_batch=max_batch,
                type_k=types[0],
                type_v=types[1],
                mlock=mlock,
                progress=progress,
                reconnect=None if house is None else house.reconnect,
                replace=None if house is None else house.without,
            )
            forward.warm_up(
                [*range(1, min(n_slots, forward.max_batch, 8) + 1), forward.max_batch], progress, scales.now
            )
            engine = Engine(
                forward,
                tokenizer,
                n_slots=n_slots,
                n_ctx=found.n_ctx_slot,
                n_batch=n_batch,
                cont_batching=cont_batching,
                slot_prompt_similarity=slot_prompt_similarity,
                context_shift=context_shift,
                cache_ram=cache_ram,
                idle_slots=("clear" if unified else "keep") if cache_idle_slots and cache_ram else None,
                max_queue=max_queue,
                lora=scales.each,
                drafting=split is not None if drafting is None else drafting,
                failover=None if split is None else split.failover,
                wait=30.0 if split is None else split.wait,
            )
        except BaseException:
            _close(forward)
            for opened in (file, *(adapter.file for adapter in adapters)):
                opened.close()
            raise
        return cls(file, model, tokenizer, template, forward, engine, defaults, lacks=missing)

    def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = True) -> list[int]:
        """Token ids of a text; `add_special` adds the model's begin (and end) token."""
        return self.tokenizer.encode(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """The text of tokens; `special` writes control tokens out."""
        return self.tokenizer.decode(tokens, special=special)

    @overload
    def generate(self, prompt: Prompt, *, stream: Literal[False] = False, **options: Any) -> str: ...
    @overload
    def generate(self, prompt: Prompt, *, stream: Literal[True], **options: Any) -> Iterator[str]: ...
    def generate(self, prompt: Prompt, *, stream: bool = False, **options: Any) -> str | Iterator[str]:
        """Continue a text (or token ids): the whole continuation, or with `stream` an iterator of its pieces.

        Leaving the iterator early (`close()`, or letting it go) ends the request. A model that `lacks` something ends
        after MOST_TOKENS unless `n_predict` is given (-1: no limit). Raises InvalidRequest, ContextExceeded and
        whatever ended the answer.
        """
        if stream:
            return self._stream(prompt, options)
        return self.complete(prompt, **options).content

    def complete(self, prompt: Prompt, **options: Any) -> Result:
        """As `generate`, with all that is known of the answer: tokens, probabilities, timings, why it ended."""
        pieces = self._run(prompt, options)
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
        """The assistant's next message in a conversation (`{"role", "content"}` each), as `generate` gives it.

        A last message of the assistant has begun and goes on; given is what is new. `template_options` go to the
        model's chat template (`tools`, `enable_thinking` …).
        """
        variables = dict(template_options or {})
        if messages and messages[-1]["role"] == "assistant":
            from llamado.text.dialects import ChatRequest, Continued, prepare

            tools, continued = variables.pop("tools", None) or (), Continued.of(messages[-1])
            request = ChatRequest(messages=messages[:-1], tools=tools, continued=continued, template_options=variables)
            text = prepare(self.template, request).prompt
        else:
            text = self.template.render(messages, **variables)
        prompt = self.tokenize(text, add_special=True)
        return self._stream(prompt, options) if stream else self.complete(prompt, **options).content

    def close(self, timeout: float = 0.0) -> None:
        """End the engine, giving running answers `timeout` seconds, then free memory and the file."""
        self.engine.close(timeout)
        rendering.end()
        _close(self.forward)
        for opened in (self.file, *(adapter.file for adapter in self.model.adapters)):
            opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stream(self, prompt: Prompt, options: Mapping[str, Any]) -> Iterator[str]:
        yield from self._run(prompt, options)

    def _run(self, prompt: Prompt, options: Mapping[str, Any]) -> Generator[str, None, Result]:
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
                    if event.text:
                        yield event.text
                elif isinstance(event, Done):
                    return event.result
                elif isinstance(event, Failed):
                    raise event.error
        finally:
            self.engine.cancel(task)


def lacks(metadata: Metadata, tokenizer: Tokenizer, chat_template: str | None) -> list[str]:
    """What keeps a model from ending its answers, in words for the user."""
    found = []
    if chat_template is None and not any(metadata.str_(f"{KEY}{name}", None) for name in ("", ".tool_use")):
        found.append(
            "the model has no chat template: conversations are written as ChatML, which it may not know; "
            "--chat-template gives another"
        )
    if not tokenizer.eog:
        found.append("the model has no token that ends an answer: -n says how long one gets")
    return found


def cache_type(name: str) -> TensorType:
    """The type that a flag's word for it means; raises EngineError."""
    try:
        return TensorType[name.upper()]
    except KeyError:
        known = ", ".join(type.name.lower() for type in KV_TYPES)
        raise EngineError(f"a KV cache of type {name!r} is not known; known are {known}") from None


def _close(forward: Forward | None) -> None:
    close = getattr(forward, "close", None)
    if close is not None:
        close()
