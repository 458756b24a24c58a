"""One request on its way to a model's process and back: nothing is held up, and a lost answer is asked for again.

A process that crashed (`child.CRASHES`) was probably ended by one of the requests it worked on, and nothing tells by
which: none of them is sent to another process, or one request could end them all. After any other loss (the process
was killed or ended by itself, or closed the connection) the request is sent once more. Requests that were not sent yet
are not concerned.
"""

from __future__ import annotations

import asyncio
import logging
import signal

from llamado.http.answer import Receive, Scope, Send
from llamado.http.errors import ApiError
from llamado.router.child import CRASHES, Child
from llamado.router.fleet import Fleet, Instance, Lease
from llamado.router.upstream import Headers, UpstreamAddress, UpstreamConnection, UpstreamLost, UpstreamRefused

log = logging.getLogger("llamado.router")

TRIES = 4
"""How often a process is looked for that takes the request."""
SENDS = 2
"""How often a request is sent whose answer was lost."""

# RFC 9110, 7.6.1: they speak of one connection, not of the message.
_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
# Set here; a compressed stream would be held back until a block of it is full; which sites may ask is decided here.
_REQUEST = _HOP | {b"host", b"content-length", b"accept-encoding", b"expect", b"origin", b"sec-fetch-site"}
_KEYS = frozenset({b"authorization", b"x-api-key"})
_FORWARDED = frozenset({b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto"})


def _named(headers: Headers) -> frozenset[bytes]:
    """Further headers that the Connection header makes hop-by-hop."""
    named = [value for name, value in headers if name == b"connection"]
    return frozenset(word.strip().lower() for value in named for word in value.split(b",")) if named else frozenset()


def request_head(
    scope: Scope, address: UpstreamAddress, path: bytes, query: bytes, length: int, *, keys: bool
) -> bytes:
    """The request's head as the process gets it. `keys`: whether the client's key is passed on."""
    headers: Headers = scope["headers"]
    dropped = _REQUEST | _named(headers) | _FORWARDED | (frozenset() if keys else _KEYS)
    earlier = b", ".join(value for name, value in headers if name == b"x-forwarded-for")
    client = scope.get("client")
    peer = client[0].encode("latin-1", "replace") if client else b"unix"
    host = next((value for name, value in headers if name == b"host"), b"")
    given = dict(headers)
    target = address.base + path + (b"?" + query if query else b"")
    lines = [
        b"%b %b HTTP/1.1" % (scope["method"].encode("ascii"), target),
        b"host: " + address.authority,
        b"x-forwarded-for: " + (earlier + b", " + peer if earlier else peer),
        b"x-forwarded-proto: " + (given.get(b"x-forwarded-proto") or scope.get("scheme", "http").encode()),
        b"x-forwarded-host: " + (given.get(b"x-forwarded-host") or host),
        *(name + b": " + value for name, value in headers if name not in dropped),
    ]
    if length or scope["method"] not in ("GET", "HEAD", "DELETE", "OPTIONS"):
        lines.append(b"content-length: %d" % length)
    return b"\r\n".join([*lines, b"", b""])


def answer_headers(headers: Headers) -> Headers:
    """The answer's headers as the client gets them; who may read it across origins `Access` says."""
    dropped = _HOP | _named(headers)
    return [
        (name, value)
        for name, value in headers
        if name not in dropped and name not in (b"server", b"date") and not name.startswith(b"access-control-")
    ]


class Passage:
    """Carries one request to a model and its answer back."""

    def __init__(self, fleet: Fleet, scope: Scope, receive: Receive, send: Send, body: bytes, *, keys: bool) -> None:
        self._fleet = fleet
        self._scope = scope
        self._receive = receive
        self._send = send
        self._body = body
        self._keys = keys
        self._task = asyncio.current_task()
        self._connection: UpstreamConnection | None = None
        self._sent = False
        """Whether the try under way has written the request."""
        self._waiting = False
        self._stream = False
        self._tail = b""
        self.gone = False
        self.started = False

    async def run(self, instance: Instance, path: bytes, query: bytes, *, count: bool, autoload: bool) -> None:
        """Answer the request. Raises ApiError while nothing of the answer is sent."""
        watcher = asyncio.ensure_future(self._watch())
        name = instance.model.name
        asked: Child | None = None
        lost = 0
        try:
            for _ in range(TRIES):
                lease = await self._lease(instance, count, autoload)
                if lease is None:
                    return
                self._sent = False
                try:
                    if asked is not lease.child:
                        self._stop_at_a_crash(name, asked)
                    await self._try(lease, path, query)
                    return
                except UpstreamLost as error:
                    if self.gone or self.started:
                        raise
                    reason = str(error)
                finally:
                    lease.release()
                await self._settle(lease)
                if self._sent:
                    lost += 1
                    asked = lease.child
                    self._stop_at_a_crash(name, asked)
                    if lost == SENDS:
                        message = f"model '{name}' gave no answer: its connection was closed {SENDS} times"
                        raise ApiError("server_error", message, status=502)
                log.warning("model %s: %s; the request is sent again", name, reason)
            message = f"model '{name}' took no request in {TRIES} tries: {reason}"
            raise ApiError("server_error", message, status=502)
        except UpstreamLost as error:
            if not self.gone:
                await self._break_off(error)
        finally:
            watcher.cancel()
            self._body = b""  # the traceback of an error may hold this object for long

    async def _watch(self) -> None:
        """Close the connection to the process when the client closes its own."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        if self._connection is not None:
            self._connection.hang_up()
        elif self._waiting and self._task is not None:
            self._task.cancel()

    async def _lease(self, instance: Instance, count: bool, autoload: bool) -> Lease | None:
        """None when the client went away while it waited."""
        if self.gone:
            return None
        if not autoload and not instance.running:
            raise ApiError("invalid_request_error", "model is not loaded")
        self._waiting = True
        try:
            return await self._fleet.acquire(instance, count=count)
        except asyncio.CancelledError:
            if self.gone and self._task is not None:
                self._task.uncancel()
                return None
            raise
        finally:
            self._waiting = False

    async def _settle(self, lease: Lease) -> None:
        """After a lost answer: wait a moment for the process's end, which is probably why."""
        await asyncio.wait([lease.child.exit], timeout=0.5)

    def _stop_at_a_crash(self, name: str, asked: Child | None) -> None:
        """Raises ApiError where the process that had the request has crashed."""
        code = None if asked is None else asked.exit_code
        if code is not None and code in CRASHES:
            message = (
                f"the process of model '{name}' crashed ({signal.Signals(code - 128).name}) while it worked on this "
                "request; the request is not sent again, because it may be what ended it"
            )
            raise ApiError("server_error", message, status=502)

    async def _connect(self, lease: Lease, head: bytes) -> UpstreamConnection:
        """A connection on which the answer has begun; a kept one that was closed meanwhile is replaced."""
        pool = lease.child.pool
        for fresh in (False, True):
            connection = await pool.connect(fresh=fresh)
            self._connection = connection
            if self.gone:
                connection.hang_up()
            kept = connection.used
            try:
                connection.send(head, self._body)
                self._sent = True
                await connection.answered()
                return connection
            except UpstreamLost:
                connection.abort()
                if connection.begun or not kept or self.gone or lease.child.exit.done():
                    raise
        raise UpstreamRefused(f"cannot connect to {pool.address}")

    async def _try(self, lease: Lease, path: bytes, query: bytes) -> None:
        address = lease.child.pool.address
        head = request_head(self._scope, address, path, query, len(self._body), keys=self._keys)
        try:
            connection = await self._connect(lease, head)
            self._stream = any(n == b"content-type" and b"event-stream" in v for n, v in connection.headers)
            first = connection.take()
            send = self._send
            start = {
                "type": "http.response.start",
                "status": connection.status,
                "headers": answer_headers(connection.headers),
            }
            self.started = True
            self._body = b""  # it is not sent again
            await send(start)
            if connection.finished:
                connection.release()
                self._connection = None
                await send({"type": "http.response.body", "body": first, "more_body": False})
                return
            await send({"type": "http.response.body", "body": first, "more_body": True})
            self._tail = first[-2:]
            while part := await connection.read():
                self._tail = part[-2:]
                await send({"type": "http.response.body", "body": part, "more_body": True})
            connection.release()
            self._connection = None
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            if self._connection is not None:
                self._connection.abort()
                self._connection = None

    async def _break_off(self, error: UpstreamLost) -> None:
        """An answer that had begun cannot be had again: a stream says so and ends; others end short."""
        log.warning("an answer broke off: %s", error)
        if self._stream:
            told = ApiError("server_error", f"the model's process ended in the middle of its answer: {error}")
            event = b"data: " + told.body + b"\n\n"
            if self._tail != b"\n\n":
                event = b"\n\n" + event  # the last event was cut in two
            await self._send({"type": "http.response.body", "body": event, "more_body": False})
        # Otherwise the server closes the connection: without its declared length, or its last chunk, the client sees
        # that something is missing.
