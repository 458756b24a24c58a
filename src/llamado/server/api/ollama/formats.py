"""Answers of Ollama's API: one JSON object, or one on each line of a stream."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import orjson
from starlette.responses import Response

from llamado.engine.request import Progress, Result, Token, TokenProb, TokenProbs
from llamado.http.answer import json_response
from llamado.http.request_log import current
from llamado.server.errors import ApiError
from llamado.server.generate.formats import finish_reason, was_cut
from llamado.server.generate.request import GenerationRequest
from llamado.text.dialects.answer import AnswerReader, Part, PartialCall
from llamado.text.dialects.dialect import Content, Reasoning

LINES = "application/x-ndjson"
_LOWEST = -3.4028234663852886e38  # JSON has no -inf


def line(value: Any) -> bytes:
    """One object of a stream."""
    return orjson.dumps(value) + b"\n"


def now() -> str:
    """The time as `created_at` has it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


class Waited(NamedTuple):
    """When a request came, and when its model was there, by `time.perf_counter`."""

    began: float
    ready: float

    @classmethod
    def of_now(cls) -> Waited:
        """Of the request that is answered, whose model is there."""
        ready, record = time.perf_counter(), current.get()
        return cls(ready if record is None else record.began, ready)

    def total(self) -> int:
        """Nanoseconds until now."""
        return nanoseconds(time.perf_counter() - self.began)

    def load(self) -> int:
        """Nanoseconds that the model was waited for."""
        return nanoseconds(self.ready - self.began)


def _prob(p: TokenProb) -> dict[str, Any]:
    return {"token": p.piece.decode("utf-8", "replace"), "logprob": max(p.logprob, _LOWEST), "bytes": list(p.piece)}


def _logprobs(probs: Sequence[TokenProbs], most: int) -> dict[str, Any]:
    """The field with the probabilities of tokens, and of the `most` likeliest ones at each place."""
    if not probs:
        return {}
    shown = [_prob(p.token) | ({"top_logprobs": [_prob(t) for t in p.top[:most]]} if most else {}) for p in probs]
    return {"logprobs": shown}


def _arguments(call: PartialCall) -> dict[str, Any]:
    """The arguments of a call as an object; empty where they are none."""
    try:
        given = orjson.loads(call.arguments)
    except orjson.JSONDecodeError:
        return {}
    return given if isinstance(given, dict) else {}


class OllamaFormat:
    """What the answers of `/api/chat` and `/api/generate` share.

    `shows_context`: whether the end tells the tokens of prompt and answer.
    """

    media_type = LINES

    def __init__(
        self,
        request: GenerationRequest,
        model: str,
        *,
        times: Waited,
        top_logprobs: int = 0,
        shows_context: bool = False,
    ) -> None:
        self._request = request
        self._shows_context = shows_context
        self._model = model
        self._times = times
        self._most = top_logprobs
        # What the client gave of the answer it knows already.
        self._reader = None if request.prepared is None else AnswerReader(request.prepared.parser())
        self._told_calls = 0

    def _head(self) -> dict[str, Any]:
        return {"model": self._model, "created_at": now()}

    def _said(self, content: str, thoughts: str, calls: Sequence[PartialCall]) -> dict[str, Any]:
        """The fields that hold a part of the answer, or all of it."""
        raise NotImplementedError

    def _end(self, result: Result) -> dict[str, Any]:
        return {"context": [*self._request.prompt(0), *result.tokens]} if self._shows_context else {}

    def token(self, index: int, event: Token) -> bytes:
        probs = _logprobs(event.probs or (), self._most)
        if self._reader is None:
            parts: Sequence[Part] = [Content(event.text)] if event.text else []
        else:
            parts = self._reader.push(event.text)
        chunks = list(self._chunks(parts))
        if probs:
            chunks = chunks or [self._chunk()]
            chunks[-1] |= probs
        return b"".join(map(line, chunks))

    def _chunks(self, parts: Sequence[Part], *, over: bool = False) -> Iterator[dict[str, Any]]:
        """What a stream says of parts; a call is told when it is complete: something follows it, or all is `over`."""
        for part in parts:
            if isinstance(part, Content):
                yield from self._calls(over=True)
                yield self._chunk(content=part.text)
            elif isinstance(part, Reasoning):
                yield from self._calls(over=True)
                yield self._chunk(thoughts=part.text)
        yield from self._calls(over=over)

    def _calls(self, *, over: bool) -> Iterator[dict[str, Any]]:
        calls = [] if self._reader is None else self._reader.complete_calls if over else self._reader.calls
        complete = len(calls) if over else len(calls) - 1
        for call in calls[self._told_calls : complete]:
            yield self._chunk(calls=[call])
        self._told_calls = max(self._told_calls, complete)

    def _chunk(self, content: str = "", thoughts: str = "", calls: Sequence[PartialCall] = ()) -> dict[str, Any]:
        return {**self._head(), **self._said(content, thoughts, calls), "done": False}

    def progress(self, index: int, event: Progress) -> bytes:
        return b""

    def final(self, index: int, result: Result) -> bytes:
        chunks: list[dict[str, Any]] = []
        if self._reader is not None:
            chunks += self._chunks(self._reader.finish(was_cut(self._request, result)), over=True)
        return b"".join(map(line, [*chunks, self._over(result, self._said("", "", ()))]))

    def answer(self, results: Sequence[Result]) -> bytes:
        """The whole body."""
        result, reader = results[0], self._reader
        if reader is None:
            said = self._said(result.content, "", ())
        else:
            reader.push(result.content)
            reader.finish(was_cut(self._request, result))
            said = self._said(reader.content, reader.reasoning, reader.complete_calls)
        return orjson.dumps(self._over(result, said) | _logprobs(result.probs, self._most))

    def _over(self, result: Result, said: dict[str, Any]) -> dict[str, Any]:
        timings = result.timings
        return {
            **self._head(),
            **said,
            "done": True,
            "done_reason": finish_reason(result),
            **self._end(result),
            "total_duration": self._times.total(),
            "load_duration": self._times.load(),
            "prompt_eval_count": result.n_prompt,
            "prompt_eval_duration": nanoseconds(timings.prompt_ms * 1e-3),
            "eval_count": result.n_predicted,
            "eval_duration": nanoseconds(timings.predicted_ms * 1e-3),
        }

    def end(self) -> bytes:
        return b""

    def error(self, error: ApiError) -> bytes:
        return line({"error": error.message})

    def failure(self, error: ApiError) -> Response:
        headers = {"Retry-After": str(error.retry_after)} if error.retry_after is not None else None
        return json_response(orjson.dumps({"error": error.message}), error.status, headers)


class ChatLines(OllamaFormat):
    """`/api/chat`: a message, or its parts."""

    def _said(self, content: str, thoughts: str, calls: Sequence[PartialCall]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if thoughts:
            message["thinking"] = thoughts
        if calls:
            known = [] if self._reader is None else self._reader.calls
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "function": {"index": known.index(call), "name": call.name, "arguments": _arguments(call)},
                }
                for call in calls
            ]
        return {"message": message}


class GenerateLines(OllamaFormat):
    """`/api/generate`: a text, or its parts."""

    def _said(self, content: str, thoughts: str, calls: Sequence[PartialCall]) -> dict[str, Any]:
        return {"response": content} | ({"thinking": thoughts} if thoughts else {})
