"""Answer formats of llama-server and of OpenAI, whole and streamed (`server-task.cpp`, b11434)."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import orjson
from starlette.responses import Response

from llamado.build import BUILD
from llamado.engine.request import Progress, Result, Timings, Token, TokenProb, TokenProbs
from llamado.http.answer import error_response
from llamado.server.errors import ApiError
from llamado.server.generate.generation_settings import generation_settings
from llamado.server.generate.receipt import receipt_json
from llamado.server.generate.request import GenerationRequest
from llamado.server.generate.streaming import EVENTS
from llamado.text.dialects.answer import AnswerReader, delta

# JSON has no -inf; llama-server writes the lowest float32 for the logarithm of 0.
_LOWEST = -3.4028234663852886e38


def timings_json(t: Timings) -> dict[str, Any]:
    """Return the `timings` object."""
    timings: dict[str, Any] = {
        "cache_n": t.cache_n,
        "prompt_n": t.prompt_n,
        "prompt_ms": t.prompt_ms,
        "prompt_per_token_ms": t.prompt_per_token_ms,
        "prompt_per_second": t.prompt_per_second,
        "predicted_n": t.predicted_n,
        "predicted_ms": t.predicted_ms,
        "predicted_per_token_ms": t.predicted_per_token_ms,
        "predicted_per_second": t.predicted_per_second,
    }
    if t.draft_n:
        timings |= {"draft_n": t.draft_n, "draft_n_accepted": t.draft_n_accepted or 0}
    return timings


_MANY = 1024  # most likely tokens at one position
_FIRST = {"role": "assistant", "content": ""}
"""The first delta of a stream. The usual loop over `delta.get("content", "")` prints llama-server's null as "None"."""


def _prob_json(p: TokenProb, post_sampling: bool) -> dict[str, Any]:
    entry: dict[str, Any] = {"id": p.id, "token": p.piece.decode("utf-8", "ignore"), "bytes": list(p.piece)}
    if post_sampling:
        entry["prob"] = p.prob
    else:
        entry["logprob"] = max(p.logprob, _LOWEST)
    return entry


def probs_json(probs: Sequence[TokenProbs], post_sampling: bool) -> list[dict[str, Any]]:
    """Return `completion_probabilities`, which is `logprobs.content` of the OpenAI endpoints."""
    key = "top_probs" if post_sampling else "top_logprobs"
    return [{**_prob_json(p.token, post_sampling), key: _top_json(p.top, post_sampling)} for p in probs]


def _top_json(top: Sequence[TokenProb], post_sampling: bool) -> Any:
    """Return the most likely tokens: a list, or JSON text if there are many (up to the whole vocabulary).

    The text is written in parts, because orjson holds the interpreter's lock while it writes.
    """
    if len(top) <= _MANY:
        return [_prob_json(t, post_sampling) for t in top]
    parts = (top[at : at + _MANY] for at in range(0, len(top), _MANY))
    texts = [orjson.dumps([_prob_json(t, post_sampling) for t in part])[1:-1] for part in parts]
    return orjson.Fragment(b"[" + b",".join(texts) + b"]")


def progress_json(p: Progress) -> dict[str, Any]:
    """Return the `prompt_progress` object."""
    return {"total": p.total, "cache": p.cache, "processed": p.processed, "time_ms": p.time_ms}


def _progress(event: Progress) -> dict[str, Any]:
    """Return the fields of a chunk for a Progress event."""
    fields = {"prompt_progress": progress_json(event)}
    return fields if event.timings is None else {**fields, "timings": timings_json(event.timings)}


def usage_json(results: Sequence[Result], per_prompt: int = 1) -> dict[str, Any]:
    """Return `usage` over all results; a prompt with several answers counts once."""
    completion = sum(r.n_predicted for r in results)
    prompt = sum(r.n_prompt for r in results[::per_prompt])
    return {
        "completion_tokens": completion,
        "prompt_tokens": prompt,
        "total_tokens": completion + prompt,
        "prompt_tokens_details": {"cached_tokens": sum(r.n_cached for r in results[::per_prompt])},
    }


def finish_reason(result: Result, called: bool = False) -> str:
    """Return OpenAI's `finish_reason`; `called`: the answer has tool calls."""
    if result.stop_type not in ("eos", "word"):
        return "length"
    return "tool_calls" if called else "stop"


