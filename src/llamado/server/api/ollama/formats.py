"""Answers of Ollama's API: one JSON object, or a stream with one on each line."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import orjson
from starlette.responses import Response

from llamado.engine.request import Progress, Result, Token, TokenProb, TokenProbs
from llamado.http.answer import json_response
from llamado.http.monitoring.request_log import current
from llamado.server.errors import ApiError
from llamado.server.generate.formats import finish_reason, was_cut
from llamado.server.generate.request import GenerationRequest
from llamado.text.dialects.answer import AnswerReader, Part, PartialCall
from llamado.text.dialects.dialect import Content, Reasoning

LINES = "application/x-ndjson"
_LOWEST = -3.4028234663852886e38  # JSON has no -inf


def line(value: Any) -> bytes:
    """Return a value as one line of a stream."""
    return orjson.dumps(value) + b"\n"


def now() -> str:
    """Return the current time in the form of `created_at`."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


class RequestTimes(NamedTuple):
    """Arrival of a request, and the moment its model was loaded, by `time.perf_counter`."""

    began: float
    ready: float

    @classmethod
    def of_now(cls) -> RequestTimes:
        """Return the times of the current request, whose model is loaded now."""
        ready, record = time.perf_counter(), current.get()
        return cls(ready if record is None else record.began, ready)

    def total(self) -> int:
        """Return the nanoseconds from arrival until now."""
        return nanoseconds(time.perf_counter() - self.began)

    def load(self) -> int:
        """Return the nanoseconds that the request waited for the model."""
        return nanoseconds(self.ready - self.began)


def _prob(p: TokenProb) -> dict[str, Any]:
    return {"token": p.piece.decode("utf-8", "replace"), "logprob": max(p.logprob, _LOWEST), "bytes": list(p.piece)}


def _logprobs(probs: Sequence[TokenProbs], most: int) -> dict[str, Any]:
    """Return the field with the log-probabilities of tokens, and of the `most` likely ones at each position."""
    if not probs:
        return {}
    shown = [_prob(p.token) | ({"top_logprobs": [_prob(t) for t in p.top[:most]]} if most else {}) for p in probs]
    return {"logprobs": shown}


def _arguments(call: PartialCall) -> dict[str, Any]:
    """Return the arguments of a call as an object; {} if they are no object."""
    try:
        given = orjson.loads(call.arguments)
    except orjson.JSONDecodeError:
        return {}
    return given if isinstance(given, dict) else {}


class OllamaFormat:
    """Base of the formats of `/api/chat` and `/api/generate`."""

    media_type = LINES

    def __init__(
        self,
        request: GenerationRequest,
        model: str,
        *,
        times: RequestTimes,
        top_logprobs: int = 0,
        shows_context: bool = False,
    ) -> None:
        """`shows_context`: the end of the answer has the tokens of prompt and answer."""
        self._request = request
        self._shows_context = shows_context
        self._model = model
        self._times = times
        self._most = top_logprobs
        # The reader gets no prefill, so answers do not repeat it.
        self._reader = None if request.prepared is None else AnswerReader(request.prepared.parser())
        self._n_sent_calls = 0

    def _head(self) -> dict[str, Any]:
        return {"model": self._model, "created_at": now()}

    def _content(self, content: str, reasoning: str, calls: Sequence[PartialCall]) -> dict[str, Any]:
        """Return the fields with a part of the answer, or with all of it."""
        raise NotImplementedError

    def _end(self, result: Result) -> dict[str, Any]:
        # Ids of media tokens mean nothing without the media.
        shows = self._shows_context and not any(self._request.spans)
        return {"context": [*self._request.prompt(0), *result.tokens]} if shows else {}

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
        """Yield the chunks for parts of an answer.

        A call is sent once it is complete: when another part follows, or at the end of the answer (`over`).
        """
        for part in parts:
            if isinstance(part, Content):
                yield from self._calls(over=True)
                yield self._chunk(content=part.text)
            elif isinstance(part, Reasoning):
                yield from self._calls(over=True)
                yield self._chunk(reasoning=part.text)
        yield from self._calls(over=over)

    def _calls(self, *, over: bool) -> Iterator[dict[str, Any]]:
        calls = [] if self._reader is None else self._reader.complete_calls if over else self._reader.calls
        complete = len(calls) if over else len(calls) - 1
        for call in calls[self._n_sent_calls : complete]:
            yield self._chunk(calls=[call])
        self._n_sent_calls = max(self._n_sent_calls, complete)

    def _chunk(self, content: str = "", reasoning: str = "", calls: Sequence[PartialCall] = ()) -> dict[str, Any]:
        return {**self._head(), **self._content(content, reasoning, calls), "done": False}

    def progress(self, index: int, event: Progress) -> bytes:
        return b""

    def final(self, index: int, result: Result) -> bytes:
        chunks: list[dict[str, Any]] = []
        if self._reader is not None:
            chunks += self._chunks(self._reader.finish(was_cut(self._request, result)), over=True)
        return b"".join(map(line, [*chunks, self._final(result, self._content("", "", ()))]))

    def answer(self, results: Sequence[Result]) -> bytes:
        """Return the whole body."""
        result, reader = results[0], self._reader
        if reader is None:
            content = self._content(result.content, "", ())
        else:
            reader.push(result.content)
            reader.finish(was_cut(self._request, result))
            content = self._content(reader.content, reader.reasoning, reader.complete_calls)
        return orjson.dumps(self._final(result, content) | _logprobs(result.probs, self._most))

    def _final(self, result: Result, content: dict[str, Any]) -> dict[str, Any]:
        timings = result.timings
        return {
            **self._head(),
            **content,
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
    """Answers of `/api/chat`, in the field `message`."""

    def _content(self, content: str, reasoning: str, calls: Sequence[PartialCall]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if reasoning:
            message["thinking"] = reasoning
        if calls:
            all_calls = [] if self._reader is None else self._reader.calls
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "function": {"index": all_calls.index(call), "name": call.name, "arguments": _arguments(call)},
                }
                for call in calls
            ]
        return {"message": message}


class GenerateLines(OllamaFormat):
    """Answers of `/api/generate`, in the field `response`."""

    def _content(self, content: str, reasoning: str, calls: Sequence[PartialCall]) -> dict[str, Any]:
        return {"response": content} | ({"thinking": reasoning} if reasoning else {})
