"""A fake model server: returns its name, becomes ready late, streams slowly, dies on request.

`python fake_model.py NAME PORT_OR_SOCKET [ready=SECONDS|FILE] [fail=CODE] [stubborn] [count=FILE] [metrics=FILE|hang]`
Requests: `{"delay": S, "stream": N, "seen": FILE, "die": "before" | "after N chunks", "signal": "SIGKILL", "echo": 1}`.
"stream" may be true; then `"steps": N` has the number.
`seen` gets a byte for each part of the stream that has arrived; the next part is made after that.
A form is answered as with `echo`. With `ready=FILE` it loads until the file exists. `count` gets a line per start and
per request.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

NAME, WHERE = sys.argv[1], sys.argv[2]
OPTIONS = dict(a.partition("=")[::2] for a in sys.argv[3:])
BEGAN = time.monotonic()
STATE = {"requests": 0, "cancelled": 0, "active": 0, "asleep": False}


def loads() -> bool:
    ready = OPTIONS.get("ready", "0")
    return not os.path.exists(ready) if "/" in ready else time.monotonic() < BEGAN + float(ready)


def log(text: str) -> None:
    if "count" in OPTIONS:
        with open(OPTIONS["count"], "a") as file:
            file.write(text + "\n")


def reply(status: int, body: object, kind: str = "application/json") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


USED: set[str] = set()
"""Ids of requests that carried a usage id."""


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            break
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines) if k}
        path = first.split(" ")[1]
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        route = path.partition("?")[0]
        USED.add(headers.get("x-llamado-usage-id", ""))
        if route in ("/health", "/ready"):
            if loads():
                writer.write(reply(503, {"error": {"code": 503}, "progress": 0.5, "stage": "pretending"}))
            else:
                writer.write(reply(200, {"status": "ok"}))
        elif route == "/v1/models":
            writer.write(reply(200, {"data": [{"id": NAME, "meta": {"n_params": 7}}]}))
        elif route == "/props":
            writer.write(reply(200, {"name": NAME, "pid": os.getpid(), "is_sleeping": STATE["asleep"]}))
        elif route == "/usage":
            known = path.partition("id=")[2] in USED
            writer.write(reply(200, {"total_tokens": 42}) if known else reply(404, {"error": {"code": 404}}))
        elif route == "/state":
            writer.write(reply(200, {**STATE, "name": NAME, "pid": os.getpid()}))
        elif route == "/metrics" and OPTIONS.get("metrics") == "hang":
            await asyncio.sleep(600)
        elif route == "/metrics" and "metrics" in OPTIONS:
            writer.write(reply(200, Path(OPTIONS["metrics"]).read_bytes(), "text/plain"))
        elif route == "/live/events":
            if not await work({"stream": 1 << 30, "delay": 0.05}, b"", headers, first, reader, writer):
                return
        elif route == "/metrics":
            writer.write(reply(501, {"error": {"code": 501}}))
        else:
            STATE["requests"] += 1
            STATE["active"] += 1
            log(f"request {NAME}")
            try:
                is_form = headers.get("content-type", "").startswith("multipart/")
                asked = {"echo": 1} if is_form else json.loads(body or b"{}")
                if not await work(asked, body, headers, first, reader, writer):
                    return
            finally:
                STATE["active"] -= 1
        await writer.drain()
    writer.close()


def end_by(asked: dict[str, object]) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.kill(os.getpid(), signal.Signals[str(asked.get("signal", "SIGKILL"))])


async def work(
    asked: dict[str, object],
    body: bytes,
    headers: dict[str, str],
    first: str,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> bool:
    die = str(asked.get("die", ""))
    once = asked.get("once")
    if die and (once is None or not os.path.exists(str(once))):
        if once is not None:
            open(str(once), "w").close()
        if die == "before":
            end_by(asked)
    else:
        die = ""
    if "sleep" in asked:
        STATE["asleep"] = bool(asked["sleep"])
    gone = asyncio.ensure_future(reader.read(1))
    steps = int(str(asked.get("steps", asked.get("stream", 0))))
    delay = float(str(asked.get("delay", 0)))
    try:
        if steps:
            kind = str(asked.get("type", "text/event-stream"))
            writer.write(f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n\r\n".encode())
            for i in range(steps):
                if die == str(i):
                    await writer.drain()
                    await asyncio.sleep(0.05)
                    end_by(asked)
                await asyncio.wait([gone], timeout=delay)
                while "seen" in asked and not gone.done() and os.path.getsize(str(asked["seen"])) < i:
                    await asyncio.sleep(0.002)
                if gone.done():
                    STATE["cancelled"] += 1
                    return False
                part = f"data: {json.dumps({'name': NAME, 'i': i})}\n\n".encode()
                writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
                await writer.drain()
            writer.write(b"0\r\n\r\n")
        else:
            await asyncio.wait([gone], timeout=delay)
            if gone.done():
                STATE["cancelled"] += 1
                return False
            if asked.get("unframed"):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\nuntil the end")
                await writer.drain()
                writer.close()
                return False
            big = int(str(asked.get("big", 0)))
            told = {"name": NAME, "pid": os.getpid(), "text": "x" * big}
            if asked.get("echo"):
                told |= {"headers": headers, "first": first, "body": body.decode("latin-1")}
            writer.write(reply(int(str(asked.get("status", 200))), told))
            await writer.drain()
        return True
    finally:
        gone.cancel()
        try:
            await gone
        except (asyncio.CancelledError, ConnectionError):
            pass


async def main() -> None:
    if "stubborn" in OPTIONS:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if WHERE.endswith(".sock"):
        server = await asyncio.start_unix_server(answer, WHERE, limit=1 << 26)
    else:
        server = await asyncio.start_server(answer, "127.0.0.1", int(WHERE), limit=1 << 26)
    log(f"start {NAME} {os.getpid()}")
    print(f"{NAME} listens", flush=True)
    async with server:
        await server.serve_forever()


if "fail" in OPTIONS:
    log(f"fail {NAME}")
    print("error: made to fail", flush=True)
    sys.exit(int(OPTIONS["fail"]))
asyncio.run(main())
