"""Answers in each family's way of writing, whole and in pieces."""

from __future__ import annotations

import itertools
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import chosen

from llamado.text.dialects import (
    Content,
    ContinuedMessage,
    Conversation,
    Piece,
    PreparedChat,
    Reasoning,
    ToolCall,
    prepare,
)
from llamado.text.dialects.reading import ReadingParser
from llamado.text.template.chat import ChatTemplate, EndTokens

TEMPLATES = Path(__file__).parent / "templates"
USER = [{"role": "user", "content": "hi"}]

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "where": {"type": "object"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "metric": {"type": "boolean"},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "Time", "parameters": {}}},
]


@cache
def template(name: str) -> ChatTemplate:
    return ChatTemplate((TEMPLATES / f"{name}.jinja").read_text(), EndTokens("<s>", "</s>"))


_ids = itertools.count()


def ready(name: str, **options: Any) -> PreparedChat:
    options.setdefault("tools", TOOLS)
    return prepare(template(name), Conversation(messages=USER, **options), new_id=lambda: f"id{next(_ids)}")


def read(prepared: PreparedChat, parts: list[str]) -> list[Piece]:
    parser = prepared.parser()
    pieces = [piece for part in parts for piece in parser.push(part)]
    return pieces + parser.finish()


def told(pieces: list[Piece]) -> tuple[str, str, list[tuple[str, str]]]:
    """Thoughts, content, and calls with their arguments' text."""
    calls: list[list[str]] = []
    for piece in pieces:
        if isinstance(piece, ToolCall):
            if piece.name is not None:
                assert piece.index == len(calls)
                assert piece.id
                calls.append([piece.name, ""])
            calls[piece.index][1] += piece.arguments
    return (
        "".join(piece.text for piece in pieces if isinstance(piece, Reasoning)),
        "".join(piece.text for piece in pieces if isinstance(piece, Content)),
        [(name, arguments) for name, arguments in calls],
    )


HARD = {"city": 'Zürich "x" \\ <b>\n', "where": {"a": [1, -2.5e3, None, True, {"ü": "é"}]}, "tags": []}
HARD_JSON = json.dumps(HARD, ensure_ascii=False)
W = {"city": "Paris"}
WJ = '{"city": "Paris"}'

# (family, answer, thoughts, content, calls)
Answer = tuple[str, str, str, str, list[tuple[str, dict[str, Any]]]]


def json_family(name: str, before: str, between: str, after: str, form: str, thoughts: bool) -> list[Answer]:
    """Answers of a family that calls in JSON; `form` has NAME and {ARGUMENTS}."""

    def call(tool: str, arguments: str) -> str:
        return form.replace("NAME", tool).replace("{ARGUMENTS}", arguments)

    one = before + call("get_weather", WJ) + after
    two = before + call("get_weather", WJ) + between + call("now", "{}") + after
    hard = before + call("get_weather", HARD_JSON) + after
    out: list[Answer] = [
        (name, "Just text, a < b.", "", "Just text, a < b.", []),
        (name, one, "", "", [("get_weather", W)]),
        (name, two, "", "", [("get_weather", W), ("now", {})]),
        (name, "Let me see.\n" + one, "", "Let me see.\n", [("get_weather", W)]),
        (name, hard, "", "", [("get_weather", HARD)]),
        (name, before + call("unknown", WJ) + after, "", before + call("unknown", WJ) + after, []),
        (name, "x" + before + "oops", "", "x" + before + "oops", []),
        (name, one + "\n", "", "", [("get_weather", W)]),
    ]
    if thoughts:
        out.append((name, "<think>\nI look.\n</think>\n\n" + one, "I look.\n", "", [("get_weather", W)]))
    return out


