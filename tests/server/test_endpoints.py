"""Requests and responses of every endpoint in the form of llama-server b11434."""

from __future__ import annotations

import math
import re
from typing import Any

import orjson
import pytest
from fakes import ANSWER, FakeEngine, client, events, get, post

from llamado.engine.errors import ComputeFailed, Unavailable
from llamado.engine.request import Away, Fault

USER = [{"role": "user", "content": "Hi"}]
# Keys of responses of llama-server b11434.
RESULT_KEYS = {
    "index", "content", "tokens", "id_slot", "stop", "model", "tokens_predicted", "tokens_evaluated",
    "generation_settings", "prompt", "has_new_line", "truncated", "stop_type", "stopping_word", "tokens_cached",
    "timings",
}  # fmt: skip
PART_KEYS = {"index", "content", "tokens", "stop", "id_slot", "tokens_predicted", "tokens_evaluated"}
TIMING_KEYS = {
    "cache_n", "prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second", "predicted_n", "predicted_ms",
    "predicted_per_token_ms", "predicted_per_second",
}  # fmt: skip


def error(type: str, status: int, message: str) -> tuple[int, Any]:
    return status, {"error": {"code": status, "message": message, "type": type}}


# -- native ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/completion", "/completions"])
def test_completion(path: str) -> None:
    status, body = post(path, {"prompt": "hi", "n_predict": 5, "return_tokens": True})
    assert status == 200
    assert set(body) == RESULT_KEYS
    assert set(body["timings"]) == TIMING_KEYS
    assert body["content"] == "Hello" and body["tokens"] == list(b"Hello")
    assert body["stop"] is True and body["stop_type"] == "limit"
    assert body["prompt"] == "hi" and body["tokens_evaluated"] == 2 and body["tokens_predicted"] == 5
    assert body["model"] == "fake" and body["generation_settings"]["n_predict"] == 5


def test_tokens_are_returned_only_on_request() -> None:
    assert post("/completion", {"prompt": "hi"})[1]["tokens"] == []


def test_stop_word_ends_the_answer() -> None:
    _, body = post("/completion", {"prompt": "hi", "stop": ["wör", ""]})
    assert (body["content"], body["stop_type"], body["stopping_word"]) == ("Hello, ", "word", "wör")


def test_stream_parts_and_final() -> None:
    status, text = post("/completion", {"prompt": "hi", "n_predict": 3, "stream": True})
    parts = [orjson.loads(e) for e in events(text)]
    assert status == 200 and text.endswith("\n\n") and "[DONE]" not in text
    assert [set(p) for p in parts[:-1]] == [PART_KEYS] * 3
    assert [p["content"] for p in parts] == ["H", "e", "l", ""]
    assert [p["tokens"] for p in parts] == [[72], [101], [108], []]
    assert [p["tokens_predicted"] for p in parts] == [1, 2, 3, 3]
    assert set(parts[-1]) == RESULT_KEYS and parts[-1]["stop"] is True


def test_stream_gives_the_whole_answer_and_never_half_a_character() -> None:
    _, text = post("/completion", {"prompt": "hi", "stream": True})
    assert "".join(orjson.loads(e)["content"] for e in events(text)) == ANSWER


def test_stream_progress_and_timings() -> None:
    body = {"prompt": "hi", "n_predict": 1, "stream": True, "return_progress": True, "timings_per_token": True}
    parts = [orjson.loads(e) for e in events(post("/completion", body)[1])]
    assert parts[0]["prompt_progress"] == {"total": 2, "cache": 0, "processed": 2, "time_ms": 1}
    assert set(parts[1]["timings"]) == TIMING_KEYS


