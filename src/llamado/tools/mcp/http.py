"""Connections to MCP servers over HTTP: an answer that is read whole has an end.

Streams of events have limits of their own, in the `mcp` package.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx2

from llamado.tools.mcp.stdio import LONGEST_LINE


class _Limited(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for piece in self._stream:
            size += len(piece)
            if size > LONGEST_LINE:
                raise httpx2.ReadError(f"an answer of more than {LONGEST_LINE >> 20} MiB")
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()


class LimitedHttp(httpx2.AsyncHTTPTransport):
    """Raises httpx2.ReadError in the middle of an answer that is too long."""

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await super().handle_async_request(request)
        events = response.headers.get("content-type", "").lower().startswith("text/event-stream")
        if not events and isinstance(response.stream, httpx2.AsyncByteStream):
            response.stream = _Limited(response.stream)
        return response
