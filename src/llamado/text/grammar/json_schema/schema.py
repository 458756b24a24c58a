"""JSON Schema → llguidance's grammar.

llguidance refuses what it cannot honour. Before it sees a schema, this is done: keywords that cannot be honoured are
named with their place; what the schema leaves open is closed as llama.cpp does (no further properties beside those
that are listed, an object where `properties` is, bounded white space), which only takes instances away; and what
hostile schemas need stack and time for is limited.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from llamado.text.grammar.json_schema.finite import FiniteSchemas, value_key
from llamado.text.grammar.json_schema.formats import FORMATS, LIMITS, NOT_REGULAR
from llamado.text.grammar.json_schema.numbers import FAR, MAX_MULTIPLE, Number, check_literal, limits, multiple, units
from llamado.text.grammar.json_schema.references import anchors, follow
from llamado.text.grammar.json_schema.rewrite import WAYS, rewritten
from llamado.text.grammar.json_schema.string_states import has_too_many_states
from llamado.text.grammar.source import GrammarError

# White space between two tokens of JSON: none, a space, or a new line and its indentation. Without a bound small
# models write blanks for ever. llama.cpp allows the same.
WHITESPACE = r" |\n[ \t]{0,20}"

OVERLAPPING = "keyword 'oneOf' is not supported where more than one of its schemas may hold; use 'anyOf'"

MAX_DEPTH = 150  # of schemas inside one another, references followed
MAX_PATTERNS = 16  # that may hold together: each one more doubles what llguidance takes, unbounded by its limits
MAX_SCHEMAS = 20_000

_TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
_ANY_TYPE = _TYPES - {"integer"}

# Where a schema has further schemas: in place of it, or for parts of its instances.
_IN_PLACE = ("allOf", "anyOf", "oneOf")
_LISTS = (*_IN_PLACE, "prefixItems")
_MAPS = ("properties", "patternProperties")
_SINGLE = ("items", "additionalItems", "additionalProperties")
_AS_GIVEN = ("type", "const", "enum", "required", "pattern")

_REFUSED = frozenset(
    (
        "not",
        "if",
        "contains",
        "minContains",
        "maxContains",
        "propertyNames",
        "dependentSchemas",
        "dependentRequired",
        "dependencies",
        "unevaluatedProperties",
        "unevaluatedItems",
        "uniqueItems",
        "$dynamicRef",
        "$recursiveRef",
    )
)


def schema_grammar(text: str) -> str:
    """llguidance's Lark for the instances of a JSON schema. Raises GrammarError."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _error("#", f"the schema is not JSON: {str(error)[:200]}") from None
    return f'%llguidance {{"no_forcing": true}}\nstart: {json_rule(schema)}\n'


def json_rule(schema: object) -> str:
    """A Lark rule's body for the instances of a JSON schema. Raises GrammarError."""
    try:
        prepared = _Schema(schema).prepared()
        if isinstance(prepared, dict):
            prepared["x-guidance"] = {"whitespace_flexible": True, "whitespace_pattern": WHITESPACE}
        return "%json " + json.dumps(prepared)
    except RecursionError:
        raise _error("#", "the schema is nested too deep") from None


def schema_error(text: str) -> GrammarError:
    """llguidance's complaint about a schema, as an error."""
    reason = text.partition("failed to compile JSON schema: ")[2] or text
    lines = [line for line in reason.splitlines() if " | " not in line and line.strip(" ^~<>")]
    reason = " ".join(lines)[:500].strip() or text[:500]
    if reason.startswith("oneOf constraints are not supported"):
        reason = OVERLAPPING
    return _error("#", reason)


class SchemaError(GrammarError):
    """A part of a schema cannot be honoured: `keys` of `node`, an object of the document, at `path`."""

    def __init__(self, path: str, what: str, node: dict[str, Any] | None = None, keys: Sequence[str] = ()) -> None:
        self.path = path if len(path) <= 300 else f"{path[:200]}…{path[-50:]}"
        self.node = node
        self.keys = keys
        super().__init__(f"JSON schema conversion failed:\nJSON schema error at {self.path}: {what}")


_error = SchemaError


def check_schema(schema: object) -> None:
    """Raise SchemaError for an unsupported keyword, as far as that is visible before llguidance compiles the schema."""
    _Schema(schema).prepared()