ANSWERS: list[Answer] = [
    *json_family(
        "hermes",
        "<tool_call>\n",
        "\n</tool_call>\n<tool_call>\n",
        "\n</tool_call>",
        '{"name": "NAME", "arguments": {ARGUMENTS}}',
        True,
    ),
    (
        "hermes",
        '<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}</tool_call>',
        "",
        "",
        [("get_weather", W)],
    ),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", "", [("now", {})]),
    ("hermes", "<think>\nA <tool_call> is\n</think>\n\nno", "A <tool_call> is\n", "no", []),
    # Arguments of a call that gets no name are text.
    (
        "hermes",
        '<tool_call>\n{"arguments": {"city": "Rome"}, "count": 3}\n</tool_call>',
        "",
        '\n{"arguments": {"city": "Rome"}, "count": 3}\n</tool_call>',
        [],
    ),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 1]}</tool_call>', "", "]}</tool_call>", [("now", None)]),  # type: ignore[list-item]
    *json_family("nemotron", "<TOOLCALL>[", ", ", "]</TOOLCALL>", '{"name": "NAME", "arguments": {ARGUMENTS}}', False),
    *json_family(
        "apriel", "<tool_calls>[", ", ", "]</tool_calls>", '{"name": "NAME", "arguments": {ARGUMENTS}}', False
    ),
    *json_family("granite", "<|tool_call|>[", ", ", "]", '{"name": "NAME", "arguments": {ARGUMENTS}}', False),
    *json_family("apertus", "<|tools_prefix|>[", ", ", "]<|tools_suffix|>", '{"NAME": {ARGUMENTS}}', False),
    *json_family("firefunction", " functools[", ", ", "]", '{"name": "NAME", "arguments": {ARGUMENTS}}', False),
    *json_family(
        "minimax1", "<tool_calls>\n", "\n", "\n</tool_calls>", '{"name": "NAME", "arguments": {ARGUMENTS}}', False
    ),
    *json_family(
        "command",
        "<|START_ACTION|>[\n",
        ",\n",
        "\n]<|END_ACTION|>",
        '{"tool_call_id": "0", "tool_name": "NAME", "parameters": {ARGUMENTS}}',
        False,
    ),
    *json_family(
        "commandplus",
        "Action: ```json\n[\n",
        ",\n",
        "\n]```",
        '{"tool_name": "NAME", "parameters": {ARGUMENTS}}',
        False,
    ),
    (
        "command",
        "<|START_THINKING|>Well<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>",
        "Well",
        "Yes.",
        [],
    ),
    *json_family(
        "nemo", "[TOOL_CALLS][", ", ", "]", '{"name": "NAME", "arguments": {ARGUMENTS}, "id": "abcdef123"}', False
    ),
    *json_family("devstral", "[TOOL_CALLS]", "[TOOL_CALLS]", "", "NAME[CALL_ID]abcdef123[ARGS]{ARGUMENTS}", False),
    *json_family("ministral", "[TOOL_CALLS]", "[TOOL_CALLS]", "", "NAME[ARGS]{ARGUMENTS}", False),
    ("ministral", "[THINK]Hm[/THINK]Yes", "Hm", "Yes", []),
    *json_family(
        "deepseek31",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜><｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "NAME<｜tool▁sep｜>{ARGUMENTS}",
        False,
    ),
    *json_family(
        "kimi",
        "<|tool_calls_section_begin|><|tool_call_begin|>",
        "<|tool_call_end|><|tool_call_begin|>",
        "<|tool_call_end|><|tool_calls_section_end|>",
        "functions.NAME:0<|tool_call_argument_begin|>{ARGUMENTS}",
        False,
    ),
    *json_family(
        "solar",
        "<|tool_calls|><|tool_call:begin|>",
        "<|tool_call:end|><|tool_call:begin|>",
        "<|tool_call:end|>",
        "abc123def4<|tool_call:name|>NAME<|tool_call:args|>{ARGUMENTS}",
        False,
    ),
    *json_family("functionary31", "<function=", "</function><function=", "</function>", "NAME>{ARGUMENTS}", False),
    *json_family(
        "gigachat",
        "<|message_sep|>\n\nfunction call<|role_sep|>\n",
        "<|message_sep|>\n\nfunction call<|role_sep|>\n",
        "",
        '{"name": "NAME", "arguments": {ARGUMENTS}}',
        False,
    ),
    # Llama 3: objects at the beginning
    ("llama3", "Just text {", "", "Just text {", []),
    ("llama3", '{"name": "get_weather", "parameters": {"city": "Paris"}}', "", "", [("get_weather", W)]),
    ("llama3", '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}', "", "", [("get_weather", W)]),
    ("llama3", '{"type": "function", "function": {"name": "now", "parameters": {}}}', "", "", [("now", {})]),
    (
        "llama3",
        '{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}',
        "",
        "",
        [("now", {}), ("now", {})],
    ),
    ("llama3", '<|python_tag|>get_weather.call(city="Paris")', "", "", [("get_weather", W)]),
    ("llama3", '{"name": "get_weather", "parameters": ' + HARD_JSON + "}", "", "", [("get_weather", HARD)]),
    ("llama3", '{"name": "who", "parameters": {}}', "", '{"name": "who", "parameters": {}}', []),
    ("llama3", '<|python_tag|>print("x")', "", '<|python_tag|>print("x")', []),
    # DeepSeek R1: the template has opened the thoughts
    ("deepseek", "I see.\n</think>\n\nYes", "I see.\n", "Yes", []),
    ("deepseek", "</think>Yes", "", "Yes", []),
    ("deepseek", "only thoughts", "only thoughts", "", []),
    (
        "deepseek",
        "x</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        + HARD_JSON
        + "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "x",
        "",
        [("get_weather", HARD), ("now", {})],
    ),
    ("deepseek", "</think><｜tool▁call▁begin｜>bad", "", "<｜tool▁call▁begin｜>bad", []),
    # Qwen3-Coder
    ("coder", "Just text", "", "Just text", []),
    (
        "coder",
        "Ok\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        "",
        "Ok\n",
        [("get_weather", W)],
    ),
    (
        "coder",
        '<function=get_weather>\n<parameter=city>\na "b"\n\\c <i>\n</parameter>\n<parameter=days>\n3\n</parameter>\n'
        '<parameter=where>\n{"x": [1, "ü"]}\n</parameter>\n<parameter=metric>\nTrue\n</parameter>\n</function>'
        "\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "",
        "",
        [
            ("get_weather", {"city": 'a "b"\n\\c <i>', "days": 3, "where": {"x": [1, "ü"]}, "metric": True}),
            ("now", {}),
        ],
    ),
    ("coder", "<tool_call>\n<function=what>\n</function>", "", "<tool_call>\n<function=what>\n</function>", []),
    ("coder", "#include <functional>", "", "#include <functional>", []),
    (
        "coder",
        "<function=now>\n<parameter=x>\n1\n</parameter>\nhm\n</function>",
        "",
        "\nhm\n</function>",
        [("now", {"x": 1})],
    ),
    (
        "seed",
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n</function>\n</seed:tool_call>",
        "",
        "",
        [("get_weather", W)],
    ),
    (
        "seed",
        "<seed:tool_call>\n<function=get_weather>\n<parameter=tags>['it\\'s', \"x\"]</parameter>\n"
        "<parameter=where>{'a': [1, None]}</parameter>\n</function>\n</seed:tool_call>",
        "",
        "",
        [("get_weather", {"tags": ["it's", "x"], "where": {"a": [1, None]}})],
    ),
    # GLM
    ("glm", "<think>a</think>\nb", "a", "b", []),
    (
        "glm",
        "<think></think>\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
        "",
        "",
        [("get_weather", {"city": "Paris", "days": 2})],
    ),
    (
        "glm",
        '<tool_call>get_weather<arg_key>city</arg_key><arg_value>Zürich\n"x"</arg_value></tool_call>'
        "<tool_call>now</tool_call>",
        "",
        "",
        [("get_weather", {"city": 'Zürich\n"x"'}), ("now", {})],
    ),
    ("glm", "<tool_call>who\n</tool_call>", "", "<tool_call>who\n</tool_call>", []),
    (
        "hunyuan",
        "<think:opensource>t</think:opensource>a<tool_calls:opensource>\n"
        "<tool_call:opensource>get_weather<tool_sep:opensource>\n<arg_key:opensource>city</arg_key:opensource>\n"
        "<arg_value:opensource>Paris</arg_value:opensource>\n</tool_call:opensource>\n"
        "<tool_call:opensource>now<tool_sep:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>",
        "t",
        "a",
        [("get_weather", W), ("now", {})],
    ),
    # MiniMax M2, MiniCPM, DeepSeek V3.2
    (
        "minimax2",
        'Hm\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="tags">["a"]</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        "",
        "Hm\n",
        [("get_weather", {"city": "Paris", "tags": ["a"]}), ("now", {})],
    ),
    (
        "minicpm",
        '<function name="get_weather"><param name="city">Paris</param></function>\n<function name="now"></function>',
        "",
        "",
        [("get_weather", W), ("now", {})],
    ),
    (
        "minicpm",
        '<function name="get_weather"><param name="city"><![CDATA[a </param> b]]></param></function>',
        "",
        "",
        [("get_weather", {"city": "a </param> b"})],
    ),
    (
        "dsml",
        '<think>t</think>\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">12</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">12</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        "t",
        "",
        [("get_weather", {"city": "12", "days": 12})],
    ),
    # gpt-oss
    ("harmony", "<|channel|>final<|message|>Hi <b>", "", "Hi <b>", []),
    ("harmony", "<|channel|>commentary<|message|>Hi", "", "Hi", []),
    (
        "harmony",
        "<|channel|>analysis<|message|>I'm\nthinking<|end|><|start|>assistant<|channel|>final<|message|>Hi",
        "I'm\nthinking",
        "Hi",
        [],
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>t<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        "<|constrain|>json<|message|>" + HARD_JSON,
        "t",
        "",
        [("get_weather", HARD)],
    ),
    ("harmony", " to=functions.now<|channel|>analysis<|message|>{}", "", "", [("now", {})]),
    (
        "harmony",
        '<|channel|>commentary to=functions.get_weather<|message|>{"city": "Paris"}<|end|><|start|>assistant'
        "<|channel|>commentary to=functions.now<|message|>{}<|end|>",
        "",
        "",
        [("get_weather", W), ("now", {})],
    ),
    ("harmony", "<|channel|>commentary to=assistant<|channel|>analysis<|message|>t<|end|>", "t", "", []),
    ("harmony", "no header", "", "no header", []),
    # Functionary 3.2
    ("functionary32", "all\nHello", "", "Hello", []),
    ("functionary32", "get_weather\n" + HARD_JSON, "", "", [("get_weather", HARD)]),
    (
        "functionary32",
        'all\nHm>>>get_weather\n{"city": "Paris"}>>>now\n{}',
        "",
        "Hm",
        [("get_weather", W), ("now", {})],
    ),
    ("functionary32", "who\n{}", "", "who\n{}", []),
    # Gemma 4
    ("gemma", "Hello", "", "Hello", []),
    ("gemma", "<|channel>thought\nI'm\nthinking<channel|>Hello", "I'm\nthinking", "Hello", []),
    ("gemma", "<|channel><|channel>thought\n<channel|>Hello<channel|>", "", "Hello", []),
    (
        "gemma",
        'Hm<|tool_call>call:get_weather{city:<|"|>Zürich "x"\n<|"|>,where:{a:[1,-2.5e3,null,true,{b:<|"|>c<|"|>}]},'
        "tags:[]}<tool_call|><|tool_call>call:now{}<tool_call|>",
        "",
        "Hm",
        [
            ("get_weather", {"city": 'Zürich "x"\n', "where": {"a": [1, -2500.0, None, True, {"b": "c"}]}, "tags": []}),
            ("now", {}),
        ],
    ),
    (
        "gemma",
        "<|tool_call>call:get_weather{where:{a:[None,True]}}<tool_call|><|tool_response>",
        "",
        "",
        [("get_weather", {"where": {"a": [None, True]}})],
    ),
    ("gemma", "<|tool_call>call:who{}<tool_call|>", "", "<|tool_call>call:who{}<tool_call|>", []),
    # LFM2
    (
        "lfm",
        "Hm<|tool_call_start|>[get_weather(city='it\\'s \"x\"', days=2, where={'a': [True, None, 1.5]}), "
        "now()]<|tool_call_end|>",
        "",
        "Hm",
        [("get_weather", {"city": 'it\'s "x"', "days": 2, "where": {"a": [True, None, 1.5]}}), ("now", {})],
    ),
    ("lfm", "<|tool_call_start|>[who()]<|tool_call_end|>", "", "<|tool_call_start|>[who()]<|tool_call_end|>", []),
    # Templates that know no tools
    ("plain", '{"response": "Hé \\"x\\"\\n\\u00e9\\ud83d\\ude00"}', "", 'Hé "x"\né😀', []),
    ("plain", '{"tool_call": {"name": "get_weather", "arguments": {"city": "Paris"}}}', "", "", [("get_weather", W)]),
    (
        "plain",
        '{"tool_calls": [{"name": "get_weather", "arguments": ' + HARD_JSON + '}, {"name": "now", "arguments": {}}]}\n',
        "",
        "",
        [("get_weather", HARD), ("now", {})],
    ),
    ("plain", "Just text", "", "Just text", []),
    ("plain", '{"other": 1}', "", '{"other": 1}', []),
    ("plain", '{"tool_call": 1}', "", '{"tool_call": 1}', []),
]


