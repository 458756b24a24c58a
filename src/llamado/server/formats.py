"""How answers look: llama-server's own form and OpenAI's, whole and in parts (`server-task.cpp`, b11434)."""

from __future__ import annotations

import secrets
import string
import time
from collections.abc import Sequence
from typing import Any

import orjson

from llamado import __version__
from llamado.engine.request import Progress, Request, Result, Timings, Token, TokenProb, TokenProbs
from llamado.server.options import Options, generation_settings

FINGERPRINT = f"llamado-{__version__}"
_LETTERS = string.digits + string.ascii_letters
# JSON has no -inf; llama-server writes the lowest float32 for the logarithm of 0.
_LOWEST = -3.4028234663852886e38


def completion_id() -> str:
    """A fresh `chatcmpl-…` id; both OpenAI endpoints use this form."""
    return "chatcmpl-" + "".join(secrets.choice(_LETTERS) for _ in range(32))


def timings_json(t: Timings) -> dict[str, Any]:
    """The `timings` object."""
    return {
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


def _prob_json(p: TokenProb, post_sampling: bool) -> dict[str, Any]:
    entry: dict[str, Any] = {"id": p.id, "token": p.piece.decode("utf-8", "ignore"), "bytes": list(p.piece)}
    if post_sampling:
        entry["prob"] = p.prob
    else:
        entry["logprob"] = max(p.logprob, _LOWEST)
    return entry


def probs_json(probs: Sequence[TokenProbs], post_sampling: bool) -> list[dict[str, Any]]:
    """`completion_probabilities`, and `logprobs.content` of the OpenAI endpoints."""
    key = "top_probs" if post_sampling else "top_logprobs"
    return [{**_prob_json(p.token, post_sampling), key: [_prob_json(t, post_sampling) for t in p.top]} for p in probs]


def progress_json(p: Progress) -> dict[str, Any]:
    """The `prompt_progress` object."""
    return {"total": p.total, "cache": p.cache, "processed": p.processed, "time_ms": p.time_ms}


def usage_json(results: Sequence[Result], per_prompt: int = 1) -> dict[str, Any]:
    """`usage` over all results; a prompt answered several times counts once."""
    completion = sum(r.n_predicted for r in results)
    prompt = sum(r.n_prompt for r in results[::per_prompt])
    return {
        "completion_tokens": completion,
        "prompt_tokens": prompt,
        "total_tokens": completion + prompt,
        "prompt_tokens_details": {"cached_tokens": sum(r.n_cached for r in results[::per_prompt])},
    }


def finish_reason(result: Result) -> str:
    """OpenAI's reason."""
    return "stop" if result.stop_type in ("eos", "word") else "length"


def data(value: Any) -> bytes:
    """One SSE message."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


class NativeFormat:
    """llama-server's `/completion`."""

    def __init__(self, requests: Sequence[Request], options: Options, model: str, prompts: Sequence[str]) -> None:
        self._requests = requests
        self._options = options
        self._model = model
        self._prompts = prompts

    def token(self, index: int, event: Token) -> bytes:
        request = self._requests[index]
        part: dict[str, Any] = {
            "index": index,
            "content": event.text,
            "tokens": event.tokens,
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": event.index + len(event.tokens),
            "tokens_evaluated": len(request.prompt),
        }
        if event.timings is not None:
            part["timings"] = timings_json(event.timings)
        if event.probs:
            part["completion_probabilities"] = probs_json(event.probs, request.post_sampling_probs)
        return data(part)

    def progress(self, index: int, event: Progress) -> bytes:
        part = {
            "index": index,
            "content": "",
            "tokens": [],
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": 0,
            "tokens_evaluated": event.total,
            "prompt_progress": progress_json(event),
        }
        return data(part)

    def final(self, index: int, result: Result) -> bytes:
        return data(self.whole(index, result))

    def end(self) -> bytes:
        return b""

    def whole(self, index: int, result: Result) -> dict[str, Any]:
        """The result object: the last part of a stream, or the whole answer."""
        stream, request = self._options.stream, result.request
        answer: dict[str, Any] = {
            "index": index,
            "content": "" if stream else result.content,
            "tokens": result.tokens if request.return_tokens and not stream else [],
            "id_slot": result.id_slot,
            "stop": True,
            "model": self._model,
            "tokens_predicted": result.n_predicted,
            "tokens_evaluated": result.n_prompt,
            "generation_settings": generation_settings(request, stream=stream, seed=result.seed),
            "prompt": self._prompts[index // self._options.n],
            "has_new_line": result.has_new_line,
            "truncated": result.truncated,
            "stop_type": result.stop_type,
            "stopping_word": result.stopping_word,
            "tokens_cached": result.n_tokens_cached,
            "timings": timings_json(result.timings),
        }
        if result.probs and not stream:
            answer["completion_probabilities"] = probs_json(result.probs, request.post_sampling_probs)
        return pick(answer, self._options.response_fields) if self._options.response_fields else answer

    def answer(self, results: Sequence[Result]) -> bytes:
        """The body: one object, or an array for several prompts."""
        whole = [self.whole(i, r) for i, r in enumerate(results)]
        return orjson.dumps(whole[0] if len(whole) == 1 else whole)


def pick(answer: dict[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """The named fields of a result; `a/b` takes b out of a under its full name; missing ones are left out."""
    picked: dict[str, Any] = {}
    for path in fields:
        value: Any = answer
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            picked[path] = value
    return picked


class OpenAIFormat:
    """`/v1/completions` (`chat=False`) and `/v1/chat/completions`.

    Like llama-server, a whole answer begins with the client's `prefill` and a streamed one does not.
    """

    def __init__(
        self, requests: Sequence[Request], options: Options, model: str, *, chat: bool, prefill: str = ""
    ) -> None:
        self._prefill = prefill
        self._requests = requests
        self._options = options
        self._chat = chat
        self._object = "chat.completion" if chat else "text_completion"
        chunk = "chat.completion.chunk" if chat else "text_completion"
        self._head = {
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": FINGERPRINT,
            "object": chunk,
            "id": completion_id(),
        }
        self._begun: set[int] = set()
        self._results: list[Result] = []

    def _chunk(self, index: int, piece: dict[str, Any], logprobs: Any, reason: str | None) -> dict[str, Any]:
        choice: dict[str, Any]
        if self._chat:
            choice = {"finish_reason": reason, "index": index, "delta": piece}
            if logprobs is not None:
                choice["logprobs"] = logprobs
        else:
            choice = {"text": piece.get("content", ""), "index": index, "logprobs": logprobs, "finish_reason": reason}
        return {"choices": [choice], **self._head}

    def _begin(self, index: int) -> bytes:
        """A chat stream's first part names the role."""
        if not self._chat or index in self._begun:
            return b""
        self._begun.add(index)
        return data(self._chunk(index, {"role": "assistant", "content": None}, None, None))

    def token(self, index: int, event: Token) -> bytes:
        begin = self._begin(index)
        if not event.text and not event.probs:
            return begin
        logprobs = None
        if event.probs:
            logprobs = {"content": probs_json(event.probs, self._requests[index].post_sampling_probs)}
        chunk = self._chunk(index, {"content": event.text}, logprobs, None)
        if event.timings is not None:
            chunk["timings"] = timings_json(event.timings)
        return begin + data(chunk)

    def progress(self, index: int, event: Progress) -> bytes:
        self._begun.add(index)
        piece = {"role": "assistant", "content": None} if self._chat else {}
        return data({**self._chunk(index, piece, None, None), "prompt_progress": progress_json(event)})

    def final(self, index: int, result: Result) -> bytes:
        self._results.append(result)
        chunk = self._chunk(index, {}, None, finish_reason(result))
        last = {"timings": timings_json(result.timings)}
        if not self._chat:
            usage = {"usage": usage_json([result])}
            return data({**chunk, **usage, **last})
        begin = self._begin(index)
        if self._options.include_usage and len(self._results) == len(self._requests):
            usage = {"usage": usage_json(self._results, self._options.n)}
            return begin + data(chunk) + data({"choices": [], **self._head, **usage, **last})
        return begin + data({**chunk, **last})

    def end(self) -> bytes:
        return b"data: [DONE]\n\n"

    def answer(self, results: Sequence[Result]) -> bytes:
        """The whole body."""
        choices = []
        for index, result in enumerate(results):
            reason = finish_reason(result)
            logprobs = None
            if result.probs:
                logprobs = {"content": probs_json(result.probs, result.request.post_sampling_probs)}
            if self._chat:
                message = {"role": "assistant", "content": self._prefill + result.content}
                choice: dict[str, Any] = {"finish_reason": reason, "index": index, "message": message}
                if logprobs is not None:
                    choice["logprobs"] = logprobs
            else:
                choice = {"text": result.content, "index": index, "logprobs": logprobs, "finish_reason": reason}
            choices.append(choice)
        body = {
            "choices": choices,
            **self._head,
            "object": self._object,
            "usage": usage_json(results, self._options.n),
            "timings": timings_json(results[0].timings),
        }
        return orjson.dumps(body)