@dataclass
class _Seen:
    """Properties of a schema in the document."""

    composed: bool = False
    """Other schemas hold for the same instances, so it must stay open."""
    compared: bool = False
    """llguidance tells it from alternatives, so it must stay open, and all schemas in it."""
    limits: Mapping[str, Number] = field(default_factory=dict)
    """Its bounds, lengths and counts."""


@dataclass(frozen=True, kw_only=True)
class _Face:
    """The properties by which a schema differs from its alternatives."""

    types: set[str]
    """Types of all its instances."""
    written: set[str]
    """Types of the instances that the grammar generates."""
    values: set[str] | None
    properties: Mapping[str, object]
    tags: Mapping[str, list[str]]
    required: set[str]
    open: bool
    """True if the grammar generates objects with properties that are not listed."""
    forbids: bool
    """True if objects cannot have other properties at all."""

    def excludes(self, other: _Face) -> bool:
        """Return True if no instance that the grammar generates for this schema is valid for the other one."""
        if self.values is not None and other.values is not None:
            return not self.values & other.values
        common = self.written & other.types
        if common != {"object"}:
            return not common
        return any(map(self._excludes_by(other), self.required | other.required))

    def _excludes_by(self, other: _Face) -> Callable[[str], bool]:
        def by(name: str) -> bool:
            mine, others = self.properties.get(name, True), other.properties.get(name, True)
            if name in other.required and (mine is False or (name not in self.properties and not self.open)):
                return True
            if name not in self.required:
                return False
            if others is False or (name not in other.properties and other.forbids):
                return True
            if name in self.tags and name in other.tags:
                return not set(self.tags[name]) & set(other.tags[name])
            both = isinstance(mine, dict) and isinstance(others, dict)
            return both and not _types(mine) & _types(others)  # type: ignore[arg-type]

        return by


