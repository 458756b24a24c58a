"""Typed access to the fields of JSON bodies, with llama-server's rules and error messages."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

import orjson

from llamado.errors import LlamadoError
from llamado.server.errors import invalid

# Most stop strings, breakers, triggers and the like of one request: each is checked for every token.
MOST_ITEMS = 1024
MOST_SAMPLERS = 64


def type_name(value: object) -> str:
    """Return the JSON name of a value's type, as in llama-server's messages."""
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
    """Return the error for a field of the wrong type (status 400)."""
    return invalid(f"Field '{name}': type must be {expected}, but is {type_name(value)}")


def json_text(value: Any) -> str:
    """Return a client's value as JSON text. Raises ApiError for one nested deeper than 254 levels, orjson's limit."""
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError:
        raise invalid("the request's JSON is nested too deeply") from None


def number_json(number: int) -> Any:
    """Return an integer of any size in a form that orjson writes: it rejects integers of more than 64 bits."""
    return number if -(1 << 63) <= number < 1 << 64 else orjson.Fragment(str(number))


def check_length(most: int, items: Sized, name: str) -> None:
    """Raise ApiError for a field with more than `most` items. Real requests have fewer; more would slow all others."""
    if len(items) > most:
        raise invalid(f"Field '{name}': {len(items)} items; at most {most} are allowed")


def text(body: Mapping[str, Any], name: str, default: str = "") -> str:
    """Return a string field, or the default if it is missing or of another type."""
    value = body.get(name)
    return value if isinstance(value, str) else default


def flag(body: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """Return a boolean field, or the default if it is missing or of another type."""
    value = boolean(body.get(name))
    return value if isinstance(value, bool) else default


def boolean(value: Any) -> Any:
    """Return "true" and "false" as booleans, and any other value unchanged: clients that fill in forms send text."""
    return {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value


def integer(body: Mapping[str, Any], name: str, default: int) -> int:
    """Return a number field as an integer, or the default if it is missing or of another type.

    Raises ApiError for more than 32 bits, which hold every limit, count and id of the API.
    """
    value = body.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return default
    if not -(2**31) <= value < 2**31:
        raise invalid(f"Field '{name}': number overflow")
    return int(value)


def mapping(body: Any, name: str) -> Mapping[str, Any]:
    """Return an object field, or an empty mapping if it is missing or of another type."""
    value = body.get(name) if isinstance(body, Mapping) else None
    return value if isinstance(value, Mapping) else {}
