"""Hostile clients: keys, paths, deep and long bodies, memory, slow connections."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from fakes import FakeEngine, client, run
from server_processes import ServerProcess
from waiting import GUARD, until
from wire import serving

from llamado.engine.request import TokenProb, TokenProbs
from llamado.http.access import AccessRules, digest, key_is_valid
from llamado.http.bodies import MAX_BODY
from llamado.http.connections import MAX_HEADER_BYTES, MAX_HEADERS, MAX_PIPELINED
from llamado.http.json_body import LONG_BODY, MAX_COUNTS, MAX_DEPTH, MAX_QUOTES, MOST_SPACE, is_deeper, parse_json
from llamado.processes import memory
from llamado.server.errors import ApiError
from llamado.server.generate.formats import probs_json
from llamado.server.generate.json_values import MOST_ITEMS, MOST_SAMPLERS
from llamado.server.generate.prompts import MOST_TEXT
from llamado.server.generate.threads import LONG_TEXT

Start = Callable[..., tuple[ServerProcess, str]]


def wait_ready(url: str) -> None:
    until(lambda: httpx.get(f"{url}/health").status_code == 200, "not ready")


def connect(url: str) -> socket.socket:
    host, _, port = url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=GUARD)


def send(url: str, data: bytes) -> bytes:
    """Send bytes; return everything until the server closes the connection."""
    with connect(url) as sock:
        answer = b""
        with contextlib.suppress(ConnectionError):
            sock.sendall(data)
            while chunk := sock.recv(65536):
                answer += chunk
        return answer


def closed(sock: socket.socket) -> bool:
    """Wait for the server to close the connection; return False after the socket's timeout."""
    try:
        while sock.recv(65536):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


# -- keys ------------------------------------------------------------------------------------------------------------


def test_any_of_the_keys_in_either_header() -> None:
    digests = tuple(map(digest, (b"one", b"two")))
    for headers in (
        {b"authorization": b"Bearer one"},
        {b"authorization": b"bearer two"},
        {b"authorization": b"two"},
        {b"x-api-key": b"one"},
        {b"authorization": b"Basic abc", b"x-api-key": b"two"},
    ):
        assert key_is_valid(headers, digests), headers
    for value in (b"", b"Bearer ", b"Bearer  one", b"on", b"onee", b"onetwo", b"\xff\xfe"):
        assert not key_is_valid({b"authorization": value}, digests), value
        assert not key_is_valid({b"x-api-key": value}, digests), value
    assert not key_is_valid({}, digests)


async def test_public_paths_need_no_key() -> None:
    async with client(access=AccessRules(api_keys=(b"k",)), api_prefix="/llama") as http:
        for path, status in {
            "/llama/health": 200,
            "/llama/v1/health": 200,
            "/llama/": 200,
            "/llama/index.html": 200,
            "/llama/v1/models": 401,
            "/llama/metrics": 401,
            "/llama/openapi.json": 401,
            "/llama/nope": 401,
            "/health": 404,
            "/llamahealth": 404,
        }.items():
            assert (await http.get(path)).status_code == status, path
        response = await http.post("/llama/completion", json={"prompt": "a"}, headers={"X-Api-Key": "k"})
        assert response.status_code == 200


# -- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_static_files_stay_in_their_folder(tmp_path: Path) -> None:
    folder = tmp_path / "page"
    folder.mkdir()
    (tmp_path / "secret").write_text("secret")
    (folder / "index.html").write_text("<p>hello")
    (folder / "code.js").write_text("1")
    (folder / "health").write_text("not this")
    (folder / "out").symlink_to(tmp_path / "secret")

    async with client(static_path=str(folder), access=AccessRules(api_keys=(b"k",))) as http:
        page = await http.get("/")
        assert page.text == "<p>hello" and page.headers["content-type"].startswith("text/html")
        assert (await http.get("/code.js")).status_code == 401
        http.headers["X-Api-Key"] = "k"
        code = await http.get("/code.js")
        assert code.text == "1" and "javascript" in code.headers["content-type"]
        assert (await http.get("/health")).json() == {"status": "ok"}
        for path in ("/../secret", "/%2e%2e/secret", "/..%2fsecret", "/out", "/code.js/x", "/%00", "/nope"):
            response = await http.get(path)
            assert response.status_code == 404 and "secret" not in response.text, path
        assert (await http.post("/code.js")).status_code == 404


# -- bodies ----------------------------------------------------------------------------------------------------------


