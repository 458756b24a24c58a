"""States of supervised services, without processes: phases, messages, and requests that change nothing."""

from __future__ import annotations

import asyncio
import functools
import signal
from collections import deque
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from waiting import until_async

from llamado.cluster.file import RestartConfig
from llamado.cluster.services import AddressFlag, Service, ServiceRole
from llamado.cluster.supervisor import (
    DRAINED,
    DRAINING,
    ENDED,
    LOOPING,
    PAUSED,
    READY,
    STARTING,
    STOPPING,
    WAITING,
    ServiceStatus,
    StartFailed,
    Supervisor,
    _signal_name,
)


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in an event loop of its own."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


class FakeProcess:
    """Records signals; `exited` ends with the first of `fatal`."""

    pid = 77

    def __init__(self, *fatal: int, lines: int = 0) -> None:
        self.last_lines = deque(f"line {i}" for i in range(lines))
        self.signals: list[int] = []
        self.fatal = fatal
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def signal(self, sig: int) -> None:
        self.signals.append(sig)
        if sig in self.fatal and not self.exited.done():
            self.exited.set_result(0)


def service(name: str, role: ServiceRole = ServiceRole.SERVER, **more: Any) -> Service:
    return Service(name=name, role=role, host="127.0.0.1", port=1, command=more.pop("command", (name,)), **more)


def supervisor(
    tmp_path: Path, *services: Service, stop_timeout: float = 0.01
) -> tuple[Supervisor, list[tuple[str, str]]]:
    changes: list[tuple[str, str]] = []
    restart = RestartConfig(first=0.5, longest=4.0, settled=60.0, crashes=3)
    found = Supervisor(
        services,
        restart,
        stop_timeout,
        tmp_path,
        lambda status: changes.append((status.state.phase, status.state.message)),
    )
    return found, changes


def start(status: ServiceStatus, process: FakeProcess, phase: str = READY) -> None:
    status.process, status.exited = process, process.exited
    status.state.phase = phase
    if phase == READY:
        status.ready.set()


@in_loop
async def test_a_phase_is_reported_once_and_its_begin_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, changes = supervisor(tmp_path, service("a"))
    status = found.statuses["a"]
    for clock, phase, message in (
        (1.0, STARTING, ""),
        (2.0, STARTING, "50%"),
        (3.0, STARTING, "50%"),
        (4.0, READY, ""),
    ):
        monkeypatch.setattr("llamado.cluster.supervisor.time.time", lambda clock=clock: clock)
        found._set_phase(status, phase, message)
        assert status.state.since == (4.0 if phase == READY else 1.0) and status.ready.is_set() == (phase == READY)
    assert changes == [(STARTING, ""), (STARTING, "50%"), (READY, "")]
    found._set_phase(status, STOPPING, "")
    assert not status.ready.is_set()


@pytest.mark.parametrize(
    ("phase", "drained", "is_ready"),
    [
        (READY, False, True),
        (WAITING, False, False),
        (DRAINING, False, True),
        (DRAINED, True, True),
        (PAUSED, False, False),
    ],
)
@in_loop
async def test_a_cluster_is_ready_without_drained_services(
    tmp_path: Path, phase: str, drained: bool, is_ready: bool
) -> None:
    found, _ = supervisor(tmp_path, service("a"), service("b"))
    assert not found.ready
    found._set_phase(found.statuses["a"], READY, "")
    found._set_phase(found.statuses["b"], phase, "")
    found.statuses["b"].drained = drained
    assert found.ready is is_ready


@in_loop
async def test_requests_that_change_nothing(tmp_path: Path) -> None:
    worker, server = service("w", ServiceRole.WORKER), service("s", needs=("w",))
    found, changes = supervisor(tmp_path, worker, server)
    for call in (found.drain, found.resume, found.kill):
        call("unknown")
    found.resume("s")
    found.resume("w")
    found.kill("w")  # it has no process
    found.statuses["w"].drained = True
    found.drain("w")
    found.resume("w")
    found._set_phase(found.statuses["s"], DRAINING, "x")
    found.drain("s")
    assert changes == [(DRAINING, "x")] and not found._tasks
    process = FakeProcess()
    start(found.statuses["s"], process)
    found.kill("s")
    start(found.statuses["w"], process)
    found.kill("w")
    assert process.signals == [signal.SIGKILL]
    process.exited.set_result(0)
    found.kill("w")
    assert process.signals == [signal.SIGKILL]


@pytest.mark.parametrize("is_stopping", [False, True])
@in_loop
async def test_a_service_ends_with_sigterm_and_then_sigkill(tmp_path: Path, is_stopping: bool) -> None:
    for fatal, signals in ((signal.SIGTERM, [signal.SIGTERM]), (signal.SIGKILL, [signal.SIGTERM, signal.SIGKILL])):
        found, changes = supervisor(tmp_path, service("a"))
        status, process = found.statuses["a"], FakeProcess(fatal)
        start(status, process)
        status.state.pid, status.state.mark = 77, "mark"
        if is_stopping:
            found.stop()
        await found._end(status)
        assert process.signals == signals
        assert changes == [(STOPPING, ""), (ENDED, "")][: 1 + is_stopping]
        assert (status.state.pid, status.state.mark) == ((0, "") if is_stopping else (77, "mark"))
        await found._end(status)
        assert process.signals == signals
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}  # nothing waits for a second stop any more


