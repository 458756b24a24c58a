"""RemoteDevice over TLS, against a scripted worker."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from scripted_worker import ScriptedWorker

from llamado.ggml import graph as g
from llamado.gguf.types import TensorType as T
from llamado.rpc.client.device import connect
from llamado.rpc.endpoint import Endpoint, client_tls, server_tls
from llamado.rpc.transport import ConnectError


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A self-signed certificate for 127.0.0.1 and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make certificates")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=worker"
    command += f" -addext subjectAltName=IP:127.0.0.1 -out {cert} -keyout {key}"
    subprocess.run(command.split(), check=True, capture_output=True)
    return cert, key


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True])
def test_data_in_both_directions_at_once(pair: tuple[str, str], own: bool) -> None:
    cert, key = pair
    with ScriptedWorker(own=own, tls=server_tls(cert, key, cert)) as worker:
        device = connect(worker.endpoint, tls=client_tls(cert, cert, key))[0]
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


def test_an_unknown_authority(pair: tuple[str, str]) -> None:
    with (
        ScriptedWorker(tls=server_tls(*pair)) as worker,
        pytest.raises(ConnectError, match=r"not trusted.*--rpc-ca"),
    ):
        connect(worker.endpoint)


def test_a_client_without_a_certificate(pair: tuple[str, str]) -> None:
    cert, key = pair
    with (
        ScriptedWorker(tls=server_tls(cert, key, cert)) as worker,
        pytest.raises(ConnectError, match="--rpc-cert"),
    ):
        connect(worker.endpoint, tls=client_tls(cert))


def test_a_worker_without_tls(pair: tuple[str, str]) -> None:
    with ScriptedWorker() as worker, pytest.raises(ConnectError, match="TLS"):
        connect(Endpoint(*worker.endpoint.address, True), tls=client_tls(pair[0]), timeout=1)


def test_a_plain_client_of_a_worker_with_tls(pair: tuple[str, str]) -> None:
    with ScriptedWorker(tls=server_tls(*pair)) as worker, pytest.raises(ConnectError):
        connect(Endpoint(*worker.endpoint.address), timeout=1)


def test_a_silent_worker() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = Endpoint("127.0.0.1", listener.getsockname()[1], True)
        with pytest.raises(ConnectError, match="does it speak TLS"):
            connect(endpoint, tls=ssl.create_default_context(), timeout=0.2)
