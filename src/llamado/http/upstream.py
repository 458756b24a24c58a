"""HTTP/1.1 client for upstream processes: connection pooling, streaming, backpressure, and limits on responses.

One Python object per connection and one callback per packet: the per-chunk overhead of a general-purpose client would
be a considerable part of the time per token.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools

from llamado.errors import LlamadoError

Headers = list[tuple[bytes, bytes]]

_HIGH = 256 * 1024  # buffered body bytes at which reading pauses
CONNECT_SECONDS = 5.0
"""Seconds until a connection attempt is abandoned."""
_KEEP = 3.5  # seconds; llama-server and uvicorn both close after 5
_IDLE = 256  # pooled connections
_MAX_HEAD = 64 * 1024  # bytes of a response's headers, of its trailers, and of a body part's framing
_MAX_HEADERS = 200


class UpstreamLost(LlamadoError):
    """The upstream closed the connection, or sent invalid HTTP, before the response was complete."""


class _InvalidResponse(Exception):
    """The upstream sent a response that cannot be forwarded."""


class UpstreamRefused(UpstreamLost):
    """The upstream cannot be connected to."""


@dataclass(frozen=True)
class UpstreamAddress:
    """Address of an upstream: the path of a Unix socket, or host and port."""

    path: str = ""
    host: str = ""
    port: int = 0
    tls: bool = False
    base: bytes = b""
    """Prefix of every path."""

    @classmethod
    def parse(cls, url: str) -> UpstreamAddress:
        """Parse `http://host:port/base`."""
        parts = urlsplit(url)
        tls = parts.scheme == "https"
        return cls(
            host=parts.hostname or "",
            port=parts.port or (443 if tls else 80),
            tls=tls,
            base=parts.path.rstrip("/").encode("ascii", "ignore"),
        )

    @property
    def authority(self) -> bytes:
        """Value of the Host header."""
        if self.path:
            return b"localhost"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}".encode("idna" if not host.isascii() else "ascii")

    def __str__(self) -> str:
        return self.path or f"{'https' if self.tls else 'http'}://{self.authority.decode()}{self.base.decode()}"


class UpstreamConnection(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self.used = False
        """True if it has carried a response before."""
        self.idle_since = 0.0
        self.hung_up = False
        """True if this side aborted the request."""
        self._lost: UpstreamLost | None = None
        self._reset()

    def _reset(self) -> None:
        self.status = 0
        self.headers: Headers = []
        self._chunks: list[bytes] = []
        self._size = 0
        self._paused = False
        self._begun = False
        self._headed = False
        self._complete = False
        self._keep = False
        self._framed = False
        self._unread = 0  # bytes since the response began or the last body part: the parser may buffer all of them

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports have no common base class

    def data_received(self, data: bytes) -> None:
        self._begun = True
        if self._complete:
            self._pool.forget(self)  # unsolicited bytes must not become the next response
            self.abort()
            return
        self._unread += len(data)
        try:
            self._parser.feed_data(data)
            if self._unread > _MAX_HEAD and not self._complete:
                self._fail(f"it sent more than {_MAX_HEAD} bytes of headers or trailers")
        except httptools.HttpParserUpgrade:
            self._fail("it switched to another protocol")
        except httptools.HttpParserCallbackError as error:
            self._fail(f"it sent {error.__context__ or error}")
        except httptools.HttpParserError as error:
            self._fail(f"it sent an invalid HTTP response: {error}")
        if self._size > _HIGH and not self._paused and self._transport is not None and not self._complete:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._pool.forget(self)
        if not self._complete:
            if self._headed and not self._framed:
                self._complete = True  # a body without a length ends with the connection
            else:
                what = "in the middle of its response" if self._headed else "before it responded"
                self._lost = self._lost or UpstreamLost(f"{self._pool.address} closed the connection {what}")
        self._wake()

    # httptools

    # After the end of a response they are called for excess bytes, which belong to no request.

    def on_message_begin(self) -> None:
        if self._complete:
            self._keep = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._headed:
            return  # a trailer
        self.headers.append((name.lower(), value))
        if len(self.headers) > _MAX_HEADERS:
            raise _InvalidResponse(f"more than {_MAX_HEADERS} headers")

    def on_headers_complete(self) -> None:
        if self._complete:
            return
        self.status = self._parser.get_status_code()
        if 100 <= self.status < 200:
            return
        names = [name for name, _ in self.headers]
        if not 200 <= self.status < 600:
            raise _InvalidResponse(f"the status {self.status}")
        if sum(len(name) + len(value) for name, value in self.headers) > _MAX_HEAD:
            raise _InvalidResponse(f"more than {_MAX_HEAD} bytes of headers")
        self._headed = True
        self._keep = self._parser.should_keep_alive()
        self._framed = self.status in (204, 304) or b"content-length" in names or b"transfer-encoding" in names

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        if not self._complete:
            self._chunks.append(body)
            self._size += len(body)

    def on_message_complete(self) -> None:
        if self._headed:
            self._complete = True
        else:
            self.headers = []  # 1xx: the final response follows

    # The request

    def send(self, head: bytes, body: bytes) -> None:
        """Write a request. Raises UpstreamLost."""
        if self._transport is None or self._lost is not None:
            raise self._lost or UpstreamLost(f"{self._pool.address} closed the connection before the request was sent")
        if self.used:
            # The old parser may hold bytes of a response that was not read to its end.
            self._parser = httptools.HttpResponseParser(self)
        self._reset()
        if len(body) < 65536:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)

    @property
    def has_begun(self) -> bool:
        """True if a byte of the response has arrived."""
        return self._begun

    @property
    def is_complete(self) -> bool:
        """True if the whole response has arrived; `take` may still return some of it."""
        return self._complete

    async def wait_for_response(self) -> None:
        """Wait for the response head and part of the body (or its end). Raises UpstreamLost."""
        while not (self._headed and (self._chunks or self._complete)):
            if self._lost is not None:
                raise self._lost
            await self._wait()

    async def read(self) -> bytes:
        """Return the next part of the body; b"" at its end. Raises UpstreamLost."""
        while not self._chunks:
            if self._complete:
                return b""
            if self._lost is not None:
                raise self._lost
            await self._wait()
        return self.take()

    def take(self) -> bytes:
        """Return the buffered part of the body."""
        chunks, self._chunks, self._size = self._chunks, [], 0
        if self._paused:
            self._paused = False
            if self._transport is not None:
                self._transport.resume_reading()
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, reason: str) -> None:
        self._lost = UpstreamLost(f"{self._pool.address}: {reason}")
        self.abort()

    def release(self) -> None:
        """Return the connection to the pool after the response was read; close it if it cannot be reused."""
        if self._complete and self._keep and self._framed and self._lost is None and self._transport is not None:
            self.used = True
            self._chunks = []
            self._pool.keep(self)
        else:
            self.abort()

    def abort(self) -> None:
        """Close at once, even in the middle of a response."""
        if self._transport is not None:
            self._transport.abort()

    def hang_up(self, reason: str) -> None:
        """Abort the request: close the connection; its reader gets UpstreamLost."""
        self.hung_up = True
        self._lost = self._lost or UpstreamLost(reason)
        self.abort()
        self._wake()


class Pool:
    """Connection pool of one upstream."""

    def __init__(self, address: UpstreamAddress) -> None:
        self.address = address
        self._idle: list[UpstreamConnection] = []
        self._all: set[UpstreamConnection] = set()
        self._closed = False

    async def connect(self, *, fresh: bool = False) -> UpstreamConnection:
        """Return a connection, pooled unless `fresh`. Raises UpstreamRefused."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        while self._idle and not fresh:
            connection = self._idle.pop()
            if now - connection.idle_since < _KEEP:
                return connection
            connection.abort()
        make: Callable[[], UpstreamConnection] = lambda: UpstreamConnection(self)  # noqa: E731
        address = self.address
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                if address.path:
                    _, connection = await loop.create_unix_connection(make, address.path)
                else:
                    context = ssl.create_default_context() if address.tls else None
                    _, connection = await loop.create_connection(make, address.host, address.port, ssl=context)
        except TimeoutError:
            raise UpstreamRefused(f"cannot connect to {address} within {CONNECT_SECONDS:g} s") from None
        except OSError as error:
            raise UpstreamRefused(f"cannot connect to {address}: {error.strerror or error}") from None
        if self._closed:
            connection.abort()
            raise UpstreamRefused(f"{address} has been closed")
        self._all.add(connection)
        return connection

    def keep(self, connection: UpstreamConnection) -> None:
        """Put an idle connection into the pool."""
        if self._closed or len(self._idle) >= _IDLE:
            connection.abort()
            return
        connection.idle_since = asyncio.get_running_loop().time()
        self._idle.append(connection)

    def forget(self, connection: UpstreamConnection) -> None:
        """Remove a closed connection."""
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def abort_all(self, reason: str) -> None:
        """Abort all running requests with UpstreamLost."""
        for connection in list(self._all):
            connection.hang_up(reason)

    def close(self) -> None:
        """Close all connections; running requests fail with UpstreamLost."""
        self._closed = True
        for connection in list(self._all):
            connection.abort()


