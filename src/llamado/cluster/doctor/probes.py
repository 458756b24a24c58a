"""Socket probes: connect, HELLO and TLS handshake. They report observations, not findings."""

from __future__ import annotations

import enum
import ipaddress
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from llamado.rpc.wire import (
    COMMANDS,
    LATEST,
    DeviceCount,
    Hello,
    HelloResponse,
    ResponseReader,
    Upgrade,
    WireError,
    write_request,
)


class ConnectResult(enum.Enum):
    """Result of a TCP connection."""

    OPEN = "open"
    REFUSED = "refused"
    TIMEOUT = "timeout"
    UNKNOWN = "unknown host"


class HelloResult(enum.Enum):
    """Result of a HELLO request."""

    GREETED = "greeted"
    SILENT = "silent"
    CLOSED = "closed"
    TLS = "TLS"
    HTTP = "HTTP"
    OTHER = "other"
    CERTIFICATE = "certificate"


class Greeting(NamedTuple):
    result: HelloResult
    version: tuple[int, int, int] | None = None
    detail: str = ""


def probe_connection(host: str, port: int, timeout: float) -> tuple[ConnectResult, str]:
    """Open a connection. Return the result, and the system's reason if it failed."""
    try:
        socket.create_connection((host, port), timeout).close()
    except socket.gaierror as error:
        return ConnectResult.UNKNOWN, error.strerror or str(error)
    except TimeoutError:
        return ConnectResult.TIMEOUT, f"no answer within {timeout:g} s"
    except ConnectionRefusedError as error:
        return ConnectResult.REFUSED, error.strerror or str(error)
    except OSError as error:  # no route, network down
        return ConnectResult.TIMEOUT, error.strerror or str(error)
    return ConnectResult.OPEN, ""


def probe_hello(host: str, port: int, timeout: float, tls: Callable[[], ssl.SSLContext] | None = None) -> Greeting:
    """Send HELLO and return the greeting. With `tls`, which returns a context, connect by TLS."""
    try:
        with socket.create_connection((host, port), timeout) as plain:
            if tls is None:
                return _greet(plain, timeout)
            try:
                wrapped = tls().wrap_socket(plain, server_hostname=host)
            except ssl.SSLCertVerificationError as error:
                return Greeting(HelloResult.CERTIFICATE, detail=error.verify_message or str(error))
            except TimeoutError:
                return Greeting(HelloResult.SILENT)
            except (OSError, ValueError) as error:
                return Greeting(HelloResult.CLOSED, detail=str(error))
            with wrapped:
                return _greet(wrapped, timeout)
    except ssl.SSLError as error:
        refused = "CERTIFICATE" in str(error.reason or error).upper()
        return Greeting(HelloResult.CERTIFICATE if refused else HelloResult.CLOSED, detail=str(error.reason or error))
    except TimeoutError:
        return Greeting(HelloResult.SILENT)
    except OSError as error:
        return Greeting(HelloResult.CLOSED, detail=error.strerror or str(error))


def _greet(connection: socket.socket, timeout: float) -> Greeting:
    reader = ResponseReader()
    reader.expect(COMMANDS[Hello])
    deadline = time.monotonic() + timeout
    connection.sendall(write_request(Hello()))
    received = b""
    while True:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        data = connection.recv(256)
        if not data:
            return Greeting(_other_protocol(received) or HelloResult.CLOSED)
        received += data
        foreign = _other_protocol(received)
        if foreign is not None:
            return Greeting(foreign)
        reader.feed(data)
        try:
            found = reader.next()
        except WireError as error:
            return Greeting(HelloResult.OTHER, detail=str(error))
        if found is not None and isinstance(found[1], HelloResponse):
            if found[1].ours:
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


def speaks_tls(host: str, port: int, timeout: float) -> bool:
    """Return True if a TLS handshake succeeds, with any certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with suppress(OSError, ValueError), socket.create_connection((host, port), timeout) as plain:
        plain.settimeout(timeout)
        with context.wrap_socket(plain, server_hostname=host):
            return True
    return False


def is_loopback(host: str) -> bool:
    """Return True for a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_local(host: str) -> bool:
    """Return True if an address belongs to this machine, that is, can be bound."""
    with suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
            return True
    return False
