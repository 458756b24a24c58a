"""HTTP/1.1 client for other processes: kept connections, streamed bodies, back-pressure, and bounded, checked answers.

One Python object per connection and one callback per packet: what a general client costs per chunk would be a good part
of what a token costs.
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

_HIGH = 256 * 1024  # bytes of a body that wait before reading pauses
CONNECT_SECONDS = 5.0
"""Seconds until a connection that nobody takes or refuses is given up."""
_KEEP = 3.5  # seconds; llama-server and uvicorn both close after 5
_IDLE = 256  # kept connections
_MAX_HEAD = 64 * 1024  # bytes of an answer's headers, of its trailers, and of what frames a part of its body
_MAX_HEADERS = 200


class UpstreamLost(LlamadoError):
    """The process closed the connection, or sent no HTTP, before the answer was complete."""


class _Malformed(Exception):
    """The process sent an answer that cannot be passed on."""


class UpstreamRefused(UpstreamLost):
    """Nobody listens where the process should."""


@dataclass(frozen=True)
class UpstreamAddress:
    """Where a process listens: a Unix socket's path, or host and port."""

    path: str = ""
    host: str = ""
    port: int = 0
    tls: bool = False
    base: bytes = b""
    """Before every path."""

    @classmethod
    def parse(cls, url: str) -> UpstreamAddress:
        """Of `http://host:port/base`."""
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
        """Whether it has carried an answer before."""
        self.idle_since = 0.0
        self.hung_up = False
        """Whether this side gave up the request."""
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
        self._unread = 0  # bytes since the answer's start or the last part of its body: the parser may keep them all

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by its methods only

    def data_received(self, data: bytes) -> None:
        self._begun = True
        if self._complete:
            self._pool.forget(self)  # nothing was asked: what comes is no answer to the next request
            self.abort()
            return
        self._unread += len(data)
        try:
            self._parser.feed_data(data)
            if self._unread > _MAX_HEAD and not self._complete:
                self._fail(f"it sent more than {_MAX_HEAD} bytes of headers or trailers")
        except httptools.HttpParserUpgrade:
            self._fail("it wants to speak another protocol")
        except httptools.HttpParserCallbackError as error:
            self._fail(f"it sent {error.__context__ or error}")
        except httptools.HttpParserError as error:
            self._fail(f"it sent something that is no HTTP answer: {error}")
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
                what = "in the middle of its answer" if self._headed else "before it answered"
                self._lost = self._lost or UpstreamLost(f"{self._pool.address} closed the connection {what}")
        self._wake()

    # httptools

    # After the answer's end they are called for what was sent behind it, which belongs to no request.

    def on_message_begin(self) -> None:
        if self._complete:
            self._keep = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._headed:
            return  # a trailer
        self.headers.append((name.lower(), value))
        if len(self.headers) > _MAX_HEADERS:
            raise _Malformed(f"more than {_MAX_HEADERS} headers")

    def on_headers_complete(self) -> None:
        if self._complete:
            return
        self.status = self._parser.get_status_code()
        if 100 <= self.status < 200:
            return
        names = [name for name, _ in self.headers]
        if not 200 <= self.status < 600:
            raise _Malformed(f"the status {self.status}")
        if sum(len(name) + len(value) for name, value in self.headers) > _MAX_HEAD:
            raise _Malformed(f"more than {_MAX_HEAD} bytes of headers")
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
            self.headers = []  # 1xx: the answer proper follows

    # The request's side

    def send(self, head: bytes, body: bytes) -> None:
        """Write a request. Raises UpstreamLost."""
        if self._transport is None or self._lost is not None:
            raise self._lost or UpstreamLost(f"{self._pool.address} closed the connection before it was asked")
        if self.used:
            # A new parser: one that answered a request of which the rest was never read has old bytes in it.
            self._parser = httptools.HttpResponseParser(self)
        self._reset()
        if len(body) < 65536:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)

    @property
    def begun(self) -> bool:
        """Whether a byte of the answer has come."""
        return self._begun

    @property
    def finished(self) -> bool:
        """Whether the whole answer has come; `take` may still have some of it."""
        return self._complete

    async def answered(self) -> None:
        """Wait until the answer's head and some of its body (or its end) are there. Raises UpstreamLost."""
        while not (self._headed and (self._chunks or self._complete)):
            if self._lost is not None:
                raise self._lost
            await self._wait()

    async def read(self) -> bytes:
        """The body's next part; b"" at its end. Raises UpstreamLost."""
        while not self._chunks:
            if self._complete:
                return b""
            if self._lost is not None:
                raise self._lost
            await self._wait()
        return self.take()

    def take(self) -> bytes:
        """What has come of the body."""
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
        """The answer was read: keep the connection for the next request, if it may be kept."""
        if self._complete and self._keep and self._framed and self._lost is None and self._transport is not None:
            self.used = True
            self._chunks = []
            self._pool.keep(self)
        else:
            self.abort()

    def abort(self) -> None:
        """Close at once, whatever is under way."""
        if self._transport is not None:
            self._transport.abort()

    def hang_up(self, reason: str) -> None:
        """Give up the request: close, and let whoever reads go on with UpstreamLost."""
        self.hung_up = True
        self._lost = self._lost or UpstreamLost(reason)
        self.abort()
        self._wake()


class Pool:
    """Connections to one process."""

    def __init__(self, address: UpstreamAddress) -> None:
        self.address = address
        self._idle: list[UpstreamConnection] = []
        self._all: set[UpstreamConnection] = set()
        self._closed = False

    async def connect(self, *, fresh: bool = False) -> UpstreamConnection:
        """A connection, of the kept ones if possible. Raises UpstreamRefused."""
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
            raise UpstreamRefused(f"{address} has ended")
        self._all.add(connection)
        return connection

    def keep(self, connection: UpstreamConnection) -> None:
        """Take back a connection that is free again."""
        if self._closed or len(self._idle) >= _IDLE:
            connection.abort()
            return
        connection.idle_since = asyncio.get_running_loop().time()
        self._idle.append(connection)

    def forget(self, connection: UpstreamConnection) -> None:
        """A connection was closed."""
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def break_all(self, reason: str) -> None:
        """Give up all requests under way: they see UpstreamLost."""
        for connection in list(self._all):
            connection.hang_up(reason)

    def close(self) -> None:
        """Close everything; requests under way see UpstreamLost."""
        self._closed = True
        for connection in list(self._all):
            connection.abort()


async def get(pool: Pool, path: str, *, timeout: float, limit: int = 1 << 20, key: bytes = b"") -> tuple[int, bytes]:
    """Status and body of a GET. Raises UpstreamLost; TimeoutError after `timeout` seconds."""
    lines = [
        b"GET %b HTTP/1.1" % (pool.address.base + path.encode("ascii", "ignore")),
        b"host: " + pool.address.authority,
        *([b"authorization: Bearer " + key] if key else []),
    ]
    head = b"\r\n".join([*lines, b"", b""])
    async with asyncio.timeout(timeout):
        connection = await pool.connect()
        try:
            try:
                connection.send(head, b"")
                await connection.answered()
            except UpstreamLost:
                if connection.begun or not connection.used:
                    raise
                connection.abort()  # a kept connection, closed meanwhile
                connection = await pool.connect(fresh=True)
                connection.send(head, b"")
                await connection.answered()
            parts, size = [], 0
            while part := await connection.read():
                parts.append(part)
                size += len(part)
                if size > limit:
                    raise UpstreamLost(f"{pool.address}{path}: an answer of more than {limit} bytes")
            return connection.status, b"".join(parts)
        finally:
            connection.release()
