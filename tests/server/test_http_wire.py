"""HTTP on the wire: upgrades, framing, header names, clients that do not read, shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes import FakeEngine, client, served
from waiting import GUARD, until
from wire import read_answers, serving

from llamado.engine.request import Token, TokenProb, TokenProbs
from llamado.http import connections
from llamado.http.access import AccessRules
from llamado.media.chunks import MediaPrompt
from llamado.server.generate import streaming
from llamado.server.generate.constraints import OutputConstraints
from llamado.server.generate.request import MOST_PROBABILITIES, make_request
from llamado.server.generate.streaming import Generation, Mailbox
from llamado.server.switches import Switches

USER = [{"role": "user", "content": "Hi"}]
SECOND = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
# A request inside the body of another, which must not be answered.
HIDDEN = b"GET /slots HTTP/1.1\r\nHost: localhost\r\n\r\n"
JAVA = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAA\r\n"
UPGRADES = {
    "java": JAVA,
    "websocket": b"Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: eA==\r\n",
    "tls": b"Upgrade: TLS/1.0\r\nConnection: Upgrade\r\n",
    "twice": b"Upgrade: a\r\nConnection: keep-alive\r\nUpgrade: b\r\nConnection: upgrade\r\n",
}


def body_of(text: bytes, framing: str) -> bytes:
    """Return a body with the headers of its framing."""
    if framing == "length":
        return b"Content-Length: %d\r\n\r\n%b" % (len(text), text)
    parts = [text[i : i + 7] for i in range(0, len(text), 7)]
    return b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in parts) + b"0\r\n\r\n"


@pytest.mark.slow
@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize("upgrade", UPGRADES)
def test_a_request_to_upgrade_keeps_its_body(upgrade: str, framing: str) -> None:
    """Sent in one piece, byte by byte, and followed by two more requests on the same connection."""
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n" + UPGRADES[upgrade]
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
        # A body that looks like a request is a body.
        with wire.connect() as sock:
            sock.sendall(head + body_of(HIDDEN, framing) + SECOND)
            answers = read_answers(sock, 2)
        assert [status for status, _, _ in answers] == [400, 200]
        assert b"parse error" in answers[0][2] and json.loads(answers[1][2])["data"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_of_http_1_0_gets_no_chunks(stream: bool) -> None:
    """It would read chunk lengths as text, so the body ends with the connection."""
    body = json.dumps({"prompt": "a", "n_predict": 3, "stream": stream}).encode()
    with serving() as wire, wire.connect() as sock:
        sock.sendall(b"POST /completion HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        head, _, answer = sock.makefile("rb").read().partition(b"\r\n\r\n")
        assert b" 200 " in head and b"chunked" not in head.lower() and b"connection: close" in head.lower()
        parts = answer.split(b"\n\n") if stream else [answer]
        events = [json.loads(part.removeprefix(b"data: ")) for part in parts if part]
        assert len(events) == (4 if stream else 1) and events[-1]["stop"] is True
        assert events[-1]["tokens_predicted"] == 3


def test_a_compressed_body_is_refused_by_name() -> None:
    with serving() as wire:
        for coding, status in (("gzip", 415), ("br", 415), ("identity", 200)):
            headers = {"Content-Encoding": coding}
            answer = httpx.post(f"{wire.url}/tokenize", content=b'{"content": "a"}', headers=headers)
            assert answer.status_code == status
            assert status == 200 or coding in answer.json()["error"]["message"]


def test_connect_is_refused() -> None:
    with serving() as wire, wire.connect() as sock:
        sock.sendall(b"CONNECT x:80 HTTP/1.1\r\nHost: localhost\r\n\r\n" + SECOND)
        assert [status for status, _, _ in read_answers(sock, 2)] == [400]


# -- names of headers -------------------------------------------------------------------------------------------------


def test_header_names_are_spelled_like_llama_servers(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<p>")
    rules = AccessRules(api_keys=(b"k",))
    key = b"Host: localhost\r\nX-Api-Key: k\r\nOrigin: http://localhost\r\n"
    seen: set[str] = set()
    with serving(access=rules, metrics=True, static_path=str(tmp_path)) as wire:
        for request in (
            b"GET /metrics HTTP/1.1\r\n" + key,
            b"GET / HTTP/1.1\r\n" + key,
            b"HEAD /v1/models HTTP/1.1\r\nConnection: close\r\n" + key,
            b"OPTIONS /v1/models HTTP/1.1\r\n" + key,
            b"GET /v1/models HTTP/1.1\r\nOrigin: http://localhost\r\n",
            b"POST /nowhere HTTP/1.1\r\n" + key,
            b"POST /completion HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 30\r\n" + key,
            b"GARBAGE\r\n",
        ):
            with wire.connect() as sock:
                body = b'{"prompt": "ab", "stream":true}'[: 30 + 1] if b"Content-Length" in request else b""
                sock.sendall(request.replace(b": 30", b": %d" % len(body)) + b"\r\n" + body)
                [(_, headers, _)] = read_answers(sock, 1)
            seen |= set(headers)
    assert seen >= {
        "Access-Control-Allow-Origin",
        "Access-Control-Allow-Methods",
        "Connection",
        "Content-Length",
        "Content-Type",
        "ETag",
        "Process-Start-Time-Unix",
        "Transfer-Encoding",
        "X-Request-Id",
    }
    assert all(name == "ETag" or name == name.title() for name in seen), seen


# -- clients that do not read ----------------------------------------------------------------------------------------


@pytest.mark.full
def test_an_unread_stream_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer is cancelled and its connection closed; another stream that is read continues."""
    monkeypatch.setattr(streaming, "MOST_UNREAD", 4000)
    engine = FakeEngine("x" * 60_000)
    with serving(engine) as wire, wire.connect() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = b'{"prompt": "a", "stream": true, "n_probs": 2}'
        sock.sendall(
            b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        until(lambda: engine.cancelled)
        until(lambda: wire.gate.n_open == 0)
        assert wire.gate.unread == {}
        engine.answer = "abc"
        answer = httpx.post(f"{wire.url}/completion", json={"prompt": "a", "stream": True})
        assert answer.text.count("data: ") == 4
        received = b""
        with contextlib.suppress(ConnectionError):
            while part := sock.recv(65536):
                received += part
        assert not received.endswith(b"0\r\n\r\n")


async def test_the_stream_with_most_unread_data_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "MOST_UNREAD", 30)

    engine = FakeEngine()
    mailbox = Mailbox(asyncio.get_running_loop())
    request = served(engine).defaults.request([1])
    few, many, read = (Generation(mailbox, engine, [request]) for _ in range(3))
    probs = [TokenProbs(TokenProb(1, b"a", 1.0, 0.0), (TokenProb(1, b"a", 1.0, 0.0),) * 10)]
    closed: list[bool] = []
    many.close_connection = lambda: closed.append(True)
    for i in range(100):
        read.receive([(0, Token("x", [1], None, i, None))])
        assert len(await read.read()) == 1
    few.receive([(0, Token("x", [1], None, 0, None))])
    many.receive([(0, Token("x", [1], probs, 0, None))])
    assert not closed
    few.receive([(0, Token("x", [1], None, 1, None))])
    many.receive([(0, Token("x", [1], probs, 0, None))])
    assert closed and many.gone and not few.gone and not many.running
    assert await many.read() == [] and len(await few.read()) == 2
    assert mailbox._total == 0 and not mailbox._unread
    engine.close()


