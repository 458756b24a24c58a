"""`llamado cluster init`: create keys and certificates for mutual TLS between a server and its workers."""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from llamado.errors import LlamadoError
from llamado.flags import FlagError, ParsedFlags
from llamado.installation import install_command
from llamado.terminal.text import print

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import Certificate, CertificateBuilder, Name

_LOCAL = ("localhost", "127.0.0.1", "::1")


class ClusterError(LlamadoError):
    """Keys and certificates cannot be created, or files of these names exist."""


class Authority(NamedTuple):
    """Certificate authority of a cluster."""

    key: EllipticCurvePrivateKey
    certificate: Certificate


def init(flags: ParsedFlags) -> int:
    """Write an authority and certificates of a server and its workers into a folder, and print how to use them.

    Certificates are valid for the names and addresses given, and for localhost. Raises FlagError and ClusterError.
    """
    folder = Path(flags.out)
    workers = [_names(text) for text in flags.worker or []]
    if not workers:
        if not 0 < flags.workers <= 1000:
            raise FlagError(f"--workers: expected 1 to 1000, got {flags.workers}")
        workers = [() for _ in range(flags.workers)]
    if not 0 < flags.days <= 36500:
        raise FlagError(f"--days: expected 1 to 36500, got {flags.days}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files = make(folder, _names(flags.server or ""), workers, flags.days)
    except OSError as error:
        raise ClusterError(f"{error.filename or folder}: {error.strerror or error}") from None
    print(f"{len(files)} files in {folder}; ca-key.pem signs further certificates: keep it off the machines.\n")
    print("On the server:")
    print(f"  llamado serve -m MODEL --rpc tls://WORKER:50052,… --rpc-ca {folder}/ca.pem \\")
    print(f"    --rpc-cert {folder}/server.pem --rpc-key {folder}/server-key.pem\n")
    print("On worker N:")
    print(f"  llamado worker -H 0.0.0.0 --tls-cert {folder}/workerN.pem --tls-key {folder}/workerN-key.pem \\")
    print(f"    --tls-client-ca {folder}/ca.pem")
    return 0


def make(folder: Path, server: Sequence[str], workers: Sequence[Sequence[str]], days: int) -> list[Path]:
    """Create the files of a cluster and return their paths. Raises ClusterError if one exists, and OSError."""
    names = ["ca", "server", *(f"worker{i}" for i in range(1, len(workers) + 1))]
    files = [folder / f"{name}{kind}.pem" for name in names for kind in ("", "-key")]
    if existing := [path.name for path in files if path.exists()]:
        raise ClusterError(f"{folder} contains {', '.join(existing)}: choose another folder (--out), or remove them")
    authority = _authority(days)
    _write(folder, "ca", authority.certificate, authority.key)
    for name, alternatives in zip(names[1:], [server, *workers], strict=True):
        key = _key()
        _write(folder, name, _signed(name, key, [*_LOCAL, *alternatives], authority, days), key)
    return files


def _names(text: str) -> tuple[str, ...]:
    """Return comma-separated DNS names and addresses. Raises FlagError."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9.:_*-]{1,253}", name):
            raise FlagError(f"{name!r} is neither a host name nor an address")
    return names


def _key() -> EllipticCurvePrivateKey:
    try:
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise ClusterError(f"the package cryptography is missing: {install_command('cluster')}") from None
    return ec.generate_private_key(ec.SECP256R1())


def _authority(days: int) -> Authority:
    key = _key()
    from cryptography import x509
    from cryptography.hazmat.primitives.hashes import SHA256

    usage = x509.KeyUsage(
        digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    certificate = (
        _builder("llamado cluster", key, days)
        .issuer_name(_name("llamado cluster"))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, SHA256())
    )
    return Authority(key, certificate)


def _signed(
    name: str, key: EllipticCurvePrivateKey, alternatives: Sequence[str], authority: Authority, days: int
) -> Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.x509.oid import ExtendedKeyUsageOID

    names: list[x509.GeneralName] = []
    for text in dict.fromkeys(alternatives):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(text)))
        except ValueError:
            names.append(x509.DNSName(text))
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    return (
        _builder(name, key, days)
        .issuer_name(authority.certificate.subject)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(usage, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()), critical=False)
        .sign(authority.key, SHA256())
    )


def _builder(name: str, key: EllipticCurvePrivateKey, days: int) -> CertificateBuilder:
    from cryptography import x509

    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _name(text: str) -> Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _write(folder: Path, name: str, certificate: Certificate, key: EllipticCurvePrivateKey) -> None:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    with os.fdopen(os.open(folder / f"{name}-key.pem", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secret)
    (folder / f"{name}.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
