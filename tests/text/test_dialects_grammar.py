"""The grammars of calls: they compile, allow the family's calls, and nothing that the tools' schemas forbid."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest
from guided import Vocabulary, bytes_tokenizer
from llguidance import LLMatcher, LLTokenizer
from test_dialects import ANSWERS, EACH_FORMAT, NAMES, TEMPLATES, TOOLS, Answer, read, ready, told

from llamado.text.grammar.source import GrammarError, GrammarSource

BYTES = LLTokenizer("byte")
ALL = sorted({*NAMES, *(path.stem for path in TEMPLATES.glob("*.jinja"))})


def matcher(source: GrammarSource | None) -> LLMatcher:
    assert source is not None
    text = source.text if source.kind == "lark" else f"start: %json {source.text}"
    made = LLMatcher(BYTES, text)
    assert not made.is_error(), made.get_error()
    return made


def fits(source: GrammarSource | None, text: str) -> bool:
    """Return True if `text` is a complete sentence of the grammar."""
    made = matcher(source)
    tokens = list(text.encode())
    if made.validate_tokens(tokens) != len(tokens):
        return False
    made.consume_tokens(tokens)
    return bool(made.is_accepting())


WAYS = [*itertools.product(ALL, ("auto", "required", "function:now"), (True, False))]


@pytest.mark.parametrize(
    ("name", "choice", "parallel"),
    [
        pytest.param(*way, marks=() if way[1:] == ("required", True) or way[0] in EACH_FORMAT else pytest.mark.full)
        for way in WAYS
    ],
)
def test_grammars_compile(name: str, choice: str, parallel: bool) -> None:
    prepared = ready(name, tool_choice=choice, parallel_tool_calls=parallel)
    matcher(prepared.grammar)
    lazy = choice == "auto" and prepared.family != "Generic"
    assert bool(prepared.triggers) == lazy
    matcher(ready(name, tool_choice=choice, parallel_tool_calls=parallel, json_schema={"type": "object"}).grammar)
    matcher(ready(name, tools=(), json_schema={"type": "object", "properties": {"a": {"type": "integer"}}}).grammar)


def only_calls(answer: Answer) -> bool:
    return bool(answer[4]) and not answer[2] and not answer[3] and all(meant is not None for _, meant in answer[4])


# As the models write them; white space differs from what the parsers, which are more lenient, are tried with.
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": ARGS}\n</tool_call>',
    "nemotron": '<TOOLCALL>[{"name": "get_weather", "arguments": ARGS}]</TOOLCALL>',
    "granite": '<|tool_call|>[{"name": "get_weather", "arguments": ARGS}]',
    "apertus": '<|tools_prefix|>[{"get_weather": ARGS}]<|tools_suffix|>',
    "minimax1": '<tool_calls>\n{"name": "get_weather", "arguments": ARGS}\n</tool_calls>',
    "nemo": '[TOOL_CALLS][{"name": "get_weather", "arguments": ARGS, "id": "abcdef123"}]',
    "devstral": "[TOOL_CALLS]get_weather[CALL_ID]abcdef123[ARGS]ARGS",
    "ministral": "[TOOL_CALLS]get_weather[ARGS]ARGS",
    "command": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": ARGS}\n]'
    "<|END_ACTION|>",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\nARGS\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>ARGS<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>ARGS"
    "<|tool_call_end|><|tool_calls_section_end|>",
    "functionary31": "<function=get_weather>ARGS</function>",
    "functionary32": "get_weather\nARGS",
    "llama3": '{"name": "get_weather", "parameters": ARGS}',
    "harmony": "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>ARGS",
    "gigachat": '<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "get_weather", "arguments": ARGS}',
    "solar": "<|tool_calls|><|tool_call:begin|>abc123def4<|tool_call:name|>get_weather<|tool_call:args|>ARGS"
    "<|tool_call:end|><|calls|>",
}


def written(name: str, arguments: str) -> str:
    head, _, tail = WRITTEN[name].rpartition("ARGS")
    return head + arguments + tail


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_calls_in_json_have_valid_arguments(name: str) -> None:
    grammar = ready(name, tool_choice="required").grammar
    for good in ({"city": 'Zürich "x" \n'}, {"city": "", "days": -3}, {"city": "x", "metric": True}):
        text = written(name, json.dumps(good, ensure_ascii=False))
        assert fits(grammar, text)
        opening = "</think>" if name == "deepseek" else ""
        calls = told(read(ready(name, enable_thinking=False), [opening + text]))[2]
        assert [(tool, json.loads(arguments)) for tool, arguments in calls] == [("get_weather", good)]
    for bad in ({}, {"city": 1}, {"city": "x", "days": 1.5}, {"city": "x", "metric": None}):
        assert not fits(grammar, written(name, json.dumps(bad)))
    assert not fits(grammar, written(name, '{"city": "x"}').replace("get_weather", "get_whether"))
    assert not fits(ready(name, tool_choice="function:now").grammar, written(name, '{"city": "x"}'))


TAGGED: dict[str, tuple[str, str, str]] = {
    "coder": (
        "<tool_call>\n<function=get_weather>\n",
        "<parameter=KEY>\nVALUE\n</parameter>\n",
        "</function>\n</tool_call>",
    ),
    "seed": (
        "<seed:tool_call>\n<function=get_weather>\n",
        "<parameter=KEY>VALUE</parameter>\n",
        "</function>\n</seed:tool_call>",
    ),
    "glm": ("<tool_call>get_weather\n", "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n", "</tool_call>"),
    "minimax2": (
        '<minimax:tool_call>\n<invoke name="get_weather">\n',
        '<parameter name="KEY">VALUE</parameter>\n',
        "</invoke>\n</minimax:tool_call>",
    ),
    "minicpm": ('<function name="get_weather">', '<param name="KEY">VALUE</param>', "</function>"),
}


@pytest.mark.parametrize("name", sorted(TAGGED))
def test_tagged_calls_have_valid_arguments(name: str) -> None:
    head, argument, tail = TAGGED[name]

    def call(**values: str) -> str:
        return head + "".join(argument.replace("KEY", k).replace("VALUE", v) for k, v in values.items()) + tail

    grammar = ready(name, tool_choice="required").grammar
    for good, meant in (
        (call(city='Zürich <b> "x"'), {"city": 'Zürich <b> "x"'}),
        (call(city="a\nb", days="3"), {"city": "a\nb", "days": 3}),
        (call(days="3", tags='["a"]', city="c"), {"days": 3, "tags": ["a"], "city": "c"}),
    ):
        assert fits(grammar, good)
        calls = told(read(ready(name, enable_thinking=False), [good]))[2]
        assert [(tool, json.loads(arguments)) for tool, arguments in calls] == [("get_weather", meant)]
    for bad in (
        call(),
        call(days="3"),
        call(city="x", days="many"),
        call(city="x", who="y"),
        call(city="x", metric="3"),
    ):
        assert not fits(grammar, bad)


def test_other_notations() -> None:
    gemma = ready("gemma", tool_choice="required", parallel_tool_calls=True).grammar
    assert fits(gemma, '<|tool_call>call:get_weather{city:<|"|>Zürich<|"|>,days:3}<tool_call|>')
    assert fits(gemma, "<|tool_call>call:now{}<tool_call|><|tool_call>call:now{}<tool_call|>")
    assert not fits(gemma, "<|tool_call>call:get_weather{days:3}<tool_call|>")
    assert not fits(gemma, '<|tool_call>call:get_weather{city:<|"|>x<|"|>,days:<|"|>x<|"|>}<tool_call|>')
    lfm = ready("lfm", tool_choice="required", parallel_tool_calls=True).grammar
    assert fits(lfm, '<|tool_call_start|>[get_weather(city="Zürich", days=3), now()]<|tool_call_end|>')
    assert not fits(lfm, "<|tool_call_start|>[get_weather(days=3)]<|tool_call_end|>")
    generic = ready("plain").grammar
    assert fits(generic, '{"response": "Hi"}')
    assert fits(generic, '{"tool_call": {"name": "get_weather", "arguments": {"city": "x"}}}')
    several = ready("plain", parallel_tool_calls=True).grammar
    assert fits(several, '{"tool_calls": [{"name": "get_weather", "arguments": {"city": "x"}}]}')
    assert not fits(ready("plain", tool_choice="required").grammar, '{"response": "Hi"}')


@pytest.mark.parametrize(
    ("name", "between"), [("hermes", "\n"), ("coder", "\n"), ("glm", "\n"), ("ministral", ""), ("functionary31", "")]
)
def test_several_calls_only_where_they_are_allowed(name: str, between: str) -> None:
    if name in WRITTEN:
        one = written(name, '{"city": "x"}')
    else:
        head, argument, tail = TAGGED[name]
        one = head + argument.replace("KEY", "city").replace("VALUE", "x") + tail
    for parallel in (True, False):
        grammar = ready(name, tool_choice="required", parallel_tool_calls=parallel).grammar
        assert fits(grammar, one)
        assert fits(grammar, one + between + one) == parallel


def test_several_calls_by_default_where_the_template_shows_several() -> None:
    hermes, llama = written("hermes", '{"city": "x"}'), written("llama3", '{"city": "x"}')
    assert fits(ready("hermes", tool_choice="required").grammar, f"{hermes}\n{hermes}")
    assert not fits(ready("llama3", tool_choice="required").grammar, f"{llama};{llama}")
    assert fits(ready("llama3", tool_choice="required", parallel_tool_calls=True).grammar, f"{llama};{llama}")


def test_enumerations_and_lengths_of_bare_texts() -> None:
    tool: dict[str, Any] = {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {
                    "unit": {"type": "string", "enum": ["c", "f"]},
                    "code": {"type": "string", "maxLength": 3},
                },
                "required": ["unit"],
            },
        },
    }

    def call(unit: str, code: str) -> str:
        return (
            f"<tool_call>\n<function=f>\n<parameter=unit>\n{unit}\n</parameter>\n<parameter=code>\n{code}\n</parameter>\n"
            "</function>\n</tool_call>"
        )

    grammar = ready("coder", tools=[tool], tool_choice="required").grammar
    assert fits(grammar, call("c", "abc"))
    assert not fits(grammar, call("k", "abc"))
    assert not fits(grammar, call("c", "abcd"))


def test_content_that_a_schema_rules() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert fits(ready("hermes", tools=(), json_schema=schema).grammar, '{"a": 1}')
    harmony = ready("harmony", tools=(), json_schema=schema)
    assert fits(harmony.grammar, '<|channel|>final <|constrain|>json<|message|>{"a": 1}')
    assert harmony.thinking == ("<|channel|>analysis<|message|>", "<|end|>")
    command = ready("command", tools=(), json_schema=schema).grammar
    assert fits(command, '<|START_RESPONSE|>{"a": 1}<|END_RESPONSE|>')
    both = ready("hermes", json_schema=schema)
    assert not both.triggers
    assert fits(both.grammar, '{"a": 1}')
    assert fits(both.grammar, written("hermes", '{"city": "x"}'))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_parsers_read_what_grammars_allow(name: str) -> None:
    """Calls with as much and as little white space as their grammar allows, and other random choices."""
    vocabulary = Vocabulary(bytes_tokenizer())
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"]}}
    tools = [{"type": "function", "function": function}]
    prepared = ready(name, tools=tools, tool_choice="required", parallel_tool_calls=False, enable_thinking=False)
    assert prepared.grammar is not None
    constraint = vocabulary.compiler.compile(prepared.grammar)
    opening = "</think>" if name == "deepseek" else ""
    for seed in range(3):
        text = vocabulary.walk(constraint, random.Random(seed), most=400, special=True)
        if text is not None:
            _, content, calls = told(read(prepared, [opening + text]))
            assert (content, [(tool, json.loads(part)) for tool, part in calls]) == ("", [("f", {"a": "x"})]), text


def test_gigachats_calls_need_no_line_feed() -> None:
    text = '<|message_sep|>\n\nfunction call<|role_sep|>{"name": "now", "arguments": {}}'
    assert fits(ready("gigachat", tool_choice="required").grammar, text)
    assert told(read(ready("gigachat"), [text])) == ("", "", [("now", "{}")])


def test_a_grammar_of_the_clients_own() -> None:
    own = GrammarSource("gbnf", 'root ::= "yes"')
    assert ready("hermes", tools=(), grammar=own).grammar == own


def test_a_choice_that_is_no_tool() -> None:
    with pytest.raises(GrammarError, match="none of the tools"):
        ready("hermes", tool_choice="function:who")
    assert TOOLS[0]["function"]["name"] in ready("hermes", tool_choice="function:now").prompt


@pytest.mark.parametrize("answer", [a for a in ANSWERS if only_calls(a)], ids=lambda a: f"{a[0]}-{a[1][:24]!r}")
def test_word_triggers_stand_in_every_answer_with_calls(answer: Answer) -> None:
    triggers = ready(answer[0]).triggers
    words = [trigger.value for trigger in triggers if trigger.kind == "word"]
    if words and all(trigger.kind == "word" for trigger in triggers):
        assert any(word in answer[1] for word in words)


def test_a_named_function_is_called_once() -> None:
    once = ready("gemma", tool_choice="function:now").grammar
    assert fits(once, "<|tool_call>call:now{}<tool_call|>")
    assert not fits(once, "<|tool_call>call:now{}<tool_call|><|tool_call>call:now{}<tool_call|>")
