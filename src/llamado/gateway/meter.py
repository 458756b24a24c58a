"""Tokens that a request is charged: those that its replica counted.

The gateway names each request to its replica and asks for the count when the request is over. The client cannot change
this count: not by hiding `usage`, not by several prompts, not by hanging up. Replicas that keep no count (llama-server)
are charged by what their answers say, or by sizes.
"""

from __future__ import annotations

import re

from llamado.gateway.limits import KeyUse
from llamado.gateway.replica import Replica
from llamado.http.metrics import USAGE_HEADER, ask_usage, new_usage_id
from llamado.http.upstream import Headers

_BYTES_PER_TOKEN = 4  # of English text, about
# As OpenAI's, Anthropic's and llama-server's own answers name the tokens of prompt and answer. In JSON no text can hold
# a name between quotation marks that nothing escapes.
_PROMPT = re.compile(rb'"(?:prompt_tokens|input_tokens|tokens_evaluated)"\s*:\s*(\d{1,12})')
_ANSWER = re.compile(rb'"(?:completion_tokens|output_tokens|tokens_predicted)"\s*:\s*(\d{1,12})')
_TIMINGS = re.compile(rb'"(cache_n|prompt_n|predicted_n)"\s*:\s*(\d{1,12})')
_CARRIED = 64  # bytes of the last part, where a name may have been cut


class TokenCount:
    """Tokens of one answer, read from its parts as they pass: for replicas that keep no count."""

    def __init__(self, estimate: int) -> None:
        """`estimate`: tokens of the prompt, if the answer does not name them."""
        self._estimate = estimate
        self._size = 0
        self._tail = b""
        self._events = 0
        self._prompt = self._answer = 0
        self._timings: dict[bytes, int] = {}

    def see(self, part: bytes) -> None:
        """A part of the answer."""
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
        """All tokens; of a stream that ended early, those that were seen."""
        prompt = self._prompt or self._timings.get(b"cache_n", 0) + self._timings.get(b"prompt_n", 0)
        answer = self._answer or self._timings.get(b"predicted_n", 0) or self._events or self._size // _BYTES_PER_TOKEN
        return (prompt or self._estimate) + answer


class Meter:
    """Charges one request to a key."""

    def __init__(self, use: KeyUse, body: bytes) -> None:
        """Raises ApiError (429) if the key has nothing left."""
        self._use = use
        self._estimate = len(body) // _BYTES_PER_TOKEN
        self._count = TokenCount(self._estimate)
        self._replica: Replica | None = None
        self._id = ""
        self._settled = False
        self.refused = False
        """Whether the replica's answer is an error."""
        use.admit(self._estimate)

    def begin(self, replica: Replica) -> Headers:
        """The request is sent to a replica, which has to be given these headers."""
        self._replica, self._id = replica, new_usage_id()
        self._count = TokenCount(self._estimate)
        return [(USAGE_HEADER, self._id.encode())]

    def see(self, part: bytes) -> None:
        """A part of the answer."""
        self._count.see(part)

    async def settle(self, *, charged: bool = True) -> None:
        """Charge what the request used; the first call counts.

        `charged`: whether a request is charged of which the replica knows nothing.
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
