"""Who a client is to a worker: the subject of its certificate, or the network it comes from."""

from __future__ import annotations

import hashlib
import ipaddress
import ssl

_NETWORK = {4: 24, 6: 64}
"""Bits that addresses of one local network have in common, as addresses are given out."""


def identity(host: str, sock: object = None) -> str:
    """A name, also for a folder: clients of the same name are the same one to this worker.

    `sock`: its TLS connection, if it has one; a certificate counts where the worker asked for one and checked it.
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
    """An address as the system writes it, the older kind where it is given as the newer one; None for what is none."""
    try:
        found = ipaddress.ip_address(host.split("%")[0])
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found
