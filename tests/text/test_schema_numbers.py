"""Numbers in schemas: none brings llguidance down, none is written as another."""

from __future__ import annotations

import itertools
import json
import math
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from guided import Vocabulary, bytes_tokenizer
from test_dialects import template
from tiers import first_of

from llamado.errors import LlamadoError
from llamado.text.dialects import Conversation, prepare
from llamado.text.grammar.json_schema.numbers import MOST
from llamado.text.grammar.source import GrammarError, GrammarSource

INT, NUMBER = {"type": "integer"}, {"type": "number"}

# A crash of llguidance ends the process it runs in, so it runs in another one, which says what it is at.
CHILD = """
import json, sys
from guided import Vocabulary, bytes_tokenizer
from llamado.text.grammar.source import ConstraintError, GrammarError
vocabulary = Vocabulary(bytes_tokenizer())
for line in sys.stdin:
    kind, text = json.loads(line)
    try:
        matcher = vocabulary.constraint(kind, text).start()
        for step in range(12):
            allowed = vocabulary.allowed(matcher)
            token = allowed[7 * step % len(allowed)]
            if token in vocabulary.tokenizer.eog:
                break
            matcher.accept(token)
        print("served", flush=True)
    except (GrammarError, ConstraintError) as error:
        assert len(str(error)) < 1500
        print("refused", flush=True)
"""


def in_a_child(sources: list[GrammarSource]) -> list[str]:
    """Return the outcome of grammars that another process compiles and follows for some tokens."""
    command = [sys.executable, "-c", CHILD]
    lines = "".join(json.dumps([source.kind, source.text]) + "\n" for source in sources)
    environment = {"PYTHONPATH": ":".join(path for path in [str(Path(__file__).parent), *sys.path] if path)}
    done = subprocess.run(command, input=lines, capture_output=True, text=True, env=environment, timeout=600)
    outcomes = done.stdout.split()
    if done.returncode or len(outcomes) < len(sources):
        culprit = sources[min(len(outcomes), len(sources) - 1)]
        raise AssertionError(
            f"ended with {done.returncode} at {culprit.kind} {culprit.text[:500]}: {done.stderr[-500:]}"
        )
    return outcomes


EXTREMES: list[int | float] = [0, 1, -1, 7, 0.1, -0.0, 0.5, 1.5, 123456789.123456789, 0.30000000000000004]
EXTREMES += [sign * 2**n + off for n in (32, 53, 63, 64) for off in (-1024, -1, 0, 1) for sign in (1, -1)]
EXTREMES += [sign * 10**n for n in (16, 18, 19, 400) for sign in (1, -1)]
EXTREMES += [sign * x for x in (1e18, 9.2e18, 1e308, math.inf, 1e-9, 1e-99, 1e-300) for sign in (1, -1)]
EXTREMES += [math.nan, 5e-324, True, False]

KEYS = [
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "const", "default"),
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
]


def single_schemas() -> Iterator[object]:
    """Each keyword with each number, alone and with a type."""
    for value in EXTREMES:
        yield {"enum": [1, value]}
        yield {"const": {"a": [value]}}
        yield {"$ref": "#/elsewhere/x", "elsewhere": {"x": {**INT, "maximum": value}}}
        for key in KEYS:
            for other in (INT, NUMBER):
                yield {**other, key: value}


def random_schema(chance: random.Random, depth: int = 0) -> object:
    """Several keywords with numbers at once, within one another."""

    def number() -> object:
        return (
            chance.choice(EXTREMES) if chance.random() < 0.8 else chance.uniform(-1, 1) * 10 ** chance.randint(-20, 20)
        )

    schema: dict[str, Any] = {}
    if chance.random() < 0.8:
        schema["type"] = chance.choice(["integer", "number", ["integer", "null"], "string", "array", "object"])
    for key in chance.sample(KEYS, chance.randint(0, 3)):
        schema[key] = number()
    if chance.random() < 0.2:
        schema["enum"] = [number() for _ in range(chance.randint(1, 4))]
    if depth < 2 and chance.random() < 0.5:
        parts = [random_schema(chance, depth + 1) for _ in range(chance.randint(1, 3))]
        key = chance.choice(["allOf", "anyOf", "oneOf", "prefixItems", "properties", "additionalProperties"])
        schema[key] = dict(zip("abc", parts, strict=False)) if key == "properties" else parts
        if key == "additionalProperties":
            schema[key] = parts[0]
    return schema