@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_progress_has_timings_with_timings_per_token(path: str) -> None:
    given = {"prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "input": "hi", "stream": True}
    for wanted in (False, True):
        _, text = post(path, {**given, "return_progress": True, "timings_per_token": wanted})
        parts = [orjson.loads(e) for e in re.findall(r"^data: (\{.*)$", text, re.MULTILINE)]
        (progress,) = [part for part in parts if "prompt_progress" in part]
        assert set(progress.get("timings", {})) == (TIMING_KEYS if wanted else set())


@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions", "/v1/messages"])
def test_booleans_may_be_strings(path: str) -> None:
    given = {"prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    for spelled in (True, False, "true", "false"):
        _, answer = post(path, {**given, "stream": spelled}, FakeEngine("a"))
        assert isinstance(answer, str) == (spelled in (True, "true")), spelled
    assert post(path, {**given, "stream": "yes"})[0] == 400


def test_ollamas_stream_may_be_a_string() -> None:
    body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "stream": "false"}
    assert post("/api/chat", body, FakeEngine("a"))[1]["done"] is True


def test_echo_shows_the_prompt_with_its_probabilities() -> None:
    """Evaluation harnesses sum the log-probabilities of the tokens of a text."""
    engine = FakeEngine("yz")
    body = {"prompt": ["ab", [99, 100, 101]], "echo": True, "logprobs": 1, "max_tokens": 1, "n": 2}
    status, answer = post("/v1/completions", body, engine)
    assert status == 200 and [choice["text"] for choice in answer["choices"]] == ["aby", "aby", "cdey", "cdey"]
    logprobs = answer["choices"][0]["logprobs"]
    quarter, half = math.log(0.25), math.log(0.5)
    assert logprobs["tokens"] == ["a", "b", "y"] and logprobs["text_offset"] == [0, 1, 2]
    assert logprobs["token_logprobs"] == [None, quarter, half]
    assert logprobs["top_logprobs"] == [None, {"b": quarter}, {"y": half}]
    assert [(one["token"], one["logprob"]) for one in logprobs["content"]] == [("a", None), ("b", quarter), ("y", half)]
    assert all(request.params.prompt_probs and not request.params.cache_prompt for request in engine.requests)
    alone = post("/v1/completions", {**body, "max_tokens": 0}, FakeEngine(""))[1]["choices"][3]
    assert alone["text"] == "cde" and alone["logprobs"]["token_logprobs"] == [None, quarter, quarter]


def test_a_stream_begins_with_the_prompt_and_its_probabilities() -> None:
    body = {"prompt": ["ab", "cde"], "echo": True, "logprobs": 1, "max_tokens": 2}
    whole = post("/v1/completions", body, FakeEngine("yz"))[1]["choices"]
    _, text = post("/v1/completions", {**body, "stream": True}, FakeEngine("yz"))
    choices = [orjson.loads(part)["choices"][0] for part in events(text) if part != "[DONE]"]
    for index in range(2):
        parts = [choice for choice in choices if choice["index"] == index]
        assert [part["text"] for part in parts] == [body["prompt"][index], "y", "z", ""]
        lists = [part["logprobs"] for part in parts if part["logprobs"]]
        assert {name: [one for part in lists for one in part[name]] for name in lists[0]} == whole[index]["logprobs"]
        assert lists[0]["token_logprobs"][0] is None
    _, text = post("/v1/completions", {**body, "stream": True, "max_tokens": 0}, FakeEngine(""))
    choices = [orjson.loads(part)["choices"][0] for part in events(text) if part != "[DONE]"]
    assert [choice["text"] for choice in choices] == ["ab", "", "cde", ""]
    assert choices[0]["logprobs"]["tokens"] == ["a", "b"] and choices[1]["finish_reason"]


def test_echo_of_an_empty_prompt() -> None:
    body = {"prompt": ["", "a"], "echo": True, "logprobs": 2, "max_tokens": 2}
    status, answer = post("/v1/completions", body, FakeEngine("yz"))
    assert status == 200, answer
    first, second = answer["choices"]
    assert first["text"] == "" and first["logprobs"]["tokens"] == first["logprobs"]["content"] == []
    assert second["logprobs"]["tokens"] == ["a", "y", "z"]


def test_echo_without_probabilities() -> None:
    assert post("/v1/completions", {"prompt": "ab", "echo": True}, FakeEngine("y"))[1]["choices"][0]["text"] == "aby"
    _, text = post("/v1/completions", {"prompt": "ab", "echo": True, "stream": True}, FakeEngine("yz"))
    parts = [orjson.loads(part)["choices"][0]["text"] for part in events(text) if part != "[DONE]"]
    assert "".join(parts) == "abyz"
    assert post("/completion", {"prompt": "ab", "echo": True}, FakeEngine("y"))[1]["content"] == "y"


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_has_a_limited_number_of_probabilities(stream: bool) -> None:
    body = {"prompt": "a" * 4000, "echo": True, "logprobs": 257, "max_tokens": 1, "n": 2}
    status, answer = post("/v1/completions", {**body, "stream": stream})
    assert status == 400 and "'logprobs'" in answer["error"]["message"]


def test_one_model() -> None:
    status, body = get("/v1/models/fake")
    assert status == 200 and body == get("/v1/models")[1]["data"][0] | {"created": body["created"]}
    assert get("/v1/models/no/such") == error("not_found_error", 404, "model 'no/such' not found")


def test_several_prompts_give_a_list() -> None:
    _, body = post("/completion", {"prompt": ["a", [98, 99], ["d", 101]], "n_predict": 1})
    assert [(r["index"], r["prompt"]) for r in body] == [(0, "a"), (1, "bc"), (2, "de")]


def test_n_is_limited_by_the_slots() -> None:
    message = "Field 'n': Value must be between 1 <= value <= 4, but got 99"
    assert post("/completion", {"prompt": "a", "n": 99}) == error("invalid_request_error", 400, message)


def test_probabilities() -> None:
    body = {"prompt": "a", "n_predict": 1, "n_probs": 2}
    (entry,) = post("/completion", body)[1]["completion_probabilities"]
    assert set(entry) == {"id", "token", "bytes", "logprob", "top_logprobs"}
    assert entry["bytes"] == [72] and entry["top_logprobs"][1]["logprob"] == pytest.approx(-3.4028e38, rel=1e-3)
    (entry,) = post("/completion", {**body, "post_sampling_probs": True})[1]["completion_probabilities"]
    assert set(entry) == {"id", "token", "bytes", "prob", "top_probs"}


def test_response_fields() -> None:
    body = {"prompt": "a", "n_predict": 1, "response_fields": ["content", "generation_settings/n_predict", "nothing"]}
    assert post("/completion", body)[1] == {"content": "H", "generation_settings/n_predict": 1}


def test_empty_prompt_gets_an_empty_answer() -> None:
    status, body = post("/completion", {"prompt": ""})
    assert status == 200 and set(body) == RESULT_KEYS
    assert (body["content"], body["tokens_evaluated"], body["tokens_predicted"]) == ("", 0, 0)


BAD_PROMPT = (
    '"prompt" elements must be a string, a list of tokens, a JSON object containing a prompt string, or a list of '
    "mixed strings & tokens."
)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "key 'prompt' not found"),
        ({"prompt": []}, '"prompt" must not be empty'),
        ({"prompt": 5}, BAD_PROMPT),
        ({"prompt": [1.5, 2.5]}, BAD_PROMPT),
        ({"prompt": {"a": 1}}, BAD_PROMPT),
        ({"prompt": [1, 999999]}, "Prompt contains invalid tokens"),
        ({"prompt": "a", "n_predict": "x"}, "Field 'n_predict': type must be number, but is string"),
        ({"prompt": "a", "stream": "yes"}, "Field 'stream': type must be boolean, but is string"),
        ({"prompt": "a", "stop": [5]}, "Field 'stop': type must be string, but is number"),
        (
            {"prompt": "a", "n_predict": -5},
            "Field 'n_predict': Value must be between -1 <= value <= 2147483647, but got -5",
        ),
        (b"{bad", "parse error at line 1, column 2"),
        (b"", "parse error at line 1, column 1"),
        (b'{"prompt": "\xff"}', "parse error at line 1"),
        (b'{"prompt": "\\ud800"}', "parse error at line 1"),
        (b'{"prompt": NaN}', "parse error at line 1"),
        (b"[" * 5000, "parse error at line 1"),
        (b'"text"', "must be a JSON object"),
    ],
)
def test_bad_requests(body: Any, message: str) -> None:
    status, answer = post("/completion", body)
    assert status == 400 and answer["error"]["type"] == "invalid_request_error"
    assert message in answer["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_longer_than_the_context(stream: bool) -> None:
    status, body = post("/completion", {"prompt": "a" * 5000, "stream": stream})
    assert status == 400
    assert body["error"] == {
        "code": 400,
        "message": "request (5000 tokens) exceeds the available context size (4096 tokens), try increasing it",
        "type": "exceed_context_size_error",
        "n_prompt_tokens": 5000,
        "n_ctx": 4096,
    }


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        ({"grammar": 'root ::= "x"'}, "gbnf", 'root ::= "x"'),
        ({"json_schema": {}}, "json_schema", '{"type":"object"}'),
        ({"json_schema": {"type": "array"}, "grammar": None}, "json_schema", '{"type":"array"}'),
    ],
)
def test_grammars_reach_the_engine(body: dict[str, Any], kind: str, text: str) -> None:
    engine = FakeEngine()
    status, answer = post("/completion", {"prompt": "a", **body}, engine)
    source = engine.requests[0].constraint.source  # type: ignore[union-attr]
    assert status == 200 and (source.kind, source.text) == (kind, text)
    assert answer["generation_settings"]["grammar"] == text


