"""Calls cut off by the token limit: no API shows their markup as text, nor their arguments as complete."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from fakes import FakeEngine, client, run
from test_chat_api import CALLING, HERMES

HEADS = ("<think>hm</think>Well.<tool", 'Well.<tool_call>\n{"na', CALLING + '\n<tool_call>\n{"name"')
IN_ARGUMENTS = CALLING.partition("1}}")[0]
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "tools": [{"type": "function", "function": FUNCTION}]}
MESSAGES = {**CHAT, "tools": [{"name": "f", "input_schema": FUNCTION["parameters"]}]}
RESPONSES = {"input": "Hi", "tools": [{"type": "function", **FUNCTION}]}


def ask(path: str, body: dict[str, Any], text: str) -> Any:
    """Return the answer, or the objects of its stream, of a model that the token limit stops after `text`."""
    limit = {"/api/chat": {"options": {"num_predict": len(text)}}, "/v1/responses": {"max_output_tokens": len(text)}}

    async def work() -> Any:
        async with client(FakeEngine(text + "more"), source=HERMES) as http:
            response = await http.post(path, json={"model": "m", **body, **limit.get(path, {"max_tokens": len(text)})})
            assert response.status_code == 200, response.text
            if not body["stream"]:
                return response.json()
            lines = (line.removeprefix("data: ") for line in response.text.splitlines())
            return [orjson.loads(line) for line in lines if line.startswith("{")]

    return run(work())


def chat(text: str, stream: bool) -> tuple[str, list[str]]:
    """Return content and arguments of calls that the API shows of a text."""
    answer = ask("/v1/chat/completions", {**CHAT, "stream": stream}, text)
    choices = [choice for part in (answer if stream else [answer]) for choice in part["choices"]]
    assert choices[-1]["finish_reason"] == "length"
    parts = [choice["delta"] if stream else choice["message"] for choice in choices]
    calls: dict[int, str] = {}
    for call in (call for part in parts for call in part.get("tool_calls", ())):
        at = call.get("index", len(calls))
        calls[at] = calls.get(at, "") + call["function"]["arguments"]
    return "".join(part.get("content") or "" for part in parts), list(calls.values())


def messages(text: str, stream: bool) -> tuple[str, list[str]]:
    answer = ask("/v1/messages", {**MESSAGES, "stream": stream}, text)
    if not stream:
        assert answer["stop_reason"] == "max_tokens"
        blocks = answer["content"]
        inputs = [orjson.dumps(block["input"]).decode() for block in blocks if block["type"] == "tool_use"]
        return "".join(block.get("text", "") for block in blocks), inputs
    assert answer[-2]["delta"]["stop_reason"] == "max_tokens"
    calls: list[str] = []
    for event in answer:
        if event.get("content_block", {}).get("type") == "tool_use":
            calls.append("")
        elif "partial_json" in event.get("delta", {}):
            calls[-1] += event["delta"]["partial_json"]
    return "".join(event["delta"].get("text", "") for event in answer if "delta" in event), calls


def responses(text: str, stream: bool) -> tuple[str, list[str]]:
    answer = ask("/v1/responses", {**RESPONSES, "stream": stream}, text)
    answer = answer[-1]["response"] if stream else answer
    assert answer["status"] == "incomplete"
    *others, last = answer["output"]
    assert last["status"] == "incomplete" and all(item["status"] == "completed" for item in others)
    texts = [part["text"] for item in answer["output"] if item["type"] == "message" for part in item["content"]]
    return "".join(texts), [item["arguments"] for item in answer["output"] if item["type"] == "function_call"]


def ollama(text: str, stream: bool) -> tuple[str, list[str]]:
    answer = ask("/api/chat", {**CHAT, "stream": stream}, text)
    parts = answer if stream else [answer]
    assert parts[-1]["done_reason"] == "length"
    shown = [part["message"] for part in parts]
    calls = [call["function"]["arguments"] for one in shown for call in one.get("tool_calls", ())]
    return "".join(one["content"] for one in shown), [orjson.dumps(arguments).decode() for arguments in calls]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", [chat, messages, responses, ollama])
def test_a_cut_call_is_not_shown_as_text(api: Any, stream: bool) -> None:
    for text in HEADS:
        content, calls = api(text, stream)
        assert content.strip() == "Well."
        assert [orjson.loads(call) for call in calls] == [{"a": 1}] * text.count("</tool_call>")
    content, calls = api(IN_ARGUMENTS, stream)
    assert content.strip() == "Well."
    shows_parts = api in (chat, responses) or (api is messages and stream)
    assert [call.replace(" ", "") for call in calls] == (['{"a":'] if shows_parts else [])
