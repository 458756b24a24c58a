"""Custom tools of the Responses API over the fake engine: offered as functions, and called with a text."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
from fakes import FakeEngine, client, client_of, run
from test_chat_api import HERMES
from test_responses import FLAT_TOOL, ask, prompt
from tiny_models import make_llama

from llamado.engine.options import EngineOptions, ModelSource
from llamado.server.api.custom_tools import CustomInput, custom_function, enforced_input, whole_input
from llamado.server.load import load_served
from llamado.server.settings import Settings
from llamado.server.state import ServerState
from llamado.text.grammar.compiler import GrammarCompiler

sys.path.append(str(Path(__file__).parents[1] / "text"))
from guided import Vocabulary, bytes_tokenizer

TOKENIZER = bytes_tokenizer()

INPUT = 'print("hé\\n")\n\t# 😀 "quoted"'
CUSTOM = {"type": "custom", "name": "code", "description": "Runs code"}


def called(text: str) -> str:
    """Return a model's answer that calls the tool."""
    return f"<tool_call>\n{json.dumps({'name': 'code', 'arguments': {'input': text}})}\n</tool_call>"


def test_a_custom_tool_is_offered_as_a_function_with_a_text_argument() -> None:
    shown = prompt({"input": "Hi", "tools": [CUSTOM, FLAT_TOOL]})
    assert '"code"' in shown and "Runs code" in shown and '"input"' in shown and '"f"' in shown