def test_a_bad_grammar_is_named_with_its_field() -> None:
    for name, value in (("grammar", "bad"), ("json_schema", {"bad": 1})):
        status, answer = post("/completion", {"prompt": "a", name: value})
        assert status == 400 and answer["error"]["message"] == f"Field '{name}': a bad grammar"


def test_lazy_grammars_begin_at_triggers() -> None:
    engine = FakeEngine()
    triggers = [{"type": 1, "value": "a"}, {"type": 1, "value": "<tool>"}, {"type": 2, "value": "x+"}]
    body = {"prompt": "p", "grammar": "g", "grammar_lazy": True, "grammar_triggers": triggers}
    status, answer = post("/completion", body)
    assert status == 400 and "should be marked as preserved token: a" in answer["error"]["message"]
    status, answer = post("/completion", {**body, "preserved_tokens": ["a", "not one token"]}, engine)
    assert status == 200
    found = [(t.kind, t.value, t.token) for t in engine.requests[0].constraint.triggers]  # type: ignore[union-attr]
    assert found == [("token", "a", 97), ("word", "<tool>", -1), ("pattern", "x+", -1)]
    settings = answer["generation_settings"]
    assert settings["grammar_lazy"] is True and settings["preserved_tokens"] == [97]
    assert settings["grammar_triggers"][0] == {"type": 0, "value": "a", "token": 97}
    status, answer = post("/completion", {**body, "grammar_triggers": []})
    assert status == 400 and "no triggers set for lazy grammar" in answer["error"]["message"]


