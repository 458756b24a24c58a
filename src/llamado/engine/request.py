"""What goes into the engine and what comes out: requests, events, results, snapshots.

Field names, defaults and limits are those of llama-server's `/completion` (tools/server/README.md), so that the server
room passes JSON fields through by name.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from llamado.engine.errors import ContextExceeded, EngineClosed, InvalidRequest
from llamado.engine.sampling.constraint import Constraint
from llamado.engine.sampling.rng import Seed

__all__ = [
    "SAMPLER_LETTERS",
    "ContextExceeded",
    "Counters",
    "Defaults",
    "Done",
    "EngineClosed",
    "EngineSnapshot",
    "Event",
    "Failed",
    "InvalidRequest",
    "Progress",
    "Request",
    "Result",
    "Sampling",
    "SlotSnapshot",
    "StopType",
    "Timings",
    "Token",
    "TokenProb",
    "TokenProbs",
    "sampler_names",
]

StopType = Literal["none", "eos", "limit", "word"]

# One letter per sampler, as in llama.cpp's `--sampling-seq`.
SAMPLER_LETTERS: Mapping[str, str] = {
    "e": "penalties",
    "d": "dry",
    "s": "top_n_sigma",
    "k": "top_k",
    "y": "typ_p",
    "p": "top_p",
    "m": "min_p",
    "x": "xtc",
    "t": "temperature",
    "i": "infill",
    "a": "adaptive_p",
}
KNOWN_SAMPLERS = tuple(SAMPLER_LETTERS.values())
DEFAULT_SAMPLERS = KNOWN_SAMPLERS[:9]

# Other spellings llama.cpp accepts beside `top-k` and `topk` forms, which are derived below.
_SAMPLER_ALIASES = {"nucleus": "top_p", "temp": "temperature", "typ": "typ_p"} | {
    name.replace("_", joint): name for name in KNOWN_SAMPLERS for joint in ("_", "-", "")
}

# What one request may ask for, lest a token of it take long: chains and lists in use have a dozen members.
MAX_CHAIN = 64
MAX_BREAKERS = 256

RANDOM_SEED = -1
"""The one seed that asks for a fresh one."""
MAX_SEED = 4096  # characters of a text, digits of a number (Python writes up to 4,300)
_LARGEST_SEED = 10**MAX_SEED


def sampler_names(spec: str | Sequence[str]) -> tuple[str, ...]:
    """Canonical sampler names from a list of names or a string of letters (`"edskypmxt"`).

    Raises InvalidRequest for a sampler this engine does not know (llama-server drops those silently).
    """
    names = []
    for item in spec:
        name = SAMPLER_LETTERS.get(item) if isinstance(spec, str) else _SAMPLER_ALIASES.get(item.lower())
        if name is None:
            raise InvalidRequest(f"unknown sampler {item!r}; known are {', '.join(KNOWN_SAMPLERS)}")
        names.append(name)
    return tuple(names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is drawn from the logits; defaults are llama.cpp's (`common_params_sampling`)."""

    seed: Seed | None = None
    """What the random numbers come from: a whole number or a text, each its own; None and -1: a fresh one, which the
    result reports. (llama.cpp, whose seeds have 32 bits, takes 4294967295 for -1.)"""
    temperature: float = 0.8
    """≤ 0 is greedy."""
    top_k: int = 40
    """≤ 0 is the whole vocabulary."""
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repeat_last_n: int = 64
    """How many tokens the penalties look back at; 0: none, -1: the whole sequence."""
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these tokens; -inf bans a token. Ids outside the vocabulary are ignored."""
    ignore_eos: bool = False
    min_keep: int = 0
    """Fewest candidates that top-p, min-p, typical and XTC leave."""
    samplers: tuple[str, ...] = DEFAULT_SAMPLERS
    """The chain in its order; a sampler named twice is applied twice. With Mirostat only temperature counts."""

    dynatemp_range: float = 0.0
    """> 0: the temperature lies in `temperature ± range`, by how even the distribution is."""
    dynatemp_exponent: float = 1.0
    top_n_sigma: float = -1.0
    """> 0: keep logits within so many standard deviations of the largest."""
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    """> 0.5: XTC is off."""
    dry_multiplier: float = 0.0
    """0: DRY is off."""
    dry_base: float = 1.75
    """< 1: DRY is off."""
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    """How many tokens DRY looks back at; 0: DRY is off, -1: the whole sequence."""
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    """Text that no repetition reaches across; the first 40 bytes of each count."""
    mirostat: int = 0
    """0, 1 or 2."""
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    adaptive_target: float = -1.0
    """Probability that adaptive-p, if named in `samplers`, aims at; negative: it only draws."""
    adaptive_decay: float = 0.9

    def validate(self) -> None:
        """Raise InvalidRequest for values no sampler can work with."""
        for name in _NUMBERS:
            value = getattr(self, name)
            if not math.isfinite(value):
                raise InvalidRequest(f"{name} must be a finite number, not {value}")
        if self.repeat_penalty <= 0 or not math.isfinite(1 / self.repeat_penalty):
            raise InvalidRequest(f"repeat_penalty must be greater than 0, not {self.repeat_penalty}")
        for name, low in (
            ("repeat_last_n", -1),
            ("dry_penalty_last_n", -1),
            ("dry_allowed_length", 0),
            ("min_keep", 0),
        ):
            if getattr(self, name) < low:
                raise InvalidRequest(f"{name} must be {low} or more, not {getattr(self, name)}")
        if self.mirostat not in (0, 1, 2):
            raise InvalidRequest(f"mirostat must be 0 (off), 1 or 2, not {self.mirostat}")
        if not 0.0 <= self.adaptive_decay <= 0.99:
            raise InvalidRequest(f"adaptive_decay must be between 0 and 0.99, not {self.adaptive_decay}")
        if len(self.dry_sequence_breakers) > MAX_BREAKERS:
            n = len(self.dry_sequence_breakers)
            raise InvalidRequest(f"dry_sequence_breakers holds {n} texts; at most {MAX_BREAKERS} are possible")
        if isinstance(self.seed, str):
            if len(self.seed) > MAX_SEED:
                raise InvalidRequest(f"seed is a text of {len(self.seed)} characters; at most {MAX_SEED} are possible")
        elif self.seed is not None and abs(self.seed) >= _LARGEST_SEED:
            raise InvalidRequest(f"seed has more than {MAX_SEED} digits")
        for token, bias in self.logit_bias.items():
            if math.isnan(bias) or bias == math.inf:
                raise InvalidRequest(f"logit_bias of token {token} must be a number or -inf, not {bias}")
        unknown = set(self.samplers) - set(KNOWN_SAMPLERS)
        if unknown:
            raise InvalidRequest(f"unknown sampler {min(unknown)!r}; known are {', '.join(KNOWN_SAMPLERS)}")
        if len(self.samplers) > MAX_CHAIN:
            raise InvalidRequest(
                f"a chain of {len(self.samplers)} samplers is too long; at most {MAX_CHAIN} are possible"
            )


_NUMBERS = tuple(f.name for f in dataclasses.fields(Sampling) if f.type == "float")


@dataclass(slots=True, kw_only=True)
class Request:
    """One prompt to continue."""

    prompt: list[int]
    n_predict: int = -1
    """Most tokens to generate; -1: until the context is full; 0: only evaluate the prompt into the cache."""
    sampling: Sampling = field(default_factory=Sampling)
    stop: list[str] = field(default_factory=list)
    n_keep: int = 0
    """Tokens of the prompt that stay when a full context is shifted, besides a beginning token; -1: all of them."""
    n_discard: int = 0
    """Tokens behind those that go then; 0: half of what is not kept."""
    cache_prompt: bool = True
    id_slot: int = -1
    n_probs: int = 0
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
    """Write special tokens out as text (llama-server's `--special`)."""
    preserved: frozenset[int] = frozenset()
    """Special tokens that are written out as text even so: those that a parser of the answer looks for."""
    constraint: Constraint | None = None
    """What limits the answer's tokens."""
    lora: Mapping[int, float] = field(default_factory=dict)
    """Scales of LoRA adapters by number, 0 for those it leaves out; empty: those the engine has for all."""
    shown: Mapping[str, object] = field(default_factory=dict)
    """Settings of whoever made the request; the engine carries them to its snapshots."""

    def validate(self) -> None:
        """Raise InvalidRequest for limits out of range."""
        if not self.prompt:
            raise InvalidRequest("the prompt has no tokens")
        for name, low in (("n_predict", -1), ("n_keep", -1), ("n_discard", 0), ("n_probs", 0), ("n_indent", 0)):
            if getattr(self, name) < low:
                raise InvalidRequest(f"{name} must be {low} or more, not {getattr(self, name)}")
        self.sampling.validate()


_SAMPLING_FIELDS = frozenset(f.name for f in dataclasses.fields(Sampling))
_REQUEST_FIELDS = frozenset(f.name for f in dataclasses.fields(Request)) - {"prompt", "sampling"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What a request gets for the fields it leaves out: llama.cpp's values, changed by the server's flags."""

    sampling: Sampling = field(default_factory=Sampling)
    n_predict: int = -1
    n_keep: int = 0
    cache_prompt: bool = True
    stop: tuple[str, ...] = ()
    special: bool = False

    def request(self, prompt: Sequence[int], **fields: object) -> Request:
        """A validated request; `fields` are names of Request or of Sampling, None meaning "not given".

        A `n_predict` of -1 falls back to the default's. Raises InvalidRequest for an unknown name or a bad value.
        """
        given = {name: value for name, value in fields.items() if value is not None}
        unknown = given.keys() - _SAMPLING_FIELDS - _REQUEST_FIELDS
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
        own |= {name: value for name, value in given.items() if name in _REQUEST_FIELDS}
        request = Request(prompt=list(prompt), sampling=sampling, **own)  # type: ignore[arg-type]
        request.validate()
        return request


class TokenProb(NamedTuple):
    """A token and how likely it was."""

    id: int
    piece: bytes
    """The token's text; may be part of a UTF-8 character."""
    prob: float
    """Probability after the sampler chain with `post_sampling_probs`, else in the softmax over all raw logits."""
    logprob: float
    """Natural logarithm of the probability; -inf for 0."""


class TokenProbs(NamedTuple):
    """A generated token and the `n_probs` most likely ones at its place."""

    token: TokenProb
    top: tuple[TokenProb, ...]


class Timings(NamedTuple):
    """Counts and milliseconds of one request, as llama-server's `timings`.

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
    """Tokens that were drafted; None where none were."""
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
    """Place of the first of `tokens` in the answer, from 0."""
    timings: Timings | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a prompt is: before the first chunk of it is evaluated, and behind each."""

    total: int
    cache: int
    processed: int
    """Tokens of the prompt in the cache now, reused ones included."""
    time_ms: int


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
    """The seed used: the request's, or where that left it open a number."""
    request: Request
    """The generation settings."""


@dataclass(frozen=True, slots=True)
class Done:
    """The answer is finished. Text that was held back to the end comes in a Token event before this."""

    result: Result


@dataclass(frozen=True, slots=True)
class Failed:
    """The answer ended by an error."""

    error: Exception
    """A LlamadoError."""


Event = Token | Progress | Done | Failed


class SlotSnapshot(NamedTuple):
    """One slot as llama-server's `/slots` shows it; the request's fields stay after it ended."""

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
    """How many values were at most `bounds[i]` and above the bound before; the last count is of those above all."""

    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = (0,)
    sum: float = 0.0


class Counters(NamedTuple):
    """Totals since the engine started; seconds are wall time."""

    prompt_tokens_total: int = 0
    """Prompt tokens computed (cached ones are counted apart)."""
    prompt_seconds_total: float = 0.0
    prompt_tokens_cached_total: int = 0
    tokens_predicted_total: int = 0
    tokens_predicted_steps_total: int = 0
    """tokens_predicted_total without each answer's first token, which costs no step: the numerator of rates."""
    tokens_predicted_seconds_total: float = 0.0
    """Sum over the answers, counted as each one ends."""
    n_decode_total: int = 0
    """Forward passes."""
    n_busy_slots_total: int = 0
    """Sum over the passes of the slots at work; divided by n_decode_total: `n_busy_slots_per_decode`."""
    n_tokens_max: int = 0
    """Longest sequence seen."""
    n_drafts: int = 0
    """Batches of drafted tokens that were evaluated."""
    n_drafted: int = 0
    n_accepted: int = 0
    accepted_at: tuple[int, ...] = ()
    """Accepted drafted tokens by their place in the draft."""
    first_token_seconds: Histogram = Histogram()
    """From a request's arrival to its first token."""
    inter_token_seconds: Histogram = Histogram()
    queue_seconds: Histogram = Histogram()
    """From a request's arrival to its slot."""
    batch_tokens: Histogram = Histogram()
    """Tokens of a forward pass."""


class Fault(NamedTuple):
    """A device the engine waits for: its name, why it is gone, and since when (seconds since 1970)."""

    device: str
    why: str
    since: float

    @property
    def message(self) -> str:
        """For users."""
        clock = time.strftime("%H:%M:%S", time.localtime(self.since))
        return f"worker {self.device} is gone since {clock}: {self.why}"


class Away(NamedTuple):
    """A device that is gone and whose layers are elsewhere: why, and since when (seconds since 1970)."""

    device: str
    why: str
    since: float
    layers: str
    """What it had, in words."""
    now: Mapping[str, str]
    """What each device has meanwhile, in words, by its name."""


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
    """When the last request ended (or the engine started), as time.monotonic() has it; None while there is one."""
    n_stored_prompts: int = 0
    """Sequences kept in this machine's memory beside those in slots."""
    stored_prompt_bytes: int = 0
    degraded: tuple[Away, ...] = ()
    """Devices that the model is divided among, and that it does without now."""
