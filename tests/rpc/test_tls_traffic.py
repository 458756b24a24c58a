"""TLS on the wire, and the clients that a worker with client certificates admits: real commands, every byte."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from test_endpoint import Authority
from tiny_models import make_llama
from waiting import GUARD, until

from llamado.devices.split.placement import SplitOptions
from llamado.engine.loaded_model import LoadedModel
from llamado.engine.options import EngineOptions
from llamado.gguf.reader import GGUFFile
from llamado.rpc.client.workers import WorkersUnreachable
from llamado.rpc.endpoint import Endpoint

pytestmark = pytest.mark.slow

N_VOCAB = 320
N_PREDICT = 8
PIECE = 64
PIECES = 8
"""Pieces of each weight that are looked for."""


# --- stand-ins --------------------------------------------------------------------------------------------------------


@dataclass
class WorkerProcess:
    endpoint: Endpoint
    log: Path


@contextmanager
def worker_process(log: Path, *options: str) -> Iterator[WorkerProcess]:
    """`llamado worker` on a free port."""
    command = [sys.executable, "-m", "llamado", "worker", "-p", "0", "-t", "1", *options]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        until(lambda: "device 0" in log.read_text() or process.poll() is not None, log.read_text)
        found = re.search(r"llamado worker on (\S+)", log.read_text())
        assert found is not None
        yield WorkerProcess(Endpoint.parse(found[1]), log)
    finally:
        process.terminate()
        process.wait(60)


class RecordingProxy:
    """A TCP proxy to `target` that records all bytes.

    `sent` and `received`, from the client's view, have the bytes of each connection.
    """

    def __init__(self, target: Endpoint) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.sent: list[bytearray] = []
        self.received: list[bytearray] = []
        self._begin(self._accept)

    @property
    def endpoint(self) -> Endpoint:
        """The address of the target through the proxy."""
        return Endpoint("127.0.0.1", self._listener.getsockname()[1], self._target.tls)

    def __enter__(self) -> RecordingProxy:
        return self

    def __exit__(self, *_: object) -> None:
        shut(self._listener)
        for sock in self._sockets:
            shut(sock)
        for thread in self._threads:
            thread.join(GUARD)

    def _begin(self, work: object, *args: object) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            worker = socket.create_connection(self._target.address, timeout=GUARD)
            worker.settimeout(None)
            self._sockets += [client, worker]
            self._begin(self._carry, client, worker, self.sent)
            self._begin(self._carry, worker, client, self.received)

    def holds(self, run: bytes) -> bool:
        """Return True if these bytes passed in a row, in either direction."""
        return any(run in record for record in (*self.sent, *self.received))

    def _carry(self, source: socket.socket, target: socket.socket, records: list[bytearray]) -> None:
        record = bytearray()
        records.append(record)
        try:
            while data := source.recv(1 << 20):
                record += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            shut(target)


def shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    sock.close()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def strict_worker(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """A worker that admits only clients with a certificate of the authority."""
    own = ("--tls-cert", authority.cert, "--tls-key", authority.key, "--tls-client-ca", authority.pem)
    with worker_process(tmp_path_factory.mktemp("worker") / "log", *own) as worker:
        yield worker


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", n_embd=256, n_ff=512, n_vocab=N_VOCAB)


# --- the bytes --------------------------------------------------------------------------------------------------------


def answer_through(wire: RecordingProxy, model: Path, authority: Authority) -> str:
    """Return an answer of the model with all layers on a worker behind the proxy."""
    split = SplitOptions(
        rpc=(str(wire.endpoint),), tensor_split=(1.0,), ca=authority.pem, cert=authority.cert, key=authority.key
    )
    with LoadedModel.load(model, EngineOptions(n_ctx=256, n_threads=1, split=split)) as llama:
        return llama.generate("Once upon a time", temperature=0, n_predict=N_PREDICT, ignore_eos=True)


def pieces_of(model: Path) -> dict[str, list[bytes]]:
    """Return runs of 64 bytes of each weight on the worker, over its whole length."""
    pieces = {}
    with GGUFFile.open(model) as file:
        for name in file.tensors:
            data = np.asarray(file.data(name)).tobytes()
            if name == "token_embd.weight":  # stays here
                continue
            at = np.linspace(0, len(data) - PIECE, PIECES).astype(int)
            pieces[name] = [data[i : i + PIECE] for i in at]
    assert len(pieces) >= 15
    return pieces


def test_bytes_on_the_wire(model: Path, authority: Authority, strict_worker: WorkerProcess, tmp_path: Path) -> None:
    pieces = pieces_of(model)
    with worker_process(tmp_path / "log") as worker, RecordingProxy(worker.endpoint) as plain:
        said = answer_through(plain, model, authority)
    with RecordingProxy(strict_worker.endpoint) as secret:
        assert answer_through(secret, model, authority) == said
    with GGUFFile.open(model) as file:
        weights = sum(file.tensors[name].nbytes for name in pieces)
    for wire in (plain, secret):  # a wire that nothing passed would hold no secrets
        assert sum(map(len, wire.sent)) > weights
        assert sum(map(len, wire.received)) > 4 * N_VOCAB * N_PREDICT  # logits
    for name, runs in pieces.items():
        assert all(plain.holds(run) for run in runs), name
        assert plain.holds(name.encode())
        assert not any(secret.holds(run) for run in runs), name
        assert not secret.holds(name.encode())
    assert plain.holds(b"blk.") and not secret.holds(b"blk.")
    assert all(record[:2] == b"\x16\x03" for record in (*secret.sent, *secret.received))  # TLS from the first byte


# --- admission --------------------------------------------------------------------------------------------------------


def list_devices(endpoint: Endpoint, *options: str) -> subprocess.CompletedProcess[str]:
    """Return the output of `llamado plan --list-devices` about a worker."""
    command = [sys.executable, "-m", "llamado", "plan", "--list-devices", "--rpc", str(endpoint), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_client_without_a_certificate_is_refused(
    model: Path, strict_worker: WorkerProcess, authority: Authority
) -> None:
    """The client's error has the remedy, the worker logs the reason, and a client with a certificate is admitted."""
    done = list_devices(strict_worker.endpoint, "--rpc-ca", authority.pem)
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert str(strict_worker.endpoint) in said and "--rpc-cert" in said and "--rpc-key" in said
    assert "Traceback" not in said
    until(lambda: "the client shows no certificate" in strict_worker.log.read_text(), strict_worker.log.read_text)
    split = SplitOptions(rpc=(str(strict_worker.endpoint),), tensor_split=(1.0,), ca=authority.pem)
    with pytest.raises(WorkersUnreachable, match="--rpc-cert"):
        LoadedModel.load(model, EngineOptions(n_ctx=256, n_threads=1, split=split))
    own = ("--rpc-cert", authority.cert, "--rpc-key", authority.key)
    done = list_devices(strict_worker.endpoint, "--rpc-ca", authority.pem, *own)
    assert done.returncode == 0, done.stderr
    assert f"RPC0: {strict_worker.endpoint} (" in done.stdout


def test_a_certificate_of_another_authority_is_refused(
    strict_worker: WorkerProcess, authority: Authority, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path)
    own = ("--rpc-cert", stranger.cert, "--rpc-key", stranger.key)
    done = list_devices(strict_worker.endpoint, "--rpc-ca", authority.pem, *own)
    assert done.returncode != 0
    assert "--rpc-cert" in done.stdout + done.stderr
    until(
        lambda: "the client's certificate is not trusted" in strict_worker.log.read_text(), strict_worker.log.read_text
    )


def test_a_client_without_tls_is_refused(strict_worker: WorkerProcess) -> None:
    done = list_devices(Endpoint(*strict_worker.endpoint.address))
    assert done.returncode != 0
    hint = f"if it wants TLS, it is {strict_worker.endpoint}, and its --allow has to name this machine"
    assert hint in done.stdout + done.stderr
    until(lambda: "the client does not speak TLS" in strict_worker.log.read_text(), strict_worker.log.read_text)