@pytest.mark.slow
def test_unread_answers_are_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whole answers, the connection that waited longest is closed first."""
    monkeypatch.setattr(connections, "MOST_UNREAD", 12_000_000)
    body = b'{"content": "%b"}' % (b"x" * 3_000_000)  # about 12 MB of numbers, minus the socket buffers
    request = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    with serving() as wire:
        socks: list[socket.socket] = []
        earlier: set[Any] = set()

        def another() -> bool:
            return bool(set(wire.gate.unread) - earlier)

        for _ in range(3):
            sock = wire.connect()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            socks.append(sock)
            sock.sendall(request)
            until(another)
            earlier |= set(wire.gate.unread)
        until(lambda: wire.gate.n_open == 1)
        [last] = wire.gate.unread
        assert last.transport.get_extra_info("peername") == socks[-1].getsockname()
        for sock in socks:
            sock.close()
        until(lambda: not wire.gate.unread)


# -- probabilities ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completion", {"prompt": "a", "n_probs": 257, "n_predict": 4095}),
        ("/completion", {"prompt": "a", "n_probs": 257}),
        ("/completion", {"prompt": ["a", "b", "c"], "n_probs": 100, "n_predict": 4000}),
        ("/completion", {"prompt": "a", "n_probs": 100, "n_predict": 3000, "n": 4}),
        ("/v1/completions", {"prompt": "a", "logprobs": 257, "max_tokens": 4095}),
        ("/v1/chat/completions", {"messages": USER, "logprobs": True, "top_logprobs": 257, "max_tokens": 4095}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_too_many_probabilities_are_a_400(path: str, body: dict[str, Any], stream: bool) -> None:
    async with client() as http:
        answer = await http.post(path, json=body | {"stream": stream})
        assert answer.status_code == 400 and str(MOST_PROBABILITIES) in answer.json()["error"]["message"]
        assert not http.engine.requests  # rejected before any work
        for fewer in ({"n_probs": 20, "logprobs": 20, "top_logprobs": 20}, {"n_predict": 8, "max_tokens": 8}):
            fewer = {name: value for name, value in fewer.items() if name in body or name == "n_predict"}
            if path.endswith("chat/completions"):
                fewer["logprobs"] = True
            answer = await http.post(path, json=body | fewer | {"stream": stream, "n": 1})
            assert answer.status_code == 200, answer.text


def test_probabilities_of_the_whole_vocabulary_for_a_few_tokens() -> None:
    engine = FakeEngine()
    fake, switches = served(engine), Switches()

    def n_predict(n_ctx: int, **fields: int) -> int:
        room = replace(fake, info=replace(fake.info, n_ctx=n_ctx))
        return make_request(
            fields, [MediaPrompt([1])], room, switches, constraints=OutputConstraints()
        ).params.n_predict

    for n_vocab, n in ((262_144, 4), (151_936, 6), (49_152, 20)):
        assert n_predict(131_072, n_probs=n_vocab, n_predict=n) == n
    assert n_predict(131_072, n_probs=20) == MOST_PROBABILITIES // 20
    assert n_predict(131_072, n_probs=20, n=2) == MOST_PROBABILITIES // 40
    assert (n_predict(4096), n_predict(4096, n_probs=20, n_predict=100), n_predict(4096, n_probs=20)) == (-1, 100, -1)
    engine.close()


# -- shutdown ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_new_requests_during_shutdown_get_503_with_retry_after() -> None:
    engine = FakeEngine("x" * 100, delay=0.05)
    with serving(engine) as wire, httpx.Client(base_url=wire.url, timeout=GUARD) as http:
        with http.stream("POST", "/completion", json={"prompt": "a", "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            wire.server.should_exit = True
            until(lambda: httpx.get(f"{wire.url}/health").status_code == 503)
            for path in ("/health", "/v1/models"):
                answer = httpx.get(wire.url + path)
                assert answer.status_code == 503 and answer.json()["error"]["type"] == "unavailable_error"
                assert answer.headers["retry-after"] and answer.headers["connection"] == "close"
            assert httpx.post(f"{wire.url}/completion", json={"prompt": "a"}).status_code == 503
            last = [line for line in lines if line.startswith("data: ")][-1]
        assert json.loads(last[6:])["stop"] is True and json.loads(last[6:])["tokens_predicted"] == 100
        until(lambda: not wire.server.servers or not any(s.is_serving() for s in wire.server.servers))


@pytest.mark.slow
def test_open_connections_get_503_at_shutdown() -> None:
    """A connection without a request yet and an idle one get 503 with Retry-After, also if the body comes late."""
    engine = FakeEngine("x" * 100, delay=0.05)
    with (
        serving(engine) as wire,
        httpx.Client(base_url=wire.url, timeout=GUARD) as http,
        wire.connect() as new,
        wire.connect() as used,
    ):
        used.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert [status for status, _, _ in read_answers(used, 1)] == [200]
        with http.stream("POST", "/completion", json={"prompt": "a", "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            wire.server.should_exit = True
            until(lambda: httpx.get(f"{wire.url}/health").status_code == 503)
            for sock in (new, used):
                sock.sendall(b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: 300000\r\n\r\n")
                assert select.select([sock], [], [], 30)[0]
                for _ in range(300):
                    sock.sendall(b" " * 1000)
                [(status, headers, _)] = read_answers(sock, 1)
                assert (status, headers["Connection"]) == (503, "close")
                assert sock.recv(1) == b"", "a clean close, not a reset"


@pytest.mark.slow
def test_refused_clients_can_read_the_reason() -> None:
    """After endless headers, the server reads what is still in flight, but only for a limited time."""
    with serving() as wire, wire.connect() as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 70_000)
        assert select.select([sock], [], [], 30)[0]
        for _ in range(50):
            sock.sendall(b"x" * 1000)
        assert [status for status, _, _ in read_answers(sock, 1)] == [431]
        assert sock.recv(1) == b""
        until(lambda: sent_in_vain(sock))


def sent_in_vain(sock: socket.socket) -> bool:
    """Return True if the peer has closed the connection and resets it on further data."""
    try:
        sock.sendall(b"x")
    except OSError:
        return True
    return False


FRAMED = {
    "an extension": (b"1;" + b"x" * 65_536, b"x" * 65_536),
    "extensions": (b"", b"1;a=" + b"x" * 30_000 + b"\r\n \r\n"),
    "trailers": (b"2\r\n{}\r\n0\r\n", b"X-Trailer: " + b"x" * 30_000 + b"\r\n"),
    "lengths": (b"", b"0" * 65_536),
}


@pytest.mark.parametrize("kind", FRAMED)
def test_oversized_chunk_framing_is_refused(kind: str) -> None:
    first, more = FRAMED[kind]
    with serving() as wire, wire.connect() as sock:
        sock.sendall(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" + first)
        sent = 0
        with contextlib.suppress(OSError):
            while not select.select([sock], [], [], 0)[0] and sent < 64 << 20:
                sent += sock.send(more)
        assert read_answers(sock, 1)[0][0] == 400 and sent < 32 << 20


def test_chunked_bodies_in_all_forms(caplog: pytest.LogCaptureFixture) -> None:
    """Chunks of one byte, chunk extensions, and trailers, which are not headers."""
    text = json.dumps({"content": "x" * 2000}).encode()
    chunks = b"".join(b"1;at=%d\r\n%c\r\n" % (n % 10, byte) for n, byte in enumerate(text))
    trailers = b"0\r\nHost: evil.example\r\nAuthorization: Bearer x\r\n\r\n"
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with serving() as wire, wire.connect() as sock:
        for _ in range(2):
            sock.sendall(head + chunks + trailers)
            assert read_answers(sock, 1)[0][0] == 200
