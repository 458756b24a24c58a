"""Schemas with a finite list of instances: the values are listed, and the other keywords are checked on each.

`{"enum": ["a", "b", "c"], "not": {"pattern": "b"}}` is `{"enum": ["a", "c"]}`, so keywords that llguidance lacks are
exact here. A keyword whose meaning depends on the draft or on the dialect of regular expressions leaves a schema as it
is.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

from llamado.patterns import LinearPattern, PatternError
from llamado.text.grammar.json_schema.formats import FORMATS, NOT_REGULAR
from llamado.text.grammar.source import GrammarError

Resolve = Callable[[object], object]
"""The schema that a reference leads to. Raises GrammarError."""
Node = dict[str, Any]

# Keywords that llguidance does not have, or only in part.
_HARD = frozenset(
    (
        "oneOf", "not", "if", "contains", "minContains", "maxContains", "propertyNames", "dependentSchemas",
        "dependentRequired", "dependencies", "uniqueItems", "patternProperties",
    )
)  # fmt: skip
_IN_PLACE = ("allOf", "anyOf", "oneOf")
_MAX_DEPTH = 20
_MAX_VALUES = 1_000
_MAX_STEPS = 50_000  # for a document: schemas looked at, and checks of one value against one schema
# In a pattern: what dialects read in different ways.
_DIALECT = re.compile(r"\(\?(?!:)|\\(?![bdDfnrsStvwW])[A-Za-z0-9]|\[\[|\[:|\[\^?\]|\{,|&&|--|~~|\|\||[^ -~]")
_FORMATS = FORMATS.keys() | NOT_REGULAR


class UndecidedError(Exception):
    """A value may or may not fit."""


class FiniteSchemas:
    """The finite schemas of a document."""

    def __init__(self, resolve: Resolve) -> None:
        self._resolve = resolve
        self._left = _MAX_STEPS
        self._depth = 0

    def listed(self, node: Node) -> Node | None:
        """The same instances as a list; None if the schema needs no list, has none, or cannot be decided."""
        try:
            values = self._values(node, 0)
            if values is None or not self._is_hard(node, 0):
                return None
            return {"enum": [value for value in values if self._fits(node, value)]}
        except (UndecidedError, GrammarError):  # the latter of references, which are looked at again
            return None
        finally:
            self._depth = 0

    def _step(self, depth: int) -> None:
        self._left -= 1
        if self._left < 0 or depth > _MAX_DEPTH:
            raise UndecidedError

    def _is_hard(self, node: object, depth: int) -> bool:
        """Return True if a keyword that llguidance lacks holds for the same instances."""
        self._step(depth)
        if not isinstance(node, dict):
            return False
        return not _HARD.isdisjoint(node) or any(self._is_hard(part, depth + 1) for part in self._in_place(node))

    def _in_place(self, node: Node) -> Iterator[object]:
        for key in _IN_PLACE:
            if isinstance(node.get(key), list):
                yield from node[key]
        if "$ref" in node:
            yield self._resolve(node["$ref"])

    def _values(self, node: object, depth: int) -> list[Any] | None:
        """Values that include all instances; None if there are more than can be listed."""
        self._step(depth)
        if not isinstance(node, dict):
            return [] if node is False else None
        if "const" in node:
            return [node["const"]]
        if isinstance(node.get("enum"), list):
            return _distinct(node["enum"])
        names = node["type"] if isinstance(node.get("type"), list) else [node.get("type")]
        if all(name in ("null", "boolean") for name in names):
            return [value for name in names for value in ((None,) if name == "null" else (True, False))]
        for part in node["allOf"] if isinstance(node.get("allOf"), list) else ():
            found = self._values(part, depth + 1)
            if found is not None:
                return found
        for key in ("anyOf", "oneOf"):
            if isinstance(node.get(key), list):
                values: list[Any] = []
                for part in node[key]:
                    found = self._values(part, depth + 1)
                    if found is None:
                        break
                    values += found
                    if len(values) > _MAX_VALUES:
                        raise UndecidedError
                else:
                    return _distinct(values)
        return self._values(self._resolve(node["$ref"]), depth + 1) if "$ref" in node else None

    def _fits(self, schema: object, value: Any) -> bool:
        """Return True if a value is an instance of a schema."""
        if isinstance(schema, bool):
            return schema
        self._depth += 1
        self._step(self._depth)
        if not isinstance(schema, dict):
            raise UndecidedError
        fits = all(_CHECKS[key](self, schema[key], value, schema) for key in schema if key in _CHECKS)
        self._depth -= 1
        return fits

    def _each(self, schemas: object, value: Any) -> list[bool]:
        if not isinstance(schemas, list) or not schemas:
            raise UndecidedError
        return [self._fits(schema, value) for schema in schemas]

    # --- for any value

    def _type(self, names: Any, value: Any, schema: Node) -> bool:
        given = names if isinstance(names, list) else [names]
        if not all(name in _TYPES for name in given):
            raise UndecidedError
        if "integer" in given and "number" not in given and isinstance(value, float) and value.is_integer():
            raise UndecidedError  # drafts differ
        return any(_TYPES[name](value) for name in given)

    def _enum(self, values: Any, value: Any, schema: Node) -> bool:
        if not isinstance(values, list):
            raise UndecidedError
        return value_key(value) in map(value_key, values)

    def _const(self, wanted: Any, value: Any, schema: Node) -> bool:
        return value_key(value) == value_key(wanted)

    def _all_of(self, schemas: Any, value: Any, schema: Node) -> bool:
        return all(self._each(schemas, value))

    def _any_of(self, schemas: Any, value: Any, schema: Node) -> bool:
        return any(self._each(schemas, value))

    def _one_of(self, schemas: Any, value: Any, schema: Node) -> bool:
        return sum(self._each(schemas, value)) == 1

    def _not(self, other: Any, value: Any, schema: Node) -> bool:
        return not self._fits(other, value)

    def _if(self, condition: Any, value: Any, schema: Node) -> bool:
        return self._fits(schema.get("then" if self._fits(condition, value) else "else", True), value)

    def _ref(self, reference: Any, value: Any, schema: Node) -> bool:
        return self._fits(self._resolve(reference), value)

    def _undecided(self, argument: Any, value: Any, schema: Node) -> bool:
        raise UndecidedError

    # --- numbers and texts

    def _multiple_of(self, step: Any, value: Any, schema: Node) -> bool:
        unit = _number(step)
        if unit <= 0:
            raise UndecidedError
        return not _TYPES["number"](value) or _number(value) % unit == 0

    def _pattern(self, pattern: Any, value: Any, schema: Node) -> bool:
        search = searcher(pattern)
        return not isinstance(value, str) or search(value)

    def _format(self, name: Any, value: Any, schema: Node) -> bool:
        if isinstance(value, str) and name in _FORMATS:
            raise UndecidedError
        return True

    # --- arrays

    def _items(self, rule: Any, value: Any, schema: Node) -> bool:
        if not isinstance(value, list):
            return True
        if isinstance(rule, list):
            return self._prefix_items(rule, value, schema)
        first = len(schema.get("prefixItems", ()))
        return all(self._fits(rule, item) for item in value[first:])

    def _prefix_items(self, rules: Any, value: Any, schema: Node) -> bool:
        if not isinstance(rules, list):
            raise UndecidedError
        return not isinstance(value, list) or all(
            self._fits(rule, item) for rule, item in zip(rules, value, strict=False)
        )

    def _additional_items(self, rule: Any, value: Any, schema: Node) -> bool:
        first = schema.get("items")
        if not isinstance(value, list) or not isinstance(first, list):
            return True
        return all(self._fits(rule, item) for item in value[len(first) :])

    def _contains(self, rule: Any, value: Any, schema: Node) -> bool:
        if not isinstance(value, list):
            return True
        least, most = _number(schema.get("minContains", 1)), schema.get("maxContains")
        count = sum(self._fits(rule, item) for item in value)
        return count >= least and (most is None or count <= _number(most))

    def _unique_items(self, wanted: Any, value: Any, schema: Node) -> bool:
        return wanted is False or not isinstance(value, list) or len(set(map(value_key, value))) == len(value)

    # --- objects

    def _properties(self, rules: Any, value: Any, schema: Node) -> bool:
        if not isinstance(rules, dict):
            raise UndecidedError
        return not isinstance(value, dict) or all(
            self._fits(rule, value[name]) for name, rule in rules.items() if name in value
        )

    def _pattern_properties(self, rules: Any, value: Any, schema: Node) -> bool:
        if not isinstance(rules, dict):
            raise UndecidedError
        if not isinstance(value, dict):
            return True
        searches = [(searcher(pattern), rule) for pattern, rule in rules.items()]
        return all(self._fits(rule, part) for name, part in value.items() for search, rule in searches if search(name))

    def _additional_properties(self, rule: Any, value: Any, schema: Node) -> bool:
        if not isinstance(value, dict):
            return True
        searches = [searcher(pattern) for pattern in schema.get("patternProperties", ())]
        listed = schema.get("properties", ())
        return all(
            self._fits(rule, part)
            for name, part in value.items()
            if name not in listed and not any(search(name) for search in searches)
        )

    def _required(self, names: Any, value: Any, schema: Node) -> bool:
        if not isinstance(names, list):
            raise UndecidedError
        return not isinstance(value, dict) or all(name in value for name in names)

    def _property_names(self, rule: Any, value: Any, schema: Node) -> bool:
        return not isinstance(value, dict) or all(self._fits(rule, name) for name in value)

    def _dependencies(self, rules: Any, value: Any, schema: Node) -> bool:
        if not isinstance(rules, dict):
            raise UndecidedError
        if not isinstance(value, dict):
            return True
        wanted = [rule for name, rule in rules.items() if name in value]
        return all(
            self._required(rule, value, schema) if isinstance(rule, list) else self._fits(rule, value)
            for rule in wanted
        )


_Check = Callable[[FiniteSchemas, Any, Any, Node], bool]


def _compared(kind: str, size: Callable[[Any], Any], fits: Callable[[Fraction, Fraction], bool]) -> _Check:
    """The check of a bound of numbers, lengths or counts."""

    def check(checker: FiniteSchemas, bound: Any, value: Any, schema: Node) -> bool:
        limit = _number(bound)
        return not _TYPES[kind](value) or fits(_number(size(value)), limit)

    return check


def _number(value: Any) -> Fraction:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UndecidedError
    try:
        return Fraction(value if isinstance(value, int) else repr(value))  # a float as it is written
    except ValueError:  # infinite
        raise UndecidedError from None


def searcher(pattern: object) -> Callable[[str], bool]:
    """The test of a pattern that all dialects of regular expressions read alike. Raises UndecidedError, as the test."""
    if not isinstance(pattern, str) or _DIALECT.search(pattern):
        raise UndecidedError
    try:
        compiled = LinearPattern(pattern)
    except PatternError:
        raise UndecidedError from None

    def search(text: str) -> bool:
        if not (text.isascii() and text.isprintable()):
            raise UndecidedError
        return compiled.matches(text.encode())

    return search


def value_key(value: object) -> str:
    """A value as JSON, equal numbers equal."""
    return json.dumps(_normal(value), sort_keys=True)


def _normal(value: object) -> object:
    if isinstance(value, dict):
        return {name: _normal(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_normal(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _distinct(values: list[Any]) -> list[Any]:
    if len(values) > _MAX_VALUES:
        raise UndecidedError
    return list({value_key(value): value for value in reversed(values)}.values())[::-1]


_TYPES: Mapping[object, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}

_CHECKS: Mapping[str, _Check] = {
    "type": FiniteSchemas._type,
    "enum": FiniteSchemas._enum,
    "const": FiniteSchemas._const,
    "allOf": FiniteSchemas._all_of,
    "anyOf": FiniteSchemas._any_of,
    "oneOf": FiniteSchemas._one_of,
    "not": FiniteSchemas._not,
    "if": FiniteSchemas._if,
    "$ref": FiniteSchemas._ref,
    "minimum": _compared("number", lambda value: value, operator.ge),
    "maximum": _compared("number", lambda value: value, operator.le),
    "exclusiveMinimum": _compared("number", lambda value: value, operator.gt),
    "exclusiveMaximum": _compared("number", lambda value: value, operator.lt),
    "multipleOf": FiniteSchemas._multiple_of,
    "minLength": _compared("string", len, operator.ge),
    "maxLength": _compared("string", len, operator.le),
    "pattern": FiniteSchemas._pattern,
    "format": FiniteSchemas._format,
    "minItems": _compared("array", len, operator.ge),
    "maxItems": _compared("array", len, operator.le),
    "items": FiniteSchemas._items,
    "prefixItems": FiniteSchemas._prefix_items,
    "additionalItems": FiniteSchemas._additional_items,
    "contains": FiniteSchemas._contains,
    "uniqueItems": FiniteSchemas._unique_items,
    "minProperties": _compared("object", len, operator.ge),
    "maxProperties": _compared("object", len, operator.le),
    "properties": FiniteSchemas._properties,
    "patternProperties": FiniteSchemas._pattern_properties,
    "additionalProperties": FiniteSchemas._additional_properties,
    "required": FiniteSchemas._required,
    "propertyNames": FiniteSchemas._property_names,
    "dependencies": FiniteSchemas._dependencies,
    "dependentRequired": FiniteSchemas._dependencies,
    "dependentSchemas": FiniteSchemas._dependencies,
    "unevaluatedProperties": FiniteSchemas._undecided,
    "unevaluatedItems": FiniteSchemas._undecided,
    "$dynamicRef": FiniteSchemas._undecided,
    "$recursiveRef": FiniteSchemas._undecided,
}
