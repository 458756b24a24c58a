"""The requests that both servers get: every endpoint, every option with good, extreme, wrong and null values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import orjson

HI = [{"role": "user", "content": "Tell me a joke."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ANSWER_SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}


class Ask(NamedTuple):
    """One request. `greedy`: both answers must hold the same text."""

    name: str
    method: str
    path: str
    body: bytes | None = None
    greedy: bool = False


def _json(name: str, path: str, body: Any, *, greedy: bool = False) -> Ask:
    return Ask(name, "POST", path, orjson.dumps(body), greedy)


# A prompt of which the model is sure: greedy decoding meets no near tie between rounding differences.
SURE = "1, 2, 3, 4, 5, 6, 7, 8,"
BASE = {"prompt": SURE, "n_predict": 4, "temperature": 0.0}
CHAT = {"messages": HI, "max_tokens": 6, "temperature": 0.0}

INTEGERS = {
    "n_predict": [0, 1, 2],
    "max_tokens": [2],
    "max_completion_tokens": [1],
    "n_indent": [0, 4],
    "n_keep": [0, -1, 3],
    "n_discard": [0, 7],
    "t_max_predict_ms": [-1, 0, 10000],
    "n_probs": [0, 1, 3],
    "logprobs": [2],
    "top_k": [0, 1, 40, -5],
    "repeat_last_n": [0, 64],
    "min_keep": [0, 2],
    "dry_allowed_length": [0, 5],
    "dry_penalty_last_n": [0, 10],
    "mirostat": [0],
    "n_cmpl": [1, 2],
    "n": [1, 2],
    "n_cache_reuse": [0, 8],
    "sse_ping_interval": [-1, 0, 7],
    "seed": [-1, 0, 42, 4294967295],
    "id_slot": [-1, 0, 3, 17],
}
FLOATS = {
    "temperature": [0, 0.0, -1.0],
    "top_p": [0.0, 0.5, 1.0, 7.5],
    "min_p": [0.0, 0.3, 3.0],
    "typical_p": [0.5, 1.0],
    "repeat_penalty": [1.0, 1.1],
    "presence_penalty": [0.0, 0.1],
    "frequency_penalty": [0.0, 0.1],
    "dynatemp_range": [0.0, 0.3],
    "dynatemp_exponent": [1.0],
    "top_n_sigma": [-1.0, 1.0],
    "xtc_probability": [0.0, 1.5],
    "xtc_threshold": [0.1, 0.6],
    "dry_multiplier": [0.0, 0.2],
    "dry_base": [1.75, 0.5],
    "mirostat_tau": [5.0],
    "mirostat_eta": [0.1],
    "adaptive_target": [-1.0],
    "adaptive_decay": [0.0, 0.9],
}
BOOLEANS = (
    "cache_prompt",
    "return_tokens",
    "return_progress",
    "post_sampling_probs",
    "ignore_eos",
    "timings_per_token",
    "stream",
    "verbose",
)
LIMITS = {
    "n_predict": -2,
    "n_indent": -1,
    "n_keep": -2,
    "repeat_last_n": -1,
    "min_keep": -1,
    "dry_allowed_length": -1,
    "dry_penalty_last_n": -1,
    "n_cmpl": 0,
    "n": 5,
    "adaptive_decay": 1.5,
    "sse_ping_interval": -2,
    "n_discard": -1,
    "n_cache_reuse": -1,
    "t_max_predict_ms": -2,
}


def options() -> Iterator[Ask]:
    """`/completion` with one option at a time."""
    for field, values in (INTEGERS | FLOATS).items():
        for value in values:
            yield _json(f"{field}={value}", "/completion", {**BASE, field: value}, greedy=True)
        yield _json(f"{field}=text", "/completion", {**BASE, field: "x"})
        if field in LIMITS:
            yield _json(f"{field}=limit", "/completion", {**BASE, field: LIMITS[field]})
    nothing = dict.fromkeys([*INTEGERS, *FLOATS, *BOOLEANS])
    yield _json("all null", "/completion", nothing | BASE, greedy=True)
    for field in BOOLEANS:
        for flag in (True, False):
            yield _json(f"{field}={flag}", "/completion", {**BASE, field: flag}, greedy=field != "ignore_eos")
        yield _json(f"{field}=text", "/completion", {**BASE, field: "yes"})
    for name, more in {
        "stop text": {"stop": "10"},
        "stop list": {"stop": ["zzz", "10"]},
        "stop empty": {"stop": []},
        "stop number": {"stop": 3},
        "stop numbers": {"stop": [3]},
        "stop null": {"stop": None},
        "bias pairs": {"logit_bias": [[123, 1.0], ["Hello", -0.5], [45, False], [10**9, 1], "x", [1]]},
        "bias object": {"logit_bias": {"123": 1.0, "Hello": False, "45": "x"}},
        "bias text": {"logit_bias": "x"},
        "samplers list": {"samplers": ["top_k", "temperature"]},
        "samplers letters": {"samplers": "kt"},
        "samplers unknown": {"samplers": ["none", "top_k"]},
        "samplers number": {"samplers": 3},
        "samplers numbers": {"samplers": [3]},
        "samplers empty": {"samplers": []},
        "breakers": {"dry_sequence_breakers": ["x", "y"], "dry_multiplier": 0.5},
        "breakers empty": {"dry_sequence_breakers": []},
        "breakers text": {"dry_sequence_breakers": "x"},
        "fields": {"response_fields": ["content", "generation_settings/n_predict", "nothing", "timings/prompt_n"]},
        "fields text": {"response_fields": "content"},
        "lora": {"lora": [{"id": 0, "scale": 0.5}]},
        "lora text": {"lora": "x"},
        "probs and post": {"n_probs": 2, "post_sampling_probs": True},
        "probs stream": {"n_probs": 2, "stream": True},
        "stream tokens": {"stream": True, "return_tokens": True},
        "stream timings": {"stream": True, "timings_per_token": True},
        "stream progress": {"stream": True, "return_progress": True, "cache_prompt": False},
        "stream n": {"stream": True, "n": 2},
        "usage options": {"stream": True, "stream_options": {"include_usage": True}},
        "unknown field": {"unknown_field": [1, {"a": 2}]},
        "backend sampling": {"backend_sampling": False},
    }.items():
        yield _json(
            name, "/completion", {**BASE, **more}, greedy=name not in ("samplers empty", "samplers unknown", "stream n")
        )
    for name, grammar in {
        "grammar": {"grammar": 'root ::= " nine" | " ten"'},
        "grammar empty": {"grammar": ""},
        "grammar number": {"grammar": 3},
        "grammar bad": {"grammar": "root ::= ("},
        "grammar without root": {"grammar": 'item ::= "x"'},
        "schema": {"json_schema": {"type": "string", "enum": ["yes"]}},
        "schema any": {"json_schema": {}},
        "schema wrong": {"json_schema": {"type": "nothing"}},
        "schema pattern": {"json_schema": {"type": "string", "pattern": "^[ab]+$"}},
        "schema ref": {"json_schema": {"$ref": "#/definitions/nothing"}},
        "lazy word": {
            "grammar": 'root ::= "," [^z]*',
            "grammar_lazy": True,
            "grammar_triggers": [{"type": 1, "value": ","}],
        },
        "lazy never": {
            "grammar": 'root ::= "x"',
            "grammar_lazy": True,
            "grammar_triggers": [{"type": 1, "value": "@"}],
        },
        "lazy without triggers": {"grammar": 'root ::= "x"', "grammar_lazy": True, "grammar_triggers": []},
        "triggers wrong": {"grammar": 'root ::= "x"', "grammar_lazy": True, "grammar_triggers": [{"value": "x"}]},
        "preserved": {"preserved_tokens": ["<|im_start|>", "two tokens"]},
        "preserved numbers": {"preserved_tokens": [3]},
    }.items():
        yield _json(name, "/completion", {**BASE, **grammar, "n_predict": 8})


def prompts() -> Iterator[Ask]:
    """Prompts in all shapes."""
    tokens = [34, 28, 216, 35]
    for name, prompt in {
        "text": SURE,
        "tokens": tokens,
        "mixed": [34, "and", 28],
        "two texts": ["a", "b"],
        "object": {"prompt_string": SURE},
        "lists": [tokens, tokens],
        "list and text": [[34, "and"], SURE, {"prompt_string": "x"}],
        "empty": "",
        "empty list": [],
        "null": None,
        "number": 3,
        "boolean": True,
        "unknown object": {"x": 1},
        "floats": [1.5, 2.0],
        "negative token": [-1],
        "large token": [10**6],
        "huge token": [2**40],
        "nested": [[[1]]],
        "nulls": [None],
        "media": {"prompt_string": "x", "multimodal_data": ["aGk="]},
        "special": "<|im_start|>user\nhi<|im_end|>",
        "unicode": "größe 漢字 🙂",
        "control": "a\u0000b\u0007",
        "spaces": "   ",
        "empty texts": ["", "a"],
    }.items():
        for path in ("/completion", "/v1/completions"):
            body = {"prompt": prompt, "n_predict": 2, "temperature": 0}
            yield _json(f"prompt {name} {path}", path, body, greedy=name in ("text", "tokens", "object"))
    yield _json("no prompt", "/completion", {"n_predict": 1})
    yield _json("no prompt openai", "/v1/completions", {"max_tokens": 1})
    yield _json("too long", "/completion", {"prompt": [34] * 5000})
    yield _json("too long stream", "/completion", {"prompt": [34] * 5000, "stream": True})
    yield _json("completions alias", "/completions", BASE, greedy=True)


def openai() -> Iterator[Ask]:
    """`/v1/completions` and `/v1/chat/completions`."""
    for name, more in {
        "plain": {},
        "stream": {"stream": True},
        "n": {"n": 2},
        "logprobs": {"logprobs": 2},
        "logprobs stream": {"logprobs": 2, "stream": True},
        "echo": {"echo": True},
        "suffix": {"suffix": "x"},
        "best_of": {"best_of": 2},
        "stop": {"stop": [" 10"]},
        "usage": {"stream": True, "stream_options": {"include_usage": True}},
        "model": {"model": "x"},
        "user": {"user": "x"},
        "timings": {"stream": True, "timings_per_token": True},
        "progress": {"stream": True, "return_progress": True},
        "two prompts": {"prompt": ["a", "b"]},
        "two prompts stream": {"prompt": ["a", "b"], "stream": True},
        "verbose": {"verbose": True},
        "seed": {"seed": 3},
        "null": {"stream": None, "n": None, "stop": None},
        "response fields": {"response_fields": ["x"]},
    }.items():
        yield _json(f"completions {name}", "/v1/completions", {**BASE, **more}, greedy=name == "plain")
    for name, more in {
        "plain": {},
        "stream": {"stream": True},
        "n": {"n": 2},
        "n stream": {"n": 2, "stream": True},
        "logprobs": {"logprobs": True, "top_logprobs": 2},
        "logprobs alone": {"logprobs": True},
        "logprobs stream": {"logprobs": True, "top_logprobs": 1, "stream": True},
        "top_logprobs alone": {"top_logprobs": 2},
        "logprobs off": {"logprobs": False},
        "logprobs text": {"logprobs": "x"},
        "stop": {"stop": "Hello"},
        "stop list": {"stop": ["zz"]},
        "stop number": {"stop": 3},
        "seed": {"seed": 1},
        "bias": {"logit_bias": {"5": -1}},
        "usage": {"stream": True, "stream_options": {"include_usage": True}},
        "usage n": {"stream": True, "n": 2, "stream_options": {"include_usage": True}},
        "usage text": {"stream": True, "stream_options": "x"},
        "timings": {"stream": True, "timings_per_token": True},
        "progress": {"stream": True, "return_progress": True, "cache_prompt": False},
        "verbose": {"verbose": True},
        "verbose stream": {"verbose": True, "stream": True},
        "format text": {"response_format": {"type": "text"}},
        "format object": {"response_format": {"type": "json_object"}},
        "format object schema": {"response_format": {"type": "json_object", "schema": ANSWER_SCHEMA}},
        "format schema": {
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": ANSWER_SCHEMA}}
        },
        "format schema empty": {"response_format": {"type": "json_schema"}},
        "format unknown": {"response_format": {"type": "xml"}},
        "format null": {"response_format": None},
        "format string": {"response_format": "json"},
        "json_schema": {"json_schema": ANSWER_SCHEMA},
        "grammar": {"grammar": 'root ::= "ok"'},
        "grammar and schema": {"json_schema": {}, "grammar": 'root ::= "a"'},
        "tools": {"tools": [WEATHER]},
        "tools none": {"tools": [WEATHER], "tool_choice": "none"},
        "tools required": {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 60},
        "tools required stream": {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 60, "stream": True},
        "tools parallel": {"tools": [WEATHER], "parallel_tool_calls": True},
        "tools null": {"tools": None},
        "tools empty": {"tools": []},
        "tools text": {"tools": "x"},
        "tools untyped": {"tools": [{}]},
        "tools wrong type": {"tools": [{"type": "web_search"}]},
        "tools no function": {"tools": [{"type": "function"}]},
        "tools no name": {"tools": [{"type": "function", "function": {}}]},
        "tools and grammar": {"tools": [WEATHER], "grammar": "root ::= x"},
        "tool choice unknown": {"tool_choice": "some"},
        "tool choice object": {
            "tools": [WEATHER],
            "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
            "max_tokens": 60,
        },
        "tools logprobs stream": {"tools": [WEATHER], "logprobs": True, "stream": True},
        "reasoning effort": {"reasoning_effort": "low"},
        "reasoning none": {"reasoning_effort": "none"},
        "reasoning format": {"reasoning_format": "none"},
        "reasoning format deepseek": {"reasoning_format": "deepseek"},
        "reasoning format wrong": {"reasoning_format": "x"},
        "kwargs": {"chat_template_kwargs": {"enable_thinking": False}},
        "kwargs text": {"chat_template_kwargs": {"enable_thinking": "yes"}},
        "kwargs wrong": {"chat_template_kwargs": 3},
        "no prompt added": {"add_generation_prompt": False},
        "reasoning control": {"reasoning_control": True},
        "budget": {"reasoning_budget_tokens": 5},
        "thinking budget": {"thinking_budget_tokens": 5},
        "parse tool calls": {"parse_tool_calls": False},
        "max_completion_tokens": {"max_completion_tokens": 2},
        "max_tokens zero": {"max_tokens": 0},
        "max_tokens text": {"max_tokens": "x"},
        "temperature text": {"temperature": "x"},
        "unknown": {"frobnicate": 1},
        "continue": {"continue_final_message": True},
        "continue without": {"continue_final_message": True, "add_generation_prompt": False},
    }.items():
        yield _json(f"chat {name}", "/v1/chat/completions", {**CHAT, **more}, greedy=name in ("plain", "stream"))
    user = {"role": "user", "content": "Hi"}
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    for name, messages in {
        "none": None,
        "text": "hi",
        "empty": [],
        "object": {"a": 1},
        "number inside": [3],
        "no role": [{"content": "x"}],
        "no content": [{"role": "user"}],
        "null content": [{"role": "user", "content": None}],
        "role number": [{"role": 3, "content": "x"}],
        "content number": [{"role": "user", "content": 3}],
        "parts": [{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "you"}]}],
        "part untyped": [{"role": "user", "content": [{"text": "x"}]}],
        "part unknown": [{"role": "user", "content": [{"type": "x"}]}],
        "part without text": [{"role": "user", "content": [{"type": "text"}]}],
        "image": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,xx"}}]}
        ],
        "audio": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "xx"}}]}],
        "system": [{"role": "system", "content": "Be brief."}, user],
        "developer": [{"role": "developer", "content": "Be brief."}, user],
        "unknown role": [{"role": "wizard", "content": "x"}],
        "assistant": [user, {"role": "assistant", "content": "Hello"}],
        "prefill only": [{"role": "assistant", "content": "Hello"}],
        "two assistants": [user, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}],
        "assistant empty": [user, {"role": "assistant"}],
        "assistant null": [user, {"role": "assistant", "content": None}],
        "call": [
            user,
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "3"},
        ],
        "call last": [user, {"role": "assistant", "tool_calls": [call]}],
        "call untyped": [user, {"role": "assistant", "tool_calls": [{}]}, user],
        "call no name": [
            user,
            {"role": "assistant", "tool_calls": [{"type": "function", "function": {"arguments": "{}"}}]},
            user,
        ],
        "call no arguments": [
            user,
            {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f"}}]},
            user,
        ],
        "calls text": [user, {"role": "assistant", "tool_calls": "x"}, user],
        "reasoning": [user, {"role": "assistant", "content": "a", "reasoning_content": "hm"}, user],
        "name": [{"role": "user", "content": "x", "name": "Bob"}],
    }.items():
        body = {"max_tokens": 2, "temperature": 0} | ({"messages": messages} if name != "none" else {})
        yield _json(f"messages {name}", "/v1/chat/completions", body, greedy=name in ("system", "parts", "assistant"))
        yield _json(f"template {name}", "/apply-template", body, greedy=True)
    yield _json("chat alias", "/chat/completions", CHAT, greedy=True)
    yield _json("control unknown", "/v1/chat/completions/control", {"id": "chatcmpl-x", "action": "reasoning_end"})
    yield _json("control no id", "/v1/chat/completions/control", {"action": "reasoning_end"})
    yield _json("control no action", "/v1/chat/completions/control", {"id": "x"})
    yield _json("control wrong action", "/v1/chat/completions/control", {"id": "x", "action": "stop"})
    for path in ("/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"):
        yield _json(f"count {path}", path, CHAT)
    yield _json("count bad", "/v1/chat/completions/input_tokens", {})


def responses() -> Iterator[Ask]:
    """OpenAI's Responses API."""
    base: dict[str, Any] = {"input": "Tell me a joke.", "max_output_tokens": 6, "temperature": 0}
    tool = {"type": "function", "name": "get_weather", "parameters": WEATHER["function"]["parameters"]}  # type: ignore[index]
    call = {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Rome"}'}
    output = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
    user = {"role": "user", "content": "Hi"}
    for name, more in {
        "text": {},
        "stream": {"stream": True},
        "instructions": {"instructions": "Be brief."},
        "messages": {"input": [user]},
        "items": {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]},
        "item message": {"input": [{"type": "message", "role": "user", "content": "Hi"}]},
        "developer": {"input": [{"role": "developer", "content": "x"}, user]},
        "history": {
            "input": [
                user,
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes"}]},
                user,
            ]
        },
        "refusal": {
            "input": [
                user,
                {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No"}]},
                user,
            ]
        },
        "calls": {"input": [user, call, output], "tools": [tool]},
        "call list output": {"input": [user, call, {**output, "output": [{"type": "input_text", "text": "sunny"}]}]},
        "reasoning item": {
            "input": [
                user,
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
                {"type": "message", "role": "assistant", "content": "Yes"},
                user,
            ]
        },
        "reasoning empty": {"input": [user, {"type": "reasoning", "summary": [], "content": []}, user]},
        "tools": {"tools": [tool]},
        "tools required": {"tools": [tool], "tool_choice": "required", "max_output_tokens": 60},
        "tools required stream": {"tools": [tool], "tool_choice": "required", "max_output_tokens": 60, "stream": True},
        "web tool": {"tools": [{"type": "web_search"}]},
        "tools text": {"tools": "x"},
        "effort": {"reasoning": {"effort": "low"}},
        "previous": {"previous_response_id": "resp_1"},
        "previous null": {"previous_response_id": None},
        "format": {"text": {"format": {"type": "json_schema", "name": "a", "schema": ANSWER_SCHEMA}}},
        "no input": {"input": None},
        "input number": {"input": 3},
        "input object": {"input": {"a": 1}},
        "item unknown": {"input": [{"type": "x"}]},
        "item number": {"input": [3]},
        "part unknown": {"input": [{"role": "user", "content": [{"type": "x"}]}]},
        "part file": {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
        "part image": {
            "input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,xx"}]}]
        },
        "part no text": {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
        "tokens text": {"max_output_tokens": "x"},
        "metadata": {"metadata": {"a": "b"}, "store": False, "user": "x"},
        "top_p": {"top_p": 0.5},
        "instructions null": {"instructions": None},
    }.items():
        yield _json(f"responses {name}", "/v1/responses", {**base, **more}, greedy=name in ("text", "stream"))
    yield _json("responses alias", "/responses", base, greedy=True)
    yield _json("responses nothing", "/v1/responses", {})
    for path in ("/v1/responses/input_tokens", "/responses/input_tokens"):
        yield _json(f"count {path}", path, base)


