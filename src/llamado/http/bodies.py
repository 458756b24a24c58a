"""Request bodies, limited in size one by one and all together.

Small bodies are always read. A larger one reserves its length first and waits, unread, while the budget is used up. If
others wait, the slowest senders are rejected, so that trickling clients cannot block the budget.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from llamado.http.answer import Receive, Scope
from llamado.http.errors import ApiError, ClientDisconnected

# Bytes of one body. A prompt of a million tokens is 5 MB of text.
MAX_BODY = 10 * 2**20
# Bytes of one body for a model that takes pictures or sounds, which are in it as base64.
MAX_MEDIA_BODY = 32 * 2**20
# Bytes of a body that is not counted.
SMALL_BODY = 64 * 1024
# Bytes that are joined on the event loop.
MAX_JOINED = 2**20
# Bytes of all bodies being read or processed.
MOST_HELD = 256 * 2**20
# Seconds a body waits for the budget.
PATIENCE = 30.0
# Slower bodies (bytes per second, measured over so many seconds) are rejected if another one waits.
PACE = 128 * 1024
PACE_SECONDS = 2.0


class BodyBudget:
    """The byte budget for all request bodies of a server. `most`: bytes held at once; `max_body`: bytes of one body."""

    def __init__(self, most: int = MOST_HELD, max_body: Callable[[], int] = lambda: MAX_BODY) -> None:
        self.free = most
        self.max_body = max_body
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._reading: set[Body] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def reserve(self, body: Body, size: int) -> None:
        """Reserve bytes for a body that is about to be read, first come, first served. Raises ApiError (503)."""
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
                self.restore(size if granted.done() and not granted.cancelled() else 0)
                if isinstance(error, TimeoutError):
                    message = "too many bytes of request bodies at once"
                    raise ApiError("unavailable_error", message, retry_after=5) from None
                raise
        body.held = size
        self._reading.add(body)

    def restore(self, size: int) -> None:
        """Return bytes to the budget and grant them to waiting bodies."""
        self.free += size
        while self._waiting:
            needed, granted = self._waiting[0]
            if not granted.done():
                if needed > self.free:
                    return
                self.free -= needed
                granted.set_result(None)
            self._waiting.popleft()

    def end(self, body: Body) -> None:
        """Stop tracking a body that has been read."""
        self._reading.discard(body)

    def _watch(self) -> None:
        if self._timer is None:
            before = {body: body.arrived for body in self._reading}
            self._timer = asyncio.get_running_loop().call_later(PACE_SECONDS, self._reject_slow, before)

    def _reject_slow(self, before: dict[Body, int]) -> None:
        """Reject the slowest senders since `before`, enough of them for the first waiting body."""
        self._timer = None
        if not self._waiting:
            return
        came = {body: body.arrived - arrived for body, arrived in before.items() if body in self._reading}
        missing = self._waiting[0][0] - self.free
        for body in sorted(came, key=came.__getitem__):
            if missing <= 0 or came[body] >= PACE * PACE_SECONDS:
                break
            body.reject()
            missing -= body.held
        self._watch()


class Body:
    """One request body and its share of the budget."""

    def __init__(self, bodies: BodyBudget) -> None:
        self._bodies = bodies
        self._limit: asyncio.Timeout | None = None
        self.held = 0
        """Bytes reserved for it."""
        self.arrived = 0

    async def read(self, scope: Scope, receive: Receive) -> bytes:
        """Read and return the whole body; `release` returns its bytes to the budget.

        Raises ClientDisconnected; ApiError: 413 if it is larger than the budget's `max_body`, 503 if the budget is used
        up, 408 if the client sends too slowly, 415 if it is compressed.
        """
        headers: dict[bytes, bytes] = dict(scope["headers"])
        coding = headers.get(b"content-encoding", b"identity").strip().lower().decode("latin-1")[:100]
        if coding not in ("", "identity"):
            why = (
                f"the request's body is compressed ({coding}), which this server does not accept: send it uncompressed"
            )
            raise ApiError("invalid_request_error", why, status=415)
        given = headers.get(b"content-length", b"")
        declared = int(given) if given.isdigit() else None
        max_body = self._bodies.max_body()
        if declared is not None and declared > max_body:
            raise _too_large(max_body)
        chunks: list[bytes] = []
        try:
            async with asyncio.timeout(None) as self._limit:
                if declared is not None and declared > SMALL_BODY:
                    await self._bodies.reserve(self, declared)
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnected("the client disconnected while sending its body")
                    chunk, more = message.get("body", b""), message.get("more_body", False)
                    self.arrived += len(chunk)
                    if self.arrived > max_body:
                        raise _too_large(max_body)
                    chunks.append(chunk)
                    if more and not self.held and self.arrived > SMALL_BODY:
                        await self._bodies.reserve(self, max_body)
        except BaseException as error:
            chunks.clear()  # the exception's frames would hold them until the next garbage collection
            if not isinstance(error, TimeoutError):
                raise
            slow = "the request's body arrived too slowly while others waited for memory"
            raise ApiError("invalid_request_error", slow, status=408) from None
        finally:
            self._bodies.end(self)
        if self.held:
            spare, self.held = self.held - self.arrived, self.arrived
            self._bodies.restore(spare)
        if self.arrived > MAX_JOINED:
            # The copy takes 20 ms, mostly for new memory, but holds no lock.
            return await asyncio.to_thread(b"".join, chunks)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def reject(self) -> None:
        """Stop reading: the client sends too slowly."""
        if self._limit is not None:
            self._limit.reschedule(asyncio.get_running_loop().time())

    def release(self) -> None:
        """Return the body's bytes to the budget. Idempotent."""
        held, self.held = self.held, 0
        self._bodies.restore(held)


def body_of(scope: Scope) -> Body:
    """Return the body of a request that passed `Access`."""
    body: Body = scope["llamado.body"]
    return body


def _too_large(max_body: int) -> ApiError:
    return ApiError("invalid_request_error", f"request body exceeds {max_body} bytes", status=413)
