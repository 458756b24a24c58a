from __future__ import annotations

import json
import random
import re
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from guided import Vocabulary, bytes_tokenizer, pieces_tokenizer
from tiers import chosen, first_of

from llamado.text.grammar import compiler
from llamado.text.grammar.json_schema.formats import FORMATS
from llamado.text.grammar.json_schema.schema import check_schema
from llamado.text.grammar.source import ConstraintError, GrammarError

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from schemas import cases


@pytest.fixture(scope="module")
def bpe() -> Vocabulary:
    return Vocabulary(bytes_tokenizer())


@pytest.fixture(scope="module")
def spm() -> Vocabulary:
    return Vocabulary(pieces_tokenizer())


def validator(schema: object) -> Any:
    return jsonschema_rs.Draft202012Validator(schema, validate_formats=True)


INT, STR = {"type": "integer"}, {"type": "string"}

LANGUAGES: list[tuple[object, list[str], list[str]]] = [
    (True, ["1", '{"a":[null]}'], ["", "x"]),
    ({}, ["1", '"x"', "[]", '{"a": [true, null]}'], ["{a:1}", "01", "'x'"]),
    ({"type": "object"}, ["{}", '{"a":1}'], ["[]"]),
    # Property order, white space, nothing beside the properties that are listed.
    (
        {"properties": {"a": INT, "b": STR}, "required": ["a"]},
        ['{"a":1}', '{"a": 1, "b": "x"}', '{\n  "a": 1,\n  "b": ""\n}'],
        ['{"b":"","a":1}', "{}", '{"a":1,"c":2}', '{  "a":1}', ' {"a":1}', '{"a":1} ', "1"],
    ),
    ({"properties": {"a": INT}, "additionalProperties": True}, ['{"a":1,"c":2}', '{"c":"x"}'], ['{"a":"x"}']),
    ({"type": "object", "additionalProperties": INT}, ['{"x":1}'], ['{"x":"1"}']),
    ({"type": "object", "required": ["z"]}, ['{"z":1}'], ["{}"]),
    ({"items": INT, "minItems": 1, "maxItems": 2}, ["[1]", "[1, 2]"], ["[]", "[1,2,3]", '["a"]', "1"]),
    ({"type": "array", "items": [INT], "additionalItems": False}, ["[1]", "[]"], ["[1,2]"]),
    ({"type": "array", "prefixItems": [INT, STR], "minItems": 2}, ['[1,"a"]', '[1,"a",null]'], ["[1]", '["a",1]']),
    ({"type": "integer"}, ["0", "-12", "9999999999999999"], ["1.5", "01", "-", "99999999999999999"]),
    ({"type": "integer", "minimum": 0, "exclusiveMinimum": True, "maximum": 12}, ["1", "12"], ["0", "13", "-1"]),
    ({"type": "integer", "minimum": -(10**30), "maximum": 10}, ["-5", "10"], ["11"]),
    ({"type": "integer", "multipleOf": 7, "maximum": 100}, ["14", "-7"], ["15"]),
    ({"type": "number", "minimum": 0.5, "maximum": 1.25}, ["0.5", "1", "1.25"], ["0.4", "1.26", "2"]),
    ({"type": "number", "exclusiveMinimum": 0}, ["0.1", "3"], ["0", "-1", "0.0"]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ['"ab"', '"é€😀"', '"\\n\\n"'], ['"a"', '"abcd"']),
    ({"type": "string", "pattern": "^a+b?$", "maxLength": 3}, ['"aab"', '"aaa"'], ['"b"', '"aaab"']),
    ({"type": "string", "pattern": "b"}, ['"abc"'], ['"ac"']),
    ({"type": "string", "format": "date"}, ['"2024-02-29"', '"1999-12-31"'], ['"2024-13-01"', '"2024-1-1"']),
    ({"type": "string", "format": "uuid"}, ['"123e4567-e89b-12d3-a456-426614174000"'], ['"123e4567"']),
    ({"type": "string", "format": "date-time"}, ['"2024-02-29T10:00:00Z"'], ['"2024-02-29"']),
    ({"type": "string", "format": "json-string"}, ['"anything"'], ["1"]),
    ({"type": ["string", "null"]}, ['"x"', "null"], ["1"]),
    ({"enum": [1, "a", None, {"b": [2]}]}, ["1", '"a"', "null", '{"b": [2]}'], ["2", '{"b":[3]}']),
    ({"const": {"a": 1}}, ['{"a":1}'], ["{}"]),
    ({"anyOf": [INT, {"type": "string", "maxLength": 1}]}, ["12", '"a"'], ['"ab"', "true"]),
    ({"oneOf": [INT, STR]}, ["12", '"a"'], ["null"]),
    ({"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 3}]}, ['"ab"'], ['"a"', '"abcd"']),
    (
        {"allOf": [{"$ref": "#/$defs/A"}, {"properties": {"b": STR}}], "$defs": {"A": {"properties": {"a": INT}}}},
        ['{"a":1,"b":""}', '{"b":""}'],
        ['{"a":""}', '{"b":1}'],
    ),
    (
        {"$ref": "#/$defs/n", "$defs": {"n": {"properties": {"n": {"$ref": "#/$defs/n"}}}}},
        ["{}", '{"n":{"n":{}}}'],
        ['{"n":1}'],
    ),
    ({"$ref": "#x", "$defs": {"a": {"$anchor": "x", **INT}}}, ["1"], ['"a"']),
    ({"$ref": "#/$defs/a~1b%20c", "$defs": {"a/b c": INT}}, ["1"], ['"a"']),
    ({"anyOf": [{"type": "array", "items": {"$ref": "#"}}, INT]}, ["1", "[[1],2]"], ['["a"]']),
    ({"type": "object", "properties": {"a": INT, "b": INT}, "unevaluatedProperties": False}, ['{"b":1}'], ['{"c":1}']),
    # A tag with a default, as pydantic writes it, must be there for the alternatives to exclude one another.
    (
        {
            "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
            "$defs": {
                "Cat": {"properties": {"kind": {"const": "cat", "default": "cat"}, "lives": INT}, "type": "object"},
                "Dog": {"properties": {"kind": {"const": "dog", "default": "dog"}, "name": STR}, "type": "object"},
            },
        },
        ['{"kind":"cat","lives":9}', '{"kind":"dog"}'],
        ["{}", '{"kind":"cow"}', '{"kind":"dog","lives":9}'],
    ),
    # Keywords that rule nothing out here.
    ({"type": "array", "uniqueItems": False, "if": {}, "minContains": 3, "dependentRequired": {}}, ["[1,1]"], ["1"]),
    ({"type": "object", "propertyNames": {"type": "string"}, "title": "t", "$comment": "c"}, ["{}"], ["1"]),
]


@pytest.mark.parametrize(("schema", "good", "bad"), LANGUAGES)
def test_language(bpe: Vocabulary, spm: Vocabulary, schema: object, good: list[str], bad: list[str]) -> None:
    for vocabulary in (bpe, spm):
        compiler = vocabulary.constraint("json_schema", json.dumps(schema))
        for text in good:
            assert vocabulary.accepts(compiler, text), text
        for text in bad:
            assert not vocabulary.accepts(compiler, text), text


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"not": {"items": INT}}, "#: keyword 'not' is not supported"),
        (
            {"properties": {"a": {"items": {"not": {"multipleOf": 2}}}}},
            "#/properties/a/items: keyword 'not' is not supported",
        ),
        ({"if": {"items": INT}, "then": {"maxItems": 2}}, "keyword 'if' is not supported"),
        ({"contains": {}, "maxContains": 2}, "keyword '(maxContains|contains)' is not supported"),
        ({"type": "array", "uniqueItems": True}, "keyword 'uniqueItems' is not supported"),
        ({"propertyNames": {"format": "uri"}}, "keyword 'propertyNames' is not supported"),
        ({"allOf": [{"properties": {"a": INT}}], "unevaluatedProperties": False}, "keyword 'unevaluatedProperties'"),
        ({"$dynamicRef": "#a"}, r"cannot resolve \$ref #a"),
        ({"anyOf": [{"$ref": "https://example.org/x"}]}, r"#/anyOf/0: keyword '\$ref' is not supported for other doc"),
        ({"$ref": "#/$defs/x"}, r"cannot resolve \$ref #/\$defs/x, \$defs not found"),
        ({"$ref": "#"}, r"keyword '\$ref' leads back"),
        ({"allOf": [{"$ref": "#"}]}, r"keyword '\$ref' leads back|leads back to the same"),
        ({"oneOf": [INT, {"type": "number"}]}, "keyword 'oneOf' is not supported where more than one"),
        ({"type": "string", "format": "regex"}, "keyword 'format' is not supported with 'regex'"),
        ({"type": "string", "pattern": "(?=a)"}, "look-around"),
        ({"type": "string", "pattern": "("}, "regex parse error"),
        ({"type": "foo"}, "#: unrecognized type foo"),
        ({"properties": 5}, "keyword 'properties' cannot be 5"),
        ({"minLength": "x"}, "keyword 'minLength' cannot be"),
        ({"type": "integer", "multipleOf": 999983}, "keyword 'multipleOf' is not supported with 999983"),
        ({"allOf": [{"type": "integer", "multipleOf": 997}, {"multipleOf": 991}]}, "keyword 'multipleOf'"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable"),
        ({"type": "object", "properties": {"a": INT, "b": INT}, "minProperties": 1}, "min/maxProperties"),
        (False, "Unsatisfiable"),
        ({"enum": []}, "Unsatisfiable"),
        (5, "#: a schema must be an object or a boolean, not 5"),
        ({"items": "x"}, "#/items: a schema must be"),
    ],
)
def test_refusals_name_keyword_and_place(bpe: Vocabulary, schema: object, message: str) -> None:
    with pytest.raises(GrammarError, match=r"(?s)^JSON schema conversion failed:\nJSON schema error at #.*") as caught:
        bpe.constraint("json_schema", json.dumps(schema))
    assert re.search(message, str(caught.value)), str(caught.value)


