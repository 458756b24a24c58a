"""Conversion of Ollama's bodies, field by field."""

from __future__ import annotations

from typing import Any

import pytest

from llamado.http.errors import ApiError
from llamado.server.api.ollama.bodies import (
    chat_body,
    completion_body,
    generate_chat,
    images,
    keep_alive,
    logprobs,
    model_name,
    read_options,
    response_schema,
    streams,
    thinking,
)

N_CTX = 77


def chat(*messages: Any, **fields: Any) -> dict[str, Any]:
    return chat_body({"model": "m", "messages": list(messages), **fields}, n_ctx=N_CTX, thinks=True)


def test_a_plain_chat() -> None:
    assert chat({"role": "user", "content": "Hi"}, stream=False) == {
        "stream": False,
        "messages": [{"role": "user", "content": "Hi"}],
    }
    assert chat()["stream"] is streams({}) is True
    assert chat({"role": "assistant", "content": None, "thinking": "hm"}) == {
        "stream": True,
        "messages": [{"role": "assistant", "content": "", "reasoning_content": "hm"}],
    }


def test_names_of_models() -> None:
    assert model_name({"model": "a", "name": "b"}) == "a" and model_name({"model": "", "name": "b"}) == "b"


def test_images_come_before_the_text() -> None:
    picture = {"type": "image_url", "image_url": {"url": "aGk="}}
    (message,) = chat({"role": "user", "content": "What?", "images": ["aGk=", "aGk="]})["messages"]
    assert message["content"] == [picture, picture, {"type": "text", "text": "What?"}]
    (message,) = chat({"role": "user", "images": ["aGk="]})["messages"]
    assert message["content"] == [picture] and images({"images": None}) == []
    for wrong in ("aGk=", ["aGk=", 5], {"a": 1}):
        with pytest.raises(ApiError, match="base64"):
            images({"images": wrong})


def test_calls_are_numbered_through_the_whole_chat() -> None:
    call = {"function": {"name": "f", "arguments": '{"a":1}'}}
    own = {"id": "mine", "function": {"name": "g"}}
    first, second = {"role": "assistant", "tool_calls": [call, own]}, {"role": "assistant", "tool_calls": [call]}
    one, two = chat(first, second)["messages"]
    assert [(c["id"], c["type"], c["function"]) for c in one["tool_calls"] + two["tool_calls"]] == [
        ("call00000", "function", {"name": "f", "arguments": '{"a":1}'}),
        ("mine", "function", {"name": "g", "arguments": "{}"}),
        ("call00002", "function", {"name": "f", "arguments": '{"a":1}'}),
    ]


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({}, {"tool_call_id": "call00000", "name": "f"}),
        ({"name": "g"}, {"tool_call_id": "call00001", "name": "g"}),
        ({"tool_name": "g", "name": "f"}, {"tool_call_id": "call00001", "name": "g"}),
        ({"tool_call_id": "x", "tool_name": "f"}, {"tool_call_id": "x", "name": "f"}),
        ({"tool_call_id": "x"}, {"tool_call_id": "x"}),
        ({"tool_name": "h"}, {"name": "h"}),
    ],
)
def test_results_name_their_call(fields: dict[str, str], found: dict[str, str]) -> None:
    calls = {"role": "assistant", "tool_calls": [{"function": {"name": name}} for name in ("f", "g")]}
    *_, result = chat(calls, {"role": "tool", "content": "1", **fields})["messages"]
    assert result == {"role": "tool", "content": "1", **found}


def test_a_call_is_answered_once() -> None:
    calls = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}
    result = {"role": "tool", "content": "1"}
    *_, one, two = chat(calls, result, result)["messages"]
    assert one["tool_call_id"] == "call00000" and "tool_call_id" not in two


def test_tools_are_functions_unless_they_have_another_type() -> None:
    assert chat(tools=[{"function": {}}, {"type": "x"}, 5])["tools"] == [
        {"type": "function", "function": {}},
        {"type": "x"},
        5,
    ]
    assert "tools" not in chat(tools=[])
    with pytest.raises(ApiError, match="'tools' must be an array"):
        chat(tools={"a": 1})
    for wrong in (5, [5]):
        with pytest.raises(ApiError, match="messages"):
            chat_body({"model": "m", "messages": wrong}, n_ctx=1, thinks=False)


@pytest.mark.parametrize(
    ("given", "schema"), [(None, None), ("", None), ("json", {"type": "object"}), ({}, {}), ({"a": 1}, {"a": 1})]
)
def test_formats(given: Any, schema: Any) -> None:
    body = {} if given is None else {"format": given}
    assert response_schema(body) == schema
    found = chat(**body).get("response_format")
    assert found == (None if schema is None else {"type": "json_schema", "json_schema": {"schema": schema}})
    assert completion_body(body, n_ctx=1) == {"stream": True} | ({} if schema is None else {"json_schema": schema})


