"""What a body asks for besides its prompt → what the engine is given."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llamado.engine.parameters import BY_NAME, PARAMETERS
from llamado.engine.request import Defaults, Request
from llamado.engine.sampling.constraint import Constraint
from llamado.engine.sampling.params import RANDOM_SEED
from llamado.engine.sampling.rng import Seed
from llamado.server.errors import invalid
from llamado.server.generate.constraints import Limits, read_limits
from llamado.server.generate.fields import read_fields
from llamado.server.generate.json_values import number_json
from llamado.server.loaded_model import ServedTokenizer

# Probabilities of one answer: all of a vocabulary of 262,144 at four tokens, or 20 at 50,000. As JSON they are 100 MB.
MOST_PROBABILITIES = 1 << 20
# Tokens that an answer without a limit is thought to have at least.
LONG_ANSWER = 4096


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


def read_options(
    body: Mapping[str, Any],
    *,
    tokenizer: ServedTokenizer,
    n_slots: int,
    sse_ping_interval: int = 30,
    verbose: bool = False,
) -> Options:
    """Read and check every option of a `/completion`-like body; the server's own words where it is silent.

    Raises ApiError.
    """
    given = read_fields(body, tokenizer, n_slots)
    limits = read_limits(body, tokenizer)
    shown = limits.shown()
    if given.get("backend_sampling"):
        shown["backend_sampling"] = True
    if given.get("ignore_eos"):
        shown["banned"] = sorted(tokenizer.eog)
    engine = {name: value for name, value in given.items() if BY_NAME[name].of != "server" and name != "id_slot"}
    if limits.preserved:
        engine["preserved"] = limits.preserved
    return Options(
        engine=engine,
        limits=limits,
        stream=given.get("stream", False),
        include_usage=given.get("stream_options", False),
        n=given.get("n", 1),
        id_slot=given.get("id_slot", -1),
        sse_ping_interval=given.get("sse_ping_interval", sse_ping_interval),
        response_fields=given.get("response_fields", []),
        verbose=given.get("verbose", verbose),
        echo=given.get("echo", False),
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
    shown: dict[str, Any] = {"grammar": "", "grammar_lazy": False, "grammar_triggers": [], "backend_sampling": False}
    shown |= {**request.shown, "stream": bool(request.shown.get("stream")) if stream is None else stream}
    # JSON has no infinity: a banned token's bias is null, as llama-server's JSON library writes it.
    biases = [*request.sampling.logit_bias.items(), *((token, -math.inf) for token in shown.get("banned", ()))]
    shown |= {
        "preserved_tokens": sorted(request.preserved),
        "seed": seed_json(request.sampling.seed if seed is None else seed),
        "logit_bias": [{"bias": bias, "token": token} for token, bias in biases],
        "lora": [{"id": id, "scale": scale} for id, scale in request.lora.items()],
    }
    settings: dict[str, Any] = {}
    for row in PARAMETERS:
        if brief and not row.brief:
            continue
        if row.name == "samplers":
            settings |= {
                "chat_format": shown.get("chat_format", "Content-only"),
                "reasoning_format": shown.get("reasoning_format", "none"),
                "reasoning_in_content": shown.get("reasoning_in_content", False),
                "generation_prompt": shown.get("generation_prompt", ""),
            }
        for key in row.keys:
            if row.name in shown:
                settings[key] = shown[row.name]
            else:
                settings[key] = getattr(request.sampling if row.of == "sampling" else request, row.name)
        if row.name == "samplers":
            settings["speculative.types"] = "none"
    return settings
