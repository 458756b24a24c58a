"""Identity of a client: the subject of its certificate, or its network."""

from __future__ import annotations

import hashlib
import ipaddress
import ssl

_NETWORK = {4: 24, 6: 64}
"""Prefix bits of one local network, as addresses are commonly assigned."""


def identity(host: str, sock: object = None) -> str:
    """Return a client's identity, which is also valid as a folder name.

    `sock`: the client's TLS connection, if it has one. A certificate counts if the worker required and checked it.
    """
    certificate = sock.getpeercert() if isinstance(sock, ssl.SSLSocket) else None
    if certificate:
        assert isinstance(sock, ssl.SSLSocket)
        named = repr((certificate.get("issuer"), certificate["subject"])) if certificate.get("subject") else ""
        whole = named.encode() or sock.getpeercert(binary_form=True) or b""
        return f"certificate-{hashlib.sha256(whole).hexdigest()[:32]}"
    found = address(host)
    if found is None or found.is_loopback:
        return "loopback"
    network = ipaddress.ip_network((found, _NETWORK[found.version]), strict=False)
    return f"{network.network_address.exploded.replace(':', '-')}_{network.prefixlen}"


def address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Parse an address as the system writes it, a mapped IPv4 address as IPv4. Returns None if it is not an address."""
    try:
        found = ipaddress.ip_address(host.split("%")[0])
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found