@pytest.mark.slow
def test_missing_adapters_are_shown() -> None:
    status, answer = post("/completion", {"prompt": "a", "lora": [{"id": 1, "scale": 0.5}, {"id": 0}]})
    assert status == 200
    assert answer["generation_settings"]["lora"] == [{"id": 0, "scale": 0.0}, {"id": 1, "scale": 0.5}]
    assert post("/completion", {"prompt": "a", "lora": 1})[0] == 400


@pytest.mark.parametrize("stream", [False, True])
def test_engine_failure_is_an_error_body(stream: bool) -> None:
    engine = FakeEngine()
    engine.fail = ComputeFailed("out of luck")
    status, body = post("/completion", {"prompt": "a", "stream": stream}, engine)
    expected = {"error": {"code": 500, "message": "out of luck", "type": "server_error"}}
    assert (status, body) == (500, expected)
    if stream:  # after the headers, the error is the stream's last message
        engine = FakeEngine()
        engine.fail, engine.fail_after = ComputeFailed("out of luck"), 2
        status, body = post("/completion", {"prompt": "a", "stream": True}, engine)
        assert status == 200 and [orjson.loads(e) for e in events(body)][2:] == [expected]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fail_after", [0, 2])
async def test_one_failure_stops_all_answers_of_a_request(stream: bool, fail_after: int) -> None:
    engine = FakeEngine(answer="x" * 200, delay=0.02)

    async with client(engine) as http:
        engine.fail, engine.fail_after = ComputeFailed("out of luck"), fail_after
        engine.fails_once = True
        body = {"prompt": ["a", "b", "c"], "stream": stream}
        response = await http.post("/completion", json=body)
        assert "out of luck" in response.text
        if stream and fail_after:  # the error is the last event
            assert "error" in orjson.loads(events(response.text)[-1])
        assert len(engine.requests) == 3 and {2, 3} <= set(engine.cancelled)


