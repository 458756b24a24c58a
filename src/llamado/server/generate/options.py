"""Request options: one table of fields, read leniently where llama-server is lenient and refused where it refuses.

Names, aliases, types and limits are those of `/completion` (tools/server/README.md and server-schema.cpp, b11434):
null counts as absent, unknown fields are ignored, numbers with soft limits are clamped, others must lie within theirs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llamado.engine.request import Defaults, Request
from llamado.engine.sampling.constraint import Constraint
from llamado.engine.sampling.params import RANDOM_SEED, SAMPLER_LETTERS, sampler_names
from llamado.engine.sampling.rng import Seed
from llamado.errors import LlamadoError
from llamado.server.errors import invalid
from llamado.server.generate.constraints import Limits, read_limits
from llamado.server.generate.json_values import MOST_ITEMS, MOST_SAMPLERS, at_most, number_json, whole, wrong_type
from llamado.server.generate.prompts import LONG_TEXT
from llamado.server.loaded_model import Tokenizer

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
FLOAT32_MAX = 3.4028234663852886e38
# Probabilities of one answer: all of a vocabulary of 262,144 at four tokens, or 20 at 50,000. As JSON they are 100 MB.
MOST_PROBABILITIES = 1 << 20
# Tokens that an answer without a limit is thought to have at least.
LONG_ANSWER = 4096


@dataclass(frozen=True)
class Field:
    """One option: JSON names in order of preference, its type, and its limits."""

    names: tuple[str, ...]
    type: str
    low: float = -(2**31)
    high: float = INT32_MAX
    hard: bool = False  # outside the limits: an error instead of clamping
    help: str = ""

    @property
    def key(self) -> str:
        return self.names[0]


def _bool(name: str, help: str) -> Field:
    return Field((name,), "boolean", help=help)


def _int(names: str, low: int, help: str, *, high: int = INT32_MAX, hard: bool = True) -> Field:
    return Field(tuple(names.split()), "integer", low, high, hard, help)


def _float(name: str, help: str, low: float = -math.inf, high: float = math.inf, *, hard: bool = False) -> Field:
    return Field((name,), "number", low, high, hard, help)


# Options that the engine's Request or Sampling takes under the same name.
ENGINE_FIELDS: tuple[Field, ...] = (
    _int("n_predict max_completion_tokens max_tokens", -1, "tokens to generate at most; -1: no limit"),
    _int("n_indent", 0, "least indentation of generated lines"),
    _int("n_keep", -1, "prompt tokens kept when the context is full; -1: all"),
    _int("t_max_predict_ms", -1, "time limit of generation, at the first new line after it", high=INT64_MAX),
    _int("n_probs logprobs", 0, "report the likeliest tokens at each place", hard=False),
    _int("top_k", 0, "sample among the K likeliest tokens; 0: all", hard=False),
    _int("repeat_last_n", 0, "tokens the penalties look back at"),
    _int("min_keep", 0, "least number of candidates the samplers leave"),
    _int("dry_allowed_length", 0, "DRY: length of repetition that is free"),
    _int("dry_penalty_last_n", 0, "DRY: tokens looked back at"),
    _int("mirostat", 0, "Mirostat version; 0: off", high=2, hard=False),
    _float("temperature", "0: greedy", 0.0),
    _float("top_p", "sample among the likeliest tokens of this total probability", 0.0, 1.0),
    _float("min_p", "least probability relative to the likeliest token's", 0.0, 1.0),
    _float("typical_p", "locally typical sampling; 1: off"),
    _float("repeat_penalty", "penalty of repeated tokens; 1: off"),
    _float("presence_penalty", "penalty of tokens that were there"),
    _float("frequency_penalty", "penalty by how often a token was there"),
    _float("dynatemp_range", "range of the dynamic temperature; 0: off"),
    _float("dynatemp_exponent", "exponent of the dynamic temperature"),
    _float("top_n_sigma", "keep tokens within n standard deviations; -1: off"),
    _float("xtc_probability", "XTC: chance of removing the top tokens; 0: off", 0.0, 1.0),
    _float("xtc_threshold", "XTC: least probability of a removed token", 0.0, 1.0),
    _float("dry_multiplier", "DRY: strength; 0: off"),
    _float("dry_base", "DRY: base"),
    _float("mirostat_tau", "Mirostat: target entropy"),
    _float("mirostat_eta", "Mirostat: learning rate"),
    _float("adaptive_target", "adaptive-p: target probability; negative: off", -FLOAT32_MAX, 1.0),
    _float("adaptive_decay", "adaptive-p: decay of the history", 0.0, 0.99, hard=True),
    _bool("cache_prompt", "reuse the cache of an earlier request with the same beginning"),
    _bool("return_tokens", "return the ids of the generated tokens"),
    _bool("return_progress", "report progress of the prompt in a stream"),
    _bool("post_sampling_probs", "report probabilities after the sampler chain"),
    _bool("ignore_eos", "never end by itself"),
    _bool("timings_per_token", "timings in every part of a stream"),
    _int("n_discard", 0, "tokens to drop when the context is shifted; 0: half of them"),
)
# Options of the server itself, or accepted for llama.cpp's sake.
SERVER_FIELDS: tuple[Field, ...] = (
    _bool("stream", "send the answer in parts as it is made"),
    _int("n_cmpl n", 1, "answers per prompt"),
    _int("n_cache_reuse", 0, "accepted: pieces are not reused by shifting, which would change answers"),
    _int("sse_ping_interval", -1, "seconds of silence before a stream sends a comment; -1: never"),
    _bool("verbose", "put the native form of the result into `__verbose`"),
    _bool("backend_sampling", "accepted"),
    _bool("echo", "chat: begin with the client's prefill also in a stream"),
)


@dataclass(slots=True)
class Options:
    """What a request asked for, checked: `engine` holds fields of the engine's Request and Sampling."""

    engine: dict[str, Any]
    limits: Limits
    stream: bool = False
    include_usage: bool = False
    n: int = 1
    id_slot: int = -1
    sse_ping_interval: int = 30
    response_fields: list[str] = field(default_factory=list)
    verbose: bool = False
    echo: bool = False
    shown: dict[str, Any] = field(default_factory=dict)
    """Fields of `generation_settings` that the engine does not know."""


