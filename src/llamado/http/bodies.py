"""Bodies of requests: each bounded, and all that are held at once together.

A small body is always read. For a larger one its length is set aside before it is read; while there is no room it waits
unread. What is read slowly while others wait is turned away, so that nobody keeps the room by sending little.
"""

from __future__ import annotations

import asyncio
from collections import deque

from llamado.http.answer import Receive, Scope
from llamado.http.errors import ApiError, ClientGone

# A prompt of a million tokens is 5 MB of text.
MAX_BODY = 10 * 2**20
# Bytes of a body that does not count.
SMALL_BODY = 64 * 1024
# Bytes of all bodies that are read or worked on.
MOST_HELD = 256 * 2**20
# Seconds a body waits for room.
PATIENCE = 30.0
# Bytes a second below which a body makes room for one that waits, and seconds over which that is measured.
PACE = 128 * 1024
PACE_SECONDS = 2.0


class Bodies:
    """All bodies of one server. `most`: bytes held at once."""

    def __init__(self, most: int = MOST_HELD) -> None:
        self.free = most
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._reading: set[Body] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def hold(self, body: Body, size: int) -> None:
        """Set room aside for a body that is read now; who came first gets it first. Raises ApiError (503)."""
        loop = asyncio.get_running_loop()
        if not self._waiting and self.free >= size:
            self.free -= size
        else:
            granted: asyncio.Future[None] = loop.create_future()
            self._waiting.append((size, granted))
            self._watch()
            try:
                async with asyncio.timeout(PATIENCE):
                    await granted
            except BaseException as error:
                self.give(size if granted.done() and not granted.cancelled() else 0)
                if isinstance(error, TimeoutError):
                    message = "too many bytes of request bodies at once"
                    raise ApiError("unavailable_error", message, retry_after=5) from None
                raise
        body.held = size
        self._reading.add(body)

    def give(self, size: int) -> None:
        """Take back room, and hand it to those that wait."""
        self.free += size
        while self._waiting:
            wanted, granted = self._waiting[0]
            if not granted.done():
                if wanted > self.free:
                    return
                self.free -= wanted
                granted.set_result(None)
            self._waiting.popleft()

    def end(self, body: Body) -> None:
        """A body is read no more."""
        self._reading.discard(body)

    def _watch(self) -> None:
        if self._timer is None:
            before = {body: body.arrived for body in self._reading}
            self._timer = asyncio.get_running_loop().call_later(PACE_SECONDS, self._turn_away, before)

    def _turn_away(self, before: dict[Body, int]) -> None:
        """Let the bodies go of which least came since `before`, as many as the first of those that wait needs."""
        self._timer = None
        if not self._waiting:
            return
        came = {body: body.arrived - arrived for body, arrived in before.items() if body in self._reading}
        missing = self._waiting[0][0] - self.free
        for body in sorted(came, key=came.__getitem__):
            if missing <= 0 or came[body] >= PACE * PACE_SECONDS:
                break
            body.turn_away()
            missing -= body.held
        self._watch()


class Body:
    """The body of one request, and the room it takes."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._limit: asyncio.Timeout | None = None
        self.held = 0
        """Bytes set aside for it."""
        self.arrived = 0

    async def read(self, scope: Scope, receive: Receive) -> bytes:
        """The whole body; its room is given back by `release`.

        Raises ClientGone; ApiError: 413 for one larger than MAX_BODY, 503 without room, 408 where it came too slowly.
        """
        headers: dict[bytes, bytes] = dict(scope["headers"])
        coding = headers.get(b"content-encoding", b"identity").strip().lower().decode("latin-1")[:100]
        if coding not in ("", "identity"):
            why = f"the request's body is compressed ({coding}), which this server does not accept: send it as it is"
            raise ApiError("invalid_request_error", why, status=415)
        given = headers.get(b"content-length", b"")
        declared = int(given) if given.isdigit() else None
        if declared is not None and declared > MAX_BODY:
            raise _too_large()
        chunks: list[bytes] = []
        try:
            async with asyncio.timeout(None) as self._limit:
                if declared is not None and declared > SMALL_BODY:
                    await self._bodies.hold(self, declared)
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone("the client went away while sending its body")
                    chunk, more = message.get("body", b""), message.get("more_body", False)
                    self.arrived += len(chunk)
                    if self.arrived > MAX_BODY:
                        raise _too_large()
                    chunks.append(chunk)
                    if more and not self.held and self.arrived > SMALL_BODY:
                        await self._bodies.hold(self, MAX_BODY)
        except BaseException as error:
            chunks.clear()  # the error's frames would keep them until cycles are looked for
            if not isinstance(error, TimeoutError):
                raise
            slow = "the request's body came too slowly while others waited for room"
            raise ApiError("invalid_request_error", slow, status=408) from None
        finally:
            self._bodies.end(self)
        if self.held:
            spare, self.held = self.held - self.arrived, self.arrived
            self._bodies.give(spare)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def turn_away(self) -> None:
        """End the reading: it is too slow."""
        if self._limit is not None:
            self._limit.reschedule(asyncio.get_running_loop().time())

    def release(self) -> None:
        """The bytes are needed no more; may be said several times."""
        held, self.held = self.held, 0
        self._bodies.give(held)


def body_of(scope: Scope) -> Body:
    """The body of a request that `Access` let in."""
    body: Body = scope["llamado.body"]
    return body


def _too_large() -> ApiError:
    return ApiError("invalid_request_error", f"request body exceeds {MAX_BODY} bytes", status=413)
