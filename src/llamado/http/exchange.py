"""Proxying one request to an upstream process and streaming the response back."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from llamado.http.answer import Receive, Scope, Send
from llamado.http.errors import ApiError, error_body, error_event, shutting_down
from llamado.http.streams import disconnected
from llamado.http.upstream import Headers, Pool, UpstreamAddress, UpstreamConnection, UpstreamLost, UpstreamRefused

log = logging.getLogger("llamado.http")

T = TypeVar("T")

MODEL_POSTS = frozenset(
    """
    /completion /completions /v1/completions /chat/completions /v1/chat/completions /v1/chat/completions/control
    /responses /v1/responses /v1/messages /infill /embedding /embeddings /v1/embeddings /rerank /reranking /v1/rerank
    /v1/reranking /v1/systemone /tokenize /detokenize /apply-template /chat/completions/input_tokens
    /v1/chat/completions/input_tokens /responses/input_tokens /v1/responses/input_tokens /v1/messages/count_tokens
    /lora-adapters /props /v1/audio/speech /v1/images/generations
    /audio/transcriptions /v1/audio/transcriptions /audio/translations /v1/audio/translations
    """.split()  # noqa: SIM905
)
"""Paths that llama-server's router forwards to a model, and those of other servers that name a model the same way."""

MODEL = "/v1/models/"
"""Path prefix of a model's description (GET)."""

OLLAMA_POSTS = frozenset({"/api/chat", "/api/generate", "/api/embed", "/api/embeddings"})
"""Ollama's model endpoints; a model name may carry a tag there."""

CONVERSATION = b"x-conversation-id"
"""The header that asks for a resumable stream. It is forwarded only if the scope has STREAM_CLAIM."""
STREAM_CLAIM = "llamado.stream_claim"
"""Key of a scope: the StreamClaim of a request for a resumable stream."""