async def test_a_lost_worker_is_a_503_with_retry_after() -> None:
    engine = FakeEngine()
    engine.fault = Fault("RPC0[10.0.0.7:50052]", "connection reset", 1_750_000_000.0)

    async with client(engine) as http:
        health = await http.get("/health")
        assert health.status_code == 503 and health.headers["retry-after"] == "5"
        error = health.json()["error"]
        assert error["type"] == "unavailable_error" and error["code"] == 503
        assert error["worker"] == "RPC0[10.0.0.7:50052]" and error["since"] == 1_750_000_000.0
        assert "RPC0[10.0.0.7:50052]" in error["message"] and "connection reset" in error["message"]
        engine.fail = Unavailable(engine.fault.message)
        for stream in (False, True):
            answer = await http.post("/completion", json={"prompt": "a", "stream": stream})
            assert answer.status_code == 503 and answer.headers["retry-after"] == "5"
        engine.fault = None
        assert (await http.get("/health")).json() == {"status": "ok"}


async def test_health_lists_degraded_workers_and_their_layers() -> None:
    engine = FakeEngine()
    now = {"CPU": "layers 0 to 5 and the head"}
    engine.degraded = (Away("RPC0[10.0.0.7:50052]", "connection reset", 1_750_000_000.0, "layers 3 to 5", now),)
    shown = {
        "device": "RPC0[10.0.0.7:50052]",
        "since": 1_750_000_000.0,
        "why": "connection reset",
        "layers": "layers 3 to 5",
        "now": now,
    }

    async with client(engine) as http:
        for path in ("/health", "/v1/health", "/health?include_slots"):
            health = await http.get(path)
            assert health.status_code == 200
            assert health.json()["status"] == "ok" and health.json()["degraded"] == [shown]
        assert "slots_idle" in health.json()
        engine.degraded = ()
        assert (await http.get("/health")).json() == {"status": "ok"}


# -- OpenAI ----------------------------------------------------------------------------------------------------------


