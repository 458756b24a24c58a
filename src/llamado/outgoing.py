"""HTTP clients for untrusted servers: the size and duration of responses are bounded.

Bodies are read uncompressed, so a few bytes cannot become gigabytes, up to a number of bytes and of seconds. A request
sets its own limits by `extensions=limits(…)`. Headers are bounded by httpx (100 KiB).
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx

MAX_BYTES = 16 << 20
"""Bytes of a body, unless the request says otherwise."""
MAX_SECONDS = 120.0
"""Seconds from an answer's headers to its end."""
_HEADERS = {"accept-encoding": "identity"}


class AnswerTooLarge(httpx.HTTPError):
    """An answer that exceeds its limits, or is compressed."""


def limits(max_bytes: float = MAX_BYTES, max_seconds: float = MAX_SECONDS) -> dict[str, Any]:
    """Return the `extensions` of a request with its own limits."""
    return {"max_bytes": max_bytes, "max_seconds": max_seconds}


def open_client(**options: Any) -> httpx.Client:
    """Return an `httpx.Client` with bounded answers, which raises AnswerTooLarge. `options`: those of httpx."""
    client = httpx.Client(**options, event_hooks={"response": [_bound]})
    client.headers.update(_HEADERS)
    return client


def open_async_client(**options: Any) -> httpx.AsyncClient:
    """Return an `httpx.AsyncClient` with bounded answers, which raises AnswerTooLarge. `options`: those of httpx."""
    client = httpx.AsyncClient(**options, event_hooks={"response": [_bound_async]})
    client.headers.update(_HEADERS)
    return client


class _Limit:
    """Remaining bytes and seconds of a response."""

    def __init__(self, response: httpx.Response) -> None:
        encoding = response.headers.get("content-encoding", "identity").lower()
        if encoding not in ("", "identity"):
            raise AnswerTooLarge(f"the answer is compressed ({encoding[:50]}), which was not asked for")
        self._max_bytes = response.request.extensions.get("max_bytes", MAX_BYTES)
        self._max_seconds = response.request.extensions.get("max_seconds", MAX_SECONDS)
        length = response.headers.get("content-length", "")
        if length.isdigit() and response.request.method != "HEAD":
            self._check_bytes(int(length[:20]))
        self._n_bytes = 0
        self._deadline = time.monotonic() + self._max_seconds

    def spend(self, n_bytes: int) -> None:
        self._n_bytes += n_bytes
        self._check_bytes(self._n_bytes)
        if time.monotonic() > self._deadline:
            raise AnswerTooLarge(f"the answer takes longer than {self._max_seconds:g} s")

    def _check_bytes(self, n_bytes: int) -> None:
        if n_bytes > self._max_bytes:
            raise AnswerTooLarge(f"the answer has more than {self._max_bytes} bytes")


class _Stream(httpx.SyncByteStream):
    def __init__(self, stream: httpx.SyncByteStream, limit: _Limit) -> None:
        self._stream, self._limit = stream, limit

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._stream:
            self._limit.spend(len(piece))
            yield piece

    def close(self) -> None:
        self._stream.close()


class _AsyncStream(httpx.AsyncByteStream):
    def __init__(self, stream: httpx.AsyncByteStream, limit: _Limit) -> None:
        self._stream, self._limit = stream, limit

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._stream:
            self._limit.spend(len(piece))
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()


def _bound(response: httpx.Response) -> None:
    assert isinstance(response.stream, httpx.SyncByteStream)
    response.stream = _Stream(response.stream, _Limit(response))


async def _bound_async(response: httpx.Response) -> None:
    assert isinstance(response.stream, httpx.AsyncByteStream)
    response.stream = _AsyncStream(response.stream, _Limit(response))
