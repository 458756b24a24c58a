"""The worker's log about its clients: names, memory, and work."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from waiting import until
from wire_client import Client, layout, request, running, wire_of

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.split import measure
from llamado.ggml import graph as g
from llamado.ggml.graph import Graph
from llamado.gguf.types import TensorType as T
from llamado.loglines import LINES_A_MINUTE, LineLimit
from llamado.rpc import wire
from llamado.rpc.worker import activity
from llamado.rpc.worker.activity import WorkDone, WorkLog, tokens_of
from llamado.rpc.worker.server import Worker, WorkerOptions, log

N_TOKENS = 3


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(1)
    yield device
    device.close()


@pytest.fixture(autouse=True)
def told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "llamado.rpc.worker.server")


def test_the_lines_of_one_client(
    device: CpuDevice, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llamado.rpc.worker.server._CHECK_INTERVAL", 0.02)
    weights, x = g.new_tensor(T.F32, 32, 8, name="weights"), g.new_tensor(T.F32, 32, N_TOKENS, name="x")
    graph = Graph()
    y = graph.output("y", g.mul_mat(weights, x, name="y"))
    places, size = layout([weights, x, y])
    with running(device) as worker:
        with Client(worker) as passing:
            assert passing.number(wire.GetMaxSize(0))
        with Client(worker) as client:
            ptr, base = client.alloc(size)
            for tensor in (weights, x):
                client.set(wire_of(tensor, ptr, base + places[tensor]), np.ones(tensor.nelements, np.float32).tobytes())
            for _ in range(5):
                client.send(request(graph, ptr, base, places))
            client.get(wire_of(y, ptr, base + places[y]), y.nbytes)
            monkeypatch.setattr(activity, "LOG_INTERVAL", 0.0)
            until(lambda: "5 graphs, 15 tokens, 0.0 MB received, 0.0 MB sent; 1 client holds" in caplog.text)
            lines = len(caplog.records)
            time.sleep(0.2)
            assert len(caplog.records) == lines, "nothing is done, and nothing is said"
        until(lambda: "freed" in caplog.text)
        monkeypatch.setattr(activity, "LOG_INTERVAL", 1e9)
        with Client(worker) as other:  # sums go on where the first one left them
            ptr, base = other.alloc(size)
            other.send(request(graph, ptr, base, places))
            other.get(wire_of(y, ptr, base + places[y]), y.nbytes)
            monkeypatch.setattr(activity, "LOG_INTERVAL", 0.0)
            until(lambda: "1 graphs, 3 tokens" in caplog.text)
    name = r"127\.0\.0\.1:\d+"
    messages = [record.getMessage() for record in caplog.records]
    shown = [m for m in messages if not m.startswith("in ")]
    assert not any(" -" in m for m in messages), "what was done for those who left stays done"
    assert re.fullmatch(rf"{name}: connected \(RPC 7\.0\.0\)", shown[0])
    assert re.fullmatch(rf"{name}: holds 0\.0 MB", shown[1])
    assert re.fullmatch(rf"{name}: left after \d s \(graphs=5 tokens=15\), 0\.0 MB freed", shown[2])
    assert [line.split(" ", 1)[1].split()[0] for line in shown[3:]] == ["connected", "holds", "left"]
    assert sum(" connected " in line for line in shown) == 2, "who only asks is not worth a line"


def test_speed_measurements_count_no_tokens(
    device: CpuDevice, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server measures its workers at the start, before any token."""
    monkeypatch.setattr("llamado.rpc.worker.server._CHECK_INTERVAL", 0.02)
    monkeypatch.setattr(activity, "LOG_INTERVAL", 0.0)
    trial = measure._Measurement(device, T.F32, 32, 1 << 20)
    assert activity.tokens_of(trial.one) == activity.tokens_of(trial.many) == 0
    trial.free()
    weights, x = g.new_tensor(T.F32, 32, 8, name=f"{measure.TRIAL}0"), g.new_tensor(T.F32, 32, N_TOKENS, name="x")
    graph = Graph()
    graph.output("y", g.mul_mat(weights, x, name="y"))
    places, size = layout([weights, x, graph.nodes[-1]])
    with running(device) as worker, Client(worker) as client:
        ptr, base = client.alloc(size)
        client.send(request(graph, ptr, base, places))
        client.get(wire_of(x, ptr, base + places[x]), x.nbytes)
        until(lambda: "1 graphs, 0 tokens" in caplog.text)