WORDS = r"^$|(^(?:\S+\s+){0,99}\S+$)"


@pytest.mark.parametrize(
    "string",
    [
        {"pattern": WORDS, "minLength": 1, "maxLength": 5000},
        {"pattern": WORDS, "allOf": [{"maxLength": 5000}]},
    ],
)
def test_patterns_that_would_break_off_an_answer_are_refused(bpe: Vocabulary, string: dict[str, Any]) -> None:
    with pytest.raises(GrammarError, match=r"keyword 'pattern' with .* needs too many states"):
        bpe.constraint("json_schema", json.dumps({"properties": {"a": {"type": "string", **string}}}))


def test_patterns_with_lengths_that_are_no_burden_are_followed(bpe: Vocabulary) -> None:
    for string in (
        {"pattern": WORDS},
        {"pattern": r"^(?:\S+\s+){0,29}\S+$", "maxLength": 300},
        {"pattern": "^[ -~]*$"},
    ):
        constraint = bpe.constraint("json_schema", json.dumps({"type": "string", **string, "minLength": 1}))
        assert bpe.accepts(constraint, json.dumps("Ability to work with a team"))


def test_not_json(bpe: Vocabulary) -> None:
    for text in ("", "{", "nope", "[" * 100_000):
        with pytest.raises(GrammarError, match="is not JSON"):
            bpe.constraint("json_schema", text)


