"""A server among clients that mean harm: 10,000 malformed requests, slow and many connections, huge bodies, bombs,
answers that the client never reads, pages of other sites, tools, servers behind the proxy, workers that freeze or lie,
damaged pictures and sounds.

`llamado serve` runs with a real model. One process asks for /health 20 times a second on new connections, another asks
for the same greedy answer once a second and compares it; meanwhile the phases come one after the other. Printed for
each: what was answered, how long /health took (and how long right after it, when nothing was asked), and the server's
memory before, at most, and after. Ends with 1 when there was a 5xx other than 501 and 503 with Retry-After, when an
answer was wrong, when something was served that may not be, when /health took more than 50 ms at the 99th percentile of
a phase, or when memory stays more than 150 MB above where it was after the warm-up.

usage: hostile.py [--model smollm2] [--only PHASE] [--slowest 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import resource
import socket
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import httpx
from endurance import resident
from hostile_media import MARKER, requests, write_models
from hostile_requests import (
    BODIES,
    MOST,
    PATHS,
    answers,
    bombs,
    deep_and_wide,
    framings,
    greedy_answers,
    joins,
    long_texts,
    mutated,
    numeric_schemas,
    raw_requests,
    references,
    strangers,
    tool_calls,
    trigger_bombs,
    upgrades,
)
from serving import percentile
from sides import HOST, Server, model_path, server

sys.path.append(str(Path(__file__).parent.parent / "tests" / "rpc"))
from scripted_worker import ScriptedWorker

from llamado.rpc.wire import (
    COMMANDS,
    AllocBuffer,
    AllocResponse,
    BufferGetBase,
    DeviceCount,
    DeviceMemory,
    GetAlignment,
    GetDeviceMemory,
    GetMaxSize,
    Number,
    Request,
    Response,
    write_response,
)

N_REQUESTS = 10_000
N_CONNECTIONS = 10_000
LOOK_SECONDS = 0.05
MOST_MS = 50.0
"""Limit of /health's 99th percentile in seconds."""
MOST_KEPT = 150_000_000
"""Bytes of memory that may stay."""
CACHE = ["--cache-ram", "64"]
"""Prompts that are kept are no leak: 8 GiB of them by default, of which a few minutes would fill a part."""
TOKEN = "the token of the cluster"
MEMBER = {"X-Cluster-Token": TOKEN}
MOST_DRAIN_SECONDS = 5.0
"""Most seconds of a drain while frozen workers are joining."""
QUESTION = {"prompt": "The capital of France is", "n_predict": 12, "temperature": 0}


@dataclass
class Tally:
    """Responses of one phase."""

    statuses: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    """Answers that may not be."""
    slow: list[tuple[float, str]] = field(default_factory=list)

    def count(self, status: str, what: str, head: bytes = b"") -> None:
        """Note an answer by its status; `head` is its beginning."""
        self.statuses[status] += 1
        if status.startswith("5") and status != "501" and not (status == "503" and b"retry-after" in head.lower()):
            self.bad.append(f"{status} for {what[:150]}: {head[-300:]!r}")


# --- asking -----------------------------------------------------------------------------------------------------------


async def exchange(
    port: int, data: Iterable[bytes], tally: Tally, what: str, *, seconds: float = 60, pause: float = 0.0
) -> None:
    """Send parts on a new connection and note the status of what is answered: `closed` or `silent` where nothing is."""
    began = time.perf_counter()
    try:
        reader, writer = await asyncio.open_connection(HOST, port)
    except OSError as error:
        tally.count(type(error).__name__, what)
        return

    async def send() -> None:
        try:
            for part in data:
                writer.write(part)
                await writer.drain()
                if pause:
                    await asyncio.sleep(pause)
        except OSError:
            pass  # the answer says why

    sending = asyncio.ensure_future(send())
    head, status = b"", "closed"
    try:
        async with asyncio.timeout(seconds):
            while chunk := await reader.read(65536):
                head += chunk[: max(0, 4096 - len(head))]
                if b"\r\n\r\n" in head and (b"\n0\r\n\r\n" in chunk or not pause):
                    break
    except TimeoutError:
        status = "silent"
    except OSError:
        pass
    if head.startswith(b"HTTP/1.1 "):
        status = head[9:12].decode("latin-1")
    sending.cancel()
    writer.transport.abort()
    tally.count(status, what, head)
    tally.slow.append((time.perf_counter() - began, what))