def test_the_depth_of_bodies_is_limited() -> None:
    def nested(levels: int) -> bytes:
        return b'{"a":[' * (levels // 2) + b"]}" * (levels // 2)

    assert not is_deeper(json.loads(nested(MAX_DEPTH)), MAX_DEPTH)
    assert is_deeper(json.loads(nested(MAX_DEPTH + 2)), MAX_DEPTH)
    assert parse_json(nested(MAX_DEPTH))
    for body in (nested(MAX_DEPTH + 2), nested(2000), b"[" * 100_000, b"[" * 100_000 + b"]" * 100_000):
        with pytest.raises(ApiError) as error:
            parse_json(body)
        assert error.value.status == 400
    # Brackets in text and lists side by side add no depth.
    assert parse_json(json.dumps(["[{" * 1000] * 50).encode())
    assert parse_json(b"[" + b",".join([b"[]"] * 10_000) + b"]")
    for character, most in MAX_COUNTS.items():
        # Long strings are not parsed, except those with rare escapes.
        with pytest.raises(ApiError, match="more than"):
            parse_json(json.dumps("\b" + character.decode() * (most + 1)).encode())


@pytest.mark.parametrize("space", [b" ", b"\n", b"\t\r"])
def test_long_bodies_that_are_mostly_white_space_are_refused(space: bytes) -> None:
    half = space * (MOST_SPACE // len(space) // 2)
    for body in (half + b"[1," + half + b"2]", b'["' + b"x" * MOST_SPACE + b'",' + half + half + b"1]"):
        with pytest.raises(ApiError, match="mostly white space"):
            parse_json(body)
    assert parse_json(half + b"[1]") == [1]
    texts = ["x" * 1000] * (MOST_SPACE // 1000)
    assert parse_json(json.dumps(texts).encode() + half) == texts


@pytest.mark.slow
def test_the_number_of_strings_is_limited() -> None:
    """Keys and strings count, quotation marks inside of strings do not."""
    assert parse_json(json.dumps(['say "x" ' * MAX_QUOTES]).encode())
    assert parse_json(json.dumps({"a" * 20: ["x"] * (MAX_QUOTES // 2 - 1)}).encode())
    for value in (["x"] * (MAX_QUOTES // 2 + 1), {str(i): 1 for i in range(MAX_QUOTES // 2 + 1)}):
        with pytest.raises(ApiError, match="strings"):
            parse_json(json.dumps(value).encode())
    assert gc.isenabled()


async def test_long_bodies() -> None:
    async with client() as http:
        tokens = (await http.post("/tokenize", json={"content": "a" * (2 * LONG_BODY)})).json()["tokens"]
        assert len(tokens) == 2 * LONG_BODY
        response = await http.post("/tokenize", content=b'{"content": "' + b"a" * LONG_BODY)
        assert response.status_code == 400 and "parse error" in response.json()["error"]["message"]
        response = await http.post("/tokenize", json={"content": "a" * (MOST_TEXT + 1)})
        assert response.status_code == 400 and "too long" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", ["x"] * (MOST_ITEMS + 1)),
        ("dry_sequence_breakers", ["x"] * (MOST_ITEMS + 1)),
        ("response_fields", ["x"] * (MOST_ITEMS + 1)),
        ("preserved_tokens", ["x"] * (MOST_ITEMS + 1)),
        ("samplers", ["top_k"] * (MOST_SAMPLERS + 1)),
        ("samplers", "k" * (MOST_SAMPLERS + 1)),
        ("logit_bias", {"a" * (LONG_TEXT + 1): 1}),
        ("logit_bias", [["a" * LONG_TEXT, 1], ["b", 1]]),
        ("logit_bias", {f"a{i}": 1 for i in range(MOST_ITEMS + 1)}),
    ],
)
async def test_lists_that_slow_every_token_are_limited(name: str, value: Any) -> None:
    async with client() as http:
        response = await http.post("/completion", json={"prompt": "a", "n_predict": 1, name: value})
        message = response.json()["error"]["message"]
        assert response.status_code == 400 and f"Field '{name}'" in message and "at most" in message


def test_all_probabilities_of_a_vocabulary() -> None:
    """Many are written in parts, with the same result."""
    top = [TokenProb(id=i, piece=b"%d" % i, logprob=-1.0, prob=0.5) for i in range(3000)]
    few, many = (probs_json([TokenProbs(top[0], top[:n])], False)[0]["top_logprobs"] for n in (1000, 3000))
    assert isinstance(few, list) and not isinstance(many, list)
    assert orjson.loads(orjson.dumps(many)) == [
        {"id": i, "token": str(i), "bytes": list(b"%d" % i), "logprob": -1.0} for i in range(3000)
    ]


@pytest.mark.slow
def test_trim_collects_cycles() -> None:
    """Independent of the collector's thresholds."""

    class Thing:
        me: Any = None

    thing = Thing()
    thing.me = thing
    gone = weakref.ref(thing)
    del thing
    memory.trim()
    assert gone() is None
    assert memory.resident() > 0 or sys.platform != "linux"


@pytest.mark.skipif(not memory.free_in_heap(), reason="the C library has no mallinfo2")
async def test_memory_that_was_in_use_for_long_is_returned_after_it_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies that were in use during several checks."""
    monkeypatch.setattr(memory, "LOOK_SECONDS", 0.01)
    size, piece = 128 << 20, 1 << 14  # small enough to come from the heap

    watch = asyncio.ensure_future(memory.watch())
    held = [bytes(piece) for _ in range(size // piece)]
    pins = [bytes(600) for _ in range(1000)]  # allocated last, so that the heap cannot shrink by itself
    while memory.resident() < size:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    most = memory.resident()
    held.clear()
    async with asyncio.timeout(60):
        while memory.resident() > most - size // 2:
            await asyncio.sleep(0.01)
    assert len(pins) == 1000
    watch.cancel()


SERVE = """
from llamado.engine.options import ModelSource
from llamado.errors import LlamadoError
from llamado.server.run import serve
from llamado.server.settings import Settings

def load(settings, report):
    raise LlamadoError("no model")

assert serve(Settings(source=ModelSource(spec="fake")), load, listen(("127.0.0.1",), 0)) == 1
"""
GATEWAY = """
from llamado.gateway import serve
from llamado.gateway.options import GatewayOptions, ReplicaOptions

serve.GatewayServer.run = lambda self, sockets: None
serve.serve_gateway(GatewayOptions(replicas=(ReplicaOptions(url="http://127.0.0.1:1"),)), listen(("127.0.0.1",), 0))
"""
ROUTER = """
import tempfile
from llamado.commands.serve import serve_settings
from llamado.commands.cli import make_parser
from llamado.flags import parse
from llamado.router import serve

serve.RouterServer.run = lambda self, sockets: None
with tempfile.TemporaryDirectory() as folder:
    flags, _ = parse(make_parser("serve"), "serve", ["--models-dir", folder])
    serve.serve_router(serve_settings(flags), flags, listen(("127.0.0.1",), 0), lambda model: 0)
"""
LARGE_BLOCKS = """
first = bytearray(memory.LARGE + 1)
del first
before = memory._heap_info()().hblkhd
held = bytearray(memory.LARGE + 1)
assert memory._heap_info()().hblkhd >= before + memory.LARGE, "in a heap"
"""


@pytest.mark.skipif(not memory.free_in_heap(), reason="the C library has no mallinfo2")
@pytest.mark.parametrize("start", [SERVE, GATEWAY, ROUTER], ids=["server", "gateway", "router"])
def test_large_blocks_are_mapped_even_after_one_was_freed(start: str) -> None:
    imports = "from llamado.processes import memory\nfrom llamado.http.sockets import listen\n"
    subprocess.run([sys.executable, "-c", imports + start + LARGE_BLOCKS], check=True, timeout=GUARD)


@pytest.mark.parametrize("start", [GATEWAY, ROUTER], ids=["gateway", "router"])
def test_collections_leave_out_what_stays(start: str) -> None:
    imports = "import gc\nfrom llamado.processes import memory\nfrom llamado.http.sockets import listen\n"
    check = "assert gc.isenabled() and gc.get_freeze_count() > 10_000 and gc.get_threshold() == memory.THRESHOLDS"
    subprocess.run([sys.executable, "-c", imports + start + check], check=True, timeout=GUARD)


def test_memory_is_watched_while_a_server_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    async def watch() -> None:
        seen.append("began")
        try:
            await asyncio.sleep(GUARD)
        finally:
            seen.append("ended")

    monkeypatch.setattr(memory, "watch", watch)
    with serving(FakeEngine()) as wire:
        assert httpx.get(wire.url + "/health").status_code == 200
        assert seen == ["began"]
    assert seen == ["began", "ended"]


@pytest.mark.parametrize("path", ["/completion", "/v1/chat/completions", "/tokenize", "/apply-template"])
async def test_bombs_are_refused_everywhere(path: str) -> None:
    async with client() as http:
        for value in ("[" * 900 + "]" * 900, '{"a":' * 900 + "1" + "}" * 900):
            for name in ("prompt", "messages", "content", "tools", "json_schema", "response_format"):
                response = await http.post(path, content=f'{{"{name}": {value}}}')
                assert response.status_code == 400, (path, name)


def test_a_body_without_end_is_refused() -> None:
    async def chunks() -> Any:
        while True:
            yield b" " * 2**20

    async def work() -> None:
        async with client() as http:
            response = await http.post("/completion", content=chunks())
            assert response.status_code == 413 and str(MAX_BODY) in response.json()["error"]["message"]

    run(work())


@pytest.mark.slow
def test_the_rest_of_a_refused_body_is_not_read_forever(fake_server: Start) -> None:
    _, url = fake_server()
    wait_ready(url)
    with connect(url) as sock:
        sock.sendall(b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000\r\n\r\n")
        assert sock.recv(12).endswith(b"413")
        with pytest.raises(ConnectionError):
            for _ in range(1000):
                sock.sendall(b"x" * 2**20)


# -- connections -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_invalid_http_gets_an_answer_and_is_closed(fake_server: Start) -> None:
    process, url = fake_server()
    wait_ready(url)
    many = b"".join(b"X-%d: 1\r\n" % i for i in range(MAX_HEADERS + 1))
    long = b"a" * MAX_HEADER_BYTES
    for data, status in (
        (b"\x16\x03\x01\x02\x00 hello", b"400"),
        (b"GET / HTTP/9.9\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\nContent-Length: -1\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\n" + many + b"\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\nX: " + long + b"\r\n\r\n", b"400"),
        (b"GET /" + long + b" HTTP/1.1\r\n\r\n", b"400"),
    ):
        answer = send(url, data)
        assert answer[:12].endswith(status), data[:40]
    with connect(url) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\n")
        for _ in range(20):  # in pieces, so that only the sum is too large
            try:
                sock.sendall(b"X-Y: " + b"a" * 8000 + b"\r\n")
                time.sleep(0.005)
            except ConnectionError:
                break
        assert closed(sock)
    assert httpx.get(f"{url}/health").status_code == 200
    process.terminate()
    process.wait(60)
    assert "Traceback" not in process.log()


@pytest.mark.slow
def test_pipelined_requests_are_limited(fake_server: Start) -> None:
    _, url = fake_server()
    wait_ready(url)
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    last = request[:-2] + b"Connection: close\r\n\r\n"
    assert send(url, request * 9 + last).count(b'{"status":"ok"}') == 10
    assert send(url, request * 10_000).count(b'{"status":"ok"}') <= MAX_PIPELINED + 1
    assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.slow
def test_slow_connections_are_closed(fake_server: Start) -> None:
    """With a timeout of 1 s: no data, partial headers, a partial body, an empty line, single bytes."""
    _, url = fake_server("timeout=1")
    wait_ready(url)
    post = b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
    starts = (b"", b"GET /health HT", post[:-2], post + b"{", b"\r\n")
    socks = [connect(url) for _ in starts]
    for sock, data in zip(socks, starts, strict=True):
        sock.sendall(data)
    with connect(url) as dribble, pytest.raises((ConnectionError, TimeoutError)):
        for byte in post * 100:
            dribble.sendall(bytes([byte]))
            time.sleep(0.05)
    assert all(closed(sock) for sock in socks)
    for sock in socks:
        sock.close()
    # The next request on a connection has a time limit, too.
    with connect(url) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = b""
        while not answer.endswith(b'{"status":"ok"}'):
            answer += sock.recv(65536)
        sock.sendall(b"\r\n")
        assert closed(sock)


@pytest.mark.slow
def test_health_is_answered_among_slow_connections(fake_server: Start) -> None:
    _, url = fake_server("connections=64")
    wait_ready(url)
    socks = []
    for i in range(200):
        sock = connect(url)
        sock.sendall(b"POST /completion HTTP/1.1\r\nContent-Le" if i % 2 else b"")
        socks.append(sock)
    for _ in range(20):
        assert httpx.get(f"{url}/health", timeout=GUARD).status_code == 200
    assert httpx.post(f"{url}/completion", json={"prompt": "a", "n_predict": 1}).status_code == 200
    # The connections idle for longest were closed, the last ones not.
    assert closed(socks[0])
    socks[-1].settimeout(0.1)
    assert not closed(socks[-1])
    for sock in socks:
        sock.close()


@pytest.mark.slow
def test_with_all_connections_busy_only_health_is_answered(fake_server: Start) -> None:
    _, url = fake_server("connections=2", "delay=0.1")
    wait_ready(url)
    body = b'{"prompt": "a", "stream": true}'
    post = b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    busy = [connect(url) for _ in range(2)]
    for sock in busy:
        sock.sendall(post)
    assert busy[0].recv(100)  # both are busy, so none can be closed
    refused = httpx.get(f"{url}/v1/models")
    assert refused.status_code == 503 and refused.json()["error"]["message"] == "too many connections"
    assert refused.headers["retry-after"] == "1" and refused.headers["connection"] == "close"
    assert httpx.get(f"{url}/health").status_code == 200
    for sock in busy:
        sock.close()
