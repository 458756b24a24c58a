"""Supervisor: start, readiness, restarts, drains and the end of services, with fake services."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from ports import free_port
from waiting import GUARD, until_async

from llamado.cluster.file import RestartConfig
from llamado.cluster.services import ADMIN_KEY, CLUSTER_TOKEN, AddressFlag, Reservation, Service, ServiceRole
from llamado.cluster.supervisor import (
    DRAINED,
    DRAINING,
    ENDED,
    LOOPING,
    PAUSED,
    READY,
    STARTING,
    WAITING,
    ServiceStatus,
    StartFailed,
    Supervisor,
)
from llamado.processes.guarded import GuardedProcess, Watchdog
from llamado.processes.identity import is_same, start_mark

FAKE = str(Path(__file__).parent / "fake_service.py")
QUICK = RestartConfig(first=0.01, longest=0.02, settled=60.0, crashes=3)


SERVER = Service(
    name="server",
    role=ServiceRole.SERVER,
    host="127.0.0.1",
    port=1,
    command=("server",),
    environment={CLUSTER_TOKEN: "secret"},
)


class FakeServices:
    """Services of a test, and their recorded changes and events."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events_file = folder / "events"
        self.events_file.touch()
        self.seen: list[tuple[str, str]] = []
        self.changed = asyncio.Event()
        self.supervisor: Supervisor

    def service(
        self,
        role: str,
        *options: str,
        name: str = "",
        needs: tuple[str, ...] = (),
        restarts_with_needs: bool = False,
        token: str | None = None,
    ) -> Service:
        port = free_port()
        command = (sys.executable, "-S", FAKE, "worker" if role == "tap" else role, str(port), *options)
        return Service(
            name=name or role,
            role=ServiceRole(role),
            host="127.0.0.1",
            port=port,
            command=command,
            environment={} if token is None else {CLUSTER_TOKEN: token},
            needs=needs,
            restarts_with_needs=restarts_with_needs,
        )

    def record_change(self, one: ServiceStatus) -> None:
        self.seen.append((one.service.name, one.state.phase))
        self.changed.set()

    def events(self) -> list[str]:
        return self.events_file.read_text().splitlines()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(GUARD):
            while not condition():
                self.changed.clear()
                if not condition():
                    await self.changed.wait()

    def phase(self, name: str) -> str:
        return self.supervisor.statuses[name].state.phase

    def pid(self, name: str) -> int:
        return self.supervisor.statuses[name].state.pid