async def get(pool: Pool, path: str, *, timeout: float, limit: int = 1 << 20, key: bytes = b"") -> tuple[int, bytes]:
    """GET a path; return status and body. Raises as `call` does."""
    return await call(pool, "GET", path, timeout=timeout, limit=limit, key=key)


async def call(
    pool: Pool, method: str, path: str, body: bytes = b"", *, timeout: float, limit: int = 1 << 20, key: bytes = b""
) -> tuple[int, bytes]:
    """Send an idempotent request; return status and body. Raises UpstreamLost; TimeoutError after `timeout` seconds."""
    lines = [
        b"%b %b HTTP/1.1" % (method.encode("ascii"), pool.address.base + path.encode("ascii", "ignore")),
        b"host: " + pool.address.authority,
        *([b"authorization: Bearer " + key] if key else []),
        *([b"content-length: %d" % len(body)] if body else []),
    ]
    head = b"\r\n".join([*lines, b"", b""])
    async with asyncio.timeout(timeout):
        connection = await pool.connect()
        try:
            try:
                connection.send(head, body)
                await connection.wait_for_response()
            except UpstreamLost:
                if connection.has_begun or not connection.used:
                    raise
                connection.abort()  # a pooled connection that the upstream closed
                connection = await pool.connect(fresh=True)
                connection.send(head, body)
                await connection.wait_for_response()
            parts, size = [], 0
            while part := await connection.read():
                parts.append(part)
                size += len(part)
                if size > limit:
                    raise UpstreamLost(f"{pool.address}{path}: a response of more than {limit} bytes")
            return connection.status, b"".join(parts)
        finally:
            connection.release()
