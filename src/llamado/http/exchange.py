"""One request on its way to another process, and its answer back: nothing is held up, nothing but the bytes passes."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from typing import TypeVar

from llamado.http.answer import Receive, Scope, Send
from llamado.http.errors import ApiError, error_body, error_event
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
    """.split()  # noqa: SIM905
)
"""What llama-server's router passes on to a model, and other servers' endpoints that name a model in the same way."""

MODEL = "/v1/models/"
"""Before the name of a model, of which GET tells."""

OLLAMA_POSTS = frozenset({"/api/chat", "/api/generate", "/api/embed", "/api/embeddings"})
"""Those of Ollama's API; a model's name may have a tag there."""

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


_LONGEST_EVENT = 1 << 20
"""Most bytes of an incomplete stream event that are held back."""
_SEQUENCE_NUMBER = re.compile(rb'"sequence_number":\s*(\d+)')

_NONE: Headers = []


def _named(headers: Headers) -> frozenset[bytes]:
    """Further headers that the Connection header makes hop-by-hop."""
    named = [value for name, value in headers if name == b"connection"]
    return frozenset(word.strip().lower() for value in named for word in value.split(b",")) if named else frozenset()


def request_head(
    scope: Scope,
    address: UpstreamAddress,
    path: bytes,
    query: bytes,
    length: int,
    *,
    keys: bool,
    key: bytes = b"",
    more: Headers = _NONE,
) -> bytes:
    """The request's head as the process gets it. `keys`: whether the client's key is passed on. `key`: sent instead.

    `more`: headers that replace the client's of the same names.
    """
    headers: Headers = scope["headers"]
    dropped = _REQUEST | _named(headers) | _FORWARDED | (frozenset() if keys and not key else _KEYS)
    dropped |= {name for name, _ in more}
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
        *(name + b": " + value for name, value in more),
    ]
    if key:
        lines.append(b"authorization: Bearer " + key)
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


def _end_of_events(part: bytes) -> int:
    """Return where the last whole event of a stream ends; 0 if there is none."""
    return max((part.rfind(mark) + len(mark) for mark in (b"\n\n", b"\r\n\r\n") if mark in part), default=0)