def post(path: str, body: bytes) -> bytes:
    """A well-formed request with this body."""
    return b"POST %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (
        path.encode(),
        len(body),
        body,
    )


async def in_parallel(n: int, work: Iterable[Awaitable[None]]) -> None:
    """Await everything, `n` at a time."""
    todo = iter(work)

    async def worker() -> None:
        for one in todo:
            await one

    await asyncio.gather(*(worker() for _ in range(n)))


async def whole_answer(
    client: httpx.AsyncClient, method: str, path: str, body: bytes, tally: Tally, content_type: str = ""
) -> None:
    """A request by a proper client that reads all of the answer."""
    began = time.perf_counter()
    what = f"{method} {path} {body[:120]!r}"
    headers = {"content-type": content_type} if content_type else {}
    try:
        answer = await client.request(method, path, content=body, headers=headers)
        head = str(dict(answer.headers)).encode() + answer.content[:300]
        tally.count(str(answer.status_code), what, head)
        if b'"server_error"' in answer.content and answer.status_code == 200:
            tally.bad.append(f"server_error in a stream for {what}: {answer.content[-300:]!r}")
    except httpx.HTTPError as error:
        tally.count(type(error).__name__, what)
    tally.slow.append((time.perf_counter() - began, what))


# --- phases -----------------------------------------------------------------------------------------------------------


async def malformed(port: int, tally: Tally) -> None:
    """10,000 requests: a third not even HTTP, the rest HTTP with bodies that are wrong in all ways."""
    rng = random.Random(4)
    limits = httpx.Limits(max_connections=16, max_keepalive_connections=16)
    async with httpx.AsyncClient(base_url=f"http://{HOST}:{port}", timeout=60, limits=limits) as client:

        def work() -> Iterable[Awaitable[None]]:
            for i in range(N_REQUESTS):
                if i % 3 == 0:
                    data = raw_requests(rng)
                    yield exchange(port, [data], tally, repr(data[:120]), seconds=0.5)
                else:
                    path, body = mutated(rng)
                    method = rng.choice(["GET", "PUT", "DELETE", "PATCH"]) if rng.random() < 0.05 else "POST"
                    yield whole_answer(client, method, path, body, tally)

        await in_parallel(16, work())


async def slow_loris(port: int, tally: Tally) -> None:
    """2,000 connections that send a byte now and then: of the headers, of a body, of chunks."""
    starts = [
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n",
        b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"",
    ]
    drips = [b"X-a: b\r\n", b" ", b"1\r\n \r\n", b"G"]

    def parts(i: int) -> Iterable[bytes]:
        yield starts[i % 4]
        while True:
            yield drips[i % 4]

    await asyncio.gather(
        *(exchange(port, parts(i), tally, f"dribble {i % 4}", seconds=25, pause=1.0) for i in range(2000))
    )


async def connections(port: int, tally: Tally) -> None:
    """10,000 open connections; half sent nothing, the rest a part of a request."""
    held: list[socket.socket] = []
    loop = asyncio.get_running_loop()
    try:
        for i in range(N_CONNECTIONS):
            one = socket.socket()
            one.setblocking(False)
            await loop.sock_connect(one, (HOST, port))
            if i % 2:
                await loop.sock_sendall(one, b"POST /completion HTTP/1.1\r\nContent-Le")
            held.append(one)
            if i % 50 == 0:
                await asyncio.sleep(0.025)  # 2,000 a second
            tally.statuses["open"] += 1
        await asyncio.sleep(5)
        for _ in range(20):  # who asks for something is still served
            await exchange(port, [post("/tokenize", b'{"content": "x"}')], tally, "tokenize among 10,000")
    finally:
        for one in held:
            one.close()


