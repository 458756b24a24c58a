"""The class `Llama`: a model, its tokenizer, completions, chats and embeddings.

>>> from llamado import Llama
>>> llm = Llama(model_path="smollm2")
>>> llm("Q: Name the planets in the solar system? A: ", max_tokens=32, stop=["Q:"])["choices"][0]["text"]
>>> for chunk in llm.create_chat_completion([{"role": "user", "content": "Hello!"}], stream=True):
...     print(chunk["choices"][0]["delta"].get("content", ""), end="")
"""

from __future__ import annotations

import logging
import os
import random
import secrets
import tempfile
import weakref
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

from llamado.engine.embedding.pooling import normalize as normalized
from llamado.engine.engine import Engine
from llamado.engine.loaded_model import LoadedModel
from llamado.engine.supported import check_supported
from llamado.errors import LlamadoError
from llamado.gguf.sources.hub import fetch_hub_model
from llamado.library.cache import BaseLlamaCache
from llamado.library.chat import ChatCompletion, limits, prepared_chat
from llamado.library.completion import Completion, Events, last
from llamado.library.errors import LibraryError
from llamado.library.evaluation import Evaluation
from llamado.library.grammar import LlamaGrammar
from llamado.library.hooks import Hooks, Logits, TokenArray
from llamado.library.options import (
    LlamaPromptLookupDecoding,
    SamplingOptions,
    Value,
    engine_options,
    is_random,
    request_fields,
)
from llamado.models.hparams import Pooling
from llamado.text.grammar.compiler import GrammarCompiler

Message = Mapping[str, Any]
Vector = list[float]

_RANDOM = 0xFFFFFFFF
"""The seed that asks for a fresh one."""


@dataclass(frozen=True)
class LlamaState:
    """What a model remembers of its last prompt and answer; another `Llama` of the same model can take it."""

    data: bytes
    tokens: tuple[int, ...] = ()
    """The sequence that `eval` extends."""


