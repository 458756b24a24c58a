"""Counts of HTTP requests by endpoint, status and duration, and the token usage of single requests; event loop only.

A gateway charges its clients by the token usage of single requests. It sends a random id with each request and fetches
the usage by that id, so neither the request's contents nor an early disconnect changes the charge.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from bisect import bisect_left
from collections import OrderedDict

import orjson

from llamado.engine.request import Histogram
from llamado.http.upstream import Pool, UpstreamLost, get

USAGE_HEADER = b"x-llamado-usage-id"
USAGE_PATH = "/usage"
_ID = re.compile("[0-9a-f]{32}")
_MOST_KEPT = 4096
_WAIT_SECONDS = 4.0  # for a request whose client has just disconnected
_ASK_SECONDS = _WAIT_SECONDS + 1

# Seconds. Responses take from a millisecond (health check) to minutes (long generation).
BOUNDS = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Traffic:
    """Request counts and durations. Endpoints are route paths, which keeps their number small."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, str, int], int] = {}
        """(method, endpoint, status) → count, without health probes."""
        self.probes: dict[tuple[str, int], int] = {}
        """(endpoint, status) → count. Separate, because 503 is a probe's correct response during startup."""
        self.cancelled = 0
        """Requests whose clients disconnected before the response was complete, whatever the status."""
        self._durations: dict[str, tuple[list[int], list[float]]] = {}

    def count(
        self, method: str, endpoint: str, status: int, seconds: float, *, cancelled: bool = False, probe: bool = False
    ) -> None:
        """Count a finished request."""
        if probe:
            self.probes[endpoint, status] = self.probes.get((endpoint, status), 0) + 1
            return
        self.cancelled += cancelled
        key = (method, endpoint, status)
        self.requests[key] = self.requests.get(key, 0) + 1
        counts, total = self._durations.setdefault(endpoint, ([0] * (len(BOUNDS) + 1), [0.0]))
        counts[bisect_left(BOUNDS, seconds)] += 1
        total[0] += seconds

    @property
    def durations(self) -> dict[str, Histogram]:
        """Seconds from a request's first byte to the end of its response, by endpoint."""
        return {
            endpoint: Histogram(BOUNDS, tuple(counts), total[0])
            for endpoint, (counts, total) in self._durations.items()
        }


def new_usage_id() -> str:
    """Return a random request id that clients cannot guess."""
    return secrets.token_hex(16)


def is_usage_id(text: str) -> bool:
    """Return True if `text` is a well-formed usage id."""
    return _ID.fullmatch(text) is not None


class UsageReports:
    """Token usage of the latest requests that carried a usage id; event loop only."""

    def __init__(self) -> None:
        self._tokens: OrderedDict[str, asyncio.Future[int]] = OrderedDict()

    def begin(self, id: str) -> None:
        """Start a report for a request."""
        self._tokens[id] = asyncio.get_running_loop().create_future()
        if len(self._tokens) > _MOST_KEPT:
            self._tokens.popitem(last=False)[1].cancel()

    def end(self, id: str, tokens: int) -> None:
        """Store the tokens of prompts and outputs of a finished request."""
        found = self._tokens.get(id)
        if found is not None and not found.done():
            found.set_result(tokens)

    async def take(self, id: str) -> int | None:
        """Wait for the request to finish, then remove and return its tokens; None if it is unknown or still running."""
        found = self._tokens.get(id)
        if found is None:
            return None
        await asyncio.wait([found], timeout=_WAIT_SECONDS)
        if not found.done() or found.cancelled():
            return None
        self._tokens.pop(id, None)
        return found.result()


async def ask_usage(pool: Pool, id: str, key: bytes = b"") -> int | None:
    """Fetch the tokens that a server counted for a request; None if it does not answer or keeps no count."""
    try:
        status, body = await get(pool, f"{USAGE_PATH}?id={id}", timeout=_ASK_SECONDS, key=key)
        found = orjson.loads(body)["total_tokens"] if status == 200 else None
    except (UpstreamLost, TimeoutError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, int) and not isinstance(found, bool) and found >= 0 else None