def _read(spec: Field, body: Mapping[str, Any]) -> Any:
    for name in spec.names:
        value = body.get(name)
        if value is None:
            continue
        if spec.type == "boolean":
            if not isinstance(value, bool):
                raise wrong_type(name, "boolean", value)
            return value
        if not isinstance(value, (bool, int, float)):
            raise wrong_type(name, "number", value)
        if isinstance(value, float) and not math.isfinite(value):
            raise invalid(f"Field '{name}': number overflow")
        number: float = int(value) if spec.type == "integer" else float(value)
        if spec.hard and not spec.low <= number <= spec.high:
            low, high, given = (
                f"{v:.6f}" if spec.type == "number" else str(int(v)) for v in (spec.low, spec.high, number)
            )
            raise invalid(f"Field '{name}': Value must be between {low} <= value <= {high}, but got {given}")
        return type(number)(max(spec.low, min(spec.high, number)))
    return None


def _stops(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value] if value else []
    if not isinstance(value, list):
        return []
    at_most(MOST_ITEMS, value, "stop")
    for word in value:
        if not isinstance(word, str) and word not in (None, [], {}):
            raise wrong_type("stop", "string", word)
    return [word for word in value if isinstance(word, str) and word]


def _bias(value: Any) -> float | None:
    if value is False:
        return -math.inf
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    return None


