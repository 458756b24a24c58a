"""Per-request record for the log line, the metrics and the trace."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

from llamado.engine.request import Result

# Longest accepted client-supplied X-Request-Id. Visible ASCII only, so that it cannot forge log lines.
_VISIBLE = frozenset(range(0x21, 0x7F))
_LONGEST_ID = 128


class AnswerProgress(Protocol):
    """Progress of the engine's work on a request."""

    @property
    def tasks(self) -> Sequence[int]:
        """Engine task ids."""
        ...

    @property
    def n_prompt(self) -> int:
        """Tokens of all prompts."""
        ...

    @property
    def n_predicted(self) -> int: ...

    @property
    def first_token(self) -> float | None:
        """Time of the first output token, as `time.perf_counter()`; None before it."""
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
    """The client's address; "" for a Unix socket."""
    route: str = ""
    """Route path; "" if no route matched."""
    reason: str = ""
    """Reason of a refusal or an interruption."""
    n_prompt: int = 0
    prompt_tokens: int = 0
    """Prompt tokens, each prompt counted once regardless of its number of outputs."""
    n_cached: int = 0
    """Prompt tokens reused from a cache."""
    n_predicted: int = 0
    tokens_per_second: float = 0.0
    """Sum over all outputs."""
    first_token: float | None = None
    prompt_seconds: float = 0.0
    """Prefill time of the first output, from slot assignment to its first token."""
    answering: AnswerProgress | None = None
    """Set while the engine works on the request."""
    stops: tuple[str, ...] = ()
    """Stop reason of each output."""

    def answered(self, result: Result) -> None:
        """Add a completed output; a request may have several."""
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

    def cut_short(self, n_prompt: int, n_predicted: int, *, by_client: bool) -> None:
        """Add an output that ended before it was complete. `by_client`: its client disconnected."""
        self.n_prompt += n_prompt
        self.n_predicted += n_predicted
        self.stops += ("cancelled" if by_client else "interrupted",)

    @property
    def was_cancelled(self) -> bool:
        """True if the client disconnected before an output was complete."""
        return "cancelled" in self.stops


current: ContextVar[Record | None] = ContextVar("llamado-request", default=None)
"""The request that the current task serves."""


def request_id(given: bytes) -> str:
    """Return the client's X-Request-Id if it is valid, else a random id."""
    if given and len(given) <= _LONGEST_ID and _VISIBLE.issuperset(given):
        return given.decode("ascii")
    return secrets.token_hex(8)
