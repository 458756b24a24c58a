"""Schemas with a finite list of instances: each value is judged as a validator judges it."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest
from guided import Vocabulary, bytes_tokenizer

from llamado.text.grammar.json_schema.finite import FiniteSchemas
from llamado.text.grammar.json_schema.references import follow
from llamado.text.grammar.source import GrammarError

VALUES: list[Any] = [
    None, True, False, 0, 1, 2, 6, 7, 2.5, 0.3, -4, 1e308,
    "", "a", "ab", "a1", "foo", "é", "a\n", [], [1], [1, 2], [1, 1],
    [1, "x", True], [[1], [1]], [{"a": 1}, {"a": 1.0}], {}, {"a": 1}, {"b": "x"}, {"a": 1, "b": "x"},
    {"aaaa": 31, "a": 1},
    {"a": {"b": 2}}, {"c": None, "a": False},
]  # fmt: skip
INT = {"type": "integer"}

RULES: list[Any] = [
    {"not": {"type": "integer"}},
    {"not": {"type": ["number", "array"]}},
    {"not": {"multipleOf": 2}},
    {"not": {"multipleOf": 0.1}},
    {"not": {"pattern": "^a"}},
    {"not": {"pattern": "a$"}},
    {"not": {"anyOf": [{"minimum": 2}, {"exclusiveMaximum": 1}]}},
    {"not": {"anyOf": [{"exclusiveMinimum": 2}, {"maximum": 0.3}]}},
    {"not": {"minLength": 2, "maxLength": 3}},
    {"not": {"minItems": 1, "maxItems": 2}},
    {"not": {"minProperties": 1, "maxProperties": 1}},
    {"not": {"enum": [1.0, "a", [1, 2], {"b": "x"}]}},
    {"not": {"const": [True]}},
    {"not": {"items": INT}},
    {"not": {"prefixItems": [INT], "items": {"type": "string"}}},
    {"not": {"patternProperties": {"a*": INT, "aaa*": {"maximum": 20}}}},
    {"not": {"properties": {"a": INT}, "patternProperties": {"^b": True}, "additionalProperties": False}},
    {"not": {"required": ["a"], "properties": {"a": {"const": 1}}}},
    {"oneOf": [INT, {"minimum": 2}]},
    {"oneOf": [True, {"type": "string"}]},
    {"if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": {"type": "number"}},
    {"if": {"type": "string"}, "then": {"minLength": 2}},
    {"contains": {"const": 1}},
    {"contains": INT, "minContains": 2},
    {"contains": INT, "maxContains": 1},
    {"uniqueItems": True},
    {"propertyNames": {"maxLength": 1}},
    {"dependentRequired": {"a": ["b"]}},
    {"dependentSchemas": {"a": {"required": ["b"]}, "b": {"minProperties": 2}}},
    {"not": {"$ref": "#/$defs/n"}, "$defs": {"n": {"allOf": [INT, {"maximum": 2}]}}},
]  # fmt: skip


def listed(schema: Any) -> list[Any] | None:
    def resolve(reference: object) -> object:
        try:
            return follow(str(reference), schema)
        except LookupError:
            raise GrammarError("nowhere") from None

    found = FiniteSchemas(resolve).listed(schema)
    return None if found is None else found["enum"]


@pytest.mark.parametrize("rule", RULES, ids=range(len(RULES)))
def test_each_value_is_accepted_as_by_a_validator(rule: Any) -> None:
    schemas = [{"enum": [value], **rule} for value in VALUES]
    found = [listed(schema) for schema in schemas]
    decided = [i for i, values in enumerate(found) if values is not None]
    assert len(decided) >= len(VALUES) - 4
    for i in decided:
        assert (found[i] == [VALUES[i]]) == jsonschema_rs.Draft202012Validator(rule).is_valid(VALUES[i]), VALUES[i]


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ({"allOf": [{"enum": ["a", "b", "c"]}, {"not": {"pattern": "b"}}]}, ["a", "c"]),
        ({"oneOf": [{"enum": ["a", "b"]}, {"enum": ["b", "c"]}]}, ["a", "c"]),
        ({"oneOf": [{"type": "boolean"}, {"enum": [True, "auto"]}]}, [False, "auto"]),
        ({"$ref": "#/$defs/e", "not": {"const": 2}, "$defs": {"e": {"enum": [1, 2, 3]}}}, [1, 3]),
        ({"type": ["boolean", "null"], "if": {"type": "null"}, "then": False}, [True, False]),
    ],
)
def test_values_come_from_every_part(vocabulary: Vocabulary, schema: Any, values: list[Any]) -> None:
    assert listed(schema) == values
    constraint = vocabulary.constraint("json_schema", json.dumps(schema))
    tried = [None, True, False, "auto", "a", "b", "c", 1, 2, 3]
    accepted = [value for value in tried if vocabulary.accepts(constraint, json.dumps(value))]
    assert sorted(map(json.dumps, accepted)) == sorted(map(json.dumps, values))


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(bytes_tokenizer())


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": ["a"], "minLength": 1},  # llguidance has it
        {"enum": ["a"], "not": {"pattern": "(?=a)"}},
        {"enum": ["é"], "not": {"pattern": "^\\w$"}},
        {"enum": ["a"], "not": {"format": "date"}},
        {"enum": [1.0], "not": {"type": "integer"}},
        {"enum": ["a"], "not": {"type": "text"}},
        {"enum": ["a"], "not": {"$ref": "#/nowhere"}},
        {"enum": ["a"], "not": {"unevaluatedProperties": False}},
        {"enum": list(range(2000)), "not": {"multipleOf": 2}},
        {"type": "string", "not": {"const": "a"}},
        {"$ref": "#", "not": {"const": "a"}},
    ],
    ids=range(11),
)
def test_undecidable_schemas_stay_unchanged(schema: Any) -> None:
    assert listed(schema) is None


def test_a_document_has_a_limited_number_of_steps() -> None:
    nested: Any = {"enum": [1]}
    for _ in range(4):
        nested = {"anyOf": [nested] * 5}
    schemas = FiniteSchemas(lambda reference: nested)
    found = [schemas.listed({"$ref": "#/a", "not": {"const": 2}}) for _ in range(100)]
    assert found[0] == {"enum": [1]}
    assert found[-1] is None  # each takes 781 steps and more


def test_a_list_has_no_element_before_its_first() -> None:
    with pytest.raises(LookupError):
        follow("#/anyOf/-1", {"anyOf": [True]})
