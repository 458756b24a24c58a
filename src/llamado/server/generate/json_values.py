"""JSON values as llama-server reads and names them: a wrong type falls back to a default, or is an error."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

import orjson

from llamado.errors import LlamadoError
from llamado.server.errors import invalid

# Stop strings, breakers, triggers and the like of one request: each is looked at for every token.
MOST_ITEMS = 1024
MOST_SAMPLERS = 64


def type_name(value: object) -> str:
    """The JSON name of a value's type, as llama-server's messages say it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def wrong_type(name: str, expected: str, value: object) -> LlamadoError:
    """400 for a field of the wrong type."""
    return invalid(f"Field '{name}': type must be {expected}, but is {type_name(value)}")


def written(value: Any) -> str:
    """A value that a client sent, as JSON text. Raises ApiError for one nested deeper than orjson writes (254)."""
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError:
        raise invalid("the request's JSON is nested too deeply") from None


def number_json(number: int) -> Any:
    """A whole number of any size as orjson writes it: by itself it refuses those of more than 64 bits."""
    return number if -(1 << 63) <= number < 1 << 64 else orjson.Fragment(str(number))


def at_most(most: int, items: Sized, name: str) -> None:
    """Raise ApiError for a list that is longer than anything real, and would cost as much as all other requests."""
    if len(items) > most:
        raise invalid(f"Field '{name}': {len(items)} items; at most {most} are allowed")


def text(body: Mapping[str, Any], name: str, default: str = "") -> str:
    """A string field; the default where it is missing or of another type."""
    value = body.get(name)
    return value if isinstance(value, str) else default


def flag(body: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """A boolean field; the default where it is missing or of another type."""
    value = boolean(body.get(name))
    return value if isinstance(value, bool) else default


def boolean(value: Any) -> Any:
    """Return a value with "true" and "false", as clients that fill in forms send them, as booleans."""
    return {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value


def whole(body: Mapping[str, Any], name: str, default: int) -> int:
    """A number field as a whole number; the default where it is missing or of another type.

    Raises ApiError where 32 bits do not hold it: every limit, count and id of the API fits into them.
    """
    value = body.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return default
    if not -(2**31) <= value < 2**31:
        raise invalid(f"Field '{name}': number overflow")
    return int(value)


def table(body: Any, name: str) -> Mapping[str, Any]:
    """An object field; empty where it is missing or of another type."""
    value = body.get(name) if isinstance(body, Mapping) else None
    return value if isinstance(value, Mapping) else {}
