"""Anthropic's Messages API: converts its bodies to chat bodies, and chat answers to its content blocks and events.

Requests are read as llama-server reads them (`server-chat.cpp`, b11434); errors have Anthropic's form beside
llama-server's fields.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from llamado.engine.parameters import PARAMETERS
from llamado.engine.request import Progress, Result, Token
from llamado.http.answer import error_response, json_response
from llamado.http.errors import anthropic_error
from llamado.http.json_body import read_object
from llamado.server.api.openapi import describe
from llamado.server.api.routes import Routes
from llamado.server.errors import ApiError, invalid
from llamado.server.generate.formats import answer_reader, was_cut
from llamado.server.generate.generator import Generator
from llamado.server.generate.json_values import flag, integer, json_text, mapping, text
from llamado.server.generate.request import GenerationRequest
from llamado.server.generate.streaming import EVENTS
from llamado.text.dialects.answer import AnswerReader, Part
from llamado.text.dialects.dialect import Content, Reasoning, StrictTools

MAX_TOKENS = 4096
"""llama-server's default of `max_tokens`."""
_THINKING_BUDGET = 10_000
_PATH = "/v1/messages"

# A line of Claude Code's prompts that differs in each request, which would prevent prefix reuse.
_BILLING = re.compile(r"(x-anthropic-billing-header:[^\n]*?\bcch=)[0-9a-f]{5}(?=;)")


def _blocks(value: Any) -> list[dict[str, Any]]:
    return [block for block in value if isinstance(block, dict)] if isinstance(value, list) else []


def _system(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, str):
        system = value
    else:
        system = "".join(text(block, "text") for block in _blocks(value) if block.get("type") == "text")
    return _BILLING.sub(r"\g<1>00000", system)


def _image(block: Mapping[str, Any]) -> dict[str, Any]:
    source = mapping(block, "source")
    url = text(source, "url")
    if text(source, "type") == "base64":
        url = f"data:{text(source, 'media_type', 'image/jpeg')};base64,{text(source, 'data')}"
    elif text(source, "type") == "file":
        raise invalid("this server keeps no files: send the image as base64 or as a URL")
    return {"type": "image_url", "image_url": {"url": url}}