# Hop-by-hop headers (RFC 9110, 7.6.1).
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
# Host and length are set anew. Compression would delay a stream by whole blocks. `Access` has checked the origin.
_REQUEST = _HOP | {b"host", b"content-length", b"accept-encoding", b"expect", b"origin", b"sec-fetch-site"}
_KEYS = frozenset({b"authorization", b"x-api-key"})
_FORWARDED = frozenset({b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto"})
_DROPPED = _REQUEST | _FORWARDED
_DROPPED_WITH_KEYS = _DROPPED | _KEYS


MOST_UNREAD = 1 << 22
"""Most bytes that are received while no client reads the stream. Upstreams keep as many."""
_LONGEST_EVENT = 1 << 20
"""Most bytes of an incomplete event that are buffered."""
_SEQUENCE_NUMBER = re.compile(rb'"sequence_number":\s*(\d+)')

_NONE: Headers = []


def _named(headers: Headers) -> frozenset[bytes]:
    """Return the headers that the Connection header declares hop-by-hop."""
    named = [value for name, value in headers if name == b"connection"]
    return frozenset(word.strip().lower() for value in named for word in value.split(b",")) if named else frozenset()


def request_head(
    scope: Scope,
    address: UpstreamAddress,
    path: bytes,
    query: bytes,
    length: int,
    *,
    forward_key: bool,
    key: bytes = b"",
    extra_headers: Headers = _NONE,
) -> bytes:
    """Return the request head for the upstream. `forward_key`: forward the client's key. `key`: send this one instead.

    `extra_headers`: headers that replace the client's of the same names.
    """
    headers: Headers = scope["headers"]
    dropped = _DROPPED if forward_key and not key else _DROPPED_WITH_KEYS
    if named := _named(headers):
        dropped |= named
    if STREAM_CLAIM not in scope:
        dropped |= {CONVERSATION}
    if extra_headers:
        dropped |= {name for name, _ in extra_headers}
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
        *(name + b": " + value for name, value in extra_headers),
    ]
    if key:
        lines.append(b"authorization: Bearer " + key)
    if length or scope["method"] not in ("GET", "HEAD", "DELETE", "OPTIONS"):
        lines.append(b"content-length: %d" % length)
    return b"\r\n".join([*lines, b"", b""])


def response_headers(headers: Headers) -> Headers:
    """Return the response headers for the client. `Access` adds the CORS headers."""
    dropped = _HOP | _named(headers)
    return [
        (name, value)
        for name, value in headers
        if name not in dropped and name not in (b"server", b"date") and not name.startswith(b"access-control-")
    ]


def _end_of_events(part: bytes) -> int:
    """Return the end of the last complete event in `part`; 0 if there is none."""
    return max((part.rfind(mark) + len(mark) for mark in (b"\n\n", b"\r\n\r\n") if mark in part), default=0)


class StreamClaim(Protocol):
    """A request for a stream that the upstream keeps for clients that come back."""

    n_readers: int
    """Other clients that read the stream."""

    @property
    def outlives_client(self) -> bool:
        """True if the request goes on when its client disconnects."""
        ...

    def begin(self, exchange: Exchange) -> None: ...

    async def wait_for_stops(self) -> None:
        """Wait until the upstream may get the request."""
        ...

    def respond(self, status: int) -> None:
        """Note the status of the response that is about to be delivered."""
        ...

    def end(self) -> None: ...


class Exchange:
    """One client's request. It may be sent to several upstreams in turn until a response starts.

    Create it in the task that answers the request, and use it as `async with`: a disconnect of the client is noticed
    only inside.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, body: bytes, *, forward_key: bool) -> None:
        self._scope = scope
        self._send = send
        self._body = body
        self._forward_key = forward_key
        self._task = asyncio.current_task()
        self._connection: UpstreamConnection | None = None
        self._guard = disconnected(receive, self._on_disconnect)
        self._claim: StreamClaim | None = scope.get(STREAM_CLAIM)
        self._waiting = self._is_client_gone = False
        self._n_unread = 0
        """Bytes that have come since the last client left."""
        self._stream = self._lines = False
        self._path = ""
        self._held = b""
        """The incomplete event or line at the end of a stream."""
        self._last = b"\n\n"
        """The last events or lines sent."""
        self.sent = False
        """True if the current attempt has written the request."""
        self.was_aborted = False
        """True if this process aborted the current attempt."""
        self.disconnected = False
        """True if the client has disconnected, and the request ends for that reason."""
        self.was_stopped = False
        """True if another request has stopped this one."""
        self.started = False
        """True if part of the response has been sent to the client."""
        self.is_complete = False
        """True if the whole response has been received."""

    async def __aenter__(self) -> Exchange:
        self._guard.__enter__()
        if self._claim is not None:
            self._claim.begin(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._guard.__exit__()
        if self._claim is not None:
            self._claim.end()
        self._body = b""  # an exception's traceback may hold this object for long

    def _on_disconnect(self) -> None:
        self._is_client_gone = True
        self.end_without_client()

    def end_without_client(self) -> None:
        """End the request if its client has disconnected, unless it outlives the client."""
        if not self._is_client_gone or (self._claim is not None and self._claim.outlives_client):
            return
        self.disconnected = True
        if self._connection is not None:
            self._connection.hang_up("the client disconnected")
        elif self._waiting and self._task is not None:
            self._task.cancel()

    def stop(self) -> None:
        """Stop the request unless it has been sent, and send it to no further upstream."""
        self.was_stopped = True
        if self._waiting and self._task is not None:
            self._task.cancel()

    async def unless_disconnected(self, what: Awaitable[T]) -> T | None:
        """Await `what`; return None if the client disconnects first, or `stop` is called."""
        self._waiting = True
        self.sent = False
        try:
            return await what
        except asyncio.CancelledError:
            if (self.disconnected or self.was_stopped) and self._task is not None:
                self._task.uncancel()
                return None
            raise
        finally:
            self._waiting = False

    async def forward(
        self,
        pool: Pool,
        path: bytes,
        query: bytes,
        *,
        key: bytes = b"",
        extra_headers: Headers = _NONE,
        ended: Callable[[], bool] = lambda: False,
    ) -> UpstreamConnection:
        """Send the request; return the connection once the response has started, for `deliver`.

        `extra_headers`: replace the client's. A pooled connection that the upstream closed is replaced, unless the
        process has `ended`. Raises UpstreamLost.
        """
        self.sent = self.was_aborted = False
        self._path = path.decode("latin-1")
        head = request_head(
            self._scope,
            pool.address,
            path,
            query,
            len(self._body),
            forward_key=self._forward_key,
            key=key,
            extra_headers=extra_headers,
        )
        if self._claim is not None:
            await self._claim.wait_for_stops()
        for fresh in (False, True):
            connection = await pool.connect(fresh=fresh)
            self._connection = connection
            if self.disconnected or self.was_stopped:
                connection.hang_up("the client disconnected" if self.disconnected else "a client stopped the answer")
            kept = connection.used
            try:
                connection.send(head, self._body)
                self.sent = True
                await connection.wait_for_response()
                return connection
            except UpstreamLost:
                self.drop()
                if connection.has_begun or not kept or connection.hung_up or ended():
                    raise
            except BaseException:
                self.drop()
                raise
        raise UpstreamRefused(f"cannot connect to {pool.address}")

    def abort(self, reason: str) -> None:
        """Abort the current attempt: its waiter gets UpstreamLost with this reason."""
        self.was_aborted = True
        if self._connection is not None:
            self._connection.hang_up(reason)

    def drop(self) -> None:
        """Close the upstream connection; an undelivered response is lost."""
        if self._connection is not None:
            self._connection.abort()
            self._connection = None

    async def deliver(
        self,
        connection: UpstreamConnection,
        extra_headers: Headers | None = None,
        observe: Callable[[bytes], None] | None = None,
        before_end: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Stream the response to the client. Raises UpstreamLost.

        `extra_headers`: added to the response. `observe`: called with each part. `before_end`: awaited before the last
        part is sent.
        """
        try:
            kind = next((value for name, value in connection.headers if name == b"content-type"), b"")
            self._stream, self._lines = b"event-stream" in kind, b"ndjson" in kind
            first = connection.take()
            headers = [*response_headers(connection.headers), *(extra_headers or ())]
            self.started = True
            self._body = b""  # no further attempt
            if self._claim is not None:
                self._claim.respond(connection.status)
            await self._send({"type": "http.response.start", "status": connection.status, "headers": headers})
            if observe is not None:
                observe(first)
            if not connection.is_complete:
                await self._pass_on(first)
                while part := await connection.read():
                    if observe is not None:
                        observe(part)
                    await self._pass_on(part)
                first = self._held
            connection.release()
            self._connection = None
            self.is_complete = True
            if before_end is not None:
                await before_end()
            await self._send({"type": "http.response.body", "body": first, "more_body": False})
        except asyncio.CancelledError:
            if self.started and not self.disconnected:
                await self._end_with(shutting_down())
            raise
        finally:
            self.drop()

    async def _pass_on(self, part: bytes) -> None:
        """Send a part; of a stream only complete events or lines, because the upstream may die in the middle of one."""
        if self._stream or self._lines:
            part = self._held + part
            end = _end_of_events(part) if self._stream else part.rfind(b"\n") + 1
            if not end and len(part) < _LONGEST_EVENT:
                self._held = part
                return
            part, self._held = part[: end or None], part[end:] if end else b""
            self._last = part
        if self._is_client_gone:
            self._n_unread = 0 if self._claim is not None and self._claim.n_readers else self._n_unread + len(part)
            if self._n_unread > MOST_UNREAD and self._connection is not None:
                self.disconnected = True
                self._connection.hang_up("the client disconnected long ago")
        await self._send({"type": "http.response.body", "body": part, "more_body": True})

    async def fail(self, error: UpstreamLost, upstream: str) -> None:
        """End a response that was cut short: a stream by an error event, other bodies without their end.

        `upstream`: the lost upstream. The error has the format of the API that was called.
        """
        log.warning("%s: lost in the middle of an answer (path=%s): %s", upstream, self._path, error)
        await self._end_with(ApiError("server_error", f"{upstream} ended in the middle of its answer: {error}"))

    async def _end_with(self, error: ApiError) -> None:
        """End a stream by an error event, and other bodies without their end."""
        if self._stream:
            numbers = _SEQUENCE_NUMBER.findall(self._last)
            event = error_event(error, self._path, int(numbers[-1]) + 1 if numbers else 0)
            if not self._last.endswith((b"\n\n", b"\r\n\r\n")):
                event = b"\n\n" + event  # an event too long to be buffered was cut in two
            await self._send({"type": "http.response.body", "body": event, "more_body": False})
        elif self._lines:
            abort = b"" if self._last.endswith(b"\n") else b"\n"
            last = abort + error_body(error, self._path) + b"\n"
            await self._send({"type": "http.response.body", "body": last, "more_body": False})
        # Other bodies: the server closes the connection. The client notices the missing length or last chunk.
