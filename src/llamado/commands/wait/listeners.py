"""Addresses of running llamado processes, read from their command lines."""

from __future__ import annotations

import ipaddress
import os
import ssl
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llamado.errors import LlamadoError
from llamado.flags import FlagParser, ParsedFlags, add_flags, api_prefix, parse
from llamado.installation import PROGRAMS
from llamado.rpc.endpoint import client_tls
from llamado.server.switches import PredictRoutes

_ORDER = ("gateway", "serve", "worker")
"""Commands that listen, by preference: clients connect to a gateway before a server."""


class ListenerError(LlamadoError):
    """No llamado process listens, or its command line does not contain the address."""


@dataclass(frozen=True)
class Listener:
    """URL of a server or gateway (http://, https://) or a worker (tcp://), and TLS settings for connections to it."""

    url: str
    tls: ssl.SSLContext | None = None


def listener_of(pid: int | None = None, proc: Path = Path("/proc")) -> Listener:
    """Return the address of the process `pid`, or of a gateway, server or worker of this user on this machine.

    A container runs one of them. Of several, a gateway takes precedence, then the server that was started first.
    Raises ListenerError, FlagError and EndpointError.
    """
    found = [*_listening([pid] if pid is not None else _own_processes(proc), proc)]
    if not found:
        subject = "this user runs no" if pid is None else f"process {pid} is not"
        raise ListenerError(f"{subject} llamado serve, gateway or worker; give a URL: llamado wait URL")
    command, arguments, environ = min(found, key=lambda one: _ORDER.index(one[0]))
    return _listener(command, arguments, environ)


def _own_processes(proc: Path) -> list[int]:
    pids = [int(entry.name) for entry in proc.iterdir() if entry.name.isdigit()] if proc.is_dir() else []
    return sorted(pid for pid in pids if _owner(proc / str(pid)) == os.getuid())


def _owner(path: Path) -> int:
    try:
        return path.stat().st_uid
    except OSError:
        return -1


def _listening(pids: Sequence[int], proc: Path) -> Iterator[tuple[str, list[str], Mapping[str, str]]]:
    """Yield command, arguments and environment of each of these processes that listens."""
    for pid in pids:
        words = _strings(proc / str(pid) / "cmdline")
        for at, word in enumerate(words):
            name = os.path.basename(word)
            rest = words[at + 1 :] if name == "llamado" else [PROGRAMS.get(name, ""), *words[at + 1 :]]
            if rest and PROGRAMS.get(rest[0], rest[0]) in _ORDER:
                pairs = (text.partition("=") for text in _strings(proc / str(pid) / "environ"))
                yield PROGRAMS.get(rest[0], rest[0]), rest[1:], {name: value for name, _, value in pairs}
                break


def _strings(path: Path) -> list[str]:
    try:
        return path.read_bytes().decode("utf-8", "surrogateescape").split("\0")[:-1]
    except OSError:
        return []


def _listener(command: str, arguments: list[str], environ: Mapping[str, str]) -> Listener:
    parser = FlagParser(prog=f"llamado {command}", allow_abbrev=False)
    add_flags(parser, command)
    flags = parse(parser, command, arguments, environ)[0]
    if command == "worker":
        return Listener(f"tcp://{_address(flags.host, flags.port)}", _worker_tls(flags))
    predict = PredictRoutes.read(environ) if command == "serve" else None
    prefix = api_prefix(flags.api_prefix) if command == "serve" else ""
    secure = bool(flags.ssl_cert_file)
    address = _address(flags.host, flags.port if predict is None else predict.port)
    return Listener(f"{'https' if secure else 'http'}://{address}{prefix}", _unchecked() if secure else None)


def _address(hosts: str, port: int) -> str:
    """Return host and port to connect to a local process that listens on `hosts`."""
    host = hosts.split(",")[0].strip()
    if host.endswith(".sock") or not port:
        what = f"the Unix socket {host}" if host.endswith(".sock") else "any free port (--port 0)"
        raise ListenerError(f"the process listens on {what}; give its URL: llamado wait URL")
    try:
        if ipaddress.ip_address(host).is_unspecified:
            host = "::1" if ":" in host else "127.0.0.1"
    except ValueError:
        pass
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _unchecked() -> ssl.SSLContext:
    """Return TLS settings without certificate verification: the process ID identifies it, and no secret is sent."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _worker_tls(flags: ParsedFlags) -> ssl.SSLContext | None:
    """Return TLS settings for a worker. If it requires client certificates, its own certificate is used."""
    if not flags.tls_cert:
        return None
    context = client_tls(None, flags.tls_cert, flags.tls_key) if flags.tls_client_ca else client_tls()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
