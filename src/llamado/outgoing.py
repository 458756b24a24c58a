"""HTTP clients for untrusted servers: the size and duration of responses are bounded.

Compressed bodies are rejected, because a few bytes could become gigabytes. A request sets its own limits by
`extensions=limits(…)`. httpx bounds headers (100 KiB). `read_json` parses JSON, and `fit` converts it to an expected
form.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import httpx
import orjson

from llamado.numerals import whole_number

MAX_BYTES = 16 << 20
"""Maximum bytes of a body, unless the request has its own limit."""
MAX_SECONDS = 120.0
"""Maximum seconds from the headers of a response to its end."""
MOST_ITEMS, MOST_CHARACTERS, LARGEST = 4096, 4096, 1e18
"""Maximum items of a list, characters of a text and absolute value of a number that `fit` returns."""
_HEADERS = {"accept-encoding": "identity"}


class AnswerTooLarge(httpx.HTTPError):
    """A response that exceeds its limits, or is compressed."""


def limits(max_bytes: float = MAX_BYTES, max_seconds: float = MAX_SECONDS) -> dict[str, Any]:
    """Return the `extensions` of a request that has its own limits."""
    return {"max_bytes": max_bytes, "max_seconds": max_seconds}


def open_client(**options: Any) -> httpx.Client:
    """Return an `httpx.Client` with bounded responses, which raises AnswerTooLarge. `options`: those of httpx."""
    client = httpx.Client(**options, event_hooks={"response": [_bound]})
    client.headers.update(_HEADERS)
    return client


def open_async_client(**options: Any) -> httpx.AsyncClient:
    """Return an `httpx.AsyncClient` with bounded responses, which raises AnswerTooLarge. `options`: those of httpx."""
    client = httpx.AsyncClient(**options, event_hooks={"response": [_bound_async]})
    client.headers.update(_HEADERS)
    return client


class Maybe(NamedTuple):
    """Form for `fit` of an optional value: None if it is absent or does not fit."""

    form: Any


def read_json(response: httpx.Response) -> Any:
    """Return the JSON of a response, of any type. Raises ValueError, also for JSON that is nested too deeply."""
    return orjson.loads(response.content)


def fit(value: Any, form: Any) -> Any:
    """Convert untrusted JSON to the form of an example.

    An object keeps only the keys of the example, and the items of a list have the form of its one item. The example's
    value replaces one that is missing, has another type, or is too long or large.
    """
    if isinstance(form, Maybe):
        return fit(value, form.form) if _is_like(value, form.form) else None
    if isinstance(form, dict):
        found = value if isinstance(value, dict) else {}
        return {key: fit(found.get(key), one) for key, one in form.items()}
    if isinstance(form, list):
        return [fit(one, form[0]) for one in value[:MOST_ITEMS]] if isinstance(value, list) else []
    if not _is_like(value, form):
        return form
    return value[:MOST_CHARACTERS] if isinstance(form, str) else value


def _is_like(value: Any, form: Any) -> bool:
    """Return True if a value has the type of an example and is not too large. An int counts as a float."""
    if isinstance(form, dict | list | str | bool):
        return isinstance(value, type(form))
    if isinstance(value, bool) or not isinstance(value, int | type(form)):
        return False
    return bool(abs(value) <= LARGEST)  # False for NaN


class _Limit:
    """Remaining bytes and seconds of a response."""

    def __init__(self, response: httpx.Response) -> None:
        encoding = response.headers.get("content-encoding", "identity").lower()
        if encoding not in ("", "identity"):
            raise AnswerTooLarge(f"the response is compressed ({encoding[:50]}), which the request forbids")
        self._max_bytes = response.request.extensions.get("max_bytes", MAX_BYTES)
        self._max_seconds = response.request.extensions.get("max_seconds", MAX_SECONDS)
        length = response.headers.get("content-length", "")
        if length and response.request.method != "HEAD":
            announced = whole_number(length)
            if announced is None:
                raise AnswerTooLarge(f"the response announces {length[:30]!r} bytes")
            self._check_bytes(announced)
        self._n_bytes = 0
        self._deadline = time.monotonic() + self._max_seconds

    def spend(self, n_bytes: int) -> None:
        self._n_bytes += n_bytes
        self._check_bytes(self._n_bytes)
        if time.monotonic() > self._deadline:
            raise AnswerTooLarge(f"the response takes longer than {self._max_seconds:g} s")

    def _check_bytes(self, n_bytes: int) -> None:
        if n_bytes > self._max_bytes:
            raise AnswerTooLarge(f"the response has more than {self._max_bytes} bytes")


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
