"""How services are started, kept running and ended, with services that compute nothing."""

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
from llamado.cluster.services import ADMIN_KEY, CLUSTER_TOKEN, Addresses, Reservation, Service, ServiceRole
from llamado.cluster.supervisor import (
    DRAINED,
    DRAINING,
    ENDED,
    LOOPING,
    PAUSED,
    READY,
    STARTING,
    WAITING,
    Standing,
    StartFailed,
    Supervisor,
)
from llamado.processes.guarded import GuardedProcess, Watchdog
from llamado.processes.identity import is_same, start_mark

FAKE = str(Path(__file__).parent / "fake_service.py")
QUICK = RestartConfig(first=0.01, longest=0.02, settled=60.0, crashes=3)


class Fakes:
    """Services of a test, and what was seen of them."""

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
        follows: bool = False,
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
            follows=follows,
        )

    def note(self, one: Standing) -> None:
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
        return self.supervisor.standings[name].state.phase

    def pid(self, name: str) -> int:
        return self.supervisor.standings[name].state.pid


@pytest.fixture
def run_fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Fakes]:
    """Runs a supervisor of services that `make` gives, with what `test` does meanwhile; then stops it."""

    def run(
        make: Callable[[Fakes], list[Service]],
        test: Callable[[Fakes], Awaitable[None]],
        stop_timeout: float = GUARD,
        restart: RestartConfig = QUICK,
    ) -> Fakes:
        async def main() -> Fakes:
            fakes = Fakes(tmp_path)
            monkeypatch.setenv("FAKE_EVENTS", str(fakes.events_file))
            fakes.supervisor = Supervisor(make(fakes), restart, stop_timeout, tmp_path, fakes.note)
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


Run = Callable[..., Fakes]


def worker_and_server(fakes: Fakes) -> list[Service]:
    return [fakes.service("worker"), fakes.service("server", needs=("worker",))]


def test_started_in_order_and_ended_in_the_opposite_one(run_fakes: Run) -> None:
    pids: list[tuple[int, str]] = []

    async def test(fakes: Fakes) -> None:
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


def test_a_killed_one_is_started_again_and_the_others_stay(run_fakes: Run) -> None:
    async def test(fakes: Fakes) -> None:
        await fakes.until(lambda: fakes.supervisor.ready)
        server, worker = fakes.pid("server"), fakes.pid("worker")
        os.kill(worker, signal.SIGKILL)
        await fakes.until(lambda: fakes.phase("worker") == PAUSED)
        assert "was ended by SIGKILL; again in" in fakes.supervisor.standings["worker"].state.message
        await fakes.until(lambda: fakes.supervisor.ready)
        assert fakes.pid("worker") not in (0, worker) and fakes.pid("server") == server
        assert fakes.supervisor.standings["worker"].state.restarts == 1

    run_fakes(worker_and_server, test)


def test_one_that_follows_is_started_again_after_what_it_needs(run_fakes: Run) -> None:
    def make(fakes: Fakes) -> list[Service]:
        return [fakes.service("worker"), fakes.service("server", needs=("worker",), follows=True)]

    async def test(fakes: Fakes) -> None:
        await fakes.until(lambda: fakes.supervisor.ready)
        server = fakes.pid("server")
        os.kill(fakes.pid("worker"), signal.SIGKILL)
        await fakes.until(lambda: fakes.pid("server") not in (0, server) and fakes.supervisor.ready)
        began = [line[:6] for line in fakes.events() if line.endswith("began")]
        assert began == ["worker", "server", "worker", "server"]

    run_fakes(make, test)


def test_a_worker_is_killed_on_demand_and_nothing_else_is(run_fakes: Run) -> None:
    def make(fakes: Fakes) -> list[Service]:
        return [fakes.service("worker"), fakes.service("server", needs=("worker",))]

    async def test(fakes: Fakes) -> None:
        await fakes.until(lambda: fakes.supervisor.ready)
        worker, server = fakes.pid("worker"), fakes.pid("server")
        for name in ("server", "nobody", str(os.getpid())):
            fakes.supervisor.kill(name)
        fakes.supervisor.kill("worker")
        await fakes.until(lambda: fakes.pid("worker") not in (0, worker) and fakes.supervisor.ready)
        states = {name: one.state for name, one in fakes.supervisor.standings.items()}
        assert (states["worker"].restarts, states["server"].restarts, fakes.pid("server")) == (1, 0, server)

    run_fakes(make, test)


