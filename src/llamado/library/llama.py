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
from llamado.library.media import ChatMedia
from llamado.library.options import (
    RANDOM,
    LlamaArguments,
    SamplingOptions,
    engine_options,
    is_random,
    request_fields,
)
from llamado.models.hparams import Pooling
from llamado.text.grammar.compiler import GrammarCompiler

Message = Mapping[str, Any]
Vector = list[float]


@dataclass(frozen=True)
class LlamaState:
    """State of a model after its last prompt and answer; another `Llama` of the same model can restore it."""

    data: bytes
    tokens: tuple[int, ...] = ()
    """The sequence that `eval` extends."""


class Llama:
    """A language model. The same prompt, seed and options give the same bytes, regardless of earlier requests.

    All methods may be called from any thread; `n_slots` requests are answered at a time, others wait.
    """

    def __init__(self, model_path: str | os.PathLike[str], **arguments: Unpack[LlamaArguments]) -> None:
        """Load the model at `model_path`: a file, or a name that `llamado pull` accepts.

        `arguments`: see LlamaArguments. Raises LlamadoError: LibraryError for arguments that are not supported, and
        the errors of loading.
        """
        options = engine_options(arguments)
        self.verbose = arguments.get("verbose", True)
        if not self.verbose:
            logging.getLogger("llamado").setLevel(logging.ERROR)
        self.model_path = os.fspath(model_path)
        self.n_batch = options.n_batch
        self.spm_infill = arguments.get("spm_infill", False)
        self._last_n = arguments.get("last_n_tokens_size", 64)
        self._logits_all = arguments.get("logits_all", False)
        self.set_seed(arguments.get("seed", RANDOM))
        self._model = LoadedModel.load(model_path, options)
        self._grammars: GrammarCompiler | None = None
        self._evaluated: Evaluation | None = None
        self.cache: BaseLlamaCache | None = None
        # ends the engine's threads if the object is garbage collected without `close`, or the program ends
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
        **options: Unpack[LlamaArguments],
    ) -> Self:
        """Load a model of the Hugging Face hub; download it to the hub's cache unless it is there.

        `filename`: a file, or a pattern that one file matches; None: the usual quantization. All parts of a split
        model are downloaded with its first. `options`: see LlamaArguments. Raises LlamadoError.
        """
        if local_dir is not None:
            raise LibraryError("local_dir is not supported: models are in the hub's cache; cache_dir moves it")
        path = fetch_hub_model(
            repo_id,
            file_name=filename,
            cache_dir=None if cache_dir is None else Path(cache_dir),
            check=check_supported,
        )
        return cls(path, **options)

    # -- text and tokens -----------------------------------------------------------------------------------------------

    def tokenize(self, text: bytes | str, add_bos: bool = True, special: bool = False) -> list[int]:
        """Return the tokens of a text in UTF-8.

        `add_bos`: add the model's begin and end tokens. `special`: parse control tokens.
        """
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return self._model.tokenizer.encode(text, add_special=add_bos, parse_special=special)

    def detokenize(
        self, tokens: Sequence[int], prev_tokens: Sequence[int] | None = None, special: bool = False
    ) -> bytes:
        """Return the text of tokens, in UTF-8 unless it ends within a character. `special`: include control tokens.

        The space that some tokenizers add to the beginning of a text is removed after a begin token.
        """
        tokenizer, ids = self._model.tokenizer, list(tokens)
        text = tokenizer.join(ids, special=special)
        first = bool(ids) and ids[0] == tokenizer.bos and not prev_tokens
        return text.removeprefix(b" ") if first else text

    def n_ctx(self) -> int:
        """Return the tokens of context of one request."""
        return self._model.engine.n_ctx

    def n_vocab(self) -> int:
        """Return the size of the vocabulary."""
        return self._model.tokenizer.n_vocab

    def n_embd(self) -> int:
        """Return the width of the hidden states."""
        return self._model.model.hparams.n_embd

    def token_bos(self) -> int:
        """Return the begin token; -1: none."""
        return _number(self._model.tokenizer.bos)

    def token_eos(self) -> int:
        """Return the end token; -1: none."""
        return _number(self._model.tokenizer.eos)

    def token_nl(self) -> int:
        """Return the newline token; -1: none."""
        return _number(self._model.tokenizer.newline)

    def pooling_type(self) -> int:
        """Return the pooling of embeddings, as llama.cpp's number."""
        return int(self._embedder().pooling)

    @property
    def metadata(self) -> dict[str, str]:
        """Metadata of the file, except arrays."""
        found = {}
        for key, value in self._model.file.metadata.items():
            if isinstance(value, bool):
                found[key] = "true" if value else "false"
            elif isinstance(value, str | int | float):
                found[key] = str(value)
        return found

    # -- answers -------------------------------------------------------------------------------------------------------

    def set_seed(self, seed: int) -> None:
        """Set the seed from which requests without their own get theirs."""
        self._seeds = None if is_random(seed) else random.Random(seed)

    def generate(
        self, tokens: Sequence[int], temp: float = 0.8, reset: bool = True, grammar: LlamaGrammar | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Generator[int, Sequence[int] | None, None]:  # fmt: skip
        """Yield the tokens that follow a prompt, until the model ends its answer or the context is full.

        `reset`: False to append the prompt to the evaluated sequence. Tokens that are sent into the generator are
        appended after the last one it yielded. Raises LlamadoError.
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
        """Continue a text, or tokens. Return an object in OpenAI's form, or with `stream` an iterator of its chunks.

        `max_tokens`: None or 0 for as many as the context holds. `suffix`: the text after the gap to fill in; models
        without infill tokens get no suffix, and it is appended to their answer. `logprobs`: number of most likely
        tokens listed at each position. `echo`: the answer starts with the prompt, whose tokens have `logprobs`, too;
        ignored with `stream`. Raises LlamadoError.
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
        """Return the next message of a conversation in OpenAI's form, or with `stream` an iterator of its chunks.

        Messages may have pictures and sounds (`image_url`, `input_audio`: paths, `data:` URIs or URLs), if the model
        was loaded with a projector file. `response_format`: {"type": "json_object"}, with "schema" a JSON schema of the
        content. `tool_choice`: auto, none, required, or a function. Raises LlamadoError.
        """
        loaded = self._model
        media = ChatMedia(loaded)
        prepared = prepared_chat(
            loaded.template,
            media.take(messages),
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
        tokens, spans = media.prompt(prepared.prompt)
        events = self._events(tokens, fields | {"media": spans}, hooks)
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
            if hooks.error is not None:  # an error raised by a function of the caller
                raise hooks.error from None
            raise

    def _prompt(self, prompt: str | Sequence[int], suffix: str | None) -> tuple[list[int], str]:
        """Return the tokens of a prompt, and the text to append to the answer."""
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
        """Length of the sequence that `eval` extends; assign a smaller number to truncate it."""
        return self._evaluation().n_tokens

    @n_tokens.setter
    def n_tokens(self, n: int) -> None:
        evaluation = self._evaluation()
        if not 0 <= n <= evaluation.n_tokens:
            raise LibraryError(f"n_tokens can be 0 to {evaluation.n_tokens}, not {n}")
        evaluation.n_tokens = n

    @property
    def input_ids(self) -> TokenArray:
        """Token ids: the sequence in the first `n_tokens` entries, free space after them."""
        return self._evaluation().input_ids

    @property
    def scores(self) -> Logits:
        """Logits by position: of all tokens with `logits_all`, else of the last one; other rows are 0."""
        return self._evaluation().scores

    @property
    def _input_ids(self) -> TokenArray:
        return self.input_ids[: self.n_tokens]

    @property
    def _scores(self) -> Logits:
        return self.scores[: self.n_tokens]

    @property
    def eval_tokens(self) -> deque[int]:
        """Tokens of the sequence."""
        return deque(self._input_ids.tolist(), maxlen=self.n_ctx())

    @property
    def eval_logits(self) -> deque[list[float]]:
        """Logits after each token with `logits_all`, else after the last one."""
        return deque(self._scores.tolist(), maxlen=self.n_ctx() if self._logits_all else 1)

    def eval(self, tokens: Sequence[int]) -> None:
        """Append tokens to the sequence and evaluate them; `reset` starts a new sequence.

        `eval`, `sample` and `generate` share one sequence per `Llama`. Raises LlamadoError.
        """
        self._evaluation().extend(list(tokens))

    def sample(
        self, temp: float = 0.8, grammar: LlamaGrammar | None = None, idx: int | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> int:  # fmt: skip
        """Sample the token after the sequence, or after position `idx`.

        The token is not evaluated: call `eval([token])` to continue with it. A grammar applies from the position at
        which it is first given. Raises LlamadoError.
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
        """Return the embeddings of one or more texts in OpenAI's form. Raises LlamadoError."""
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
        """Return the embedding of a text (without pooling: one vector per token), or a list of them for several texts.

        `normalize`: to length 1. `truncate`: cut texts to the batch size. `return_count`: return the number of tokens,
        too. The model must be loaded with `embedding=True`. Raises LlamadoError.
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
            raise LibraryError("embeddings need a model that was loaded with embedding=True")
        return self._model.embedder

    # -- state ---------------------------------------------------------------------------------------------------------

    def save_state(self) -> LlamaState:
        """Save the sequence of the last prompt and answer. Raises SlotNotSaved if there is none."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "state")
            self._engine().save_slot(0, path).result()
            return LlamaState(path.read_bytes(), tuple(self._input_ids.tolist()))

    def load_state(self, state: LlamaState) -> None:
        """Restore a saved state, so that a prompt with the same beginning is not evaluated again.

        Raises SlotFileError if the state is of another model, context or cache type.
        """
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "state")
            path.write_bytes(state.data)
            self._engine().restore_slot(0, path).result()
        self._evaluation().begin(state.tokens)

    def set_cache(self, cache: BaseLlamaCache | None) -> None:
        """Keep sequences that no slot holds any more in a cache; None: drop them. Raises LlamadoError."""
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
        """Drop all prompts and answers, and the evaluated sequence."""
        engine = self._engine()
        self._evaluation().n_tokens = 0
        for slot in engine.snapshot().slots:
            engine.erase_slot(slot.id).result()

    def _engine(self) -> Engine:
        engine = self._model.engine
        if not isinstance(engine, Engine):
            raise LibraryError("a model that only computes embeddings keeps no sequences")
        return engine

    def close(self) -> None:
        """Stop all computation and free the memory. The model cannot be used afterwards."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _number(token: int | None) -> int:
    return -1 if token is None else token
