"""OpenAI's Responses API: converts its bodies to chat bodies, and chat answers to its items and events.

Requests are read as llama-server reads them (`server-chat.cpp`, b11434). Answers and events have all of OpenAI's
fields; llama-server has fewer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from llamado.engine.parameters import PARAMETERS
from llamado.engine.request import Progress, Result, Token
from llamado.http.answer import error_response, json_response
from llamado.http.errors import responses_error
from llamado.http.json_body import read_object
from llamado.server.api.custom_tools import CustomInput, custom_function, enforced_input, whole_input
from llamado.server.api.openapi import describe
from llamado.server.api.routes import Routes
from llamado.server.errors import ApiError, invalid
from llamado.server.generate.formats import answer_reader, progress_json, timings_json, was_cut
from llamado.server.generate.generator import Generator
from llamado.server.generate.json_values import json_text, mapping, text
from llamado.server.generate.request import GenerationRequest
from llamado.server.generate.streaming import EVENTS
from llamado.text.dialects.answer import AnswerReader, Part, PartialCall, random_id
from llamado.text.dialects.dialect import Content, Reasoning, StrictTools


def _input_part(part: Any) -> dict[str, Any]:
    fields = part if isinstance(part, dict) else {}
    kind = text(fields, "type")
    if kind == "input_text":
        if "text" not in fields:
            raise invalid("'Input text' requires 'text'")
        return {"type": "text", "text": fields["text"]}
    if kind == "input_image":
        if "image_url" not in fields:
            raise invalid("'image_url' is required")
        return {"type": "image_url", "image_url": {"url": fields["image_url"]}}
    if kind == "input_audio":
        return {"type": "input_audio", "input_audio": fields.get("input_audio")}
    if kind == "input_file":
        raise invalid("'input_file' is not supported")
    raise invalid("'type' must be one of 'input_text', 'input_image', or 'input_file'")


def _output_part(part: Any) -> dict[str, Any]:
    fields = part if isinstance(part, dict) else {}
    kind = text(fields, "type")
    if kind in ("output_text", "input_text"):
        if not isinstance(fields.get("text"), str):
            raise invalid("'Output text' requires 'text'")
        return {"type": "text", "text": fields["text"]}
    if kind == "refusal":
        if not isinstance(fields.get("refusal"), str):
            raise invalid("'Refusal' requires 'refusal'")
        return {"type": "text", "text": fields["refusal"]}
    raise invalid("'type' must be one of 'output_text' or 'refusal'")


def _tool_output(part: Any) -> dict[str, Any]:
    fields = part if isinstance(part, dict) else {}
    if "type" not in fields:
        raise invalid("Output of tool call missing 'type' field")
    if fields["type"] not in ("input_text", "input_image"):
        raise invalid("Output of tool call should be 'Input text' or 'Input image'")
    return _input_part(part)


def _summary(parts: list[Any]) -> str:
    """Return the text of a reasoning summary."""
    return "\n\n".join(text(part, "text") for part in parts if isinstance(part, dict))


def _call(item: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the tool's name and the arguments, as JSON, of an item that is a call."""
    kind, action, given = item["type"], item.get("action"), item.get("input")
    if kind == "custom_tool_call":  # its input is free text
        return item.get("name"), json_text({"input": given}) if isinstance(given, str) else None
    if kind == "local_shell_call":
        return "local_shell", json_text(action) if isinstance(action, dict) else None
    return item.get("name"), item.get("arguments")


_CALLS = ("function_call", "custom_tool_call", "local_shell_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")
_HOSTED = ("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call")
"""Calls of tools that ran at OpenAI; the messages after them have the results."""


