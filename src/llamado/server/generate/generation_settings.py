"""`generation_settings`: the parameters of an answer, as shown in results, `/slots` and `/props`."""

from __future__ import annotations

import math
from typing import Any

from llamado.engine.parameters import PARAMETERS
from llamado.engine.sampling.params import RANDOM_SEED
from llamado.engine.sampling.rng import Seed
from llamado.server.generate.json_values import number_json
from llamado.server.generate.request import GenerationRequest


def seed_json(seed: Seed | None) -> Any:
    """Return a seed as JSON: as it was sent, or llama-server's 0xFFFFFFFF for a random one that is not drawn yet."""
    if seed is None or seed == RANDOM_SEED:
        return 0xFFFF_FFFF
    return seed if isinstance(seed, str) else number_json(seed)


def generation_settings(request: GenerationRequest, *, seed: Seed | None, brief: bool = False) -> dict[str, Any]:
    """Return the settings of an answer with this `seed`; `brief`: only those of `/slots` and `/props`."""
    params = request.params
    # JSON has no infinity: the bias of a banned token is null, as llama-server's JSON library writes it.
    biases = [*params.sampling.logit_bias.items(), *((token, -math.inf) for token in request.banned)]
    values: dict[str, Any] = {
        "seed": seed_json(seed),
        "logit_bias": [{"bias": bias, "token": token} for token, bias in biases],
        "lora": [{"id": id, "scale": scale} for id, scale in params.lora.items()],
        "stream": request.stream,
        "backend_sampling": request.backend_sampling,
        **request.constraints.settings(),
    }
    settings: dict[str, Any] = {}
    for row in PARAMETERS:
        if brief and not row.brief:
            continue
        if row.name == "samplers":
            settings |= _chat_settings(request)
        for key in row.keys:
            if row.name in values:
                settings[key] = values[row.name]
            else:
                settings[key] = getattr(params.sampling if row.of == "sampling" else params, row.name)
        if row.name == "samplers":
            settings["speculative.types"] = "none"
    return settings


def _chat_settings(request: GenerationRequest) -> dict[str, Any]:
    prepared, reasoning = request.prepared, request.reasoning_format
    return {
        "chat_format": "Content-only" if prepared is None else prepared.dialect,
        "reasoning_format": reasoning,
        "reasoning_in_content": request.stream and reasoning == "deepseek-legacy",
        "generation_prompt": "" if prepared is None else prepared.generation_prompt,
    }
