"""Links between workers: two workers driven byte by byte, and linked devices."""

from __future__ import annotations

import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scripted_worker import ScriptedWorker
from test_endpoint import Authority
from waiting import GUARD, until
from wire_client import Client, raw, running

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.device import LinkLost
from llamado.ggml import graph as g
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType as T
from llamado.rpc import wire
from llamado.rpc.client.device import RemoteDevice, connect
from llamado.rpc.endpoint import Endpoint, client_tls
from llamado.rpc.worker import links
from llamado.rpc.worker.budgets import Budgets
from llamado.rpc.worker.server import Worker

SIZE = 1000
LARGE = 16 << 20
"""More than the buffers of a connection hold."""


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(1)
    yield device
    device.close()


@pytest.fixture
def pair(device: CpuDevice) -> Iterator[tuple[Worker, Worker]]:
    with running(device) as first, running(device) as second:
        yield first, second


@pytest.fixture(autouse=True)
def refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "REFUSAL_SECONDS", 0.0)


def bytes_of(seed: int, size: int = SIZE) -> bytes:
    return np.random.default_rng(seed).bytes(size)


class LinkedWorkers:
    """A client of two workers with a link from the first to the second."""

    def __init__(self, first: Worker, second: Worker, size: int = SIZE) -> None:
        self.size = size
        self.a, self.b = Client(first), Client(second)
        inlet = self.b.ask(wire.OpenInlet())
        assert isinstance(inlet, wire.InletTicket)
        self.inlet = inlet
        self.link = self.a.number(wire.ConnectNext(inlet.ticket, str(second.endpoint).encode()))
        self.source, self.target = self._tensor(self.a), self._tensor(self.b)

    def _tensor(self, client: Client) -> wire.WireTensor:
        ptr, base = client.alloc(self.size)
        return raw(ptr, base, self.size)

    def push(self, data: bytes, sequence: int) -> None:
        self.a.set(self.source, data)
        self.a.send(wire.Push(self.source, self.link, len(data), sequence))

    def take(self, sequence: int, size: int | None = None) -> wire.AwaitResponse:
        answer = self.b.ask(wire.Await(self.target, self.inlet.number, self.size if size is None else size, sequence))
        assert isinstance(answer, wire.AwaitResponse)
        return answer

    def waiting(self, sequence: int) -> threading.Thread:
        """Return a client that waits for a response."""
        self.answers: list[Any] = []

        def ask() -> None:
            try:
                self.answers.append(self.take(sequence))
            except OSError as error:
                self.answers.append(error)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        time.sleep(0.05)
        assert not self.answers
        return thread

    def held(self) -> bytes:
        return self.b.get(self.target, self.size)

    def close(self) -> None:
        self.a.sock.close()
        self.b.sock.close()


@pytest.fixture
def linked(pair: tuple[Worker, Worker]) -> Iterator[LinkedWorkers]:
    linked = LinkedWorkers(*pair)
    assert linked.link
    yield linked
    linked.close()


# -- the commands ------------------------------------------------------------------------------------------------------


def test_a_pushed_tensor_arrives(linked: LinkedWorkers) -> None:
    linked.push(bytes_of(1), 1)
    assert linked.take(1).came == 1 and linked.held() == bytes_of(1)
    linked.push(bytes_of(2), 2)
    assert linked.take(2, SIZE).came and linked.held() == bytes_of(2)


def test_await_waits_for_a_push(linked: LinkedWorkers) -> None:
    thread = linked.waiting(1)
    linked.push(bytes_of(1), 1)
    thread.join(GUARD)
    assert linked.answers[0].came and linked.held() == bytes_of(1)


def test_earlier_deliveries_are_dropped(linked: LinkedWorkers) -> None:
    for number in range(1, 5):
        linked.push(bytes_of(number), number)
    for number in (3, 4):
        assert linked.take(number).came and linked.held() == bytes_of(number)


@pytest.mark.parametrize(("sequence", "size"), [(2, SIZE), (1, SIZE - 1)])
def test_an_unexpected_delivery_closes_the_inlet(linked: LinkedWorkers, sequence: int, size: int) -> None:
    """A skipped number, or another size: neither side waits forever."""
    linked.push(bytes_of(1, size), sequence)
    assert linked.take(1) == wire.AwaitResponse(0, 0)
    linked.push(bytes_of(1), 1)
    assert linked.take(1) == wire.AwaitResponse(0, 0)
    assert linked.a.number(wire.DeviceCount()) == linked.b.number(wire.DeviceCount()) == 1