@pytest.fixture
def run_fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeServices]:
    """Run a supervisor of the services that `make` returns, run `test` meanwhile, then stop the supervisor."""

    def run(
        make: Callable[[FakeServices], list[Service]],
        test: Callable[[FakeServices], Awaitable[None]],
        stop_timeout: float = GUARD,
        restart: RestartConfig = QUICK,
    ) -> FakeServices:
        async def main() -> FakeServices:
            fakes = FakeServices(tmp_path)
            monkeypatch.setenv("FAKE_EVENTS", str(fakes.events_file))
            fakes.supervisor = Supervisor(make(fakes), restart, stop_timeout, tmp_path, fakes.record_change)
            running = asyncio.create_task(fakes.supervisor.run())
            testing = asyncio.ensure_future(test(fakes))
            await asyncio.wait([running, testing], return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                fakes.supervisor.stop()
            try:
                await running
            finally:
                if not testing.done():
                    testing.cancel()
            await testing
            return fakes

        return asyncio.run(main())

    return run


RunFakes = Callable[..., FakeServices]


def worker_and_server(fakes: FakeServices) -> list[Service]:
    return [fakes.service("worker"), fakes.service("server", needs=("worker",))]


def test_services_start_in_order_and_end_in_reverse(run_fakes: RunFakes) -> None:
    pids: list[tuple[int, str]] = []

    async def test(fakes: FakeServices) -> None:
        await fakes.until(lambda: fakes.supervisor.ready)
        pids.extend((fakes.pid(name), start_mark(fakes.pid(name))) for name in ("worker", "server"))
        assert fakes.seen.index(("worker", READY)) < fakes.seen.index(("server", STARTING))
        assert fakes.seen[0][0] == "worker" or fakes.seen[0] == ("server", WAITING)

    fakes = run_fakes(worker_and_server, test)
    kinds = [line.rstrip("0123456789").replace("began", "") for line in fakes.events()]
    words = [(line[:6], line.split()[1]) for line in fakes.events()]
    assert words == [("worker", "began"), ("server", "began"), ("server", "ended"), ("worker", "ended")], kinds
    assert fakes.phase("server") == fakes.phase("worker") == ENDED
    assert len(pids) == 2 and not any(is_same(pid, mark) for pid, mark in pids)
    assert (fakes.folder / "worker.log").read_text() == "worker listens\n"


def test_a_killed_service_restarts_and_others_keep_running(run_fakes: RunFakes) -> None:
    async def test(fakes: FakeServices) -> None:
        await fakes.until(lambda: fakes.supervisor.ready)
        server, worker = fakes.pid("server"), fakes.pid("worker")
        os.kill(worker, signal.SIGKILL)
        await fakes.until(lambda: fakes.phase("worker") == PAUSED)
        assert "was ended by SIGKILL; restart in" in fakes.supervisor.statuses["worker"].state.message
        await fakes.until(lambda: fakes.supervisor.ready)
        assert fakes.pid("worker") not in (0, worker) and fakes.pid("server") == server
        assert fakes.supervisor.statuses["worker"].state.restarts == 1

    run_fakes(worker_and_server, test)


def test_restarts_with_needs_restarts_after_a_needed_service(run_fakes: RunFakes) -> None:
    async def test(fakes: FakeServices) -> None:
        await fakes.until(lambda: fakes.supervisor.ready)
        server = fakes.pid("server")
        os.kill(fakes.pid("worker"), signal.SIGKILL)
        await fakes.until(lambda: fakes.pid("server") not in (0, server) and fakes.supervisor.ready)
        began = [line[:6] for line in fakes.events() if line.endswith("began")]
        assert began == ["worker", "server", "worker", "server"]

    run_fakes(
        lambda fakes: [fakes.service("worker"), fakes.service("server", needs=("worker",), restarts_with_needs=True)],
        test,
    )


def test_a_drained_service_does_not_end_again_with_a_needed_one(run_fakes: RunFakes) -> None:
    async def test(fakes: FakeServices) -> None:
        await fakes.until(lambda: fakes.supervisor.ready)
        fakes.supervisor.drain("server")
        await fakes.until(lambda: fakes.phase("server") == DRAINED)
        seen, restarts = len(fakes.seen), fakes.supervisor.statuses["worker"].state.restarts
        os.kill(fakes.pid("worker"), signal.SIGKILL)
        await fakes.until(lambda: fakes.supervisor.statuses["worker"].state.restarts > restarts)
        await fakes.until(lambda: fakes.phase("worker") == READY)
        assert {name for name, _ in fakes.seen[seen:]} == {"worker"} and fakes.phase("server") == DRAINED

    run_fakes(
        lambda fakes: [fakes.service("worker"), fakes.service("server", needs=("worker",), restarts_with_needs=True)],
        test,
    )


def test_kill_ends_workers_only(run_fakes: RunFakes) -> None:
    async def test(fakes: FakeServices) -> None:
        await fakes.until(lambda: fakes.supervisor.ready)
        worker, server = fakes.pid("worker"), fakes.pid("server")
        for name in ("server", "unknown", str(os.getpid())):
            fakes.supervisor.kill(name)
        fakes.supervisor.kill("worker")
        await fakes.until(lambda: fakes.pid("worker") not in (0, worker) and fakes.supervisor.ready)
        states = {name: one.state for name, one in fakes.supervisor.statuses.items()}
        assert (states["worker"].restarts, states["server"].restarts, fakes.pid("server")) == (1, 0, server)

    run_fakes(worker_and_server, test)


def test_a_crash_loop_is_reported(run_fakes: RunFakes) -> None:
    async def test(fakes: FakeServices) -> None:
        state = fakes.supervisor.statuses["worker"].state
        for crashes in range(1, QUICK.crashes + 1):
            await fakes.until(lambda: fakes.supervisor.ready)
            fakes.changed.clear()
            os.kill(state.pid, signal.SIGUSR1)
            await fakes.until(lambda crashes=crashes: state.restarts == crashes)
            assert state.phase == (LOOPING if crashes == QUICK.crashes else PAUSED)
            assert "ended with exit code 3" in state.message and "error: it was too much" in state.message
        await fakes.until(lambda: fakes.supervisor.ready)  # it is still restarted

    run_fakes(lambda fakes: [fakes.service("worker")], test)


def test_a_service_that_cannot_start_ends_the_cluster(run_fakes: RunFakes) -> None:
    async def test(fakes: FakeServices) -> None:
        await fakes.until(lambda: False)

    with pytest.raises(StartFailed, match=r"server ended with exit code 3 before .*server\.log:\nerror: nothing"):
        run_fakes(lambda fakes: [fakes.service("worker"), fakes.service("server", "fails", needs=("worker",))], test)


def test_a_service_that_is_always_killed_at_start_ends_the_cluster(run_fakes: RunFakes) -> None:
    """Another program may have sent the signal, so a start is retried a few times."""

    async def test(fakes: FakeServices) -> None:
        await fakes.until(lambda: fakes.supervisor.statuses["worker"].state.restarts > QUICK.crashes)

    with pytest.raises(StartFailed, match="worker was ended by SIGKILL before it was ready"):
        run_fakes(lambda fakes: [fakes.service("worker", "killed")], test)


def test_a_missing_program_is_reported(run_fakes: RunFakes) -> None:
    def make(fakes: FakeServices) -> list[Service]:
        return [
            Service(name="worker", role=ServiceRole.WORKER, host="127.0.0.1", port=1, command=("/no/such/program",))
        ]

    async def test(fakes: FakeServices) -> None:
        await fakes.until(lambda: False)

    with pytest.raises(StartFailed, match="cannot start /no/such/program"):
        run_fakes(make, test)


def test_a_service_that_ignores_sigterm_is_killed(run_fakes: RunFakes) -> None:
    pids: list[tuple[int, str]] = []

    async def test(fakes: FakeServices) -> None:
        await fakes.until(lambda: fakes.supervisor.ready)
        pids.append((fakes.pid("worker"), start_mark(fakes.pid("worker"))))

    run_fakes(lambda fakes: [fakes.service("worker", "stubborn")], test, stop_timeout=0.2)
    assert not is_same(*pids[0])


def test_a_second_stop_kills_at_once(run_fakes: RunFakes) -> None:
    async def test(fakes: FakeServices) -> None:
        await fakes.until(lambda: fakes.supervisor.ready)
        fakes.supervisor.stop()
        await asyncio.sleep(0)
        fakes.supervisor.stop()

    run_fakes(lambda fakes: [fakes.service("worker", "stubborn")], test, stop_timeout=3600.0)


def test_stop_while_a_server_loads(run_fakes: RunFakes) -> None:
    async def test(fakes: FakeServices) -> None:
        await fakes.until(lambda: fakes.supervisor.statuses["server"].state.message == "Loading model")
        assert fakes.phase("server") == STARTING and not fakes.supervisor.ready

    assert run_fakes(lambda fakes: [fakes.service("server", "loading")], test).phase("server") == ENDED


def test_a_drained_server_is_not_restarted(run_fakes: RunFakes) -> None:
    async def test(fakes: FakeServices) -> None:
        await fakes.until(lambda: fakes.supervisor.ready)
        fakes.supervisor.drain("unknown")
        fakes.supervisor.drain("server")
        await fakes.until(lambda: fakes.phase("server") == DRAINED)
        assert fakes.phase("worker") == READY and fakes.supervisor.ready
        assert [line[:6] for line in fakes.events() if line.endswith("ended")] == ["server"]

    run_fakes(worker_and_server, test)


def test_resume_restarts_a_drained_server(run_fakes: RunFakes) -> None:
    """Resuming works while the server is still draining. Other services are left alone."""

    async def test(fakes: FakeServices) -> None:
        await fakes.until(lambda: fakes.supervisor.ready)
        for name in ("unknown", "worker", "server"):
            fakes.supervisor.resume(name)
        for at_once in (False, True):
            fakes.supervisor.drain("server")
            if not at_once:
                await fakes.until(lambda: fakes.phase("server") == DRAINED)
            fakes.supervisor.resume("server")
            fakes.supervisor.resume("server")
            await fakes.until(lambda: fakes.phase("server") == READY)
        assert [line[:6] for line in fakes.events() if line.endswith("ended")] == ["server"] * 2

    run_fakes(worker_and_server, test)


def answer_with(monkeypatch: pytest.MonkeyPatch, answer: Callable[[httpx.Request], httpx.Response]) -> None:
    """Let every HTTP client of the supervisor get its responses from a function."""
    monkeypatch.setattr(httpx, "AsyncClient", partial(httpx.AsyncClient, transport=httpx.MockTransport(answer)))


def test_resume_reports_a_failed_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state has the reason. The gateway adds the server again before the start."""
    requests: list[tuple[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        requests.append((request.headers["authorization"], json.loads(request.content)))
        return httpx.Response(200, json={})

    async def test() -> None:
        server = replace(SERVER, command=("/no/such/program",))
        gateway = replace(SERVER, name="gateway", role=ServiceRole.GATEWAY, environment={ADMIN_KEY: "k"})
        supervisor = Supervisor([server, gateway], QUICK, GUARD, tmp_path, lambda status: None)
        status = supervisor.statuses["server"]
        status.drained, status.state.phase = True, DRAINED
        supervisor.resume("server")
        await until_async(lambda: status.drained and bool(status.state.message))
        assert status.state.phase == DRAINED
        assert status.state.message.startswith("cannot be started again: server: cannot start /no/such/program")

    answer_with(monkeypatch, answer)
    asyncio.run(test())
    ((key, body),) = requests
    assert key == "Bearer k" and body["replica"] == SERVER.address and body["drain"] is False


def test_pauses_and_crash_count_start_over_after_a_long_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready_times = iter([1.0, 1.0, 1.0, 60.0, 1.0, 59.0, None])
    pauses: list[float] = []
    phases: list[str] = []

    async def test() -> None:
        restart = RestartConfig(first=1.0, longest=8.0, settled=60.0, crashes=4)
        supervisor = Supervisor([SERVER], restart, GUARD, tmp_path, lambda status: None)
        status = supervisor.statuses["server"]

        async def fake_run(_: ServiceStatus) -> tuple[float | None, int]:
            ready_for = next(ready_times)
            status.drained = ready_for is None
            return ready_for, 1

        async def sleep(seconds: float) -> None:
            pauses.append(seconds)
            phases.append(status.state.phase)

        monkeypatch.setattr(supervisor, "_run_process", fake_run)
        monkeypatch.setattr(asyncio, "sleep", sleep)
        await supervisor._supervise(status)

    asyncio.run(test())
    expected = [1.0, 2.0, 4.0, 1.0, 2.0, 4.0]
    assert all(0.75 * most <= pause <= most for pause, most in zip(pauses, expected, strict=True)), pauses
    assert phases == [PAUSED] * 6


@pytest.mark.parametrize(("status", "why"), [(200, ""), (404, ""), (503, "503 no room"), (500, "500 no room")])
def test_a_worker_is_drained_if_the_server_moved_its_layers_or_had_none_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, why: str
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/cluster/drain" and json.loads(request.content) == {"endpoint": "10.0.0.1:50052"}
        return httpx.Response(status, json={"error": {"message": "no room", "code": status, "type": "x"}})

    async def test() -> None:
        worker = Service(name="worker", role=ServiceRole.WORKER, host="10.0.0.1", port=50052)
        server = replace(SERVER, needs=("worker",), command=("serve", "--rpc", worker.address))
        supervisor = Supervisor([worker, server], QUICK, GUARD, tmp_path, lambda status: None)
        supervisor.statuses["server"].ready.set()
        supervisor.drain("worker")
        state = supervisor.statuses["worker"].state
        await until_async(lambda: state.phase != DRAINING)
        assert state.phase == (READY if why else DRAINED) and state.message.endswith(why)

    answer_with(monkeypatch, answer)
    asyncio.run(test())


def workers_and_a_tap(*options: str, token: str | None = "secret") -> Callable[[FakeServices], list[Service]]:
    """Return a function that makes worker1 behind tap1, worker2, and a server with both addresses."""

    def make(fakes: FakeServices) -> list[Service]:
        tap = fakes.service("tap", name="tap1", needs=("worker1",))
        workers = [fakes.service("worker", name=f"worker{number}") for number in (1, 2)]
        flags = ("--rpc", f"{tap.address},{workers[1].address}", "--tensor-split", "3,2,1", *options)
        return [*workers, tap, fakes.service("server", *flags, needs=("worker1", "worker2", "tap1"), token=token)]

    return make


@pytest.mark.slow
@pytest.mark.parametrize("drained", ["worker1", "tap1"])
def test_a_drained_worker_ends_with_its_tap_after_its_layers_moved(run_fakes: RunFakes, drained: str) -> None:
    async def test(fakes: FakeServices) -> None:
        await fakes.until(lambda: fakes.supervisor.ready)
        services = {name: one.service for name, one in fakes.supervisor.statuses.items()}
        server = fakes.pid("server")
        fakes.supervisor.drain(drained)
        assert fakes.phase(drained) == DRAINING and fakes.supervisor.ready
        await fakes.until(lambda: fakes.phase("worker1") == fakes.phase("tap1") == DRAINED)
        after = [line for line in fakes.events() if not line.endswith("began")]
        name = f"server{services['server'].port}"
        assert after == [
            f"{name} /cluster/drain secret {services['tap1'].address}",
            f"worker{services['tap1'].port} ended",
            f"worker{services['worker1'].port} ended",
        ]
        assert fakes.pid("server") == server and fakes.phase("worker2") == READY
        os.kill(server, signal.SIGKILL)  # it restarts without the drained worker
        await fakes.until(lambda: fakes.pid("server") not in (0, server) and fakes.supervisor.ready)
        words = Path(f"/proc/{fakes.pid('server')}/cmdline").read_text().split("\0")
        assert words[words.index("--rpc") + 1] == services["worker2"].address
        assert words[words.index("--tensor-split") + 1] == "2,1"
        fakes.supervisor.drain("worker2")
        await fakes.until(lambda: fakes.phase("worker2") == DRAINED)
        alone = fakes.supervisor.statuses["server"].service
        assert alone.command[-2:] == ("server", str(alone.port)) and alone.needs == ()

    run_fakes(workers_and_a_tap(), test)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "token", "why"),
    [(("full",), "secret", "503 the others have no room"), ((), None, "llama-server cannot release a worker")],
)
def test_a_worker_is_not_drained_if_its_layers_cannot_move(
    run_fakes: RunFakes, options: tuple[str, ...], token: str | None, why: str
) -> None:
    async def test(fakes: FakeServices) -> None:
        await fakes.until(lambda: fakes.supervisor.ready)
        pids = {name: fakes.pid(name) for name in fakes.supervisor.statuses}
        fakes.supervisor.drain("worker1")
        await fakes.until(lambda: fakes.phase("worker1") == fakes.phase("tap1") == READY)
        message = fakes.supervisor.statuses["worker1"].state.message
        assert message.startswith("not drained: ") and why in message
        assert {name: fakes.pid(name) for name in pids} == pids and fakes.supervisor.ready

    run_fakes(workers_and_a_tap(*options, token=token), test)


@pytest.mark.slow
def test_a_worker_of_a_drained_server_ends_at_once(run_fakes: RunFakes) -> None:
    async def test(fakes: FakeServices) -> None:
        await fakes.until(lambda: fakes.supervisor.ready)
        fakes.supervisor.drain("server")
        await fakes.until(lambda: fakes.phase("server") == DRAINED)
        fakes.supervisor.drain("worker1")
        await fakes.until(lambda: fakes.phase("worker1") == fakes.phase("tap1") == DRAINED)
        assert fakes.phase("worker2") == READY

    run_fakes(workers_and_a_tap(), test)


def test_a_worker_on_another_machine_is_waited_for(run_fakes: RunFakes) -> None:
    remote: list[Service] = []

    def make(fakes: FakeServices) -> list[Service]:
        there = fakes.service("worker")
        remote.append(there)
        return [
            Service(name="worker", role=ServiceRole.WORKER, host="127.0.0.1", port=there.port),
            fakes.service("server", needs=("worker",)),
        ]

    async def test(fakes: FakeServices) -> None:
        await fakes.until(lambda: "cannot connect" in fakes.supervisor.statuses["worker"].state.message)
        assert fakes.phase("server") == WAITING
        process = await asyncio.create_subprocess_exec(*remote[0].command)
        try:
            await fakes.until(lambda: fakes.supervisor.ready)
        finally:
            process.kill()
            await process.wait()

    run_fakes(make, test)


@pytest.mark.parametrize("role", ["worker", "server"])
def test_a_wrong_program_on_the_port_is_not_ready(run_fakes: RunFakes, role: str) -> None:

    def make(fakes: FakeServices) -> list[Service]:
        other = "server" if role == "worker" else "worker"
        fake = fakes.service(other)
        return [Service(name=role, role=ServiceRole(role), host="127.0.0.1", port=fake.port, command=fake.command)]

    async def test(fakes: FakeServices) -> None:
        await fakes.until(
            lambda: fakes.supervisor.statuses[role].state.message not in ("", "not asked yet") and fakes.events()
        )
        await fakes.until(lambda: "cannot connect" not in fakes.supervisor.statuses[role].state.message)
        assert fakes.phase(role) == STARTING

    run_fakes(make, test)


class MovingNodes:
    """Nodes that start a service at another port each time."""

    def __init__(self, fakes: FakeServices) -> None:
        self._fakes = fakes
        self.commands: list[tuple[str, list[str]]] = []
        self.away = asyncio.Event()
        self.away.set()
        self._guard = Watchdog(GUARD)

    async def start(
        self, service: Service, arguments: Sequence[str], *, on_line: Any, on_exit: Any, on_wait: Callable[[str], None]
    ) -> tuple[Service, GuardedProcess]:
        on_wait("no room")
        await self.away.wait()
        self.commands.append((service.name, [*arguments]))
        placed = replace(service, host="127.0.0.1", port=free_port())
        command = [sys.executable, "-S", FAKE, str(service.role), str(placed.port)]
        return placed, GuardedProcess(command, os.environ, self._guard, on_line=on_line, on_exit=on_exit)


@pytest.mark.slow
def test_new_addresses_are_sent_to_dependent_services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, str | None, str]] = []
    refused = [True]
    fakes = FakeServices(tmp_path)
    monkeypatch.setenv("FAKE_EVENTS", str(fakes.events_file))

    async def fake_send(service: Service, before: str | None, now: str) -> bool:
        sent.append((service.name, before, now))
        fakes.changed.set()
        return not (refused and refused.pop())

    monkeypatch.setattr("llamado.cluster.supervisor.send_address", fake_send)
    monkeypatch.setattr("llamado.cluster.supervisor._ADDRESS_PAUSE", 0.01)

    async def main() -> None:
        nodes = MovingNodes(fakes)

        def placed(name: str, role: str, *words: str | AddressFlag, needs: tuple[str, ...] = ()) -> Service:
            return Service(name=name, role=ServiceRole(role), host="", port=0, command=words, needs=needs,
                           reservation=Reservation(1), needs_once=True)  # fmt: skip

        services = [
            placed("a", "worker", "worker"),
            placed("b", "worker", "worker"),
            placed("s", "server", "serve", AddressFlag("--rpc", ("a", "b")), needs=("a", "b")),
        ]
        fakes.supervisor = Supervisor(services, QUICK, GUARD, tmp_path, fakes.record_change, nodes)
        running = asyncio.create_task(fakes.supervisor.run())
        await fakes.until(lambda: fakes.phase("s") == READY)
        statuses = fakes.supervisor.statuses
        first = {name: one.state.address for name, one in statuses.items()}
        assert nodes.commands[-1] == ("s", ["serve", "--rpc", f"{first['a']},{first['b']}"]) and not sent

        os.kill(fakes.pid("a"), signal.SIGKILL)
        await fakes.until(lambda: fakes.phase("a") == READY and statuses["a"].state.address != first["a"])
        now = statuses["a"].state.address
        await fakes.until(lambda: len(sent) == 2)
        assert sent == [("s", first["a"], now)] * 2, "repeated until it is accepted"

        nodes.away.clear()  # no node for a worker that ends now
        os.kill(fakes.pid("b"), signal.SIGKILL)
        await fakes.until(lambda: statuses["b"].state.message == "no room")
        del sent[:]
        os.kill(fakes.pid("s"), signal.SIGKILL)
        await fakes.until(lambda: statuses["s"].state.message == "no room")
        nodes.away.set()
        await fakes.until(lambda: fakes.phase("s") == READY and fakes.phase("b") == READY)
        started = [words for name, words in nodes.commands if name == "s"]
        assert started[1] == ["serve", "--rpc", now], "without the missing worker"
        await fakes.until(lambda: ("s", None, statuses["b"].state.address) in sent)

        refused[:] = [True] * 1000  # a server that keeps refusing a new address is restarted with it
        monkeypatch.setattr("llamado.cluster.supervisor._ADDRESS_SECONDS", 0.05)
        pid = fakes.pid("s")
        os.kill(fakes.pid("a"), signal.SIGKILL)
        await fakes.until(lambda: fakes.pid("s") not in (0, pid) and fakes.phase("s") == READY)
        assert statuses["a"].state.address in nodes.commands[-1][1][2]
        fakes.supervisor.stop()
        await running

    asyncio.run(main())


def test_a_server_gets_addresses_that_changed_while_it_waited_for_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[str, str | None, str]] = []

    async def fake_send(service: Service, before: str | None, now: str) -> bool:
        sent.append((service.name, before, now))
        return True

    monkeypatch.setattr("llamado.cluster.supervisor.send_address", fake_send)

    class FakeProcess:
        pid = 1
        last_lines: Sequence[str] = ()

        def signal(self, sig: int) -> None:
            raise AssertionError(sig)

    def worker(name: str, port: int) -> Service:
        return Service(name=name, role=ServiceRole.WORKER, host="127.0.0.1", port=port)

    async def main() -> None:
        class BusyNode:
            """A node that has room only after worker `b` moved and `c` became ready."""

            async def start(
                self, service: Service, arguments: Sequence[str], **callbacks: Any
            ) -> tuple[Service, FakeProcess]:
                assert arguments == ["serve", "--rpc", "127.0.0.1:1,127.0.0.1:2"]
                statuses["b"].service = replace(statuses["b"].service, port=4)
                statuses["c"].ready.set()
                finish.append(callbacks["on_exit"])
                return replace(service, host="127.0.0.1", port=9), FakeProcess()

        finish: list[Callable[[int], None]] = []
        server = Service(
            name="s", role=ServiceRole.SERVER, host="", port=0, reservation=Reservation(1),
            command=("serve", AddressFlag("--rpc", ("a", "b", "c"))),
        )  # fmt: skip
        services = [worker("a", 1), worker("b", 2), worker("c", 3), server]
        supervisor = Supervisor(services, QUICK, GUARD, tmp_path, lambda one: None, BusyNode())
        statuses = supervisor.statuses
        statuses["a"].ready.set()
        statuses["b"].ready.set()
        fake_run = asyncio.create_task(supervisor._run_process(statuses["s"]))
        await until_async(lambda: bool(finish))
        await until_async(lambda: len(sent) >= 2)
        finish[0](0)
        await fake_run
        assert set(sent) == {("s", None, "127.0.0.1:3"), ("s", "127.0.0.1:2", "127.0.0.1:4")}

    asyncio.run(main())


def test_an_address_is_not_sent_again_after_the_service_has_moved_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    worker = Service(name="a", role=ServiceRole.WORKER, host="127.0.0.1", port=1)
    server = Service(
        name="s", role=ServiceRole.SERVER, host="127.0.0.1", port=9, command=("serve", AddressFlag("--rpc", ("a",)))
    )
    monkeypatch.setattr("llamado.cluster.supervisor._ADDRESS_PAUSE", 0.0)

    async def main() -> None:
        supervisor = Supervisor([worker, server], QUICK, GUARD, tmp_path, lambda one: None)
        statuses = supervisor.statuses

        async def fake_send(service: Service, before: str | None, now: str) -> bool:
            sent.append(now)
            statuses["a"].service = replace(worker, port=2)
            return len(sent) > 1

        monkeypatch.setattr("llamado.cluster.supervisor.send_address", fake_send)
        statuses["s"].exited = asyncio.get_running_loop().create_future()
        await supervisor._send_address(statuses["s"], statuses["a"], "127.0.0.1:1")
        assert sent == ["127.0.0.1:1"]
        assert not statuses["s"].sent_addresses

    asyncio.run(main())