FAMILIES = ("plain", "hermes", "coder")
MESSAGES = [{"role": "user", "content": "hi"}]


def doors(schema: object) -> list[GrammarSource]:
    """The ways of a schema to the compiler: as such and in a chat's `response_format`."""
    sources = [GrammarSource("json_schema", json.dumps(schema))]
    for name in FAMILIES:
        grammar = prepare(template(name), Conversation(messages=MESSAGES, json_schema=schema)).grammar
        assert grammar is not None
        sources.append(grammar)
    return sources


@pytest.mark.full
def test_no_single_number_ends_the_process() -> None:
    outcomes = in_a_child([GrammarSource("json_schema", json.dumps(schema)) for schema in single_schemas()])
    assert outcomes.count("served") > 300 < outcomes.count("refused")


@pytest.mark.slow
@pytest.mark.parametrize("part", first_of(range(2)))
def test_no_mixture_of_numbers_ends_the_process(part: int) -> None:
    chance = random.Random(part)
    sources = [GrammarSource("json_schema", json.dumps(random_schema(chance))) for _ in range(1000)]
    assert in_a_child(sources).count("served") > 100


HUGE: list[dict[str, Any]] = [
    {"const": -9223372036854775808},
    {"enum": [1, -9223372036854775807]},
    {**INT, "maximum": -1e19},
    {**INT, "const": -1e308},
    {"allOf": [{"const": -9223372036854775809}, INT]},
]


@pytest.mark.slow
def test_integers_of_more_than_64_bits_reach_the_compiler_by_no_way() -> None:
    """They are refused, and taken out of the schemas of tools that are not strict."""
    wholes = [{"type": "object", "properties": {"a": schema}, "required": ["a"]} for schema in HUGE]
    sources = [source for whole in wholes for source in doors(whole)]
    assert in_a_child(sources) == ["refused"] * len(sources)
    for name, whole in itertools.product(FAMILIES, wholes):
        tool = {"type": "function", "function": {"name": "f", "parameters": whole}}
        with pytest.raises(LlamadoError, match="schema"):
            prepare(template(name), Conversation(messages=MESSAGES, tools=[tool], strict_tools={"f": None}))


