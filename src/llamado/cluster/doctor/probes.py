"""Socket probes: connection, TLS handshake and local addresses. They report observations, not findings."""

from __future__ import annotations

import enum
import ipaddress
import socket
import ssl
from contextlib import suppress


class ConnectResult(enum.Enum):
    """Result of a TCP connection."""

    OPEN = "open"
    REFUSED = "refused"
    TIMEOUT = "timeout"
    UNKNOWN = "unknown host"


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