class _Messages:
    """Builder of chat messages from items: text, reasoning and calls of one turn go into one assistant message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def add(self, item: Any) -> None:
        """Add the next item. Raises ApiError for an unknown kind."""
        fields = item if isinstance(item, dict) else {}
        kind, role, content = fields.get("type"), fields.get("role"), fields.get("content")
        if role in ("user", "system", "developer") and isinstance(content, (str, list)):
            parts = [{"type": "input_text", "text": content}] if isinstance(content, str) else content
            message = {k: v for k, v in fields.items() if k not in ("type", "status")}
            self.messages.append({**message, "content": [_input_part(part) for part in parts]})
        elif role == "assistant" and (kind == "message" or (kind is None and isinstance(content, (str, list)))):
            parts = [{"type": "output_text", "text": content}] if isinstance(content, str) else content or []
            message = self._assistant()
            converted = [_output_part(part) for part in parts] if isinstance(parts, list) else []
            message["content"] = [*message["content"], *converted]
        elif kind in _CALLS:
            name, arguments = _call(fields)
            if not all(isinstance(given, str) for given in (name, arguments, fields.get("call_id"))):
                raise invalid("Cannot determine type of 'item'")
            calls = self._assistant().setdefault("tool_calls", [])
            function = {"arguments": arguments, "name": name}
            calls.append({"function": function, "id": fields["call_id"], "type": "function"})
        elif kind in _OUTPUTS and isinstance(fields.get("call_id", fields.get("id")), str):
            output = fields.get("output")
            if not isinstance(output, (str, list)):
                raise invalid("Cannot determine type of 'item'")
            result = output if isinstance(output, str) else [_tool_output(part) for part in output]
            self.messages.append(
                {"role": "tool", "content": result, "tool_call_id": fields.get("call_id", fields.get("id"))}
            )
        elif kind == "reasoning" and isinstance(fields.get("summary"), list):
            reasoning = _summary(fields["summary"]) if content is None else _reasoning(content)
            if reasoning:  # the reasoning of OpenAI's own models is encrypted, so there is no text
                self._assistant()["reasoning_content"] = reasoning
        elif kind == "item_reference":
            self._check_reference(text(fields, "id"))
        elif kind not in _HOSTED:
            raise invalid("Cannot determine type of 'item'")

    def _check_reference(self, id: str) -> None:
        """Raise ApiError for a reference to an item other than reasoning or a web search, which may be missing."""
        if not id.startswith(("rs_", "ws_")):
            raise invalid(f"llamado keeps no items: send {id[:100]!r} itself instead of an 'item_reference' to it")

    def _assistant(self) -> dict[str, Any]:
        """Return the current message of the assistant; start one after another role."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": []})
        return self.messages[-1]


def _reasoning(content: Any) -> str:
    if not isinstance(content, list):
        raise invalid("item['content'] is not an array")
    if not content:
        raise invalid("item['content'] is empty")
    first = content[0].get("text") if isinstance(content[0], dict) else None
    if not isinstance(first, str):
        raise invalid("item['content']['text'] is not a string")
    return first


def _tools(given: Any) -> list[dict[str, Any]]:
    if not isinstance(given, list):
        raise invalid("'tools' must be an array of objects")
    tools = []
    for tool in given:
        fields = tool if isinstance(tool, dict) else {}
        if fields.get("type") == "function":  # hosted tools, such as web search, exist only at OpenAI
            function = {"strict": True} | {k: v for k, v in fields.items() if k != "type" and v is not None}
            tools.append({"type": "function", "function": function})
        elif fields.get("type") == "custom":
            tools.append({"type": "function", "function": custom_function(fields)})
    return tools


