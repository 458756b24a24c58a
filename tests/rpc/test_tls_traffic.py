"""TLS on the wire: no byte of a model or an answer is readable."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import numpy as np
import pytest
from test_endpoint import Authority
from tiny_models import make_llama
from waiting import GUARD
from wire_client import running

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.split.placement import SplitOptions
from llamado.engine.loaded_model import LoadedModel
from llamado.engine.options import EngineOptions
from llamado.gguf.reader import GGUFFile
from llamado.rpc.endpoint import Endpoint

pytestmark = pytest.mark.slow

N_VOCAB = 320
N_PREDICT = 8
PIECE = 64
PIECES = 8
"""Pieces of each weight that are looked for."""


# --- stand-ins --------------------------------------------------------------------------------------------------------


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


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


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


def test_bytes_on_the_wire(model: Path, authority: Authority) -> None:
    pieces, device = pieces_of(model), CpuDevice(1)
    with running(device) as worker, RecordingProxy(worker.endpoint) as plain:
        text = answer_through(plain, model, authority)
    with (
        running(device, tls_cert=authority.cert, tls_key=authority.key, tls_client_ca=authority.pem) as worker,
        RecordingProxy(worker.endpoint) as secret,
    ):
        assert answer_through(secret, model, authority) == text
    device.close()
    with GGUFFile.open(model) as file:
        weights = sum(file.tensors[name].nbytes for name in pieces)
    for wire in (plain, secret):  # an unused proxy would hold no secrets, either
        assert sum(map(len, wire.sent)) > weights
        assert sum(map(len, wire.received)) > 4 * N_VOCAB * N_PREDICT  # logits
    for name, runs in pieces.items():
        assert all(plain.holds(run) for run in runs), name
        assert plain.holds(name.encode())
        assert not any(secret.holds(run) for run in runs), name
        assert not secret.holds(name.encode())
    assert plain.holds(b"blk.") and not secret.holds(b"blk.")
    assert all(record[:2] == b"\x16\x03" for record in (*secret.sent, *secret.received))  # TLS from the first byte