def test_changed_memory_of_a_client_is_logged(
    device: CpuDevice, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llamado.rpc.worker.handlers.graphs._LOG_INTERVAL", 0.0)
    x = g.new_tensor(T.F32, 32, name="x")
    graph = Graph()
    graph.output("y", g.add(x, x, name="y"))
    places, size = layout([x, graph.nodes[-1]])
    with running(device) as worker, Client(worker) as client:
        ptr, base = client.alloc(size)
        for more in (0, 3_000_000, 0, 0):
            if more:
                client.alloc(more)
            client.send(request(graph, ptr, base, places))
            client.get(wire_of(x, ptr, base + places[x]), x.nbytes)
    said = [message for record in caplog.records if " holds " in (message := record.getMessage())]
    assert [line.partition(" holds ")[2] for line in said] == ["0.0 MB", "3.0 MB"]


def test_a_failed_allocation_is_logged(device: CpuDevice, caplog: pytest.LogCaptureFixture) -> None:
    with running(device, mem=1 << 20) as worker, Client(worker) as client:
        client.ask(wire.AllocBuffer(0, 5_000_000))
        (line,) = [record.getMessage() for record in caplog.records]
        assert line.startswith("tensor allocation failed: 127.0.0.1:")
        assert "no room for 5.0 MB (1.0 MB are free)" in line


def test_the_work_of_all_clients_is_logged_every_half_minute() -> None:
    now = 100.0
    heart = WorkLog(lambda: now)
    work, other = WorkDone(), WorkDone()
    assert heart.next_line([work], 0, 0) is None
    work.graphs, work.tokens, work.received, work.sent = 3, 4, 5_000_000, 6_000_000
    other.graphs = 1
    now = 129.9
    assert heart.next_line([work, other], 2, 10) is None, "half a minute is not over"
    now = 130.0
    assert heart.next_line([work, other], 2, 10_000_000) == (
        "in 30 s: 4 graphs, 4 tokens, 5.0 MB received, 6.0 MB sent; 2 clients hold 10.0 MB"
    )
    now = 165.0
    assert heart.next_line([work, other], 2, 10) is None, "nothing was done"
    other.tokens = 7
    other.sent = 1_000_000
    now = 195.0
    line = heart.next_line([work, other], 1, 10)
    assert line is not None and line.startswith("in 30 s: 0 graphs, 7 tokens, 0.0 MB received, 1.0 MB sent; 1 client h")


def test_tokens_of_graphs() -> None:
    """A graph has as many tokens as its first product with weights, or with experts, has columns."""
    experts, x = g.new_tensor(T.F32, 32, 8, 4), g.new_tensor(T.F32, 32, 1, 7)
    chosen = g.new_tensor(T.I32, 2, 7)
    graph = Graph()
    graph.output("y", g.mul_mat_id(experts, x, chosen))
    assert tokens_of(graph) == 7 and tokens_of(Graph()) == 0


def test_bad_connections_write_few_lines(
    device: CpuDevice, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llamado.loglines.time", SimpleNamespace(monotonic=lambda: 0.0))
    with running(device) as worker:
        for _ in range(3 * LINES_A_MINUTE):
            with Client(worker, greet=False) as client:
                client.sock.sendall(b"GET / HTTP/1.0\r\n\r\n")
                assert not client.sock.recv(1)
    assert caplog.text.count("connection closed") == LINES_A_MINUTE


def test_only_a_serving_worker_limits_the_lines_of_the_log(device: CpuDevice) -> None:
    """Workers of one process share a logger; one that never serves must leave it alone."""
    before = list(log.filters)
    idle = Worker([device], WorkerOptions(port=0))
    assert log.filters == before
    idle.close()
    with running(device):
        pass
    assert log.filters == before


def test_suppressed_lines_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("llamado.loglines.time.monotonic", lambda: now)
    limit, written = LineLimit(2), []

    def line(text: str, kind: str = "%s came") -> None:
        record = logging.makeLogRecord({"msg": kind, "args": (text,)})
        if limit.filter(record):
            written.append(record.getMessage())

    for n in range(5):
        line(str(n))
    line("one", "%s went")
    assert written == ["0 came", "1 came", "one went"] and limit.overdue() == {}
    now = 60.0
    line("x")
    assert written[3:] == ["x came (3 lines like this one were left out)"]
    for _ in range(3):
        line("y")
    now = 120.0
    assert limit.overdue() == {"%s came": 2} and limit.overdue() == {}
