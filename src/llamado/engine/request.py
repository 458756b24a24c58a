"""Input and output of the engine: requests, events, results, snapshots.

Field names, defaults and limits are those of llama-server's `/completion` (tools/server/README.md), so that the server
package passes JSON fields through by name.
"""

from __future__ import annotations

import dataclasses
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, overload

from llamado.engine.errors import ContextExceeded, EngineClosed, InvalidRequest
from llamado.engine.sampling.params import Sampling, sampler_names
from llamado.engine.sampling.rng import Seed

if TYPE_CHECKING:  # `--help` imports this module, without numpy
    import numpy as np
    from numpy.typing import NDArray

    from llamado.media.chunks import MediaSpan
    from llamado.text.grammar.compiler import Constraint

    TokenArray = NDArray[np.intc]
    Logits = NDArray[np.float32]
    LogitsProcessor = Callable[[TokenArray, Logits], Logits]
    """Gets the sequence so far and a copy of its next token's logits."""

__all__ = [
    "ContextExceeded",
    "Counters",
    "Defaults",
    "Done",
    "EngineClosed",
    "EngineSnapshot",
    "Event",
    "Failure",
    "GenerationParams",
    "InvalidRequest",
    "Progress",
    "Request",
    "Result",
    "SlotSnapshot",
    "StopType",
    "Timings",
    "Token",
    "TokenProb",
    "TokenProbs",
    "TopTokens",
]

