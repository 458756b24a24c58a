"""A fake model server: returns its name, becomes ready late, streams slowly, dies on request.

`python fake_model.py NAME PORT_OR_SOCKET [ready=SECONDS|FILE] [fail=CODE] [stubborn] [count=FILE] [metrics=FILE|hang]`
Requests: `{"delay": S, "stream": N, "seen": FILE, "die": "before" | "after N chunks", "signal": "SIGKILL", "echo": 1}`.
"stream" may be true; then `"steps": N` has the number.
`seen` gets a byte for each part of the stream that has arrived; the next part is made after that.
A form is answered as with `echo`. With `ready=FILE` it loads until the file exists. `count` gets a line per start and
per request.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import threading
import time

# Routers start hundreds of these: no module is imported that takes long, such as asyncio.

NAME, WHERE = sys.argv[1], sys.argv[2]
OPTIONS = dict(a.partition("=")[::2] for a in sys.argv[3:])
BEGAN = time.monotonic()
STATE: dict[str, int] = {"requests": 0, "cancelled": 0, "active": 0, "asleep": False}
LOCK = threading.Lock()


def add(name: str, n: int = 1) -> None:
    with LOCK:
        STATE[name] += n


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


class Connection:
    """A client's connection; its requests are answered one after the other."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.buffer = bytearray()

    def serve(self) -> None:
        try:
            while self.answer():
                pass
        except OSError:
            pass
        finally:
            self.sock.close()

    def fill(self) -> bool:
        part = self.sock.recv(1 << 20)
        self.buffer += part
        return bool(part)

    def take(self, size: int) -> bytes:
        part = bytes(self.buffer[:size])
        del self.buffer[:size]
        return part

    def is_gone(self, timeout: float = 0) -> bool:
        """Wait until the client disconnects or sends more; return False after `timeout` seconds."""
        return bool(self.buffer) or bool(select.select([self.sock], [], [], timeout)[0])

    def answer(self) -> bool:
        """Answer one request; return False if it was the last one."""
        while (end := self.buffer.find(b"\r\n\r\n")) < 0:
            if not self.fill():
                return False
        first, *lines = self.take(end + 4).decode("latin-1").split("\r\n")
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines) if k}
        size = int(headers.get("content-length", 0))
        while len(self.buffer) < size:
            if not self.fill():
                return False
        body = self.take(size)
        path = first.split(" ")[1]
        route = path.partition("?")[0]
        send = self.sock.sendall
        USED.add(headers.get("x-llamado-usage-id", ""))
        if route in ("/health", "/ready"):
            if loads():
                send(reply(503, {"error": {"code": 503}, "progress": 0.5, "stage": "pretending"}))
            else:
                send(reply(200, {"status": "ok"}))
        elif route == "/v1/models":
            send(reply(200, {"data": [{"id": NAME, "meta": {"n_params": 7}}]}))
        elif route == "/props":
            send(reply(200, {"name": NAME, "pid": os.getpid(), "is_sleeping": STATE["asleep"]}))
        elif route == "/usage":
            known = path.partition("id=")[2] in USED
            send(reply(200, {"total_tokens": 42}) if known else reply(404, {"error": {"code": 404}}))
        elif route == "/state":
            send(reply(200, {**STATE, "name": NAME, "pid": os.getpid()}))
        elif route == "/metrics" and OPTIONS.get("metrics") == "hang":
            time.sleep(600)
        elif route == "/metrics" and "metrics" in OPTIONS:
            with open(OPTIONS["metrics"], "rb") as file:
                send(reply(200, file.read(), "text/plain"))
        elif route == "/live/events":
            return self.work({"stream": 1 << 30, "delay": 0.05}, b"", headers, first)
        elif route == "/metrics":
            send(reply(501, {"error": {"code": 501}}))
        else:
            add("requests")
            add("active")
            log(f"request {NAME}")
            try:
                is_form = headers.get("content-type", "").startswith("multipart/")
                return self.work({"echo": 1} if is_form else json.loads(body or b"{}"), body, headers, first)
            finally:
                add("active", -1)
        return True

    def work(self, asked: dict[str, object], body: bytes, headers: dict[str, str], first: str) -> bool:
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
        steps = int(str(asked.get("steps", asked.get("stream", 0))))
        delay = float(str(asked.get("delay", 0)))
        send = self.sock.sendall
        if steps:
            kind = str(asked.get("type", "text/event-stream"))
            send(f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n\r\n".encode())
            for i in range(steps):
                if die == str(i):
                    time.sleep(0.05)
                    end_by(asked)
                gone = self.is_gone(delay)
                while "seen" in asked and not gone and os.path.getsize(str(asked["seen"])) < i:
                    gone = self.is_gone(0.002)
                if gone:
                    add("cancelled")
                    return False
                part = f"data: {json.dumps({'name': NAME, 'i': i})}\n\n".encode()
                send(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            send(b"0\r\n\r\n")
            return True
        if self.is_gone(delay):
            add("cancelled")
            return False
        if asked.get("unframed"):
            send(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\nuntil the end")
            return False
        told: dict[str, object] = {"name": NAME, "pid": os.getpid(), "text": "x" * int(str(asked.get("big", 0)))}
        if asked.get("echo"):
            told |= {"headers": headers, "first": first, "body": body.decode("latin-1")}
        send(reply(int(str(asked.get("status", 200))), told))
        return True


def end_by(asked: dict[str, object]) -> None:
    import resource
    import signal

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.raise_signal(signal.Signals[str(asked.get("signal", "SIGKILL"))])


def main() -> None:
    if "stubborn" in OPTIONS:
        import signal

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if WHERE.endswith(".sock"):
        if os.path.exists(WHERE):
            os.unlink(WHERE)
        server = socket.socket(socket.AF_UNIX)
        server.bind(WHERE)
    else:
        server = socket.socket()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", int(WHERE)))
    server.listen(100)
    log(f"start {NAME} {os.getpid()}")
    print(f"{NAME} listens", flush=True)
    while True:
        sock, _ = server.accept()
        if sock.family == socket.AF_INET:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=Connection(sock).serve, daemon=True).start()


if "fail" in OPTIONS:
    log(f"fail {NAME}")
    print("error: made to fail", flush=True)
    sys.exit(int(OPTIONS["fail"]))
main()
