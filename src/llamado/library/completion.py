"""Completions in OpenAI's form: whole and in chunks."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Generator, Iterator, Sequence
from typing import Any

from llamado.engine.request import Result, Token, TokenProb, TokenProbs

Events = Generator[Token, None, Result]


def last(events: Events) -> Result:
    """Consume the events of an answer; return its result."""
    try:
        while True:
            next(events)
    except StopIteration as end:
        result: Result = end.value
        return result


def finish_reason(result: Result) -> str:
    """Return OpenAI's reason for the end of an answer."""
    return "stop" if result.stop_type in ("eos", "word") else "length"


def usage(result: Result) -> dict[str, int]:
    """Return the token counts of a request, in OpenAI's form."""
    return {
        "prompt_tokens": result.n_prompt,
        "completion_tokens": result.n_predicted,
        "total_tokens": result.n_prompt + result.n_predicted,
    }


def _text(prob: TokenProb) -> str:
    return prob.piece.decode("utf-8", "ignore")


class Completion:
    """Formats one completion. `before`, `after`: text around the answer.

    `text_offset` counts from the start of `prompt`, which is empty if the prompt is echoed as `before`.
    """

    def __init__(self, model: str, prompt: str, *, before: str = "", after: str = "", logprobs: bool = False) -> None:
        self._head = {
            "id": f"cmpl-{uuid.uuid4()}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._offset = len(prompt)
        self._before, self._after = before, after
        self._shows = logprobs

    def whole(self, events: Events) -> dict[str, Any]:
        """Return the whole answer."""
        result = last(events)
        text = f"{self._before}{result.content}{self._after}"
        choice = {
            "text": text,
            "index": 0,
            "logprobs": self._logprobs([*result.prompt_probs, *result.probs]),
            "finish_reason": finish_reason(result),
        }
        return {**self._head, "choices": [choice], "usage": usage(result)}

    def chunks(self, events: Events) -> Iterator[dict[str, Any]]:
        """Yield the answer's chunks; the last one has the reason for its end."""
        try:
            while True:
                event = next(events)
                if event.text or (self._shows and event.probs):
                    yield self._chunk(event.text, self._logprobs(event.probs), None)
        except StopIteration as end:
            yield self._chunk(self._after, None, finish_reason(end.value))
        finally:
            events.close()

    def _chunk(self, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
        return {**self._head, "choices": [{"text": text, "index": 0, "logprobs": logprobs, "finish_reason": reason}]}

    def _logprobs(self, probs: Sequence[TokenProbs] | None) -> dict[str, Any] | None:
        """Return probabilities in OpenAI's older form: four lists with one entry per token."""
        if not self._shows:
            return None
        tokens, offsets, values = list[str](), list[int](), list[float | None]()
        top = list[dict[str, float] | None]()
        for one in probs or ():
            text = _text(one.token)
            offsets.append(self._offset)
            self._offset += len(text)
            tokens.append(text)
            if math.isnan(one.token.logprob):  # the first of a prompt
                values.append(None)
                top.append(None)
                continue
            values.append(one.token.logprob)
            top.append({_text(other): other.logprob for other in one.top} | {text: one.token.logprob})
        return {"tokens": tokens, "text_offset": offsets, "token_logprobs": values, "top_logprobs": top}