def _tool_objects(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    given = body.get("tools")
    return [tool for tool in given if isinstance(tool, dict)] if isinstance(given, list) else []


def _strict_tools(body: Mapping[str, Any]) -> StrictTools:
    """Return the tools that the client marked as strict, and the custom tools that have a grammar.

    Templates are shown `strict` for other tools, too. Raises ApiError.
    """
    tools = _tool_objects(body)
    strict = {text(tool, "name"): None for tool in tools if tool.get("strict") is True}
    custom = {text(tool, "name"): enforced_input(tool) for tool in tools if tool.get("type") == "custom"}
    return {**strict, **{name: schema for name, schema in custom.items() if schema is not None}}


def _custom_tools(body: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(text(tool, "name") for tool in _tool_objects(body) if tool.get("type") == "custom")


def responses_to_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a body of the Responses API to one of the chat API. Raises ApiError."""
    if "input" not in body:
        raise invalid("'input' is required")
    if text(body, "previous_response_id"):
        raise invalid(
            "llamado keeps no responses: 'previous_response_id' is not supported; send the whole conversation"
        )
    given = body["input"]
    renamed = {row.responses: row.names[-1] for row in PARAMETERS if row.responses}
    converted = {"input", "instructions", "tools", "reasoning", "text", "tool_choice", *renamed}
    chat = {name: value for name, value in body.items() if name not in converted}
    messages = _Messages()
    if isinstance(body.get("instructions"), str):
        messages.messages.append({"role": "system", "content": body["instructions"]})
    if isinstance(given, str):
        messages.messages.append({"role": "user", "content": given})
    elif isinstance(given, list):
        for item in given:
            messages.add(item)
    else:
        raise invalid("'input' must be a string or array of objects")
    chat["messages"] = messages.messages
    if body.get("tools") is not None and (tools := _tools(body["tools"])):
        chat["tools"] = tools
        if "tool_choice" in body:
            chat["tool_choice"] = body["tool_choice"]
    chat |= {name: body[field] for field, name in renamed.items() if field in body}
    effort = mapping(body, "reasoning").get("effort")
    if effort is not None:
        chat["reasoning_effort"] = effort
    form = mapping(mapping(body, "text"), "format")
    if form:
        # The Responses API has the fields of a schema in `format`, the chat API one level down, under `json_schema`.
        nested = {"type": "json_schema", "json_schema": form}
        chat["response_format"] = nested if form.get("type") == "json_schema" else form
    return chat


class ResponsesFormat:
    """Answers and events of the Responses API.

    The events of a stream are numbered. An output item is added, extended by deltas, and done before the next one.
    """

    media_type = EVENTS

    def __init__(self, request: GenerationRequest, custom: Set[str] = frozenset()) -> None:
        """`custom`: the names of custom tools, whose calls have a text as their input."""
        self._request = request
        self._custom = custom
        self._input = CustomInput()
        """The reader of the open item's input, if the item is a call of a custom tool."""
        self._id = f"resp_{random_id()}"
        self._created = int(time.time())
        self._reader = answer_reader(request)
        self._number = 0
        self._begun = False
        self._items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        """The last of `_items` until it is done."""
        self._deltas: list[str] = []

    # Whole answers

    def answer(self, results: Sequence[Result]) -> bytes:
        """Return the whole body."""
        self._reader.push(results[0].content)
        self._reader.finish(was_cut(self._request, results[0]))
        return orjson.dumps(self._response(results[0], _items(self._reader, self._custom)))

    def _response(self, result: Result | None, output: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the `response` object; without a result, the response is in progress."""
        status = "in_progress" if result is None else _status(result)
        if status == "incomplete" and output:
            output[-1]["status"] = status
        params = self._request.params
        response: dict[str, Any] = {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": None,
            "max_output_tokens": params.n_predict if params.n_predict >= 0 else None,
            "metadata": {},
            "model": self._request.model,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "temperature": params.sampling.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": params.sampling.top_p,
            "truncation": "disabled",
            "usage": None,
        }
        if result is not None:
            response["completed_at"] = int(time.time())
            response["usage"] = {
                "input_tokens": result.n_prompt,
                "output_tokens": result.n_predicted,
                "total_tokens": result.n_prompt + result.n_predicted,
                "input_tokens_details": {"cached_tokens": result.n_cached},
                "output_tokens_details": {"reasoning_tokens": 0},
            }
        return response

    # Streams

    def _event(self, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event

    def _begin(self) -> Iterator[dict[str, Any]]:
        if not self._begun:
            self._begun = True
            for kind in ("response.created", "response.in_progress"):
                yield self._event(kind, {"response": self._response(None, [])})

    @property
    def _place(self) -> dict[str, Any]:
        """The fields of an event that refer to the open item."""
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _part(self, part: Part) -> Iterator[dict[str, Any]]:
        if isinstance(part, Content):
            if self._open is None or self._open["type"] != "message":
                yield from self._add({"id": _new("msg"), "type": "message", "role": "assistant", "content": []})
                empty = _text_part("")
                yield self._event("response.content_part.added", {**self._place, "content_index": 0, "part": empty})
            self._deltas.append(part.text)
            delta = {"content_index": 0, "delta": part.text, "logprobs": []}
            yield self._event("response.output_text.delta", {**self._place, **delta})
        elif isinstance(part, Reasoning):
            if self._open is None or self._open["type"] != "reasoning":
                yield from self._add(
                    {"id": _new("rs"), "type": "reasoning", "summary": [], "content": [], "encrypted_content": ""}
                )
            self._deltas.append(part.text)
            yield self._event("response.reasoning_text.delta", {**self._place, "content_index": 0, "delta": part.text})
        else:
            if part.head:
                yield from self._add(_call_item(part.call, self._custom))
                self._input = CustomInput()
            is_custom = self._items[-1]["type"] == "custom_tool_call"
            arguments = self._input.push(part.arguments) if is_custom else part.arguments
            if arguments:
                self._deltas.append(arguments)
                kind = "custom_tool_call_input" if is_custom else "function_call_arguments"
                yield self._event(f"response.{kind}.delta", {**self._place, "delta": arguments})

    def _add(self, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._close()
        self._open = {**item, "status": "in_progress"}
        self._items.append(self._open)
        empty = {"function_call": {"arguments": ""}, "custom_tool_call": {"input": ""}}
        shown = {**self._open, **empty.get(item["type"], {})}
        yield self._event("response.output_item.added", {"output_index": len(self._items) - 1, "item": shown})

    def _close(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        """Yield the events that complete the open item, if there is one."""
        item, whole = self._open, "".join(self._deltas)
        if item is None:
            return
        if item["type"] == "message":
            done = {**self._place, "content_index": 0}
            yield self._event("response.output_text.done", {**done, "text": whole, "logprobs": []})
            item["content"] = [_text_part(whole)]
            yield self._event("response.content_part.done", {**done, "part": item["content"][0]})
        elif item["type"] == "reasoning":
            item["content"] = [{"type": "reasoning_text", "text": whole}]
            yield self._event("response.reasoning_text.done", {**self._place, "content_index": 0, "text": whole})
        elif item["type"] == "custom_tool_call":
            if rest := self._input.finish():
                whole += rest
                yield self._event("response.custom_tool_call_input.delta", {**self._place, "delta": rest})
            item["input"] = whole
            yield self._event("response.custom_tool_call_input.done", {**self._place, "input": whole})
        else:
            item["arguments"] = whole
            done = {**self._place, "name": item["name"], "arguments": whole}
            yield self._event("response.function_call_arguments.done", done)
        item["status"] = status
        yield self._event("response.output_item.done", {"output_index": len(self._items) - 1, "item": item})
        self._open, self._deltas = None, []

    def token(self, index: int, event: Token) -> bytes:
        events = list(self._begin())
        for part in self._reader.push(event.text):
            events += self._part(part)
        if event.timings is not None and events:
            events[-1]["timings"] = timings_json(event.timings)
        return _written(events)

    def progress(self, index: int, event: Progress) -> bytes:
        events = list(self._begin()) or [self._event("response.in_progress", {"response": self._response(None, [])})]
        events[-1]["prompt_progress"] = progress_json(event)
        if event.timings is not None:
            events[-1]["timings"] = timings_json(event.timings)
        return _written(events)

    def final(self, index: int, result: Result) -> bytes:
        events = list(self._begin())
        for part in self._reader.finish(was_cut(self._request, result)):
            events += self._part(part)
        events += self._close(_status(result))
        response = self._response(result, self._items)
        last = self._event(f"response.{response['status']}", {"response": response})
        events.append({**last, "timings": timings_json(result.timings)})
        return _written(events)

    def end(self) -> bytes:
        return b""

    def error(self, error: ApiError) -> bytes:
        return _written([self._event("error", responses_error(error))])

    def failure(self, error: ApiError) -> Response:
        return error_response(error)


def _status(result: Result) -> str:
    return "incomplete" if result.stop_type == "limit" else "completed"


def _new(prefix: str) -> str:
    return f"{prefix}_{random_id()}"


def _written(events: list[dict[str, Any]]) -> bytes:
    return b"".join(b"event: " + e["type"].encode() + b"\ndata: " + orjson.dumps(e) + b"\n\n" for e in events)


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "annotations": [], "logprobs": [], "text": text}


def _call_item(call: PartialCall, custom: Set[str]) -> dict[str, Any]:
    # Like llama-server, prefix ids with `call_`, but not those that have the prefix from the model.
    call_id = call.id if call.id.startswith("call_") else f"call_{call.id}"
    if call.name in custom:
        item = {"id": f"ctc_{call.id}", "type": "custom_tool_call", "call_id": call_id, "name": call.name}
        return {**item, "input": whole_input(call.arguments)}
    return {
        "id": f"fc_{call.id}",
        "type": "function_call",
        "arguments": call.arguments,
        "call_id": call_id,
        "name": call.name,
    }


def _items(reader: AnswerReader, custom: Set[str]) -> list[dict[str, Any]]:
    """Return a whole answer as output items."""
    output: list[dict[str, Any]] = []
    if reader.reasoning:
        part = {"type": "reasoning_text", "text": reader.reasoning}
        item = {"id": _new("rs"), "type": "reasoning", "summary": [], "content": [part], "encrypted_content": ""}
        output.append({**item, "status": "completed"})
    if reader.content:
        item = {"id": _new("msg"), "type": "message", "role": "assistant", "content": [_text_part(reader.content)]}
        output.append({**item, "status": "completed"})
    return output + [{**_call_item(call, custom), "status": "completed"} for call in reader.calls]


def responses_router(generator: Generator) -> Routes:
    """Return the routes of OpenAI's Responses API."""
    router = Routes("generate")

    @router.post("/v1/responses", **describe("responses"))
    @router.post("/responses", **describe("responses"))
    async def responses(request: Request) -> Response:
        body = await read_object(request)
        chat = responses_to_chat(body)
        chat.pop("n", None)  # this API gives one answer
        chat.pop("n_cmpl", None)
        make = partial(ResponsesFormat, custom=_custom_tools(body))
        return await generator.chat(chat, make, strict_tools=_strict_tools(body))

    @router.post("/v1/responses/input_tokens", **describe("responses_count"))
    @router.post("/responses/input_tokens", **describe("responses_count"))
    async def input_tokens(request: Request) -> Response:
        body = await read_object(request)
        n_tokens = await generator.count(responses_to_chat(body), _strict_tools(body))
        return json_response(orjson.dumps({"input_tokens": n_tokens, "object": "response.input_tokens"}))

    return router