def test_the_schemas_of_the_benchmark_are_many_and_fixed() -> None:
    all_cases = cases()
    assert len(all_cases) == 200 == len({case.name for case in all_cases})
    assert len({json.dumps(case.schema) for case in all_cases}) > 190
    assert all_cases == cases()


@pytest.mark.slow
@pytest.mark.parametrize("part", first_of(range(4), 2))
def test_random_answers_are_valid(bpe: Vocabulary, spm: Vocabulary, part: int) -> None:
    """Whatever is sampled: an answer that ends by itself parses and is an instance."""
    ended = 0
    for case in cases()[part::4]:
        vocabulary = spm if part % 2 else bpe
        compiler = vocabulary.constraint("json_schema", json.dumps(case.schema))
        check = validator(case.schema)
        text = vocabulary.walk(compiler, random.Random(case.name), most=180)
        if text is not None:
            ended += 1
            value = json.loads(text)
            assert check.is_valid(value), (case, text)
    assert ended > 20


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_never_wider_than_a_validator_allows(bpe: Vocabulary, name: str) -> None:
    schema = {"type": "string", "format": name}
    compiler = bpe.constraint("json_schema", json.dumps(schema))
    check = validator(schema)
    for seed in range(10):
        text = bpe.walk(compiler, random.Random(seed))
        assert text is None or check.is_valid(json.loads(text)), text


