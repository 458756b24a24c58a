"""`llamado cluster init`: its certificates admit the machines of one cluster only."""

from __future__ import annotations

import socket
import ssl
import stat
import threading
from pathlib import Path

import pytest

from llamado.commands import cli
from llamado.commands.cluster import make
from llamado.rpc.endpoint import client_tls, server_tls


def shake(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> str:
    """Send a byte over TLS and return it, or the error."""
    ours, theirs = socket.socketpair()
    heard: list[str] = []

    def serve() -> None:
        theirs.settimeout(60)
        try:
            with server.wrap_socket(theirs, server_side=True) as sock:
                heard.append(sock.recv(1).decode())
        except OSError as error:
            heard.append(str(error))
            theirs.close()

    thread = threading.Thread(target=serve)
    thread.start()
    ours.settimeout(60)
    try:
        with client.wrap_socket(ours, server_hostname=name) as sock:
            sock.send(b"x")
    except OSError as error:
        heard.insert(0, str(error))
        ours.close()
    thread.join(60)
    return heard[0]


def test_mutual_tls_within_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "other"):
        given = ["cluster", "init", "--out", str(tmp_path / name), "--worker", "10.0.0.2,w1.lan", "--worker", "w2.lan"]
        assert cli.main(given) == 0
        assert "--tls-client-ca" in capsys.readouterr().out
    one, other = tmp_path / "one", tmp_path / "other"
    assert {path.name for path in one.iterdir()} == {
        f"{name}{kind}.pem" for name in ("ca", "server", "worker1", "worker2") for kind in ("", "-key")
    }
    assert {stat.S_IMODE(path.stat().st_mode) for path in one.glob("*-key.pem")} == {0o600}

    def worker(folder: Path, number: int) -> ssl.SSLContext:
        files = (f"{folder}/worker{number}.pem", f"{folder}/worker{number}-key.pem")
        return server_tls(*files, f"{folder}/ca.pem")

    def master(folder: Path, *, shows: bool = True) -> ssl.SSLContext:
        files = (f"{folder}/server.pem", f"{folder}/server-key.pem") if shows else ()
        return client_tls(f"{folder}/ca.pem", *files)

    for name in ("10.0.0.2", "w1.lan", "localhost", "127.0.0.1"):
        assert shake(worker(one, 1), master(one), name) == "x"
    assert shake(worker(one, 2), master(one), "w2.lan") == "x"
    assert "certificate verify failed" in shake(worker(one, 2), master(one), "10.0.0.2"), "another machine"
    assert "certificate verify failed" in shake(worker(other, 1), master(one), "w1.lan"), "another authority"
    mixed = client_tls(f"{one}/ca.pem", f"{other}/server.pem", f"{other}/server-key.pem")
    assert shake(worker(one, 1), mixed, "w1.lan") != "x", "another authority"
    assert shake(worker(one, 1), master(one, shows=False), "w1.lan") != "x", "no client certificate"


def test_existing_files_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path, (), [()], 10)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert cli.main(["cluster", "init", "--out", str(tmp_path)]) == 1
    assert "contains ca.pem, ca-key.pem, server.pem" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(("given", "said"), [
    ("--workers 0", "--workers: expected 1 to 1000"), ("--days 0", "--days: expected 1"),
    ("--server a/b", "'a/b' is neither a host name nor an address"),
])  # fmt: skip
def test_invalid_flags(given: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cluster", "init", "--out", str(tmp_path / "x"), *given.split()]) == 2
    assert said in capsys.readouterr().err and not list(tmp_path.glob("x/*"))
