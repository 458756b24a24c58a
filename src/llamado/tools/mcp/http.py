"""HTTP transport of MCP servers, with bounded and uncompressed responses."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx2

from llamado.tools.mcp.bounds import MessageSize, MessageTooLarge, Pace


class _BoundedStream(httpx2.AsyncByteStream):
    """A body that holds one message, or a stream of events. An event ends with an empty line."""

    def __init__(self, stream: httpx2.AsyncByteStream, is_events: bool) -> None:
        self._stream = stream
        self._is_events = is_events

    async def __aiter__(self) -> AsyncIterator[bytes]:
        pace, size, before = Pace(), MessageSize(), b""
        async for piece in self._stream:
            await pace.spend(len(piece), piece.count(b"\n") if self._is_events else 0)
            if self._is_events and _has_empty_line(before + piece):
                size.end()
            before = piece[-3:]
            try:
                size.add(piece)
            except MessageTooLarge as error:
                raise httpx2.ReadError(str(error)) from None
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()


def _has_empty_line(text: bytes) -> bool:
    return b"\n\n" in text or b"\r\n\r\n" in text or b"\r\r" in text


class BoundedHttp(httpx2.AsyncHTTPTransport):
    """Raises httpx2.ReadError for responses that are too long, and RemoteProtocolError for compressed ones.

    A few kilobytes of compressed data may expand to gigabytes.
    """

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        request.headers["accept-encoding"] = "identity"
        response = await super().handle_async_request(request)
        encoding = response.headers.get("content-encoding", "identity").lower()
        if encoding not in ("", "identity"):
            await response.aclose()
            raise httpx2.RemoteProtocolError(f"the response is compressed ({encoding[:50]}), which was not requested")
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        is_events = response.headers.get("content-type", "").lower().startswith("text/event-stream")
        response.stream = _BoundedStream(response.stream, is_events)
        return response