@pytest.mark.slow
def test_a_full_connection_blocks_the_sender(pair: tuple[Worker, Worker]) -> None:
    """TCP holds the data back; the receiving worker buffers none of it."""
    linked = LinkedWorkers(*pair, size=LARGE)
    before = pair[1].state.devices[0].allocated
    thread = threading.Thread(target=lambda: [linked.push(bytes_of(number, LARGE), number) for number in (1, 2)])
    thread.start()
    time.sleep(0.1)
    assert thread.is_alive()
    busy = Client(pair[0])
    assert busy.number(wire.DeviceCount()) == 1  # others are served meanwhile
    assert pair[1].state.devices[0].allocated == before
    for number in (1, 2):
        assert linked.take(number).came and linked.held() == bytes_of(number, LARGE)
    thread.join(GUARD)
    linked.close()
    busy.sock.close()


# -- a worker or client ends -------------------------------------------------------------------------------------------


def test_the_sending_worker_is_gone(linked: LinkedWorkers) -> None:
    thread = linked.waiting(1)
    linked.a.sock.close()
    thread.join(GUARD)
    assert linked.answers == [wire.AwaitResponse(0, 0)] and linked.b.number(wire.DeviceCount()) == 1


def test_the_receiving_worker_is_gone(linked: LinkedWorkers, pair: tuple[Worker, Worker], caplog: Any) -> None:
    linked.b.sock.close()
    until(lambda: pair[1].clients == 0)
    for number in range(1, 20):  # the first may still find room in a buffer
        linked.push(bytes_of(number), number)
    assert linked.a.number(wire.DeviceCount()) == 1
    until(lambda: "link 1 broken" in caplog.text)


def test_a_client_hangs_up_during_await(linked: LinkedWorkers, pair: tuple[Worker, Worker]) -> None:
    linked.waiting(1)
    linked.b.sock.shutdown(socket.SHUT_RDWR)
    until(lambda: pair[1].clients == 0)
    assert not pair[1].state.inlets


def test_a_client_hangs_up_during_push(pair: tuple[Worker, Worker]) -> None:
    """The blocked sender returns."""
    linked = LinkedWorkers(*pair, size=LARGE)
    linked.push(bytes_of(1, LARGE), 1)
    time.sleep(0.05)
    linked.a.sock.close()
    until(lambda: pair[0].clients == 0)
    linked.close()


def test_a_stopping_worker_does_not_wait_for_a_link(device: CpuDevice) -> None:
    with running(device) as first:
        with running(device) as second:
            linked = LinkedWorkers(first, second)
            linked.waiting(1)
        linked.close()


def test_an_inlet_is_closed_by_another_connection(linked: LinkedWorkers, pair: tuple[Worker, Worker]) -> None:
    """The client's own connection may be the one that waits."""
    thread = linked.waiting(1)
    with Client(pair[1]) as aside:
        aside.send(wire.CloseInlet(bytes(16)))
        time.sleep(0.05)
        assert not linked.answers
        aside.send(wire.CloseInlet(linked.inlet.ticket))
        thread.join(GUARD)
    assert linked.answers == [wire.AwaitResponse(0, 0)]


# -- access ------------------------------------------------------------------------------------------------------------


def test_attach_needs_an_unused_ticket(linked: LinkedWorkers, pair: tuple[Worker, Worker]) -> None:
    for ticket in (bytes(16), linked.inlet.ticket):
        with Client(pair[1]) as other:
            assert other.number(wire.Attach(ticket)) == 0 and other.is_closed()
    with Client(pair[1]) as other:
        other.send(wire.Deliver(1, 0, SIZE), bytes(SIZE))
        assert other.is_closed()
    linked.push(bytes_of(1), 1)
    assert linked.take(1).came and linked.held() == bytes_of(1)