@in_loop
async def test_a_drained_service_stays_draining_while_it_ends(tmp_path: Path) -> None:
    found, changes = supervisor(tmp_path, service("a"))
    status = found.statuses["a"]
    start(status, FakeProcess(signal.SIGTERM), DRAINING)
    status.drained = True
    await found._end(status)
    assert changes == []


@pytest.mark.parametrize("why", ["", "it is away"])
@in_loop
async def test_a_server_is_drained_at_the_gateway_before_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    """And taken back when it is resumed. Workers are no replicas of a gateway."""
    found, _ = supervisor(tmp_path, service("a"), service("w", ServiceRole.WORKER))
    done: list[tuple[str, bool | None]] = []

    async def set_drain(status: ServiceStatus, *, drain: bool) -> str:
        done.append((status.service.name, drain))
        return why

    async def note(status: ServiceStatus) -> None:
        done.append((status.service.name, None))

    monkeypatch.setattr(found, "_set_gateway_drain", set_drain)
    monkeypatch.setattr(found, "_end", note)
    monkeypatch.setattr(found, "_supervise", note)
    for status in found.statuses.values():
        await found._drain(status)
        assert status.state.phase == DRAINED
    server = found.statuses["a"]
    server.drained = True
    await found._resume(server)
    assert done == [("a", True), ("a", None), ("w", None), ("a", False), ("a", None)] and not server.drained
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == (
        [f"not drained at the gateway: {why}", f"not taken back by the gateway: {why}"] if why else []
    )


@in_loop
async def test_a_second_stop_does_not_wait(tmp_path: Path) -> None:
    found, _ = supervisor(tmp_path, service("a"), stop_timeout=1000.0)
    status, process = found.statuses["a"], FakeProcess(signal.SIGKILL)
    start(status, process)
    found.stop()
    ending = asyncio.create_task(found._end(status))
    await until_async(lambda: process.signals)
    assert process.signals == [signal.SIGTERM]
    found.stop()
    await ending
    assert process.signals == [signal.SIGTERM, signal.SIGKILL]


def test_names_of_signals() -> None:
    assert _signal_name(128 + 9) == "SIGKILL" and _signal_name(128 + 15) == "SIGTERM"
    assert _signal_name(128 + 126) == "signal 126"


def test_lines_go_to_the_log(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("of an earlier run\n")
    status = ServiceStatus(service("a"), tmp_path)
    for i in range(3):
        status.add_line(f"line {i}")
    status.close()
    assert (tmp_path / "a.log").read_text() == "line 0\nline 1\nline 2\n" and status.last_line == "line 2"
    assert status.state.log == str(tmp_path / "a.log") and status.state.phase == WAITING
    remote = ServiceStatus(service("b", command=()), tmp_path)
    remote.add_line("x")
    remote.close()
    assert remote.state.log in ("", None) and not (tmp_path / "b.log").exists()


Run = tuple[float | None, int]


async def supervise(
    found: Supervisor, status: ServiceStatus, outcomes: list[Run], monkeypatch: pytest.MonkeyPatch
) -> list[float]:
    """Supervise a service whose processes end like `outcomes`; it is drained in the last one. Return the pauses."""
    pauses: list[float] = []
    real_sleep = asyncio.sleep

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        await real_sleep(0)

    async def run(_: ServiceStatus) -> Run:
        found._set_phase(status, READY, "")
        outcome = outcomes.pop(0)
        status.drained = not outcomes
        return outcome

    monkeypatch.setattr("llamado.cluster.supervisor.asyncio.sleep", sleep)
    monkeypatch.setattr(found, "_run_process", run)
    await found._supervise(status)
    return pauses


@in_loop
async def test_restarts_are_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, changes = supervisor(tmp_path, service("a"))
    status = found.statuses["a"]
    start(status, FakeProcess(lines=12), WAITING)
    outcomes: list[Run] = [(1.0, 3), (None, 128 + 9), (59.9, 127), (60.0, 128), (1.0, 0)]
    pauses = await supervise(found, status, outcomes, monkeypatch)
    assert status.state.restarts == len(pauses) == 4
    restarts = [(phase, text) for phase, text in changes if phase in (PAUSED, LOOPING)]
    assert [phase for phase, _ in restarts] == [PAUSED, PAUSED, LOOPING, PAUSED]
    reasons = ["ended with exit code 3", "was ended by SIGKILL", "ended with exit code 127", "was ended by signal 0"]
    for (_, text), reason, pause in zip(restarts, reasons, pauses, strict=True):
        assert text == f"{reason}; restart in {pause:.1f} s: line 11"


@pytest.mark.parametrize(
    ("outcomes", "fails"),
    [([(None, 1)], True), ([(None, 127)], True), ([(None, 129)] * 3, True), ([(None, 129)] * 2 + [(1.0, 0)], False)],
)
@in_loop
async def test_a_first_start_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcomes: list[Run], fails: bool
) -> None:
    """A signal may come from the system, so it is tried again until that is a crash loop."""
    found, _ = supervisor(tmp_path, service("a"))
    status = found.statuses["a"]
    start(status, FakeProcess(lines=12), WAITING)
    if not fails:
        await supervise(found, status, [*outcomes], monkeypatch)
        return
    with pytest.raises(StartFailed) as failure:
        await supervise(found, status, [*outcomes, (None, 0)], monkeypatch)
    assert str(failure.value).splitlines()[1:] == [f"line {i}" for i in range(4, 12)]


