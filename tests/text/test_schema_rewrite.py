"""Keywords that are written with others: all small instances are judged as a validator judges them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
from guided import Vocabulary, bytes_tokenizer

from llamado.text.grammar.json_schema.rewrite import other_than
from llamado.text.grammar.source import GrammarError

INT, STR = {"type": "integer"}, {"type": "string"}
OBJECT: dict[str, Any] = {"type": "object"}
A, B = {"required": ["a"]}, {"required": ["b"]}
AB: dict[str, Any] = {**OBJECT, "properties": {"a": True, "b": True, "c": True}, "additionalProperties": False}

EXACT: list[Any] = [
    {"not": {"type": "string"}},
    {"not": {"type": ["number", "null"]}},
    {"not": {"enum": ["x", 1, None]}},
    {"not": {"const": True}},
    {"not": {"not": {"enum": ["x", 1]}}},
    {"not": {"minimum": 2}},
    {"not": {"maxLength": 1}},
    {"not": {"minItems": 1}},
    {"type": "string", "not": {"enum": ["", "x"]}},
    {"enum": ["x", 1, 2, True], "not": {"enum": [1.0, "x"]}},
    {"not": {"anyOf": [{"type": "string"}, {"enum": [1, 2]}]}},
    {"not": {"allOf": [{"type": "number"}, {"minimum": 2}]}},
    {"not": {"$ref": "#/$defs/n"}, "$defs": {"n": {"type": "number", "description": "d"}}},
    {**AB, "not": {"required": ["a"]}},
    {**AB, "not": {"required": ["a", "b"]}},
    {**AB, "not": {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}},
    {**AB, "not": {"properties": {"a": {"const": 1}}, "required": ["a"]}},
    {**AB, "not": {"properties": {"a": {"const": 1}}}},
    {**AB, "dependencies": {"a": ["b"]}},
    {**AB, "dependencies": {"a": "b"}},
    {**AB, "dependentRequired": {"a": ["b", "c"], "c": ["a"]}},
    {**AB, "dependentSchemas": {"a": {"required": ["b"], "properties": {"b": INT}}}},
    {**AB, "dependencies": {"a": {"properties": {"b": STR}}}},
    {**AB, "dependencies": {"a": False}},
    {**AB, "if": {"properties": {"a": {"const": 1}}, "required": ["a"]}, "then": {"required": ["b"]}},
    {**AB, "if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["b"]}, "else": {"required": ["c"]}},
    {**AB, "if": {"required": ["a"]}, "else": {"properties": {"b": INT}}},
    {**AB, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {**AB, "oneOf": [{"required": ["a", "b"]}, {"required": ["c"]}]},
    {**AB, "oneOf": [A, B, {"not": {"anyOf": [A, B]}}]},
    {**OBJECT, "propertyNames": {"enum": ["a", "c"]}},
    {**OBJECT, "propertyNames": {"pattern": "^[ab]$"}},
    {**OBJECT, "propertyNames": {"maxLength": 1}, "additionalProperties": INT},
    {**AB, "propertyNames": {"pattern": "a|c"}},
    {**OBJECT, "propertyNames": {"not": {"enum": ["a"]}}},
    {**OBJECT, "propertyNames": {"$ref": "#/$defs/n"}, "$defs": {"n": {"type": "string", "const": "b"}}},
    {"anyOf": [{"type": "array", "items": {"$recursiveRef": "#"}}, INT]},
    {"anyOf": [{"type": "array", "items": {"$dynamicRef": "#"}}, INT]},
]  # fmt: skip


def instances() -> Iterator[Any]:
    """Small values of every type, and objects of up to three properties."""
    yield from (None, True, False, 0, 1, 2, 3.5, -1, "", "x", "xy", "y", [], [1], ["x"], [[1]])
    for values in itertools.product((None, 1, "x"), repeat=3):
        yield {name: value for name, value in zip("abc", values, strict=True) if value is not None}
    yield {"d": 1}
    yield {"dd": 1}


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(bytes_tokenizer())


@pytest.mark.parametrize("schema", EXACT, ids=range(len(EXACT)))
def test_rewritten_keywords_are_exact(vocabulary: Vocabulary, schema: Any) -> None:
    constraint = vocabulary.constraint("json_schema", json.dumps(schema))
    legacy = {"dependencies", "$recursiveRef"} & set(json.dumps(schema).split('"'))
    check = (jsonschema_rs.Draft201909Validator if legacy else jsonschema_rs.Draft202012Validator)(_modern(schema))
    for instance in instances():
        assert vocabulary.accepts(constraint, json.dumps(instance)) == check.is_valid(instance), instance


def _modern(schema: Any) -> Any:
    """`dependencies` in the words of later drafts, for a validator of these."""
    if "dependencies" not in schema:
        return schema
    out = {key: value for key, value in schema.items() if key != "dependencies"}
    for name, wanted in schema["dependencies"].items():
        kind = "dependentSchemas" if isinstance(wanted, (dict, bool)) else "dependentRequired"
        out.setdefault(kind, {})[name] = [wanted] if isinstance(wanted, str) else wanted
    return out


# Alternatives that overlap, if not as they are closed then as they are given.
OVERLAPPING: list[Any] = [
    {
        "oneOf": [
            {**OBJECT, "required": ["a"], "properties": {"b": INT}},
            {**OBJECT, "required": ["c"], "properties": {"c": INT}},
        ]
    },
    {"oneOf": [{**OBJECT, "properties": {"a": INT}}, {**OBJECT, "properties": {"b": INT}}]},
    {"oneOf": [STR, {"properties": {"a": INT}}]},
    {"oneOf": [{**OBJECT, "properties": {"a": {"properties": {"x": INT}}}, "required": ["a"]},
               {**OBJECT, "properties": {"a": {"properties": {"y": INT}}}, "required": ["a"]}]},
    {"oneOf": [{"required": ["a"]}, {"required": ["a", "b"]}]},
    {"oneOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}],
     "$defs": {"x": {**OBJECT, "properties": {"a": INT}}, "y": {"properties": {"c": INT}, "required": ["c"]}}},
    {"oneOf": [{"type": "number"}, INT]},
]  # fmt: skip


@pytest.mark.parametrize("schema", OVERLAPPING, ids=range(len(OVERLAPPING)))
def test_overlapping_alternatives_are_rejected_or_separated(vocabulary: Vocabulary, schema: Any) -> None:
    try:
        constraint = vocabulary.constraint("json_schema", json.dumps(schema))
    except GrammarError as error:
        assert "oneOf" in str(error)
        return
    check = jsonschema_rs.Draft202012Validator(schema)
    for instance in instances():
        assert not vocabulary.accepts(constraint, json.dumps(instance)) or check.is_valid(instance), instance


APART: list[Any] = [
    {"oneOf": [{**OBJECT, "properties": {"a": {"const": 1}}}, {**OBJECT, "properties": {"a": {"const": "x"}}}]},
    {"oneOf": [{**OBJECT, "properties": {"a": INT}, "required": ["a"], "additionalProperties": False},
               {**OBJECT, "properties": {"b": INT}, "required": ["b"], "additionalProperties": False}]},
    {"oneOf": [{**OBJECT, "properties": {"a": INT}, **A}, {**OBJECT, "properties": {"b": INT}, **B}]},
    {"oneOf": [{**OBJECT, "properties": {"a": INT}, **A}, {**OBJECT, "properties": {"a": STR}, **A}]},
    {"oneOf": [{**OBJECT, "properties": {"a": INT}}, {"type": "array"}, {"type": "null"}]},
    {"oneOf": [{"enum": [1, "x"]}, {"const": 2}]},
    {**OBJECT, "oneOf": [{"properties": {"a": {"const": 1}}}, {"properties": {"a": {"const": "x"}}}]},
    {"oneOf": [{"anyOf": [STR, {"type": "array"}]}, {"$ref": "#/$defs/b"}],
     "$defs": {"b": {"allOf": [{"type": "boolean"}]}}},
]  # fmt: skip


@pytest.mark.parametrize("schema", APART, ids=range(len(APART)))
def test_disjoint_alternatives_are_accepted(vocabulary: Vocabulary, schema: Any) -> None:
    constraint = vocabulary.constraint("json_schema", json.dumps(schema))
    check = jsonschema_rs.Draft202012Validator(schema)
    accepted = [one for one in instances() if vocabulary.accepts(constraint, json.dumps(one))]
    assert len(accepted) >= 2 and all(map(check.is_valid, accepted))


@pytest.mark.slow
def test_texts_other_than_some(vocabulary: Vocabulary) -> None:
    texts = ["", "a", "ab", "a/b]", "é", "abc", "ac"]
    for n in range(1, 4):
        for excluded in itertools.combinations(texts, n):
            constraint = vocabulary.constraint("regex", other_than(excluded))
            assert [text for text in texts if not vocabulary.accepts(constraint, text)] == list(excluded)