def was_cut(request: GenerationRequest, result: Result) -> bool:
    """Return True if a limit or a stop string of the client ended the answer, maybe in the middle of a tool call."""
    stops = () if request.prepared is None else request.prepared.stops
    return result.stop_type != "eos" and result.stopping_word not in stops


def data(value: Any) -> bytes:
    """Return a value as one SSE message."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def answer_reader(request: GenerationRequest) -> AnswerReader:
    """Return a reader for one answer of a chat."""
    assert request.prepared is not None
    return AnswerReader(request.prepared.parser(), request.prepared.given)


def receipt(request: GenerationRequest, result: Result) -> dict[str, Any]:
    """Return the field with the receipt of a result, if the request asks for one."""
    return {} if request.origin is None else {"llamado_receipt": receipt_json(request, request.origin, result.seed)}


def native_json(request: GenerationRequest, index: int, result: Result) -> dict[str, Any]:
    """Return the result object of `/completion`: the last chunk of a stream, or the whole answer."""
    stream = request.stream
    answer: dict[str, Any] = {
        "index": index,
        "content": "" if stream else result.content,
        "tokens": result.tokens if request.params.return_tokens and not stream else [],
        "id_slot": result.id_slot,
        "stop": True,
        "model": request.model,
        "tokens_predicted": result.n_predicted,
        "tokens_evaluated": result.n_prompt,
        "generation_settings": generation_settings(request, seed=result.seed),
        "prompt": request.text(index),
        "has_new_line": result.has_new_line,
        "truncated": result.truncated,
        "stop_type": result.stop_type,
        "stopping_word": result.stopping_word,
        "tokens_cached": result.n_tokens_cached,
        "timings": timings_json(result.timings),
    }
    if result.probs and not stream:
        answer["completion_probabilities"] = probs_json(result.probs, request.params.post_sampling_probs)
    answer |= receipt(request, result)
    return pick(answer, request.response_fields) if request.response_fields else answer


def native_part(request: GenerationRequest, index: int, event: Token | Progress) -> dict[str, Any]:
    """Return the chunk of `/completion` for an event."""
    part: dict[str, Any] = {
        "index": index,
        "content": "",
        "tokens": [],
        "stop": False,
        "id_slot": -1,
        "tokens_predicted": 0,
        "tokens_evaluated": len(request.prompt(index)),
    }
    if isinstance(event, Progress):
        return {**part, **_progress(event)}
    n_predicted = event.index + len(event.tokens)
    part |= {"content": event.text, "tokens": event.tokens, "tokens_predicted": n_predicted}
    if event.timings is not None:
        part["timings"] = timings_json(event.timings)
    if event.probs:
        part["completion_probabilities"] = probs_json(event.probs, request.params.post_sampling_probs)
    return part


class NativeFormat:
    """Answers of llama-server's `/completion`."""

    media_type = EVENTS

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request

    def token(self, index: int, event: Token) -> bytes:
        return data(native_part(self._request, index, event))

    def progress(self, index: int, event: Progress) -> bytes:
        return data(native_part(self._request, index, event))

    def final(self, index: int, result: Result) -> bytes:
        return data(native_json(self._request, index, result))

    def end(self) -> bytes:
        return b""

    def error(self, error: ApiError) -> bytes:
        return data({"error": error.error})

    def failure(self, error: ApiError) -> Response:
        return error_response(error)

    def answer(self, results: Sequence[Result]) -> bytes:
        """Return the body: one object, or an array for several answers."""
        whole = [native_json(self._request, i, r) for i, r in enumerate(results)]
        return orjson.dumps(whole[0] if len(whole) == 1 else whole)


