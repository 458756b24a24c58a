"""200 JSON schemas of the kinds that clients send, made deterministically: families of shapes × parameters."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

Schema = dict[str, Any]


class Case(NamedTuple):
    """A schema with a name and a prompt that asks for an instance."""

    name: str
    schema: Schema
    prompt: str


_THINGS = ("invoice", "recipe", "flight", "patient", "book", "sensor", "ticket", "player", "parcel", "contract")
_WORDS = ("name", "title", "city", "status", "notes", "owner", "color", "unit", "label", "summary", "brand", "street")
_COUNTS = ("age", "quantity", "year", "pages", "rank", "floor", "weight", "score", "price", "distance")
_FLAGS = ("active", "paid", "urgent", "visible", "verified")
_CHOICES = (
    ("red", "green", "blue"),
    ("low", "medium", "high", "critical"),
    ("new", "open", "in progress", "done"),
    ("EUR", "USD", "JPY", "CHF"),
    ("north", "east", "south", "west"),
)
_PATTERNS = (
    "^[A-Z]{2}-[0-9]{4}$",
    "^[a-z]+(_[a-z]+){0,3}$",
    r"^\d{3}-\d{2}$",
    "^#[0-9a-f]{6}$",
    "^(0|[1-9][0-9]?)\\.[0-9]{1,2}\\.[0-9]{1,2}$",
    "^[A-Za-z ]{3,20}$",
)
_FORMATS = ("date", "time", "date-time", "uuid", "email", "ipv4", "duration", "hostname")


def cases() -> list[Case]:
    """All of them, always the same."""
    families = (
        _record,
        _nested,
        _listing,
        _choice,
        _numbers,
        _strings,
        _union,
        _recursive,
        _pydantic,
        _tool,
        _tuple,
        _map,
        _composed,
    )
    out: list[Case] = []
    number = 0
    while len(out) < 200:
        family: Callable[[random.Random], Schema] = families[number % len(families)]
        chance = random.Random(f"{family.__name__} {number // len(families)}")
        thing = _THINGS[number % len(_THINGS)]
        schema = family(chance)
        prompt = f"Describe a typical {thing} as JSON that fits this JSON schema:\n{json.dumps(schema)}\nJSON:"
        out.append(Case(f"{family.__name__[1:]}-{number // len(families)}", schema, prompt))
        number += 1
    return out


def _object(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> Schema:
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, **more}


def _integer(chance: random.Random) -> Schema:
    low = chance.choice((0, 1, -20, 100, 1900))
    return {"type": "integer", "minimum": low, "maximum": low + chance.choice((5, 9, 99, 123, 4096))}


def _number(chance: random.Random) -> Schema:
    return chance.choice(
        (
            {"type": "number", "minimum": 0, "maximum": 1},
            {"type": "number", "exclusiveMinimum": 0, "maximum": 99.5},
            {"type": "number", "minimum": -273.15},
            {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 10},
        )
    )


def _text(chance: random.Random) -> Schema:
    return chance.choice(
        (
            {"type": "string", "maxLength": chance.choice((12, 30, 60))},
            {"type": "string", "minLength": 2, "maxLength": 24},
            {"type": "string", "pattern": chance.choice(_PATTERNS)},
            {"type": "string", "format": chance.choice(_FORMATS)},
        )
    )


def _scalar(chance: random.Random) -> Schema:
    kind = chance.choice(("text", "text", "integer", "number", "boolean", "enum", "nullable", "const"))
    if kind == "enum":
        return {"enum": list(chance.choice(_CHOICES))}
    if kind == "nullable":
        return {"type": [chance.choice(("integer", "boolean")), "null"]}
    if kind == "const":
        return {"const": chance.choice(("v1", 7, True, None, [1, 2], {"k": "v"}))}
    if kind == "boolean":
        return {"type": "boolean"}
    return {"text": _text, "integer": _integer, "number": _number}[kind](chance)


def _named(chance: random.Random, n: int) -> dict[str, Any]:
    names = chance.sample((*_WORDS, *_COUNTS, *_FLAGS), n)
    out: dict[str, Any] = {}
    for name in names:
        if name in _COUNTS:
            out[name] = chance.choice((_integer, _number))(chance)
        elif name in _FLAGS:
            out[name] = {"type": "boolean"}
        else:
            out[name] = _scalar(chance)
    return out


def _record(chance: random.Random) -> Schema:
    properties = _named(chance, chance.randint(2, 8))
    names = list(properties)
    required = names if chance.random() < 0.5 else chance.sample(names, len(names) // 2 + 1)
    return _object(properties, required, **({"additionalProperties": False} if chance.random() < 0.5 else {}))


def _nested(chance: random.Random) -> Schema:
    schema = _object(_named(chance, 2))
    for level in range(chance.randint(2, 4)):
        schema = _object({**_named(chance, 1), f"part{level}": schema}, additionalProperties=False)
    return schema


def _listing(chance: random.Random) -> Schema:
    least = chance.randint(0, 2)
    items = _object(_named(chance, 2)) if chance.random() < 0.6 else _scalar(chance)
    schema: Schema = {"type": "array", "items": items, "minItems": least, "maxItems": least + chance.randint(1, 3)}
    return schema if chance.random() < 0.4 else _object({"count": _integer(chance), "entries": schema})


def _choice(chance: random.Random) -> Schema:
    values: list[Any] = [*chance.choice(_CHOICES), chance.randint(0, 99), None, True, {"a": [1, 2.5]}]
    return _object({"kind": {"enum": chance.sample(values, 4)}, "level": {"enum": list(chance.choice(_CHOICES))}})


def _numbers(chance: random.Random) -> Schema:
    return _object(
        {
            "a": {"type": "integer", "exclusiveMinimum": chance.randint(-9, 9), "maximum": chance.randint(20, 5000)},
            "b": {"type": "integer", "multipleOf": chance.choice((2, 5, 12, 25)), "minimum": 0, "maximum": 1000},
            "c": {"type": "number", "minimum": chance.uniform(-5, 5), "maximum": chance.uniform(6, 50)},
            "d": _number(chance),
        }
    )


def _strings(chance: random.Random) -> Schema:
    return _object(
        {
            "code": {"type": "string", "pattern": chance.choice(_PATTERNS)},
            "when": {"type": "string", "format": chance.choice(_FORMATS)},
            "text": {"type": "string", "minLength": chance.randint(0, 5), "maxLength": chance.randint(10, 40)},
        }
    )


def _union(chance: random.Random) -> Schema:
    if chance.random() < 0.5:
        options = [_object({"kind": {"const": kind}, **_named(chance, 2)}) for kind in chance.choice(_CHOICES)[:3]]
        return {"oneOf": options}
    return _object(
        {
            "value": {"anyOf": [_integer(chance), _text(chance), {"type": "null"}]},
            "extra": {"anyOf": [{"type": "boolean"}, {"type": "array", "items": _integer(chance), "maxItems": 3}]},
        }
    )


def _recursive(chance: random.Random) -> Schema:
    shape = chance.choice(("tree", "list", "sum", "mutual"))
    if shape == "tree":
        children = {"type": "array", "items": {"$ref": "#"}, "maxItems": chance.randint(1, 3)}
        return _object({"name": {"type": "string", "maxLength": 12}, "children": children})
    if shape == "list":
        node = _object({"value": _integer(chance), "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}})
        return {"$ref": "#/$defs/node", "$defs": {"node": node}}
    if shape == "sum":
        operation = _object(
            {"op": {"enum": ["+", "-", "*"]}, "left": {"$ref": "#/$defs/e"}, "right": {"$ref": "#/$defs/e"}}
        )
        return {"$ref": "#/$defs/e", "$defs": {"e": {"anyOf": [_integer(chance), operation]}}}
    files = {"type": "array", "items": {"$ref": "#/definitions/file"}, "maxItems": 2}
    file = _object({"size": _integer(chance), "inside": {"$ref": "#/definitions/folder"}}, ["size"])
    return {
        "$ref": "#/definitions/folder",
        "definitions": {"folder": _object({"folder": _text(chance), "files": files}), "file": file},
    }


def _pydantic(chance: random.Random) -> Schema:
    """Return a schema as pydantic writes it for a model that contains another one."""
    inner = _object(_named(chance, 3), title="Inner")
    for name, part in inner["properties"].items():
        part["title"] = name.title()
    optional = {"anyOf": [{"$ref": "#/$defs/Inner"}, {"type": "null"}], "default": None}
    level = {"enum": list(chance.choice(_CHOICES)), "title": "Level", "type": "string"}
    return {
        "$defs": {"Inner": inner, "Level": level},
        "properties": {
            "id": {"format": "uuid", "title": "Id", "type": "string"},
            "level": {"allOf": [{"$ref": "#/$defs/Level"}], "default": level["enum"][0]},
            "items": {"items": {"$ref": "#/$defs/Inner"}, "maxItems": 2, "title": "Items", "type": "array"},
            "maybe": optional,
        },
        "required": ["id", "items"],
        "title": "Outer",
        "type": "object",
    }


def _tool(chance: random.Random) -> Schema:
    """Arguments of a function as OpenAI's strict mode wants them."""
    options = _object({"limit": _integer(chance), "exact": {"type": "boolean"}}, additionalProperties=False)
    return _object(
        {
            "query": {"type": "string", "description": "what to look for", "maxLength": 50},
            "unit": {"type": "string", "enum": list(chance.choice(_CHOICES))},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 10}, "maxItems": chance.randint(1, 3)},
            "after": {"type": ["string", "null"], "format": "date"},
            "options": options,
        },
        additionalProperties=False,
    )


def _tuple(chance: random.Random) -> Schema:
    parts = [_integer(chance), {"type": "boolean"}, _scalar(chance)]
    return _object({"row": {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}})


def _map(chance: random.Random) -> Schema:
    if chance.random() < 0.5:
        return {"type": "object", "additionalProperties": _integer(chance), "minProperties": 1, "maxProperties": 3}
    keys = {"^k[0-9]$": _integer(chance), "^s_[a-z]{1,6}$": {"type": "string", "maxLength": 10}}
    return {"type": "object", "patternProperties": keys, "additionalProperties": False, "maxProperties": 3}


def _composed(chance: random.Random) -> Schema:
    return {
        "$defs": {"Base": _object({"id": _integer(chance), "label": {"type": "string", "maxLength": 15}})},
        "type": "object",
        "allOf": [{"$ref": "#/$defs/Base"}, {"properties": {"more": _scalar(chance)}, "required": ["more"]}],
        "properties": {"id": {"type": "integer"}},
    }
