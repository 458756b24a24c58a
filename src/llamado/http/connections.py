"""Connections that may do no harm: time limits, size limits, and a limit of how many are open.

uvicorn's protocol over httptools trusts a client to send what it began. Here a connection that sends nothing, or a byte
now and then, or headers without end, or requests without waiting for answers, is closed; and when too many are open,
those that rest longest make room. `/health` is answered under all of that.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import httptools
import uvicorn
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from llamado.http.bodies import MAX_BODY

if sys.platform != "win32":
    import resource

log = logging.getLogger("llamado.server")

# Seconds from a connection's (or a request's) first byte to the end of the headers. Real ones arrive in one packet.
HEADER_SECONDS = 20.0
# Seconds from there to the end of the body, and how many more for each byte announced: 128 KiB/s.
BODY_SECONDS = 20.0
BODY_SECONDS_PER_BYTE = 1 / (128 * 1024)
# Seconds for a body of which no length is announced: the largest (16 MiB) at that pace.
CHUNKED_SECONDS = 150.0
# Bytes of a body that are still read after it was answered, so that who sends it gets to read why: any that could
# have been taken.
MAX_UNWANTED = MAX_BODY
# Seconds for the rest of such a request where the connection ends with its answer.
LINGER_SECONDS = 3.0
# Bytes and lines of the headers, the URL included; browsers and proxies stay below 16 KiB.
MAX_HEADER_BYTES = 64 * 1024
MAX_HEADERS = 200
# Bytes of a chunked body's framing (lengths, extensions, trailers), beside so many for each byte of it: a chunk of
# one byte has five.
MAX_FRAMING = 64 * 1024
FRAMING_PER_BYTE = 8
# Requests one connection may send ahead of their answers.
MAX_PIPELINED = 16
# Connections beyond the limit that are let in to ask for /health.
HEADROOM = 64
# File descriptors kept for files, workers, the log.
RESERVED_FILES = 256
# Seconds that running answers get after the first signal.
GRACE = 10
# Seconds a connection may rest between two requests.
KEEP_ALIVE = 30
# Bytes of answers that may wait for clients that do not read them, of all connections together.
MOST_UNREAD = 256 * 2**20
# Name of the ASGI extension that closes a connection without waiting for what its client has not read.
ABORT = "llamado.abort"
# Name of the ASGI extension that writes more of a response's body at once: `(bytes) -> bool`, False where that cannot
# be now, and nothing is written; of no bytes it says whether it could. It is a `send` past the layers in between, which
# care for the head of a response alone.
WRITE = "llamado.write"
# A connection costs about 10 kB; more of them than this serve nobody.
MOST_CONNECTIONS = 16384


def raise_file_limit() -> int:
    """Let this process open as many files as the system allows; returns how many."""
    if sys.platform == "win32":  # it counts no sockets
        return MOST_CONNECTIONS + RESERVED_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (ValueError, OSError):  # macOS names no limit as the hard one and takes less
            pass
    return MOST_CONNECTIONS + RESERVED_FILES if soft == resource.RLIM_INFINITY else soft


class ConnectionLimits:
    """All connections of a server: how many may be open, and which of them rest.

    `timeout`: seconds a client may leave its answer unread.
    """

    def __init__(self, limit: int | None = None, timeout: float = 3600.0) -> None:
        files = raise_file_limit()
        most = max(16, min(files - RESERVED_FILES, MOST_CONNECTIONS) - HEADROOM)
        self.limit = most if limit is None else min(limit, most)
        self.timeout = timeout
        self.resting: dict[HttpConnection, None] = {}
        """Those without a whole request in work, the longest resting first."""
        self.unread: dict[HttpConnection, None] = {}
        """Those whose clients do not read fast enough, the longest waiting first."""
        self.n_open = 0

    def limit_unread(self) -> None:
        """Close connections whose clients have left their answers unread the longest, if there is too much of it."""
        waiting = {connection: connection.transport.get_write_buffer_size() for connection in self.unread}
        total = sum(waiting.values())
        for connection, size in waiting.items():
            if total <= MOST_UNREAD:
                return
            log.warning("connection closed: its client left %d bytes of an answer unread", size)
            connection.transport.abort()
            total -= size

    def make_room(self) -> bool:
        """Close a resting connection if there are too many; whether there is room."""
        if self.n_open <= self.limit:
            return True
        oldest = next(iter(self.resting), None)
        if oldest is None:
            return False
        oldest.give_way()
        return True


class _Spelled:
    """What a response is written to: the names of its headers are sent as llama-server and most servers write them.

    There are clients that compare names as they are, against the RFC. The application, by ASGI's rules, writes them in
    lower case.
    """

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self._transport = transport
        self.close = close
        self.is_closing = transport.is_closing

    def write(self, data: bytes) -> None:
        if not data.startswith(b"HTTP/1.1 100 "):
            self.write = self._transport.write  # type: ignore[method-assign]  # the head comes first, and once
            status, *lines = data.split(b"\r\n")
            data = b"\r\n".join([status, *(_spell(name) + colon + value for name, colon, value in map(_split, lines))])
        self._transport.write(data)


def _split(line: bytes) -> tuple[bytes, bytes, bytes]:
    return line.partition(b":")


@cache
def _spell(name: bytes) -> bytes:
    return b"ETag" if name == b"etag" else b"-".join(word.capitalize() for word in name.split(b"-"))


class HttpConnection(HttpToolsProtocol):
    """uvicorn's connection with limits. `gate` is shared by all of a server's."""

    gate: ConnectionLimits
    refuse: ASGI3Application
    """What answers on a connection for which there is no room."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._header_bytes = 0
        self._unwanted = self._n_messages = self._body_bytes = self._framing_bytes = 0
        self._in_headers = False
        self._in_body = False
        self._lingers = False
        self._answered: RequestResponseCycle | None = None
        """The request whose answer is being written, or was the last to be."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        gate = self.gate
        gate.n_open += 1
        if not gate.make_room():
            self.app = self.refuse
        gate.resting[self] = None
        self._within(HEADER_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self.gate.n_open -= 1
        self.gate.resting.pop(self, None)
        self.gate.unread.pop(self, None)
        self._clear()
        if self._unread is not None:
            self._unread.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._lingers:
            self._ignore(len(data))
            return
        if self._deadline is None and not self._busy:
            # Whatever comes while nothing is being answered begins a request, be it an empty line.
            self._within(HEADER_SECONDS)
        self._unset_keepalive_if_required()
        message, before = self._n_messages if self._in_body else None, self._body_bytes
        try:
            self._parse(memoryview(data))
        except httptools.HttpParserError:
            self._turn_away(400, "Invalid HTTP request")
        if self._in_body and message == self._n_messages:
            self._framing_bytes += len(data) - (self._body_bytes - before)
            most = MAX_FRAMING + FRAMING_PER_BYTE * self._body_bytes
            if self._framing_bytes > most and not self.transport.is_closing():
                self._turn_away(400, "Chunks of this request hold more than its body")
        if self._in_headers:
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
                self._turn_away(431, "Request Header Fields Too Large")

    def _parse(self, data: memoryview) -> None:
        """Give bytes to the parser; requests to speak another protocol are read as if they did not ask for it.

        The parser takes a head with `Upgrade` for a whole message and what follows for another protocol's bytes. Here
        nothing is ever upgraded, so what follows is the request's body (RFC 9110, 7.8: a server may ignore Upgrade). A
        new parser reads the same head without that header. Raises HttpParserError.
        """
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
            method = self.parser.get_method()
            if method == b"CONNECT":
                raise httptools.HttpParserError("there is no tunnel here")
            lines = [b"%b %b HTTP/%b" % (method, self.url, self.parser.get_http_version().encode("ascii"))]
            lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
            self.parser.feed_data(b"\r\n".join([*lines, b"", b""]))

    @property
    def _busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: self.transport.abort}  # type: ignore[dict-item]
        self._in_headers, self._in_body = True, False
        self._header_bytes = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MAX_HEADER_BYTES:
            raise httptools.HttpParserError("the address is too long")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_body:  # a trailer, which nothing here asks for
            return
        if len(self.headers) >= MAX_HEADERS or len(name) + len(value) > MAX_HEADER_BYTES:
            raise httptools.HttpParserError("too many headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            raise httptools.HttpParserError("too many requests at once")
        self._in_headers, self._in_body = False, True
        self._unwanted = self._body_bytes = self._framing_bytes = 0
        self._n_messages += 1
        self._within(self._body_seconds())
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        cycle.transport = _Spelled(self.transport, self._end)  # type: ignore[assignment]
        cycle.scope["extensions"][WRITE] = partial(self._write_more, cycle)  # type: ignore[assignment]
        super()._start_asgi_task(cycle, _unchunked(cycle, app) if cycle.scope["http_version"] == "1.0" else app)

    def _write_more(self, cycle: RequestResponseCycle, data: bytes) -> bool:
        if self.flow.write_paused or cycle.disconnected or not cycle.chunked_encoding or cycle.response_complete:
            return False
        if data:
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def _body_seconds(self) -> float:
        for name, value in self.headers:
            if name == b"content-length":
                return BODY_SECONDS + min(int(value), MAX_BODY) * BODY_SECONDS_PER_BYTE
        return CHUNKED_SECONDS

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self.cycle.response_complete:
            self._ignore(len(body))
            return
        super().on_body(body)

    def _ignore(self, n: int) -> None:
        self._unwanted += n
        if self._unwanted > MAX_UNWANTED:
            self.transport.abort()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_body = False
        self._clear()
        self.gate.resting.pop(self, None)
        super().on_message_complete()
        self._rest()

    def on_response_complete(self) -> None:
        if self._lingers:
            self.pipeline.clear()
        super().on_response_complete()
        self._rest()

    def _rest(self) -> None:
        """Count as resting again once everything asked for is answered."""
        if not self._busy and not self.pipeline and not self.transport.is_closing():
            self.gate.resting.pop(self, None)
            self.gate.resting[self] = None

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(self.gate.timeout, self.transport.abort)
        self.gate.unread[self] = None
        self.gate.limit_unread()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        self.gate.unread.pop(self, None)

    def _within(self, seconds: float) -> None:
        self._clear()
        self._deadline = self.loop.call_later(min(seconds, self.gate.timeout), self._too_late)

    def _clear(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_late(self) -> None:
        self._deadline = None
        if self.transport.is_closing():
            return
        if self._lingers:
            self.transport.close()
        elif self._in_body and self.flow.read_paused:
            self._within(self._body_seconds())  # it is this side that does not read
        elif self._in_headers or self._in_body:
            self._turn_away(408, "Request Timeout")
        else:
            self.transport.close()

    def _turn_away(self, status: int, reason: str) -> None:
        """Answer a request that never became one, and close."""
        self._clear()
        cycle = self._answered
        if cycle is not None and not cycle.response_complete:
            if cycle.response_started:
                self.transport.close()
                return
            cycle.disconnected = True
            cycle.message_event.set()
        body = b'{"error":{"code":%d,"message":"%s","type":"invalid_request_error"}}' % (status, reason.encode())
        self.transport.write(
            b"HTTP/1.1 %d %s\r\nContent-Type: application/json; charset=utf-8\r\nContent-Length: %d\r\n"
            b"Connection: close\r\n\r\n%s" % (status, reason.encode(), len(body), body)
        )
        self._linger()

    def _end(self) -> None:
        """Close, once the client has sent the request that is answered."""
        if self._in_headers or self._in_body:
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        """Close for writing, and for reading when the client closes, or soon.

        A system answers bytes that come for a closed connection by resetting it, upon which the client's loses what was
        not read yet: the answer (RFC 9112, 9.6).
        """
        self._lingers, self._unwanted = True, 0
        self._within(LINGER_SECONDS)
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def finish(self) -> None:
        """The answer that is being written is the last one. Where none is, a request may be on its way, and be told."""
        if self._busy:
            self.cycle.keep_alive = False

    def give_way(self) -> None:
        """Close at once: somebody else needs the place."""
        self.gate.resting.pop(self, None)
        self.transport.abort()


def _unchunked(cycle: RequestResponseCycle, app: ASGI3Application) -> ASGI3Application:
    """`app` for a client that knows no chunks (HTTP/1.0): a body without a length ends with the connection."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        endless = False

        async def sending(message: Any) -> None:
            nonlocal endless
            if message["type"] == "http.response.start":
                endless = all(name.lower() != b"content-length" for name, _ in message["headers"])
                if endless:
                    cycle.chunked_encoding, cycle.keep_alive = False, False
            elif endless:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, sending)

    return answer


def protocol(gate: ConnectionLimits, refuse: ASGI3Application) -> type[HttpConnection]:
    """The class of a server's connections."""
    return type("ServerConnection", (HttpConnection,), {"gate": gate, "refuse": staticmethod(refuse)})


def configure(
    make_app: Callable[[], Any],
    gate: ConnectionLimits,
    refuse: ASGI3Application,
    *,
    key: str | None = None,
    certificate: str | None = None,
    proxied: bool = True,
) -> uvicorn.Config:
    """uvicorn's settings for a server or a router. `make_app` is called in the event loop that will run it.

    `key`, `certificate`: PEM files; None: no TLS. `proxied`: whether a proxy on this machine is believed whom it speaks
    for.
    """
    return uvicorn.Config(
        make_app,
        factory=True,
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        lifespan="off",
        ws="none",
        http=protocol(gate, refuse),
        timeout_keep_alive=min(KEEP_ALIVE, int(gate.timeout)),
        proxy_headers=proxied,
        timeout_graceful_shutdown=GRACE,
        ssl_keyfile=key,
        ssl_certfile=certificate,
    )
