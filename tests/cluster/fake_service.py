"""A fake worker or server without a model: `fake_service.py ROLE PORT [option …]`.

A `worker` answers HELLO, a `server` answers /health. Each appends lines to the file FAKE_EVENTS: `NAME began`, `NAME
ended` (by SIGTERM), and for POST /cluster/drain the path, token and endpoint. SIGUSR1 makes it crash with exit code 3.
Options: `stubborn` ignores SIGTERM; `fails` prints an error and exits with code 3 at once; `killed` kills itself by
SIGKILL at once; `loading` keeps a server at 503; `full` makes a server refuse to drain a worker.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

role, port, options = sys.argv[1], int(sys.argv[2]), sys.argv[3:]


def event(what: str) -> None:
    with open(os.environ["FAKE_EVENTS"], "a") as file:
        file.write(f"{role}{port} {what}\n")


def end(*_: object) -> None:
    event("ended")
    os._exit(0)


def crash(*_: object) -> None:
    print("error: it was too much", flush=True)
    os._exit(3)


if "fails" in options:
    print("error: nothing works", flush=True)
    raise SystemExit(3)
if "killed" in options:
    os.kill(os.getpid(), signal.SIGKILL)
signal.signal(signal.SIGTERM, signal.SIG_IGN if "stubborn" in options else end)
signal.signal(signal.SIGUSR1, crash)
with socket.create_server(("127.0.0.1", port)) as listener:
    event("began")
    print(f"{role} listens", flush=True)
    while True:
        connection, _ = listener.accept()
        with connection:
            request = connection.recv(4096)
            while request.startswith(b"POST") and not request.endswith(b"}"):
                request += connection.recv(4096)
            if request.startswith(b"POST"):
                head, _, body = request.decode().partition("\r\n\r\n")
                token = next(line for line in head.split("\r\n") if line.lower().startswith("x-cluster-token: "))
                event(f"{head.split()[1]} {token.split()[1]} {json.loads(body)['endpoint']}")
            if role == "worker":
                connection.sendall((28).to_bytes(8, "little") + bytes([7, 0, 0, 0]) + bytes(24))
            elif "loading" in options or ("full" in options and request.startswith(b"POST")):
                message = "Loading model" if "loading" in options else "the others have no room"
                error = {"code": 503, "message": message, "type": "unavailable_error"}
                body = json.dumps({"error": error}).encode()
                connection.sendall(
                    b"HTTP/1.1 503 X\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body
                )
            else:
                body = b'{"status": "ok"}'
                connection.sendall(
                    b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body
                )
