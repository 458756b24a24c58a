"""Streams of a killed upstream: complete events as far as they arrived, then an error in the format of their API."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from test_upstream import run_against

from llamado.http.exchange import _LONGEST_EVENT, Exchange
from llamado.http.upstream import Pool, UpstreamLost

EVENT = b'event: x\ndata: {"type": "x", "sequence_number": 7}\n\n'


def stream_parts(kind: str, path: str, *parts: bytes, whole: bool = False) -> list[bytes]:
    """Return a client's response from a process that sends these parts and is killed unless it is `whole`."""
    sent: list[Any] = []
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ntransfer-encoding: chunked\r\n\r\n" % kind.encode()

    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        for part in parts:
            before = len(sent)
            writer.write(b"%x\r\n%b\r\n" % (len(part), part))
            await writer.drain()
            while len(sent) == before and part.endswith(b"\n"):  # each part is read separately
                await asyncio.sleep(0)
        if whole:
            writer.write(b"0\r\n\r\n")
        else:
            writer.transport.abort()

    async def ask(pool: Pool) -> None:
        async def receive() -> Any:
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "client": None}
        async with Exchange(scope, receive, send, b"{}", forward_key=False) as exchange:
            connection = await exchange.forward(pool, path.encode(), b"")
            try:
                await exchange.deliver(connection)
            except UpstreamLost as error:
                await exchange.fail(error, "replica a")

    asyncio.run(run_against(write, ask))
    return [message["body"] for message in sent[1:]]


@pytest.mark.parametrize("cut", [b"", b'data: {"choices": [{"delta"'], ids=["between events", "inside an event"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_cut_stream_ends_with_an_error_in_its_apis_format(path: str, cut: bytes) -> None:
    *parts, last = stream_parts("text/event-stream", path, EVENT, *([cut] if cut else []))
    assert b"".join(parts) == EVENT, "no event in part, which a client could not read"
    lines = dict(line.split(": ", 1) for line in last.decode().strip().split("\n"))
    error = json.loads(lines["data"])
    if path == "/v1/chat/completions":
        assert "event" not in lines and error["error"]["type"] == "server_error"
        assert "replica a ended in the middle of its answer" in error["error"]["message"]
    else:
        assert lines["event"] == error["type"] == "error"
        if path == "/v1/messages":
            assert error["error"]["type"] == "api_error" and "replica a" in error["error"]["message"]
        else:
            assert (error["sequence_number"], error["code"]) == (8, "server_error") and "replica a" in error["message"]
    assert last.endswith(b"\n\n")


@pytest.mark.parametrize("cut", [b"", b'{"message": {"con'])
def test_a_cut_stream_of_lines_ends_with_an_error(cut: bytes) -> None:
    parts = stream_parts("application/x-ndjson", "/api/chat", b'{"a": 1}\n', *([cut] if cut else []))
    first, last = b"".join(parts).splitlines()
    assert json.loads(first) == {"a": 1} and "replica a ended" in json.loads(last)["error"]


def test_a_complete_stream_passes_unchanged() -> None:
    """Events of any length, with any line endings, with or without the last one."""
    long = b"data: " + b"x" * (_LONGEST_EVENT + 10)
    for parts in (
        [EVENT, EVENT],
        [b"data: 1\r\n\r\n", b"data: 2\r\n\r\n"],
        [EVENT, b"data: [DO", b"NE]"],
        [long, b"y\n\n"],
    ):
        assert b"".join(stream_parts("text/event-stream", "/v1/completions", *parts, whole=True)) == b"".join(parts)


def test_an_event_too_long_to_buffer_is_ended_before_the_error() -> None:
    *parts, last = stream_parts("text/event-stream", "/v1/completions", b"data: " + b"x" * (_LONGEST_EVENT + 10))
    assert last.startswith(b"\n\ndata: ") and len(b"".join(parts)) > _LONGEST_EVENT


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat"])
def test_a_stream_of_a_process_that_shuts_down_ends_with_an_error(path: str) -> None:
    """The request's task is cancelled at the end of the grace period."""
    event, kind = (b'{"a": 1}\n', b"application/x-ndjson") if path == "/api/chat" else (EVENT, b"text/event-stream")
    sent: list[Any] = []

    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ntransfer-encoding: chunked\r\n\r\n" % kind)
        writer.write(b"%x\r\n%b\r\n" % (len(event), event))
        await asyncio.Event().wait()

    async def ask(pool: Pool) -> None:
        task = asyncio.current_task()
        assert task is not None

        async def receive() -> Any:
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)
            if message.get("body") == event:
                task.cancel()

        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "client": None}
        with pytest.raises(asyncio.CancelledError):
            async with Exchange(scope, receive, send, b"{}", forward_key=False) as exchange:
                await exchange.deliver(await exchange.forward(pool, path.encode(), b""))
        task.uncancel()

    asyncio.run(run_against(write, ask))
    assert b"".join(message["body"] for message in sent[1:-1]) == event
    assert b"the server is shutting down" in sent[-1]["body"] and not sent[-1]["more_body"]
