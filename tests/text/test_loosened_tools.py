"""Tools whose schemas cannot be enforced, and references in tools' schemas, in every way of writing calls."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from guided import Vocabulary, bytes_tokenizer
from test_dialects import template

from llamado.text.dialects import Conversation, PreparedChat, prepare
from llamado.text.grammar.json_schema.loosen import loosened
from llamado.text.grammar.source import GrammarError

INT, STR = {"type": "integer"}, {"type": "string"}
OBJECT = {"type": "object"}
# Schemas of parameters, and the keyword that is taken out.
UNENFORCEABLE: dict[str, tuple[dict[str, Any], str]] = {
    "uniqueItems": (
        {**OBJECT, "properties": {"a": {"type": "array", "items": INT, "uniqueItems": True}}},
        "uniqueItems",
    ),
    "not": ({**OBJECT, "properties": {"a": {"not": {"items": INT}}}}, "not"),
    "contains": ({**OBJECT, "properties": {"a": {"type": "array", "contains": INT}}}, "contains"),
    "if": ({**OBJECT, "if": {"patternProperties": {"x": INT}}, "then": {"required": ["b"]}}, "if"),
    "pattern": ({**OBJECT, "properties": {"a": {"type": "string", "pattern": "^(?=x)"}, "b": INT}}, "pattern"),
    "oneOf": ({**OBJECT, "properties": {"a": {"oneOf": [INT, {"type": "number"}]}}}, "oneOf"),
    "format": ({**OBJECT, "properties": {"a": {"type": "string", "format": "regex"}}}, "format"),
    "required true": ({**OBJECT, "properties": {"a": {"type": "string", "required": True}}}, "required"),
    "required null": ({**OBJECT, "properties": {"a": STR}, "required": None}, "required"),
    "type null": ({"type": None, "properties": {"a": STR}}, "type"),
    "type": ({**OBJECT, "properties": {"a": {"type": "text"}}}, "type"),
    "$dynamicRef": ({**OBJECT, "properties": {"a": {"$dynamicRef": "#x"}}}, "$dynamicRef"),
    "$ref": ({**OBJECT, "properties": {"a": {"$ref": "#/$defs/x"}, "b": {"$ref": "https://x.org"}}}, "$ref"),
    "multipleOf": ({**OBJECT, "properties": {"a": {"type": "integer", "multipleOf": 999983}}}, "multipleOf"),
    "minProperties": ({**OBJECT, "properties": {"a": INT, "b": INT, "c": INT}, "minProperties": 2}, "minProperties"),
    "patternProperties": ({**OBJECT, "patternProperties": {"a": INT, "b": STR}}, "patternProperties"),
    "no schema": ({**OBJECT, "properties": {"a": 5, "b": INT}}, "a"),
    "unsatisfiable": ({**OBJECT, "properties": {"a": {"enum": []}, "b": INT}, "required": ["a"]}, "a"),
    "all": ({"allOf": [{"minProperties": 2}, {"properties": {"a": INT, "b": INT}}, {"not": {"items": INT}}]}, "not"),
}
# A family of each notation: JSON, text between tags, Python, Gemma's own, and templates that know no tools.
FAMILIES = ("hermes", "coder", "lfm", "gemma", "plain")


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(bytes_tokenizer())


def ready(name: str, parameters: Any, *, strict: bool | None = None, choice: str = "auto") -> PreparedChat:
    function = {"name": "f", "description": "d", "parameters": parameters}
    tool = {"type": "function", "function": function if strict is None else {**function, "strict": strict}}
    messages = [{"role": "user", "content": "hi"}]
    return prepare(template(name), Conversation(messages=messages, tools=[tool], tool_choice=choice))


@pytest.mark.parametrize("case", UNENFORCEABLE)
def test_unenforceable_keywords_are_reported_and_only_strict_tools_fail(vocabulary: Vocabulary, case: str) -> None:
    parameters, keyword = UNENFORCEABLE[case]
    for name in FAMILIES:
        for strict in (None, False):
            prepared = ready(name, parameters, strict=strict)
            assert prepared.grammar is not None
            vocabulary.compiler.compile(prepared.grammar)
            assert any(part.startswith("f #") and keyword in part for part in prepared.loosened), prepared.loosened
            assert prepared.strict == (name == "plain")  # whose grammar is what makes calls of its answers
        with pytest.raises(GrammarError, match="the tool 'f' is strict and cannot be enforced"):
            ready(name, parameters, strict=True)


def test_the_rest_of_a_loosened_schema_is_enforced(vocabulary: Vocabulary) -> None:
    rest = {"b": INT, "c": {"type": "array", "items": STR, "uniqueItems": True, "maxItems": 2}}
    for parameters in (
        {**OBJECT, "properties": {**rest, "d": {"type": "string", "pattern": "(?=x)y"}}},
        {**OBJECT, "properties": {**rest, "d": {"not": {"items": INT}}}},
        {**OBJECT, "properties": {**rest, "d": {"$ref": "#/nowhere"}}},
    ):
        loose, parts = loosened(parameters, "g")
        assert len(parts) == 2
        constraint = vocabulary.constraint("json_schema", json.dumps(loose))
        assert vocabulary.accepts(constraint, '{"b": 1, "c": ["x", "x"], "d": "y"}')
        for bad in ('{"b": "x"}', '{"c": [1]}', '{"c": ["x", "x", "x"]}', '{"e": 1}'):
            assert not vocabulary.accepts(constraint, bad)


def test_a_schema_that_can_be_enforced_stays_the_same() -> None:
    parameters = {**OBJECT, "properties": {"a": STR}, "required": ["a"]}
    assert loosened(parameters) == (parameters, ())
    assert ready("hermes", parameters, strict=True).loosened == ()


def test_it_is_logged_once_for_each_schema(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "llamado.text")
    parameters = {**OBJECT, "properties": {"only here": {"type": "array", "uniqueItems": True}}}
    for _ in range(3):
        ready("hermes", parameters)
    (record,) = caplog.records
    assert "tool f" in record.message and "#/properties/only here: uniqueItems" in record.message


# --- references

REFERRING: dict[str, tuple[dict[str, Any], dict[str, str], dict[str, str]]] = {
    "a sibling": (
        {**OBJECT, "properties": {"start": {"type": "integer", "minimum": 5}, "end": {"$ref": "#/properties/start"}}},
        {"start": "5", "end": "6"},
        {"start": "5", "end": "4"},
    ),
    "the root": (
        {**OBJECT, "properties": {"n": INT, "next": {"$ref": "#"}}, "required": ["n"]},
        {"n": "1", "next": '{"n": 2}'},
        {"n": "1", "next": '{"m": 2}'},
    ),
    "definitions": (
        {
            **OBJECT,
            "properties": {"a": {"type": "array", "items": {"$ref": "#/$defs/x~1y"}}},
            "$defs": {"x/y": {"enum": [1, 2]}},
        },
        {"a": "[1, 2]"},
        {"a": "[3]"},
    ),
    "an anchor": (
        {**OBJECT, "properties": {"a": {"$ref": "#x"}}, "$defs": {"d": {"$anchor": "x", "type": "boolean"}}},
        {"a": "true"},
        {"a": "1"},
    ),
}


def call(name: str, arguments: dict[str, str]) -> str:
    """A call of `f` as the family's model writes it."""
    text = "{" + ", ".join(f'"{key}": {value}' for key, value in arguments.items()) + "}"
    if name == "hermes":
        return f'<tool_call>\n{{"name": "f", "arguments": {text}}}\n</tool_call>'
    if name == "plain":
        return f'{{"tool_call": {{"name": "f", "arguments": {text}}}}}'
    if name == "lfm":
        inner = ", ".join(f"{key}={value}" for key, value in arguments.items())
        return f"<|tool_call_start|>[f({inner})]<|tool_call_end|>"
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>"


