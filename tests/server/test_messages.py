"""Anthropic's Messages API over the fake engine."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from fakes import FakeEngine, post, typed_events
from test_chat_api import CALLING, HERMES

USER = {"role": "user", "content": "Hi"}
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {"a": {}}}}
BASE: dict[str, Any] = {"model": "m", "max_tokens": 200, "messages": [USER]}


def ask(body: dict[str, Any], engine: FakeEngine | None = None, path: str = "/v1/messages") -> Any:
    answer = post(path, body, engine, source=HERMES)[1]
    return typed_events(answer) if isinstance(answer, str) else answer


def prompt(body: dict[str, Any]) -> str:
    """Return the prompt of a body as text."""
    engine = FakeEngine()
    assert ask({**BASE, **body}, engine)["type"] == "message"
    return bytes(engine.requests[0].prompt).decode()


def test_reasoning_text_and_calls_are_blocks() -> None:
    answer = ask({**BASE, "tools": [TOOL]}, FakeEngine(CALLING))
    thinking, text, use = answer["content"]
    assert thinking == {"type": "thinking", "thinking": "hm", "signature": ""}
    assert text["text"].strip() == "Well."
    assert (use["type"], use["name"], use["input"]) == ("tool_use", "f", {"a": 1}) and use["id"]
    assert (answer["role"], answer["stop_reason"], answer["stop_sequence"]) == ("assistant", "tool_use", None)
    assert set(answer["usage"]) == {"input_tokens", "cache_read_input_tokens", "output_tokens"}


def test_events_of_a_stream() -> None:
    found = ask({**BASE, "tools": [TOOL], "stream": True}, FakeEngine(CALLING))
    kinds = [event["type"] for event in found]
    once = [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert once == ["message_start", "ping", *block, *block, *block, "message_delta", "message_stop"]
    starts = [event for event in found if event["type"] == "content_block_start"]
    assert [(e["index"], e["content_block"]["type"]) for e in starts] == [(0, "thinking"), (1, "text"), (2, "tool_use")]
    deltas = [event["delta"] for event in found if event["type"] == "content_block_delta"]
    assert "".join(d.get("thinking", "") for d in deltas) == "hm"
    assert "".join(d.get("text", "") for d in deltas).strip() == "Well."
    assert orjson.loads("".join(d.get("partial_json", "") for d in deltas)) == {"a": 1}
    assert [d["type"] for d in deltas if d["type"] == "signature_delta"] == ["signature_delta"]
    assert found[-2]["delta"]["stop_reason"] == "tool_use" and found[-2]["usage"]["output_tokens"] > 0


@pytest.mark.parametrize(
    ("body", "reason", "word"),
    [
        ({}, "end_turn", None),
        ({"max_tokens": 2}, "max_tokens", None),
        ({"stop_sequences": ["All", "zz"]}, "stop_sequence", "All"),
    ],
)
def test_stop_reasons(body: dict[str, Any], reason: str, word: str | None) -> None:
    answer = ask({**BASE, **body})
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, word)


def test_blocks_become_a_conversation() -> None:
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "42"}]}
    text = prompt(
        {
            "system": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
            "messages": [USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}],
            "tools": [TOOL],
        }
    )
    order = [text.index(part) for part in ("Be brief.", "Hi", '<tool_call>{"name": "f"', "42<|im_end|>")]
    assert order == sorted(order)


def test_claude_codes_billing_line_does_not_change_the_prompt() -> None:
    header = "x-anthropic-billing-header: cc_version=2.1; cch={};You are"
    assert prompt({"system": header.format("a5145")}) == prompt({"system": header.format("0f00d")})


@pytest.mark.parametrize(
    ("choice", "limited"),
    [({"type": "any"}, True), ({"type": "tool", "name": "f"}, True), ({"type": "none"}, False)],
)
def test_tool_choice(choice: dict[str, Any], limited: bool) -> None:
    engine = FakeEngine()
    ask({**BASE, "tools": [TOOL], "tool_choice": choice}, engine)
    constraint: Any = engine.requests[0].constraint
    assert (constraint is not None) == limited


def test_a_reasoning_budget() -> None:
    engine = FakeEngine()
    ask({**BASE, "thinking": {"type": "enabled", "budget_tokens": 5}}, engine)
    assert engine.requests[0].constraint.tags["budget"] == 5  # type: ignore[union-attr]
    assert "<think></think>" in prompt({"thinking": {"type": "disabled"}})


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize("body", [{}, {"messages": "x"}, {"messages": [3]}, {"messages": [{"content": "x"}]}])
def test_errors_have_anthropics_form(body: dict[str, Any], path: str) -> None:
    answer = ask(body, path=path)
    assert answer["type"] == "error" and answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["message"] and answer["error"]["code"] == 400


def test_an_error_in_a_stream_is_an_event() -> None:
    engine = FakeEngine()
    engine.fail, engine.fail_after = RuntimeError("out of luck"), 2
    last = ask({**BASE, "stream": True}, engine)[-1]
    assert last["type"] == "error" and last["error"]["type"] == "api_error"


def test_tokens_are_counted() -> None:
    assert ask(BASE, path="/v1/messages/count_tokens") == {"input_tokens": len(prompt({}).encode())}


@pytest.mark.parametrize("n_cached", [0, 3])
def test_cached_tokens_are_counted_separately(n_cached: int) -> None:
    """`input_tokens` are the computed ones, also in the first event of a stream."""

    def engine() -> FakeEngine:
        fake = FakeEngine("yes")
        fake.n_cached = n_cached
        return fake

    first = engine()
    answer = ask(BASE, first)
    n_prompt = len(first.requests[0].prompt)
    expected = {"cache_read_input_tokens": n_cached, "input_tokens": n_prompt - n_cached}
    assert answer["usage"] == {**expected, "output_tokens": 3}
    stream = ask({**BASE, "stream": True}, engine())
    assert stream[0]["message"]["usage"] == {**expected, "output_tokens": 0}
    (last,) = (event for event in stream if event["type"] == "message_delta")
    assert last["usage"] == {**expected, "output_tokens": 3}
    chat = ask({"messages": [USER]}, engine(), "/v1/chat/completions")["usage"]
    assert (chat["prompt_tokens"], chat["prompt_tokens_details"]) == (n_prompt, {"cached_tokens": n_cached})
    usage = ask({"input": "Hi"}, engine(), "/v1/responses")["usage"]
    assert (usage["input_tokens"], usage["input_tokens_details"]) == (n_prompt, {"cached_tokens": n_cached})


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_at_the_length_limit_is_left_out(stream: bool) -> None:
    answer = ask({**BASE, "tools": [TOOL], "stream": stream, "max_tokens": len(CALLING)}, FakeEngine(CALLING + "x"))
    last = next(event for event in answer if event["type"] == "message_delta")["delta"] if stream else answer
    assert last["stop_reason"] == "max_tokens"
    kinds = [event["content_block"]["type"] for event in answer if "content_block" in event] if stream else []
    assert "tool_use" in (kinds or [block["type"] for block in answer["content"]])
