"""Grammar of values written as bare text between tags: a schema's strings without quotes and escapes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llamado.text.dialects.values import resolve, types
from llamado.text.grammar.json_schema.formats import FORMATS
from llamado.text.grammar.json_schema.formats import LIMITS as FORMAT_LIMITS
from llamado.text.grammar.json_schema.numbers import limits

ANY_TEXT = "/(?s:.*)/"
_MAX_DEPTH = 12
_MAX_CHOICES = 1_000
# Values of types other than strings; the contents of objects and arrays are up to the model.
_OTHERS = {
    "null": '"null"',
    "boolean": '"true" | "false"',
    "integer": "/-?(0|[1-9][0-9]{0,15})/",
    "number": r"/-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,15})?([eE][-+]?[0-9]{1,3})?/",
    "object": r"/\{(?s:.*)\}/",
    "array": r"/\[(?s:.*)\]/",
}


def choices(schema: Any, root: Any, depth: int = 0) -> list[Any] | None:
    """Return the only values that a schema allows, if they are few; None if it does not list them."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return None
    found: list[list[Any]] = []
    if "const" in schema:
        found.append([schema["const"]])
    if isinstance(schema.get("enum"), list):
        found.append(schema["enum"])
    inner = [resolve(schema["$ref"], root)] if isinstance(schema.get("$ref"), str) else []
    inner += schema["allOf"] if isinstance(schema.get("allOf"), list) else []
    found += [values for values in (choices(one, root, depth + 1) for one in inner) if values is not None]
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        if isinstance(options, list) and options:
            lists = [choices(one, root, depth + 1) for one in options]
            if all(values is not None for values in lists):
                found.append([value for values in lists for value in values or ()])
    if not found:
        return None
    first, *others = found
    kept = [value for value in first if all(value in other for other in others)]
    return kept if len(kept) <= _MAX_CHOICES else None


def text_expression(schema: Any, root: Any, depth: int = 0) -> str:
    """Return a terminal's Lark expression for the bare texts of a schema's instances."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return ANY_TEXT
    values = choices(schema, root)
    if values is not None:
        return _either([json.dumps(spelled(value), ensure_ascii=False) for value in values if value != ""])
    kinds = types(schema, root)
    parts = [_string(schema)] if "string" in kinds else []
    parts += [_OTHERS[kind] for kind in _OTHERS if kind in kinds and not (kind == "integer" and "number" in kinds)]
    both = [_either(parts)]
    inner = [resolve(schema["$ref"], root)] if isinstance(schema.get("$ref"), str) else []
    inner += schema["allOf"] if isinstance(schema.get("allOf"), list) else []
    both += [text_expression(one, root, depth + 1) for one in inner]
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        if isinstance(options, list) and options:
            both.append(_either([text_expression(one, root, depth + 1) for one in options]))
    return _all(both)


def spelled(value: Any) -> str:
    """Return a value as bare text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _either(parts: list[str]) -> str:
    if ANY_TEXT in parts or not parts:
        return ANY_TEXT
    return parts[0] if len(parts) == 1 else f"({' | '.join(dict.fromkeys(parts))})"


def _all(parts: list[str]) -> str:
    left = [part for part in dict.fromkeys(parts) if part != ANY_TEXT]
    return ANY_TEXT if not left else left[0] if len(left) == 1 else f"({' & '.join(f'({part})' for part in left)})"


def _string(schema: Mapping[str, Any]) -> str:
    """Return a Lark expression for the texts that a schema's own keywords allow."""
    parts = []
    for part in (schema, FORMAT_LIMITS.get(str(schema.get("format")), {})):
        counts = limits(part)
        if "minLength" in counts or "maxLength" in counts:
            parts.append(f"/(?s:.{{{counts.get('minLength', 0)},{counts.get('maxLength', '')}}})/")
        pattern = part.get("pattern")
        if isinstance(pattern, str):
            expression = search_expression(pattern)
            parts += [] if expression is None else [expression]
    whole = FORMATS.get(str(schema.get("format")))
    if whole is not None:
        parts.append(_regex(whole))
    return _all(parts or [ANY_TEXT])


def search_expression(pattern: str) -> str | None:
    """Return a Lark expression for the texts that contain a match of a pattern; None if it has anchors except around
    it.
    """
    ways = []
    for way in _alternatives(pattern):
        start, end = way.startswith("^"), way.endswith("$") and not _is_escaped(way, len(way) - 1)
        inner = way[start : len(way) - end]
        if _has_anchor(inner):
            return None
        ways.append(f"{'' if start else '(?s:.*)'}(?:{inner}){'' if end else '(?s:.*)'}")
    return _regex("|".join(ways))


def _regex(pattern: str) -> str:
    out, escaped = [], False
    for character in pattern:
        if character == "/" and not escaped:
            out.append("\\")
        escaped = character == "\\" and not escaped
        out.append({"\n": "\\n", "\r": "\\r"}.get(character, character))
    return f"/(?:{''.join(out)})/"


def _is_escaped(pattern: str, at: int) -> bool:
    before = pattern[:at]
    return (len(before) - len(before.rstrip("\\"))) % 2 == 1


def _plain(pattern: str) -> list[tuple[int, str, int]]:
    """Return the characters of a pattern that are not escaped and not in a class: position, character, depth of
    groups.
    """
    found, depth, at = [], 0, 0
    while at < len(pattern):
        character = pattern[at]
        if character == "\\":
            at += 2
            continue
        if character == "[":
            end = at + 1 + pattern.startswith("^", at + 1)
            end += pattern.startswith("]", end)
            while end < len(pattern) and pattern[end] != "]":
                end += 2 if pattern[end] == "\\" else 1
            at = end + 1
            continue
        depth += (character == "(") - (character == ")")
        found.append((at, character, depth))
        at += 1
    return found


def _alternatives(pattern: str) -> list[str]:
    cuts = [at for at, character, depth in _plain(pattern) if character == "|" and depth == 0]
    return [pattern[a:b] for a, b in zip([0, *(cut + 1 for cut in cuts)], [*cuts, len(pattern)], strict=True)]


def _has_anchor(pattern: str) -> bool:
    return any(character in "^$" for _, character, _ in _plain(pattern)) or "\\b" in pattern or "\\B" in pattern