class Exchange:
    """One client's request; it may be sent to several processes, one after the other, until an answer begins.

    Made in the task that answers the request, used as `async with`: meanwhile it is noticed when the client goes away.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, body: bytes, *, keys: bool) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._body = body
        self._keys = keys
        self._task = asyncio.current_task()
        self._connection: UpstreamConnection | None = None
        self._watcher: asyncio.Future[None] | None = None
        self._waiting = False
        self._stream = self._lines = False
        self._path = ""
        self._held = b""
        """The incomplete event or line at the end of a stream."""
        self._last = b"\n\n"
        """The last events or lines that were sent."""
        self.sent = False
        """Whether the try under way has written the request."""
        self.was_cut = False
        """Whether the try under way was given up from this side."""
        self.gone = False
        """Whether the client closed its connection."""
        self.started = False
        """Whether some of the answer has been sent to the client."""

    async def __aenter__(self) -> Exchange:
        self._watcher = asyncio.ensure_future(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        self._body = b""  # the traceback of an error may hold this object for long

    async def _watch(self) -> None:
        """Close the connection to the process when the client closes its own."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        if self._connection is not None:
            self._connection.hang_up("the client went away")
        elif self._waiting and self._task is not None:
            self._task.cancel()

    async def unless_gone(self, what: Awaitable[T]) -> T | None:
        """Wait for something; None when the client goes away first."""
        self._waiting = True
        try:
            return await what
        except asyncio.CancelledError:
            if self.gone and self._task is not None:
                self._task.uncancel()
                return None
            raise
        finally:
            self._waiting = False

    async def ask(
        self,
        pool: Pool,
        path: bytes,
        query: bytes,
        *,
        key: bytes = b"",
        more: Headers = _NONE,
        ended: Callable[[], bool] = lambda: False,
    ) -> UpstreamConnection:
        """Send the request; returns the connection once the answer has begun on it, which `deliver` then takes.

        `more`: further headers. A kept connection that was closed meanwhile is replaced, unless the process has
        `ended`. Raises UpstreamLost.
        """
        self.sent = self.was_cut = False
        self._path = path.decode("latin-1")
        head = request_head(
            self._scope, pool.address, path, query, len(self._body), keys=self._keys, key=key, more=more
        )
        for fresh in (False, True):
            connection = await pool.connect(fresh=fresh)
            self._connection = connection
            if self.gone:
                connection.hang_up("the client went away")
            kept = connection.used
            try:
                connection.send(head, self._body)
                self.sent = True
                await connection.answered()
                return connection
            except UpstreamLost:
                self.drop()
                if connection.begun or not kept or connection.hung_up or ended():
                    raise
            except BaseException:
                self.drop()
                raise
        raise UpstreamRefused(f"cannot connect to {pool.address}")

    def cut(self, reason: str) -> None:
        """Give up the try under way: whoever waits for it gets UpstreamLost with the reason."""
        self.was_cut = True
        if self._connection is not None:
            self._connection.hang_up(reason)

    def drop(self) -> None:
        """Close the connection that was asked; an answer that was not delivered is lost."""
        if self._connection is not None:
            self._connection.abort()
            self._connection = None

    async def deliver(
        self,
        connection: UpstreamConnection,
        more: Headers | None = None,
        seen: Callable[[bytes], None] | None = None,
        before_end: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Pass the answer on as it comes. Raises UpstreamLost.

        `more`: further headers. `seen`: called with each part. `before_end`: awaited before the last one is sent.
        """
        try:
            kind = next((value for name, value in connection.headers if name == b"content-type"), b"")
            self._stream, self._lines = b"event-stream" in kind, b"ndjson" in kind
            first = connection.take()
            headers = [*answer_headers(connection.headers), *(more or ())]
            self.started = True
            self._body = b""  # it is not sent again
            await self._send({"type": "http.response.start", "status": connection.status, "headers": headers})
            if seen is not None:
                seen(first)
            if not connection.finished:
                await self._pass_on(first)
                while part := await connection.read():
                    if seen is not None:
                        seen(part)
                    await self._pass_on(part)
                first = self._held
            connection.release()
            self._connection = None
            if before_end is not None:
                await before_end()
            await self._send({"type": "http.response.body", "body": first, "more_body": False})
        finally:
            self.drop()

    async def _pass_on(self, part: bytes) -> None:
        """Send a part, of a stream only whole events or lines: a process may end in the middle of one."""
        if self._stream or self._lines:
            part = self._held + part
            end = _end_of_events(part) if self._stream else part.rfind(b"\n") + 1
            if not end and len(part) < _LONGEST_EVENT:
                self._held = part
                return
            part, self._held = part[: end or None], part[end:] if end else b""
            self._last = part
        await self._send({"type": "http.response.body", "body": part, "more_body": True})

    async def break_off(self, error: UpstreamLost, who: str) -> None:
        """End an answer that had begun and cannot be had again: a stream with an error event, others short.

        `who` was lost. The error has the form of the API that was asked.
        """
        log.warning("%s: lost in the middle of an answer (path=%s): %s", who, self._path, error)
        told = ApiError("server_error", f"{who} ended in the middle of its answer: {error}")
        if self._stream:
            numbers = _SEQUENCE_NUMBER.findall(self._last)
            event = error_event(told, self._path, int(numbers[-1]) + 1 if numbers else 0)
            if not self._last.endswith((b"\n\n", b"\r\n\r\n")):
                event = b"\n\n" + event  # an event too long to be held back was cut in two
            await self._send({"type": "http.response.body", "body": event, "more_body": False})
        elif self._lines:
            cut = b"" if self._last.endswith(b"\n") else b"\n"
            last = cut + error_body(told, self._path) + b"\n"
            await self._send({"type": "http.response.body", "body": last, "more_body": False})
        # Otherwise the server closes the connection: without its declared length, or its last chunk, the client sees
        # that something is missing.