# Values as they occur, and texts that are none, by format.
VALUES: dict[str, tuple[list[str], list[str]]] = {
    "date": (["2024-02-29", "2000-02-29", "9999-12-31", "0001-01-01"], ["2023-02-29", "2024-1-1", "1900-02-29"]),
    "time": (["10:00:00Z", "23:59:59.123+02:00"], ["24:00:00Z", "10:00:00"]),
    "date-time": (["2024-02-29T10:00:00Z", "2024-06-01T00:00:00.5-05:30"], ["2024-02-29", "2024-02-29 10:00:00Z"]),
    "duration": (["P1D", "PT5M", "P1Y2M3DT4H5M6S", "P2W", "PT86400S", "P10000D"], ["P", "P1H", "PT", "P1.5D"]),
    "email": (
        [
            "joe.doe+x@mail.example.com",
            "a@b.org",
            "root@localhost",
            "o'hara@example.com",
            "reply+AAAAB3LNXYYZ5WQ6ZZZZZZZZZZZZZZZEVBNHHB4XYXY@reply.github.com",
            "first.second.third.fourth@x.example",
            "post@xn--mnchen-3ya.de",
            "admin@photography",
            "user@a.b.c.d.e.example.co.uk",
            "x@[192.168.0.1]",
            "x" * 64 + "@example.org",
        ],
        ["a", "@b.org", "a@", "a..b@c.org", ".a@c.org", "a b@c.org", "a@-c.org", "x" * 65 + "@example.org"],
    ),
    "hostname": (
        [
            "example.com",
            "my-host",
            "a1.b2.example",
            "xn--mnchen-3ya.de",
            "www.xn--p1ai",
            "3com.com",
            "ip-10-0-0-1.eu-west-1.compute.internal",
            "a-b-c-d-e-f.example",
            "x" * 63 + ".org",
            "deeply.nested.name.in.a.cluster.local",
        ],
        ["", "-a", "a-", "a..b", "a_b.org", "ab--c.org", "x y", "x" * 64 + ".org", ".".join(["x" * 60] * 5)],
    ),
    "ipv4": (["0.0.0.0", "192.168.1.255"], ["256.1.1.1", "1.2.3", "1.2.3.04"]),
    "ipv6": (
        [
            "::1",
            "::",
            "fe80::1",
            "fe80::1ff:fe23:4567:890a",
            "2001:db8:0:0:0:0:0:1",
            "2001:db8::8a2e:370:7334",
            "::ffff:192.0.2.128",
            "64:ff9b::192.0.2.33",
            "1:2:3:4:5:6:7::",
            "1:2:3:4:5:6:192.0.2.1",
        ],
        ["", "1::2::3", "12345::", "1:2:3:4:5:6:7", "1:2:3:4:5:6:7::8", "fe80::1%eth0"],
    ),
    "uri": (
        [
            "https://example.com/a/b?q=1#top",
            "ftp://host",
            "http://localhost:11434/v1",
            "http://127.0.0.1:8080/",
            "http://[::1]:65535/x",
            "https://example.com/?q",
            "https://example.com/?a=1&b=2&c=%20x%2Fy",
            "https://example.com/a%20b/#",
            "https://user:secret@example.com:44300/",
            "https://www.example.com/a/very/long/path/with/many/more/than/eight/parts/in/it.html",
            "https://example.com/" + "x" * 80,
            "mailto:joe@example.com",
            "urn:isbn:0451450523",
            "urn:uuid:123e4567-e89b-12d3-a456-426614174000",
            "file:///etc/hosts",
            "tel:+1-816-555-1212",
            "data:text/plain;base64,SGVsbG8=",
            "s3://bucket_name/key",
            "HTTP://EXAMPLE.COM",
        ],
        ["", "x y", "/a", "1a:b", "http://a b", "http://a/%zz", "http://é/", "http://a/{b}", "http://h:123456", "a"],
    ),
    "uri-reference": (["", "/a/b?c#d", "../x", "#f", "//host/a", "https://example.com/"], [":a", "1:a", "a b", "\\a"]),
    "iri": (["https://münchen.example/straße?q=ü#ö", "mailto:joe@example.com"], ["/a", "http://a b"]),
    "iri-reference": (["/straße", "../ü", "https://münchen.example/"], ["a b", ":a"]),
    "uri-template": (["", "/users/{id}", "http://h/{+path}{?q,page*}{&x:3}"], ["{", "{a", "a b", "%", "{a:0}"]),
    "json-pointer": (["", "/", "/a/0/b~1c~0d"], ["a", "/~", "/~2"]),
    "relative-json-pointer": (["0", "1/a", "0#"], ["", "01", "-1", "1a"]),
    "uuid": (["123e4567-e89b-12d3-a456-426614174000", "2EB8AA08-AA98-11EA-B4AA-73B441D16380"], ["123e4567", ""]),
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats_allow_real_values_and_nothing_else(bpe: Vocabulary, name: str) -> None:
    constraint = bpe.constraint("json_schema", json.dumps({"type": "string", "format": name}))
    narrow = bpe.constraint("json_schema", json.dumps({"type": "string", "format": name, "pattern": "^.*$"}))
    check = validator({"type": "string", "format": name})
    good, bad = VALUES[name]
    for text in good:
        assert check.is_valid(text), text
        for limited in (constraint, narrow):
            assert bpe.accepts(limited, json.dumps(text, ensure_ascii=False)), text
    for text in bad:
        for limited in (constraint, narrow):
            assert not bpe.accepts(limited, json.dumps(text, ensure_ascii=False)), text


# --- schemas that ask for too much


def chain(n: int, kind: str) -> object:
    definitions: dict[str, object] = {"a0": INT}
    for i in range(1, n):
        ref = {"$ref": f"#/$defs/a{i - 1}"}
        definitions[f"a{i}"] = {"properties": {"x": ref, "y": ref}} if kind == "properties" else {kind: [ref, ref]}
    return {"$ref": f"#/$defs/a{n - 1}", "$defs": definitions}


def nested(n: int) -> object:
    schema: object = {}
    for _ in range(n):
        schema = {"items": schema}
    return schema


BOMBS: dict[str, object] = {
    "items": {"type": "array", "minItems": 10**9},
    "items of items": {"items": {"items": {"type": "array", "maxItems": 1000}, "maxItems": 1000}, "maxItems": 1000},
    "text": {"type": "string", "minLength": 10**9},
    "properties": {"type": "object", "minProperties": 10**6},
    "many properties": {"type": "object", "properties": {f"p{i}": INT for i in range(3000)}},
    "pattern": {"type": "string", "pattern": "^(a{1000}){1000}$"},
    "patterns in patterns": {"type": "string", "pattern": "^((a|b)*c(a|b){20}){5,50}$"},
    "ambiguous pattern": {"type": "string", "pattern": "^(x+x+)+y$"},
    "parentheses": {"type": "string", "pattern": "(" * 500 + ")" * 500},
    "references": chain(5000, "properties"),
    "doubled by anyOf": chain(60, "anyOf"),
    "doubled by allOf": chain(60, "allOf"),
    "doubled by properties": chain(60, "properties"),
    "nested": nested(90),
    "nested deep": nested(400),
    "choices": {"enum": [f"v{i}" for i in range(20_000)]},
    "numbers": {"type": "number", "minimum": 1e-300, "maximum": 1e300},
    "complete": {
        "$ref": "#/$defs/a0",
        "$defs": {f"a{i}": {"properties": {f"x{j}": {"$ref": f"#/$defs/a{j}"} for j in range(40)}} for i in range(40)},
    },
    "large": {"description": "x" * (1 << 20)},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", chosen(BOMBS, BOMBS.keys() - {"many properties"}))
def test_bombs(bpe: Vocabulary, name: str) -> None:
    """Refused with a reason, or served, without using up the machine."""
    before = time.process_time()
    try:
        matcher = bpe.constraint("json_schema", json.dumps(BOMBS[name])).start()
        assert bpe.allowed(matcher)
    except GrammarError as error:
        assert len(str(error)) < 1500
    assert time.process_time() - before < 10  # hundreds of milliseconds where nothing else runs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "(a{1000}){1000}"),
        ("regex", "(a|aa)*b{1,1000}(.*x.{500})"),
        ("regex", "(" * 5000),
        ("regex", "a" * (1 << 20)),
        ("gbnf", "root ::= " + " | ".join(f'"a{i}"' for i in range(4_000))),
        ("gbnf", 'root ::= "(" root ")" | ' + " | ".join(f'"a{i}"' for i in range(6_000))),
        ("gbnf", "root ::= " + " ".join(["[a-z]?"] * 2000)),
        ("gbnf", 'root ::= "(" root ")" | ' + " ".join(["[a-z]? [0-9]*"] * 300)),
        ("gbnf", "root ::= r0\n" + "".join(f'r{i} ::= "a" r{i + 1}\n' for i in range(2900)) + 'r2900 ::= "b"'),
        ("gbnf", "root ::= r0\n" + "".join(f'r{i} ::= "a" r{i + 1}\n' for i in range(9000)) + 'r9000 ::= "b"'),
        ("gbnf", "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(60)) + 'r60 ::= "b"'),
        ("gbnf", "root ::= " + "(" * 150 + '"a"' + ")*" * 150),
        ("gbnf", 'root ::= "' + "a" * 250_000 + '"'),
        ("gbnf", "#" * (1 << 20)),
        ("lark", "start: " + "(" * 10_000),
        ("lark", "start: T0\n" + "".join(f'T{i}: "a" T{i + 1}\n' for i in range(5000)) + 'T5000: "b"'),
    ],
    ids=range(16),
)
def test_grammar_bombs(bpe: Vocabulary, kind: str, text: str) -> None:
    before = time.process_time()
    try:
        matcher = bpe.constraint(kind, text).start()
        for _ in range(3):
            matcher.accept(bpe.allowed(matcher)[0])
    except GrammarError as error:
        assert len(str(error)) < 1500
    assert time.process_time() - before < 15


def test_the_same_grammar_is_compiled_once_and_errors_are_kept(bpe: Vocabulary) -> None:
    text = json.dumps({"type": "string", "maxLength": 17})
    assert bpe.constraint("json_schema", text) is bpe.constraint("json_schema", text)
    messages = set()
    for _ in range(2):
        with pytest.raises(GrammarError) as caught:
            bpe.constraint("json_schema", '{"not": 1}')
        messages.add(str(caught.value))
    assert len(messages) == 1


@pytest.mark.slow
def test_few_grammars_are_kept() -> None:
    """The cache keeps the most recently used ones: each may take megabytes that no limit counts."""
    vocabulary = Vocabulary(bytes_tokenizer())
    texts = [f"a{{{i}}}" for i in range(1, 30)]
    made = [weakref.ref(vocabulary.constraint("regex", text)) for text in texts]
    kept = [i for i, grammar in enumerate(made) if grammar() is not None]
    assert kept == list(range(29 - len(kept), 29)) and 2 <= len(kept) <= 8
    long = [json.dumps({"type": "string", "description": f"{i}" + "x" * 400_000}) for i in range(6)]
    made = [weakref.ref(vocabulary.constraint("json_schema", text)) for text in long]
    assert [grammar() is not None for grammar in made] == [False] * 4 + [True] * 2


def test_limits_while_generating_are_errors_that_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "LIMITS", compiler.LIMITS._replace(max_lexer_states=60))
    vocabulary = Vocabulary(bytes_tokenizer())
    chance = random.Random(1)
    matcher = vocabulary.constraint("regex", "[ab]*a[ab]{12}").start()
    with pytest.raises(ConstraintError, match=r"cannot be followed any further|does not fit"):
        for _ in range(200):
            tokens = [token for token in vocabulary.allowed(matcher) if token not in vocabulary.tokenizer.eog]
            matcher.accept(chance.choice(tokens))