def test_a_crash_loop_has_a_name(run_fakes: Run) -> None:
    def make(fakes: Fakes) -> list[Service]:
        return [fakes.service("worker")]

    async def test(fakes: Fakes) -> None:
        state = fakes.supervisor.standings["worker"].state
        for crashes in range(1, QUICK.crashes + 1):
            await fakes.until(lambda: fakes.supervisor.ready)
            fakes.changed.clear()
            os.kill(state.pid, signal.SIGUSR1)
            await fakes.until(lambda crashes=crashes: state.restarts == crashes)
            assert state.phase == (LOOPING if crashes == QUICK.crashes else PAUSED)
            assert "ended with exit code 3" in state.message and "error: it was too much" in state.message
        await fakes.until(lambda: fakes.supervisor.ready)  # it is tried all the same

    run_fakes(make, test)


def test_one_that_never_works_ends_all(run_fakes: Run) -> None:
    def make(fakes: Fakes) -> list[Service]:
        return [fakes.service("worker"), fakes.service("server", "fails", needs=("worker",))]

    async def test(fakes: Fakes) -> None:
        await fakes.until(lambda: False)

    with pytest.raises(StartFailed, match=r"server ended with exit code 3 before .*server\.log says:\nerror: nothing"):
        run_fakes(make, test)


def test_one_that_is_always_killed_before_it_works_ends_all(run_fakes: Run) -> None:
    """A signal may be another program's doing: it is tried again, but not for ever."""

    def make(fakes: Fakes) -> list[Service]:
        return [fakes.service("worker", "killed")]

    async def test(fakes: Fakes) -> None:
        await fakes.until(lambda: fakes.supervisor.standings["worker"].state.restarts > QUICK.crashes)

    with pytest.raises(StartFailed, match="worker was ended by SIGKILL before it was ready"):
        run_fakes(make, test)


def test_a_program_that_is_not_there(run_fakes: Run) -> None:
    def make(fakes: Fakes) -> list[Service]:
        return [
            Service(name="worker", role=ServiceRole.WORKER, host="127.0.0.1", port=1, command=("/no/such/program",))
        ]

    async def test(fakes: Fakes) -> None:
        await fakes.until(lambda: False)

    with pytest.raises(StartFailed, match="cannot start /no/such/program"):
        run_fakes(make, test)


def test_a_stubborn_one_is_killed_in_the_end(run_fakes: Run) -> None:
    def make(fakes: Fakes) -> list[Service]:
        return [fakes.service("worker", "stubborn")]

    pids: list[tuple[int, str]] = []

    async def test(fakes: Fakes) -> None:
        await fakes.until(lambda: fakes.supervisor.ready)
        pids.append((fakes.pid("worker"), start_mark(fakes.pid("worker"))))

    run_fakes(make, test, stop_timeout=0.2)
    assert not is_same(*pids[0])


def test_a_second_stop_waits_for_nobody(run_fakes: Run) -> None:
    def make(fakes: Fakes) -> list[Service]:
        return [fakes.service("worker", "stubborn")]

    async def test(fakes: Fakes) -> None:
        await fakes.until(lambda: fakes.supervisor.ready)
        fakes.supervisor.stop()
        await asyncio.sleep(0)
        fakes.supervisor.stop()

    run_fakes(make, test, stop_timeout=3600.0)


def test_stopped_while_one_loads(run_fakes: Run) -> None:
    def make(fakes: Fakes) -> list[Service]:
        return [fakes.service("server", "loading")]

    async def test(fakes: Fakes) -> None:
        await fakes.until(lambda: fakes.supervisor.standings["server"].state.message == "Loading model")
        assert fakes.phase("server") == STARTING and not fakes.supervisor.ready

    assert run_fakes(make, test).phase("server") == ENDED