def test_openai_completion() -> None:
    status, body = post("/v1/completions", {"prompt": ["a", "bc"], "max_tokens": 2})
    assert status == 200
    keys = {"choices", "created", "model", "system_fingerprint", "object", "usage", "id", "timings"}
    assert set(body) == keys and body["object"] == "text_completion"
    assert [set(c) for c in body["choices"]] == [{"text", "index", "logprobs", "finish_reason"}] * 2
    assert body["usage"] == {
        "completion_tokens": 4,
        "prompt_tokens": 3,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_openai_completion_stream() -> None:
    _, text = post("/v1/completions", {"prompt": "a", "max_tokens": 2, "stream": True})
    *parts, last = events(text)
    parsed = [orjson.loads(p) for p in parts]
    assert last == "[DONE]"
    assert [p["choices"][0]["text"] for p in parsed] == ["H", "e", ""]
    assert [p["choices"][0]["finish_reason"] for p in parsed] == [None, None, "length"]
    assert {"usage", "timings"} <= set(parsed[-1]) and len({p["id"] for p in parsed}) == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/chat/completions"])
def test_chat(path: str) -> None:
    engine = FakeEngine()
    status, body = post(path, {"messages": USER}, engine)
    assert status == 200 and body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
    assert body["choices"] == [
        {"finish_reason": "stop", "index": 0, "message": {"role": "assistant", "content": ANSWER}}
    ]
    assert bytes(engine.requests[0].prompt).decode() == "<user>Hi</><assistant>"


@pytest.mark.parametrize("usage", [False, True])
def test_chat_stream(usage: bool) -> None:
    body = {"messages": USER, "max_tokens": 2, "stream": True, "stream_options": {"include_usage": usage}}
    *parts, last = events(post("/v1/chat/completions", body)[1])
    parsed = [orjson.loads(p) for p in parts]
    assert last == "[DONE]"
    assert parsed[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [p["choices"][0]["delta"] for p in parsed[1:3]] == [{"content": "H"}, {"content": "e"}]
    assert parsed[3]["choices"] == [{"finish_reason": "length", "index": 0, "delta": {}}]
    assert all(p["object"] == "chat.completion.chunk" for p in parsed)
    if usage:
        assert parsed[4]["choices"] == [] and parsed[4]["usage"]["completion_tokens"] == 2
    assert ("usage" in parsed[-1]) is usage and "timings" in parsed[-1]


def test_chat_logprobs() -> None:
    body = {"messages": USER, "max_tokens": 1, "logprobs": True, "top_logprobs": 1}
    (choice,) = post("/v1/chat/completions", body)[1]["choices"]
    assert len(choice["logprobs"]["content"]) == 1 and len(choice["logprobs"]["content"][0]["top_logprobs"]) == 1
    status, answer = post("/v1/chat/completions", {"messages": USER, "top_logprobs": 1})
    assert status == 400 and "requires logprobs" in answer["error"]["message"]


def test_chat_choices_are_streamed_with_their_index() -> None:
    body = {"messages": USER, "max_tokens": 1, "n": 2, "stream": True}
    *parts, _ = events(post("/v1/chat/completions", body)[1])
    assert {orjson.loads(p)["choices"][0]["index"] for p in parts} == {0, 1}


def test_assistant_message_at_the_end_is_continued() -> None:
    messages = [*USER, {"role": "assistant", "content": "I th"}]
    assert post("/apply-template", {"messages": messages})[1] == {"prompt": "<user>Hi</><assistant>I th"}
    body = {"messages": messages, "max_tokens": 2}
    assert post("/v1/chat/completions", body)[1]["choices"][0]["message"]["content"] == "I thHe"
    status, _ = post("/apply-template", {"messages": [*messages, messages[-1]]})
    assert status == 400


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = post("/apply-template", {"messages": [{"role": "user", "content": parts}]})[1]
    assert body == {"prompt": "<user>a\nb</><assistant>"}


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({}, 400, "'messages' is required"),
        ({"messages": "x"}, 400, "Expected 'messages' to be an array"),
        ({"messages": [5]}, 400, "must contain 'content'"),
        ({"messages": [{"role": "user"}]}, 400, "must contain 'content'"),
        ({"messages": [{"content": "x"}]}, 400, "Missing 'role'"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "Expected 'content' to be a string or an array"),
        ({"messages": [{"role": "user", "content": [{"type": "zz"}]}]}, 400, "unsupported content[].type"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "image input is not supported"),
        ({"messages": [{"role": "forbidden", "content": ""}]}, 400, "no such role"),
        ({"messages": USER, "response_format": {"type": "zzz"}}, 400, "response_format type"),
        ({"messages": USER, "response_format": {"type": "json_schema", "schema": 3}}, 400, "response_format"),
        ({"messages": USER, "tools": [{"type": "function"}]}, 400, "tools"),
        ({"messages": USER, "tool_choice": "zz"}, 400, "Invalid tool_choice: zz"),
    ],
)
def test_bad_chats(body: Any, status: int, message: str) -> None:
    answered, answer = post("/v1/chat/completions", body)
    assert answered == status and message in answer["error"]["message"]


