"""`generation_settings`: what an answer was made with, as results, `/slots` and `/props` show it."""

from __future__ import annotations

import math
from typing import Any

from llamado.engine.parameters import PARAMETERS
from llamado.engine.sampling.params import RANDOM_SEED
from llamado.engine.sampling.rng import Seed
from llamado.server.generate.json_values import number_json
from llamado.server.generate.request import GenerationRequest


def seed_json(seed: Seed | None) -> Any:
    """A seed as orjson writes it: as it was sent. A random one that is not chosen yet is shown as llama-server does."""
    if seed is None or seed == RANDOM_SEED:
        return 0xFFFF_FFFF
    return seed if isinstance(seed, str) else number_json(seed)


def generation_settings(asked: GenerationRequest, *, seed: Seed | None, brief: bool = False) -> dict[str, Any]:
    """The settings of an answer with its `seed`; `brief` leaves out what `/slots` and `/props` leave out."""
    engine = asked.engine
    # JSON has no infinity: a banned token's bias is null, as llama-server's JSON library writes it.
    biases = [*engine.sampling.logit_bias.items(), *((token, -math.inf) for token in asked.banned)]
    values: dict[str, Any] = {
        "seed": seed_json(seed),
        "logit_bias": [{"bias": bias, "token": token} for token, bias in biases],
        "lora": [{"id": id, "scale": scale} for id, scale in engine.lora.items()],
        "stream": asked.stream,
        "backend_sampling": asked.backend_sampling,
        **asked.limits.shown(),
    }
    settings: dict[str, Any] = {}
    for row in PARAMETERS:
        if brief and not row.brief:
            continue
        if row.name == "samplers":
            settings |= _of_chats(asked)
        for key in row.keys:
            if row.name in values:
                settings[key] = values[row.name]
            else:
                settings[key] = getattr(engine.sampling if row.of == "sampling" else engine, row.name)
        if row.name == "samplers":
            settings["speculative.types"] = "none"
    return settings


def _of_chats(asked: GenerationRequest) -> dict[str, Any]:
    prepared, reasoning = asked.prepared, asked.reasoning_format
    return {
        "chat_format": "Content-only" if prepared is None else prepared.dialect,
        "reasoning_format": reasoning,
        "reasoning_in_content": asked.stream and reasoning == "deepseek-legacy",
        "generation_prompt": "" if prepared is None else prepared.generation_prompt,
    }