def test_a_drained_one_stays_ended(run_fakes: Run) -> None:
    async def test(fakes: Fakes) -> None:
        await fakes.until(lambda: fakes.supervisor.ready)
        fakes.supervisor.drain("no such one")
        fakes.supervisor.drain("server")
        await fakes.until(lambda: fakes.phase("server") == DRAINED)
        assert fakes.phase("worker") == READY and fakes.supervisor.ready
        assert [line[:6] for line in fakes.events() if line.endswith("ended")] == ["server"]

    run_fakes(worker_and_server, test)


def test_a_drained_server_is_started_again(run_fakes: Run) -> None:
    """Also if it is asked for while it is drained; a service that is no drained server is left as it is."""

    async def test(fakes: Fakes) -> None:
        await fakes.until(lambda: fakes.supervisor.ready)
        for name in ("no such one", "worker", "server"):
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


def test_a_drained_server_that_does_not_start_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state has the reason; what else runs goes on. The gateway is asked to take it back before."""
    asked: list[tuple[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append((request.headers["authorization"], json.loads(request.content)))
        return httpx.Response(200, json={})

    async def keep(one: Standing) -> None:
        raise StartFailed("server ended with exit code 1")

    async def test() -> None:
        gateway = replace(SERVER, name="gateway", role=ServiceRole.GATEWAY, environment={ADMIN_KEY: "k"})
        supervisor = Supervisor([SERVER, gateway], QUICK, GUARD, tmp_path, lambda one: None)
        one = supervisor.standings["server"]
        one.drained, one.state.phase = True, DRAINED
        monkeypatch.setattr(supervisor, "_keep", keep)
        supervisor.resume("server")
        while supervisor._tasks:
            await asyncio.gather(*supervisor._tasks)
        assert one.drained and one.state.phase == DRAINED
        assert one.state.message == "cannot be started again: server ended with exit code 1"

    transport, real = httpx.MockTransport(answer), httpx.AsyncClient
    monkeypatch.setattr(httpx, "AsyncClient", lambda **given: real(**{**given, "transport": transport}))
    asyncio.run(test())
    ((key, body),) = asked
    assert key == "Bearer k" and body["replica"] == SERVER.address and body["drain"] is False


def supervisor_of(service: Service, folder: Path, restart: RestartConfig = QUICK) -> tuple[Supervisor, Standing]:
    """A supervisor that runs nothing, and its only service."""
    supervisor = Supervisor([service], restart, GUARD, folder, lambda one: None)
    return supervisor, supervisor.standings[service.name]


SERVER = Service(
    name="server",
    role=ServiceRole.SERVER,
    host="127.0.0.1",
    port=1,
    command=("server",),
    environment={CLUSTER_TOKEN: "secret"},
)


def test_one_that_was_ready_for_long_is_started_again_as_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its pauses nor its crashes are counted on from before."""
    lives = iter([1.0, 1.0, 1.0, 60.0, 1.0, 59.0, None])
    pauses: list[float] = []
    phases: list[str] = []

    async def test() -> None:
        restart = RestartConfig(first=1.0, longest=8.0, settled=60.0, crashes=4)
        supervisor, one = supervisor_of(SERVER, tmp_path, restart)

        async def life(one: Standing) -> tuple[float | None, int]:
            ready_for = next(lives)
            one.drained = ready_for is None
            return ready_for, 1

        async def sleep(seconds: float) -> None:
            pauses.append(seconds)
            phases.append(one.state.phase)

        monkeypatch.setattr(supervisor, "_life", life)
        monkeypatch.setattr(asyncio, "sleep", sleep)
        await supervisor._keep(one)

    asyncio.run(test())
    expected = [1.0, 2.0, 4.0, 1.0, 2.0, 4.0]
    assert all(0.75 * most <= pause <= most for pause, most in zip(pauses, expected, strict=True)), pauses
    assert phases == [PAUSED] * 6