@pytest.fixture(scope="module")
def bpe() -> Vocabulary:
    return Vocabulary(bytes_tokenizer())


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        # Bounds farther out than can be counted are drawn in, never widened.
        ({**INT, "minimum": -(2**63), "maximum": 2**63 - 1}, ["0", str(MOST), str(-MOST)], [str(2**63)]),
        ({**NUMBER, "minimum": -1e308, "maximum": 1e308}, ["0", "-5.5", "1234567890123456789"], ["1" + "0" * 309]),
        ({**NUMBER, "minimum": 0, "maximum": 10**30}, ["0", "1.5"], ["-1", "1" + "0" * 31]),
        ({"allOf": [{**INT, "maximum": 10**30}]}, ["0", str(MOST)], [str(10**31)]),
        # Where floats are farther apart than integers.
        ({**INT, "minimum": 2**53 + 1, "maximum": 2**53 + 4}, [str(2**53 + 2)], [str(2**53), str(2**53 + 5)]),
        ({**INT, "maximum": -(2**53) - 1}, [str(-(2**53) - 2)], [str(-(2**53) - 1 + 1)]),
        ({**INT, "exclusiveMinimum": 2**53}, [str(2**53 + 2)], [str(2**53)]),
        ({**INT, "exclusiveMaximum": 2**60}, [str(2**60 - 1000)], [str(2**60)]),
        ({**INT, "exclusiveMinimum": 2**52}, [str(2**52 + 1)], [str(2**52)]),
        # One bound far out.
        ({**INT, "minimum": 10**17}, [str(10**17), str(10**18 + 7)], ["5", str(10**17 - 1)]),
        ({**INT, "maximum": -(10**17)}, [str(-(10**17)), str(-(10**18) - 7)], ["5", str(-(10**17) + 1)]),
        ({**NUMBER, "minimum": 2e18}, ["2000000000000000000", "2000000000000000000.5"], ["5"]),
        ({**NUMBER, "exclusiveMaximum": -2e18}, ["-3000000000000000000"], ["-2000000000000000000", "5"]),
        # Fixed values are written as they are.
        ({"enum": [2**53, -(2**60), 10**18]}, [str(2**53), str(-(2**60)), str(10**18)], [str(2**53 + 1)]),
        ({"const": 0.1}, ["0.1"], ["0", "0.2"]),
        ({"const": -MOST}, [str(-MOST)], [str(-MOST + 1)]),
        # Lengths and counts.
        ({"type": "string", "minLength": 1.0, "maxLength": 2**63 - 1}, ['"a"'], ['""']),
        ({"items": INT, "maxItems": 10**400}, ["[1,2]"], ['["a"]']),
        ({**INT, "exclusiveMinimum": False, "minimum": 3}, ["3"], ["2"]),
        ({**NUMBER, "multipleOf": 0.25, "minimum": 0}, ["0.75", "2"], ["0.3"]),
    ],
)
def test_numeric_bounds_are_exact(bpe: Vocabulary, schema: object, good: list[str], bad: list[str]) -> None:
    constraint = bpe.constraint("json_schema", json.dumps(schema))
    for text in good:
        assert bpe.accepts(constraint, text), text
    for text in bad:
        assert not bpe.accepts(constraint, text), text


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"const": 2**53 + 1}, "#: the number 9007199254740993 has more digits than can be held; use a string instead"),
        ({"enum": [{"a": [1e300]}]}, "the number 1e[+]300 has more digits"),
        ({"items": {**INT, "minimum": 2**63}}, "#/items: keyword 'minimum' is not supported with 9223372036854775808"),
        (
            {**NUMBER, "exclusiveMaximum": -MOST},
            "keyword 'exclusiveMaximum' is not supported with -922337203685477478",
        ),
        ({**NUMBER, "minimum": 1e-300}, "keyword 'minimum' is not supported with 1e-300"),
        ({**NUMBER, "minimum": True}, "keyword 'minimum' is not supported with true"),
        ({"multipleOf": -1}, "keyword 'multipleOf' is not supported with -1"),
        ({"multipleOf": 0}, "keyword 'multipleOf' is not supported with 0"),
        ({"multipleOf": 1e-10}, "keyword 'multipleOf' is not supported with 1e-10"),
        ({"multipleOf": 10**400}, "keyword 'multipleOf' is not supported with 1000000000"),
        (
            {"allOf": [{"multipleOf": 1e-9}, {"multipleOf": 7}]},
            "keyword 'multipleOf' is not supported with 1E-9, 7 in con",
        ),
        ({"maxLength": -1}, "keyword 'maxLength' must be a whole number, not -1"),
        ({"minItems": 1.5}, "keyword 'minItems' must be a whole number, not 1.5"),
        ({"minItems": 2**63}, "keyword 'minItems' is not supported with 9223372036854775808: no answer is that long"),
    ],
)
def test_unenforceable_keywords_are_named(bpe: Vocabulary, schema: object, message: str) -> None:
    with pytest.raises(GrammarError, match=f"(?s)^JSON schema conversion failed:.*{message}"):
        bpe.constraint("json_schema", json.dumps(schema))


def test_numbers_that_are_no_json_are_refused_or_ignored(bpe: Vocabulary) -> None:
    for text in ('{"const": NaN}', '{"minimum": NaN}', '{"enum": [1e999]}', '{"minimum": 1e999}', '{"maxLength": NaN}'):
        with pytest.raises(GrammarError, match=r"number|not supported"):
            bpe.constraint("json_schema", text)
    assert bpe.accepts(bpe.constraint("json_schema", '{"type": "integer", "default": 1e999, "x": NaN}'), "1")


def test_references_lead_to_rewritten_schemas(bpe: Vocabulary) -> None:
    """Wherever in the document they are."""
    far = {**INT, "minimum": 0, "exclusiveMinimum": True, "maximum": 10**30}
    for path, document in itertools.chain(
        [(f"#/{key}/x", {key: {"x": far}}) for key in ("$defs", "definitions", "components")],
        [("#/$defs/a/properties/x", {"$defs": {"a": {"properties": {"x": far}}}})],
    ):
        constraint = bpe.constraint("json_schema", json.dumps({"items": {"$ref": path}, "type": "array", **document}))
        assert bpe.accepts(constraint, "[1,2]")
        assert not bpe.accepts(constraint, "[0]")
    two = {
        "properties": {"a": {"$ref": "#/x/n"}, "b": {"$ref": "#/y/n"}},
        "x": {"n": INT},
        "y": {"n": {"type": "null"}},
    }
    constraint = bpe.constraint("json_schema", json.dumps(two))
    assert bpe.accepts(constraint, '{"a":1,"b":null}')
    assert not bpe.accepts(constraint, '{"a":null}')
