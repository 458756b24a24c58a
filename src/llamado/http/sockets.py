"""Listening sockets. They open before heavy imports, so that a client's first attempt connects."""

from __future__ import annotations

import ipaddress
import os
import socket
import ssl
from collections.abc import Sequence

from llamado.errors import LlamadoError


class PortError(LlamadoError):
    """The address cannot be bound."""


def listen(hosts: tuple[str, ...], port: int, *, reuse_port: bool = False) -> list[socket.socket]:
    """Open listening sockets; from here on clients can connect. `NAME.sock` is a Unix socket. Raises PortError."""
    return [_listen(host, port, reuse_port) for host in hosts]


def _listen(host: str, port: int, reuse_port: bool) -> socket.socket:
    where = host if host.endswith(".sock") else f"{host}:{port}"
    try:
        if host.endswith(".sock"):
            sock = socket.socket(socket.AF_UNIX)
            sock.bind(host)
        else:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            sock = socket.socket(family)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if reuse_port:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            sock.bind(address)
        sock.listen(2048)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise PortError(
            f"cannot listen on {where}: {reason}; choose another with --port (0: any free one) or --host"
        ) from None
    sock.setblocking(False)
    return sock


def address_of(sock: socket.socket, tls: bool = False) -> str:
    """Return a listening socket's URL, or the path of a Unix socket."""
    name = sock.getsockname()
    if isinstance(name, str):
        return name
    host = f"[{name[0]}]" if sock.family == socket.AF_INET6 else name[0]
    return f"{'https' if tls else 'http'}://{host}:{name[1]}"


def exposure_warning(hosts: Sequence[str], *, keys: bool) -> str | None:
    """Return a warning if other machines can reach the server without a key, else None."""
    open_ = [host for host in hosts if not is_local(host)]
    if keys or not open_:
        return None
    return (
        f"{', '.join(open_)} can be reached from other machines, and no key is asked for: anyone can use this "
        "machine and see the requests of others (/slots). Give --api-key KEY, or --host 127.0.0.1 behind a proxy"
    )


def is_local(host: str) -> bool:
    """Return True if only programs of this machine can connect to `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".sock")


def check_tls(key: str, certificate: str) -> None:
    """Raise PortError unless the files hold a private key and its certificate."""
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)
    except (OSError, ValueError) as error:
        raise PortError(f"--ssl-cert-file {certificate}, --ssl-key-file {key}: {error}") from None