@pytest.mark.parametrize(("status", "why"), [(200, ""), (404, ""), (503, "503 no room"), (500, "500 no room")])
def test_a_worker_is_let_go_by_a_server_that_moved_its_layers_or_has_none_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, why: str
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/cluster/drain" and json.loads(request.content) == {"endpoint": "10.0.0.1:50052"}
        return httpx.Response(status, json={"error": {"message": "no room", "code": status, "type": "x"}})

    async def test() -> str:
        supervisor, server = supervisor_of(SERVER, tmp_path)
        server.ready.set()
        transport = httpx.MockTransport(answer)
        monkeypatch.setattr(httpx, "AsyncClient", partial(httpx.AsyncClient, transport=transport))
        return await supervisor._move_layers(server, "10.0.0.1:50052")

    found = asyncio.run(test())
    assert bool(found) == bool(why) and found.endswith(why)


def workers_and_a_tap(*options: str, token: str | None = "secret") -> Callable[[Fakes], list[Service]]:
    """worker1 behind tap1, worker2, and a server that is started with the addresses of both."""

    def make(fakes: Fakes) -> list[Service]:
        tap = fakes.service("tap", name="tap1", needs=("worker1",))
        workers = [fakes.service("worker", name=f"worker{number}") for number in (1, 2)]
        flags = ("--rpc", f"{tap.address},{workers[1].address}", "--tensor-split", "3,2,1", *options)
        return [*workers, tap, fakes.service("server", *flags, needs=("worker1", "worker2", "tap1"), token=token)]

    return make


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["worker1", "tap1"])
def test_a_drained_worker_ends_with_its_tap_once_its_layers_are_elsewhere(run_fakes: Run, asked: str) -> None:
    async def test(fakes: Fakes) -> None:
        await fakes.until(lambda: fakes.supervisor.ready)
        services = {name: one.service for name, one in fakes.supervisor.standings.items()}
        server = fakes.pid("server")
        fakes.supervisor.drain(asked)
        assert fakes.phase(asked) == DRAINING and fakes.supervisor.ready
        await fakes.until(lambda: fakes.phase("worker1") == fakes.phase("tap1") == DRAINED)
        after = [line for line in fakes.events() if not line.endswith("began")]
        name = f"server{services['server'].port}"
        assert after == [
            f"{name} /cluster/drain secret {services['tap1'].address}",
            f"worker{services['tap1'].port} ended",
            f"worker{services['worker1'].port} ended",
        ]
        assert fakes.pid("server") == server and fakes.phase("worker2") == READY
        os.kill(server, signal.SIGKILL)  # the next one is started without it
        await fakes.until(lambda: fakes.pid("server") not in (0, server) and fakes.supervisor.ready)
        words = Path(f"/proc/{fakes.pid('server')}/cmdline").read_text().split("\0")
        assert words[words.index("--rpc") + 1] == services["worker2"].address
        assert words[words.index("--tensor-split") + 1] == "2,1"
        fakes.supervisor.drain("worker2")
        await fakes.until(lambda: fakes.phase("worker2") == DRAINED)
        alone = fakes.supervisor.standings["server"].service
        assert alone.command[-2:] == ("server", str(alone.port)) and alone.needs == ()

    run_fakes(workers_and_a_tap(), test)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "token", "why"),
    [(("full",), "secret", "503 the others have no room"), ((), None, "llama-server cannot do without a worker")],
)
def test_a_worker_whose_layers_cannot_move_stays(
    run_fakes: Run, options: tuple[str, ...], token: str | None, why: str
) -> None:
    async def test(fakes: Fakes) -> None:
        await fakes.until(lambda: fakes.supervisor.ready)
        pids = {name: fakes.pid(name) for name in fakes.supervisor.standings}
        fakes.supervisor.drain("worker1")
        await fakes.until(lambda: fakes.phase("worker1") == fakes.phase("tap1") == READY)
        message = fakes.supervisor.standings["worker1"].state.message
        assert message.startswith("not drained: ") and why in message
        assert {name: fakes.pid(name) for name in pids} == pids and fakes.supervisor.ready

    run_fakes(workers_and_a_tap(*options, token=token), test)


