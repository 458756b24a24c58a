"""Checks of workers by `llamado doctor`: each symptom is provoked on real sockets."""

from __future__ import annotations

import re
import ssl
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from doctor_stand_ins import Certificates, accepting, listening, saying, swallowing
from ports import free_port
from scripted_worker import Hang, ScriptedWorker

from llamado.cluster.doctor.symptoms import Finding
from llamado.cluster.doctor.workers import compare, examine_workers
from llamado.devices.registry import DeviceOptions, open_device
from llamado.devices.split.placement import DeviceFigures, SplitOptions
from llamado.rpc.tap.proxy import Tap, TapOptions
from llamado.rpc.wire import PROTOCOLS, AllocBuffer, DeviceCount, Protocol, Request
from llamado.rpc.worker.server import Worker


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("tls"))


def look(*rpc: object, timeout: float = 5.0, **split: Path) -> list[Finding]:
    options = SplitOptions(rpc=tuple(map(str, rpc)), **{name: str(path) for name, path in split.items()})  # type: ignore[arg-type]
    return examine_workers(options, timeout=timeout, measure=False)


def one(*rpc: object, **given: object) -> Finding:
    (found,) = look(*rpc, **given)  # type: ignore[arg-type]
    return found


def test_healthy_workers_have_no_findings(certificates: Certificates) -> None:
    with ScriptedWorker() as theirs, ScriptedWorker(own=True) as ours:
        assert look(theirs.endpoint, ours.endpoint) == []
    with ScriptedWorker(tls=certificates.server()) as secure:
        assert look(secure.endpoint, ca=certificates.ca) == []


def test_worker_refused() -> None:
    port = free_port()
    found = one(f"127.0.0.1:{port}")
    assert found.symptom == "worker-refused" and f"llamado worker -H 0.0.0.0 -p {port}" in found.command


def test_unknown_and_unreachable_hosts() -> None:
    assert one("no-such-host.invalid").symptom == "unknown-host"
    with swallowing() as port:
        assert one(f"127.0.0.1:{port}", timeout=0.5).symptom == "unreachable"


@pytest.mark.slow
def test_the_silent_one_of_several_workers_is_found() -> None:
    with ScriptedWorker() as well, accepting() as port:
        found = one(well.endpoint, f"127.0.0.1:{port}", timeout=2.0)
    assert found.symptom == "worker-silent" and found.where == f"127.0.0.1:{port}"


@pytest.mark.parametrize("theirs", [(max(PROTOCOLS) + 1, 0, 0), (min(PROTOCOLS) - 1, 9, 9), (7, 1, 0), (8, 1, 0)])
def test_unsupported_versions_are_found(theirs: tuple[int, int, int]) -> None:
    with ScriptedWorker(version=theirs) as worker:
        found = one(worker.endpoint)
    assert found.symptom == "worker-version"
    for version in (theirs, *(protocol.version for protocol in PROTOCOLS.values())):
        assert ".".join(map(str, version)) in found.found


@pytest.mark.parametrize("protocol", PROTOCOLS.values(), ids=str)
def test_supported_versions_are_accepted(protocol: Protocol) -> None:
    with ScriptedWorker(version=protocol.version) as worker:
        assert look(worker.endpoint) == []


def test_another_program_on_the_port() -> None:
    with saying(b"SSH-2.0-OpenSSH_9.6\r\n" + b"\0" * 64) as port:
        assert one(f"127.0.0.1:{port}").symptom == "not-a-worker"


def test_a_server_instead_of_a_worker() -> None:
    with listening() as (url, _):
        found = one(url.removeprefix("http://"))
    assert found.symptom == "not-a-worker" and "HTTP" in found.found


def test_tls_only_on_the_worker(certificates: Certificates) -> None:
    with ScriptedWorker(tls=certificates.server()) as worker:
        found = one(str(worker.endpoint).removeprefix("tls://"))
    assert found.symptom == "worker-wants-tls" and f"--rpc {worker.endpoint}" in found.command


def test_tls_only_on_the_client() -> None:
    with ScriptedWorker() as worker:
        assert one(f"tls://{worker.endpoint}").symptom == "worker-no-tls"


def test_an_untrusted_certificate(certificates: Certificates) -> None:
    with ScriptedWorker(tls=certificates.server()) as worker:
        assert one(worker.endpoint).symptom == "worker-certificate"


def test_a_worker_that_requires_a_client_certificate(certificates: Certificates) -> None:
    context = certificates.server()
    context.load_verify_locations(certificates.ca)
    context.verify_mode = ssl.CERT_REQUIRED
    with ScriptedWorker(tls=context) as worker:
        assert one(worker.endpoint, ca=certificates.ca).symptom == "worker-certificate"
        keys = {"ca": certificates.ca, "cert": certificates.cert, "key": certificates.key}
        assert look(worker.endpoint, **keys) == []


