"""Connection limits: timeouts, sizes and counts.

uvicorn's httptools protocol trusts clients to finish what they start. This one closes connections that send nothing, or
single bytes, or endless headers, or requests without reading responses. When too many connections are open, the ones
idle the longest are closed. `/health` is answered under all of these conditions.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any, cast

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from llamado.http.answer import App
from llamado.http.bodies import MAX_BODY, MAX_MEDIA_BODY

if sys.platform != "win32":
    import resource

log = logging.getLogger("llamado.server")

# Seconds from a connection's (or a request's) first byte to the end of the headers. Normally they fill one packet.
HEADER_SECONDS = 20.0
# Seconds from there to the end of the body, plus seconds for each announced byte: 128 KiB/s.
BODY_SECONDS = 20.0
BODY_SECONDS_PER_BYTE = 1 / (128 * 1024)
# Seconds for a body of unknown length: 16 MiB at that rate.
CHUNKED_SECONDS = 150.0
# Bytes of a body still read after its response was sent, so that the client gets to read the response. As many as an
# accepted body may have.
MAX_EXCESS = MAX_BODY
# Seconds for the rest of such a request if the connection closes after the response.
LINGER_SECONDS = 3.0
# Bytes and lines of the headers, including the URL; browsers and proxies stay below 16 KiB.
MAX_HEADER_BYTES = 64 * 1024
MAX_HEADERS = 200
# Bytes of a chunked body's framing (lengths, extensions, trailers), plus this many for each body byte: a chunk of one
# byte has five.
MAX_FRAMING = 64 * 1024
FRAMING_PER_BYTE = 8
# Requests one connection may send ahead of their responses.
MAX_PIPELINED = 16
# Connections accepted beyond the limit, so that health probes are answered.
HEADROOM = 64
# File descriptors reserved for files, workers and the log.
RESERVED_FILES = 256
# Seconds to finish running responses after the first signal.
GRACE = 10
# Seconds a connection may stay idle between two requests.
KEEP_ALIVE = 30
# Bytes of unread responses of all connections together.
MOST_UNREAD = 256 * 2**20
# ASGI extension that closes a connection without flushing unread output.
ABORT = "llamado.abort"
# ASGI extension that writes another part of a response body synchronously: `(bytes) -> bool`. It returns False, and
# writes nothing, if writing is impossible at the moment; with b"" it only tests that. It bypasses the middleware in
# between, which handles response heads only.
WRITE = "llamado.write"
# Most connections of a process. Each costs about 10 kB.
MOST_CONNECTIONS = 16384


def raise_file_limit() -> int:
    """Raise this process's limit of open files as far as the system allows, and return it."""
    if sys.platform == "win32":  # its limit does not count sockets
        return MOST_CONNECTIONS + RESERVED_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (ValueError, OSError):  # macOS reports an unlimited hard limit and rejects it
            pass
    return MOST_CONNECTIONS + RESERVED_FILES if soft == resource.RLIM_INFINITY else soft


class ConnectionLimits:
    """All connections of a server: their count, which are idle, and which have unread output.

    `timeout`: seconds a client may leave its response unread.
    """

    def __init__(self, limit: int | None = None, timeout: float = 3600.0) -> None:
        files = raise_file_limit()
        most = max(16, min(files - RESERVED_FILES, MOST_CONNECTIONS) - HEADROOM)
        self.limit = most if limit is None else min(limit, most)
        self.timeout = timeout
        self.idle: dict[HttpConnection, None] = {}
        """Connections without a complete request, the longest idle first."""
        self.unread: dict[HttpConnection, None] = {}
        """Connections with unread output, the longest waiting first."""
        self.n_open = 0

    def limit_unread(self) -> None:
        """Close the connections with the oldest unread output if all of it exceeds MOST_UNREAD."""
        waiting = {connection: connection.transport.get_write_buffer_size() for connection in self.unread}
        total = sum(waiting.values())
        for connection, size in waiting.items():
            if total <= MOST_UNREAD:
                return
            log.warning("connection closed: its client left %d bytes of an answer unread", size)
            connection.transport.abort()
            total -= size

    def make_room(self) -> bool:
        """Close an idle connection if too many are open. Return False if that is not possible."""
        if self.n_open <= self.limit:
            return True
        oldest = next(iter(self.idle), None)
        if oldest is None:
            return False
        oldest.evict()
        return True


