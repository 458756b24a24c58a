"""Addresses of workers, and TLS contexts with errors that name the faulty file."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
import trustme

from llamado.rpc.endpoint import Endpoint, EndpointError, client_tls, server_tls


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("worker", Endpoint("worker", 50052)),
        ("worker:1", Endpoint("worker", 1)),
        ("10.0.0.7:65535", Endpoint("10.0.0.7", 65535)),
        ("tls://gpu.example:50053", Endpoint("gpu.example", 50053, tls=True)),
        ("TLS://gpu.example", Endpoint("gpu.example", 50052, tls=True)),
        ("tcp://gpu.example", Endpoint("gpu.example", 50052)),
        ("[::1]:50053", Endpoint("::1", 50053)),
        ("tls://[fd00::7]", Endpoint("fd00::7", 50052, tls=True)),
        (" worker:7 ", Endpoint("worker", 7)),
    ],
)
def test_parse(text: str, endpoint: Endpoint) -> None:
    assert Endpoint.parse(text) == endpoint
    assert Endpoint.parse(str(endpoint)) == endpoint


def test_default_port() -> None:
    assert Endpoint.parse("worker", default_port=7).port == 7
    assert Endpoint.parse("worker:8", default_port=7).port == 8


@pytest.mark.parametrize(
    "text",
    ["", ":50052", "worker:", "worker:x", "worker:0", "worker:65536", "worker:-1", "worker:1.5", "worker:١",
     "::1", "[::1", "[::1]x", "[]:1", "http://worker", "tls://", "a b:1", "worker:1:2", "worker/x", "user@worker"],
)  # fmt: skip
def test_invalid_addresses(text: str) -> None:
    with pytest.raises(EndpointError) as error:
        Endpoint.parse(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize("host", ["h" * 100_000, "h" * 64, "a..b", "h\0", "h\x1b[0m", "ä" * 60, "a." * 127 + "b"])
@pytest.mark.parametrize("form", ["{}", "tls://{}:7", "[{}]:7", "x://{}", "h:{}"])
def test_names_that_are_invalid_in_dns(host: str, form: str) -> None:
    with pytest.raises(EndpointError) as error:
        Endpoint.parse(form.format(host))
    assert len(str(error.value)) < 2000


class Authority:
    """A certificate authority with files for one server and one client."""

    def __init__(self, folder: Path) -> None:
        self.ca = trustme.CA()
        self.pem = str(folder / "ca.pem")
        self.ca.cert_pem.write_to_path(self.pem)
        self.cert, self.key = self.issue(folder, "")

    def issue(self, folder: Path, name: str) -> tuple[str, str]:
        """Return the files of a new certificate and its key, whose names start with `name`."""
        cert, key = str(folder / f"{name}cert.pem"), str(folder / f"{name}key.pem")
        own = self.ca.issue_cert("127.0.0.1", "localhost")
        own.private_key_pem.write_to_path(key)
        for i, part in enumerate(own.cert_chain_pems):
            part.write_to_path(cert, append=i > 0)
        return cert, key


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def test_old_versions_are_off(authority: Authority) -> None:
    assert server_tls(authority.cert, authority.key).minimum_version >= ssl.TLSVersion.TLSv1_2
    assert client_tls(authority.pem).minimum_version >= ssl.TLSVersion.TLSv1_2


def test_files_that_cannot_be_used(authority: Authority, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Authority(tmp_path / "other")
    text = tmp_path / "text"
    text.write_text("no certificate")
    missing = str(tmp_path / "missing.pem")
    with pytest.raises(EndpointError, match=r"--tls-cert .*missing\.pem.*No such file"):
        server_tls(missing, authority.key)
    with pytest.raises(EndpointError, match="not that of the certificate"):
        server_tls(authority.cert, other.key)
    with pytest.raises(EndpointError, match=r"--tls-client-ca .*text: not a PEM file"):
        server_tls(authority.cert, authority.key, str(text))
    with pytest.raises(EndpointError, match=r"--rpc-ca .*missing\.pem"):
        client_tls(missing)
    with pytest.raises(EndpointError, match="go together"):
        client_tls(authority.pem, authority.cert)
