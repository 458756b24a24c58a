"""What goes over the wire: requests to speak another protocol, names of headers, bytes nobody reads."""

from __future__ import annotations

import json

import pytest
from wire import read_answers, serving

SECOND = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
# A request in the body of another: nothing of it may ever be answered.
HIDDEN = b"GET /slots HTTP/1.1\r\nHost: x\r\n\r\n"
JAVA = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAA\r\n"
UPGRADES = {
    "java": JAVA,
    "websocket": b"Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: eA==\r\n",
    "tls": b"Upgrade: TLS/1.0\r\nConnection: Upgrade\r\n",
    "twice": b"Upgrade: a\r\nConnection: keep-alive\r\nUpgrade: b\r\nConnection: upgrade\r\n",
}


def body_of(text: bytes, framing: str) -> bytes:
    """A body with its framing's headers before it."""
    if framing == "length":
        return b"Content-Length: %d\r\n\r\n%b" % (len(text), text)
    parts = [text[i : i + 7] for i in range(0, len(text), 7)]
    return b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in parts) + b"0\r\n\r\n"


@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize("upgrade", UPGRADES)
def test_a_request_to_upgrade_keeps_its_body(upgrade: str, framing: str) -> None:
    """In one piece, byte by byte, and with a second such request and another one behind it on the same connection."""
    head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\n" + UPGRADES[upgrade]
    request = head + body_of(json.dumps({"content": HIDDEN.decode()}).encode(), framing)
    with serving() as wire:
        for pieces in ([request + request + SECOND], [bytes([b]) for b in request + request + SECOND]):
            with wire.connect() as sock:
                for piece in pieces:
                    sock.sendall(piece)
                first, second, third = read_answers(sock, 3)
            for status, _, body in (first, second):
                assert status == 200 and json.loads(body) == {"tokens": list(HIDDEN)}
            assert third[0] == 200 and json.loads(third[2])["data"]
        # A body that reads like a request is a body.
        with wire.connect() as sock:
            sock.sendall(head + body_of(HIDDEN, framing) + SECOND)
            answers = read_answers(sock, 2)
        assert [status for status, _, _ in answers] == [400, 200]
        assert b"parse error" in answers[0][2] and json.loads(answers[1][2])["data"]


def test_there_is_no_tunnel() -> None:
    with serving() as wire, wire.connect() as sock:
        sock.sendall(b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n" + SECOND)
        assert [status for status, _, _ in read_answers(sock, 2)] == [400]