def _logit_bias(value: Any, tokenizer: Tokenizer) -> dict[int, float]:
    """All forms: [[id, bias], ["text", bias], [id, false]] and {"id or text": bias}; biases of one token add up."""
    pairs: list[tuple[Any, Any]] = []
    if isinstance(value, list):
        pairs = [(p[0], p[1]) for p in value if isinstance(p, list) and len(p) == 2]
    elif isinstance(value, dict):
        for key, amount in value.items():
            try:
                pairs.append((int(key), amount))
            except ValueError:
                pairs.append((key, amount))
    biases: dict[int, float] = {}
    for key, amount in pairs:
        bias = _bias(amount)
        if bias is None:
            continue
        if isinstance(key, int) and not isinstance(key, bool):
            tokens = [key] if 0 <= key < tokenizer.n_vocab else []
        elif isinstance(key, str):
            if len(key) > LONG_TEXT:
                raise invalid(f"Field 'logit_bias': a text of {len(key)} characters; at most {LONG_TEXT} are allowed")
            tokens = tokenizer.encode(key, add_special=False, parse_special=False)
        else:
            continue
        for token in tokens:
            biases[token] = biases.get(token, 0.0) + bias
    return biases


def _samplers(value: Any) -> tuple[str, ...] | None:
    """Known samplers in the given order; like llama-server, unknown names are left out."""
    if isinstance(value, str):
        at_most(MOST_SAMPLERS, value, "samplers")
        return tuple(SAMPLER_LETTERS[c] for c in value if c in SAMPLER_LETTERS)
    if not isinstance(value, list):
        return None
    names: list[str] = []
    at_most(MOST_SAMPLERS, value, "samplers")
    for item in value:
        if not isinstance(item, str):
            raise wrong_type("samplers", "string", item)
        try:
            names += sampler_names([item])
        except LlamadoError:
            continue
    return tuple(names)


def _breakers(value: Any) -> tuple[str, ...]:
    if not (isinstance(value, list) and value and all(isinstance(b, str) for b in value)):
        raise invalid(
            "Field 'dry_sequence_breakers': Error: dry_sequence_breakers must be a non-empty array of strings"
        )
    at_most(MOST_ITEMS, value, "dry_sequence_breakers")
    return tuple(value)


def lora_scales(entries: list[Any]) -> dict[int, float]:
    """Adapters' scales by id from `[{"id", "scale"}]`, in order; one that is named twice has the last of them.

    As llama-server: what is no such entry names an adapter -1, and a scale that is no number is 0.
    """
    scales: dict[int, float] = {}
    for entry in entries:
        given = entry if isinstance(entry, dict) else {}
        scale = given.get("scale")
        with np.errstate(over="ignore"):
            scales[whole(given, "id", -1)] = float(np.float32(scale)) if isinstance(scale, (int, float)) else 0.0
    return dict(sorted(scales.items()))