async def huge_bodies(port: int, tally: Tally) -> None:
    """100 MB each: announced, in chunks without end, and one byte too many."""
    megabyte = b"x" * 2**20

    def announced() -> Iterable[bytes]:
        yield b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: 104857600\r\n\r\n"
        for _ in range(100):
            yield megabyte

    def in_chunks() -> Iterable[bytes]:
        yield b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        for _ in range(100):
            yield b"100000\r\n" + megabyte + b"\r\n"
        yield b"0\r\n\r\n"

    def just_too_long() -> Iterable[bytes]:
        yield b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % (
            MOST + 1
        )
        for _ in range(10):
            yield megabyte
        yield b"x"

    kinds = [announced, in_chunks, just_too_long]
    await in_parallel(6, (exchange(port, kinds[i % 3](), tally, kinds[i % 3].__name__) for i in range(60)))


async def deep(port: int, tally: Tally) -> None:
    """JSON that is deep, wide, or full of numbers; a million stop strings and biases; numbers of a million digits."""
    bodies = ((path, body) for _ in range(2) for path, body in deep_and_wide())
    await in_parallel(4, (exchange(port, [post(p, b)], tally, f"{p} {b[:60]!r}") for p, b in bodies))


async def texts(port: int, tally: Tally) -> None:
    """Texts of 10 MB in every field that is tokenized."""
    bodies = (body for _ in range(3) for body in long_texts())
    await in_parallel(3, (exchange(port, [post(p, b)], tally, f"{p} {b[:60]!r}") for p, b in bodies))


async def schemas(port: int, tally: Tally) -> None:
    """Schemas, grammars and patterns that are made to take for ever."""
    async with httpx.AsyncClient(base_url=f"http://{HOST}:{port}", timeout=60) as client:

        def work() -> Iterable[Awaitable[None]]:
            for path, body in bombs():
                yield whole_answer(client, "POST", path, body, tally)

        await in_parallel(4, work())
        await harmless_schemas(client)


async def numbers(port: int, tally: Tally) -> None:
    """Bounds, constants and choices at the ends of what numbers can be, in schemas of all endpoints."""
    async with httpx.AsyncClient(base_url=f"http://{HOST}:{port}", timeout=60) as client:
        await in_parallel(4, (whole_answer(client, "POST", path, body, tally) for path, body in numeric_schemas()))
        await harmless_schemas(client)


async def triggers(port: int, tally: Tally) -> None:
    """Patterns that are huge when written out, and many that are slow on every token."""
    async with httpx.AsyncClient(base_url=f"http://{HOST}:{port}", timeout=120) as client:
        await in_parallel(4, (whole_answer(client, "POST", path, body, tally) for path, body in trigger_bombs()))


async def greedy(port: int, tally: Tally) -> None:
    """Answers that ask for all probabilities of all tokens; then 40 streams of them that are never read."""
    async with httpx.AsyncClient(base_url=f"http://{HOST}:{port}", timeout=120) as client:
        await in_parallel(4, (whole_answer(client, "POST", path, body, tally) for path, body in greedy_answers()))
    held: list[socket.socket] = []
    loop = asyncio.get_running_loop()
    body = b'{"prompt":"x","n_predict":400,"n_probs":500,"stream":true,"ignore_eos":true}'
    try:
        for _ in range(40):
            one = socket.socket()
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.setblocking(False)
            await loop.sock_connect(one, (HOST, port))
            await loop.sock_sendall(one, post("/completion", body))
            held.append(one)
            tally.statuses["unread"] += 1
        await asyncio.sleep(25)
    finally:
        for one in held:
            one.close()


async def upgraded(port: int, tally: Tally) -> None:
    """Bodies behind a wish to speak another protocol, which must not become requests of their own."""

    async def one(data: bytes, n_answers: int) -> None:
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(data)
        answer = b""
        try:
            async with asyncio.timeout(3):
                while chunk := await reader.read(65536):
                    answer += chunk
        except (TimeoutError, OSError):
            pass
        writer.transport.abort()
        n = answer.count(b"HTTP/1.1 ")
        tally.count(answer[9:12].decode("latin-1") or "closed", repr(data[:120]), answer[:4096])
        if n != n_answers:
            tally.bad.append(f"{n} answers instead of {n_answers} to {data[:300]!r}: {answer[:300]!r}")

    await in_parallel(8, (one(data, n) for data, n in upgrades()))


