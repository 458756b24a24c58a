"""Servers, sockets and certificates for tests of `llamado doctor`, each with one fault or none."""

from __future__ import annotations

import socket
import ssl
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme
import uvicorn

for folder in ("server", "client", "rpc"):
    sys.path.append(str(Path(__file__).parents[1] / folder))

from fakes import FakeEngine, served  # noqa: E402

from llamado.http.access import AccessRules  # noqa: E402
from llamado.server.app import create_app  # noqa: E402
from llamado.server.state import ServerState  # noqa: E402
from llamado.server.switches import Switches  # noqa: E402


@contextmanager
def listening(host: str = "127.0.0.1", tls: Certificates | None = None, **given: Any) -> Iterator[tuple[str, Any]]:
    """Run a llamado server with a fake engine; yield its URL and state.

    `given`: `loaded`, `keys`, `engine`, and fields of `Switches`.
    """
    engine = given.pop("engine", None) or FakeEngine()
    loaded, keys = given.pop("loaded", True), given.pop("keys", ())
    state = ServerState(access=AccessRules(api_keys=keys), switches=Switches(**given))
    if loaded:
        state.served = served(engine)
    try:
        sock = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        if ":" not in host:
            raise
        pytest.skip(f"this machine has no IPv6: {error}")
    port = sock.getsockname()[1]
    files = {} if tls is None else {"ssl_certfile": str(tls.cert), "ssl_keyfile": str(tls.key)}
    config = uvicorn.Config(lambda: create_app(state), factory=True, log_config=None, lifespan="off", **files)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([sock],), daemon=True)
    thread.start()
    shown = f"[{host}]" if ":" in host else host
    try:
        yield f"{'https' if tls else 'http'}://{shown}:{port}", state
    finally:
        server.should_exit = True
        thread.join(60)
        engine.close()
        sock.close()


@contextmanager
def accepting() -> Iterator[int]:
    """Yield a port where the system accepts connections but no program responds."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock.getsockname()[1]


@contextmanager
def swallowing() -> Iterator[int]:
    """Yield a port that neither accepts nor refuses connections, as behind a firewall that drops packets."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(0)
        waiting = []
        for _ in range(2):
            other = socket.socket()
            other.setblocking(False)
            other.connect_ex(sock.getsockname())
            waiting.append(other)
        try:
            yield sock.getsockname()[1]
        finally:
            for other in waiting:
                other.close()


@contextmanager
def saying(words: bytes) -> Iterator[int]:
    """Yield a port that answers the first bytes of a client with these, then closes the connection."""
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as sock:
        sock.settimeout(0.05)

        def serve() -> None:
            while not stop.is_set():
                try:
                    connection, _ = sock.accept()
                except TimeoutError:
                    continue
                except OSError:
                    return
                with connection:
                    connection.settimeout(1.0)
                    try:
                        connection.recv(4096)
                        connection.sendall(words)
                    except OSError:
                        pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield sock.getsockname()[1]
        finally:
            stop.set()
            thread.join(60)


class Certificates:
    """Files of a certificate authority and its certificate for 127.0.0.1."""

    def __init__(self, folder: Path) -> None:
        self.authority = trustme.CA()
        issued = self.authority.issue_cert("127.0.0.1", "localhost")
        self.ca, self.cert, self.key = (folder / name for name in ("ca.pem", "cert.pem", "key.pem"))
        self.authority.cert_pem.write_to_path(str(self.ca))
        issued.private_key_pem.write_to_path(str(self.key))
        for blob in issued.cert_chain_pems:
            blob.write_to_path(str(self.cert), append=True)

    def server(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.cert, self.key)
        return context
