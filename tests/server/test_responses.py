"""OpenAI's Responses API over the fake engine."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from fakes import FakeEngine, post, typed_events
from test_chat_api import CALLING, HERMES, TOOL

from llamado.server.api.responses import responses_to_chat

FLAT_TOOL = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]


def ask(body: dict[str, Any], engine: FakeEngine | None = None, path: str = "/v1/responses") -> Any:
    answer = post(path, body, engine, source=HERMES)[1]
    return typed_events(answer) if isinstance(answer, str) else answer


def prompt(body: dict[str, Any]) -> str:
    """Return the prompt of a body as text."""
    engine = FakeEngine()
    answer = ask(body, engine)
    assert "error" not in answer or answer["error"] is None, answer
    return bytes(engine.requests[0].prompt).decode()


def test_reasoning_text_and_calls_are_items() -> None:
    answer = ask({"input": "Hi", "tools": [FLAT_TOOL]}, FakeEngine(CALLING))
    reasoning, message, call = answer["output"]
    assert (answer["object"], answer["status"]) == ("response", "completed")
    assert reasoning["type"] == "reasoning" and reasoning["content"][0]["text"] == "hm"
    assert message["content"][0]["text"].strip() == "Well." and message["role"] == "assistant"
    assert call["type"] == "function_call" and call["name"] == "f" and orjson.loads(call["arguments"]) == {"a": 1}
    assert answer["usage"]["total_tokens"] == answer["usage"]["input_tokens"] + answer["usage"]["output_tokens"]


def test_events_come_in_order_and_are_numbered() -> None:
    found = ask({"input": "Hi", "tools": [FLAT_TOOL], "stream": True}, FakeEngine(CALLING))
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    kinds = [event["type"].removeprefix("response.") for event in found]
    once = [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]
    assert once == [
        "created", "in_progress",
        "output_item.added", "reasoning_text.delta", "reasoning_text.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    added = [event for event in found if event["type"] == "response.output_item.added"]
    assert [event["output_index"] for event in added] == [0, 1, 2]
    done = found[-1]["response"]
    whole = ask({"input": "Hi", "tools": [FLAT_TOOL]}, FakeEngine(CALLING))
    assert [item["type"] for item in done["output"]] == [item["type"] for item in whole["output"]]
    assert done["output"][1]["content"] == whole["output"][1]["content"]
    text = "".join(event["delta"] for event in found if event["type"] == "response.output_text.delta")
    assert text == done["output"][1]["content"][0]["text"]


def test_a_cut_off_answer_is_incomplete() -> None:
    answer = ask({"input": "Hi", "max_output_tokens": 2})
    assert answer["status"] == "incomplete" and answer["incomplete_details"] == {"reason": "max_output_tokens"}
    found = ask({"input": "Hi", "max_output_tokens": 2, "stream": True})
    assert found[-1]["type"] == "response.incomplete"


def test_items_become_a_conversation() -> None:
    user = {"role": "user", "content": "Hi"}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'}
    output = {"type": "function_call_output", "call_id": "c", "output": "3"}
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So."}]}
    text = prompt({"instructions": "Be brief.", "input": [user, message, call, output], "tools": [FLAT_TOOL]})
    order = [text.index(part) for part in ("Be brief.", "Hi", "So.", '<tool_call>{"name": "f"', "3<|im_end|>")]
    assert order == sorted(order) and text.count("<|im_start|>assistant") == 2


def test_a_second_turn_of_an_agent() -> None:
    """Codex sends back items of hosted tools, and encrypted or summarized reasoning."""
    body = {
        "input": [
            {"role": "user", "content": "Fix it"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA", "content": None},
            {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "It is red"}]},
            {"type": "item_reference", "id": "rs_3"},
            {"type": "web_search_call", "id": "ws_1", "status": "completed"},
            {"type": "custom_tool_call", "call_id": "1", "name": "apply_patch", "input": "*** Begin"},
            {"type": "custom_tool_call_output", "call_id": "1", "output": "Done"},
            {"type": "local_shell_call", "call_id": "2", "action": {"type": "exec", "command": ["ls", "-l"]}},
            {"type": "local_shell_call_output", "id": "2", "output": "total 0"},
            {"role": "user", "content": "And now?"},
        ]
    }
    answer = prompt(body)
    assert responses_to_chat(body)["messages"][1]["reasoning_content"] == "It is red"
    for text in ("apply_patch", "*** Begin", "Done", "local_shell", '"ls"', "total 0", "And now?"):
        assert text in answer, text
    assert "gAAA" not in answer


@pytest.mark.parametrize(
    "item",
    [
        {"type": "custom_tool_call", "call_id": "1", "name": "f", "input": 5},
        {"type": "custom_tool_call", "name": "f", "input": "x"},
        {"type": "local_shell_call", "call_id": "1", "action": "ls"},
        {"type": "custom_tool_call_output", "output": "x"},
        {"type": "no_such_call", "call_id": "1"},
        {"type": "item_reference", "id": "msg_1"},
    ],
)
def test_unknown_items_are_a_400(item: dict[str, Any]) -> None:
    answer = ask({"input": [{"role": "user", "content": "x"}, item]})
    assert answer["error"]["code"] == 400
    assert ("msg_1" if item["type"] == "item_reference" else "Cannot determine type") in answer["error"]["message"]


def test_a_schema_of_the_text() -> None:
    engine = FakeEngine('{"a": 1}')
    form = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
    ask({"input": "Hi", "text": {"format": form}}, engine)
    assert "object" in engine.requests[0].constraint.source.text  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "'input' is required"),
        ({"input": 3}, "'input' must be"),
        ({"input": [3]}, "Cannot determine type"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "tools": "y"}, "'tools' must be"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input_file"),
        ({"input": [{"type": "reasoning", "summary": [], "content": []}]}, "empty"),
    ],
)
def test_bad_bodies(body: dict[str, Any], message: str) -> None:
    error = ask(body)["error"]
    assert error["code"] == 400 and message in error["message"]


@pytest.mark.slow
def test_tokens_are_counted() -> None:
    body = {"input": "Hi"}
    expected = {"input_tokens": len(prompt(body).encode()), "object": "response.input_tokens"}
    assert ask(body, path="/v1/responses/input_tokens") == ask(body, path="/responses/input_tokens") == expected


def test_an_error_in_a_stream_is_an_event() -> None:
    engine = FakeEngine()
    engine.fail, engine.fail_after = RuntimeError("out of luck"), 2
    found = ask({"input": "Hi", "stream": True}, engine)
    assert found[-1]["type"] == "error" and "out of luck" in found[-1]["message"]