@pytest.mark.slow
def test_a_worker_of_a_server_that_is_drained_just_ends(run_fakes: Run) -> None:
    async def test(fakes: Fakes) -> None:
        await fakes.until(lambda: fakes.supervisor.ready)
        fakes.supervisor.drain("server")
        await fakes.until(lambda: fakes.phase("server") == DRAINED)
        fakes.supervisor.drain("worker1")
        await fakes.until(lambda: fakes.phase("worker1") == fakes.phase("tap1") == DRAINED)
        assert fakes.phase("worker2") == READY

    run_fakes(workers_and_a_tap(), test)


def test_one_elsewhere_is_waited_for(run_fakes: Run) -> None:
    elsewhere: list[Service] = []

    def make(fakes: Fakes) -> list[Service]:
        there = fakes.service("worker")
        elsewhere.append(there)
        return [
            Service(name="worker", role=ServiceRole.WORKER, host="127.0.0.1", port=there.port),
            fakes.service("server", needs=("worker",)),
        ]

    async def test(fakes: Fakes) -> None:
        await fakes.until(lambda: "cannot connect" in fakes.supervisor.standings["worker"].state.message)
        assert fakes.phase("server") == WAITING
        process = await asyncio.create_subprocess_exec(*elsewhere[0].command)
        try:
            await fakes.until(lambda: fakes.supervisor.ready)
        finally:
            process.kill()
            await process.wait()

    run_fakes(make, test)


@pytest.mark.parametrize("role", ["worker", "server"])
def test_what_answers_wrongly_is_not_ready(run_fakes: Run, role: str) -> None:
    """A listening socket is no worker, and no server."""

    def make(fakes: Fakes) -> list[Service]:
        other = "server" if role == "worker" else "worker"
        fake = fakes.service(other)
        return [Service(name=role, role=ServiceRole(role), host="127.0.0.1", port=fake.port, command=fake.command)]

    async def test(fakes: Fakes) -> None:
        await fakes.until(
            lambda: fakes.supervisor.standings[role].state.message not in ("", "not asked yet") and fakes.events()
        )
        await fakes.until(lambda: "cannot connect" not in fakes.supervisor.standings[role].state.message)
        assert fakes.phase(role) == STARTING

    run_fakes(make, test)


class Elsewhere:
    """Nodes that start a service's process at another port each time."""

    def __init__(self, fakes: Fakes) -> None:
        self._fakes = fakes
        self.commands: list[tuple[str, list[str]]] = []
        self.away = asyncio.Event()
        self.away.set()
        self._guard = Watchdog(GUARD)

    async def start(
        self, service: Service, words: Sequence[str], *, said: Any, ended: Any, waiting: Callable[[str], None]
    ) -> tuple[Service, GuardedProcess]:
        waiting("no room")
        await self.away.wait()
        self.commands.append((service.name, [*words]))
        placed = replace(service, host="127.0.0.1", port=free_port())
        command = [sys.executable, "-S", FAKE, str(service.role), str(placed.port)]
        return placed, GuardedProcess(command, os.environ, self._guard, said=said, ended=ended)