def read_options(
    body: Mapping[str, Any], *, tokenizer: Tokenizer, n_slots: int, sse_ping_interval: int = 30, verbose: bool = False
) -> Options:
    """Read and check every option of a `/completion`-like body; the server's own words where it is silent.

    Raises ApiError.
    """
    engine: dict[str, Any] = {}
    shown: dict[str, Any] = {}
    for spec in ENGINE_FIELDS:
        value = _read(spec, body)
        if value is not None:
            engine[spec.key] = value
    if engine.get("dry_base", 1.0) < 1.0:
        del engine["dry_base"]  # as llama-server: the default then
    server = {spec.key: _read(spec, body) for spec in SERVER_FIELDS}
    n = server["n_cmpl"]
    if n is not None and n > n_slots:
        name = "n_cmpl" if body.get("n_cmpl") is not None else "n"
        raise invalid(f"Field '{name}': Value must be between 1 <= value <= {n_slots}, but got {n}")
    limits = read_limits(body, tokenizer)
    if body.get("dry_sequence_breakers") is not None:
        engine["dry_sequence_breakers"] = _breakers(body["dry_sequence_breakers"])
    if body.get("lora") is not None:
        if not isinstance(body["lora"], list):
            raise invalid("Field 'lora': Error: 'lora' must be an array of objects with 'id' and 'scale' fields")
        engine["lora"] = lora_scales(body["lora"])
    if server["backend_sampling"]:
        shown["backend_sampling"] = True
    if limits.preserved:
        engine["preserved"] = limits.preserved
    if engine.get("ignore_eos"):
        shown["banned"] = sorted(tokenizer.eog)
    shown |= limits.shown()

    seed = body.get("seed")
    if seed is not None:
        if not isinstance(seed, (bool, int, float, str)):
            raise wrong_type("seed", "number or string", seed)
        engine["seed"] = seed if isinstance(seed, str) else int(seed)
    if "n_probs" in engine:
        engine["n_probs"] = min(engine["n_probs"], tokenizer.n_vocab)
    if body.get("stop") is not None and (stops := _stops(body["stop"])):
        engine["stop"] = stops
    if body.get("logit_bias") is not None:
        engine["logit_bias"] = _logit_bias(body["logit_bias"], tokenizer)
    if body.get("samplers") is not None and (samplers := _samplers(body["samplers"])) is not None:
        engine["samplers"] = samplers

    stream_options = body.get("stream_options")
    include_usage = False
    if isinstance(stream_options, dict):
        include_usage = bool(_read(_bool("include_usage", ""), stream_options))
    fields = body.get("response_fields")
    if isinstance(fields, list):
        at_most(MOST_ITEMS, fields, "response_fields")
    if not (isinstance(fields, list) and all(isinstance(f, str) for f in fields)):
        fields = []
    slot = body.get("id_slot")
    if not isinstance(slot, (int, float)) or not 0 <= slot < n_slots:
        slot = -1  # as llama-server: a slot that does not exist means any
    ping = server["sse_ping_interval"]
    return Options(
        engine=engine,
        limits=limits,
        stream=bool(server["stream"]),
        include_usage=include_usage,
        n=n or 1,
        id_slot=int(slot),
        sse_ping_interval=sse_ping_interval if ping is None else ping,
        response_fields=fields,
        verbose=verbose if server["verbose"] is None else server["verbose"],
        echo=bool(server["echo"]),
        shown=shown,
    )


def bound_probabilities(options: Options, n_prompts: int, n_predict: int, n_ctx: int) -> None:
    """Refuse more probabilities than one answer may hold; an answer without a limit of its own ends before that.

    `n_predict`: tokens where the request does not say. Raises ApiError.
    """
    each = options.engine.get("n_probs", 0) * n_prompts * options.n
    if not each:
        return
    wanted: int = options.engine.get("n_predict", n_predict)
    endless = not 0 <= wanted < n_ctx
    most = MOST_PROBABILITIES // each
    n_tokens = min(n_ctx, LONG_ANSWER) if endless else wanted
    if n_tokens > most:
        raise invalid(
            f"Field 'n_probs': {each} probabilities at each of {n_tokens} tokens; at most {MOST_PROBABILITIES} are "
            "allowed in one answer: ask for fewer (n_probs, top_logprobs), or for fewer tokens (n_predict, max_tokens)"
        )
    if endless and most < n_ctx:
        options.engine["n_predict"] = most


def make_requests(
    options: Options, prompts: Sequence[list[int]], defaults: Defaults, constraint: Constraint | None = None
) -> list[Request]:
    """One engine request per prompt and answer; the answers of one prompt get seeds counted up from the given one."""
    requests = []
    shown = {**options.shown, "stream": options.stream}
    for prompt in prompts:
        for i in range(options.n):
            fields = dict(options.engine)
            if i:
                fields["seed"] = _counted_up(fields.get("seed", defaults.sampling.seed), i)
            if i == 0:
                fields["id_slot"] = options.id_slot
            # The engine takes no empty prompt; `Generation` answers it. The placeholder only passes its check.
            request = defaults.request(prompt or [0], constraint=constraint, shown=shown, **fields)
            request.prompt = prompt
            requests.append(request)
    return requests


