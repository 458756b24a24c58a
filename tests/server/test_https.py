"""HTTPS: a server process with a certificate, and its flags."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import trustme
from server_processes import ServerProcess
from waiting import GUARD

from llamado.commands.cli import make_parser
from llamado.commands.serve import serve_settings
from llamado.flags import parse
from llamado.http.sockets import PortError, check_tls

Start = Callable[..., tuple[ServerProcess, str]]


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def files(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """PEM files of a key and a certificate for 127.0.0.1."""
    folder = tmp_path_factory.mktemp("tls")
    issued = authority.issue_cert("127.0.0.1")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    issued.private_key_pem.write_to_path(str(key))
    for blob in issued.cert_chain_pems:
        blob.write_to_path(str(certificate), append=True)
    return key, certificate


@pytest.mark.slow
def test_answers_and_streams_over_tls(fake_server: Start, authority: trustme.CA, files: tuple[Path, Path]) -> None:
    process, address = fake_server(f"key={files[0]}", f"certificate={files[1]}", "json")
    url = address.replace("http://", "https://")
    context = ssl.create_default_context()
    authority.configure_trust(context)
    with httpx.Client(base_url=url, verify=context, timeout=60) as http:
        while http.get("/health").status_code == 503:
            pass
        body = {"prompt": "a", "n_predict": 5}
        assert http.post("/completion", json=body).json()["content"] == "xxxxx"
        with http.stream("POST", "/completion", json=body | {"stream": True}) as answer:
            assert sum(line.startswith("data: ") for line in answer.iter_lines()) == 6
        long = "x" * 2_000_000
        assert len(http.post("/tokenize", json={"content": long}).json()["tokens"]) == len(long)
    with pytest.raises(httpx.ConnectError, match=r"(?i)certificate"):
        httpx.get(f"{url}/health")  # the client does not trust this authority
    # A client without TLS gets no answer.
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=GUARD) as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"HTTP/1.1 200" not in plain.recv(1000)
    process.terminate()
    assert process.wait(60) == 0
    log = process.log()
    assert f"server is listening on {url}" in [json.loads(line)["message"] for line in log.splitlines()]


def test_the_tls_flags(files: tuple[Path, Path], tmp_path: Path) -> None:
    key, certificate = map(str, files)
    flags, _ = parse(make_parser("serve"), "serve", ["-m", "x", "--ssl-key-file", key, "--ssl-cert-file", certificate])
    settings = serve_settings(flags)
    assert (settings.ssl_key, settings.ssl_cert) == (key, certificate)
    check_tls(key, certificate)
    (tmp_path / "text").write_text("no certificate")
    for wrong in ((certificate, key), (key, str(tmp_path / "text")), (str(tmp_path / "none"), certificate)):
        with pytest.raises(PortError, match="--ssl-cert-file"):
            check_tls(*wrong)