@in_loop
async def test_services_wait_for_what_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    services = [service(name) for name in ("a", "b")]
    found, changes = supervisor(tmp_path, *services, service("c", needs=("a", "b")))
    status = found.statuses["c"]
    work = asyncio.create_task(supervise(found, status, [(1.0, 0)], monkeypatch))
    await until_async(lambda: changes)
    assert changes == [(WAITING, "for a, b")]
    found._set_phase(found.statuses["a"], READY, "")
    await until_async(lambda: len(changes) == 3)
    assert changes[-1] == (WAITING, "for b")
    found._set_phase(found.statuses["b"], READY, "")
    await work
    assert status.state.phase == READY


@in_loop
async def test_progress_is_shown_until_a_service_is_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, changes = supervisor(tmp_path, service("a", command=()))
    answers = [(False, "loading", None), (False, "loading", 0.256), (True, "", None)]
    pauses: list[float] = []

    async def check(*_: Any) -> Any:
        ready, message, progress = answers.pop(0)
        return type("Answer", (), {"ready": ready, "message": message, "progress": progress})

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(found, "_check", check)
    monkeypatch.setattr("llamado.cluster.supervisor.asyncio.sleep", sleep)
    await found._supervise(found.statuses["a"])
    assert changes == [(STARTING, ""), (STARTING, "loading"), (STARTING, "loading 26%"), (READY, "")]
    assert pauses == [0.03, 0.06]


@in_loop
async def test_arguments_name_the_addresses_of_ready_services(tmp_path: Path) -> None:
    workers = [service(f"w{i}", ServiceRole.WORKER) for i in range(3)]
    flag = AddressFlag("--rpc", ("w0", "w2"), before="<", after=">")
    found, _ = supervisor(tmp_path, *workers, service("a", command=("x", flag, "y")))
    status = found.statuses["a"]
    assert found._arguments(status) == ["x", "y"] and status.sent_addresses == {}
    for worker in ("w1", "w2"):
        found._set_phase(found.statuses[worker], READY, "")
    assert found._arguments(status) == ["x", "--rpc", "<127.0.0.1:1>", "y"]
    assert status.sent_addresses == {"w2": "<127.0.0.1:1>"}


@in_loop
async def test_the_end_of_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Services end in the opposite order of their roles, then the watchdog, then the logs."""
    roles = {"w": ServiceRole.WORKER, "s": ServiceRole.SERVER, "g": ServiceRole.GATEWAY, "t": ServiceRole.TAP}
    found, _ = supervisor(tmp_path, *(service(name, role) for name, role in roles.items()))
    events: list[str] = []

    async def wait(status: ServiceStatus) -> None:
        events.append(f"start {status.service.name}")
        await asyncio.Event().wait()

    async def end(status: ServiceStatus) -> None:
        events.append(f"end {status.service.name}")

    monkeypatch.setattr(found, "_supervise", wait)
    monkeypatch.setattr(found, "_end", end)
    monkeypatch.setattr(found._guard, "end", lambda: events.append("end watchdog"))
    monkeypatch.setattr(ServiceStatus, "close", lambda status: events.append(f"close {status.service.name}"))
    running = asyncio.create_task(found.run())
    await until_async(lambda: len(events) == 4)
    found.stop()
    await running
    ordered = sorted(roles, key=lambda name: [*ServiceRole].index(roles[name]), reverse=True)
    assert events[4:] == [*(f"end {name}" for name in ordered), "end watchdog", *(f"close {name}" for name in roles)]


@in_loop
async def test_a_failed_start_ends_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = supervisor(tmp_path, service("a"), service("b"))
    ended: list[str] = []

    async def supervise(status: ServiceStatus) -> None:
        if status.service.name == "a":
            raise StartFailed("no")
        await asyncio.Event().wait()

    async def end(status: ServiceStatus) -> None:
        ended.append(status.service.name)

    monkeypatch.setattr(found, "_supervise", supervise)
    monkeypatch.setattr(found, "_end", end)
    with pytest.raises(StartFailed, match="no"):
        await found.run()
    assert ended == ["a", "b"]
