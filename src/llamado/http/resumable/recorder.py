"""Recording a streamed response: its client is the first reader of a buffer, and may disconnect."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from starlette.responses import Response

from llamado.http.answer import App, Receive, Scope, Send, error_response
from llamado.http.connections import ABORT
from llamado.http.errors import OLLAMA, ApiError
from llamado.http.resumable.buffer import StreamBuffer, StreamLost
from llamado.http.resumable.registry import StreamRegistry
from llamado.http.resumable.requests import requested_id, stopped_before_start
from llamado.http.streams import disconnected

log = logging.getLogger("llamado.server")

_RECORDER = "llamado.stream_recorder"


class StreamRecorder:
    """One response on its way into a buffer. A stream writes to it instead of to its client.

    `receive`, `send`, `write`: replace those of the request. `receive` returns a disconnect only if the stream is
    stopped, and `send` never waits.
    """

    def __init__(
        self, streams: StreamRegistry, stream: StreamBuffer, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self._streams = streams
        self._stream = stream
        self._scope = scope
        self._send_to_client = send
        self._guard = disconnected(receive, self._leave)
        self._is_used = self._is_complete = self._is_error = self._has_left = False
        self._reader: asyncio.Task[None] | None = None

    async def receive(self) -> dict[str, Any]:
        """Wait until the stream is stopped."""
        if not self._is_used:
            self._is_used = True
            self._guard.__enter__()
        await self._stream.wait_for_stop()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        """Write a message of the response. An error response goes to the client, and no stream is kept."""
        if message["type"] == "http.response.start" and message["status"] == 200:
            self._stream.media_type = dict(message["headers"])[b"content-type"].decode("latin-1")
            self._reader = asyncio.ensure_future(_deliver(self._stream, 0, message, self._scope, self._send_to_client))
        elif self._reader is not None:
            self.write(message.get("body", b""))
            self._is_complete = not message.get("more_body", False)
        else:
            self._is_error = True
            await self._send_to_client(message)

    def write(self, data: bytes) -> bool:
        """Write another part of the body; return True, as WRITE does."""
        self._streams.append(self._stream, data)
        return True

    async def end(self) -> None:
        """End the stream, and wait until its client has read it or is gone."""
        try:
            if self._reader is None:
                self._streams.discard(self._stream)
                if self._is_used and self._stream.is_stopped and not self._is_error:
                    response = error_response(stopped_before_start(), self._scope["path"])
                    await response(self._scope, self.receive, self._send_to_client)
                return
            self._streams.finish(self._stream, was_cut=not (self._is_complete or self._stream.is_stopped))
            await asyncio.wait([self._reader])
        finally:
            if self._reader is not None:
                self._reader.cancel()
            if self._is_used:
                self._guard.__exit__()
            self._leave()

    def _leave(self) -> None:
        """Count the client as gone; only once."""
        if not self._has_left:
            self._has_left = True
            self._streams.leave(self._stream)


class ResumedStream(Response):
    """A response that sends a stream from `offset` to its end, also while it is written."""

    def __init__(self, streams: StreamRegistry, stream: StreamBuffer, offset: int) -> None:
        super().__init__(headers={"content-type": stream.media_type, "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._streams = streams
        self._stream = stream
        self._offset = offset

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        self._stream.n_readers += 1
        reader = asyncio.ensure_future(_deliver(self._stream, self._offset, start, scope, send))
        try:
            with disconnected(receive) as gone:
                await asyncio.wait([reader, gone], return_when=asyncio.FIRST_COMPLETED)
            if reader.done():
                reader.result()
        finally:
            reader.cancel()
            self._streams.leave(self._stream)


async def _deliver(stream: StreamBuffer, offset: int, start: Any, scope: Scope, send: Send) -> None:
    """Send a stream to a client; close its connection if it cannot get the rest.

    Does not end early for a client that disconnects: a server's `send` then does nothing.
    """
    await send(start)
    try:
        while part := await stream.read(offset):
            await send({"type": "http.response.body", "body": part, "more_body": True})
            offset += len(part)
    except StreamLost as error:
        log.info("resumable streams: a reader was cut off: %s", error)
        scope.get("extensions", {}).get(ABORT, lambda: None)()
        return
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def recorder_of(scope: Scope) -> StreamRecorder | None:
    """Return the recorder of a request; None if its response is not kept."""
    found: StreamRecorder | None = scope.get(_RECORDER)
    return found


class RecordedRequests:
    """ASGI middleware that begins a stream for each request with the header X-Conversation-Id."""

    def __init__(self, app: App, streams: StreamRegistry) -> None:
        self._app = app
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            id = requested_id(scope)
        except ApiError as error:
            await error_response(error, scope["path"])(scope, receive, send)
            return
        stream = self._streams.open(id) if id else None
        if stream is None:
            await self._app(scope, receive, send)
            return
        if scope["path"] in OLLAMA:
            stream.media_type = "application/x-ndjson"
        recorder = scope[_RECORDER] = StreamRecorder(self._streams, stream, scope, receive, send)
        try:
            await self._app(scope, receive, send)
        finally:
            await recorder.end()
