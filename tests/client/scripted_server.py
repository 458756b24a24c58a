"""An HTTP server that does as a test says: each connection is handed to a script."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

Script = Callable[["Exchange"], None]


class Exchange:
    """One request: its line, headers and body, and the connection to answer on."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        head = b""
        while b"\r\n\r\n" not in head:
            data = connection.recv(65536)
            if not data:
                raise ConnectionError
            head += data
        head, _, self.body = head.partition(b"\r\n\r\n")
        self.line, *lines = head.decode().split("\r\n")
        self.headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        while len(self.body) < int(self.headers.get("content-length", 0)):
            self.body += connection.recv(65536)

    @property
    def path(self) -> str:
        return self.line.split()[1]

    def json(self) -> Any:
        return json.loads(self.body)

    def answer(self, status: int, body: Any, **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        extra = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\nConnection: close\r\n{extra}\r\n"
        self.connection.sendall(head.encode() + data)


class ScriptedServer:
    """Listens at once; requests are answered by `script`, which may be changed at any time."""

    def __init__(self, script: Script, port: int = 0) -> None:
        self.script = script
        self.requests: list[Exchange] = []
        self._socket = socket.create_server(("127.0.0.1", port))
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            exchange = Exchange(connection)
            self.requests.append(exchange)
            self.script(exchange)

    def close(self) -> None:
        """Stop listening."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def __enter__(self) -> ScriptedServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