class Llama:
    """A language model. Its answers have the same bytes for the same prompt, seed and options, whatever came before.

    All methods may be called from any thread; `n_slots` requests are answered at a time, others wait.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        n_gpu_layers: int | None = None,
        tensor_split: Sequence[float] | None = None,
        rpc_servers: str | None = None,
        use_mmap: bool = True,
        use_mlock: bool = False,
        kv_overrides: Mapping[str, Value] | None = None,
        seed: int = _RANDOM,
        n_ctx: int = 512,
        n_batch: int = 512,
        n_ubatch: int = 512,
        n_threads: int | None = None,
        n_threads_batch: int | None = None,
        rope_scaling_type: int | None = -1,
        pooling_type: int = -1,
        rope_freq_base: float = 0.0,
        rope_freq_scale: float = 0.0,
        yarn_ext_factor: float = -1.0,
        yarn_attn_factor: float = 1.0,
        yarn_beta_fast: float = 32.0,
        yarn_beta_slow: float = 1.0,
        yarn_orig_ctx: int = 0,
        embedding: bool = False,
        logits_all: bool = False,
        last_n_tokens_size: int = 64,
        lora_path: str | None = None,
        lora_scale: float = 1.0,
        numa: bool | int | str = False,
        chat_format: str | None = None,
        draft_model: LlamaPromptLookupDecoding | None = None,
        type_k: int | str | None = None,
        type_v: int | str | None = None,
        spm_infill: bool = False,
        verbose: bool = True,
        n_slots: int = 1,
        **others: Any,
    ) -> None:
        """Load the model at `model_path`: a file, or a name that `llamado pull` takes.

        `n_ctx`: tokens of context of all slots together, 0 for as many as the model was trained with. `n_gpu_layers`
        and `tensor_split` say how layers are divided between this machine and the workers `rpc_servers`
        ("host:port,host:port"); -1 layers: all of them. `seed`: of requests without one of their own. `embedding`:
        whether `embed` is possible, beside answers. `logits_all`: whether `scores` has the logits behind every
        evaluated token, n_ctx · n_vocab numbers. `last_n_tokens_size`: how far penalties look back.
        `verbose`: what there is to say goes to `logging`, as the logger "llamado"; False: nothing below an error.
        Arguments of llama-cpp-python that mean nothing on this machine are taken without effect. Raises LlamadoError:
        one of the rooms' own, or LibraryError for what is not possible.
        """
        options = engine_options(
            n_gpu_layers=n_gpu_layers,
            tensor_split=tensor_split,
            rpc_servers=rpc_servers,
            use_mmap=use_mmap,
            use_mlock=use_mlock,
            kv_overrides=kv_overrides,
            n_ctx=n_ctx,
            n_batch=n_batch,
            n_ubatch=n_ubatch,
            n_threads=n_threads,
            n_threads_batch=n_threads_batch,
            rope={
                "rope_scaling_type": rope_scaling_type,
                "rope_freq_base": rope_freq_base,
                "rope_freq_scale": rope_freq_scale,
                "yarn_ext_factor": yarn_ext_factor,
                "yarn_attn_factor": yarn_attn_factor,
                "yarn_beta_fast": yarn_beta_fast,
                "yarn_beta_slow": yarn_beta_slow,
                "yarn_orig_ctx": yarn_orig_ctx,
            },
            pooling_type=pooling_type,
            embedding=embedding,
            lora_path=lora_path,
            lora_scale=lora_scale,
            numa=numa,
            chat_format=chat_format,
            draft_model=draft_model,
            type_k=type_k,
            type_v=type_v,
            n_slots=n_slots,
            others=others,
        )
        if not verbose:
            logging.getLogger("llamado").setLevel(logging.ERROR)
        self.model_path = os.fspath(model_path)
        self.verbose = verbose
        self.n_batch = n_batch
        self.spm_infill = spm_infill
        self._last_n = last_n_tokens_size
        self.set_seed(seed)
        self._model = LoadedModel.load(model_path, options)
        self._grammars: GrammarCompiler | None = None
        self._logits_all = logits_all
        self._evaluated: Evaluation | None = None
        self.cache: BaseLlamaCache | None = None
        # Whoever lets go of a model without closing it, or ends the program, leaves no threads in the middle of things.
        self._end = weakref.finalize(self, self._model.close)

    @classmethod
    def from_pretrained(
        cls,
        repo_id: str,
        filename: str | None = None,
        additional_files: Sequence[str] | None = None,
        local_dir: None = None,
        local_dir_use_symlinks: bool | Literal["auto"] = "auto",
        cache_dir: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> Self:
        """A model of the Hugging Face hub, fetched into the hub's cache unless it is there.

        `filename`: a file, or a pattern that one file matches; None: the usual quantization. All parts of a divided
        model are fetched with its first. `options`: see the class. Raises SourceError.
        """
        if local_dir is not None:
            raise LibraryError("local_dir is not supported: models lie in the hub's cache; cache_dir moves it")
        path = fetch_hub_model(
            repo_id,
            file_name=filename,
            cache_dir=None if cache_dir is None else Path(cache_dir),
            check=check_supported,
        )
        return cls(path, **options)

    # -- text and tokens -----------------------------------------------------------------------------------------------

    def tokenize(self, text: bytes | str, add_bos: bool = True, special: bool = False) -> list[int]:
        """The tokens of a text in UTF-8; `add_bos` adds those at its ends, `special` reads control tokens in it."""
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return self._model.tokenizer.encode(text, add_special=add_bos, parse_special=special)

    def detokenize(
        self, tokens: Sequence[int], prev_tokens: Sequence[int] | None = None, special: bool = False
    ) -> bytes:
        """The text of tokens, in UTF-8 unless it ends inside of a character; `special` writes control tokens out.

        A space that only the beginning of a text has is left out behind a beginning token.
        """
        tokenizer, ids = self._model.tokenizer, list(tokens)
        text = tokenizer.join(ids, special=special)
        first = bool(ids) and ids[0] == tokenizer.bos and not prev_tokens
        return text.removeprefix(b" ") if first else text

    def n_ctx(self) -> int:
        """Tokens of context of one request."""
        return self._model.engine.n_ctx

    def n_vocab(self) -> int:
        """How many tokens there are."""
        return self._model.tokenizer.n_vocab

    def n_embd(self) -> int:
        """The length of the vectors inside the model."""
        return self._model.model.hparams.n_embd

    def token_bos(self) -> int:
        """The token that begins texts; -1: none."""
        return _number(self._model.tokenizer.bos)

    def token_eos(self) -> int:
        """The token that ends texts; -1: none."""
        return _number(self._model.tokenizer.eos)

    def token_nl(self) -> int:
        """The token of a line's end; -1: none."""
        return _number(self._model.tokenizer.newline)

    def pooling_type(self) -> int:
        """How texts' vectors are made of tokens' vectors: llama.cpp's number."""
        return int(self._embedder().pooling)

    @property
    def metadata(self) -> dict[str, str]:
        """What the file says of the model, but for lists."""
        found = {}
        for key, value in self._model.file.metadata.items():
            if isinstance(value, bool):
                found[key] = "true" if value else "false"
            elif isinstance(value, str | int | float):
                found[key] = str(value)
        return found

    # -- answers -------------------------------------------------------------------------------------------------------

    def set_seed(self, seed: int) -> None:
        """What the seeds of requests come from that bring none."""
        self._seeds = None if is_random(seed) else random.Random(seed)

    def generate(
        self, tokens: Sequence[int], temp: float = 0.8, reset: bool = True, grammar: LlamaGrammar | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Generator[int, Sequence[int] | None, None]:  # fmt: skip
        """The tokens that follow a prompt, until the model ends its answer or the context is full.

        `reset`: whether the prompt is a sequence of its own; False: it follows what was evaluated. Tokens that are sent
        into the generator come behind the one that it gave last.
        """
        evaluation = self._evaluation()
        prompt = [*([] if reset else self._input_ids.tolist()), *tokens]
        fields, hooks = self._fields(temp, None, None, sampling, grammar)
        while True:
            sent: Sequence[int] | None = None
            evaluation.begin(prompt)
            with closing(self._events(prompt, fields, hooks)) as events:
                for token in (token for event in events for token in event.tokens):
                    sent = yield token
                    evaluation.note(token)
                    prompt.append(token)
                    if sent:
                        break
            if not sent:
                return
            if grammar is not None:
                raise LibraryError("tokens cannot be sent into an answer that a grammar limits")
            prompt += sent

    @overload
    def create_completion(
        self, prompt: str | Sequence[int], suffix: str | None = None, max_tokens: int | None = 16,
        temperature: float = 0.8, *, logprobs: int | None = None, echo: bool = False,
        stop: str | Sequence[str] | None = (), stream: Literal[False] = False, model: str | None = None,
        grammar: LlamaGrammar | None = None, **sampling: Unpack[SamplingOptions],
    ) -> dict[str, Any]: ...  # fmt: skip
    @overload
    def create_completion(
        self, prompt: str | Sequence[int], suffix: str | None = None, max_tokens: int | None = 16,
        temperature: float = 0.8, *, logprobs: int | None = None, echo: bool = False,
        stop: str | Sequence[str] | None = (), stream: Literal[True], model: str | None = None,
        grammar: LlamaGrammar | None = None, **sampling: Unpack[SamplingOptions],
    ) -> Iterator[dict[str, Any]]: ...  # fmt: skip
    def create_completion(
        self,
        prompt: str | Sequence[int],
        suffix: str | None = None,
        max_tokens: int | None = 16,
        temperature: float = 0.8,
        *,
        logprobs: int | None = None,
        echo: bool = False,
        stop: str | Sequence[str] | None = (),
        stream: bool = False,
        model: str | None = None,
        grammar: LlamaGrammar | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> dict[str, Any] | Iterator[dict[str, Any]]:
        """Continue a text, or tokens: an object in OpenAI's form, or with `stream` an iterator of its chunks.

        `max_tokens`: None or 0 for as many as the context holds. `suffix` is what follows the gap that is filled in,
        with models that know how; behind others' answers it is put. `logprobs`: how many likeliest tokens are shown at
        each place. `echo`: the whole answer begins with the prompt, whose tokens have `logprobs`, too. Raises
        LlamadoError.
        """
        text = prompt if isinstance(prompt, str) else self._model.detokenize(prompt)
        tokens, after = self._prompt(prompt, suffix)
        fields, hooks = self._fields(temperature, max_tokens, stop, sampling, grammar)
        fields["n_probs"] = logprobs or 0
        whole = echo and not stream
        if whole and logprobs:
            fields |= {"prompt_probs": True, "cache_prompt": False}
        answer = Completion(
            model or self.model_path,
            "" if whole else text,
            before=text if whole else "",
            after=after,
            logprobs=bool(logprobs),
        )
        events = self._events(tokens, fields, hooks)
        return answer.chunks(events) if stream else answer.whole(events)

    __call__ = create_completion

    @overload
    def create_chat_completion(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None, temperature: float = 0.2, stream: Literal[False] = False,
        stop: str | Sequence[str] | None = (), response_format: Mapping[str, Any] | None = None,
        max_tokens: int | None = None, model: str | None = None, grammar: LlamaGrammar | None = None,
        logprobs: bool | None = None, top_logprobs: int | None = None, **sampling: Unpack[SamplingOptions],
    ) -> dict[str, Any]: ...  # fmt: skip
    @overload
    def create_chat_completion(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None, temperature: float = 0.2, stream: Literal[True],
        stop: str | Sequence[str] | None = (), response_format: Mapping[str, Any] | None = None,
        max_tokens: int | None = None, model: str | None = None, grammar: LlamaGrammar | None = None,
        logprobs: bool | None = None, top_logprobs: int | None = None, **sampling: Unpack[SamplingOptions],
    ) -> Iterator[dict[str, Any]]: ...  # fmt: skip
    def create_chat_completion(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        temperature: float = 0.2,
        stream: bool = False,
        stop: str | Sequence[str] | None = (),
        response_format: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        model: str | None = None,
        grammar: LlamaGrammar | None = None,
        logprobs: bool | None = None,
        top_logprobs: int | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> dict[str, Any] | Iterator[dict[str, Any]]:
        """The next message of a conversation: an object in OpenAI's form, or with `stream` an iterator of its chunks.

        `response_format`: {"type": "json_object"}, with "schema" one that the content is an instance of. `tool_choice`:
        auto, none, required, or a function. Raises LlamadoError.
        """
        loaded = self._model
        prepared = prepared_chat(
            loaded.template,
            messages,
            tools=tools,
            tool_choice=tool_choice,
            response_format=response_format,
            grammar=None if grammar is None else grammar.source,
        )
        fields, hooks = self._fields(temperature, max_tokens, stop, sampling, None)
        fields["stop"] += prepared.stops
        fields["n_probs"] = (top_logprobs or 1) if logprobs else 0
        fields |= limits(prepared, self._compiler(), loaded.tokenizer)
        answer = ChatCompletion(model or self.model_path, prepared, logprobs=bool(logprobs))
        events = self._events(loaded.tokenize(prepared.prompt, add_special=True), fields, hooks)
        return answer.chunks(events) if stream else answer.whole(events)

    def _fields(
        self,
        temperature: float,
        max_tokens: int | None,
        stop: str | Sequence[str] | None,
        sampling: Mapping[str, Any],
        grammar: LlamaGrammar | None,
    ) -> tuple[dict[str, Any], Hooks]:
        fields = request_fields(temperature, max_tokens, stop, sampling) | {"repeat_last_n": self._last_n}
        if is_random(fields.get("seed")):
            fields["seed"] = None if self._seeds is None else self._seeds.getrandbits(32)
        if grammar is not None:
            fields["constraint"] = self._compiler().compile(grammar.source)
        return fields, Hooks(sampling.get("logits_processor"), sampling.get("stopping_criteria"))

    def _events(self, tokens: Sequence[int], fields: Mapping[str, Any], hooks: Hooks) -> Events:
        try:
            return (yield from self._model.events(tokens, **fields, **hooks.fields()))
        except LlamadoError:
            if hooks.error is not None:  # the program's own error, as its function raised it
                raise hooks.error from None
            raise

    def _prompt(self, prompt: str | Sequence[int], suffix: str | None) -> tuple[list[int], str]:
        """The tokens of a prompt, and what is put behind the answer."""
        tokenizer = self._model.tokenizer
        if suffix is None or tokenizer.fim_pre is None or tokenizer.fim_suf is None or tokenizer.fim_mid is None:
            tokens = self._model.tokenize(prompt, add_special=True) if isinstance(prompt, str) else list(prompt)
            return tokens, suffix or ""
        before = tokenizer.encode(prompt, parse_special=False) if isinstance(prompt, str) else list(prompt)
        parts = (
            [tokenizer.fim_pre, *before],
            [tokenizer.fim_suf, *tokenizer.encode(suffix, parse_special=False)],
        )
        beginning = [tokenizer.bos] if tokenizer.add_bos and tokenizer.bos is not None else []
        first, second = reversed(parts) if self.spm_infill else parts
        return [*beginning, *first, *second, tokenizer.fim_mid], ""

    def _compiler(self) -> GrammarCompiler:
        if self._grammars is None:
            self._grammars = GrammarCompiler(self._model.tokenizer)
        return self._grammars

    # -- token by token ------------------------------------------------------------------------------------------------

    @property
    def n_tokens(self) -> int:
        """Tokens of the sequence that `eval` extends; a smaller number takes it back to its beginning."""
        return self._evaluation().n_tokens

    @n_tokens.setter
    def n_tokens(self, n: int) -> None:
        evaluation = self._evaluation()
        if not 0 <= n <= evaluation.n_tokens:
            raise LibraryError(f"n_tokens can be 0 to {evaluation.n_tokens}, not {n}")
        evaluation.n_tokens = n

    @property
    def input_ids(self) -> TokenArray:
        """The tokens of the sequence, and behind `n_tokens` of them room for more."""
        return self._evaluation().input_ids

    @property
    def scores(self) -> Logits:
        """Logits by places: of all tokens with `logits_all`, else of the last one, the other rows being 0."""
        return self._evaluation().scores

    @property
    def _input_ids(self) -> TokenArray:
        return self.input_ids[: self.n_tokens]

    @property
    def _scores(self) -> Logits:
        return self.scores[: self.n_tokens]

    @property
    def eval_tokens(self) -> deque[int]:
        """The tokens of the sequence."""
        return deque(self._input_ids.tolist(), maxlen=self.n_ctx())

    @property
    def eval_logits(self) -> deque[list[float]]:
        """The logits behind them: of all with `logits_all`, else of the last one."""
        return deque(self._scores.tolist(), maxlen=self.n_ctx() if self._logits_all else 1)

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens behind those that were evaluated before; `reset` begins anew.

        `eval`, `sample` and `generate` share one sequence for each `Llama`. Raises LlamadoError.
        """
        self._evaluation().extend(list(tokens))

    def sample(
        self, temp: float = 0.8, grammar: LlamaGrammar | None = None, idx: int | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> int:  # fmt: skip
        """Draw the token that follows those evaluated, or with `idx` the one at that place.

        It is not evaluated: `eval([token])` goes on with it. A grammar's text begins where it is first asked for.
        Raises LlamadoError.
        """
        evaluation = self._evaluation()
        fields, hooks = self._fields(temp, None, None, sampling, None)
        if fields["seed"] is None:
            fields["seed"] = secrets.randbits(32)
        limit = None if grammar is None else (grammar, self._compiler().compile(grammar.source).start)
        settings = self._model.defaults.params(**fields).sampling
        return evaluation.sample(settings, self._model.tokenizer, hooks.process, limit, idx)

    def _evaluation(self) -> Evaluation:
        if self._evaluated is None:
            self._engine()
            n_vocab = self._model.forward.n_vocab
            self._evaluated = Evaluation(self.n_ctx(), n_vocab, self._evaluate, logits_all=self._logits_all)
        return self._evaluated

    def _evaluate(self, prompt: Sequence[int], fields: Mapping[str, Any]) -> None:
        last(self._model.events(prompt, **fields))

    # -- embeddings ----------------------------------------------------------------------------------------------------

    def create_embedding(self, input: str | Sequence[str], model: str | None = None) -> dict[str, Any]:
        """The vectors of one or more texts as an object in OpenAI's form. Raises LlamadoError."""
        vectors, n_tokens = self.embed([input] if isinstance(input, str) else input, return_count=True)
        return {
            "object": "list",
            "data": [{"object": "embedding", "embedding": vector, "index": i} for i, vector in enumerate(vectors)],
            "model": model or self.model_path,
            "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
        }

    def embed(
        self, input: str | Sequence[str], normalize: bool = False, truncate: bool = True, return_count: bool = False
    ) -> Any:
        """The vector of a text (of one without pooling: a vector of each token), or a list of them for several texts.

        `normalize`: to length 1. `truncate`: of longer texts than a batch holds only the beginning counts.
        `return_count`: a pair of that and the number of tokens. The model has to be loaded with `embedding=True`.
        Raises LlamadoError.
        """
        embedder = self._embedder()
        texts = [input] if isinstance(input, str) else list(input)
        tokens = [self.tokenize(text) for text in texts]
        if truncate:
            tokens = [one[: self.n_batch] for one in tokens]
        found: list[Vector | list[Vector]] = []
        for one in embedder.submit(tokens).result():
            vectors = normalized(one.vectors, 2) if normalize else one.vectors
            found.append(vectors.tolist() if embedder.pooling is Pooling.NONE else vectors[0].tolist())
        answer = found[0] if isinstance(input, str) else found
        return (answer, sum(map(len, tokens))) if return_count else answer

    def _embedder(self) -> Any:
        if self._model.embedder is None:
            raise LibraryError("vectors need a model that was loaded with embedding=True")
        return self._model.embedder

    # -- state ---------------------------------------------------------------------------------------------------------

    def save_state(self) -> LlamaState:
        """What the model remembers of its last prompt and answer. Raises SlotNotSaved where that is nothing."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "state")
            self._engine().save_slot(0, path).result()
            return LlamaState(path.read_bytes(), tuple(self._input_ids.tolist()))

    def load_state(self, state: LlamaState) -> None:
        """Have the model remember what it did then: a prompt that begins alike is not read again.

        Raises SlotFileError where the state is another model's, or was made with another context or cache.
        """
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "state")
            path.write_bytes(state.data)
            self._engine().restore_slot(0, path).result()
        self._evaluation().begin(state.tokens)

    def set_cache(self, cache: BaseLlamaCache | None) -> None:
        """Keep prompts and answers that slots hold no more in a cache; None: only what slots hold.

        Raises LlamadoError.
        """
        if cache is not None and not isinstance(cache, BaseLlamaCache):
            raise LibraryError("set_cache takes a LlamaRAMCache or a LlamaDiskCache")
        if cache is None:
            self._model.keep_prompts(0)
        else:
            cache.attach(self._model)
        if self.cache is not None:
            self.cache.detach(self._model)
        self.cache = cache

    def reset(self) -> None:
        """Forget all prompts and answers, and what was evaluated."""
        engine = self._engine()
        self._evaluation().n_tokens = 0
        for slot in engine.snapshot().slots:
            engine.erase_slot(slot.id).result()

    def _engine(self) -> Engine:
        engine = self._model.engine
        if not isinstance(engine, Engine):
            raise LibraryError("a model that only makes vectors remembers nothing")
        return engine

    def close(self) -> None:
        """End what computes, and free the memory; a closed model can do nothing more."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _number(token: int | None) -> int:
    return -1 if token is None else token
