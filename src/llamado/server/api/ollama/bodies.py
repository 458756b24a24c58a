"""Conversion of Ollama's bodies to bodies of the chat and completion APIs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from llamado.engine.parameters import PARAMETERS, Parameter
from llamado.server.errors import invalid
from llamado.server.generate.json_values import flag, json_text, mapping, text

MOST_LOGPROBS = 20
_MOST_SECONDS = 1e9
_LONGEST_DURATION = 64  # characters

# Names of types in Ollama's error messages.
_TYPES = {"integer": "integer", "number": "float32", "boolean": "boolean", "texts": "array"}
# Go, Ollama's language, accepts both the micro sign and the Greek letter.
_UNIT = {"ns": 1e-9, "us": 1e-6, "\u00b5s": 1e-6, "\u03bcs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|\u00b5s|\u03bcs|ms|s|m|h)")


def model_name(body: Mapping[str, Any]) -> str:
    """Return the model of a body. Raises ApiError if it has none."""
    name = text(body, "model") or text(body, "name")
    if not name:
        raise invalid("model is required")
    return name


def streams(body: Mapping[str, Any]) -> bool:
    """Return True if the body asks for a stream, which is Ollama's default."""
    return flag(body, "stream", True)


def keep_alive(body: Mapping[str, Any]) -> float | None:
    """Return the idle seconds until a model is unloaded; negative: never; None: not in the body.

    Numbers are seconds, texts are durations such as `5m` or `1h30m`. Raises ApiError.
    """
    given = body.get("keep_alive")
    if given is None:
        return None
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        return _bounded(float(given))
    text = given.strip()[:_LONGEST_DURATION] if isinstance(given, str) else ""
    if re.fullmatch(r"[+-]?\d+(\.\d+)?", text):
        return _bounded(float(text))
    number = text.lstrip("+-")
    parts = _DURATION.findall(number)
    if not parts or "".join(amount + unit for amount, unit in parts) != number:
        raise invalid(f"keep_alive: invalid duration {given!r}"[:200])
    seconds = sum(float(amount) * _UNIT[unit] for amount, unit in parts)
    return _bounded(-seconds if text.startswith("-") else seconds)


def _bounded(seconds: float) -> float:
    """Return -1 (never) for times beyond the range of dates."""
    return seconds if seconds <= _MOST_SECONDS else -1.0


def read_options(body: Mapping[str, Any], n_ctx: int) -> dict[str, Any]:
    """Return a body's `options` by the names of the completion API, without unknown ones. Raises ApiError."""
    options = mapping(body, "options")
    given: dict[str, Any] = {}
    for row in PARAMETERS:
        value = options.get(row.ollama) if row.ollama else None
        if value is not None:
            _check(row, value)
            given[row.names[0]] = value
    if given.get("repeat_last_n", 0) < 0:
        given["repeat_last_n"] = n_ctx
    if given.get("n_predict", 0) < 0:
        given["n_predict"] = -1
    return given


def _check(row: Parameter, value: Any) -> None:
    fits = {
        "integer": isinstance(value, (int, float)) and not isinstance(value, bool),
        "number": isinstance(value, (int, float)) and not isinstance(value, bool),
        "boolean": isinstance(value, bool),
        "texts": isinstance(value, (str, list)),
    }
    if not fits.get(row.type, True):
        raise invalid(f'option "{row.ollama}" must be of type {_TYPES[row.type]}')


