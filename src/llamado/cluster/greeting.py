"""Greeting of a worker by HELLO. An open port is not enough: a frozen process also accepts connections."""

from __future__ import annotations

import enum
import socket
import ssl
import time
from collections.abc import Callable
from typing import NamedTuple

from llamado.client.health import Phase, State
from llamado.rpc.wire import (
    COMMANDS,
    LATEST,
    SUPPORTED_VERSIONS,
    DeviceCount,
    Hello,
    HelloResponse,
    ResponseReader,
    Upgrade,
    WireError,
    negotiate,
    write_request,
)


class HelloResult(enum.Enum):
    """Result of a HELLO request."""

    GREETED = "greeted"
    UNREACHED = "no connection within the timeout"
    SILENT = "connected, but no greeting within the timeout"
    CLOSED = "closed the connection"
    FAILED = "the connection failed"
    TLS = "TLS"
    HTTP = "HTTP"
    OTHER = "another protocol"
    CERTIFICATE = "untrusted certificate, on either side"


class Greeting(NamedTuple):
    result: HelloResult
    version: tuple[int, int, int] | None = None
    detail: str = ""


def probe_hello(host: str, port: int, timeout: float, tls: Callable[[], ssl.SSLContext] | None = None) -> Greeting:
    """Send HELLO and return the greeting. With `tls`, which returns a context, connect by TLS."""
    result = HelloResult.UNREACHED
    deadline = time.monotonic() + timeout
    try:
        with socket.create_connection((host, port), timeout) as plain:
            result = HelloResult.SILENT
            if tls is None:
                return _exchange(plain, deadline)
            with tls().wrap_socket(plain, server_hostname=host) as wrapped:
                return _exchange(wrapped, deadline)
    except ssl.SSLCertVerificationError as error:
        return Greeting(HelloResult.CERTIFICATE, detail=error.verify_message or str(error))
    except ssl.SSLError as error:
        refused = "CERTIFICATE" in str(error.reason or error).upper()
        result = HelloResult.CERTIFICATE if refused else HelloResult.FAILED
        return Greeting(result, detail=str(error.reason or error))
    except TimeoutError:
        return Greeting(result)
    except (OSError, ValueError) as error:
        return Greeting(HelloResult.FAILED, detail=getattr(error, "strerror", None) or str(error))


def _exchange(connection: socket.socket, deadline: float) -> Greeting:
    reader = ResponseReader()
    reader.expect(COMMANDS[Hello])
    connection.sendall(write_request(Hello()))
    received = b""
    while True:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        data = connection.recv(256)
        received += data
        if other := _other_protocol(received):
            return Greeting(other)
        if not data:
            return Greeting(HelloResult.CLOSED)
        reader.feed(data)
        try:
            found = reader.next()
        except WireError as error:
            return Greeting(HelloResult.OTHER, detail=str(error))
        if found is not None and isinstance(found[1], HelloResponse):
            if found[1].is_ours:
                # A client that disconnects right after HELLO looks like one of ggml's that needs another version.
                connection.sendall(write_request(Upgrade(LATEST.major)) + write_request(DeviceCount()))
                connection.recv(256)
            return Greeting(HelloResult.GREETED, (found[1].major, found[1].minor, found[1].patch))


def _other_protocol(received: bytes) -> HelloResult | None:
    """Return the other protocol that these bytes begin, None if they may be a greeting."""
    if received[:1] == b"\x15" and received[1:2] in (b"\x03", b""):
        return HelloResult.TLS  # an alert
    if received.startswith(b"HTTP/"):
        return HelloResult.HTTP
    return None


def greet(address: tuple[str, int], timeout: float, tls: ssl.SSLContext | None = None) -> State:
    """Return the state of a worker: ready if it answers HELLO within `timeout` seconds. With `tls`, connect by TLS."""
    result, version, detail = probe_hello(*address, timeout, None if tls is None else lambda: tls)
    match result:
        case HelloResult.UNREACHED:
            return State(Phase.CONNECTING, f"no connection within {timeout:.2g} s; is the address right?")
        case HelloResult.SILENT:
            return State(
                Phase.CONNECTING,
                f"accepts connections, but does not greet within {timeout:.2g} s (ggml's worker serves one client at a "
                "time: is another one connected?)",
            )
        case HelloResult.FAILED | HelloResult.CERTIFICATE:
            return State(Phase.CONNECTING, f"cannot connect: {detail}")
        case HelloResult.CLOSED:
            return State(Phase.UNHEALTHY, "closes the connection instead of greeting: no ggml RPC worker?")
        case HelloResult.TLS | HelloResult.HTTP | HelloResult.OTHER:
            return State(Phase.UNHEALTHY, f"something else answers there: {detail or result.value}")
        case HelloResult.GREETED if version is not None and negotiate(version) is None:
            theirs = ".".join(map(str, version))
            return State(
                Phase.UNHEALTHY,
                f"it speaks RPC {theirs}, this program {SUPPORTED_VERSIONS}: use a llama.cpp of one of these",
            )
    return State(Phase.READY, "ready")