def pick(answer: dict[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """Return the named fields of a result (`response_fields`).

    `a/b` returns field b of a under the name `a/b`. Missing fields are left out.
    """
    picked: dict[str, Any] = {}
    for path in fields:
        value: Any = answer
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            picked[path] = value
    return picked


class _OpenAIFormat:
    """Base of the formats of `/v1/completions` and `/v1/chat/completions`."""

    media_type = EVENTS
    object = ""
    chunk = ""

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._head = {
            "created": int(time.time()),
            "model": request.model,
            "system_fingerprint": BUILD,
            "object": self.chunk,
            "id": request.id,
        }

    def _verbose(self, index: int, event: Result | Token | Progress) -> dict[str, Any]:
        """Return the field with the native form of a result or an event, if the request asks for it (`verbose`)."""
        if not self._request.verbose:
            return {}
        if isinstance(event, Result):
            return {"__verbose": native_json(self._request, index, event)}
        return {"__verbose": native_part(self._request, index, event)}

    def _body(self, choices: list[dict[str, Any]], results: Sequence[Result]) -> bytes:
        body = {
            "choices": choices,
            **self._head,
            "object": self.object,
            "usage": usage_json(results, self._request.n),
            **self._verbose(0, results[0]),
            "timings": timings_json(results[0].timings),
            **receipt(self._request, results[0]),
        }
        return orjson.dumps(body)

    def end(self) -> bytes:
        return b"data: [DONE]\n\n"

    def error(self, error: ApiError) -> bytes:
        return data({"error": error.error})

    def failure(self, error: ApiError) -> Response:
        return error_response(error)


def _logprobs(probs: Sequence[TokenProbs] | None, request: GenerationRequest) -> dict[str, Any] | None:
    return {"content": probs_json(probs, request.params.post_sampling_probs)} if probs else None


class CompletionsFormat(_OpenAIFormat):
    """Answers of `/v1/completions`."""

    object = "text_completion"
    chunk = "text_completion"

    def __init__(self, request: GenerationRequest) -> None:
        super().__init__(request)
        self._lengths: dict[int, int] = {}
        """By answer: the characters of an echoed stream so far, for `text_offset`."""

    def _chunk(self, index: int, text: str, logprobs: Any, reason: str | None) -> dict[str, Any]:
        choice = {"text": text, "index": index, "logprobs": logprobs, "finish_reason": reason}
        return {"choices": [choice], **self._head}

    def _echo(self, index: int) -> str:
        """Return the prompt as text if the answer begins with it, else ""."""
        return self._request.echoed[index // self._request.n] if self._request.echoed else ""

    def token(self, index: int, event: Token) -> bytes:
        first = b"" if event.index else self._prompt_chunk(index, event.prompt_probs)
        if not event.text and not event.probs:
            return first
        logprobs = _logprobs(event.probs, self._request)
        if event.probs and index in self._lengths:
            logprobs = self._lists(index, event.probs)
        chunk = self._chunk(index, event.text, logprobs, None)
        chunk |= self._verbose(index, event)
        if event.timings is not None:
            chunk["timings"] = timings_json(event.timings)
        return first + data(chunk)

    def _prompt_chunk(self, index: int, probs: Sequence[TokenProbs]) -> bytes:
        """Return the chunk with the echoed prompt, and its log-probabilities if requested; b"" without `echo`."""
        text = self._echo(index)
        return data(self._chunk(index, text, self._lists(index, probs) if probs else None, None)) if text else b""

    def progress(self, index: int, event: Progress) -> bytes:
        chunk = self._chunk(index, "", None, None) | self._verbose(index, event)
        return data({**chunk, **_progress(event)})

    def final(self, index: int, result: Result) -> bytes:
        first = b"" if result.tokens else self._prompt_chunk(index, result.prompt_probs)
        chunk = self._chunk(index, "", None, finish_reason(result))
        more = {"usage": usage_json([result]), **self._verbose(index, result), "timings": timings_json(result.timings)}
        return first + data({**chunk, **more, **receipt(self._request, result)})

    def answer(self, results: Sequence[Result]) -> bytes:
        """Return the whole body."""
        choices = [
            {
                "text": self._echo(index) + result.content,
                "index": index,
                "logprobs": self._lists(index, [*result.prompt_probs, *result.probs])
                if result.request.params.prompt_probs
                else _logprobs(result.probs, self._request),
                "finish_reason": finish_reason(result),
            }
            for index, result in enumerate(results)
        ]
        return self._body(choices, results)

    def _lists(self, index: int, shown: Sequence[TokenProbs]) -> dict[str, Any]:
        """Return `logprobs` of an echoed answer: llama-server's fields, and OpenAI's lists for evaluation harnesses."""
        tokens = [one.token.piece.decode("utf-8", "ignore") for one in shown]
        content = probs_json(shown, self._request.params.post_sampling_probs)
        *offsets, end = accumulate(map(len, tokens), initial=self._lengths.get(index, 0))
        self._lengths[index] = end
        first = [math.isnan(one.token.logprob) for one in shown]  # True for a prompt's first token, which has none
        return {
            "content": [one | {"logprob": None} if none else one for one, none in zip(content, first, strict=True)],
            "tokens": tokens,
            "token_logprobs": [
                None if none else max(one.token.logprob, _LOWEST) for one, none in zip(shown, first, strict=True)
            ],
            "top_logprobs": [None if none else _by_text(one.top) for one, none in zip(shown, first, strict=True)],
            "text_offset": offsets,
        }


def _by_text(top: Sequence[TokenProb]) -> dict[str, float]:
    """Return log-probabilities by tokens' texts; the most likely of tokens with the same text counts."""
    return {one.piece.decode("utf-8", "ignore"): max(one.logprob, _LOWEST) for one in reversed(top)}


class ChatFormat(_OpenAIFormat):
    """Answers of `/v1/chat/completions`.

    As in llama-server, a whole answer begins with the client's prefill; a streamed one does so only with `echo`.
    """

    object = "chat.completion"
    chunk = "chat.completion.chunk"

    def __init__(self, request: GenerationRequest) -> None:
        super().__init__(request)
        self._readers = [answer_reader(request) for _ in range(request.n_answers)]
        self._given = request.prepared.given if request.prepared is not None else ()
        self._begun: set[int] = set()
        self._results: list[Result] = []

    def _chunk(self, index: int, change: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return {"choices": [{"finish_reason": reason, "index": index, "delta": change}], **self._head}

    def _begin(self, index: int) -> list[dict[str, Any]]:
        """Return the first chunks of an answer, which have its role and with `echo` the prefill; [] once it began."""
        if index in self._begun:
            return []
        self._begun.add(index)
        chunks = [self._chunk(index, dict(_FIRST))]
        if self._request.echo:
            chunks += [self._chunk(index, delta(part)) for part in self._given]
        return chunks

    def token(self, index: int, event: Token) -> bytes:
        chunks = self._begin(index)
        chunks += [self._chunk(index, delta(part)) for part in self._readers[index].push(event.text)]
        logprobs = _logprobs(event.probs, self._request)
        if logprobs is not None:
            if not chunks:
                chunks.append(self._chunk(index, {"content": ""}))
            chunks[-1]["choices"][0]["logprobs"] = logprobs
        if event.timings is not None and chunks:
            chunks[-1]["timings"] = timings_json(event.timings)
        return b"".join(map(data, chunks))

    def progress(self, index: int, event: Progress) -> bytes:
        self._begun.add(index)
        chunk = self._chunk(index, dict(_FIRST))
        return data({**chunk, **_progress(event)})

    def final(self, index: int, result: Result) -> bytes:
        self._results.append(result)
        reader = self._readers[index]
        chunks = self._begin(index)
        chunks += [self._chunk(index, delta(part)) for part in reader.finish(was_cut(self._request, result))]
        chunks.append(self._chunk(index, {}, finish_reason(result, bool(reader.calls))))
        chunks[0] |= self._verbose(index, result)
        if self._request.include_usage and len(self._results) == self._request.n_answers:
            usage = usage_json(self._results, self._request.n)
            chunks.append({"choices": [], **self._head, "usage": usage})
        chunks[-1]["timings"] = timings_json(result.timings)
        chunks[-1] |= receipt(self._request, result)
        return b"".join(map(data, chunks))

    def answer(self, results: Sequence[Result]) -> bytes:
        """Return the whole body."""
        choices = []
        for index, result in enumerate(results):
            reader = self._readers[index]
            reader.push(result.content)
            reader.finish(was_cut(self._request, result))
            reason = finish_reason(result, bool(reader.calls))
            choice: dict[str, Any] = {"finish_reason": reason, "index": index, "message": reader.message()}
            logprobs = _logprobs(result.probs, self._request)
            if logprobs is not None:
                choice["logprobs"] = logprobs
            choices.append(choice)
        return self._body(choices, results)
