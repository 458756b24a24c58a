"""Worker addresses (host, port, TLS) and the TLS contexts of both ends."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass

from llamado.errors import LlamadoError

DEFAULT_PORT = 50052
"""rpc-server's default port."""

_LONGEST_NAME = 253
"""Characters of a host name (RFC 1035, 2.3.4)."""

_SPELLING = re.compile(
    r"(?:(?P<scheme>[a-zA-Z][\w+.-]*)://)?(?:\[(?P<v6>[^\]]*)\]|(?P<host>[^:\[\]]*))(?::(?P<port>.*))?"
)


class EndpointError(LlamadoError):
    """An invalid worker address, or certificates that cannot be used."""


@dataclass(frozen=True)
class Endpoint:
    """The address of a worker."""

    host: str
    port: int = DEFAULT_PORT
    tls: bool = False

    @classmethod
    def parse(cls, text: str, default_port: int = DEFAULT_PORT) -> Endpoint:
        """Parse `host`, `host:port` or `[v6]:port`, with or without `tls://` or `tcp://`. Raises EndpointError.

        >>> str(Endpoint.parse("tls://[::1]:50053"))
        'tls://[::1]:50053'
        """
        found = _SPELLING.fullmatch(text.strip())
        text = text[:_LONGEST_NAME]  # as messages show it
        if found is None:
            raise EndpointError(f"{text!r} is no address of a worker: expected host:port, tls://host:port or [v6]:port")
        scheme = (found["scheme"] or "tcp").lower()
        if scheme not in ("tcp", "tls"):
            raise EndpointError(f"{text!r}: a worker is reached by tcp:// (the default) or tls://, not {scheme}://")
        host = found["v6"] or found["host"]
        if not host or any(c.isspace() or c in "/@?#" or not c.isprintable() for c in host) or not _is_name(host):
            raise EndpointError(f"{text!r} names no host: expected host:port, tls://host:port or [v6]:port")
        digits = found["port"]
        if digits is not None and not (digits.isascii() and digits.isdigit() and len(digits) <= 5):
            raise EndpointError(f"{text!r}: the port is a number from 1 to 65535, not {digits[:20]!r}")
        port = default_port if digits is None else int(digits)
        if not 0 < port < 65536:
            raise EndpointError(f"{text!r}: the port is a number from 1 to 65535, not {port}")
        return cls(host, port, scheme == "tls")

    @property
    def address(self) -> tuple[str, int]:
        """Host and port, as socket functions take them."""
        return self.host, self.port

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'tls://' if self.tls else ''}{host}:{self.port}"


def _is_name(host: str) -> bool:
    """Return True if DNS can have a name: labels of up to 63 bytes, 253 bytes in all."""
    try:
        return len(host) <= _LONGEST_NAME and len(host.encode("idna")) <= _LONGEST_NAME
    except UnicodeError:
        return False


def server_tls(cert: str, key: str, client_ca: str | None = None) -> ssl.SSLContext:
    """Return the TLS context of a worker. With `client_ca`, clients need a certificate of that authority.

    Raises EndpointError for files that cannot be used.
    """
    context = _context(ssl.PROTOCOL_TLS_SERVER)
    _load_certificate(context, cert, key, "--tls-cert", "--tls-key")
    if client_ca:
        context.verify_mode = ssl.CERT_REQUIRED
        _trust(context, client_ca, "--tls-client-ca")
    return context


def client_tls(ca: str | None = None, cert: str | None = None, key: str | None = None) -> ssl.SSLContext:
    """Return the TLS context of a client: authorities of `ca` (default: the system's), `cert` on request.

    The worker's certificate must be for the name or the address by which it is reached. Raises EndpointError.
    """
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    if ca:
        _trust(context, ca, "--rpc-ca")
    else:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    if cert or key:
        if not (cert and key):
            raise EndpointError("--rpc-cert and --rpc-key go together: a certificate is of no use without its key")
        _load_certificate(context, cert, key, "--rpc-cert", "--rpc-key")
    return context


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Renegotiation is not used, and compression leaks secrets.
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    return context


def _load_certificate(context: ssl.SSLContext, cert: str, key: str, cert_flag: str, key_flag: str) -> None:
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except (OSError, ValueError) as error:
        raise EndpointError(f"{cert_flag} {cert}, {key_flag} {key}: {_reason(error)}") from None


def _no_password() -> str:
    raise ValueError("the key is encrypted; give one that is not")


def _trust(context: ssl.SSLContext, ca: str, flag: str) -> None:
    try:
        context.load_verify_locations(ca)
    except (OSError, ValueError) as error:
        raise EndpointError(f"{flag} {ca}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """Return the fault of a certificate file in words a user can act on."""
    if isinstance(error, ssl.SSLError):
        if error.reason == "KEY_VALUES_MISMATCH":
            return "the key is not that of the certificate"
        return "not a PEM file of the right kind" + (f" ({error.reason})" if error.reason else "")
    return getattr(error, "strerror", None) or str(error)
