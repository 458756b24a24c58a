"""Bodies of Ollama's API as those of the chat and completion APIs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from llamado.engine.parameters import PARAMETERS, Parameter
from llamado.server.errors import ApiError, invalid
from llamado.server.generate.json_values import flag, json_text, mapping, text

MOST_LOGPROBS = 20
_MOST_SECONDS = 1e9
_LONGEST_DURATION = 64  # characters

# What options are called in Ollama's messages.
_TYPES = {"integer": "integer", "number": "float32", "boolean": "boolean", "texts": "array"}
# Go, which Ollama is written in, reads both the micro sign and the Greek letter.
_UNIT = {"ns": 1e-9, "us": 1e-6, "\u00b5s": 1e-6, "\u03bcs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|\u00b5s|\u03bcs|ms|s|m|h)")


def model_name(body: Mapping[str, Any]) -> str:
    """The model a body names. Raises ApiError where it names none."""
    name = text(body, "model") or text(body, "name")
    if not name:
        raise invalid("model is required")
    return name


def streams(body: Mapping[str, Any]) -> bool:
    """Whether an answer is to come in parts, as it does unless a body says otherwise."""
    return flag(body, "stream", True)


def keep_alive(body: Mapping[str, Any]) -> float | None:
    """Seconds for which a model is to stay after its last request; negative: for ever; None: the body does not say.

    Numbers are seconds, texts durations such as `5m` or `1h30m`. Raises ApiError.
    """
    given = body.get("keep_alive")
    if given is None:
        return None
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        return _bounded(float(given))
    said = given.strip()[:_LONGEST_DURATION] if isinstance(given, str) else ""
    if re.fullmatch(r"[+-]?\d+(\.\d+)?", said):
        return _bounded(float(said))
    number = said.lstrip("+-")
    parts = _DURATION.findall(number)
    if not parts or "".join(amount + unit for amount, unit in parts) != number:
        raise invalid(f"keep_alive: invalid duration {given!r}"[:200])
    seconds = sum(float(amount) * _UNIT[unit] for amount, unit in parts)
    return _bounded(-seconds if said.startswith("-") else seconds)


def _bounded(seconds: float) -> float:
    """More than a clock can be set to is for ever."""
    return seconds if seconds <= _MOST_SECONDS else -1.0


def read_options(body: Mapping[str, Any], n_ctx: int) -> dict[str, Any]:
    """What a body's `options` say, by the names of the completion API; those that are no parameters are ignored.

    Raises ApiError.
    """
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
    """What the answer must be by a body's `format`; None: anything. Raises ApiError."""
    given = body.get("format")
    if given in (None, ""):
        return None
    if given == "json":
        return {"type": "object"}
    if isinstance(given, dict):
        return given
    raise invalid(f'invalid format: {json_text(given)}; expected "json" or a valid JSON Schema object'[:300])


def thinking(body: Mapping[str, Any], thinks: bool) -> dict[str, Any]:
    """Fields of the chat API that say what `think` does: true, false, or how much. Raises ApiError."""
    wish = body.get("think")
    if wish is None:
        return {}
    if not isinstance(wish, (bool, str)) or (isinstance(wish, str) and wish not in ("low", "medium", "high", "max")):
        raise invalid(f'invalid think value: {json_text(wish)} (must be "high", "medium", "low", true, or false)'[:300])
    if wish is False:
        return {"reasoning_effort": "none"}
    if not thinks:
        raise invalid(f'"{model_name(body)}" does not support thinking')
    fields: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}
    return fields | ({"reasoning_effort": wish} if isinstance(wish, str) else {})


def logprobs(body: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that ask for probabilities. Raises ApiError."""
    most = body.get("top_logprobs")
    most = most if isinstance(most, int) and not isinstance(most, bool) else 0
    if not 0 <= most <= MOST_LOGPROBS:
        raise invalid(f"top_logprobs must be between 0 and {MOST_LOGPROBS}")
    return {"n_probs": max(1, most)} if flag(body, "logprobs") else {}


def refuse_images(holder: Mapping[str, Any], model: str) -> None:
    """Raise ApiError for images: no model here sees."""
    if holder.get("images"):
        raise ApiError("invalid_request_error", f'"{model}" does not support images: this server has no vision yet')


def chat_body(body: Mapping[str, Any], *, n_ctx: int, thinks: bool) -> dict[str, Any]:
    """A body of `/api/chat` as one of the chat API. Raises ApiError."""
    model = model_name(body)
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise invalid("'messages' must be an array of objects")
    chat = _asked(body, n_ctx) | thinking(body, thinks)
    chat["messages"] = list(_messages(messages, model))
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
    """A body of `/api/generate` that the model's template is for, as one of the chat API. Raises ApiError."""
    system = text(body, "system")
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": text(body, "prompt")})
    return chat_body({**body, "messages": messages, "tools": None}, n_ctx=n_ctx, thinks=thinks)


def completion_body(body: Mapping[str, Any], *, n_ctx: int) -> dict[str, Any]:
    """The fields of a body of `/api/generate`, but for the prompt, as those of the completion API. Raises ApiError."""
    schema = response_schema(body)
    return _asked(body, n_ctx) | ({} if schema is None else {"json_schema": schema})


def _asked(body: Mapping[str, Any], n_ctx: int) -> dict[str, Any]:
    return {**read_options(body, n_ctx), **logprobs(body), "stream": streams(body)}


def _messages(given: list[Any], model: str) -> Iterator[dict[str, Any]]:
    """Messages with calls as the chat API has them: named by ids, which results refer to."""
    waiting: list[tuple[str, str]] = []  # id and name of calls whose results are still to come
    n_calls = 0
    for one in given:
        if not isinstance(one, dict):
            raise invalid("'messages' must be an array of objects")
        refuse_images(one, model)
        message: dict[str, Any] = {"role": one.get("role"), "content": one.get("content") or ""}
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
    said = arguments if isinstance(arguments, str) else json_text(arguments or {})
    # Nine letters and digits: some families' templates take nothing else.
    id = text(call, "id") or f"call{number:05d}"
    return {"id": id, "type": "function", "function": {"name": name, "arguments": said}}


def _result(message: Mapping[str, Any], waiting: list[tuple[str, str]]) -> dict[str, Any]:
    """Which call a tool's message answers: by id, by the tool's name, or in the order of the calls."""
    name, id = text(message, "tool_name") or text(message, "name"), text(message, "tool_call_id")
    if not id:
        found = next((call for call in waiting if call[1] == name), waiting[0] if waiting and not name else None)
        if found is not None:
            waiting.remove(found)
            id, name = found
    return {key: value for key, value in (("tool_call_id", id), ("name", name)) if value}