def test_a_link_is_not_evicted_as_idle(
    linked: LinkedWorkers, pair: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection has no buffers, and requests that it sends may be far apart."""
    monkeypatch.setattr("llamado.rpc.worker.server._IDLE_SECONDS", -1.0)
    monkeypatch.setattr("llamado.rpc.worker.server.MAX_CONNECTIONS", 2)
    with Client(pair[1], greet=False, timeout=GUARD) as newcomer:
        assert newcomer.is_closed()
    linked.push(bytes_of(1), 1)
    assert linked.take(1).came and linked.held() == bytes_of(1)


def test_a_place_outside_the_buffer(linked: LinkedWorkers) -> None:
    linked.b.send(wire.Await(linked.target, linked.inlet.number, SIZE + 1, 1))
    assert linked.b.is_closed()
    linked.a.send(wire.Push(linked.source, linked.link, SIZE + 1, 1))
    assert linked.a.is_closed()


def test_unknown_links_and_inlets(linked: LinkedWorkers) -> None:
    linked.a.send(wire.Push(linked.source, 99, SIZE, 1))
    answer = linked.b.ask(wire.Await(linked.target, 99, SIZE, 1))
    assert answer == wire.AwaitResponse(0, 0) and linked.a.number(wire.DeviceCount()) == 1


def test_the_number_of_links_is_limited(linked: LinkedWorkers) -> None:
    for _ in range(links.MAX_LINKS - 1):
        linked.b.ask(wire.OpenInlet())
    linked.b.send(wire.OpenInlet())
    assert linked.b.is_closed()


def refused(worker: Worker, endpoint: str, client: Client | None = None) -> bool:
    with client or Client(worker) as one:
        return one.number(wire.ConnectNext(bytes(16), endpoint.encode())) == 0


@contextmanager
def listening(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_only_our_workers_are_linked(pair: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Other programs and wrong tickets get one and the same response; the reason is in the log."""
    monkeypatch.setattr(links, "DIAL_SECONDS", 0.2)
    heard: list[bytes] = []
    kept: list[socket.socket] = []

    def silent(listener: socket.socket) -> None:
        kept.append(listener.accept()[0])
        heard.append(kept[0].recv(1000))

    with listening(silent) as silent_endpoint, ScriptedWorker() as scripted:
        for endpoint, why in [
            (silent_endpoint, "timed out"),
            ("127.0.0.1:1", "is a worker running"),
            (str(scripted.endpoint), "not a llamado worker"),
            (str(pair[1].endpoint), "not the worker that the client means"),
            ("nonsense://x", "a worker is reached by tcp://"),
            ("tls://127.0.0.1:1", "no --tls-cert"),
        ]:
            caplog.clear()
            assert refused(pair[0], endpoint)
            assert why in caplog.text and "falling back to the client" in caplog.text, (why, caplog.text)
    kept[0].close()
    assert len(heard[0]) == 33 and heard[0][0] == wire.Command.HELLO  # a greeting, and nothing that a client chose


def test_failed_attempts_of_a_client_are_limited() -> None:
    dialer = links.Dialer(failures=Budgets(most=2, a_second=0.0))
    for _ in range(2):
        with pytest.raises(OSError), dialer.attempt("client"):
            raise OSError
    with pytest.raises(links.LinkRefused, match="too many attempts"), dialer.attempt("client"):
        pass
    with dialer.attempt("another"):
        pass


def test_connections_at_the_same_time_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "DIAL_SECONDS", 0.01)
    dialer = links.Dialer(_turns=threading.BoundedSemaphore(1))
    with (
        dialer.attempt("client"),
        pytest.raises(links.LinkRefused, match="too many others connect"),
        dialer.attempt("another"),
    ):
        pass
    with dialer.attempt("another"):
        pass


