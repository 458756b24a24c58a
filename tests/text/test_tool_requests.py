"""Malformed tools: a clear error, or a prompt and a grammar, in every family of templates."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from guided import Vocabulary, bytes_tokenizer
from test_dialects import EACH_FORMAT, NAMES, template
from tiers import chosen

from llamado.errors import LlamadoError
from llamado.text.dialects import Conversation, prepare
from llamado.text.grammar.source import GrammarError

USER = [{"role": "user", "content": "hi"}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "string", "minLength": 1, "enum": ["x"]},
                "b": {"type": "array", "items": {"type": "integer"}},
                "c": {"const": 1},
                "d": {"$ref": "#/$defs/q"},
                "e": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
            },
            "required": ["a"],
            "$defs": {"q": {"type": "object", "properties": {}}},
        },
        "strict": True,
    },
}
VALUES: list[Any] = [
    None, True, False, 0, -1, 2**64, 10**400, 1.5, float("nan"), float("inf"), "", "x", "é\ud800", [], {}, [[]], [None],
    {"a": {"b": {}}}, ["", ""], [True], {"type": True}, {"type": ["x", 1]}, {"const": float("inf")}, {"enum": 5},
    {"enum": [{}]}, {"properties": []}, {"properties": {"": True}}, {"minLength": -1, "type": "string"},
    {"type": "string", "maxLength": 10**400}, {"type": "string", "maxLength": 1e300}, {"$ref": 5}, {"$ref": "#"},
    {"$ref": "#/x"}, {"required": [1]}, {"required": [[]]}, {"required": 5}, {"items": 5}, {"anyOf": 5}, {"anyOf": []},
    {"anyOf": [5]}, {"pattern": 5}, {"type": "string", "pattern": "("}, {"additionalProperties": 5},
    {"properties": {"x": {}}, "required": [{}]},
]  # fmt: skip


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all that is in a document."""
    yield path
    for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
        yield from places(node[key], (*path, key))


def replaced(node: Any, path: tuple[Any, ...], value: Any) -> Any:
    node = copy.deepcopy(node)
    at = node
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return node


@pytest.mark.slow
@pytest.mark.parametrize("name", chosen(NAMES, EACH_FORMAT))
def test_odd_tools_are_served_or_refused(name: str) -> None:
    vocabulary = Vocabulary(bytes_tokenizer())
    chance = random.Random(name)
    paths = [path for path in places(TOOL) if len(path) > 1 and path != ("function", "name")]
    for path in paths:
        for value in VALUES if len(path) == 2 else chance.sample(VALUES, 5):
            tool = replaced(TOOL, path, value)
            choice = chance.choice(["auto", "required", "function:f"])
            try:
                prepared = prepare(template(name), Conversation(messages=USER, tools=[tool], tool_choice=choice))
                if prepared.grammar is not None and chance.random() < 0.1:
                    vocabulary.constraint(prepared.grammar.kind, prepared.grammar.text)
            except LlamadoError:
                pass


@pytest.mark.parametrize("parameters", [True, 1.5, "x", [1]])
@pytest.mark.parametrize("name", ["plain", "hermes", "coder", "lfm"])
def test_parameters_that_are_no_object_are_named(name: str, parameters: Any) -> None:
    tool = replaced(TOOL, ("function", "parameters"), parameters)
    with pytest.raises(GrammarError, match=r"parameters of the tool 'f' must be .* not .") as caught:
        prepare(template(name), Conversation(messages=USER, tools=[tool]))
    assert str(caught.value).endswith(json.dumps(parameters))


def test_lengths_beyond_all_answers_are_no_limits() -> None:
    """Schema generators write such lengths to say that there is no limit."""
    vocabulary = Vocabulary(bytes_tokenizer())
    long = {"type": "object", "properties": {"a": {"type": "string", "minLength": 1.0, "maxLength": 2**63 - 1}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": long}}
    for name in ("plain", "hermes", "coder", "lfm", "gemma"):
        request = Conversation(messages=USER, tools=[tool], tool_choice="required")
        grammar = prepare(template(name), request).grammar
        assert grammar is not None
        assert vocabulary.constraint(grammar.kind, grammar.text)


@pytest.mark.parametrize(
    ("name", "parallel", "good", "bad"),
    [
        ("gemma", None, '<|tool_call>call:f{a:<|"|>x<|"|>}<tool_call|>', "<|tool_call>call:f{}<tool_call|>"),
        ("plain", True, '{"tool_calls":[{"name":"f","arguments":{"a":"x"}}]}', '{"tool_calls":[]}'),
        ("plain", True, '{"tool_calls":[{"name":"f","arguments":{"a":"x"}}]}', '{"tool_calls":[{"name":"f"}]}'),
    ],
)
def test_a_call_has_what_it_needs(name: str, parallel: bool | None, good: str, bad: str) -> None:
    vocabulary = Vocabulary(bytes_tokenizer())
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string"}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    request = Conversation(messages=USER, tools=[tool], tool_choice="required", parallel_tool_calls=parallel)
    grammar = prepare(template(name), request).grammar
    assert grammar is not None
    constraint = vocabulary.constraint(grammar.kind, grammar.text)
    assert vocabulary.accepts(constraint, good)
    assert not vocabulary.accepts(constraint, bad)
