"""Tool calls, reasoning and constraints in OpenAI's chat API, over the fake engine."""

from __future__ import annotations

import asyncio
from typing import Any

import fakes
import orjson
import pytest
from fakes import FakeConstraint, FakeEngine, client, events, post

USER = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
# A template of the Hermes family with reasoning.
HERMES = """
{%- if tools %}<tools>{{ tools | tojson }}</tools> <tool_call>{"name": N, "arguments": A}</tool_call>{% endif -%}
{%- for m in messages -%}
  <|im_start|>{{ m.role }}
  {%- if m.content is string and '</think>' in m.content %}{{ m.content.split('</think>')[-1] }}
  {%- else %}{{ m.content }}{% endif %}
  {%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor -%}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif -%}
"""
CALLING = '<think>hm</think>Well.<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def ask(body: dict[str, Any], engine: FakeEngine, path: str = "/v1/chat/completions", **options: Any) -> Any:
    """Return the JSON of one answer, or the data of a stream's events."""
    answer = post(path, {"messages": USER} | body, engine, source=HERMES, **options)[1]
    return [orjson.loads(e) for e in events(answer) if e != "[DONE]"] if isinstance(answer, str) else answer


def test_reasoning_content_and_calls() -> None:
    choice = ask({"tools": [TOOL]}, FakeEngine(CALLING))["choices"][0]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["reasoning_content"] == "hm" and message["content"].strip() == "Well."
    (call,) = message["tool_calls"]
    assert call["type"] == "function" and call["id"] and call["function"]["name"] == "f"
    assert orjson.loads(call["function"]["arguments"]) == {"a": 1}


def test_a_stream_has_the_same_in_deltas() -> None:
    chunks = ask({"tools": [TOOL], "stream": True}, FakeEngine(CALLING))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "hm"
    assert "".join(d.get("content") or "" for d in deltas).strip() == "Well."
    calls = [d["tool_calls"][0] for d in deltas if "tool_calls" in d]
    assert calls[0]["function"]["name"] == "f" and calls[0]["id"] and all("id" not in call for call in calls[1:])
    assert orjson.loads("".join(call["function"].get("arguments", "") for call in calls)) == {"a": 1}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_at_the_length_limit_has_finish_reason_length(stream: bool) -> None:
    """Clients must see that more calls may have been cut off."""
    body = {"tools": [TOOL], "stream": stream, "max_tokens": len(CALLING)}
    answer = ask(body, FakeEngine(CALLING + "x"))
    if stream:
        assert any("tool_calls" in chunk["choices"][0]["delta"] for chunk in answer)
        assert answer[-1]["choices"][0]["finish_reason"] == "length"
    else:
        assert answer["choices"][0]["message"]["tool_calls"]
        assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("n", [1, 3])
def test_the_usage_of_a_stream_is_that_of_all_its_answers(n: int) -> None:
    """Usage comes once, in the last event, and counts the prompt once, as in an answer that is not streamed."""
    engines = [FakeEngine("yes"), FakeEngine("yes")]
    for engine in engines:
        engine.n_cached = 2
    chunks = ask({"n": n, "stream": True, "stream_options": {"include_usage": True}}, engines[0])
    n_prompt = len(engines[0].requests[0].prompt)
    assert [chunk["usage"] for chunk in chunks if "usage" in chunk] == [chunks[-1]["usage"]]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {
        "completion_tokens": 3 * n,
        "prompt_tokens": n_prompt,
        "total_tokens": 3 * n + n_prompt,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert ask({"n": n}, engines[1])["usage"] == chunks[-1]["usage"]


def test_reasoning_format_none_keeps_reasoning_in_the_content() -> None:
    message = ask({"reasoning_format": "none"}, FakeEngine("<think>hm</think>Yes"))["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "<think>hm</think>Yes"}


def test_chat_parsing_can_be_turned_off() -> None:
    engine = FakeEngine(CALLING)
    message = ask({"tools": [TOOL]}, engine, skip_chat_parsing=True)["choices"][0]["message"]
    assert message == {"role": "assistant", "content": CALLING}
    assert engine.requests[0].constraint is None


def test_required_calls_are_constrained_by_a_grammar() -> None:
    engine = FakeEngine(CALLING)
    ask({"tools": [TOOL], "tool_choice": "required"}, engine)
    assert isinstance(engine.requests[0].constraint, FakeConstraint)


def test_a_named_tool_must_exist() -> None:
    body = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}
    answer = ask(body, FakeEngine())
    assert answer["error"]["code"] == 400 and "'g'" in answer["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}},
        {"response_format": {"type": "json_schema", "schema": {"type": "object"}}},
        {"json_schema": {}},
    ],
)
def test_schemas_constrain_the_content(body: dict[str, Any]) -> None:
    engine = FakeEngine('{"a": 1}')
    ask(body, engine)
    source = engine.requests[0].constraint.source  # type: ignore[union-attr]
    assert source.kind in ("json_schema", "lark") and "object" in source.text


def test_an_invalid_schema_is_named() -> None:
    answer = ask({"response_format": {"type": "json_schema", "schema": {"bad": 1}}}, FakeEngine())
    assert answer["error"]["code"] == 400 and "bad grammar" in answer["error"]["message"]