@pytest.mark.parametrize("case", REFERRING)
@pytest.mark.parametrize("name", ["hermes", "coder", "lfm", "plain"])
def test_references_lead_to_the_tools_own_schema(vocabulary: Vocabulary, name: str, case: str) -> None:
    parameters, good, bad = REFERRING[case]
    prepared = ready(name, parameters, strict=True, choice="required")
    assert prepared.grammar is not None
    constraint = vocabulary.compiler.compile(prepared.grammar)
    assert vocabulary.accepts(constraint, call(name, good))
    assert not vocabulary.accepts(constraint, call(name, bad))


def test_definitions_of_two_tools_may_have_the_same_name(vocabulary: Vocabulary) -> None:
    tools = [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {**OBJECT, "properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": part}},
            },
        }
        for name, part in (("f", INT), ("g", STR))
    ]
    messages = [{"role": "user", "content": "hi"}]
    prepared = prepare(template("plain"), Conversation(messages=messages, tools=tools))
    assert prepared.grammar is not None
    constraint = vocabulary.compiler.compile(prepared.grammar)
    assert vocabulary.accepts(constraint, call("plain", {"a": "1"}))
    assert not vocabulary.accepts(constraint, call("plain", {"a": '"x"'}))
    assert vocabulary.accepts(constraint, call("plain", {"a": '"x"'}).replace('"f"', '"g"'))


# --- strings as bare text

TEXTS: dict[str, tuple[Any, list[str], list[str]]] = {
    "$ref": ({"$ref": "#/$defs/c"}, ["red"], ["blue", "redder"]),
    "allOf": ({"allOf": [{"$ref": "#/$defs/c"}], "default": "red"}, ["green"], ["blue"]),
    "oneOf": ({"oneOf": [{"const": "a", "title": "A"}, {"const": "b c"}]}, ["a", "b c"], ["c"]),
    "anyOf": ({"anyOf": [{"const": "a"}, {"$ref": "#/$defs/c"}, {"type": "null"}]}, ["a", "red", "null"], ["b"]),
    "pattern": ({"type": "string", "pattern": "^[a-z]+/[0-9]{2}$"}, ["a/12"], ["a/1", "A/12", "xa/123"]),
    "searched": ({"type": "string", "pattern": "b|^c$"}, ["abd", "c"], ["ac", "cc"]),
    "format": ({"type": "string", "format": "date"}, ["2024-02-29"], ["2024-02-30", "soon"]),
    "nullable": ({"anyOf": [{"type": "string", "format": "uuid"}, {"type": "null"}]}, ["null"], ["none"]),
    "both": ({"type": "string", "pattern": "^a", "maxLength": 3, "minLength": 2}, ["ab", "abc"], ["a", "abcd", "ba"]),
    "enum": ({"enum": ["x", 1, None]}, ["x", "1", "null"], ["2"]),
}


@pytest.mark.parametrize("case", TEXTS)
def test_bare_texts_are_held_to_their_schema(vocabulary: Vocabulary, case: str) -> None:
    schema, good, bad = TEXTS[case]
    parameters = {**OBJECT, "properties": {"a": schema}, "required": ["a"], "$defs": {"c": {"enum": ["red", "green"]}}}
    prepared = ready("coder", parameters, strict=True, choice="required")
    assert prepared.grammar is not None
    constraint = vocabulary.compiler.compile(prepared.grammar)
    for text in good:
        assert vocabulary.accepts(constraint, call("coder", {"a": text})), text
    for text in bad:
        assert not vocabulary.accepts(constraint, call("coder", {"a": text})), text