def test_a_worker_that_answers_byte_by_byte_gets_no_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its answers together have DIAL_SECONDS. Then the connection is closed."""
    clock = 100.0

    class Trickle:
        left = closed = 0

        def settimeout(self, seconds: float) -> None:
            self.left = seconds

        def sendall(self, data: bytes) -> None:
            pass

        def recv(self, n: int) -> bytes:
            nonlocal clock
            assert clock < 100 + 10 * links.DIAL_SECONDS, "it would go on without an end"
            clock += 0.9
            if self.left < 0.9:
                raise TimeoutError("timed out")
            return bytes(1)

        def close(self) -> None:
            self.closed = True

    sock = Trickle()
    monkeypatch.setattr(links, "time", SimpleNamespace(monotonic=lambda: clock))
    monkeypatch.setattr(links, "dial", lambda *_: sock)
    with pytest.raises(TimeoutError):
        links.Dialer()._reach(Endpoint("127.0.0.1", 1), bytes(16))
    assert sock.closed and clock < 100 + 2 * links.DIAL_SECONDS


def test_seconds_of_computing_are_sent_in_microseconds() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        links.Outlet(ours).send(7, 0.25, SimpleNamespace(read=lambda start, size: iter([b"ab"])), 0, 2)
        sent = wire.write_request(wire.Deliver(7, 250_000, 2)) + b"ab"
        ours.shutdown(socket.SHUT_WR)
        assert theirs.makefile("rb").read() == sent


def test_data_in_pieces_and_none_at_all_is_sent_behind_one_head() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        outlet = links.Outlet(ours)
        for pieces in ([b"ab", b"c"], []):
            outlet.send(1, 0.0, SimpleNamespace(read=lambda start, size, given=pieces: iter(given)), 0, 3)
        assert not outlet.is_gone
        head = wire.write_request(wire.Deliver(1, 0, 3))
        ours.shutdown(socket.SHUT_WR)
        assert theirs.makefile("rb").read() == head + b"abc" + head
        theirs.close()
        assert outlet.is_gone


def test_an_inlet_is_attached_once_and_forgets_its_connection() -> None:
    inlet, shut = links.Inlet(3), list[str]()
    one, other = (SimpleNamespace(shut=lambda name=name: shut.append(name)) for name in ("one", "other"))
    assert inlet.number == 3 and len(inlet.ticket) == wire.TICKET_BYTES and inlet.ticket != links.Inlet(3).ticket
    assert inlet.attach(one) and not inlet.attach(other) and not inlet.is_closed
    inlet.close()
    assert inlet.is_closed and shut == ["one"] and not inlet.attach(other)
    inlet.wait()
    inlet.close()
    assert shut == ["one"] and not inlet.attach(other)


def test_refusals_reveal_nothing(pair: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """A refusal takes the same time whatever its reason, and the number of attempts is limited."""
    for worker in pair:
        monkeypatch.setattr(worker._line_limit, "_most", 100)
    monkeypatch.setattr(links, "REFUSAL_SECONDS", 0.1)
    began = time.monotonic()
    assert refused(pair[0], "127.0.0.1:1")
    assert time.monotonic() - began >= 0.1
    monkeypatch.setattr(links, "REFUSAL_SECONDS", 0.0)
    for _ in range(30):
        assert refused(pair[0], "127.0.0.1:1")
    assert "too many attempts of this client" in caplog.text
    assert refused(pair[0], str(pair[1].endpoint))


def test_a_worker_without_links(device: CpuDevice, pair: tuple[Worker, Worker], caplog: Any) -> None:
    with running(device, ring=False) as alone:
        with Client(alone) as client:
            assert (
                isinstance(client.hello, wire.HelloResponse) and client.hello.features == wire.LLAMADO | wire.NUMERICS
            )
            assert refused(alone, str(pair[0].endpoint))
            assert "--no-ring" in caplog.text
        devices = [connect(str(one.endpoint))[0] for one in (alone, pair[0])]
        assert [one.links for one in devices] == [False, True] and all(one.is_ours for one in devices)
        assert devices[0].link(devices[1]) is None and devices[1].link(devices[0]) is None
        for one in devices:
            one.close()
    with Client(pair[0]) as client:
        assert (
            isinstance(client.hello, wire.HelloResponse)
            and client.hello.features == wire.LLAMADO | wire.LINKS | wire.NUMERICS
        )


def test_only_allowed_networks_are_linked(device: CpuDevice, caplog: Any) -> None:
    with running(device, allow=("127.0.0.1/32",)) as worker, running(device, host="127.0.0.2") as other:
        assert refused(worker, str(other.endpoint))
        assert "not in a network of --allow" in caplog.text
    with running(device, allow=("127.0.0.0/8",)) as worker, running(device, host="127.0.0.2") as other:
        client = connect(str(worker.endpoint))[0], connect(str(other.endpoint))[0]
        assert client[0].link(client[1]) is not None
        for one in client:
            one.close()


# -- devices -----------------------------------------------------------------------------------------------------------


def placed(device: RemoteDevice, size: int = SIZE) -> Tensor:
    tensor = g.new_tensor(T.I8, size, name="t")
    device.place([tensor])
    return tensor


@pytest.mark.parametrize("tls", [False, True])
def test_devices_are_linked(device: CpuDevice, tmp_path: Path, tls: bool) -> None:
    options: dict[str, Any] = {}
    context = None
    if tls:
        authority = Authority(tmp_path)
        options = {"tls_cert": authority.cert, "tls_key": authority.key, "tls_client_ca": authority.pem}
        context = client_tls(authority.pem, authority.cert, authority.key)
    with running(device, **options) as first, running(device, **options) as second:
        a, b = (connect(one.endpoint, tls=context)[0] for one in (first, second))
        link = a.link(b)
        assert link is not None and link.lost is None
        source, target = placed(a), placed(b)
        for number in range(3):
            data = np.frombuffer(bytes_of(number), np.uint8)
            a.write(source, data)
            arrival = link.receive(link.send(source, SIZE), target, SIZE)
            assert b.read(target, 0, SIZE).result(GUARD).tobytes() == data.tobytes()
            assert arrival.result(GUARD).computed >= 0
        link.close()
        with pytest.raises(LinkLost):
            link.receive(4, target, SIZE).result(GUARD)
        assert a.lost is b.lost is None
        a.close()
        b.close()


def test_an_input_is_sent_again_after_a_link_has_changed_it(pair: tuple[Worker, Worker]) -> None:
    a, b = (connect(str(one.endpoint))[0] for one in pair)
    graph = g.Graph()
    target = graph.input("x", T.I8, SIZE)
    b.place([target])
    source, link = placed(a), a.link(b)
    assert link is not None
    zeros = np.zeros(SIZE, np.uint8)
    b.write(target, zeros)
    a.write(source, zeros + 1)
    link.receive(link.send(source, SIZE), target, SIZE)
    assert b.read(target, 0, SIZE).result(GUARD).tobytes() == bytes([1]) * SIZE
    b.write(target, zeros)
    assert b.read(target, 0, SIZE).result(GUARD).tobytes() == bytes(SIZE)
    a.close()
    b.close()


def test_ggmls_workers_are_not_linked(pair: tuple[Worker, Worker]) -> None:
    with ScriptedWorker() as scripted:
        a, b = connect(str(pair[0].endpoint))[0], connect(scripted.endpoint)[0]
        assert a.link(b) is None and b.link(a) is None
        assert not any(isinstance(request, wire.OpenInlet | wire.ConnectNext) for request in scripted.asked)
        a.close()
        b.close()


def test_unreachable_workers_fall_back_to_the_client(pair: tuple[Worker, Worker], caplog: Any) -> None:
    """The client reaches the worker itself. Tensors go through the client, and the log has one line."""
    caplog.set_level(logging.INFO)
    a, b = (connect(str(one.endpoint))[0] for one in pair)
    b._connection.endpoint = type(b._connection.endpoint)("127.0.0.1", 1)
    assert a.link(b) is None
    assert "cannot reach" in caplog.text
    until(lambda: all(inlet.is_closed for inlet in pair[1].state.inlets.values()))
    a.close()
    b.close()


@pytest.mark.parametrize("hosts", [("127.0.0.1", "127.0.0.2"), ("127.0.0.2", "127.0.0.1"), ("127.0.0.2",), ("odd",)])
def test_all_addresses_of_a_name_must_be_allowed(monkeypatch: pytest.MonkeyPatch, hosts: tuple[str, ...]) -> None:
    """Any of them may be tried."""
    dialer = links.Dialer(networks=(ipaddress.ip_network("127.0.0.1/32"), ipaddress.ip_network("::1/128")))

    def known(found: tuple[str, ...]) -> None:
        entries = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 1)) for host in found]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: entries)

    known(("127.0.0.1", "::1"))
    dialer.check(Endpoint("name", 1))
    known(hosts)
    with pytest.raises(links.LinkRefused, match="not in a network of --allow"):
        dialer.check(Endpoint("name", 1))
