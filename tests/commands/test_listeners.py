"""Addresses from command lines, for health checks of containers and systemd units."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import trustme

from llamado.commands.wait import listeners
from llamado.commands.wait.listeners import ListenerError, listener_of
from llamado.commands.wait.wait import run_wait
from llamado.installation import own_command
from llamado.rpc.worker.server import Worker, WorkerOptions

GUARD = 60.0


def process(proc: Path, pid: int, *words: str, **environ: str) -> None:
    folder = proc / str(pid)
    folder.mkdir()
    (folder / "cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in words))
    (folder / "environ").write_bytes(b"".join(f"{name}={value}\0".encode() for name, value in environ.items()))


@pytest.mark.parametrize(
    ("words", "environ", "url"),
    [
        ("llamado serve -m m", {}, "http://127.0.0.1:8080"),
        ("/usr/bin/python3 /usr/local/bin/llama-server -m m --port 9", {}, "http://127.0.0.1:9"),
        ("llamado llama-server --models-dir /models --host 0.0.0.0", {}, "http://127.0.0.1:8080"),
        ("/sbin/docker-init -- llamado serve --host :: --api-prefix /llm/", {}, "http://[::1]:8080/llm"),
        ("llamado serve --api-key xxxx --host a.example,10.0.0.7", {"LLAMA_ARG_PORT": "9"}, "http://a.example:9"),
        ("llamado serve", {"AIP_MODE": "PREDICTION", "AIP_HTTP_PORT": "7"}, "http://127.0.0.1:7"),
        ("llamado serve --ssl-key-file k --ssl-cert-file c", {}, "https://127.0.0.1:8080"),
        ("llamado gateway --replica http://a:1 --ssl-key-file k --ssl-cert-file c", {}, "https://127.0.0.1:8080"),
        ("llamado worker -H 0.0.0.0 -p 50053", {}, "tcp://127.0.0.1:50053"),
        ("rpc-server -H ::", {}, "tcp://[::1]:50052"),
        (" ".join(own_command("worker", "--no-ring")), {}, "tcp://127.0.0.1:50052"),
    ],
)
def test_address_from_a_command_line(tmp_path: Path, words: str, environ: dict[str, str], url: str) -> None:
    process(tmp_path, 1, *words.split(), **environ)
    process(tmp_path, 12, "llamado", "wait", "--timeout", "5")
    for pid in (1, None):
        found = listener_of(pid, tmp_path)
        assert found.url == url and (found.tls is not None) == url.startswith("https")


def test_precedence_of_processes(tmp_path: Path) -> None:
    process(tmp_path, 5, "llamado", "worker")
    assert listener_of(None, tmp_path).url.startswith("tcp://")
    process(tmp_path, 20, "llamado", "serve", "--port", "20")
    process(tmp_path, 100, "llamado", "serve", "--port", "100")  # for example of a router
    assert listener_of(None, tmp_path).url.endswith(":20")
    process(tmp_path, 101, "llamado", "gateway", "--replica", "http://127.0.0.1:20", "--port", "101")
    assert listener_of(None, tmp_path).url.endswith(":101") and listener_of(5, tmp_path).url.startswith("tcp://")


def test_processes_of_other_users_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process(tmp_path, 5, "llamado", "serve")
    me = os.getuid()
    monkeypatch.setattr(listeners.os, "getuid", lambda: me + 1)
    with pytest.raises(ListenerError, match="this user runs no llamado serve, gateway or worker"):
        listener_of(None, tmp_path)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["llamado", "wait", "http://h:1"], "process 1 is not llamado serve"),
        (["llamado"], "process 1 is not llamado serve"),
        (["llamado", "serve", "--port", "0"], "any free port"),
        (["llamado", "serve", "--host", "/run/x.sock"], "the Unix socket /run/x.sock"),
    ],
)
def test_processes_without_an_address(tmp_path: Path, words: list[str], says: str) -> None:
    process(tmp_path, 1, *words)
    with pytest.raises(ListenerError, match=says):
        listener_of(1, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("tls", [False, True])
def test_frozen_worker_fails_its_probe(
    tls: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kernel accepts connections for a frozen worker, so the probe waits for the handshake."""
    authority = trustme.CA()
    own = authority.issue_cert("worker.example")
    own.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "own.pem"))
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    cert, ca = str(tmp_path / "own.pem"), str(tmp_path / "ca.pem")
    options = WorkerOptions(port=0, tls_cert=cert, tls_key=cert, tls_client_ca=ca) if tls else WorkerOptions(port=0)
    worker = Worker([], options)
    words = ["--tls-cert", cert, "--tls-key", cert, "--tls-client-ca", ca] if tls else []
    proc = tmp_path / "proc"
    proc.mkdir()
    process(proc, 1, "llamado", "worker", "-p", str(worker.port), *words)
    monkeypatch.setattr(listeners, "listener_of", lambda pid: listener_of(pid, proc))

    assert run_wait(None, timeout=0.2, interval=GUARD) == 1
    assert "accepts connections, but does not greet" in capsys.readouterr().err
    thread = threading.Thread(target=worker.serve, daemon=True)
    thread.start()
    assert run_wait(None, timeout=GUARD, interval=GUARD) == 0
    worker.stop()
    thread.join()
