"""Disconnects are noticed by one guard, and streams end when their client disconnects or the application shuts down."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import pytest

from llamado.http.access import Access, AccessRules
from llamado.http.errors import ClientDisconnected
from llamado.http.streams import OpenStreams, PartStream, disconnected, unless_disconnected

Message = dict[str, Any]


class Client:
    """A client that disconnects on `leave` and keeps all messages."""

    def __init__(self) -> None:
        self.leave = asyncio.Event()
        self.received: list[Message] = []
        self.got_part = asyncio.Event()

    async def receive(self) -> Message:
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.received.append(message)
        if message.get("body"):
            self.got_part.set()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.received)

    @property
    def is_complete(self) -> bool:
        return self.received[-1].get("more_body") is False


def run(work: Callable[[Client], Awaitable[None]]) -> Client:
    async def main() -> Client:
        client = Client()
        async with asyncio.timeout(60):
            await work(client)
        return client

    return asyncio.run(main())


def test_the_guard_calls_back_once_the_client_disconnects() -> None:
    calls: list[str] = []

    async def work(client: Client) -> None:
        with disconnected(client.receive, lambda: calls.append("gone")) as gone:
            assert not gone.done()
            client.leave.set()
            await gone
        with disconnected(client.receive, lambda: calls.append("late")):
            pass  # the guard ends before it can see the disconnect

    run(work)
    assert calls == ["gone"]


def test_work_is_cancelled_when_the_client_disconnects() -> None:
    cancelled: list[bool] = []

    async def work(client: Client) -> None:
        async def endless() -> None:
            client.leave.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.append(True)

        with pytest.raises(ClientDisconnected):
            await unless_disconnected(client.receive, endless())
        await asyncio.sleep(0)
        client.leave.clear()
        assert await unless_disconnected(client.receive, asyncio.sleep(0, "done")) == "done"

    run(work)
    assert cancelled == [True]


async def _parts(*parts: bytes, endless: bool = False) -> AsyncGenerator[bytes, None]:
    for part in parts:
        yield part
    if endless:
        await asyncio.Event().wait()


def test_a_stream_sends_all_parts_and_closes() -> None:
    closed: list[bool] = []

    async def work(client: Client) -> None:
        stream = PartStream(_parts(b"a", b"b"), headers={"content-type": "x/y"}, on_close=lambda: closed.append(True))
        await stream({}, client.receive, client.send)

    client = run(work)
    assert client.received[0]["headers"] == [(b"content-type", b"x/y")]
    assert client.body == b"ab" and client.is_complete and closed == [True]


@pytest.mark.parametrize("end", ["the client disconnects", "the application shuts down"])
def test_an_endless_stream_ends(end: str) -> None:
    closed: list[bool] = []

    async def work(client: Client) -> None:
        streams = OpenStreams()
        stream = PartStream(_parts(b"a", endless=True), streams=streams, on_close=lambda: closed.append(True))
        running = asyncio.ensure_future(stream({}, client.receive, client.send))
        await client.got_part.wait()
        if end == "the client disconnects":
            client.leave.set()
        else:
            streams.close()
        await running
        assert not streams.writers

    client = run(work)
    assert client.body == b"a" and closed == [True]
    assert client.is_complete == (end == "the application shuts down")


def test_a_stream_opened_during_shutdown_ends_at_once() -> None:
    async def work(client: Client) -> None:
        streams = OpenStreams()
        streams.close()
        await PartStream(_parts(b"a", endless=True), streams=streams)({}, client.receive, client.send)

    assert run(work).is_complete


def test_head_of_a_silent_stream_ends_with_its_headers() -> None:
    """Without parts nothing else ends the response, and the connection would wait for the next event."""

    async def work(client: Client) -> None:
        access = Access(PartStream(_parts(endless=True)), AccessRules())
        running = asyncio.ensure_future(access(scope, client.receive, client.send))
        while not client.received or not client.is_complete:
            await asyncio.sleep(0)
        client.leave.set()  # as the server does after a complete response
        await running

    scope = {"type": "http", "method": "HEAD", "path": "/x", "headers": [], "client": None}
    assert [message["type"] for message in run(work).received] == ["http.response.start", "http.response.body"]


def test_an_error_of_the_generator_is_raised() -> None:
    async def failing() -> AsyncGenerator[bytes, None]:
        yield b"a"
        raise KeyError("k")

    async def work(client: Client) -> None:
        with pytest.raises(KeyError):
            await PartStream(failing())({}, client.receive, client.send)

    assert not run(work).is_complete