@pytest.mark.parametrize("wrong", [5, True, [], "JSON"])
def test_unknown_formats(wrong: Any) -> None:
    with pytest.raises(ApiError, match="invalid format"):
        response_schema({"format": wrong})


ON = {"chat_template_kwargs": {"enable_thinking": True}}


@pytest.mark.parametrize(
    ("think", "fields"),
    [
        (None, {}),
        (False, {"reasoning_effort": "none"}),
        (True, ON),
        *((effort, {**ON, "reasoning_effort": effort}) for effort in ("low", "medium", "high", "max")),
    ],
)
def test_efforts(think: Any, fields: dict[str, Any]) -> None:
    body = {"model": "m", "think": think}
    assert thinking(body, True) == fields
    if think in (None, False):
        assert thinking(body, False) == fields
    else:
        with pytest.raises(ApiError, match="does not support thinking"):
            thinking(body, False)


@pytest.mark.parametrize("think", [0, 1, "", "true", [], {}])
def test_unknown_efforts(think: Any) -> None:
    with pytest.raises(ApiError, match="invalid think value"):
        thinking({"model": "m", "think": think}, True)


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        ({}, {}),
        ({"top_logprobs": 5}, {}),
        ({"logprobs": False, "top_logprobs": 5}, {}),
        ({"logprobs": True}, {"n_probs": 1}),
        ({"logprobs": True, "top_logprobs": 0}, {"n_probs": 1}),
        ({"logprobs": True, "top_logprobs": 20}, {"n_probs": 20}),
        ({"logprobs": True, "top_logprobs": True}, {"n_probs": 1}),
        ({"logprobs": True, "top_logprobs": "5"}, {"n_probs": 1}),
    ],
)
def test_probabilities(body: dict[str, Any], fields: dict[str, int]) -> None:
    assert logprobs(body) == fields


@pytest.mark.parametrize("wrong", [-1, 21])
def test_numbers_of_probabilities_out_of_range(wrong: int) -> None:
    with pytest.raises(ApiError, match="between 0 and 20"):
        logprobs({"top_logprobs": wrong})


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"num_predict": -1}, {"n_predict": -1}),
        ({"num_predict": 0}, {"n_predict": 0}),
        ({"num_predict": -2, "repeat_last_n": -1}, {"n_predict": -1, "repeat_last_n": N_CTX}),
        ({"repeat_last_n": 0}, {"repeat_last_n": 0}),
        ({"top_k": 2.0, "temperature": 1, "stop": "x"}, {"top_k": 2.0, "temperature": 1, "stop": "x"}),
        ({"stop": ["x"], "seed": None, "num_gpu": 1}, {"stop": ["x"]}),
    ],
)
def test_options(options: dict[str, Any], found: dict[str, Any]) -> None:
    assert read_options({"options": options}, N_CTX) == found


@pytest.mark.parametrize(
    ("option", "value", "type"),
    [
        ("top_k", True, "integer"),
        ("top_k", "1", "integer"),
        ("temperature", False, "float32"),
        ("temperature", [1], "float32"),
        ("stop", 5, "array"),
        ("stop", {"a": 1}, "array"),
    ],
)
def test_options_of_another_type(option: str, value: Any, type: str) -> None:
    with pytest.raises(ApiError, match=f'option "{option}" must be of type {type}'):
        read_options({"options": {option: value}}, N_CTX)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [("+5m", 300), (" 90s ", 90), (1e9, 1e9), (2e9, -1), (-3, -3), (1.5, 1.5), ("+7", 7), (".5h", 1800)],
)
def test_more_durations(given: Any, seconds: float) -> None:
    assert keep_alive({"keep_alive": given}) == seconds


@pytest.mark.parametrize("given", [True, False, [], "", "m", "5 m", "5mx", "x5m", "5m5"])
def test_invalid_durations(given: Any) -> None:
    with pytest.raises(ApiError, match="invalid duration"):
        keep_alive({"keep_alive": given})


def test_prompts_become_chats() -> None:
    body = {"model": "m", "prompt": "Hi", "system": "Be kind", "images": ["aGk="], "tools": [{"a": 1}], "think": True}
    found = generate_chat(body, n_ctx=N_CTX, thinks=True)
    assert found["messages"][0] == {"role": "system", "content": "Be kind"} and len(found["messages"]) == 2
    assert [part["type"] for part in found["messages"][1]["content"]] == ["image_url", "text"]
    assert "tools" not in found and found["chat_template_kwargs"] == {"enable_thinking": True}
    plain = generate_chat({"model": "m", "prompt": "Hi", "options": {"repeat_last_n": -1}}, n_ctx=N_CTX, thinks=False)
    assert plain == {"repeat_last_n": N_CTX, "stream": True, "messages": [{"role": "user", "content": "Hi"}]}