def messages() -> Iterator[Ask]:
    """Anthropic's Messages API."""
    base: dict[str, Any] = {"model": "m", "max_tokens": 6, "messages": HI, "temperature": 0}
    tool = {"name": "get_weather", "description": "x", "input_schema": WEATHER["function"]["parameters"]}  # type: ignore[index]
    use = {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Rome"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "sunny"}
    user = {"role": "user", "content": "Hi"}
    for name, more in {
        "plain": {},
        "stream": {"stream": True},
        "system": {"system": "Be brief."},
        "system blocks": {"system": [{"type": "text", "text": "Be"}, {"type": "text", "text": " brief."}]},
        "system null": {"system": None},
        "blocks": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]},
        "tools": {"tools": [tool]},
        "tools any": {"tools": [tool], "tool_choice": {"type": "any"}, "max_tokens": 60},
        "tools any stream": {"tools": [tool], "tool_choice": {"type": "any"}, "max_tokens": 60, "stream": True},
        "tools auto": {"tools": [tool], "tool_choice": {"type": "auto"}},
        "tools named": {"tools": [tool], "tool_choice": {"type": "tool", "name": "get_weather"}, "max_tokens": 60},
        "tools none": {"tools": [tool], "tool_choice": {"type": "none"}},
        "use": {
            "messages": [user, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}],
            "tools": [tool],
        },
        "result blocks": {
            "messages": [
                user,
                {"role": "assistant", "content": [use]},
                {"role": "user", "content": [{**result, "content": [{"type": "text", "text": "sunny"}]}]},
            ]
        },
        "thinking block": {
            "messages": [
                user,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": ""},
                        {"type": "text", "text": "Yes"},
                    ],
                },
                user,
            ]
        },
        "stop": {"stop_sequences": ["Hello", "How", "I"]},
        "thinking": {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        "metadata": {"metadata": {"user_id": "u"}},
        "top_k": {"top_k": 5},
        "top_p": {"top_p": 0.5},
        "prefill": {"messages": [user, {"role": "assistant", "content": "Hello"}]},
        "no messages": {"messages": None},
        "messages text": {"messages": "x"},
        "empty": {"messages": []},
        "no role": {"messages": [{"content": "x"}]},
        "no content": {"messages": [{"role": "user"}]},
        "image": {
            "messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "base64", "data": "xx"}}]}]
        },
        "tokens text": {"max_tokens": "x"},
        "stop text": {"stop_sequences": "x"},
    }.items():
        yield _json(f"anthropic {name}", "/v1/messages", {**base, **more}, greedy=name in ("plain", "stream", "system"))
    yield _json("anthropic nothing", "/v1/messages", {})
    yield _json("anthropic count", "/v1/messages/count_tokens", base)
    yield _json("anthropic count tools", "/v1/messages/count_tokens", {**base, "tools": [tool]})
    yield _json("anthropic count nothing", "/v1/messages/count_tokens", {})


