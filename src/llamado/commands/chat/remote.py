"""Chat backend that uses a server with OpenAI's chat API."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx
import orjson

from llamado.commands.chat.backend import Answer, AnswerPiece, AnswerStats, Message, partial_stats
from llamado.engine.parameters import BY_NAME
from llamado.errors import LlamadoError
from llamado.loglines import escaped
from llamado.outgoing import Maybe, fit, limits, open_client, read_json

_CONNECT_SECONDS = 10.0


class ServerRefused(LlamadoError):
    """The server cannot be reached, or its response is an error or invalid."""


_STREAM_BYTES = 256 << 20  # maximum bytes of a streamed response


class RemoteBackend:
    """Chat backend for `POST /v1/chat/completions`.

    `url` may end with `/v1`. `model`: None if the server has only one.
    """

    def __init__(self, url: str, model: str | None, key: str | None = None) -> None:
        """Connect. Raises ServerRefused."""
        url = (url if "://" in url else f"http://{url}").rstrip("/")
        self._base = url if url.endswith("/v1") else f"{url}/v1"
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # A long prompt may take minutes before its first token.
        self._http = open_client(headers=headers, timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS))
        self.notes: Sequence[str] = ()
        try:
            self.name = model or self._only_model()
        except BaseException:
            self._http.close()
            raise

    def _only_model(self) -> str:
        try:
            answer = self._http.get(f"{self._base}/models", timeout=_CONNECT_SECONDS)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from None
        if answer.status_code != 200:
            raise ServerRefused(_refusal(answer))
        try:
            names = [str(one["id"]) for one in read_json(answer)["data"]]
        except (ValueError, KeyError, TypeError):
            raise ServerRefused(f"{self._base}/models lists no models: is it an OpenAI API server?") from None
        if len(names) != 1:
            known = ", ".join(names) or "none"
            raise ServerRefused(f"no model given: choose a model of {self._base} with -m: {known}")
        return names[0]

    def answer(self, messages: Sequence[Message], settings: Mapping[str, Any]) -> Answer:
        body = {
            "model": self.name,
            "messages": [{"role": one["role"], "content": one["content"]} for one in messages],
            "stream": True,
            "stream_options": {"include_usage": True},
            # The last name is OpenAI's.
            **{BY_NAME[name].names[-1]: _as_json(name, value) for name, value in settings.items()},
        }
        began, first, n, result = time.perf_counter(), None, 0, _StreamResult()
        stream = limits(_STREAM_BYTES, math.inf)
        try:
            with self._http.stream("POST", f"{self._base}/chat/completions", json=body, extensions=stream) as answer:
                if answer.status_code != 200:
                    answer.read()
                    raise ServerRefused(_refusal(answer))
                for event in _events(answer):
                    for piece in result.take(event):
                        first, n = first or time.perf_counter(), n + 1  # servers send each token by itself
                        yield dataclasses.replace(piece, so_far=partial_stats(n, began, first))
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        return result.stats(began, first, time.perf_counter())

    def close(self) -> None:
        self._http.close()

    def _unreachable(self, error: Exception) -> ServerRefused:
        return ServerRefused(
            f"{self._base} does not answer: {error or type(error).__name__}; is a server running there?"
        )


def _as_json(name: str, value: Any) -> Any:
    """Convert a parameter to JSON, which has no infinity."""
    if name == "logit_bias":
        return {str(token): bias if math.isfinite(bias) else False for token, bias in value.items()}
    return value


_USAGE = {
    "completion_tokens": Maybe(0),
    "prompt_tokens": Maybe(0),
    "prompt_tokens_details": {"cached_tokens": Maybe(0)},
}
_TIMINGS = {"predicted_n": Maybe(0), "predicted_per_second": Maybe(0.0), "cache_n": Maybe(0)}


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


class _StreamResult:
    """Usage, timings and finish reason of a stream so far."""

    def __init__(self) -> None:
        self._usage: Mapping[str, Any] = fit({}, _USAGE)
        self._timings: Mapping[str, Any] = fit({}, _TIMINGS)
        self._reason = ""

    def take(self, event: Mapping[str, Any]) -> Iterator[AnswerPiece]:
        """Yield the text of an event. Raises ServerRefused for an error event."""
        if event.get("error"):
            raise ServerRefused(_message(event) or "the server stopped without a reason")
        self._usage = fit(event.get("usage"), Maybe(_USAGE)) or self._usage
        self._timings = fit(event.get("timings"), Maybe(_TIMINGS)) or self._timings
        choices = event.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            self._reason = fit(choice, {"finish_reason": ""})["finish_reason"] or self._reason
            delta = choice.get("delta") if isinstance(choice, dict) else None
            if isinstance(delta, dict):
                if is_reasoning := _text(delta.get("reasoning_content")) or _text(delta.get("reasoning")):
                    yield AnswerPiece(is_reasoning, is_reasoning=True)
                if text := _text(delta.get("content")):
                    yield AnswerPiece(text)

    def stats(self, began: float, first: float | None, ended: float) -> AnswerStats:
        usage, timings = self._usage, self._timings
        n: int | None = usage["completion_tokens"]
        n = timings["predicted_n"] if n is None else n
        speed = timings["predicted_per_second"]
        if speed is None and n is not None and n > 1 and first is not None and ended > first:
            speed = (n - 1) / (ended - first)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return AnswerStats(
            n_prompt=usage["prompt_tokens"],
            n_cached=timings["cache_n"] if cached is None else cached,
            n_predicted=n,
            tokens_per_second=speed or None,
            first_seconds=None if first is None else first - began,
            cut=self._reason == "length",
        )


def _events(answer: httpx.Response) -> Iterator[Mapping[str, Any]]:
    """Yield the JSON objects of a stream of server-sent events."""
    for line in answer.iter_lines():
        text = line.removeprefix("data:").strip() if line.startswith("data:") else ""
        if text == "[DONE]":
            return
        if text:
            try:
                event = orjson.loads(text)
            except ValueError:
                event = None
            if not isinstance(event, dict):
                raise ServerRefused(f"the server sent an event that is not a JSON object: {escaped(text[:100])}")
            yield event


def _refusal(answer: httpx.Response) -> str:
    try:
        message = _message(read_json(answer))
    except ValueError:
        message = ""
    hint = " (give a key with --api-key)" if answer.status_code in (401, 403) else ""
    return f"{answer.request.url} answers {answer.status_code}: {message or answer.reason_phrase}{hint}"


def _message(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return escaped(str(error.get("message", "")) if isinstance(error, dict) else str(error or ""))