def test_a_worker_without_memory() -> None:
    with ScriptedWorker(memory=1 << 20) as worker:
        found = one(worker.endpoint)
    assert found.symptom == "worker-without-memory" and "1 MB are free" in found.found


def test_one_worker_under_two_names() -> None:
    with ScriptedWorker() as worker:
        found = one(worker.endpoint, f"localhost:{worker.endpoint.port}")
    assert found.symptom == "same-worker" and found.command.endswith(f"--rpc {worker.endpoint}")


def measured(*workers: ScriptedWorker, timeout: float = 5.0) -> list[Finding]:
    return examine_workers(SplitOptions(rpc=tuple(str(one.endpoint) for one in workers)), timeout=timeout)


def test_a_worker_lost_during_measurement() -> None:
    """It greets and reports its memory, and closes its connections at the first allocation."""

    def close(request: Request, _: int) -> None:
        if isinstance(request, AllocBuffer):
            raise EOFError

    with ScriptedWorker(before=close) as worker:
        (found,) = measured(worker)
    assert found.symptom == "worker-lost" and "during measurement" in found.found
    assert str(worker.endpoint) in found.found


def test_a_worker_that_stops_responding_after_its_greeting() -> None:
    """The worker greets but does not list its devices, as if another client used it."""

    def hang(request: Request, _: int) -> None:
        if isinstance(request, DeviceCount):
            raise Hang

    with ScriptedWorker(before=hang) as worker:
        (found,) = measured(worker, timeout=0.5)
    assert found.symptom == "worker-silent" and found.where == str(worker.endpoint)
    assert "does not say within 0.5 s which devices it has" in found.found
    assert f"llamado worker -p {worker.endpoint.port} serves many" in found.command


def node(number: int, *, trip: float = 5e-4, rate: float = 5e8, decode: float = 10e9) -> DeviceFigures:
    name = f"RPC{number}[10.0.0.{number}:50052]"
    return DeviceFigures(
        name=name, local=False, free=1 << 33, total=1 << 33, decode=decode, round_trip=trip, bandwidth=rate
    )


@pytest.mark.parametrize(
    ("figures", "symptom", "text"),
    [
        ([node(1), node(2), node(3)], None, ""),
        ([node(1), node(2, trip=1.9e-3), node(3)], None, ""),
        ([node(1), node(2, trip=9e-3), node(3)], "slow-link", "9.0 ms (the others 0.5 ms)"),
        ([node(1), node(2, rate=30e6), node(3)], "slow-link", "30.0 MB/s (the others 500)"),
        ([node(2, trip=60e-3)], "slow-link", "60.0 ms"),
        ([node(2, rate=5e6)], "slow-link", "5.0 MB/s"),
        ([node(1), node(2, decode=2e9), node(3)], "slow-node", "2.0 GB/s, the others at 10.0"),
        ([node(1, trip=30e-3), node(2, trip=30e-3)], None, ""),
    ],
)
def test_slow_links_and_nodes_are_found_by_their_figures(
    figures: Sequence[DeviceFigures], symptom: str | None, text: str
) -> None:
    found = compare(figures, ["10.0.0.1", "10.0.0.2"])
    if symptom is None:
        assert not found
    else:
        assert [one.symptom for one in found] == [symptom]
        assert text in found[0].found and found[0].where == "RPC2[10.0.0.2:50052]" and "10.0.0.2" in found[0].command


@pytest.mark.slow
def test_a_slow_link_is_measured() -> None:
    """Two llamado workers, one of them behind a tap that delays each graph by 80 ms."""
    with ExitStack() as stack:
        near, far = (running_worker(stack) for _ in range(2))
        tap = stack.enter_context(Tap(TapOptions(listen_port=0, target_port=far, latency_ms=80)))
        near_, far_ = f"127.0.0.1:{near}", f"127.0.0.1:{tap.port}"
        found = examine_workers(SplitOptions(rpc=(near_, far_)))
    links = [one for one in found if one.symptom == "slow-link"]
    assert len(links) == 1 and far_ in links[0].where
    trip = re.search(r"a round trip of ([\d.]+) ms", links[0].found)
    assert trip is not None and float(trip[1]) >= 80


def running_worker(stack: ExitStack) -> int:
    """Start a llamado worker in this process and return its port."""
    device = open_device("cpu", DeviceOptions(n_threads=1))
    worker = Worker([device])
    thread = threading.Thread(target=worker.serve, daemon=True)
    thread.start()
    stack.callback(device.close)
    stack.callback(thread.join, 60)
    stack.callback(worker.stop)
    return worker.port