def text() -> Iterator[Ask]:
    """Tokens and text, and code to fill in."""
    for name, body in {
        "text": {"content": "Hello world"},
        "special": {"content": "<|im_start|>", "add_special": True},
        "plain special": {"content": "<|im_start|>", "parse_special": False},
        "pieces": {"content": "größe 漢", "with_pieces": True},
        "mixed": {"content": ["a", 34, "b"]},
        "nothing": {},
        "number": {"content": 3},
        "null": {"content": None},
        "flag text": {"content": "a", "with_pieces": "x"},
        "empty": {"content": ""},
        "object": {"content": {"a": 1}},
    }.items():
        yield _json(f"tokenize {name}", "/tokenize", body, greedy=True)
    for name, body in {
        "tokens": {"tokens": [34, 28]},
        "nothing": {},
        "text": {"tokens": "x"},
        "texts": {"tokens": ["x"]},
        "empty": {"tokens": []},
        "null": {"tokens": None},
        "special": {"tokens": [1, 2]},
        "outside": {"tokens": [10**6]},
    }.items():
        yield _json(f"detokenize {name}", "/detokenize", body, greedy=True)
    yield _json("infill", "/infill", {"input_prefix": "def f(", "input_suffix": ")"})
    yield _json("infill nothing", "/infill", {})


