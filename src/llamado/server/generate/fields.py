"""Reading and checking of the fields of a body that are in the table of parameters.

As in llama-server (server-schema.cpp, b11434): null counts as absent, unknown fields are ignored, numbers are clamped
to soft limits, and a number outside hard limits is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from llamado.engine.parameters import PARAMETERS, Parameter
from llamado.engine.sampling.params import SAMPLER_LETTERS, sampler_names
from llamado.errors import LlamadoError
from llamado.server.errors import invalid
from llamado.server.generate.json_values import MOST_ITEMS, MOST_SAMPLERS, boolean, check_length, integer, wrong_type
from llamado.server.generate.threads import LONG_TEXT
from llamado.server.model import ServedTokenizer


def read_fields(body: Mapping[str, Any], tokenizer: ServedTokenizer, n_slots: int) -> dict[str, Any]:
    """Return the parameters in a body by their names, without the constraints (see `read_constraints`).

    Raises ApiError.
    """
    given: dict[str, Any] = {}
    for row in PARAMETERS:
        if row.type in ("boolean", "integer", "number"):
            value = read_scalar(row, body)
            if value is not None:
                given[row.name] = value
    n = given.get("n", 1)
    if n > n_slots:
        name = "n_cmpl" if body.get("n_cmpl") is not None else "n"
        raise invalid(f"Field '{name}': Value must be between 1 <= value <= {n_slots}, but got {n}")
    if given.get("dry_base", 1.0) < 1.0:
        del given["dry_base"]  # as llama-server: the default is used
    if "n_probs" in given:
        given["n_probs"] = min(given["n_probs"], tokenizer.n_vocab)
    for row in PARAMETERS:
        if row.type in _FORMS:
            found = next((body[name] for name in row.names if body.get(name) is not None), None)
            if found is not None and (value := _FORMS[row.type](found)) is not None:
                given[row.name] = value
    if body.get("logit_bias") is not None:
        given["logit_bias"] = _logit_bias(body["logit_bias"], tokenizer)
    if given.get("id_slot", -1) >= n_slots:
        given["id_slot"] = -1  # as llama-server: a slot that does not exist means any
    return given


def read_scalar(row: Parameter, body: Mapping[str, Any]) -> Any:
    """Return a boolean or a number under the first of its names in a body, or None. Raises ApiError."""
    for name in row.names:
        value = body.get(name)
        if value is None:
            continue
        if row.type == "boolean":
            value = boolean(value)
            if not isinstance(value, bool):
                raise wrong_type(name, "boolean", value)
            return value
        if not isinstance(value, (bool, int, float)):
            raise wrong_type(name, "number", value)
        if isinstance(value, float) and not math.isfinite(value):
            raise invalid(f"Field '{name}': number overflow")
        number: float = int(value) if row.type == "integer" else float(value)
        if row.hard and not row.low <= number <= row.high:
            low, high, text = (f"{v:.6f}" if row.type == "number" else str(int(v)) for v in (row.low, row.high, number))
            raise invalid(f"Field '{name}': Value must be between {low} <= value <= {high}, but got {text}")
        return type(number)(max(row.low, min(row.high, number)))
    return None


def _seed(value: Any) -> int | str:
    if not isinstance(value, (bool, int, float, str)):
        raise wrong_type("seed", "number or string", value)
    return value if isinstance(value, str) else int(value)


def _stops(value: Any) -> list[str] | None:
    """Return the stop strings, given one or a list. Raises ApiError."""
    if isinstance(value, str):
        return [value] if value else None
    if not isinstance(value, list):
        return None
    check_length(MOST_ITEMS, value, "stop")
    for word in value:
        if not isinstance(word, str) and word not in (None, [], {}):
            raise wrong_type("stop", "string", word)
    return [word for word in value if isinstance(word, str) and word] or None


def _samplers(value: Any) -> tuple[str, ...] | None:
    """Return the samplers in the given order; like llama-server, skip unknown names."""
    if isinstance(value, str):
        check_length(MOST_SAMPLERS, value, "samplers")
        return tuple(SAMPLER_LETTERS[c] for c in value if c in SAMPLER_LETTERS)
    if not isinstance(value, list):
        return None
    names: list[str] = []
    check_length(MOST_SAMPLERS, value, "samplers")
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
    check_length(MOST_ITEMS, value, "dry_sequence_breakers")
    return tuple(value)


def _lora(value: Any) -> dict[int, float]:
    if not isinstance(value, list):
        raise invalid("Field 'lora': Error: 'lora' must be an array of objects with 'id' and 'scale' fields")
    return lora_scales(value)


def lora_scales(entries: list[Any]) -> dict[int, float]:
    """Return the scales of adapters by id, in order of ids, from `[{"id", "scale"}]`; the last entry of an id wins.

    As in llama-server, an entry without an id has the id -1, and a scale that is not a number is 0.
    """
    scales: dict[int, float] = {}
    for entry in entries:
        given = entry if isinstance(entry, dict) else {}
        scale = given.get("scale")
        with np.errstate(over="ignore"):
            scales[integer(given, "id", -1)] = float(np.float32(scale)) if isinstance(scale, (int, float)) else 0.0
    return dict(sorted(scales.items()))


def _slot(value: Any) -> int:
    return int(value) if isinstance(value, (int, float)) and 0 <= value < math.inf else -1


def _stream_options(value: Any) -> bool | None:
    """Return `include_usage`: the end of a stream has the token counts."""
    return read_scalar(_INCLUDE_USAGE, value) if isinstance(value, dict) else None


_INCLUDE_USAGE = Parameter(name="include_usage", type="boolean", help="", names=("include_usage",))


def _response_fields(value: Any) -> list[str] | None:
    if not isinstance(value, list):
        return None
    check_length(MOST_ITEMS, value, "response_fields")
    return value if all(isinstance(field, str) for field in value) else None


def _logit_bias(value: Any, tokenizer: ServedTokenizer) -> dict[int, float]:
    """Return biases by token from [[id, bias], ["text", bias], [id, false]] or {"id or text": bias}.

    Biases of the same token add up; false bans it.
    """
    pairs: list[tuple[Any, Any]] = []
    if isinstance(value, list):
        pairs = [(p[0], p[1]) for p in value if isinstance(p, list) and len(p) == 2]
    elif isinstance(value, dict):
        for key, amount in value.items():
            try:
                pairs.append((int(key), amount))
            except ValueError:
                pairs.append((key, amount))
    texts = [key for key, _ in pairs if isinstance(key, str)]
    check_length(MOST_ITEMS, texts, "logit_bias")
    if (n_characters := sum(map(len, texts))) > LONG_TEXT:
        raise invalid(f"Field 'logit_bias': texts of {n_characters} characters; at most {LONG_TEXT} are allowed")
    biases: dict[int, float] = {}
    for key, amount in pairs:
        bias = _bias(amount)
        if bias is None:
            continue
        if isinstance(key, int) and not isinstance(key, bool):
            tokens = [key] if 0 <= key < tokenizer.n_vocab else []
        elif isinstance(key, str):
            tokens = tokenizer.encode(key, add_special=False, parse_special=False)
        else:
            continue
        for token in tokens:
            biases[token] = biases.get(token, 0.0) + bias
    return biases


def _bias(value: Any) -> float | None:
    if value is False:
        return -math.inf
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    return None


# Readers by type, for all but booleans and numbers. A reader that returns None ignores the field.
_FORMS: dict[str, Callable[[Any], Any]] = {
    "seed": _seed,
    "texts": _stops,
    "samplers": _samplers,
    "breakers": _breakers,
    "scales": _lora,
    "slot": _slot,
    "stream_options": _stream_options,
    "fields": _response_fields,
}