def test_a_reasoning_budget() -> None:
    engine = FakeEngine("<think>hm</think>Yes")
    ask({"reasoning_budget_tokens": 7, "reasoning_budget_message": "Enough."}, engine)
    tags = engine.requests[0].constraint.tags  # type: ignore[union-attr]
    assert (tags["start"], tags["end"], tags["budget"], tags["message"]) == ("<think>", "</think>", 7, "Enough.")
    engine = FakeEngine("Yes")
    ask({"reasoning_budget_tokens": 7, "reasoning_effort": "none"}, engine)
    assert engine.requests[0].constraint is None  # the prompt has closed the reasoning


@pytest.mark.slow
async def test_a_client_can_end_the_reasoning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamado.server.generate.request.random_id", lambda: "1")

    engine = FakeEngine("<think>" + "x" * 200, delay=0.01)
    async with client(engine, source=HERMES) as http:

        async def end(id: str) -> Any:
            body = {"id": id, "action": "reasoning_end"}
            return (await http.post("/v1/chat/completions/control", json=body)).json()

        assert await end("chatcmpl-1") == {"success": False, "message": "no active completion for this id"}
        body = {"messages": USER, "stream": True, "reasoning_control": True}
        task = asyncio.ensure_future(http.post("/v1/chat/completions", json=body))
        while not engine.requests:
            await asyncio.sleep(0.01)
        constraint: Any = engine.requests[0].constraint
        assert await end("chatcmpl-1") == {"success": True} and constraint.ended == 1
        assert constraint.tags["budget"] == -1
        task.cancel()


def test_echo_begins_a_stream_with_the_prefill() -> None:
    messages = [*USER, {"role": "assistant", "content": "Sure: "}]
    chunks = ask({"messages": messages, "stream": True, "echo": True}, FakeEngine("yes"))
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert text == "Sure: yes"
    whole = ask({"messages": messages}, FakeEngine("yes"))
    assert whole["choices"][0]["message"]["content"] == "Sure: yes"


def test_verbose_answers_have_their_native_form() -> None:
    native = ask({"verbose": True}, FakeEngine("yes"))["__verbose"]
    assert native["content"] == "yes" and native["generation_settings"]["chat_format"] != "Content-only"
    assert native["prompt"].endswith("<|im_start|>assistant")


def test_tokens_are_counted() -> None:
    answer = ask({}, FakeEngine(), "/v1/chat/completions/input_tokens")
    prompt = ask({}, FakeEngine(), "/apply-template")["prompt"]
    assert answer == {"input_tokens": len(prompt.encode()), "object": "response.input_tokens"}


def test_a_text_that_cannot_fit_is_refused_before_tokenizing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        fakes.FakeTokenizer, "encode", lambda self, text, **_: [0] if len(text) < 100 else pytest.fail()
    )
    for path, body in (("/completion", {"prompt": "x" * 20_000}), ("/v1/chat/completions", {})):
        messages = [{"role": "user", "content": "x" * 20_000}]
        error = ask({**body, "messages": messages}, FakeEngine(), path)["error"]
        assert error["type"] == "exceed_context_size_error" and "at least" in error["message"]


def test_deep_json_is_refused() -> None:
    def deep(levels: int) -> Any:
        schema: Any = {}
        for _ in range(levels):
            schema = {"items": schema}
        return schema

    for body in (
        {"json_schema": deep(900)},
        {"tools": [{**TOOL, "x": deep(900)}]},
        {"chat_template_kwargs": {"x": deep(900)}},
        {"prompt": "x", "json_schema": deep(900)},
    ):
        answer = ask(body, FakeEngine(), "/completion" if "prompt" in body else "/v1/chat/completions")
        assert answer["error"]["code"] == 400 and "200 levels" in answer["error"]["message"]
    assert "choices" in ask({"json_schema": deep(150)}, FakeEngine())


def test_logprobs_of_a_stream_with_tools() -> None:
    body = {"tools": [TOOL], "stream": True, "logprobs": True, "top_logprobs": 1}
    chunks = ask(body, FakeEngine(CALLING))
    deltas = [choice for chunk in chunks for choice in chunk["choices"]]
    shown = [one["token"] for delta in deltas for one in (delta.get("logprobs") or {"content": []})["content"]]
    assert "".join(shown) == CALLING
    assert any("tool_calls" in delta["delta"] for delta in deltas)


@pytest.mark.slow
@pytest.mark.parametrize("switched", [False, True])
def test_places_of_the_native_form(switched: bool) -> None:
    """Set by the request or, by default, by `--verbosity 10`. As in llama-server, it is in each chunk of a completion's
    stream, in the first of the last chunks of a chat's, and not in other APIs."""

    def send(body: dict[str, Any], path: str) -> Any:
        return ask(body if switched else {**body, "verbose": True}, FakeEngine("yes"), path, verbose=switched)

    parts = send({"prompt": "a", "stream": True, "return_progress": True}, "/v1/completions")
    assert [part["__verbose"]["stop"] for part in parts] == [False] * 4 + [True]
    assert parts[0]["__verbose"]["prompt_progress"] == parts[0]["prompt_progress"]
    assert [part["__verbose"]["content"] for part in parts[1:4]] == ["y", "e", "s"]
    parts = send({"stream": True}, "/v1/chat/completions")
    assert [part["__verbose"]["stop"] for part in parts if "__verbose" in part] == [True]
    assert send({"prompt": "a"}, "/v1/completions")["__verbose"]["content"] == "yes"
    for path in ("/v1/messages", "/v1/responses", "/completion"):
        assert "__verbose" not in send({"prompt": "a", "input": "a", "max_tokens": 9}, path)
    silent = ask({"verbose": False}, FakeEngine("yes"), verbose=True)
    assert "__verbose" not in silent and "choices" in silent