def others() -> Iterator[Ask]:
    """Looking, embedding, saving slots, and what is no request at all."""
    for path in (
        "/health",
        "/v1/health",
        "/v1/models",
        "/models",
        "/props",
        "/slots",
        "/metrics",
        "/lora-adapters",
        "/nothing",
        "/completion",
        "/v1/chat/completions",
        "/slots?fail_on_no_slot=1",
    ):
        yield Ask(f"GET {path}", "GET", path)
    for path in ("/embedding", "/embeddings", "/v1/embeddings"):
        yield _json(f"POST {path}", path, {"input": "hi", "content": "hi"})
    for path in ("/rerank", "/reranking", "/v1/rerank", "/v1/reranking"):
        yield _json(f"POST {path}", path, {"query": "a", "documents": ["b"]})
    yield _json("props", "/props", {})
    yield _json("lora list", "/lora-adapters", [])
    yield _json("lora object", "/lora-adapters", {})
    yield _json("slot save", "/slots/1?action=save", {"filename": "one.bin"})
    yield _json("slot restore", "/slots/1?action=restore", {"filename": "one.bin"})
    yield _json("slot restore missing", "/slots/1?action=restore", {"filename": "two.bin"})
    yield _json("slot erase", "/slots/1?action=erase", {})
    yield _json("slot path", "/slots/1?action=save", {"filename": "../one.bin"})
    yield _json("slot no name", "/slots/1?action=save", {})
    yield _json("slot unknown action", "/slots/1?action=dance", {"filename": "one.bin"})
    yield _json("slot no action", "/slots/1", {"filename": "one.bin"})
    yield _json("slot outside", "/slots/99?action=erase", {})
    yield _json("slot text", "/slots/x?action=erase", {})
    yield _json("transcription", "/v1/audio/transcriptions", {})
    yield Ask("DELETE", "DELETE", "/completion")
    yield Ask("PUT", "PUT", "/completion", b"{}")
    yield Ask("OPTIONS", "OPTIONS", "/completion")
    for path in (
        "/completion",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/tokenize",
        "/detokenize",
        "/apply-template",
        "/infill",
        "/v1/embeddings",
    ):
        yield Ask(f"broken {path}", "POST", path, b'{"prompt": ')
        yield Ask(f"no body {path}", "POST", path, b"")
        yield Ask(f"array {path}", "POST", path, b"[1, 2]")
    yield Ask("bad bytes", "POST", "/completion", b'{"prompt": "\xff\xfe"}')
    yield Ask("null body", "POST", "/completion", b"null")
    yield Ask("text body", "POST", "/tokenize", b'"x"')


def all_requests() -> list[Ask]:
    """Everything, in the order in which both servers get it."""
    return [ask for part in (options, prompts, openai, responses, messages, text, others) for ask in part()]