class _Schema:
    """A schema document: looked through first, along references, then written anew."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._nodes: dict[int, tuple[object, dict[str, Any]]] = {}  # schemas, and how they are written instead
        self._origins: dict[int, dict[str, Any]] = {}
        self._require: dict[int, str] = {}  # properties that tell schemas from their neighbors
        self._seen: dict[int, _Seen] = {}
        self._anchors: dict[str, object] | None = None
        self._instance_types: dict[int, set[str]] = {}
        self._targets: dict[int, str] = {}  # what the schemas that references lead to are called
        self._definitions: dict[str, Any] = {}
        self._waiting: list[tuple[str, object]] = []  # to be written among them
        self._finite = FiniteSchemas(self._find)
        self._multiples: set[Decimal] = set()
        self._conjunctions = False
        self._patterns = 0  # in schemas that hold together with others

    def prepared(self) -> Any:
        """The document as llguidance shall see it. Raises GrammarError."""
        self._look(self._root, "#", False, 0, ())
        if self._conjunctions and units(self._multiples) > 10 * MAX_MULTIPLE:
            values = ", ".join(map(str, sorted(self._multiples)[:5]))
            raise _error("#", f"keyword 'multipleOf' is not supported with {values} in conjunctions")
        self._targets[id(self._root)] = "#"
        out = self._write(self._root)
        while self._waiting:
            name, target = self._waiting.pop()
            self._definitions[name] = self._write(target)
        if self._definitions:
            out["$defs"] = self._definitions
        return out

    # --- looking

    def _look(
        self, node: object, path: str, composed: bool, depth: int, trail: tuple[int, ...], compared: bool = False
    ) -> None:
        """Check a schema and all that it leads to; `trail`: the schemas that hold for the same instances."""
        if depth > MAX_DEPTH:
            raise _error(path, f"schemas are nested more than {MAX_DEPTH} deep")
        if isinstance(node, bool):
            return
        if not isinstance(node, dict):
            raise _no_schema(node, path)
        node = self._node(node)
        composed |= compared
        if id(node) in trail:
            why = "keyword '$ref' leads back to the same schema without anything between"
            raise _error(path, why, self._origin(node), [key for key in ("$ref", "allOf") if key in node])
        seen = self._seen.get(id(node))
        if seen is not None and seen.composed >= composed and seen.compared >= compared:
            return
        if seen is None:
            seen = self._seen[id(node)] = _Seen()
            if len(self._seen) > MAX_SCHEMAS:
                raise _error(path, f"there are more than {MAX_SCHEMAS} schemas")
            self._check(node, path)
            try:
                seen.limits = limits(node)
                check_literal([node.get("const"), node.get("enum")])
                if "multipleOf" in node:
                    self._multiples.add(multiple(node["multipleOf"]))
            except ValueError as error:
                raise _error(path, str(error), self._origin(node), [key for key in NUMERIC if key in node]) from None
        composed |= seen.composed
        compared |= seen.compared
        seen.composed, seen.compared = composed, compared
        if composed and ("pattern" in node or "format" in node):
            self._patterns += 2 if node.get("format") in LIMITS else 1
            if self._patterns > MAX_PATTERNS:
                why = f"more than {MAX_PATTERNS} keywords 'pattern' and 'format' in conjunctions"
                raise _error(path, why, self._origin(node), [key for key in ("pattern", "format") if key in node])
        for part, place, holder, key in _parts(node, path):
            if not isinstance(part, (dict, bool)):
                raise _no_schema(part, place, holder if holder is not node else self._origin(node), key)
            self._look(part, place, compared, depth + 1, (), compared)
        if "oneOf" in node:
            self._tell_apart(node["oneOf"])
        alone = not composed and _is_alone(node)
        self._conjunctions |= composed
        here = (*trail, id(node))
        for key in _IN_PLACE:
            options = node.get(key, ())
            deep = compared or (
                options
                and key == "oneOf"
                and not self._are_apart(options, self._types(node, ("oneOf",)), closing=alone)
            )
            for i, option in enumerate(options):
                if not isinstance(option, (dict, bool)):
                    raise _no_schema(option, f"{path}/{key}/{i}", self._origin(node), key)
                # A choice that leads back is recursion like any other; a conjunction that does holds for nothing.
                self._look(option, f"{path}/{key}/{i}", not alone, depth + 1, here if key == "allOf" else (), deep)
        if "$ref" in node:
            target = self._resolve(node["$ref"], path, self._origin(node))
            self._look(target, path, not alone, depth + 1, here, compared)

    def _node(self, node: dict[str, Any]) -> dict[str, Any]:
        """A schema with its keywords written as llguidance has them."""
        known = self._nodes.get(id(node))
        if known is None:
            try:
                known = self._nodes[id(node)] = (node, self._finite.listed(node) or rewritten(node, self._find))
            except SchemaError as error:  # of a reference below
                error.node, error.keys = node, [key for key in WAYS if key in node]
                raise
            self._nodes.setdefault(id(known[1]), (known[1], known[1]))
            self._origins[id(known[1])] = node
        return known[1]

    def _origin(self, node: dict[str, Any]) -> dict[str, Any]:
        """The object of the document that a schema was made of."""
        return self._origins.get(id(node), node)

    def _find(self, reference: object) -> object:
        return self._resolve(reference, "#")

    def _check(self, node: dict[str, Any], path: str) -> None:
        def refuse(key: str, why: str) -> SchemaError:
            more = [other for other in ("then", "else") if key == "if" and other in node]
            return _error(path, why, self._origin(node), [key, *more])

        for key in _REFUSED & node.keys():
            if not _says_nothing(key, node):
                raise refuse(key, f"keyword '{key}' is not supported")
        types = node.get("type", [])
        for name in types if isinstance(types, list) else [types]:
            if not isinstance(name, str) or name not in _TYPES:
                raise refuse("type", f"unrecognized type {name if isinstance(name, str) else json.dumps(name)}")
        if node.get("format") in NOT_REGULAR and "string" in (types or ["string"]):
            raise refuse("format", f"keyword 'format' is not supported with {node['format']!r}")
        for key, kind in _KINDS.items():
            if key in node and not isinstance(node[key], kind):
                raise refuse(key, f"keyword '{key}' cannot be {json.dumps(node[key])[:50]}")
        if not all(isinstance(name, str) for name in node.get("required", ())):
            raise refuse("required", f"keyword 'required' cannot be {json.dumps(node['required'])[:50]}")

    def _resolve(self, reference: object, path: str, node: dict[str, Any] | None = None) -> object:
        """Return the target of a reference of `node`. Raises SchemaError."""
        own = node, [key for key in ("$ref", "$dynamicRef", "$recursiveRef") if node is not None and key in node]
        if not isinstance(reference, str):
            raise _error(path, "keyword '$ref' must be a text", *own)
        if not reference.startswith("#"):
            raise _error(path, f"keyword '$ref' is not supported for other documents: {reference[:200]}", *own)
        if not reference.startswith("#/") and reference != "#":
            if self._anchors is None:
                self._anchors = anchors(self._root)
            if reference[1:] in self._anchors:
                return self._anchors[reference[1:]]
            raise _error(path, f"cannot resolve $ref {reference[:200]}", *own)
        try:
            return follow(reference, self._root)
        except LookupError as error:
            step = str(error.args[0])[:50]
            raise _error(path, f"cannot resolve $ref {reference[:200]}, {step} not found", *own) from None

    # --- alternatives of which exactly one holds

    def _tell_apart(self, options: list[object]) -> None:
        """Make properties with a fixed value, by which all the objects differ, required."""
        targets = [self._target(option) for option in options]
        if not targets or not all(isinstance(target, dict) for target in targets):
            return
        tags = [_tags(target) for target in targets if isinstance(target, dict)]
        for name in tags[0]:
            values = [value for tag in tags for value in tag.get(name, ("", ""))]
            if all(name in tag for tag in tags) and len(set(values)) == len(values):
                self._require |= dict.fromkeys(map(id, targets), name)
                return

    def _target(self, node: object) -> object:
        """Follow references that are the only keyword of their schema."""
        for _ in range(MAX_DEPTH):
            if not isinstance(node, dict) or "$ref" not in node or not _is_alone(node):
                break
            node = self._resolve(node["$ref"], "#", self._origin(node))
        return self._node(node) if isinstance(node, dict) else node

    def _are_apart(self, options: Sequence[object], around: set[str], *, closing: bool = True) -> bool:
        """Return True if types and values prove that no generated instance of an alternative is valid for another.

        `around`: types that the surrounding schema allows. `closing`: objects among them may be closed.
        """
        targets = [self._target(option) for option in options]
        faces = [self._face(target, around, closing) for target in targets if isinstance(target, dict)]
        if len(faces) < len(targets) or len(targets) > 200:
            return False
        return all(one is other or one.excludes(other) for one in faces for other in faces)

    def _face(self, node: dict[str, Any], around: set[str], closing: bool) -> _Face:
        seen = self._seen.get(id(node))
        composed = not closing if seen is None else seen.composed
        closes = not composed and node.keys().isdisjoint((*_IN_PLACE, "$ref", "enum", "const")) and self._closes(node)
        values = [node["const"]] if "const" in node else node.get("enum")
        properties = node.get("properties", {})
        types = self._types(node) & around
        becomes_object = "type" not in node and "properties" in node and (not composed or id(node) in self._require)
        return _Face(
            types=types,
            written=types & {"object"} if becomes_object else types,
            values=None if values is None else {value_key(value) for value in values},
            properties={name: self._target(part) for name, part in properties.items()},
            tags=_tags(node),
            required=self._required(node),
            open=not closes and (node.get("additionalProperties") is not False or "patternProperties" in node),
            forbids=node.get("additionalProperties") is False and "patternProperties" not in node,
        )

    def _types(self, node: object, but: Sequence[str] = ()) -> set[str]:
        """Return the JSON types that instances may have; a schema that refers to itself may have any.

        `but`: keywords of `node` to leave out.
        """
        if not isinstance(node, dict):
            return set(_ANY_TYPE) if node is not False else set()
        if not but and id(node) in self._instance_types:
            return self._instance_types[id(node)]
        self._instance_types[id(node)] = set(_ANY_TYPE)
        types = _types(node)
        for part in node.get("allOf", ()):
            types &= self._types(self._target(part))
        for key in ("anyOf", "oneOf"):
            if key in node and key not in but:
                types &= set().union(*(self._types(self._target(one)) for one in node[key]))
        if "$ref" in node:
            types &= self._types(self._target({"$ref": node["$ref"]}))
        if but:
            del self._instance_types[id(node)]
        else:
            self._instance_types[id(node)] = types
        return types

    def _closes(self, node: dict[str, Any]) -> bool:
        """Return True if the grammar generates only the listed properties of its objects."""
        return (
            bool(node.get("properties"))
            and node.keys().isdisjoint(
                ("additionalProperties", "patternProperties", "minProperties", "maxProperties", "unevaluatedProperties")
            )
            and self._required(node) <= node["properties"].keys()
        )

    def _required(self, node: dict[str, Any]) -> set[str]:
        required = {name for name in node.get("required", ()) if isinstance(name, str)}
        require = self._require.get(id(node))
        return required if require is None else required | {require}

    def _is_compared(self, option: object) -> bool:
        target = self._target(option)
        return not isinstance(target, dict) or self._seen[id(target)].compared

    # --- writing

    def _write(self, node: object) -> Any:
        if not isinstance(node, dict):
            return node
        node = self._node(node)
        seen = self._seen[id(node)]
        out: dict[str, Any] = {key: node[key] for key in _AS_GIVEN if key in node} | dict(seen.limits)
        for key, value in node.items():
            if key in _MAPS:
                out[key] = {name: self._write(part) for name, part in value.items()}
            elif key in _LISTS or (key == "items" and isinstance(value, list)):
                out[key] = [self._write(part) for part in value]
            elif key in _SINGLE:
                out[key] = self._write(value)
            elif key == "$ref":
                out[key] = self._reference(value)
        self._close(node, seen, out)
        return out

    def _reference(self, reference: str) -> str:
        """A reference to the definition that is written of its target."""
        target = self._resolve(reference, "#")
        if id(target) not in self._targets:
            name = re.sub(r"[^A-Za-z0-9_.-]", "_", reference.rpartition("/")[2][:50])
            while name in self._definitions:
                name += f".{len(self._definitions)}"
            self._targets[id(target)] = f"#/$defs/{name}"
            self._definitions[name] = None
            self._waiting.append((name, target))
        return self._targets[id(target)]

    def _check_states(self, node: dict[str, Any], out: dict[str, Any]) -> None:
        """Refuse a pattern whose automaton, with those of lengths and other patterns, has too many states."""
        string: dict[str, Any] = {key: out[key] for key in ("pattern", "minLength", "maxLength") if key in out}
        others = [part for part in out.get("allOf", ()) if isinstance(part, dict) and part.keys() <= _STRING_KEYS]
        if others:
            string["allOf"] = [{key: value for key, value in part.items() if key != "type"} for part in others]
        if len(string) > 1 and "pattern" in string and has_too_many_states(string):
            keys = [key for key in ("pattern", "format") if key in node]
            what = ", ".join(f"'{key}'" for key in string if key not in ("pattern", "allOf")) or "others"
            raise _error("#", f"keyword 'pattern' with {what} needs too many states", self._origin(node), keys)

    def _close(self, node: dict[str, Any], seen: _Seen, out: dict[str, Any]) -> None:
        name = str(node.get("format"))
        if name in FORMATS:  # names that no standard has are mere notes
            whole: dict[str, Any] = {"pattern": f"^(?:{FORMATS[name]})$"}
            also = [LIMITS[name]] if name in LIMITS else []
            if "pattern" in out:
                also.append(whole)
            else:
                out |= whole
            if also:
                out["allOf"] = [*out.get("allOf", ()), *also]
        if node.get("format") not in FORMATS or "pattern" in node:
            self._check_states(node, out)
        if "oneOf" in node:
            if self._are_apart(node["oneOf"], self._types(node, ("oneOf",))):
                if "anyOf" not in node:
                    _renamed(out, "oneOf", "anyOf")
            elif not all(self._is_compared(option) for option in node["oneOf"]):
                raise _error("#", OVERLAPPING)
        require = self._require.get(id(node))
        if require is not None and require not in node.get("required", ()):
            out["required"] = [*node.get("required", ()), require]
        if require is not None and "type" not in node:
            out["type"] = "object"
        if seen.composed or not node.keys().isdisjoint((*_IN_PLACE, "$ref", "enum", "const")):
            return
        if "type" not in node:
            if "properties" in node or "additionalProperties" in node:
                out["type"] = "object"
            elif "items" in node or "prefixItems" in node:
                out["type"] = "array"
        if node.get("unevaluatedProperties") is False:
            out.setdefault("additionalProperties", False)
        if self._closes(node):
            out["additionalProperties"] = False
        if node.get("type") == "integer" and "multipleOf" not in node:
            if not {"minimum", "exclusiveMinimum"} & out.keys():
                out["minimum"] = -FAR
            if not {"maximum", "exclusiveMaximum"} & out.keys():
                out["maximum"] = FAR


_STRING_KEYS = {"type", "pattern", "minLength", "maxLength"}
_NUMBER = (int, float)
NUMERIC = (
    "const", "enum", "multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength",
    "maxLength", "minItems", "maxItems", "minProperties", "maxProperties",
)  # fmt: skip
_KINDS: Mapping[str, type | tuple[type, ...]] = {
    "properties": dict,
    "patternProperties": dict,
    "required": list,
    "allOf": list,
    "anyOf": list,
    "oneOf": list,
    "prefixItems": list,
    "enum": list,
    "pattern": str,
    "minimum": _NUMBER,
    "maximum": _NUMBER,
    "exclusiveMinimum": _NUMBER,  # bool among them
    "exclusiveMaximum": _NUMBER,
    "multipleOf": _NUMBER,
    "minLength": _NUMBER,
    "maxLength": _NUMBER,
    "minItems": _NUMBER,
    "maxItems": _NUMBER,
    "minProperties": _NUMBER,
    "maxProperties": _NUMBER,
}


def _renamed(node: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    """Rename a key where it stands; the same object."""
    items = [(new if key == old else key, value) for key, value in node.items()]
    node.clear()
    node.update(items)
    return node


def _no_schema(part: object, path: str, node: dict[str, Any] | None = None, key: str = "") -> SchemaError:
    why = f"a schema must be an object or a boolean, not {json.dumps(part)[:50]}"
    return _error(path, why, node, [key] if key else ())


def _parts(node: dict[str, Any], path: str) -> Iterator[tuple[object, str, dict[str, Any], str]]:
    """Schemas for parts of the instances, with their places, and the object and the key of it that has them."""
    for key in _MAPS:
        for name, part in node.get(key, {}).items():
            yield part, f"{path}/{key}/{name}", node[key], name
    for key in _SINGLE:
        part = node.get(key)
        if isinstance(part, list) and key == "items":
            for i, item in enumerate(part):
                yield item, f"{path}/{key}/{i}", node, key
        elif key in node:
            yield part, f"{path}/{key}", node, key
    for i, part in enumerate(node.get("prefixItems", ())):
        yield part, f"{path}/prefixItems/{i}", node, "prefixItems"


def _is_alone(node: dict[str, Any]) -> bool:
    """Return True if the schema has a single restricting keyword."""
    limits = {*_MAPS, *_SINGLE, *_IN_PLACE, "$ref", "required", "minProperties", "maxProperties", "prefixItems"}
    given = [key for key in node if key in limits]
    return len(given) == 1 and (given[0] != "allOf" or len(node["allOf"]) == 1)


def _says_nothing(key: str, node: dict[str, Any]) -> bool:
    """Return True if an unsupported keyword excludes nothing here."""
    value = node[key]
    if key == "not":
        return value is False
    if key == "if":
        return "then" not in node and "else" not in node
    if key in ("minContains", "maxContains"):
        return "contains" not in node
    if key == "contains":
        return node.get("minContains") == 0 and "maxContains" not in node
    if key == "uniqueItems":
        at_most = node.get("maxItems")
        return value is False or (isinstance(at_most, int) and at_most <= 1)
    if key in ("dependentSchemas", "dependentRequired", "dependencies"):
        return bool(value == {})
    if key == "propertyNames":
        return value is True or value in ({}, {"type": "string"})
    if key == "unevaluatedProperties":
        return value in (True, {}) or (value is False and bool(node.keys().isdisjoint((*_IN_PLACE, "$ref"))))
    if key == "unevaluatedItems":
        return value in (True, {})
    return False


def _types(node: dict[str, Any]) -> set[str]:
    """The JSON types that instances may have."""
    if "const" in node or "enum" in node:
        values = [node["const"]] if "const" in node else node["enum"]
        return {_type(value) for value in values}
    given = node.get("type")
    names = {name for name in (given if isinstance(given, list) else [given]) if isinstance(name, str)}
    if not names:  # none, or what is refused when it is written
        return set(_ANY_TYPE)
    return {"number" if name == "integer" else name for name in names}


def _type(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    return {int: "number", float: "number", str: "string", list: "array"}.get(type(value), "object")


def _tags(node: dict[str, Any]) -> dict[str, list[str]]:
    """Properties that must have one of a few values, with these as JSON."""
    out = {}
    for name, part in node.get("properties", {}).items():
        if isinstance(part, dict) and ("const" in part or isinstance(part.get("enum"), list)):
            values = [part["const"]] if "const" in part else part["enum"]
            out[name] = [value_key(value) for value in values]
    return out
