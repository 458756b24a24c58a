"""What is noted about one HTTP request while it is answered: for its log line, its metrics and its trace."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

from llamado.engine.request import Result

# Bytes of an X-Request-Id that is taken over from the client: visible ASCII, so that it cannot forge log lines.
_VISIBLE = frozenset(range(0x21, 0x7F))
_LONGEST_ID = 128


class AnswerUnderWay(Protocol):
    """What answers a request, as far as it is."""

    @property
    def tasks(self) -> Sequence[int]:
        """Ids of the engine's tasks."""
        ...

    @property
    def n_prompt(self) -> int:
        """Tokens of all prompts."""
        ...

    @property
    def n_predicted(self) -> int: ...

    @property
    def first_token(self) -> float | None:
        """When it came, as `time.perf_counter()`."""
        ...


@dataclass(slots=True)
class Record:
    """One request; times are `time.perf_counter()`."""

    id: str
    method: str
    path: str
    began: float = field(default_factory=time.perf_counter)
    status: int = 0
    client: str = ""
    """Address of who asked; "" on a Unix socket."""
    route: str = ""
    """Path of the endpoint; "" where none was reached."""
    reason: str = ""
    """Why it was refused."""
    n_prompt: int = 0
    prompt_tokens: int = 0
    """Of the prompts, each counted once however many answers it has."""
    n_cached: int = 0
    """Tokens of the prompts that were not computed anew."""
    n_predicted: int = 0
    tokens_per_second: float = 0.0
    """Of all its answers together."""
    first_token: float | None = None
    prompt_seconds: float = 0.0
    """What the prompt of the first answer took, from its slot to its first token."""
    answering: AnswerUnderWay | None = None
    """While it is answered by the engine."""
    stops: tuple[str, ...] = ()
    """Why each answer ended."""

    def answered(self, result: Result) -> None:
        """An answer is complete; a request may have several."""
        self.prompt_seconds = self.prompt_seconds or 1e-3 * result.timings.prompt_ms
        self.n_prompt += result.n_prompt
        self.n_cached += result.n_cached
        self.n_predicted += result.n_predicted
        self.tokens_per_second += result.timings.predicted_per_second
        self.stops += (result.stop_type,)

    @property
    def used_tokens(self) -> int:
        """Tokens that the client is charged for."""
        return self.prompt_tokens + self.n_predicted

    def cancelled(self, n_prompt: int, n_predicted: int) -> None:
        """An answer ended before it was complete, because nobody wants it any more."""
        self.n_prompt += n_prompt
        self.n_predicted += n_predicted
        self.stops += ("cancelled",)

    @property
    def was_cancelled(self) -> bool:
        """Whether some of what was asked for was not wanted any more."""
        return "cancelled" in self.stops


current: ContextVar[Record | None] = ContextVar("llamado-request", default=None)
"""The request that the running task answers."""


def request_id(given: bytes) -> str:
    """The client's X-Request-Id where it is one, else a fresh one."""
    if given and len(given) <= _LONGEST_ID and _VISIBLE.issuperset(given):
        return given.decode("ascii")
    return secrets.token_hex(8)
