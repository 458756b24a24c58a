"""What a socket tells: whether something listens, greets as a worker, speaks TLS. No judgement."""

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


class Reached(enum.Enum):
    """What became of a connection."""

    OPEN = "open"
    REFUSED = "refused"
    TIMEOUT = "timeout"
    UNKNOWN = "unknown host"


class How(enum.Enum):
    """What became of a HELLO."""

    GREETED = "greeted"
    SILENT = "silent"
    CLOSED = "closed"
    TLS = "TLS"
    HTTP = "HTTP"
    OTHER = "other"
    CERTIFICATE = "certificate"


class Greeting(NamedTuple):
    how: How
    version: tuple[int, int, int] | None = None
    detail: str = ""


def reach(host: str, port: int, timeout: float) -> tuple[Reached, str]:
    """Whether a connection comes about, and the system's reason where it does not."""
    try:
        socket.create_connection((host, port), timeout).close()
    except socket.gaierror as error:
        return Reached.UNKNOWN, error.strerror or str(error)
    except TimeoutError:
        return Reached.TIMEOUT, f"no answer within {timeout:g} s"
    except ConnectionRefusedError as error:
        return Reached.REFUSED, error.strerror or str(error)
    except OSError as error:  # no route, network down
        return Reached.TIMEOUT, error.strerror or str(error)
    return Reached.OPEN, ""


def hello(host: str, port: int, timeout: float, tls: Callable[[], ssl.SSLContext] | None = None) -> Greeting:
    """What answers HELLO, by TLS where `tls` gives a context."""
    try:
        with socket.create_connection((host, port), timeout) as plain:
            if tls is None:
                return _greet(plain, timeout)
            try:
                wrapped = tls().wrap_socket(plain, server_hostname=host)
            except ssl.SSLCertVerificationError as error:
                return Greeting(How.CERTIFICATE, detail=error.verify_message or str(error))
            except TimeoutError:
                return Greeting(How.SILENT)
            except (OSError, ValueError) as error:
                return Greeting(How.CLOSED, detail=str(error))
            with wrapped:
                return _greet(wrapped, timeout)
    except ssl.SSLError as error:
        refused = "CERTIFICATE" in str(error.reason or error).upper()
        return Greeting(How.CERTIFICATE if refused else How.CLOSED, detail=str(error.reason or error))
    except TimeoutError:
        return Greeting(How.SILENT)
    except OSError as error:
        return Greeting(How.CLOSED, detail=error.strerror or str(error))


def _greet(connection: socket.socket, timeout: float) -> Greeting:
    reader = ResponseReader()
    reader.expect(COMMANDS[Hello])
    deadline = time.monotonic() + timeout
    connection.sendall(write_request(Hello()))
    said = b""
    while True:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        data = connection.recv(256)
        if not data:
            return Greeting(_foreign(said) or How.CLOSED)
        said += data
        foreign = _foreign(said)
        if foreign is not None:
            return Greeting(foreign)
        reader.feed(data)
        try:
            found = reader.next()
        except WireError as error:
            return Greeting(How.OTHER, detail=str(error))
        if found is not None and isinstance(found[1], HelloResponse):
            if found[1].ours:
                # The worker takes a client that hangs up after HELLO for one of ggml's that wants another version.
                connection.sendall(write_request(Upgrade(LATEST.major)) + write_request(DeviceCount()))
                connection.recv(256)
            return Greeting(How.GREETED, (found[1].major, found[1].minor, found[1].patch))


def _foreign(said: bytes) -> How | None:
    """What another protocol begins with."""
    if said[:1] == b"\x15" and said[1:2] in (b"\x03", b""):
        return How.TLS  # an alert
    if said.startswith(b"HTTP/"):
        return How.HTTP
    return None


def speaks_tls(host: str, port: int, timeout: float) -> bool:
    """Whether a handshake comes about, whoever vouches for the certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with suppress(OSError, ValueError), socket.create_connection((host, port), timeout) as plain:
        plain.settimeout(timeout)
        with context.wrap_socket(plain, server_hostname=host):
            return True
    return False


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_here(host: str) -> bool:
    """Whether an address is one of this machine's: it can be bound."""
    with suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
            return True
    return False