# -- text ------------------------------------------------------------------------------------------------------------


def test_tokenize() -> None:
    assert post("/tokenize", {"content": "ab"})[1] == {"tokens": [97, 98]}
    assert post("/tokenize", {"content": [1, "ab", 2]})[1] == {"tokens": [1, 97, 98, 2]}
    pieces = post("/tokenize", {"content": "aé", "with_pieces": True})[1]["tokens"]
    assert pieces == [{"id": 97, "piece": "a"}, {"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}]
    assert post("/tokenize", {})[1] == post("/tokenize", b"null")[1] == {"tokens": []}
    assert post("/tokenize", {"content": 5})[0] == 400


def test_detokenize() -> None:
    assert post("/detokenize", {"tokens": [97, 256]})[1] == {"content": "a<eos>"}
    assert post("/detokenize", {})[1] == {"content": ""}
    for bad in ("x", ["x"], [None]):
        assert post("/detokenize", {"tokens": bad})[0] == 400
    for token in (-1, 257, 2**31, 1e300):
        status, answer = post("/detokenize", {"tokens": [97, token]})
        assert status == 400 and "vocabulary of 257 tokens" in answer["error"]["message"]


# -- monitoring ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/health", "/v1/health"])
def test_health(path: str) -> None:
    assert get(path) == (200, {"status": "ok"})


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/nope"])
def test_loading(path: str) -> None:
    status, body = get(path, loaded=False)
    assert status == 503
    assert body["error"] == {"code": 503, "message": "Loading model", "type": "unavailable_error"}
    assert body["progress"] == 0.0 and body["stage"] == "starting"


def test_models_and_props() -> None:
    for path in ("/v1/models", "/models"):
        _, body = get(path)
        assert body["object"] == "list" and body["data"][0]["id"] == "fake" and body["models"][0]["name"] == "fake"
        assert body["data"][0]["meta"]["n_ctx_train"] == 8192
    _, props = get("/props")
    assert props["total_slots"] == 4 and props["default_generation_settings"]["n_ctx"] == 4096
    assert props["default_generation_settings"]["params"]["temperature"] == 0.8
    assert props["chat_template"] == "{{ x }}" and props["bos_token"] == "<s>"


def test_slots() -> None:
    status, body = get("/slots")
    assert status == 200 and len(body) == 4
    assert set(body[0]) == {"id", "n_ctx", "speculative", "is_processing"}
    assert get("/slots", slots=False) == error(
        "not_supported_error", 501, "This server does not support slots endpoint. Start it with `--slots`"
    )


def test_metrics_need_the_flag() -> None:
    status, body = get("/metrics")
    assert status == 501 and body["error"]["type"] == "not_supported_error"


def test_unknown_paths_and_methods() -> None:
    expected = error("not_found_error", 404, "File Not Found")
    assert get("/nope") == get("/completion") == post("/health", {}) == expected


@pytest.mark.parametrize("path", ["/embedding", "/v1/embeddings", "/v1/rerank", "/slots/0", "/props"])
def test_disabled_endpoints(path: str) -> None:
    status, body = post(path, {})
    assert status == 501 and body["error"]["type"] == "not_supported_error"


# -- access ----------------------------------------------------------------------------------------------------------


async def test_large_bodies_are_refused_by_their_announced_length() -> None:
    async with client() as http:
        response = await http.post("/completion", content=b"{}", headers={"Content-Length": str(10**12)})
        assert response.status_code == 413


@pytest.mark.slow
@pytest.mark.parametrize("biases", [[[97, 1.5], ["a", 2.0], [98, False]], {"97": 1.5, "a": 2.0, "b": False}])
def test_biases_of_one_token_add_up(biases: Any) -> None:
    status, answer = post("/completion", {"prompt": "x", "logit_bias": biases})
    assert status == 200
    shown = answer["generation_settings"]["logit_bias"]
    assert shown == [{"bias": 3.5, "token": 97}, {"bias": None, "token": 98}]
