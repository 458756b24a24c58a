"""Answers of other servers are bounded."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import llamado
from llamado.outgoing import AnswerTooLarge, limits, open_async_client, open_client


class Body(httpx.SyncByteStream, httpx.AsyncByteStream):
    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces
        self.closed = False

    def __iter__(self) -> Iterator[bytes]:
        yield from self._pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece

    def close(self) -> None:
        self.closed = True

    async def aclose(self) -> None:
        self.closed = True


MIB = bytes(1 << 20)


@pytest.mark.parametrize(
    ("headers", "body", "extensions", "error"),
    [
        ({}, [MIB] * 16, {}, ""),
        ({}, [MIB] * 17, {}, "more than 16777216 bytes"),
        ({}, [MIB] * 17, limits(20 << 20), ""),
        ({}, [b"x", b"y"], limits(1), "more than 1 bytes"),
        ({}, [b"x"], limits(max_seconds=-1.0), "longer than"),
        ({"content-length": "9" * 30}, [], {}, "more than"),
        ({"content-encoding": "gzip"}, [zlib.compress(MIB * 64, wbits=31)], {}, "compressed"),
        ({"content-encoding": "identity"}, [b"x"], {}, ""),
    ],
)
def test_bodies_are_bounded(headers: dict[str, str], body: list[bytes], extensions: dict[str, Any], error: str) -> None:
    streams: list[Body] = []

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.headers["accept-encoding"] == "identity"
        streams.append(Body(body))
        return httpx.Response(200, headers=headers, stream=streams[-1])

    async def asynchronous() -> bytes:
        async with open_async_client(transport=httpx.MockTransport(answer)) as client:
            return (await client.get("http://x/", extensions=extensions)).content

    def synchronous() -> bytes:
        with open_client(transport=httpx.MockTransport(answer)) as client:
            return client.get("http://x/", extensions=extensions).content

    for ask in (synchronous, lambda: asyncio.run(asynchronous())):
        if error:
            with pytest.raises(AnswerTooLarge, match=error):
                ask()
        else:
            assert ask() == b"".join(body)
        assert streams[-1].closed


def test_redirects_are_bounded() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(302, headers={"location": "/other"}, stream=Body([MIB] * 17))

    client = open_client(transport=httpx.MockTransport(answer), follow_redirects=True)
    with client, pytest.raises(AnswerTooLarge):
        client.get("http://x/")


@pytest.mark.slow
def test_all_clients_are_bounded() -> None:
    """Exceptions: a client library of its own, the demo's own server, and the proxy, which passes pieces on."""
    own = {"outgoing.py", "client/asynchronous.py", "client/synchronous.py", "commands/demo.py", "tools/proxy.py"}
    root = Path(llamado.__file__).parent
    unbounded = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if re.search(r"\bhttpx\.(Async)?Client\(|\bhttpx\.(get|post|stream)\(|urlopen\(", path.read_text())
    }
    assert unbounded - {"cluster/deploy/containers.py"} == own