def check(answer: Answer, pieces: list[Piece]) -> None:
    _, _, thoughts, content, calls = answer
    got = told(pieces)
    assert got[:2] == (thoughts, content)
    assert [name for name, _ in got[2]] == [name for name, _ in calls]
    for (_, text), (_, meant) in zip(got[2], calls, strict=True):
        if meant is not None:
            assert json.loads(text) == meant


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda a: f"{a[0]}-{a[1][:24]!r}")
def test_answers_whole_and_in_pieces(answer: Answer) -> None:
    prepared = ready(answer[0])
    text = answer[1]
    whole = read(prepared, [text])
    check(answer, whole)
    characters = read(prepared, list(text))
    check(answer, characters)
    assert told(characters) == told(whole)
    if not answer[4] or answer[4][0][1] is not None:
        rng = random.Random(text)
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(3))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert told(read(prepared, parts)) == told(whole)


NAMES = sorted({answer[0] for answer in ANSWERS})
EACH_FORMAT = ("coder", "functionary32", "gemma", "harmony", "hermes", "kimi", "lfm", "llama3", "plain")
"""One family for each form of calls that has code of its own; the others differ in its tags."""
SAMPLES = {name: [answer[1] for answer in ANSWERS if answer[0] == name] for name in NAMES}


# The families by the names that `PreparedChat.family` gives them.
FAMILIES = {
    "apertus": "Apertus",
    "apriel": "Apriel",
    "coder": "Qwen3 Coder",
    "command": "Command R7B",
    "commandplus": "Command R+",
    "deepseek": "DeepSeek R1",
    "deepseek31": "DeepSeek V3.1",
    "devstral": "Mistral Small 3.2",
    "dsml": "DeepSeek V3.2",
    "firefunction": "FireFunction v2",
    "functionary31": "Functionary v3.1 Llama 3.1",
    "functionary32": "Functionary v3.2",
    "gemma": "Gemma 4",
    "gigachat": "GigaChat",
    "glm": "GLM 4.5",
    "granite": "Granite",
    "harmony": "GPT-OSS",
    "hermes": "Hermes 2 Pro",
    "hunyuan": "Hunyuan 3",
    "kimi": "Kimi K2",
    "lfm": "LFM2",
    "llama3": "Llama 3.x",
    "minicpm": "MiniCPM5",
    "minimax1": "MiniMax M1",
    "minimax2": "MiniMax M2",
    "ministral": "Ministral 3",
    "nemo": "Mistral Nemo",
    "nemotron": "Nemotron Nano v2",
    "plain": "Generic",
    "seed": "Seed-OSS",
    "solar": "Solar Open",
}


