"""Chats in OpenAI's form: prepare a conversation for the engine, and format its answer, whole or in chunks."""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llamado.engine.request import Result, TokenProb, TokenProbs
from llamado.library.completion import Events, finish_reason, last, usage
from llamado.library.errors import LibraryError
from llamado.text.dialects import Conversation, PreparedChat, prepare
from llamado.text.dialects.answer import AnswerReader, delta
from llamado.text.grammar.compiler import Constraint, GrammarCompiler
from llamado.text.grammar.source import GrammarError, GrammarSource
from llamado.text.template.chat import ChatTemplate
from llamado.text.tokenizer.tokenizer import Tokenizer

log = logging.getLogger("llamado.library")


def prepared_chat(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: str | Mapping[str, Any] | None,
    response_format: Mapping[str, Any] | None,
    grammar: GrammarSource | None,
) -> PreparedChat:
    """Prepare a conversation. Raises LibraryError and TemplateError."""
    request = Conversation(
        messages=[_message(message) for message in messages],
        tools=tools or (),
        tool_choice=_tool_choice(tool_choice, tools or ()),
        json_schema=_schema(response_format),
        grammar=grammar,
    )
    return prepare(template, request)


def _message(given: Mapping[str, Any]) -> dict[str, Any]:
    content = given.get("content") or ""
    message = {**given, "content": content}
    if message.get("tool_calls"):
        message["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
    return message


def _tool_call(given: Mapping[str, Any]) -> dict[str, Any]:
    arguments = given["function"]["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments)
    return {**given, "function": {**given["function"], "arguments": arguments}}


def _tool_choice(given: str | Mapping[str, Any] | None, tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the choice as Conversation takes it. Raises LibraryError."""
    if given is None or isinstance(given, str):
        if given not in (None, "auto", "none", "required"):
            raise LibraryError(f"tool_choice: expected auto, none, required or a function, got {given!r}")
        return given or "auto"
    name = given["function"]["name"]
    if all(tool["function"]["name"] != name for tool in tools):
        raise LibraryError(f"tool_choice: there is no tool {name!r}")
    return f"function:{name}"


def _schema(form: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    kind = None if form is None else form.get("type")
    if form is None or kind in (None, "text"):
        return None
    if kind not in ("json_object", "json_schema"):
        raise LibraryError(f"response_format: expected type text, json_object or json_schema, got {kind!r}")
    schema = form.get("schema") or (form.get("json_schema") or {}).get("schema")
    return schema or {"type": "object"}


def limits(prepared: PreparedChat, grammars: GrammarCompiler, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return fields of Request that constrain the answer to the requested format. Raises GrammarError."""
    constraint: Constraint | None = None
    if prepared.grammar is not None:
        try:
            constraint = grammars.compile(prepared.grammar, triggers=prepared.triggers)
        except GrammarError as error:
            if prepared.strict:
                raise
            log.warning("tools: their schemas are not enforced: %s", error)
        if prepared.thinking is not None and prepared.thinking[1] not in prepared.generation_prompt:
            start, end = prepared.thinking
            constraint = grammars.with_reasoning(constraint, start=start, end=end, open=prepared.thinking_open)
    tokens = [tokenizer.encode(text, add_special=False, parse_special=True) for text in prepared.preserved]
    return {"constraint": constraint, "preserved": frozenset(found[0] for found in tokens if len(found) == 1)}


class ChatCompletion:
    """Formats one answer of a chat."""

    def __init__(self, model: str, prepared: PreparedChat, *, logprobs: bool = False) -> None:
        self._head = {"id": f"chatcmpl-{uuid.uuid4()}", "created": int(time.time()), "model": model}
        self._reader = AnswerReader(prepared.parser(), prepared.given)
        self._stops = prepared.stops
        self._shows = logprobs

    def whole(self, events: Events) -> dict[str, Any]:
        """Return the whole answer."""
        result = last(events)
        self._reader.push(result.content)
        self._reader.finish(self._was_cut(result))
        message = self._reader.message()
        if self._reader.calls and not message["content"]:
            message["content"] = None
        choice = {
            "index": 0,
            "message": message,
            "logprobs": self._logprobs(result.probs),
            "finish_reason": self._reason(result),
        }
        return {**self._head, "object": "chat.completion", "choices": [choice], "usage": usage(result)}

    def chunks(self, events: Events) -> Iterator[dict[str, Any]]:
        """Yield the answer's chunks: first the role, last the reason for its end."""
        yield self._chunk({"role": "assistant"})
        try:
            while True:
                event = next(events)
                changes = [delta(part) for part in self._reader.push(event.text)]
                logprobs = self._logprobs(event.probs)
                if logprobs is not None and not changes:
                    changes = [{"content": ""}]
                for change in changes:
                    yield self._chunk(change, logprobs)
                    logprobs = None
        except StopIteration as end:
            for part in self._reader.finish(self._was_cut(end.value)):
                yield self._chunk(delta(part))
            yield self._chunk({}, reason=self._reason(end.value))
        finally:
            events.close()

    def _was_cut(self, result: Result) -> bool:
        """Return True if a limit, or a stop string of the caller, ended the answer."""
        return result.stop_type != "eos" and result.stopping_word not in self._stops

    def _reason(self, result: Result) -> str:
        reason = finish_reason(result)
        return "tool_calls" if self._reader.calls and reason == "stop" else reason

    def _chunk(
        self, change: dict[str, Any], logprobs: dict[str, Any] | None = None, reason: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": 0, "delta": change, "logprobs": logprobs, "finish_reason": reason}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}

    def _logprobs(self, probs: Sequence[TokenProbs] | None) -> dict[str, Any] | None:
        if not self._shows or not probs:
            return None
        return {"content": [{**_prob(p.token), "top_logprobs": [_prob(other) for other in p.top]} for p in probs]}


def _prob(prob: TokenProb) -> dict[str, Any]:
    return {"token": prob.piece.decode("utf-8", "ignore"), "bytes": list(prob.piece), "logprob": prob.logprob}