StopType = Literal["none", "eos", "limit", "word"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationParams:
    """Parameters of a generation, without its prompt. All APIs and the engine share them."""

    n_predict: int = -1
    """Most tokens to generate; -1: until the context is full; 0: only evaluate the prompt into the cache."""
    sampling: Sampling = field(default_factory=Sampling)
    stop: Sequence[str] = ()
    n_keep: int = 0
    """Prompt tokens that stay when a full context is shifted, besides a beginning token; -1: all of them."""
    n_discard: int = 0
    """Tokens behind those that are dropped then; 0: half of the others."""
    cache_prompt: bool = True
    id_slot: int = -1
    n_probs: int = 0
    prompt_probs: bool = False
    """Compute probabilities of the prompt's tokens, too; nothing of it is taken from the cache (`cache_prompt`)."""
    post_sampling_probs: bool = False
    return_tokens: bool = False
    return_progress: bool = False
    """Emit a Progress event after each chunk of the prompt."""
    timings_per_token: bool = False
    """Put timings into each Token event."""
    t_max_predict_ms: int = -1
    """Stop at the first newline written after this time (from the first token on); ≤ 0: no limit."""
    n_indent: int = 0
    special: bool = False
    """Write special tokens as text (llama-server's `--special`)."""
    preserved: frozenset[int] = frozenset()
    """Special tokens that are always written as text: those that a parser of the answer needs."""
    lora: Mapping[int, float] = field(default_factory=dict)
    """Scales of LoRA adapters by number, 0 for the others; empty: the engine's default scales."""

    def validate(self) -> None:
        """Raise InvalidRequest for limits out of range."""
        for name, low in (("n_predict", -1), ("n_keep", -1), ("n_discard", 0), ("n_probs", 0), ("n_indent", 0)):
            if getattr(self, name) < low:
                raise InvalidRequest(f"{name} must be {low} or more, not {getattr(self, name)}")
        self.sampling.validate()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to continue."""

    prompt: list[int]
    params: GenerationParams = field(default_factory=GenerationParams)
    media: tuple[MediaSpan, ...] = ()
    """The pictures and sounds in the prompt, whose tokens have ids below zero."""
    constraint: Constraint | None = None
    """The constraint of the answer's tokens."""
    processor: LogitsProcessor | None = None
    """Return the logits that a token is drawn from, given the model's logits. All hooks run on the engine's thread,
    which does nothing else meanwhile. A hook that raises ends its own request only."""
    until: Callable[[TokenArray, Logits], bool] | None = None
    """End the answer before a token if it returns True for the tokens so far and the logits of the next one."""
    on_prompt_row: Callable[[int, Logits], None] | None = None
    """Called with the position of each evaluated prompt token but the last, and the logits after it."""
    tag: object = None
    """A record of the caller's, which results and snapshots return with the request."""

    def validate(self) -> None:
        """Raise InvalidRequest for an empty prompt or limits out of range."""
        if not self.prompt:
            raise InvalidRequest("the prompt has no tokens")
        self.params.validate()


_SAMPLING_FIELDS = frozenset(f.name for f in dataclasses.fields(Sampling))
_PARAMS_FIELDS = frozenset(f.name for f in dataclasses.fields(GenerationParams)) - {"sampling"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """Defaults for the fields that a request leaves out: llama.cpp's values, changed by the server's flags."""

    sampling: Sampling = field(default_factory=Sampling)
    n_predict: int = -1
    n_keep: int = 0
    cache_prompt: bool = True
    stop: tuple[str, ...] = ()
    special: bool = False

    def params(self, **fields: object) -> GenerationParams:
        """Return validated parameters; `fields` are names of GenerationParams or of Sampling, None meaning "not given".

        A `n_predict` of -1 falls back to the default's. Raises InvalidRequest for an unknown name or a bad value.
        """
        given = {name: value for name, value in fields.items() if value is not None}
        unknown = given.keys() - _SAMPLING_FIELDS - _PARAMS_FIELDS
        if unknown:
            raise InvalidRequest(f"unknown field {min(unknown)!r}")
        samplers = given.get("samplers")
        if isinstance(samplers, (str, list, tuple)):
            given["samplers"] = sampler_names(samplers)
        if given.get("n_predict") == -1:
            del given["n_predict"]
        sampling = dataclasses.replace(
            self.sampling,
            **{name: value for name, value in given.items() if name in _SAMPLING_FIELDS},  # type: ignore[arg-type]
        )
        own: dict[str, object] = {
            "n_predict": self.n_predict,
            "n_keep": self.n_keep,
            "cache_prompt": self.cache_prompt,
            "stop": list(self.stop),
            "special": self.special,
        }
        own |= {name: value for name, value in given.items() if name in _PARAMS_FIELDS}
        params = GenerationParams(sampling=sampling, **own)  # type: ignore[arg-type]
        params.validate()
        return params

    def request(
        self,
        prompt: Sequence[int],
        *,
        media: tuple[MediaSpan, ...] = (),
        constraint: Constraint | None = None,
        processor: LogitsProcessor | None = None,
        until: Callable[[TokenArray, Logits], bool] | None = None,
        on_prompt_row: Callable[[int, Logits], None] | None = None,
        **fields: object,
    ) -> Request:
        """Return a validated request; `fields`: see `params`. Raises InvalidRequest."""
        request = Request(
            prompt=list(prompt),
            params=self.params(**fields),
            media=media,
            constraint=constraint,
            processor=processor,
            until=until,
            on_prompt_row=on_prompt_row,
        )
        request.validate()
        return request


class TokenProb(NamedTuple):
    """A token and its probability."""

    id: int
    piece: bytes
    """The token's text; may be part of a UTF-8 character."""
    prob: float
    """Probability after the sampler chain with `post_sampling_probs`, otherwise in the softmax over all raw logits."""
    logprob: float
    """Natural logarithm of the probability; -inf for 0."""


class TopTokens(Sequence[TokenProb]):
    """Likely tokens, the likeliest first, held as numbers (20 bytes each) until they are read.

    A million of them may wait for clients that do not read: as objects they would take ten times as much.
    """

    __slots__ = ("_ids", "_logprobs", "_piece", "_probs")

    def __init__(self, tokens: Iterable[tuple[int, float, float]], piece: Callable[[int], bytes]) -> None:
        """`tokens`: id, probability and its logarithm of each; `piece` returns a token's text."""
        self._ids, self._probs, self._logprobs = array("i"), array("d"), array("d")
        for token, prob, logprob in tokens:
            self._ids.append(token)
            self._probs.append(prob)
            self._logprobs.append(logprob)
        self._piece = piece

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, place: int) -> TokenProb: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[TokenProb, ...]: ...
    def __getitem__(self, place: int | slice) -> TokenProb | tuple[TokenProb, ...]:
        if isinstance(place, slice):
            return tuple(self._named(*found) for found in zip(*(a[place] for a in self._arrays), strict=True))
        return self._named(self._ids[place], self._probs[place], self._logprobs[place])

    def __iter__(self) -> Iterator[TokenProb]:
        return (self._named(*found) for found in zip(*self._arrays, strict=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    @property
    def _arrays(self) -> tuple[array[int], array[float], array[float]]:
        return self._ids, self._probs, self._logprobs

    def _named(self, token: int, prob: float, logprob: float) -> TokenProb:
        return TokenProb(token, self._piece(token), prob, logprob)


class TokenProbs(NamedTuple):
    """A generated token and the `n_probs` most likely ones at its position."""

    token: TokenProb
    top: Sequence[TokenProb]


class Timings(NamedTuple):
    """Counts and milliseconds of one request, like llama-server's `timings`.

    The first token comes out of the prompt's last batch, so generation rates divide by one token less.
    """

    cache_n: int = 0
    """Prompt tokens taken from the cache."""
    prompt_n: int = 0
    """Prompt tokens computed."""
    prompt_ms: float = 0.0
    predicted_n: int = 0
    predicted_ms: float = 0.0
    draft_n: int | None = None
    """Number of draft tokens; None without drafts."""
    draft_n_accepted: int | None = None

    @property
    def prompt_per_token_ms(self) -> float:
        return self.prompt_ms / self.prompt_n if self.prompt_n else 0.0

    @property
    def prompt_per_second(self) -> float:
        return 1e3 * self.prompt_n / self.prompt_ms if self.prompt_ms > 0 else 0.0

    @property
    def predicted_per_token_ms(self) -> float:
        return self.predicted_ms / (self.predicted_n - 1) if self.predicted_n > 1 else 0.0

    @property
    def predicted_per_second(self) -> float:
        return 1e3 * (self.predicted_n - 1) / self.predicted_ms if self.predicted_ms > 0 and self.predicted_n else 0.0


@dataclass(frozen=True, slots=True)
class Token:
    """A token was generated."""

    text: str
    """Complete UTF-8; "" while a character is incomplete or a stop string may be starting."""
    tokens: list[int]
    probs: list[TokenProbs] | None
    index: int
    """Position of the first of `tokens` in the answer, from 0."""
    timings: Timings | None = None
    prompt_probs: Sequence[TokenProbs] = ()
    """With the first token: those of the prompt, as in Result."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a prompt: before its first chunk is evaluated, and after each."""

    total: int
    cache: int
    processed: int
    """Tokens of the prompt in the cache now, including reused ones."""
    time_ms: int
    timings: Timings | None = None
    """Only if the request asks for timings in every part."""


@dataclass(frozen=True, slots=True)
class Result:
    """A finished answer."""

    content: str
    tokens: list[int]
    probs: list[TokenProbs]
    stop_type: StopType
    stopping_word: str
    truncated: bool
    """The context became full: the answer ended there, or the context was shifted."""
    n_prompt: int
    n_cached: int
    """Prompt tokens taken from the cache."""
    n_predicted: int
    n_tokens_cached: int
    """Tokens the slot keeps for the next request (llama-server's `tokens_cached`)."""
    has_new_line: bool
    timings: Timings
    id_slot: int
    id_task: int
    seed: Seed
    """The seed used: the request's, or a random one."""
    request: Request
    """The generation settings."""
    prompt_probs: Sequence[TokenProbs] = ()
    """Probabilities of the prompt's tokens, if requested; the first has none (nan)."""


@dataclass(frozen=True, slots=True)
class Done:
    """The answer is finished. Text that was held back until the end comes in a Token event before this."""

    result: Result


@dataclass(frozen=True, slots=True)
class Failure:
    """The answer ended with an error."""

    error: Exception
    """A LlamadoError."""


Event = Token | Progress | Done | Failure


class SlotSnapshot(NamedTuple):
    """One slot in llama-server's `/slots`; the request's fields stay after it ended."""

    id: int
    n_ctx: int
    is_processing: bool
    id_task: int
    """-1 before the slot's first request."""
    request: Request | None
    n_prompt_tokens: int
    """Tokens in the slot's cache."""
    n_prompt_tokens_processed: int
    n_prompt_tokens_cache: int
    has_next_token: bool
    has_new_line: bool
    n_remain: int
    """Tokens left of `n_predict`, -1 without a limit."""
    n_decoded: int


class Histogram(NamedTuple):
    """Counts of values at most `bounds[i]` and above the previous bound; the last count is of those above all."""

    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = (0,)
    sum: float = 0.0


class KindCounts(NamedTuple):
    """Counts of the drafts of one source."""

    name: str
    n_drafts: int
    n_drafted: int
    n_accepted: int


class Counters(NamedTuple):
    """Totals since the engine started; seconds are wall time."""

    prompt_tokens_total: int = 0
    """Prompt tokens computed (without cached ones)."""
    prompt_seconds_total: float = 0.0
    prompt_tokens_cached_total: int = 0
    tokens_predicted_total: int = 0
    tokens_predicted_steps_total: int = 0
    """tokens_predicted_total without each answer's first token, which costs no step: the numerator of rates."""
    tokens_predicted_seconds_total: float = 0.0
    """Sum over the answers, added as each one ends."""
    n_decode_total: int = 0
    """Forward passes."""
    n_busy_slots_total: int = 0
    """Sum over the passes of the slots at work; divided by n_decode_total: `n_busy_slots_per_decode`."""
    n_tokens_max: int = 0
    """Longest sequence seen."""
    n_drafts: int = 0
    """Drafts that were evaluated."""
    n_drafted: int = 0
    n_accepted: int = 0
    accepted_at: tuple[int, ...] = ()
    """Accepted draft tokens by their position in the draft."""
    first_token_seconds: Histogram = Histogram()
    """From a request's arrival to its first token."""
    inter_token_seconds: Histogram = Histogram()
    queue_seconds: Histogram = Histogram()
    """From a request's arrival to its slot."""
    batch_tokens: Histogram = Histogram()
    """Tokens of a forward pass."""
    drafts: tuple[KindCounts, ...] = ()
    """By draft source."""


class Fault(NamedTuple):
    """A device the engine waits for: its name, the reason of its loss, and the time of the loss (seconds since
    1970). `kind`: worker or device.
    """

    device: str
    why: str
    since: float
    kind: str = "worker"

    @property
    def message(self) -> str:
        """A message for users."""
        clock = time.strftime("%H:%M:%S", time.localtime(self.since))
        return f"{self.kind} {self.device} is gone since {clock}: {self.why}"


class Away(NamedTuple):
    """A lost device whose layers moved to others: the reason, and the time of the loss (seconds since 1970)."""

    device: str
    why: str
    since: float
    layers: str
    """A description of its part."""
    now: Mapping[str, str]
    """Descriptions of each device's part meanwhile, by name."""


class DiskCounters(NamedTuple):
    """Counters of the prompt cache on disk since the engine started."""

    hits: int = 0
    """Sequences whose beginning was read."""
    tokens_read: int = 0
    bytes_read: int = 0
    writes: int = 0
    """Files that were written."""
    bytes_written: int = 0
    failures: int = 0
    """Damaged or failed files, and dropped sequences."""
    files: int = 0
    """Present files, including those of other processes."""
    bytes: int = 0


class StoredPrompt(NamedTuple):
    """A sequence in the prompt cache."""

    n_tokens: int
    n_bytes: int
    used: float
    """Time of storing or last use, in seconds since 1970."""
    begins: tuple[int, ...]
    """Its first tokens."""


class EngineSnapshot(NamedTuple):
    """The engine's state after a step."""

    slots: tuple[SlotSnapshot, ...]
    counters: Counters
    requests_processing: int
    requests_deferred: int
    kv_cells_used: int
    kv_cells_total: int
    fault: Fault | None = None
    idle_since: float | None = None
    """When the last request ended (or the engine started), in time.monotonic(); None while there is one."""
    n_stored_prompts: int = 0
    """Sequences in the prompt cache."""
    stored_prompt_bytes: int = 0
    disk: DiskCounters | None = None
    degraded: tuple[Away, ...] = ()
    """Member devices that the engine does without now."""
    kv_cells_shared: int = 0
    """Cells with tokens of more than one sequence."""
    n_stored_tokens: int = 0
    """Tokens of the sequences in the prompt cache."""
    stored: tuple[StoredPrompt, ...] = ()
    """The sequences in the prompt cache, most recently used first."""
