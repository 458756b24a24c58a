"""RemoteDevice over TLS: data in both directions, and errors that name the remedy."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from scripted_worker import ScriptedWorker
from test_endpoint import Authority

from llamado.ggml import graph as g
from llamado.gguf.types import TensorType as T
from llamado.rpc.client.device import connect
from llamado.rpc.endpoint import Endpoint, client_tls, server_tls
from llamado.rpc.transport import ConnectError


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True])
def test_data_in_both_directions_at_once(authority: Authority, own: bool) -> None:
    with ScriptedWorker(own=own, tls=server_tls(authority.cert, authority.key, authority.pem)) as worker:
        device = connect(worker.endpoint, tls=client_tls(authority.pem, authority.cert, authority.key))[0]
        assert device.name == f"RPC0[tls://127.0.0.1:{worker.endpoint.port}]"
        tensors = [g.new_tensor(T.I8, 1_000_000, name=f"t{i}") for i in range(3)]
        device.place(tensors)

        def work(i: int) -> bool:
            good = True
            for step in range(5):
                data = np.random.default_rng(10 * i + step).integers(0, 256, 1_000_000, np.uint8)
                device.write(tensors[i], data)
                futures = [device.read(tensors[i], at, 250_000) for at in range(0, 1_000_000, 250_000)]
                good &= b"".join(f.result(60).tobytes() for f in futures) == data.tobytes()
            return good

        with ThreadPoolExecutor(3) as pool:
            assert all(pool.map(work, range(3)))
        device.load([(g.new_tensor(T.I8, 100, name="w"), np.ones(100, np.uint8))])
        device.close()


def test_a_client_without_a_trusted_certificate(authority: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path)
    with ScriptedWorker(tls=server_tls(authority.cert, authority.key, authority.pem)) as worker:
        with pytest.raises(ConnectError, match=r"not trusted.*--rpc-ca"):
            connect(worker.endpoint, tls=client_tls(other.pem))
        for certificate in ((), (other.cert, other.key)):
            with pytest.raises(ConnectError, match="--rpc-cert"):
                connect(worker.endpoint, tls=client_tls(authority.pem, *certificate))


def test_a_worker_without_tls(authority: Authority) -> None:
    with ScriptedWorker() as worker, pytest.raises(ConnectError, match="TLS"):
        connect(Endpoint(*worker.endpoint.address, True), tls=client_tls(authority.pem), timeout=1)


def test_a_plain_client_of_a_worker_with_tls(authority: Authority) -> None:
    with ScriptedWorker(tls=server_tls(authority.cert, authority.key)) as worker:
        hint = f"if it wants TLS, it is {worker.endpoint}, and its --allow has to name this machine"
        with pytest.raises(ConnectError, match=hint):
            connect(Endpoint(*worker.endpoint.address))


def test_a_silent_worker(authority: Authority) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = Endpoint("127.0.0.1", listener.getsockname()[1], True)
        with pytest.raises(ConnectError, match="does it speak TLS"):
            connect(endpoint, tls=client_tls(authority.pem), timeout=0.2)
