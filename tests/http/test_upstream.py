"""Responses of upstreams: which are valid, and how much of them is buffered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from llamado.http.upstream import Pool, UpstreamAddress, UpstreamConnection, UpstreamLost

LINE = b"HTTP/1.1 200 OK\r\n"
SHORT = LINE + b"Content-Length: 2\r\n\r\nhi"
CHUNKED = LINE + b"Transfer-Encoding: chunked\r\n\r\n"
Write = Callable[[asyncio.StreamWriter], Any]


async def run_against(write: Write, ask: Callable[[Pool], Any]) -> Any:
    """Run `ask` against a server that answers each request with `write`."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                await write(writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.transport.abort()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        pool = Pool(UpstreamAddress(host="127.0.0.1", port=server.sockets[0].getsockname()[1]))
        try:
            async with asyncio.timeout(60):
                return await ask(pool)
        finally:
            pool.close()


async def answer_of(pool: Pool) -> tuple[UpstreamConnection, bytes]:
    """Return the connection that carried a response, and the response's body."""
    connection = await pool.connect()
    connection.send(b"GET / HTTP/1.1\r\n\r\n", b"")
    await connection.wait_for_response()
    parts = []
    while part := await connection.read():
        parts.append(part)
    connection.release()
    return connection, b"".join(parts)


def ask(*packets: bytes) -> tuple[UpstreamConnection, bytes]:
    async def write(writer: asyncio.StreamWriter) -> None:
        for packet in packets:
            writer.write(packet)
            await writer.drain()

    found: tuple[UpstreamConnection, bytes] = asyncio.run(run_against(write, answer_of))
    return found


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"HTTP/1.1 999 X\r\nContent-Length: 0\r\n\r\n", "the status 999"),
        (b"HTTP/1.1 600 X\r\nContent-Length: 0\r\n\r\n", "the status 600"),
        (b"HTTP/1.1 20 X\r\n\r\n", "invalid HTTP response"),
        (LINE + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n", "invalid HTTP response"),
        (LINE + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n", "invalid HTTP response"),
        (LINE + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nabc", "invalid HTTP response"),
        (LINE + b"X: a\r\n" * 201 + b"\r\n", "more than 200 headers"),
        (LINE + b"X: %b\r\n\r\n" % (b"a" * 70_000), "more than 65536 bytes"),
        (b"SSH-2.0-OpenSSH\r\n", "invalid HTTP response"),
        (b"HTTP/1.1 101 X\r\nUpgrade: ws\r\nConnection: upgrade\r\n\r\n", "another protocol"),
    ],
)
def test_malformed_responses_are_rejected(sent: bytes, reason: str) -> None:
    with pytest.raises(UpstreamLost, match=reason):
        ask(sent)


PART = b"a" * 10_000


@pytest.mark.parametrize(
    ("begin", "part"),
    [
        (LINE, b"X: " + PART + b"\r\n"),
        (LINE + b"X: ", PART),
        (b"HTTP/1.1 200 ", PART),
        (b"", b"HTTP/1.1 100 Continue\r\nX: " + PART + b"\r\n\r\n"),
        (CHUNKED + b"2\r\nhi\r\n0\r\n", b"X: " + PART + b"\r\n"),
        (CHUNKED + b"2\r\nhi\r\n0\r\nX: ", PART),
        (CHUNKED + b"2;", PART),
    ],
)
def test_endless_headers_and_trailers_are_aborted(begin: bytes, part: bytes) -> None:
    sent = 0

    async def write(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(begin)
        while True:
            writer.write(part)
            sent += len(part)
            await writer.drain()

    with pytest.raises(UpstreamLost, match=r"more than (65536 bytes|200 headers)"):
        asyncio.run(run_against(write, answer_of))
    assert sent < 2**25  # includes the socket buffers


def test_bytes_after_a_response_close_the_connection() -> None:
    for packets in ((SHORT + b"HTTP/1.1 500 X\r\nX: y\r\n\r\n",), (SHORT + SHORT,), (SHORT + b"garbage",)):
        connection, body = ask(*packets)
        assert (connection.status, body) == (200, b"hi")
        assert connection.headers == [(b"content-length", b"2")] and not connection.used


def test_trailers_are_dropped() -> None:
    connection, body = ask(CHUNKED + b"2\r\nhi\r\n0\r\nSet-Cookie: a\r\n\r\n")
    assert body == b"hi" and connection.headers == [(b"transfer-encoding", b"chunked")] and connection.used


def test_interim_responses_are_skipped() -> None:
    connection, body = ask(b"HTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n" + SHORT)
    assert (connection.status, body, connection.headers) == (200, b"hi", [(b"content-length", b"2")])


def test_unsolicited_bytes_close_a_pooled_connection() -> None:
    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(SHORT)

    async def ask_twice(pool: Pool) -> None:
        connection, _ = await answer_of(pool)
        connection.data_received(SHORT)
        other, body = await answer_of(pool)
        assert body == b"hi" and other is not connection

    asyncio.run(run_against(write, ask_twice))


def test_long_bodies_of_small_parts_are_accepted() -> None:
    parts = b"".join(b"1;a=b\r\nx\r\n" for _ in range(50_000))
    _, body = ask(CHUNKED + parts + b"0\r\n\r\n")
    assert body == b"x" * 50_000