class _TitleCaseTransport:
    """Transport wrapper that writes header names in title case, as llama-server and most servers do.

    Some clients compare names case-sensitively, against the RFC. ASGI applications send lower-case names.
    """

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self._transport = transport
        self.close = close
        self.is_closing = transport.is_closing

    def write(self, data: bytes) -> None:
        if not data.startswith(b"HTTP/1.1 100 "):
            self.write = self._transport.write  # type: ignore[method-assign]  # only the head needs rewriting
            status, *lines = data.split(b"\r\n")
            data = b"\r\n".join(
                [status, *(_title_case(name) + colon + value for name, colon, value in map(_split, lines))]
            )
        self._transport.write(data)


def _split(line: bytes) -> tuple[bytes, bytes, bytes]:
    return line.partition(b":")


@cache
def _title_case(name: bytes) -> bytes:
    return b"ETag" if name == b"etag" else b"-".join(word.capitalize() for word in name.split(b"-"))


class HttpConnection(HttpToolsProtocol):
    """uvicorn's HTTP connection with limits, and the only class that uses internals of uvicorn.

    pyproject.toml pins the range of uvicorn versions whose internals it knows; tests/http/test_uvicorn.py names those
    that a new version lacks. `limits`: shared by all connections of a server. `refuse`: the application for
    connections beyond the limit.
    """

    def __init__(self, *args: Any, limits: ConnectionLimits, refuse: App, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.limits = limits
        self.refuse = refuse
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._header_bytes = 0
        self._excess_bytes = self._n_messages = self._body_bytes = self._framing_bytes = 0
        self._in_headers = False
        self._in_body = False
        self._is_lingering = False
        self._responding: RequestResponseCycle | None = None
        """The request whose response is being written, or was written last."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        limits = self.limits
        limits.n_open += 1
        if not limits.make_room():
            self.app = self.refuse
        limits.idle[self] = None
        self._set_deadline(HEADER_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self.limits.n_open -= 1
        self.limits.idle.pop(self, None)
        self.limits.unread.pop(self, None)
        self._clear_deadline()
        if self._unread is not None:
            self._unread.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._is_lingering:
            self._count_excess(len(data))
            return
        if self._deadline is None and not self._busy:
            # Any byte on an idle connection begins a request, even an empty line.
            self._set_deadline(HEADER_SECONDS)
        self._unset_keepalive_if_required()
        message, before = self._n_messages if self._in_body else None, self._body_bytes
        try:
            self._parse(memoryview(data))
        except httptools.HttpParserError:
            self._reject(400, "Invalid HTTP request")
        if self._in_body and message == self._n_messages:
            self._framing_bytes += len(data) - (self._body_bytes - before)
            most = MAX_FRAMING + FRAMING_PER_BYTE * self._body_bytes
            if self._framing_bytes > most and not self.transport.is_closing():
                self._reject(400, "Chunks of this request hold more than its body")
        if self._in_headers:
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
                self._reject(431, "Request Header Fields Too Large")

    def _parse(self, data: memoryview) -> None:
        """Feed the parser; treat requests with `Upgrade` as plain HTTP.

        The parser ends a message after a head with `Upgrade` and leaves what follows to the other protocol. This server
        never upgrades, so what follows is the request's body (RFC 9110, 7.8: a server may ignore Upgrade). A new parser
        reads the same head without that header. Raises HttpParserError.
        """
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
            method = self.parser.get_method()
            if method == b"CONNECT":
                raise httptools.HttpParserError("CONNECT is not supported")
            lines = [b"%b %b HTTP/%b" % (method, self.url, self.parser.get_http_version().encode("ascii"))]
            lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn sets it
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
            raise httptools.HttpParserError("the URL is too long")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_body:  # a trailer: not used by this server
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
        self._excess_bytes = self._body_bytes = self._framing_bytes = 0
        self._n_messages += 1
        self._set_deadline(self._body_seconds())
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._responding = cycle
        cycle.transport = _TitleCaseTransport(self.transport, self._close_after_request)  # type: ignore[assignment]
        cycle.scope["extensions"][WRITE] = partial(self._write_more, cycle)  # type: ignore[assignment]
        super()._start_asgi_task(
            cycle, cast(Any, _unchunked(cycle, app) if cycle.scope["http_version"] == "1.0" else app)
        )

    def _write_more(self, cycle: RequestResponseCycle, data: bytes) -> bool:
        if self.flow.write_paused or cycle.disconnected or not cycle.chunked_encoding or cycle.response_complete:
            return False
        if data:
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def _body_seconds(self) -> float:
        for name, value in self.headers:
            if name == b"content-length":
                return BODY_SECONDS + min(int(value), MAX_MEDIA_BODY) * BODY_SECONDS_PER_BYTE
        return CHUNKED_SECONDS

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self.cycle.response_complete:
            self._count_excess(len(body))
            return
        super().on_body(body)

    def _count_excess(self, n: int) -> None:
        self._excess_bytes += n
        if self._excess_bytes > MAX_EXCESS:
            self.transport.abort()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_body = False
        self._clear_deadline()
        self.limits.idle.pop(self, None)
        super().on_message_complete()
        self._mark_idle()

    def on_response_complete(self) -> None:
        if self._is_lingering:
            self.pipeline.clear()
        super().on_response_complete()
        self._mark_idle()

    def _mark_idle(self) -> None:
        """Mark the connection as idle if all requests have been answered."""
        if not self._busy and not self.pipeline and not self.transport.is_closing():
            self.limits.idle.pop(self, None)
            self.limits.idle[self] = None

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(self.limits.timeout, self.transport.abort)
        self.limits.unread[self] = None
        self.limits.limit_unread()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        self.limits.unread.pop(self, None)

    def _set_deadline(self, seconds: float) -> None:
        self._clear_deadline()
        self._deadline = self.loop.call_later(min(seconds, self.limits.timeout), self._on_deadline)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_deadline(self) -> None:
        self._deadline = None
        if self.transport.is_closing():
            return
        if self._is_lingering:
            self.transport.close()
        elif self._in_body and self.flow.read_paused:
            self._set_deadline(self._body_seconds())  # reading is paused on this side
        elif self._in_headers or self._in_body:
            self._reject(408, "Request Timeout")
        else:
            self.transport.close()

    def _reject(self, status: int, reason: str) -> None:
        """Send an error for a request that could not be parsed, and close."""
        self._clear_deadline()
        cycle = self._responding
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

    def _close_after_request(self) -> None:
        """Close after the client has sent the rest of the request."""
        if self._in_headers or self._in_body:
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        """Close for writing; close for reading when the client closes, or after LINGER_SECONDS.

        The OS resets a connection if bytes arrive after it was closed. The client's OS then discards unread data: the
        response (RFC 9112, 9.6).
        """
        self._is_lingering, self._excess_bytes = True, 0
        self._set_deadline(LINGER_SECONDS)
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def finish(self) -> None:
        """Close after the current response. An idle connection stays open, for a request that may be in transit."""
        if self._busy:
            self.cycle.keep_alive = False

    def evict(self) -> None:
        """Close at once to make room for another connection."""
        self.limits.idle.pop(self, None)
        self.transport.abort()


def _unchunked(cycle: RequestResponseCycle, app: App) -> App:
    """Wrap `app` for HTTP/1.0 clients, which cannot read chunks: the connection's end marks the end of the body."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        is_unframed = False

        async def send_unchunked(message: Any) -> None:
            nonlocal is_unframed
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message["headers"]}
                is_unframed = b"content-length" not in names
                if is_unframed:
                    cycle.chunked_encoding, cycle.keep_alive = False, False
                if b"connection" not in names:  # uvicorn adds it since 0.53
                    message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            elif is_unframed:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_unchunked)

    return answer


def configure(
    make_app: Callable[[], Any],
    limits: ConnectionLimits,
    refuse: App,
    *,
    key: str | None = None,
    certificate: str | None = None,
    proxied: bool = True,
) -> uvicorn.Config:
    """Return uvicorn's settings for a server, router or gateway. `make_app` is called in its event loop.

    `key`, `certificate`: PEM files; None: no TLS. `proxied`: accept X-Forwarded-For from proxies of this machine.
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
        http=cast(Any, partial(HttpConnection, limits=limits, refuse=refuse)),
        timeout_keep_alive=min(KEEP_ALIVE, int(limits.timeout)),
        proxy_headers=proxied,
        timeout_graceful_shutdown=GRACE,
        ssl_keyfile=key,
        ssl_certfile=certificate,
    )