async def held_bodies(port: int, tally: Tally) -> None:
    """300 connections that each send 9.5 MiB of a body of 10, and wait."""
    held: list[asyncio.StreamWriter] = []
    part = b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % MOST + b" " * (
        9 * MOST // 10
    )

    async def hold() -> None:
        try:
            _, writer = await asyncio.open_connection(HOST, port)
            held.append(writer)
            writer.write(part)
            async with asyncio.timeout(20):
                await writer.drain()
            tally.statuses["sent"] += 1
        except TimeoutError:
            tally.statuses["paused"] += 1
        except OSError:
            tally.statuses["refused"] += 1

    try:
        await in_parallel(100, (hold() for _ in range(300)))
        for _ in range(20):  # who asks for something small is still served
            await exchange(port, [post("/tokenize", b'{"content": "x"}')], tally, "tokenize among held bodies")
    finally:
        for writer in held:
            writer.transport.abort()


async def hosts(port: int, tally: Tally) -> None:
    """Pages of other sites whose names lead to this machine, and requests with two hosts: nothing is served."""

    async def one(data: bytes) -> None:
        own = Tally()
        await exchange(port, [data], own, repr(data[:100]))
        tally.statuses += own.statuses
        if not {*own.statuses} <= {"400", "403"}:
            tally.bad.append(f"{[*own.statuses]} for {data[:150]!r}")

    await in_parallel(8, (one(data) for data in strangers()))