@pytest.mark.slow
def test_services_that_come_back_elsewhere_are_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, str | None, str]] = []
    refused = [True]
    fakes = Fakes(tmp_path)
    monkeypatch.setenv("FAKE_EVENTS", str(fakes.events_file))

    async def tell(service: Service, before: str | None, now: str) -> bool:
        told.append((service.name, before, now))
        fakes.changed.set()
        return not (refused and refused.pop())

    monkeypatch.setattr("llamado.cluster.supervisor.tell_address", tell)
    monkeypatch.setattr("llamado.cluster.supervisor._TELL_PAUSE", 0.01)

    async def main() -> None:
        nodes = Elsewhere(fakes)

        def placed(name: str, role: str, *words: str | Addresses, needs: tuple[str, ...] = ()) -> Service:
            return Service(name=name, role=ServiceRole(role), host="", port=0, command=words, needs=needs,
                           reserves=Reservation(1), goes_without=True)  # fmt: skip

        services = [
            placed("a", "worker", "worker"),
            placed("b", "worker", "worker"),
            placed("s", "server", "serve", Addresses("--rpc", ("a", "b")), needs=("a", "b")),
        ]
        fakes.supervisor = Supervisor(services, QUICK, GUARD, tmp_path, fakes.note, nodes)
        running = asyncio.create_task(fakes.supervisor.run())
        await fakes.until(lambda: fakes.phase("s") == READY)
        standings = fakes.supervisor.standings
        first = {name: one.state.address for name, one in standings.items()}
        assert nodes.commands[-1] == ("s", ["serve", "--rpc", f"{first['a']},{first['b']}"]) and not told

        os.kill(fakes.pid("a"), signal.SIGKILL)
        await fakes.until(lambda: fakes.phase("a") == READY and standings["a"].state.address != first["a"])
        now = standings["a"].state.address
        await fakes.until(lambda: len(told) == 2)
        assert told == [("s", first["a"], now)] * 2, "until it is taken in, and once then"

        nodes.away.clear()  # there is no room for a worker that ends now
        os.kill(fakes.pid("b"), signal.SIGKILL)
        await fakes.until(lambda: standings["b"].state.message == "no room")
        del told[:]
        os.kill(fakes.pid("s"), signal.SIGKILL)
        await fakes.until(lambda: standings["s"].state.message == "no room")
        nodes.away.set()
        await fakes.until(lambda: fakes.phase("s") == READY and fakes.phase("b") == READY)
        started = [words for name, words in nodes.commands if name == "s"]
        assert started[1] == ["serve", "--rpc", now], "without the one that is away"
        await fakes.until(lambda: ("s", None, standings["b"].state.address) in told)

        refused[:] = [True] * 1000  # it does not go on with the new one: it is started again, and has it
        monkeypatch.setattr("llamado.cluster.supervisor._TELL", 0.05)
        pid = fakes.pid("s")
        os.kill(fakes.pid("a"), signal.SIGKILL)
        await fakes.until(lambda: fakes.pid("s") not in (0, pid) and fakes.phase("s") == READY)
        assert standings["a"].state.address in nodes.commands[-1][1][2]
        fakes.supervisor.stop()
        await running

    asyncio.run(main())


def test_a_server_gets_the_addresses_that_changed_while_it_waited_for_a_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[str, str | None, str]] = []

    async def tell(service: Service, before: str | None, now: str) -> bool:
        sent.append((service.name, before, now))
        return True

    monkeypatch.setattr("llamado.cluster.supervisor.tell_address", tell)

    class Started:
        pid = 1
        last_lines: Sequence[str] = ()

        def signal(self, sig: int) -> None:
            raise AssertionError(sig)

    def worker(name: str, port: int) -> Service:
        return Service(name=name, role=ServiceRole.WORKER, host="127.0.0.1", port=port)

    async def main() -> None:
        class Place:
            """One place, which becomes free after worker `b` moved and `c` became ready."""

            async def start(self, service: Service, words: Sequence[str], **callbacks: Any) -> tuple[Service, Started]:
                assert words == ["serve", "--rpc", "127.0.0.1:1,127.0.0.1:2"]
                standings["b"].service = replace(standings["b"].service, port=4)
                standings["c"].ready.set()
                finish.append(callbacks["ended"])
                return replace(service, host="127.0.0.1", port=9), Started()

        finish: list[Callable[[int], None]] = []
        server = Service(
            name="s", role=ServiceRole.SERVER, host="", port=0, reserves=Reservation(1),
            command=("serve", Addresses("--rpc", ("a", "b", "c"))),
        )  # fmt: skip
        services = [worker("a", 1), worker("b", 2), worker("c", 3), server]
        supervisor = Supervisor(services, QUICK, GUARD, tmp_path, lambda one: None, Place())
        standings = supervisor.standings
        standings["a"].ready.set()
        standings["b"].ready.set()
        life = asyncio.create_task(supervisor._life(standings["s"]))
        await until_async(lambda: bool(finish))
        await until_async(lambda: len(sent) >= 2)
        finish[0](0)
        await life
        assert set(sent) == {("s", None, "127.0.0.1:3"), ("s", "127.0.0.1:2", "127.0.0.1:4")}

    asyncio.run(main())