def _document(block: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the parts for a document block: texts are shown to the model. Raises ApiError for PDF and files."""
    source = mapping(block, "source")
    kind, content = text(source, "type"), source.get("content")
    if kind == "text":
        parts = [{"type": "text", "text": text(source, "data")}]
    elif kind == "content" and isinstance(content, str):
        parts = [{"type": "text", "text": content}]
    elif kind == "content":
        parts = _content_parts(content)
    elif "pdf" in text(source, "media_type") or kind == "url":
        raise invalid("PDF documents are not supported: send their text, or an image of each page")
    else:
        raise invalid("a document's source must be of type 'text' or 'content': this server keeps no files")
    heads = [{"type": "text", "text": head} for head in (text(block, "title"), text(block, "context")) if head]
    return [*heads, *parts]


def _content_parts(content: Any) -> list[dict[str, Any]]:
    """Return the parts for blocks of a tool's result or of a document; blocks of other types are left out."""
    parts: list[dict[str, Any]] = []
    for block in _blocks(content):
        if block.get("type") == "text":
            parts.append({"type": "text", "text": text(block, "text")})
        elif block.get("type") == "image":
            parts.append(_image(block))
        elif block.get("type") == "document":
            parts += _document(block)
    return parts


def _result_content(content: Any) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    parts = _content_parts(content)
    if any(part["type"] != "text" for part in parts):
        return parts
    return "".join(part["text"] for part in parts)


def _message(given: Any) -> Iterator[dict[str, Any]]:
    """Convert a message to messages of the chat API, where each tool result is a message of its own."""
    if not isinstance(given, dict):
        raise invalid("'messages' must be an array of objects")
    role = given.get("role")
    if not isinstance(role, str):
        raise invalid("Missing 'role' in message")
    if "content" not in given and role == "assistant":
        return
    if not isinstance(given.get("content"), list):
        yield given
        return
    content: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    reasoning = ""
    for block in _blocks(given["content"]):
        kind = block.get("type")
        if kind == "text":
            content.append({"type": "text", "text": block.get("text")})
        elif kind == "thinking":
            reasoning += text(block, "thinking")
        elif kind == "image":
            content.append(_image(block))
        elif kind == "document":
            content += _document(block)
        elif kind == "tool_use":
            arguments = json_text(block.get("input") or {})
            function = {"name": text(block, "name"), "arguments": arguments}
            calls.append({"id": text(block, "id"), "type": "function", "function": function})
        elif kind == "tool_result":
            result = _result_content(block.get("content"))
            results.append({"role": "tool", "tool_call_id": text(block, "tool_use_id"), "content": result})
    if content or calls or reasoning:
        message: dict[str, Any] = {"role": role, "content": content or ""}
        if calls:
            message["tool_calls"] = calls
        if reasoning:
            message["reasoning_content"] = reasoning
        yield message
    yield from results


def _tool_choice(choice: Mapping[str, Any]) -> Any:
    kind = text(choice, "type")
    if kind == "tool":
        return {"type": "function", "function": {"name": text(choice, "name")}}
    return {"any": "required", "none": "none"}.get(kind, "auto")


def messages_to_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a body of the Messages API to one of the chat API. Raises ApiError."""
    system = _system(body.get("system"))
    if "messages" not in body:
        raise invalid("'messages' is required")
    if not isinstance(body["messages"], list):
        raise invalid("'messages' must be an array of objects")
    messages = [{"role": "system", "content": system}] if system is not None else []
    for message in body["messages"]:
        messages += _message(message)
    chat: dict[str, Any] = {"messages": messages}
    if isinstance(body.get("tools"), list):
        chat["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": text(tool, "name"),
                    "description": text(tool, "description"),
                    "parameters": tool.get("input_schema") or {},
                },
            }
            for tool in _blocks(body["tools"])
            if isinstance(tool.get("input_schema", {}), (dict, type(None)))
        ]
        choice = mapping(body, "tool_choice")
        if choice and chat["tools"]:
            chat["tool_choice"] = _tool_choice(choice)
            if choice.get("disable_parallel_tool_use") is True:
                chat["parallel_tool_calls"] = False
    chat |= {row.names[-1]: body[row.messages] for row in PARAMETERS if row.messages and row.messages in body}
    if chat.get("max_tokens") is None:
        chat["max_tokens"] = MAX_TOKENS
    if "chat_template_kwargs" in body:
        chat["chat_template_kwargs"] = body["chat_template_kwargs"]
    thinking = mapping(body, "thinking")
    if thinking.get("type") == "enabled":
        chat["thinking_budget_tokens"] = integer(thinking, "budget_tokens", _THINKING_BUDGET)
    elif thinking.get("type") == "disabled":
        chat["reasoning_effort"] = "none"
    return chat


def _strict_tools(body: Mapping[str, Any]) -> StrictTools:
    """Return the tools whose schemas must be enforced."""
    tools = body.get("tools")
    given = [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    return {text(tool, "name"): None for tool in given if tool.get("strict") is True}


def _stop_reason(request: GenerationRequest, result: Result, reader: AnswerReader) -> dict[str, Any]:
    word = result.stopping_word if result.stopping_word in request.client_stops else None
    if result.stop_type not in ("eos", "word"):
        reason = "max_tokens"
    elif reader.calls:
        reason = "tool_use"
    else:
        reason = "stop_sequence" if word is not None else "end_turn"
    return {"stop_reason": reason, "stop_sequence": word}


def _input(arguments: str) -> Any:
    try:
        given = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return {}
    return given if isinstance(given, dict) else {}


class MessagesFormat:
    """Answers and events of the Messages API: a sequence of content blocks, each stopped before the next one starts."""

    media_type = EVENTS

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._reader = answer_reader(request)
        self._begun = False
        self._n_blocks = 0
        self._open = ""
        """Type of the open content block; "" if none is open."""

    def answer(self, results: Sequence[Result]) -> bytes:
        """Return the whole body."""
        result, reader = results[0], self._reader
        reader.push(result.content)
        reader.finish(was_cut(self._request, result))
        content: list[dict[str, Any]] = []
        if reader.reasoning:
            content.append({"type": "thinking", "thinking": reader.reasoning, "signature": ""})
        if reader.content:
            content.append({"type": "text", "text": reader.content})
        for call in reader.complete_calls:  # `input` is an object, which cannot be incomplete
            content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)})
        usage = {**_input_usage(result.n_prompt, result.n_cached), "output_tokens": result.n_predicted}
        body = {**self._message(content), **_stop_reason(self._request, result, reader), "usage": usage}
        return orjson.dumps(body)

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._request.id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self._request.model,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _begin(self, n_prompt: int, n_cached: int) -> Iterator[dict[str, Any]]:
        if not self._begun:
            self._begun = True
            usage = {**_input_usage(n_prompt, n_cached), "output_tokens": 0}
            yield {"type": "message_start", "message": {**self._message([]), "usage": usage}}
            yield {"type": "ping"}

    def _part(self, part: Part) -> Iterator[dict[str, Any]]:
        if isinstance(part, Content):
            yield from self._start("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": part.text})
        elif isinstance(part, Reasoning):
            yield from self._start("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": part.text})
        else:
            if part.head:
                yield from self._stop()
                block = {"type": "tool_use", "id": part.call.id, "name": part.call.name, "input": {}}
                yield from self._start("tool_use", block)
            if part.arguments:
                yield self._delta({"type": "input_json_delta", "partial_json": part.arguments})

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._n_blocks - 1, "delta": delta}

    def _start(self, kind: str, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if self._open == kind:
            return
        yield from self._stop()
        self._open = kind
        yield {"type": "content_block_start", "index": self._n_blocks, "content_block": block}
        self._n_blocks += 1

    def _stop(self) -> Iterator[dict[str, Any]]:
        if not self._open:
            return
        if self._open == "thinking":  # the API requires a signature; this one is empty
            yield self._delta({"type": "signature_delta", "signature": ""})
        yield {"type": "content_block_stop", "index": self._n_blocks - 1}
        self._open = ""

    def token(self, index: int, event: Token) -> bytes:
        timings = event.timings
        events = list(self._begin(len(self._request.prompt(0)), timings.cache_n if timings else 0))
        for part in self._reader.push(event.text):
            events += self._part(part)
        return _written(events)

    def progress(self, index: int, event: Progress) -> bytes:
        return b""

    def final(self, index: int, result: Result) -> bytes:
        events = list(self._begin(result.n_prompt, result.n_cached))
        for part in self._reader.finish(was_cut(self._request, result)):
            events += self._part(part)
        events += self._stop()
        usage = {**_input_usage(result.n_prompt, result.n_cached), "output_tokens": result.n_predicted}
        events.append(
            {"type": "message_delta", "delta": _stop_reason(self._request, result, self._reader), "usage": usage}
        )
        events.append({"type": "message_stop"})
        return _written(events)

    def end(self) -> bytes:
        return b""

    def error(self, error: ApiError) -> bytes:
        return _written([anthropic_error(error)])

    def failure(self, error: ApiError) -> Response:
        return error_response(error, _PATH)


def _input_usage(n_prompt: int, n_cached: int) -> dict[str, int]:
    return {"cache_read_input_tokens": n_cached, "input_tokens": n_prompt - n_cached}


def _written(events: list[dict[str, Any]]) -> bytes:
    return b"".join(b"event: " + e["type"].encode() + b"\ndata: " + orjson.dumps(e) + b"\n\n" for e in events)


def messages_router(generator: Generator) -> Routes:
    """Return the routes of Anthropic's Messages API."""
    router = Routes("generate")

    @router.post(_PATH, **describe("messages"))
    async def messages(request: Request) -> Response:
        body = await read_object(request)
        chat = messages_to_chat(body)
        if flag(chat, "stream"):
            chat["timings_per_token"] = True  # the first event has the number of cached tokens
        return await generator.chat(chat, MessagesFormat, strict_tools=_strict_tools(body))

    @router.post("/v1/messages/count_tokens", **describe("messages_count"))
    async def count_tokens(request: Request) -> Response:
        body = await read_object(request)
        n_tokens = await generator.count(messages_to_chat(body), _strict_tools(body))
        return json_response(orjson.dumps({"input_tokens": n_tokens}))

    return router
