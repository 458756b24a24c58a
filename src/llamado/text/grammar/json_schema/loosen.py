"""Schemas of tools made fit to be enforced: what cannot be is taken out of them, and named.

A client that offers a tool did not ask for its schema to be enforced, so a keyword that llguidance lacks is no reason
to refuse the request. What is loosened is logged once for each schema.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
from collections.abc import Mapping
from typing import Any

from llamado.text.grammar.deep_stack import with_deep_stack
from llamado.text.grammar.guidance import LIMITS, GuidedMatcher, bytes_tokenizer
from llamado.text.grammar.json_schema.references import objects
from llamado.text.grammar.json_schema.schema import SchemaError, check_schema, schema_error, schema_grammar
from llamado.text.grammar.source import GrammarError

log = logging.getLogger("llamado.text")

_KEPT = 256  # schemas whose loosened form is remembered
_MOST = 100  # keywords that are taken out one by one
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_IN_PLACE = ("allOf", "anyOf", "oneOf", "prefixItems")
# What llguidance's complaints are about.
_COMPLAINTS: Mapping[str, tuple[str, ...]] = {
    "min/maxProperties": ("minProperties", "maxProperties"),
    "patternProperty": ("patternProperties", "additionalProperties"),
    "circular references": ("$ref",),
    "multipleOf": ("multipleOf",),
}


def loosened(schema: Mapping[str, Any], name: str = "") -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """A schema of objects that can be enforced, and the places and keywords that were taken out, none as a rule.

    `name`: the tool's, for the log.
    """
    text, taken = _loosened(json.dumps(schema), name)
    return (schema if text is None else json.loads(text)), taken


def check_enforced(schema: Mapping[str, Any], name: str) -> None:
    """Raise GrammarError if a tool's schema cannot be enforced."""
    error = _refusal(json.dumps(schema))
    if error:
        raise GrammarError(f"the tool {name[:100]!r} is strict and cannot be enforced: {error}")


@functools.lru_cache(maxsize=_KEPT)
def _refusal(text: str) -> str:
    error = _error(json.loads(text))
    return "" if error is None else str(error)


@functools.lru_cache(maxsize=_KEPT)
def _loosened(text: str, name: str) -> tuple[str | None, tuple[str, ...]]:
    schema = json.loads(text)
    if _error(schema) is None and _is_object(schema):
        return None, ()
    taken: list[str] = []
    loose = _without_refused(schema, taken)
    if not _is_object(loose):
        loose["type"] = "object"
    error = _error(loose)
    if error is not None:
        loose = _without_complaints(loose, str(error), taken)
    what = ", ".join(taken[:10]) + (f" and {len(taken) - 10} more" if len(taken) > 10 else "")
    log.warning('tool %s: parts of its schema are not enforced (%s); "strict": true refuses such tools', name, what)
    return json.dumps(loose), tuple(taken)


def _is_object(schema: Mapping[str, Any]) -> bool:
    """Return True if the schema restricts its instances itself, so that it needs no `type` of object."""
    return not schema.keys().isdisjoint(("type", "properties", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"))


def _error(schema: Mapping[str, Any]) -> GrammarError | None:
    """Return the reason that a schema cannot be enforced, or None."""
    try:
        grammar = schema_grammar(json.dumps(schema))
        complaint = with_deep_stack(lambda: _complaint(grammar))
    except GrammarError as error:
        return error
    except RecursionError:
        return GrammarError("nested too deep")
    return schema_error(complaint) if complaint else None


def _complaint(grammar: str) -> str:
    return GuidedMatcher.of(bytes_tokenizer(), grammar, LIMITS).error


def _without_refused(schema: dict[str, Any], taken: list[str]) -> dict[str, Any]:
    """The schema without the keywords that are refused by name and place."""
    schema = copy.deepcopy(schema)
    for _ in range(_MOST):
        try:
            check_schema(schema)
            break
        except SchemaError as error:
            keys = [key for key in error.keys if error.node is not None and key in error.node]
            if error.node is None or not keys or not _holds(schema, error.node):
                break
            for key in keys:
                del error.node[key]
            taken.append(f"{error.path}: {', '.join(keys)}")
        except (GrammarError, RecursionError):
            break
    return schema


def _holds(schema: object, node: object) -> bool:
    return any(one is node for one in objects(schema))


def _without_complaints(schema: dict[str, Any], complaint: str, taken: list[str]) -> dict[str, Any]:
    """The schema without what llguidance complains of; where that is unknown, properties without their schemas."""
    schema = copy.deepcopy(schema)
    if "oneOf" in complaint:
        for node in list(objects(schema)):
            if isinstance(node.get("oneOf"), list) and "anyOf" not in node:
                node["anyOf"] = node.pop("oneOf")
        taken.append("#: oneOf")
    for words, keys in _COMPLAINTS.items():
        if words in complaint:
            for node in list(objects(schema)):
                for key in keys:
                    node.pop(key, None)
            taken.append(f"#: {', '.join(keys)}")
    if "regex" in complaint.lower() or "look" in complaint:
        for node in list(objects(schema)):
            pattern = node.get("pattern")
            if isinstance(pattern, str) and _error({"pattern": pattern, "type": "string"}) is not None:
                del node["pattern"]
                taken.append(f"#: pattern {pattern[:100]!r}")
            patterns = node.get("patternProperties")
            if isinstance(patterns, dict) and _error({"patternProperties": patterns}) is not None:
                del node["patternProperties"]
                node.pop("additionalProperties", None)
                taken.append("#: patternProperties")
    if _error(schema) is None:
        return schema
    properties = schema.get("properties")
    if isinstance(properties, dict):
        known: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        parts: dict[str, Any] = {}
        for name, part in properties.items():
            alone = {"type": "object", "properties": {name: part}, "required": [name], **known}
            good = isinstance(part, (dict, bool)) and _error(alone) is None
            parts[name] = part if good else True
            if not good:
                taken.append(f"#/properties/{name}: everything")
        required = schema.get("required")
        loose: dict[str, Any] = {"type": "object", "properties": parts, **known}
        if isinstance(required, list):
            if _error({**loose, "required": required}) is None:
                return {**loose, "required": required}
            taken.append("#: required")
        if _error(loose) is None:
            return loose
    taken.append("#: everything")
    return dict(_ANY_OBJECT)