@pytest.mark.parametrize("name", NAMES)
def test_templates_are_known_and_show_the_tools(name: str) -> None:
    prepared = ready(name)
    assert prepared.family == FAMILIES[name]
    assert name == "deepseek" or "get_weather" in prepared.prompt  # whose template has no place for tools


PAST: dict[str, Any] = {"city": 'Zürich "x"', "days": 3, "where": {"a": [1, True]}}


@pytest.mark.parametrize("name", [name for name in NAMES if name != "deepseek"])
def test_calls_of_the_past_are_written_as_calls_are_read(name: str) -> None:
    """A model's text is a call if it equals what the template writes for a call of the conversation."""
    wanted = [("get_weather", PAST), ("now", {})]
    if name in ("llama3", "harmony"):
        del wanted[1]  # one call in a message
    calls = []
    for i, (tool, arguments) in enumerate(wanted):
        function = {"name": tool, "arguments": json.dumps(arguments, ensure_ascii=False)}
        id = f"functions.{tool}:{i}" if name == "kimi" else f"abcdefghi{i}"
        calls.append({"id": id, "type": "function", "function": function})
    messages = [*USER, {"role": "assistant", "content": "", "tool_calls": calls}]
    request = Conversation(messages=messages, tools=TOOLS, add_generation_prompt=False)
    past = prepare(template(name), request).prompt
    prepared = ready(name)
    written = past.removeprefix(prepared.prompt)
    tools_last = written == past  # beside the user's last message
    if tools_last:
        written = past.partition("hi[/INST]")[2] or past.partition("hi<|eot_id|>" + prepared.generation_prompt)[2]
    _, content, read_back = told(read(prepared, [written]))
    assert [(tool, json.loads(arguments)) for tool, arguments in read_back] == wanted
    assert tools_last or not any(value in content for value in ("get_weather", "Zürich"))


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A family and an answer made of bits of its answers and of noise, cut anywhere."""
    name = draw(st.sampled_from(NAMES))
    bits = []
    for _ in range(draw(st.integers(1, 4))):
        if draw(st.booleans()):
            sample = draw(st.sampled_from(SAMPLES[name]))
            start = draw(st.integers(0, len(sample)))
            bits.append(sample[start : draw(st.integers(start, len(sample)))])
        else:
            bits.append(
                draw(st.sampled_from([*SAMPLES[name], "\n", " ", '{"', "<", "[", "</think>", '"', "}", "x", "\\"]))
            )
    text = "".join(bits)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return name, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(mixtures())
def test_where_the_text_is_cut_does_not_matter(mixture: tuple[str, list[str]]) -> None:
    name, parts = mixture
    prepared = ready(name)
    whole = told(read(prepared, ["".join(parts)]))
    assert told(read(prepared, parts)) == whole
    assert told(read(prepared, list("".join(parts)))) == whole


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.text(st.sampled_from('abc <>[]{}|/"\\\n:=,.()1é'), max_size=60), st.sampled_from(NAMES))
def test_text_without_tags_is_content(text: str, name: str) -> None:
    if name in ("deepseek", "functionary32", "plain", "harmony"):
        return  # these read the beginning of an answer in ways of their own
    prepared = ready(name)
    assert prepared.thinking is not None or told(read(prepared, [text])) == ("", text, [])
    assert told(read(prepared, [text]))[1].strip() == text.strip()


@pytest.mark.parametrize("format", ["none", "deepseek", "deepseek-legacy"])
def test_reasoning_formats(format: str) -> None:
    text = "<think>\nI see.\n</think>\n\nYes"
    thoughts, content, _ = told(read(ready("hermes", reasoning_format=format), list(text)))
    assert (thoughts, content) == {
        "none": ("", text),
        "deepseek": ("I see.\n", "Yes"),
        "deepseek-legacy": ("I see.\n", text),
    }[format]
    opened = told(read(ready("deepseek", reasoning_format="none"), ["I see.</think>Yes"]))
    assert opened[:2] == ("", "<think>\nI see.</think>Yes")
    harmony = "<|channel|>analysis<|message|>t<|end|><|start|>assistant<|channel|>final<|message|>Hi"
    thoughts, content, _ = told(read(ready("harmony", reasoning_format=format), list(harmony)))
    assert thoughts == ("" if format == "none" else "t")
    assert content.endswith("Hi")
    assert ("analysis" in content) == (format != "deepseek")


def test_thoughts_that_the_prompt_opens_or_closes() -> None:
    opened = ready("deepseek")
    assert opened.thinking_open
    assert opened.thinking == ("<think>", "</think>")
    assert opened.generation_prompt.endswith("<think>\n")
    closed = ready("hermes", enable_thinking=False)
    assert not closed.thinking_open
    assert closed.generation_prompt.endswith("<think>\n\n</think>\n\n")
    assert told(read(closed, ["Hi"])) == ("", "Hi", [])
    free = ready("hermes")
    assert not free.thinking_open
    assert told(read(free, ["  <think>  </think>Hi"])) == ("", "Hi", [])


def test_tool_choice_none_hides_tools() -> None:
    text = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    for options in ({"tool_choice": "none"}, {"tools": ()}):
        prepared = ready("hermes", **options)
        assert "get_weather" not in prepared.prompt
        assert prepared.grammar is None
        assert told(read(prepared, [text])) == ("", text, [])
    assert told(read(ready("hermes", parse_tool_calls=False), [text])) == ("", text, [])
    assert "get_weather" in ready("hermes").prompt


def test_ids_come_from_the_model_or_are_made() -> None:
    def ids(name: str, text: str) -> list[str | None]:
        return [p.id for p in read(ready(name), [text]) if isinstance(p, ToolCall) and p.name is not None]

    assert ids("nemo", '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "abcdef123"}]') == ["abcdef123"]
    assert ids("devstral", "[TOOL_CALLS]now[CALL_ID]abcdef123[ARGS]{}") == ["abcdef123"]
    assert ids(
        "kimi", "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:3<|tool_call_argument_begin|>{}"
    ) == ["functions.now:3"]
    assert ids("command", '<|START_ACTION|>[{"tool_call_id": "7", "tool_name": "now", "parameters": {}}]') == ["7"]
    prepared = prepare(template("hermes"), Conversation(messages=USER, tools=TOOLS))
    made = [
        p.id for p in read(prepared, ['<tool_call>{"name": "now"}</tool_call>' * 2]) if isinstance(p, ToolCall) and p.id
    ]
    assert len(made) == 2
    assert all(id is not None and len(id) == 32 and id.isalnum() for id in made)
    assert made[0] != made[1]


def test_arguments_come_while_they_are_written() -> None:
    parser = ready("hermes").parser()
    assert parser.push('<tool_call>{"name": "get_wea') == []
    has_begun = parser.push('ther", "arguments": {"city": "Pa')
    assert [type(piece) for piece in has_begun] == [ToolCall]
    assert told(has_begun)[2] == [("get_weather", '{"city": "Pa')]
    more = parser.push("ris")
    assert isinstance(more[0], ToolCall)
    assert more[0].arguments == "ris"
    parser = ready("coder").parser()
    parser.push("<tool_call>\n<function=get_weather>\n<parameter=city>\n")
    piece = parser.push('P"a')[0]
    assert isinstance(piece, ToolCall)
    assert piece.arguments.endswith('P\\"a')


def test_a_call_that_is_cut_off_shows_what_there_is() -> None:
    thoughts, content, calls = told(
        read(ready("hermes"), ['<tool_call>{"name": "get_weather", "arguments": {"city": "Pa'])
    )
    assert (thoughts, content, calls) == ("", "", [("get_weather", '{"city": "Pa')])
    nemo = told(read(ready("nemo"), ['[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Pa']))
    assert nemo == ("", "", [("get_weather", '{"city": "Pa')])


@pytest.mark.parametrize("name", chosen(NAMES, EACH_FORMAT))
def test_an_answer_that_a_limit_cuts_shows_no_markup(name: str) -> None:
    """Wherever it is cut: each part of the whole answer, or its beginning, and no arguments that seem complete."""
    for answer in (answer for answer in ANSWERS if answer[0] == name and answer[4]):
        prepared = ready(name)
        text = answer[1]
        thoughts, content, calls = told(read(prepared, [text]))
        for end in range(len(text)):
            parser = prepared.parser()
            cut = told(parser.push(text[:end]) + parser.finish(cut=True))
            assert thoughts.startswith(cut[0]) and content.startswith(cut[1]), text[:end]
            assert [tool for tool, _ in cut[2]] == [tool for tool, _ in calls[: len(cut[2])]], text[:end]
            for (_, part), (_, arguments) in zip(cut[2], calls, strict=False):
                assert arguments.startswith(part), text[:end]


def test_content_that_is_no_call_is_shown_up_to_the_cut() -> None:
    parser = ready("llama3").parser()
    assert told(parser.push('{"answer": "x') + parser.finish(cut=True)) == ("", '{"answer": "x', [])
    parser = ready("hermes").parser()
    assert told(parser.push("a <b> c\n") + parser.finish(cut=True)) == ("", "a <b> c\n", [])
    parser = ready("plain", tools=()).parser()
    assert told(parser.push("a <tool_call>") + parser.finish(cut=True)) == ("", "a <tool_call>", [])


def test_continued_answers() -> None:
    content = ready("hermes", continued=ContinuedMessage("Hel", "why"))
    assert content.prompt.endswith("<|im_start|>assistant\n<think>\nwhy\n</think>\n\nHel")
    assert told(read(content, [" lo"])) == ("", " lo", [])
    thoughts = ready("hermes", continued=ContinuedMessage(None, "wh"))
    assert thoughts.prompt.endswith("<|im_start|>assistant\n<think>\nwh")
    assert thoughts.thinking_open
    assert told(read(thoughts, ["y</think>\n\nHello"])) == ("y", "Hello", [])
    harmony = ready("harmony", continued=ContinuedMessage("Hel"))
    assert harmony.prompt.endswith("<|channel|>final<|message|>Hel")
    assert told(read(harmony, ["lo"])) == ("", "lo", [])
    plain = ready("llama3", continued=ContinuedMessage("Hel"), tools=())
    assert plain.prompt.endswith("assistant<|end_header_id|>\n\nHel")


HOSTILE = {
    "hermes": [
        "<tool_call>",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "',
        "<think>",
        "<tool_call>{",
        " ",
    ],
    "coder": ["<function=get_weather>\n<parameter=city>\n", "<function=", "<tool_call>\n", "<parameter=", "\n"],
    "nemo": [
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"a": "',
        "[TOOL_CALLS][{",
        '[TOOL_CALLS][{"arguments": {"a": "',
    ],
    "llama3": ['{"name": "', "{", "<|python_tag|>", '{"parameters": {"a": ['],
    "harmony": ["<|channel|>", "<|start|>assistant", "<|channel|>analysis<|message|>", " to=functions.get_weather"],
    "gemma": [
        '<|tool_call>call:get_weather{city:<|"|>',
        "<|tool_call>",
        "<|channel>thought",
        "<|tool_call>call:get_weather{a:[",
    ],
    "lfm": ["<|tool_call_start|>[get_weather(city='", "<|tool_call_start|>[", "<|tool_call_start|>[get_weather(a=["],
    "kimi": ["<|tool_calls_section_begin|>", "<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"],
    "plain": ['{"response": "', '{"tool_calls": [', '{"tool_call": {"arguments": {"a": "'],
    "glm": [
        "<tool_call>get_weather\n<arg_key>",
        "<tool_call>get_weather<arg_key>days</arg_key><arg_value>",
        "<tool_call>",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_a_push_costs_what_its_text_is_long(name: str) -> None:
    """The held-back text, which is parsed again with the next piece, stays small however long the answer gets."""
    for tag in HOSTILE[name]:
        for text in (tag + "a" * 20_000, tag + " " * 20_000, tag * (20_000 // len(tag))):
            parser = ready(name).parser()
            assert isinstance(parser, ReadingParser)
            for i in range(0, len(text), 32):
                parser.push(text[i : i + 32])
                assert parser.held <= 2048, tag
            parser.finish()
            assert parser.held == 0


@pytest.mark.slow
def test_a_megabyte_at_once() -> None:
    for tag in HOSTILE["hermes"][:1]:
        assert read(ready("hermes"), [tag * (1_000_000 // len(tag))]) is not None