def _counted_up(seed: Seed | None, i: int) -> Seed | None:
    """The seed of a further answer; never -1 where the first is not."""
    if seed is None or seed == RANDOM_SEED:
        return seed
    if isinstance(seed, str):
        return f"{seed}+{i}"
    return seed + i if seed >= 0 else seed - i


def seed_json(seed: Seed | None) -> Any:
    """A seed as orjson writes it: as it was sent. A random one that is not chosen yet is shown as llama-server does."""
    if seed is None or seed == RANDOM_SEED:
        return 0xFFFF_FFFF
    return seed if isinstance(seed, str) else number_json(seed)


def generation_settings(
    request: Request, *, stream: bool | None = None, seed: Seed | None = None, brief: bool = False
) -> dict[str, Any]:
    """`generation_settings` of a result; `brief` leaves out what `/slots` and `/props` leave out.

    What the engine does not know comes from `request.shown`, as `stream` does where it is not given.
    """
    s = request.sampling
    shown: Mapping[str, Any] = request.shown
    settings: dict[str, Any] = {
        "seed": seed_json(s.seed if seed is None else seed),
        "temperature": s.temperature,
        "dynatemp_range": s.dynatemp_range,
        "dynatemp_exponent": s.dynatemp_exponent,
        "top_k": s.top_k,
        "top_p": s.top_p,
        "min_p": s.min_p,
        "top_n_sigma": s.top_n_sigma,
        "xtc_probability": s.xtc_probability,
        "xtc_threshold": s.xtc_threshold,
        "typical_p": s.typical_p,
        "repeat_last_n": s.repeat_last_n,
        "repeat_penalty": s.repeat_penalty,
        "presence_penalty": s.presence_penalty,
        "frequency_penalty": s.frequency_penalty,
        "dry_multiplier": s.dry_multiplier,
        "dry_base": s.dry_base,
        "dry_allowed_length": s.dry_allowed_length,
        "dry_penalty_last_n": s.dry_penalty_last_n,
    }
    if not brief:
        settings["dry_sequence_breakers"] = list(s.dry_sequence_breakers)
    settings |= {
        "mirostat": s.mirostat,
        "mirostat_tau": s.mirostat_tau,
        "mirostat_eta": s.mirostat_eta,
        "adaptive_target": s.adaptive_target,
        "adaptive_decay": s.adaptive_decay,
    }
    if not brief:
        settings["stop"] = request.stop
    settings |= {
        "max_tokens": request.n_predict,
        "n_predict": request.n_predict,
        "n_keep": request.n_keep,
        "n_discard": request.n_discard,
        "ignore_eos": s.ignore_eos,
        "stream": bool(shown.get("stream")) if stream is None else stream,
    }
    if not brief:
        # JSON has no infinity: a banned token's bias is null, as llama-server's JSON library writes it.
        biases = [*s.logit_bias.items(), *((token, -math.inf) for token in shown.get("banned", ()))]
        settings["logit_bias"] = [{"bias": bias, "token": token} for token, bias in biases]
    settings |= {"n_probs": request.n_probs, "min_keep": s.min_keep}
    if not brief:
        settings |= {
            "grammar": shown.get("grammar", ""),
            "grammar_lazy": shown.get("grammar_lazy", False),
            "grammar_triggers": shown.get("grammar_triggers", []),
            "preserved_tokens": sorted(request.preserved),
        }
    settings |= {
        "chat_format": shown.get("chat_format", "Content-only"),
        "reasoning_format": shown.get("reasoning_format", "none"),
        "reasoning_in_content": shown.get("reasoning_in_content", False),
        "generation_prompt": shown.get("generation_prompt", ""),
        "samplers": list(s.samplers),
        "speculative.types": "none",
        "timings_per_token": request.timings_per_token,
        "post_sampling_probs": request.post_sampling_probs,
        "backend_sampling": shown.get("backend_sampling", False),
        "lora": [{"id": id, "scale": scale} for id, scale in request.lora.items()],
    }
    return settings
