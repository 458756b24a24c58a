"""Helpers for tests of resumable streams: an engine that waits, and clients that leave."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import orjson
from fakes import ANSWER, FakeEngine

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}


class GatedEngine(FakeEngine):
    """Sends as many tokens as it was allowed to."""

    def __init__(self, answer: str = ANSWER, allowed: int = 0) -> None:
        super().__init__(answer)
        self._allowed = threading.Semaphore(allowed)
        self.before = lambda _: self._wait()

    def _wait(self) -> None:
        while not self._allowed.acquire(timeout=0.05):
            if self._stop or (self._running and self._running[0][0] in self.cancelled):
                return

    def allow(self, n: int = 10_000) -> None:
        """Let it send `n` more tokens."""
        self._allowed.release(n)


def post(
    address: tuple[str, int], id: bytes = b"c", path: str = CHAT, body: dict[str, Any] = BODY, headers: bytes = b""
) -> socket.socket:
    """Send a request on its own connection."""
    sock = socket.create_connection(address, timeout=60)
    data = orjson.dumps(body)
    head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nX-Conversation-Id: %b\r\n%bContent-Length: %d\r\n\r\n"
    sock.sendall(head % (path.encode(), id, headers, len(data)) + data)
    return sock


def read_some(sock: socket.socket, text: bytes = b"data: ") -> bytes:
    """Read until a text has come."""
    found = b""
    while text not in found:
        part = sock.recv(65536)
        assert part, found
        found += part
    return found


def text_of(body: bytes) -> str:
    """Return the text of a stream of chat chunks, all of which must be whole."""
    events = body.decode().split("\n\n")
    assert events.pop() == "" and events.pop() == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events if event != ":"]
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