def test_answers_outlive_a_lexer_that_other_answers_have_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "LIMITS", compiler.LIMITS._replace(max_lexer_states=700))
    vocabulary = Vocabulary(bytes_tokenizer())
    texts = {name: {"type": "string", "maxLength": 300} for name in "abcd"}
    constraint = vocabulary.constraint("json_schema", json.dumps({"type": "object", "properties": texts}))
    for name in "abcd" * 2:
        assert vocabulary.accepts(constraint, json.dumps({name: "xyz" * 60}))


def test_regex_and_lark(bpe: Vocabulary) -> None:
    assert bpe.accepts(bpe.constraint("regex", "[ab]/+é"), "a//é")
    assert not bpe.accepts(bpe.constraint("regex", "[ab]+"), "abc")
    lark = 'start: "<tool_call>" %json {"properties": {"a": {"type": "integer"}}} "</tool_call>" // "<think>"'
    compiler = bpe.constraint("lark", lark)
    assert bpe.accepts(compiler, '<tool_call>{"a": 1}</tool_call>')
    assert not bpe.accepts(compiler, '<tool_call>{  "a": 1}</tool_call>')
    assert not bpe.accepts(compiler, '<tool_call>{"b": 1}</tool_call>')
    with pytest.raises(GrammarError, match="keyword 'contains' is not supported"):
        bpe.constraint("lark", 'start: %json {"contains": {}}')
    for bad in ("", "start: x", "start: %json {", "%llguidance 5\nstart: /a/", "start: /(/"):
        with pytest.raises(GrammarError):
            bpe.constraint("lark", bad)
    with pytest.raises(GrammarError, match="regex"):
        bpe.constraint("regex", "(")


def test_types_behind_doubling_references_are_found_once() -> None:
    """Each of 60 definitions refers twice to the next: 2**60 ways lead to the last one."""
    definitions = {
        f"d{i}": {"oneOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]} for i in range(60)
    }
    definitions["d60"] = {"type": "string"}
    for schema in (
        {"$defs": definitions, "$ref": "#/$defs/d0"},
        {
            "$defs": {"d": {"anyOf": [{"$ref": "#/$defs/d"}, {"type": "string"}]}},
            "oneOf": [{"$ref": "#/$defs/d"}, True],
        },
    ):
        try:
            check_schema(schema)
        except GrammarError:
            pass  # whether it is refused does not matter here: it ends
