"""Metering: a request is charged for the tokens that its replica counted.

The gateway sends an id with each request and fetches the count when the request is over. Clients cannot change this
count: not by hiding `usage`, not by sending several prompts, not by disconnecting. Replicas without a count
(llama-server) are charged by the usage in their responses, or by sizes.
"""

from __future__ import annotations

import re

from llamado.gateway.limits import KeyUsage
from llamado.gateway.replica import Replica
from llamado.http.monitoring.metrics import USAGE_HEADER, ask_usage, new_usage_id
from llamado.http.upstream import Headers

_BYTES_PER_TOKEN = 4  # roughly, in English text
# Token counts in responses of OpenAI's, Anthropic's and llama-server's formats. Unescaped quotation marks cannot occur
# inside a JSON string, so generated text cannot imitate a field.
_PROMPT = re.compile(rb'"(?:prompt_tokens|input_tokens|tokens_evaluated)"\s*:\s*(\d{1,12})')
_ANSWER = re.compile(rb'"(?:completion_tokens|output_tokens|tokens_predicted)"\s*:\s*(\d{1,12})')
_TIMINGS = re.compile(rb'"(cache_n|prompt_n|predicted_n)"\s*:\s*(\d{1,12})')
_CARRIED = 64  # bytes kept of the last part, in case it ends inside a field


class TokenCount:
    """Tokens of one response, read from its parts as they pass; for replicas without a count."""

    def __init__(self, estimate: int) -> None:
        """`estimate`: prompt tokens if the response does not name them."""
        self._estimate = estimate
        self._size = 0
        self._tail = b""
        self._events = 0
        self._prompt = self._answer = 0
        self._timings: dict[bytes, int] = {}

    def observe(self, part: bytes) -> None:
        """Read a part of the response."""
        self._size += len(part)
        text = self._tail + part
        self._events += part.count(b"data: ")
        for match in _PROMPT.finditer(text):
            self._prompt = max(self._prompt, int(match[1]))
        for match in _ANSWER.finditer(text):
            self._answer = max(self._answer, int(match[1]))
        if b'_n"' in text:
            self._timings |= {match[1]: int(match[2]) for match in _TIMINGS.finditer(text)}
        self._tail = text[-_CARRIED:]

    @property
    def total(self) -> int:
        """All tokens; of a stream that was cut short, those seen."""
        prompt = self._prompt or self._timings.get(b"cache_n", 0) + self._timings.get(b"prompt_n", 0)
        answer = self._answer or self._timings.get(b"predicted_n", 0) or self._events or self._size // _BYTES_PER_TOKEN
        return (prompt or self._estimate) + answer


class Meter:
    """Charges one request to a key."""

    def __init__(self, use: KeyUsage, body: bytes) -> None:
        """Raises ApiError (429) if the key's limit is used up."""
        self._use = use
        self._estimate = len(body) // _BYTES_PER_TOKEN
        self._count = TokenCount(self._estimate)
        self._replica: Replica | None = None
        self._id = ""
        self._settled = False
        self.refused = False
        """True if the replica's response is an error."""
        use.admit(self._estimate)

    def begin(self, replica: Replica) -> Headers:
        """Start an attempt; return the headers to send to the replica."""
        self._replica, self._id = replica, new_usage_id()
        self._count = TokenCount(self._estimate)
        return [(USAGE_HEADER, self._id.encode())]

    def observe(self, part: bytes) -> None:
        """Read a part of the response."""
        self._count.observe(part)

    async def settle(self, *, charged: bool = True) -> None:
        """Charge the request's tokens. Only the first call counts.

        `charged`: charge an estimate if the replica has no count.
        """
        if self._settled:
            return
        self._settled = True
        tokens = None
        try:
            if self._replica is not None:
                tokens = await ask_usage(self._replica.pool, self._id, self._replica.key)
        finally:
            if tokens is None:
                tokens = self._count.total if charged and not self.refused else 0
            self._use.settle(tokens, self._estimate)