async def framing(port: int, tally: Tally) -> None:
    """120 MB of extensions, trailers and lengths of chunks around bodies of next to nothing."""
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    sent: Counter[str] = Counter()

    def parts(kind: str, first: bytes, more: bytes) -> Iterable[bytes]:
        yield head + first
        for _ in range(120_000_000 // len(more)):
            sent[kind] = max(sent[kind], sent[kind] + len(more))
            yield more

    kinds = framings()
    await in_parallel(4, (exchange(port, parts(k, *kinds[k]), tally, f"framing: {k}") for k in [*kinds] * 3))
    for kind, n in sent.items():
        if n >= 3 * 119_000_000:
            tally.bad.append(f"{n} bytes of {kind} were taken")


async def places(port: int, tally: Tally) -> None:
    """References to places that are none, and biases of 20,000 texts."""
    async with httpx.AsyncClient(base_url=f"http://{HOST}:{port}", timeout=60) as client:
        await in_parallel(4, (whole_answer(client, "POST", path, body, tally) for path, body in references()))
        await harmless_schemas(client)


async def tools(port: int, tally: Tally) -> None:
    """Tools that are called with patterns and paths without end; commands that sleep while a file is read."""
    async with httpx.AsyncClient(base_url=f"http://{HOST}:{port}", timeout=90) as client:

        async def call(body: dict[str, Any]) -> httpx.Response | None:
            began, what = time.perf_counter(), json.dumps(body)[:160]
            try:
                answer = await client.post("/tools", json=body)
            except httpx.HTTPError as error:
                tally.count(type(error).__name__, what)
                return None
            tally.statuses[str(answer.status_code)] += 1
            tally.slow.append((time.perf_counter() - began, what))
            if "root:x:0" in answer.text and body["tool"] != "exec_shell_command":
                tally.bad.append(f"a file of the system was read by {what}")
            return answer

        async def unread(body: dict[str, Any]) -> None:
            await call(body)

        await in_parallel(4, (unread(body) for body in tool_calls()))
        await call({"tool": "write_file", "params": {"path": "note.txt", "content": "x"}})
        sleeping = [
            asyncio.ensure_future(call({"tool": "exec_shell_command", "params": {"command": "sleep 8", "timeout": 8}}))
            for _ in range(24)
        ]
        await asyncio.sleep(1)
        began = time.perf_counter()
        answer = await call({"tool": "read_file", "params": {"path": "note.txt"}})
        if answer is None or answer.status_code != 200 or time.perf_counter() - began > 5:
            tally.bad.append(f"read_file took {time.perf_counter() - began:.1f} s beside 24 commands that sleep")
        await asyncio.gather(*sleeping)


HARMFUL = ("clear-site-data", "strict-transport-security", "service-worker-allowed", "refresh", "link", "set-cookie")


async def proxied(port: int, tally: Tally) -> None:
    """Servers behind /cors-proxy: headers for the page's own site, endless headers, bombs, answers that are none."""
    bad_headers = b"".join(b"%s: x\r\n" % name.encode() for name in HARMFUL)
    bomb = zlib.compress(bytes(1 << 28), 9, wbits=31)
    said = {
        "/headers": b"HTTP/1.1 200 OK\r\n" + bad_headers + b"Content-Length: 2\r\n\r\nok",
        "/bomb": b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%s" % (len(bomb), bomb),
        "/status": b"HTTP/1.1 999 X\r\nContent-Length: 0\r\n\r\n",
        "/two": b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\naHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nb",
        "/none": b"\x00\xff" * 1000,
    }

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split(b" ")[1].decode()
            if path in said:
                writer.write(said[path])
                await writer.drain()
            writer.write(b"" if path in said else b"HTTP/1.1 200 OK\r\n")
            while path not in said:  # headers, or a body, without end
                writer.write(b"X-Endless: %s\r\n" % (b"x" * 60_000))
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    upstream = await asyncio.start_server(serve, HOST, 0)
    where = f"http://{HOST}:{upstream.sockets[0].getsockname()[1]}"
    async with httpx.AsyncClient(base_url=f"http://{HOST}:{port}", timeout=60) as client:

        async def one(path: str) -> None:
            try:
                async with client.stream("GET", "/cors-proxy", params={"url": where + path}) as answer:
                    tally.statuses[str(answer.status_code)] += 1
                    if shown := [name for name in HARMFUL if name in answer.headers]:
                        tally.bad.append(f"/cors-proxy passes on {', '.join(shown)}")
                    async for _ in answer.aiter_raw():
                        pass
            except httpx.HTTPError as error:
                tally.statuses[type(error).__name__] += 1

        await in_parallel(8, (one(path) for path in [*said, "/endless"] * 10))
    upstream.close()


LIES: dict[type[Request], Callable[[int], Response]] = {
    DeviceCount: lambda n: Number(n % 2**32),
    GetAlignment: Number,
    GetMaxSize: Number,
    GetDeviceMemory: lambda n: DeviceMemory(n, n // 3),
    AllocBuffer: lambda n: AllocResponse(n, n),
    BufferGetBase: Number,
}


class LyingWorker(ScriptedWorker):
    """Closes connections whose requests its own lies have led astray."""

    def _answer(self, request: Request, bulk: bytes) -> bytes | None:
        try:
            return super()._answer(request, bulk)
        except (AssertionError, LookupError):
            raise EOFError from None


def liar(kind: type[Request], number: int) -> ScriptedWorker:
    """A worker that answers one kind of question with a number that cannot be."""
    answer = write_response(COMMANDS[kind], LIES[kind](number))
    return LyingWorker(own=True, before=lambda request, _: answer if isinstance(request, kind) else None)


async def cluster(port: int, tally: Tally) -> None:
    """Unauthorized layer moves; workers that join with invalid fields, or freeze."""
    async with httpx.AsyncClient(base_url=f"http://{HOST}:{port}", timeout=90) as client:

        async def ask(path: str, body: dict[str, Any], **headers: str) -> int:
            began = time.perf_counter()
            answer = await client.post(path, content=json.dumps(body), headers=headers)
            what = f"{path} {str(body)[:100]}"
            tally.count(str(answer.status_code), what, str(dict(answer.headers)).encode() + answer.content[:300])
            tally.slow.append((time.perf_counter() - began, what))
            return answer.status_code

        for path in ("/cluster/layers", "/cluster/predict"):
            for token in ("", "x", TOKEN[:-1]):
                more = {"X-Forwarded-For": "10.0.0.9", "X-Cluster-Token": token}
                if await ask(path, {"devices": []}, **more) != 403:
                    tally.bad.append(f"{path} was served for another machine without the token")
        for body in joins():
            await ask("/cluster/join", body, **MEMBER)

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        frozen = [await asyncio.start_server(silent, HOST, 0) for _ in range(60)]
        endpoints = [f"{HOST}:{one.sockets[0].getsockname()[1]}" for one in frozen]
        joining = [asyncio.ensure_future(ask("/cluster/join", {"endpoint": each}, **MEMBER)) for each in endpoints]
        await asyncio.sleep(1)
        began = time.perf_counter()
        await ask("/cluster/drain", {"endpoint": "h:9"}, **MEMBER)
        if time.perf_counter() - began > MOST_DRAIN_SECONDS:
            tally.bad.append(f"a drain took {time.perf_counter() - began:.1f} s beside workers that freeze")
        await asyncio.gather(*joining)
        for one in frozen:
            one.close()


async def liars(port: int, tally: Tally) -> None:
    """Workers with the token that answer with numbers that cannot be, and compute nothing (see CORRUPT)."""
    async with httpx.AsyncClient(base_url=f"http://{HOST}:{port}", timeout=90, headers=MEMBER) as client:
        for kind in LIES:
            for number in (0, 1, 2**32 - 1, 2**63, 2**64 - 1):
                with liar(kind, number) as worker:
                    for path in ("/cluster/join", "/cluster/drain"):
                        answer = await client.post(path, json={"endpoint": str(worker.endpoint)})
                        what = f"{path} of a worker that answers {kind.__name__} with {number}"
                        tally.count(str(answer.status_code), what, str(dict(answer.headers)).encode() + answer.content)


async def media(port: int, tally: Tally) -> None:
    """2,000 damaged pictures and sounds, some of them bombs, through five APIs."""
    limits = httpx.Limits(max_connections=8, max_keepalive_connections=8)
    async with httpx.AsyncClient(base_url=f"http://{HOST}:{port}", timeout=120, limits=limits) as client:
        await in_parallel(
            8,
            (whole_answer(client, "POST", path, body, tally, kind) for path, body, kind in requests(random.Random(5))),
        )


async def harmless_schemas(client: httpx.AsyncClient) -> None:
    """Send as many harmless schemas as a server remembers, so that it forgets those of the bombs."""
    for i in range(40):
        schema = {"type": "object", "properties": {f"p{i}": {"type": "integer"}}}
        await client.post("/completion", json={"prompt": "x", "n_predict": 1, "json_schema": schema})


PHASES: dict[str, Callable[[int, Tally], Awaitable[None]]] = {
    "malformed": malformed,
    "slow-loris": slow_loris,
    "connections": connections,
    "100 MB": huge_bodies,
    "deep": deep,
    "long texts": texts,
    "schemas": schemas,
    "numbers": numbers,
    "triggers": triggers,
    "probabilities": greedy,
    "upgrades": upgraded,
    "held bodies": held_bodies,
    "hosts": hosts,
    "framing": framing,
    "places": places,
    "tools": tools,
    "proxy": proxied,
    "cluster": cluster,
    "liars": liars,
    "media": media,
}
WITH_PROJECTOR = {"media"}
"""Phases whose server has a small model with encoders of pictures and sounds."""
CORRUPT = {"liars"}
"""Phases in which a worker that was let in computes nonsense: only answers after them are compared."""


# --- watching ---------------------------------------------------------------------------------------------------------

Looks = list[tuple[float, float]]
Compared = list[tuple[float, str]]


def look(port: int, over: Event, found: multiprocessing.Queue[tuple[float, float]]) -> None:
    """Asks for /health on a new connection each time: (when, seconds it took)."""
    while not over.is_set():
        began = time.monotonic()
        try:
            with socket.create_connection((HOST, port), 10) as connection:
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                healthy = connection.recv(64).startswith(b"HTTP/1.1 200")
        except OSError:
            healthy = False
        took = time.monotonic() - began
        found.put((began, took if healthy else 10.0))
        time.sleep(max(0.0, LOOK_SECONDS - took))


def compare(port: int, over: Event, found: multiprocessing.Queue[tuple[float, str]]) -> None:
    """Asks for the same greedy answer once a second: (when, `right`, `503`, or what was wrong)."""
    right = httpx.post(f"http://{HOST}:{port}/completion", json=QUESTION, timeout=60).json()["content"]
    while not over.is_set():
        began = time.monotonic()
        try:
            answer = httpx.post(f"http://{HOST}:{port}/completion", json=QUESTION, timeout=60)
            if answer.status_code == 503 and "retry-after" in answer.headers:
                said = "503"
            elif answer.status_code != 200:
                said = answer.text[:300]
            else:
                said = "right" if answer.json()["content"] == right else f"not the same: {answer.text[:300]}"
        except httpx.HTTPError as error:
            said = f"{type(error).__name__}: {error}"
        found.put((began, said))
        time.sleep(max(0.0, 1 - (time.monotonic() - began)))


@dataclass
class Phase:
    """One phase as it went; times of `time.monotonic`, memory in bytes."""

    name: str
    tally: Tally
    began: float
    ended: float
    settled: float
    before: int
    most: int
    after: int


async def settle(one: Server, seconds: float = 4.0, most: float = 20.0) -> None:
    """Waits until the server does nothing but answer /health; at least `seconds`."""
    began = time.monotonic()
    while time.monotonic() - began < most:
        used = one.cpu_seconds()
        await asyncio.sleep(1)
        if time.monotonic() - began >= seconds and one.cpu_seconds() - used < 0.3:
            return


async def go_through(one: Server, port: int, name: str, attack: Callable[[int, Tally], Awaitable[None]]) -> Phase:
    """One attack on `port`, and the quiet time after it; memory is that of process `one`."""
    tally, before = Tally(), resident(one.pid)
    began, most = time.monotonic(), before

    async def weigh() -> None:
        nonlocal most
        while True:
            most = max(most, resident(one.pid))
            await asyncio.sleep(0.1)

    weighing = asyncio.ensure_future(weigh())
    await attack(port, tally)
    ended = time.monotonic()
    weighing.cancel()
    await settle(one)
    return Phase(name, tally, began, ended, time.monotonic(), before, most, resident(one.pid))


async def warm_up(one: Server) -> None:
    """Good requests of all kinds and lengths, so that what a server makes once, such as programs, is there."""
    async with httpx.AsyncClient(base_url=f"http://{HOST}:{one.port}", timeout=600) as client:
        for path, body in (*BODIES, *answers()):
            await client.post(path, json=body)
        for path in PATHS:
            await client.get(path)
        rng, unread = random.Random(3), Tally()
        await in_parallel(4, (whole_answer(client, "POST", *mutated(rng), unread) for _ in range(1500)))
        await harmless_schemas(client)

        async def answer(prompt: str) -> None:
            await client.post("/completion", json={"prompt": prompt, "n_predict": 24})

        await in_parallel(
            4, (answer(f"{n} word " * n) for n in (1, 2, 3, 5, 8, 13, 20, 30, 45, 70, 100, 160, 230, 350, 500) * 2)
        )
        # Four at once fill every cell of the context, whose memory is taken when it is first written.
        await in_parallel(4, (answer(f"{n}" + " word" * 2_000) for n in range(4)))


async def warm_up_media(one: Server) -> None:
    """A part of the phase `media`: shapes of pictures are compiled, decoders are loaded, memory is taken."""
    async with httpx.AsyncClient(base_url=f"http://{HOST}:{one.port}", timeout=600) as client:
        unread, found = Tally(), requests(random.Random(6), 600)
        await in_parallel(8, (whole_answer(client, "POST", path, body, unread, kind) for path, body, kind in found))


def milliseconds(looks: Looks, began: float, ended: float) -> tuple[float, float, float]:
    """Median, 99th percentile and worst of the looks in a stretch of time."""
    took = [1e3 * seconds for when, seconds in looks if began <= when < ended] or [0.0]
    return percentile(took, 0.5), percentile(took, 0.99), max(took)


def drained(found: multiprocessing.Queue[Any], into: list[Any]) -> None:
    """Take everything that a watcher has put there so far."""
    while not found.empty():
        into.append(found.get())


def watcher(
    target: Callable[..., None], port: int
) -> tuple[Event, multiprocessing.Queue[Any], multiprocessing.Process]:
    """A started process that watches until its event is set, and then puts what it saw in the queue."""
    over: Event = multiprocessing.Event()
    found: multiprocessing.Queue[Any] = multiprocessing.Queue()
    process = multiprocessing.Process(target=target, args=(port, over, found), daemon=True)
    process.start()
    return over, found, process


def row(phase: Phase, looks: Looks, compared: Compared) -> dict[str, Any]:
    """A phase's line of the table."""
    return {
        "phase": phase.name,
        "seconds": phase.ended - phase.began,
        "statuses": dict(sorted(phase.tally.statuses.items())),
        "health_ms": milliseconds(looks, phase.began, phase.ended),
        "health_idle_ms": milliseconds(looks, phase.ended + 1, phase.settled),
        "memory_mib": [m >> 20 for m in (phase.before, phase.most, phase.after)],
        "answers": dict(
            Counter(w if w in ("right", "503") else "wrong" for t, w in compared if phase.began <= t < phase.settled)
        ),
    }


def shown(row: dict[str, Any]) -> str:
    """The line as Markdown."""
    answered = ", ".join(f"{n}× {status}" for status, n in row["statuses"].items())
    took, idle = (" / ".join(f"{ms:.1f}" for ms in row[key]) for key in ("health_ms", "health_idle_ms"))
    memory = " / ".join(map(str, row["memory_mib"]))
    right = ", ".join(f"{n} {what}" for what, n in row["answers"].items())
    return f"| {row['phase']} | {row['seconds']:.0f} | {answered} | {took} | {idle} | {memory} | {right} |"


@dataclass
class Record:
    """Rows, faults and observations of the phases so far."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    looks: Looks = field(default_factory=list)
    compared: Compared = field(default_factory=list)

    def run(
        self, one: Server, names: Iterable[str], warm_up: Callable[[Server], Awaitable[None]], n_slowest: int
    ) -> None:
        """Run phases on a server, and print their rows and their slowest requests."""
        looking, comparing = watcher(look, one.port), watcher(compare, one.port)
        asyncio.run(warmed_up(one, warm_up))
        base = last = resident(one.pid)
        for name in names:
            phase = asyncio.run(go_through(one, one.port, name, PHASES[name]))
            last = phase.after
            drained(looking[1], self.looks)
            drained(comparing[1], self.compared)
            if name in CORRUPT:
                self.compared = [each for each in self.compared if not phase.began - 1 <= each[0] < phase.ended]
            self.rows.append(row(phase, self.looks, self.compared))
            print(shown(self.rows[-1]), flush=True)
            for took, what in sorted(phase.tally.slow, reverse=True)[:n_slowest]:
                print(f"    {took:.1f} s for {what[:160]}", flush=True)
            self.faults += phase.tally.bad
            if self.rows[-1]["health_ms"][1] > MOST_MS:
                self.faults.append(
                    f"{name}: /health took {self.rows[-1]['health_ms'][1]:.0f} ms at the 99th percentile"
                )
        for over, _, process in (looking, comparing):
            over.set()
            process.join(70)
        if last - base > MOST_KEPT:
            self.faults.append(f"{(last - base) >> 20} MiB of memory stay")


async def warmed_up(one: Server, warm_up: Callable[[Server], Awaitable[None]]) -> None:
    """Await a warm-up, and until the server does nothing more."""
    await warm_up(one)
    await settle(one)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--only", choices=PHASES, action="append")
    parser.add_argument("--slowest", type=int, default=3, help="how many of each phase's slowest requests to print")
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    started = time.monotonic()
    record = Record()
    names = flags.only or list(PHASES)
    print("| phase | s | answered | /health p50 / p99 / worst ms | idle after | MiB before / most / after | answers |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        options = ["-np", "4", "-c", "8192", "-t", "2", *CACHE, "--tools", "all", "--ui-mcp-proxy"]
        own = [name for name in names if name not in WITH_PROJECTOR]
        if own:
            tools_folder, environment = ["--tools-folder", folder], {"LLAMADO_CLUSTER_TOKEN": TOKEN}
            with server("llamado", model_path(flags.model), [*options, *tools_folder], environment) as one:
                record.run(one, own, warm_up, flags.slowest)
        if len(own) < len(names):
            model, projector = write_models(Path(folder))
            options = ["--mmproj", str(projector), "-np", "4", "-c", "2048", "-t", "2", *CACHE]
            with server("llamado", model, options, {"LLAMA_MEDIA_MARKER": MARKER}) as one:
                record.run(one, [name for name in names if name in WITH_PROJECTOR], warm_up_media, flags.slowest)
    looks, compared, faults = record.looks, record.compared, record.faults
    faults += [f"answer: {what}" for _, what in compared if what not in ("right", "503")]
    print(f"{time.monotonic() - started:.0f} s in all; {len(looks)} looks at /health, {len(compared)} answers compared")
    if flags.json:
        flags.json.write_text(json.dumps({"phases": record.rows, "faults": faults}, indent=2) + "\n")
    for fault, n in Counter(faults).most_common(30):
        print(f"FAULT ({n}×): {fault}")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