def response_schema(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the JSON schema of the answer from `format`, or None without one. Raises ApiError."""
    given = body.get("format")
    if given in (None, ""):
        return None
    if given == "json":
        return {"type": "object"}
    if isinstance(given, dict):
        return given
    raise invalid(f'invalid format: {json_text(given)}; expected "json" or a valid JSON Schema object'[:300])


def thinking(body: Mapping[str, Any], thinks: bool) -> dict[str, Any]:
    """Return the fields of the chat API for `think`: true, false, or an effort. Raises ApiError."""
    think = body.get("think")
    if think is None:
        return {}
    if not isinstance(think, (bool, str)) or (isinstance(think, str) and think not in ("low", "medium", "high", "max")):
        raise invalid(
            f'invalid think value: {json_text(think)} (must be "high", "medium", "low", true, or false)'[:300]
        )
    if think is False:
        return {"reasoning_effort": "none"}
    if not thinks:
        raise invalid(f'"{model_name(body)}" does not support thinking')
    fields: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}
    return fields | ({"reasoning_effort": think} if isinstance(think, str) else {})


def logprobs(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the completion API for `logprobs`. Raises ApiError."""
    most = body.get("top_logprobs")
    most = most if isinstance(most, int) and not isinstance(most, bool) else 0
    if not 0 <= most <= MOST_LOGPROBS:
        raise invalid(f"top_logprobs must be between 0 and {MOST_LOGPROBS}")
    return {"n_probs": max(1, most)} if flag(body, "logprobs") else {}


def images(holder: Mapping[str, Any]) -> list[str]:
    """Return the images of a message or body, as base64. Raises ApiError."""
    given = holder.get("images") or []
    if not isinstance(given, list) or not all(isinstance(image, str) for image in given):
        raise invalid("'images' must be an array of base64 strings")
    return given


def _with_images(content: Any, found: list[str]) -> Any:
    """Return a message's content in the form of the chat API: images come before the text, as in Ollama."""
    if not found:
        return content
    parts = [{"type": "image_url", "image_url": {"url": image}} for image in found]
    return [*parts, {"type": "text", "text": content}] if content else parts


def chat_body(body: Mapping[str, Any], *, n_ctx: int, thinks: bool) -> dict[str, Any]:
    """Convert a body of `/api/chat` to one of the chat API. Raises ApiError."""
    model_name(body)
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise invalid("'messages' must be an array of objects")
    chat = _common_fields(body, n_ctx) | thinking(body, thinks)
    chat["messages"] = list(_messages(messages))
    tools = body.get("tools")
    if tools:
        if not isinstance(tools, list):
            raise invalid("'tools' must be an array of objects")
        chat["tools"] = [{"type": "function", **tool} if isinstance(tool, dict) else tool for tool in tools]
    schema = response_schema(body)
    if schema is not None:
        chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
    return chat


def generate_chat(body: Mapping[str, Any], *, n_ctx: int, thinks: bool) -> dict[str, Any]:
    """Convert a body of `/api/generate` that uses the model's template to one of the chat API. Raises ApiError."""
    system = text(body, "system")
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": text(body, "prompt"), "images": images(body)})
    return chat_body({**body, "messages": messages, "tools": None}, n_ctx=n_ctx, thinks=thinks)


def completion_body(body: Mapping[str, Any], *, n_ctx: int) -> dict[str, Any]:
    """Convert a body of `/api/generate`, except its prompt, to fields of the completion API. Raises ApiError."""
    schema = response_schema(body)
    return _common_fields(body, n_ctx) | ({} if schema is None else {"json_schema": schema})


def _common_fields(body: Mapping[str, Any], n_ctx: int) -> dict[str, Any]:
    return {**read_options(body, n_ctx), **logprobs(body), "stream": streams(body)}


def _messages(given: list[Any]) -> Iterator[dict[str, Any]]:
    """Convert messages to those of the chat API, where results refer to calls by id. Raises ApiError."""
    waiting: list[tuple[str, str]] = []  # id and name of calls without a result yet
    n_calls = 0
    for one in given:
        if not isinstance(one, dict):
            raise invalid("'messages' must be an array of objects")
        content = _with_images(one.get("content") or "", images(one))
        message: dict[str, Any] = {"role": one.get("role"), "content": content}
        if one.get("thinking"):
            message["reasoning_content"] = one["thinking"]
        if one.get("tool_calls"):
            if not isinstance(one["tool_calls"], list):
                raise invalid("'tool_calls' must be an array of objects")
            calls = [_call(call, n_calls + i) for i, call in enumerate(one["tool_calls"])]
            n_calls += len(calls)
            message["tool_calls"] = calls
            waiting += [(call["id"], call["function"]["name"]) for call in calls]
        if one.get("role") == "tool":
            message |= _result(one, waiting)
        yield message


def _call(call: Any, number: int) -> dict[str, Any]:
    function = mapping(call, "function")
    name, arguments = text(function, "name"), function.get("arguments")
    if not name:
        raise invalid("a tool call needs the name of its function")
    arguments = arguments if isinstance(arguments, str) else json_text(arguments or {})
    # Nine letters and digits: some templates accept no other ids.
    id = text(call, "id") or f"call{number:05d}"
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _result(message: Mapping[str, Any], waiting: list[tuple[str, str]]) -> dict[str, Any]:
    """Return id and name of the call that a tool's message answers: by id, by the tool's name, or in order."""
    name, id = text(message, "tool_name") or text(message, "name"), text(message, "tool_call_id")
    if not id:
        found = next((call for call in waiting if call[1] == name), waiting[0] if waiting and not name else None)
        if found is not None:
            waiting.remove(found)
            id, name = found
    return {key: value for key, value in (("tool_call_id", id), ("name", name)) if value}