def test_a_call_is_an_item_with_its_input() -> None:
    answer = ask({"input": "Hi", "tools": [CUSTOM]}, FakeEngine(called(INPUT)))
    (item,) = answer["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "code", INPUT)
    assert item["id"].startswith("ctc_") and item["call_id"].startswith("call_") and item["status"] == "completed"
    assert "arguments" not in item


def test_a_stream_shows_the_input_as_it_grows() -> None:
    events = ask({"input": "Hi", "tools": [CUSTOM, FLAT_TOOL], "stream": True}, FakeEngine(called(INPUT)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    once = [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]
    assert once == [
        "created", "in_progress", "output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    deltas = [event for event in events if event["type"].endswith("input.delta")]
    assert len(deltas) > 10 and "".join(event["delta"] for event in deltas) == INPUT
    (added,) = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert (added["type"], added["input"], added["status"]) == ("custom_tool_call", "", "in_progress")
    done = next(event for event in events if event["type"].endswith("input.done"))
    assert done["input"] == INPUT and done["item_id"] == added["id"]
    assert events[-1]["response"]["output"][0]["input"] == INPUT


def test_functions_beside_it_stay_functions() -> None:
    calling = called("x") + '\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    body = {"input": "Hi", "tools": [CUSTOM, FLAT_TOOL]}
    items = ask(body, FakeEngine(calling))["output"]
    assert [item["type"] for item in items] == ["custom_tool_call", "function_call"]
    streamed = ask({**body, "stream": True}, FakeEngine(calling))[-1]["response"]["output"]
    assert [(item["type"], item.get("input"), item.get("arguments")) for item in streamed] == [
        ("custom_tool_call", "x", None),
        ("function_call", None, '{"a": 1}'),
    ]


def test_a_call_and_its_output_in_the_next_turn() -> None:
    engine = FakeEngine(called("a\nb"))
    (item,) = ask({"input": "Hi", "tools": [CUSTOM]}, engine)["output"]
    output = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "It ran"}
    user = {"role": "user", "content": "Hi"}
    shown = prompt({"input": [user, item, output], "tools": [CUSTOM]})
    assert shown.index("<tool_call>") < shown.index('"input": "a\\nb"') < shown.index("It ran")


@pytest.mark.parametrize("choice", [{"type": "custom", "name": "code"}, "required"])
@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (
            {"type": "grammar", "syntax": "regex", "definition": r'^say "[a-z\n]+"$'},
            ['say "a\nb"'],
            ["say a", 'x say "a"'],
        ),
        (
            {
                "type": "grammar",
                "syntax": "lark",
                "definition": 'start: NAME "=" VALUE\nNAME: /\\w+/\nVALUE: "\\"" /[^"]+/ "\\""',
            },
            ['a="b\\c"'],
            ["a=b", "a="],
        ),
        (None, ["anything\n", ""], []),
        ({"type": "text"}, ["anything"], []),
    ],
    ids=["regex", "lark", "none", "text"],
)
def test_a_forced_call_follows_the_format(choice: Any, form: Any, good: list[str], bad: list[str]) -> None:
    engine = FakeEngine("x")
    tool = CUSTOM if form is None else {**CUSTOM, "format": form}

    async def work() -> None:
        async with client(engine, source=HERMES) as http:
            state = http.state  # type: ignore[attr-defined]
            state.served = dataclasses.replace(state.served, grammars=GrammarCompiler(TOKENIZER))
            body = {"input": "Hi", "tools": [tool], "tool_choice": choice}
            response = await http.post("/v1/responses", json=body)
            assert response.status_code == 200, response.text

    run(work())
    constraint = engine.requests[0].constraint
    assert constraint is not None
    accepted = [text for text in good + bad if Vocabulary(TOKENIZER).accepts(constraint, called(text))]
    assert accepted == good


@pytest.mark.slow
def test_a_model_calls_the_forced_tool(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "m.gguf", n_vocab=320, n_embd=32, n_ff=32, n_layer=1, n_ctx=1024)
    engine = EngineOptions(n_ctx=1024, n_threads=1)
    served = load_served(Settings(source=ModelSource(spec=str(path)), engine=engine), lambda share, what: None)
    form = {"type": "grammar", "syntax": "lark", "definition": 'start: LINE+\nLINE: /[ab"]{3}/ "\\n"'}
    body = {"input": "Hi", "tools": [{**CUSTOM, "format": form}], "tool_choice": {"type": "custom", "name": "code"}}

    async def work() -> tuple[Any, str]:
        async with client_of(ServerState(served=served)) as http:
            body["max_output_tokens"] = 200
            whole = await http.post("/v1/responses", json=body | {"temperature": 0})
            stream = await http.post("/v1/responses", json=body | {"temperature": 0, "stream": True})
            return whole.json(), stream.text

    try:
        answer, streamed = run(work())
    finally:
        served.close()
    (item,) = answer["output"]
    assert item["type"] == "custom_tool_call" and re.match(r'(?:[ab"]{3}\n)+', item["input"]), answer
    parts = [orjson.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: ")]
    deltas = [part["delta"] for part in parts if part["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == item["input"]


@pytest.mark.parametrize(
    ("tool", "why"),
    [
        ({"type": "custom"}, "needs a 'name'"),
        ({**CUSTOM, "format": {"type": "grammar", "syntax": "regex"}}, "needs a 'definition'"),
        ({**CUSTOM, "format": {"type": "grammar", "syntax": "bnf", "definition": "x"}}, "'lark' or 'regex', not 'bnf'"),
        ({**CUSTOM, "format": {"type": "json"}}, "'text' or 'grammar', not 'json'"),
        (
            {**CUSTOM, "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "(" start ")"'}},
            "no text that ends",
        ),
        ({**CUSTOM, "format": {"type": "grammar", "syntax": "regex", "definition": "(?=a)b"}}, "cannot be enforced"),
    ],
)
def test_invalid_tools_are_a_400(tool: dict[str, Any], why: str) -> None:
    error = ask({"input": "Hi", "tools": [tool]})["error"]
    assert error["code"] == 400 and why in error["message"]


@pytest.mark.parametrize("text", ["", "a", INPUT, '\\"\\', "\u0000\u001f", "😀" * 3, "é\n" * 50])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_an_input_is_read_in_pieces(text: str, size: int) -> None:
    for ascii_only in (True, False):
        arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
        reading = CustomInput()
        parts = [reading.push(arguments[at : at + size]) for at in range(0, len(arguments), size)]
        assert "".join(parts) + reading.finish() == text == whole_input(arguments)


def test_arguments_without_an_input_field_are_the_input() -> None:
    for arguments in ("{}", '{"patch": "x"}', '{"input": 5}', "plain", '"a"', "[" * 5000):
        reading = CustomInput()
        assert reading.push(arguments) + reading.finish() == whole_input(arguments) == arguments
    assert whole_input('{"input": "cut \\u00') == "cut "
    orjson.dumps(whole_input('{"input": "\\ud800"}'))  # UTF-8 has no lone surrogates


def test_the_model_is_shown_the_grammar_and_not_its_expression() -> None:
    form = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
    for given in (form, {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "a"'}}):
        tool = {**CUSTOM, "format": given}
        what = custom_function(tool)["parameters"]["properties"]["input"]
        assert what == {"type": "string", "description": 'A text of this Lark grammar:\nstart: "a"'}
        enforced = enforced_input(tool)
        assert enforced is not None and enforced["properties"]["input"]["pattern"] == "^(?:(?:a))$"
        assert "(?:" not in prompt({"input": "Hi", "tools": [tool]})
