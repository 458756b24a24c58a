"""Keywords that llguidance does not have, written with those that it has, where that is exact.

`not`, `if`, `dependentRequired`, `dependentSchemas`, `dependencies` and `propertyNames` become alternatives of closed
properties, required ones, bounds and patterns. What has no such form stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from llamado.text.grammar.json_schema.finite import Node, Resolve, UndecidedError, searcher

_TYPES = ("null", "boolean", "number", "string", "array", "object")
_MAX_DEPTH = 12  # of negations inside one another
_MAX_OPTIONS = 64  # that one schema is written as
_MAX_TEXTS = 400  # characters of texts that are excluded
_OPEN: Node = {}
# Keywords that rule nothing out by themselves.
_NOTES = frozenset(
    (
        "title", "description", "default", "examples", "example", "$comment", "$id", "id", "$schema", "$anchor",
        "definitions", "$defs", "deprecated", "readOnly", "writeOnly", "markdownDescription",
    )
)  # fmt: skip
_CLOSERS = ("properties", "patternProperties", "additionalProperties", "unevaluatedProperties")


def rewritten(node: Node, resolve: Resolve) -> Node:
    """An equal schema without the keywords that could be written with others; the same object if there is none."""
    found = [key for key in WAYS if key in node]
    if not found:
        return node
    out = dict(node)
    for key in found:
        more = WAYS[key](out, resolve) if key in out else None
        if more is None:
            continue
        for name in (key, *_TAKEN.get(key, ())):
            out.pop(name, None)
        for part in more:
            out = _both(out, part)
    return out


def without(names: Sequence[str]) -> Node:
    """Objects that have none of these properties, and everything that is no object."""
    return {"properties": dict.fromkeys(names, False), "additionalProperties": _OPEN}


def _both(node: Node, part: object) -> Node:
    """A schema that holds where both do."""
    if part is True or part == {}:
        return node
    if isinstance(part, dict) and part.keys() == {"allOf"}:
        for one in part["allOf"]:
            node = _both(node, one)
        return node
    given = node.get("properties", {})
    if isinstance(part, dict) and _only_forbids(part, node) and isinstance(given, dict):
        out = {**node, **part, "properties": {**given, **part["properties"]}}
        if not node.keys().isdisjoint(_CLOSERS):
            out.pop("additionalProperties")
            out |= {key: node[key] for key in ("additionalProperties",) if key in node}
        return out
    given = node.get("allOf", [])
    return {**node, "allOf": [*given, part]} if isinstance(given, list) else node


def _only_forbids(part: Node, node: Node) -> bool:
    """Return True if `part` only forbids properties of objects, beyond what `node` requires already."""
    return (
        {"properties", "additionalProperties"} <= part.keys() <= {"type", "properties", "additionalProperties"}
        and part["additionalProperties"] == {}
        and all(one is False for one in part["properties"].values())
        and ("type" not in part or (part["type"] == "object" and node.get("type", "object") == "object"))
    )


# --- one keyword each: schemas that must hold beside the rest, None where there is no exact form


def _not(node: Node, resolve: Resolve) -> list[object] | None:
    opposite = negated(node["not"], resolve)
    if opposite is None:
        return None
    types = node.get("type")
    if isinstance(opposite, dict) and isinstance(opposite.get("anyOf"), list) and isinstance(types, str):
        # What the schema's own type excludes need not be an alternative.
        options = [option for option in opposite["anyOf"] if _may_be(option, types)]
        opposite = False if not options else options[0] if len(options) == 1 else {"anyOf": options}
    if isinstance(opposite, dict) and types == "object" and opposite.get("type") == "object":
        opposite = {key: value for key, value in opposite.items() if key != "type"}
    return [opposite]


def _may_be(option: object, name: str) -> bool:
    given = option.get("type", name) if isinstance(option, dict) else name
    types = given if isinstance(given, list) else [given]
    return name in types or (name == "integer" and "number" in types) or (name == "number" and "integer" in types)


def _if(node: Node, resolve: Resolve) -> list[object] | None:
    condition, then, otherwise = node["if"], node.get("then", True), node.get("else", True)
    parts: list[object] = []
    if not _always(then):
        opposite = negated(condition, resolve)
        if opposite is None:
            return None
        if opposite is not True:
            parts.append({"anyOf": [opposite, {"allOf": [condition, then]}]} if opposite is not False else then)
    if not _always(otherwise):
        if _ors(condition) > _MAX_OPTIONS:
            return None
        parts.append({"anyOf": [condition, otherwise]})
    return parts


def _dependencies(node: Node, resolve: Resolve) -> list[object] | None:
    parts: list[object] = []
    for key in ("dependencies", "dependentRequired", "dependentSchemas"):
        given = node.get(key, {})
        if not isinstance(given, dict):
            return None
        for name, wanted in given.items():
            names = [wanted] if isinstance(wanted, str) else wanted
            if isinstance(names, list):
                if not all(isinstance(one, str) for one in names):
                    return None
                others = [one for one in dict.fromkeys(names) if one not in _required(node)]
                if not others:
                    continue
                if name in _required(node):
                    parts.append({"required": others})
                else:
                    parts.append({"anyOf": [without([name]), {"required": [name, *others]}]})
            elif names is False:
                parts.append(without([name]))
            elif isinstance(names, dict) and names:
                parts.append({"anyOf": [without([name]), {"allOf": [{"required": [name]}, names]}]})
    return parts if len(parts) <= 6 else None  # each one doubles the alternatives


def _required(node: Node) -> list[Any]:
    given = node.get("required")
    return given if isinstance(given, list) else []


def _property_names(node: Node, resolve: Resolve) -> list[object] | None:
    rule = node["propertyNames"]
    for _ in range(_MAX_DEPTH):
        if not (isinstance(rule, dict) and rule.keys() - _NOTES == {"$ref"}):
            break
        rule = resolve(rule["$ref"])
    if not isinstance(rule, dict) or "patternProperties" in node:
        return None
    given = {key: value for key, value in rule.items() if key not in _NOTES and (key, value) != ("type", "string")}
    properties = node.get("properties", {})
    rest = node.get("additionalProperties", True)
    if not isinstance(properties, dict):
        return None
    names = _texts(given)
    if names is not None:
        allowed = {name: properties.get(name, rest) for name in names}
        node["properties"] = allowed
        node["additionalProperties"] = False
        return []
    excluded = _texts(given["not"]) if given.keys() == {"not"} and isinstance(given["not"], dict) else None
    if excluded is not None:
        return [without(excluded)]
    if not given.keys() <= {"pattern", "minLength", "maxLength"} or len(given.keys() - {"minLength"}) > 1:
        return None
    pattern = given.get("pattern")
    try:
        if pattern is None:
            least, most = given.get("minLength", 0), given.get("maxLength")
            pattern = f"^(?s:.){{{least},{'' if most is None else most}}}$"
            fitting = [name for name in properties if least <= len(name) and (most is None or len(name) <= most)]
        elif "minLength" in given:
            return None
        else:
            fits = searcher(pattern)
            fitting = [name for name in properties if fits(name)]
    except (UndecidedError, TypeError):
        return None
    if len(fitting) < len(properties):
        node["properties"] = {name: part if name in fitting else False for name, part in properties.items()}
    if rest is not False:
        node["patternProperties"] = {pattern: rest}
        node["additionalProperties"] = False
    return []


def _texts(node: Mapping[str, Any]) -> list[str] | None:
    """The only texts that a schema allows, if it lists them and does nothing else."""
    keys = node.keys() - _NOTES - {"type"}
    values = node.get("enum") if keys == {"enum"} else [node["const"]] if keys == {"const"} else None
    if isinstance(values, list) and all(isinstance(value, str) for value in values):
        return values
    return None


def _recursive_reference(node: Node, resolve: Resolve) -> list[object] | None:
    """A reference that leads where a plain one does: there is one document, and nothing in it that redirects it."""
    key = "$recursiveRef" if "$recursiveRef" in node else "$dynamicRef"
    if "$ref" in node or not isinstance(node[key], str):
        return None
    resolve(node[key])
    node["$ref"] = node[key]
    return []


def _one_of(node: Node, resolve: Resolve) -> list[object] | None:
    """Alternatives told apart by the properties that they require: each one without those of the others.

    One of them may require none if it forbids some of each other one's.
    """
    options = node["oneOf"]
    if not isinstance(options, list) or len(options) < 2 or "anyOf" in node:
        return None
    wanted = [_only_required(option) for option in options]
    lists = [names for names in wanted if names is not None]
    if len(lists) < len(options) - 1:
        return None
    out: list[object] = []
    for option, own in zip(options, wanted, strict=True):
        if own is None:
            rest = rewritten(option, resolve) if isinstance(option, dict) else {}
            given = rest.get("properties")
            forbidden = {name for name, part in given.items() if part is False} if isinstance(given, dict) else set()
            if not all(forbidden.intersection(names) for names in lists):
                return None
            out.append(option)
            continue
        excluded: list[list[str]] = [[]]
        for names in (names for names in lists if names is not own):
            left = [name for name in dict.fromkeys(names) if name not in own]
            if not left or any(name in option.get("properties", {}) for name in left):
                return None
            excluded = [[*others, name] for others in excluded for name in left]
            if len(excluded) > _MAX_OPTIONS:
                return None
        closers = {} if "properties" in option else {"additionalProperties": _OPEN}
        for names in excluded:
            properties = {**option.get("properties", {}), **dict.fromkeys(names, False)}
            out.append({**option, "type": "object", "properties": properties, **closers})
    if len(out) > _MAX_OPTIONS:
        return None
    node["anyOf"] = out
    return []


def _only_required(option: object) -> list[str] | None:
    """The properties that an alternative requires if it does little else."""
    if not isinstance(option, dict) or not option.keys() - _NOTES <= {"required", "type", "properties"}:
        return None
    names = option.get("required")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        return None
    good = option.get("type", "object") == "object" and isinstance(option.get("properties", {}), dict)
    return names if good else None


WAYS: Mapping[str, Callable[[Node, Resolve], list[object] | None]] = {
    "oneOf": _one_of,
    "not": _not,
    "if": _if,
    "dependencies": _dependencies,
    "dependentRequired": _dependencies,
    "dependentSchemas": _dependencies,
    "propertyNames": _property_names,
    "$recursiveRef": _recursive_reference,
    "$dynamicRef": _recursive_reference,
}
_TAKEN = {
    "if": ("then", "else"),
    "dependencies": ("dependentRequired", "dependentSchemas"),
    "dependentRequired": ("dependencies", "dependentSchemas"),
    "dependentSchemas": ("dependencies", "dependentRequired"),
}


# --- negation


def negated(schema: object, resolve: Resolve, depth: int = 0) -> object | None:
    """Return a schema of everything that `schema` excludes, or None if it has no exact form."""
    if isinstance(schema, bool):
        return not schema
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return None
    given = {key: value for key, value in schema.items() if key not in _NOTES}
    options: list[object] = []
    conditional = {}
    for key, value in given.items():
        if key in ("then", "else") or (key in ("if",) and not given.keys() & {"then", "else"}):
            continue
        if key == "if":
            return None
        found = _OPPOSITES[key](value, resolve, depth + 1, given) if key in _OPPOSITES else None
        if found is None:
            return None
        conditional[key] = found
        options += [option for option in found if option is not False]
    if any(option is True for option in options):
        return True
    if len(options) > _MAX_OPTIONS or sum(map(_ors, options)) > _MAX_OPTIONS:
        return None
    return False if not options else options[0] if len(options) == 1 else {"anyOf": options}


def _ors(schema: object) -> int:
    """About how many alternatives a schema has when it is written out."""
    if not isinstance(schema, dict):
        return 1
    count = 1
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            count *= max(1, sum(map(_ors, schema[key])))
    if isinstance(schema.get("allOf"), list):
        for part in schema["allOf"]:
            count *= _ors(part)
    return count


def _always(schema: object) -> bool:
    return schema is True or (isinstance(schema, dict) and not schema.keys() - _NOTES)


def _opposite_type(value: Any, resolve: Resolve, depth: int, whole: Node) -> list[object] | None:
    names = value if isinstance(value, list) else [value]
    if not all(isinstance(name, str) for name in names) or ("integer" in names and "number" not in names):
        return None
    left = [name for name in _TYPES if name not in names]
    return [{"type": left}] if left else []


def _opposite_values(value: Any, resolve: Resolve, depth: int, whole: Node) -> list[object] | None:
    values = value if isinstance(value, list) else None
    if values is None:
        return None
    out: list[object] = []
    kinds = {type(one) for one in values}
    if kinds - {str, bool, type(None), int, float} or sum(len(str(one)) for one in values) > _MAX_TEXTS:
        return None
    out.append({"type": [name for name in ("null", "array", "object") if name != "null" or None not in values]})
    booleans = {one for one in values if isinstance(one, bool)}
    if booleans != {True, False}:
        out.append({"type": "boolean"} if not booleans else {"const": not booleans.pop()})
    numbers = sorted({one for one in values if isinstance(one, (int, float)) and not isinstance(one, bool)})
    if numbers:
        out.append({"type": "number", "exclusiveMaximum": numbers[0]})
        out += [
            {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high} for low, high in pairwise(numbers)
        ]
        out.append({"type": "number", "exclusiveMinimum": numbers[-1]})
    else:
        out.append({"type": "number"})
    texts = sorted({one for one in values if isinstance(one, str)})
    out.append({"type": "string", "pattern": f"^{other_than(texts)}$"} if texts else {"type": "string"})
    return out


def other_than(texts: Sequence[str]) -> str:
    """A regular expression for all texts but these, without anchors."""
    firsts = sorted({text[0] for text in texts if text})
    ways = [] if "" in texts else [""]
    for first in firsts:
        ways.append(_character(first) + other_than([text[1:] for text in texts if text[:1] == first]))
    ways.append(f"[^{''.join(map(_character, firsts))}](?s:.*)" if firsts else "(?s:.+)")
    return f"(?:{'|'.join(ways)})"


def _character(character: str) -> str:
    return f"\\x{{{ord(character):X}}}"


def _opposite_required(value: Any, resolve: Resolve, depth: int, whole: Node) -> list[object] | None:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        return None
    return [{"type": "object", **without([name])} for name in value]


def _opposite_properties(value: Any, resolve: Resolve, depth: int, whole: Node) -> list[object] | None:
    if not isinstance(value, dict):
        return None
    out: list[object] = []
    for name, part in value.items():
        opposite = negated(part, resolve, depth)
        if opposite is None:
            return None
        if opposite is not False:
            part = {"properties": {name: opposite}, "additionalProperties": _OPEN}
            out.append({"type": "object", "required": [name], **part})
    return out


def _opposite_all(value: Any, resolve: Resolve, depth: int, whole: Node) -> list[object] | None:
    if not isinstance(value, list):
        return None
    opposites = [negated(part, resolve, depth) for part in value]
    return None if any(one is None for one in opposites) else list(opposites)


def _opposite_any(value: Any, resolve: Resolve, depth: int, whole: Node) -> list[object] | None:
    opposites = _opposite_all(value, resolve, depth, whole)
    if opposites is None:
        return None
    needed = [one for one in opposites if one is not True]
    if any(one is False for one in needed):
        return []
    return [True] if not needed else [needed[0]] if len(needed) == 1 else [{"allOf": needed}]


def _opposite_not(value: Any, resolve: Resolve, depth: int, whole: Node) -> list[object] | None:
    return [value] if isinstance(value, (dict, bool)) else None


def _opposite_reference(value: Any, resolve: Resolve, depth: int, whole: Node) -> list[object] | None:
    opposite = negated(resolve(value), resolve, depth)
    return None if opposite is None else [opposite]


def _opposite_bound(key: str, kind: str, step: int) -> Callable[[Any, Resolve, int, Node], list[object] | None]:
    """The opposite of a bound: another one at the same place, or a whole number further."""

    def opposite(value: Any, resolve: Resolve, depth: int, whole: Node) -> list[object] | None:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        if step and value + step < 0:
            return []
        bound: Node = {"type": kind, key: value + step}
        if kind == "object":
            bound["additionalProperties"] = _OPEN
        return [bound]

    return opposite


_OPPOSITES: Mapping[str, Callable[[Any, Resolve, int, Node], list[object] | None]] = {
    "type": _opposite_type,
    "enum": _opposite_values,
    "const": lambda value, *others: _opposite_values([value], *others),
    "required": _opposite_required,
    "properties": _opposite_properties,
    "allOf": _opposite_all,
    "anyOf": _opposite_any,
    "not": _opposite_not,
    "$ref": _opposite_reference,
    "minimum": _opposite_bound("exclusiveMaximum", "number", 0),
    "maximum": _opposite_bound("exclusiveMinimum", "number", 0),
    "exclusiveMinimum": _opposite_bound("maximum", "number", 0),
    "exclusiveMaximum": _opposite_bound("minimum", "number", 0),
    "minLength": _opposite_bound("maxLength", "string", -1),
    "maxLength": _opposite_bound("minLength", "string", 1),
    "minItems": _opposite_bound("maxItems", "array", -1),
    "maxItems": _opposite_bound("minItems", "array", 1),
    "minProperties": _opposite_bound("maxProperties", "object", -1),
    "maxProperties": _opposite_bound("minProperties", "object", 1),
}
