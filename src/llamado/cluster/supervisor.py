"""Supervision of a cluster: start services in order, check readiness, restart crashed ones, stop them in order."""

from __future__ import annotations

import asyncio
import logging
import logging.handlers
import signal
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import httpx

from llamado.client.asynchronous import AsyncLlamaServerClient
from llamado.client.health import Backoff, State
from llamado.client.requests import failure
from llamado.cluster.address_updates import send_address
from llamado.cluster.file import RestartConfig
from llamado.cluster.greeting import greet
from llamado.cluster.services import ADMIN_KEY, CLUSTER_TOKEN, AddressFlag, Service, ServiceRole
from llamado.cluster.state import ServiceState
from llamado.errors import LlamadoError
from llamado.outgoing import open_async_client
from llamado.processes.guarded import GuardedProcess, Watchdog
from llamado.processes.identity import start_mark
from llamado.processes.secret_values import child_environment
from llamado.rpc.worker.join import TOKEN_HEADER

log = logging.getLogger("llamado.up")

WAITING, STARTING, READY, PAUSED, LOOPING = "waiting", "starting", "ready", "restarting", "crash loop"
STOPPING, DRAINING, DRAINED, ENDED = "stopping", "draining", "drained", "ended"

_LOG_BYTES = 32 << 20  # of a service's log; the previous log of that size is kept as well
_CHECK_SECONDS = 2.0  # timeout of one readiness check
_PAUSES = 0.03, 0.5  # seconds between readiness checks, the first and the longest
RESTART_FAILED = "cannot be started again"
_DRAIN_SECONDS = 3600.0  # for the running requests of a drained server
_ADDRESS_PAUSE = 1.0  # seconds between two attempts to send a service the new address of another one
_ADDRESS_SECONDS = 60.0  # after which the service is restarted instead
_SIGNALLED = 128
"""Exit codes above this one mean that a signal ended the process: 128 + its number."""


class StartFailed(LlamadoError):
    """A service ended before it was ready for the first time."""


class Process(Protocol):
    """A process of a service."""

    last_lines: deque[str]

    @property
    def pid(self) -> int:
        """Process id on its machine."""

    def signal(self, sig: int) -> None:
        """Send a signal."""


class Nodes(Protocol):
    """Machines for services with a reservation; the implementation (Ray) chooses one for each."""

    async def start(
        self,
        service: Service,
        arguments: Sequence[str],
        *,
        on_line: Callable[[str], None],
        on_exit: Callable[[int], None],
        on_wait: Callable[[str], None],
    ) -> tuple[Service, Process]:
        """Start a service's process with these arguments. Return the service with its new address, and the process.

        `on_line` gets each line of output, `on_exit` the exit code, `on_wait` the reason while there is no node yet.
        Raises LlamadoError.
        """


class ServiceStatus:
    """A service with its state, its process and its log."""

    def __init__(self, service: Service, log_folder: Path) -> None:
        self.service = service
        self.state = ServiceState(service.name, str(service.role), service.address, WAITING, since=time.time())
        self.ready = asyncio.Event()
        self.last_line = ""
        self.process: Process | None = None
        self.exited: asyncio.Future[int] | None = None
        self.drained = False
        self.sent_addresses: dict[str, str] = {}
        """Addresses of other services that its process has, by their names."""
        self._log: logging.handlers.RotatingFileHandler | None = None
        if service.command:
            path = log_folder / f"{service.name}.log"
            path.unlink(missing_ok=True)
            self.state.log = str(path)
            self._log = logging.handlers.RotatingFileHandler(path, maxBytes=_LOG_BYTES, backupCount=1, encoding="utf-8")

    @property
    def is_running(self) -> bool:
        """True if it has a process."""
        return self.exited is not None and not self.exited.done()

    def add_line(self, line: str) -> None:
        """Add a line of its process to the log. Called from another thread."""
        self.last_line = line
        if self._log is not None:
            self._log.handle(logging.LogRecord(self.service.name, logging.INFO, "", 0, line, None, None))

    def close(self) -> None:
        """Close the log."""
        if self._log is not None:
            self._log.close()


class Supervisor:
    """Keeps services running from `run` until `stop`. Call all other methods in the event loop of `run`.

    `on_change` is called after each change of a service's state.
    """

    def __init__(
        self,
        services: Sequence[Service],
        restart: RestartConfig,
        stop_timeout: float,
        log_folder: Path,
        on_change: Callable[[ServiceStatus], None],
        nodes: Nodes | None = None,
    ) -> None:
        self._nodes = nodes
        self.statuses = {service.name: ServiceStatus(service, log_folder) for service in services}
        self._restart = restart
        self._stop_timeout = stop_timeout
        self._on_change = on_change
        self._guard = Watchdog(stop_timeout)
        self._stop = asyncio.Event()
        self._at_once = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def ready(self) -> bool:
        """True if all services are ready, except drained ones."""
        return all(
            status.ready.is_set() or status.drained or status.state.phase == DRAINING
            for status in self.statuses.values()
        )

    async def run(self) -> None:
        """Start all services, keep them running, and end them in the opposite order. Raises StartFailed."""
        supervisors = {asyncio.create_task(self._supervise(status)) for status in self.statuses.values()}
        stop = asyncio.create_task(self._stop.wait())
        waiting: set[asyncio.Task[Any]] = {*supervisors, stop}
        try:
            while not stop.done():
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done - {stop}:
                    task.result()
        finally:
            for task in (*supervisors, *self._tasks, stop):
                task.cancel()
            for role in reversed(ServiceRole):
                await asyncio.gather(
                    *(self._end(status) for status in self.statuses.values() if status.service.role is role)
                )
            self._guard.end()
            for status in self.statuses.values():
                status.close()

    def stop(self) -> None:
        """End all services in order. A second call ends them at once."""
        if self._stop.is_set():
            self._at_once.set()
        self._stop.set()

    def drain(self, name: str) -> None:
        """End a service after its running work, and do not restart it. An unknown service is ignored.

        A worker and its tap end together after the server has moved their layers. If it cannot, they stay, with the
        reason in their message.
        """
        status = self.statuses.get(name)
        if status is None or status.drained or status.state.phase == DRAINING:
            return
        self._set_phase(status, DRAINING, "finishing its running requests")
        if status.service.role in (ServiceRole.WORKER, ServiceRole.TAP):
            self._start_task(self._drain_worker(status))
        else:
            status.drained = True
            self._start_task(self._drain(status))

    def resume(self, name: str) -> None:
        """Restart a drained server and add it to the gateway again. A server that is not drained is left alone."""
        status = self.statuses.get(name)
        if status is None or status.service.role is not ServiceRole.SERVER or not status.drained:
            return
        if status.state.phase == DRAINED:
            self._set_phase(status, WAITING, "")
        self._start_task(self._resume(status))

    def kill(self, name: str) -> None:
        """Kill a worker that was started here, which simulates a power failure; it is restarted."""
        status = self.statuses.get(name)
        if (
            status is not None
            and status.service.role is ServiceRole.WORKER
            and status.process is not None
            and status.is_running
        ):
            status.process.signal(signal.SIGKILL)

    async def _drain_worker(self, status: ServiceStatus) -> None:
        worker = self.statuses[status.service.needs[0]] if status.service.role is ServiceRole.TAP else status
        around = [other for other in self.statuses.values() if worker.service.name in other.service.needs]
        server = next(other for other in around if other.service.role is ServiceRole.SERVER)
        parts = [*(other for other in around if other.service.role is ServiceRole.TAP), worker]  # tap first
        for part in parts:
            self._set_phase(part, DRAINING, f"{server.service.name} is moving its layers")
        address = parts[0].service.address
        if why := await self._move_layers(server, address):
            for part in parts:
                if part.state.phase == DRAINING:
                    self._set_phase(part, READY, f"not drained: {why}")
            return
        if not server.drained:
            server.service = server.service.without_worker(address, [part.service.name for part in parts])
        for part in parts:
            part.drained = True
            await self._end(part)
            self._set_phase(part, DRAINED, "")

    async def _move_layers(self, server: ServiceStatus, address: str) -> str:
        """Have a server move the layers of its worker at `address` to others. Return why that failed, or ""."""
        service = server.service
        token = service.environment.get(CLUSTER_TOKEN)
        if server.drained:
            return ""
        if token is None:
            return f"llama-server cannot release a worker that it was started with: drain {service.name}"
        if not server.ready.is_set():
            return f"{service.name} is {server.state.phase}: it can move layers only when it is ready"
        try:
            async with open_async_client(timeout=_DRAIN_SECONDS + 10, verify=service.tls_verification()) as http:
                answer = await http.post(
                    f"{service.url}/cluster/drain", json={"endpoint": address}, headers={TOKEN_HEADER: token}
                )
        except (httpx.HTTPError, LlamadoError) as error:
            return f"{service.name} did not respond to the drain request: {error or type(error).__name__}"
        if answer.status_code in (200, 404):  # 404: that worker has none of its layers
            return ""
        return str(failure(answer))

    async def _drain(self, status: ServiceStatus) -> None:
        if status.service.role is ServiceRole.SERVER and (why := await self._set_gateway_drain(status, drain=True)):
            # The gateway is away or has another key. After SIGTERM the server still finishes requests within its limit.
            log.warning("%s: not drained at the gateway: %s", status.service.name, why)
        await self._end(status)
        self._set_phase(status, DRAINED, "")

    async def _resume(self, status: ServiceStatus) -> None:
        while status.state.phase == DRAINING:
            await asyncio.sleep(_PAUSES[0])
        if not status.drained:  # requested twice
            return
        status.drained = False
        if why := await self._set_gateway_drain(status, drain=False):
            log.warning("%s: not taken back by the gateway: %s", status.service.name, why)
        try:
            await self._supervise(status)
        except StartFailed as error:
            status.drained = True
            self._set_phase(status, DRAINED, f"{RESTART_FAILED}: {' '.join(str(error).split())}")

    async def _set_gateway_drain(self, status: ServiceStatus, *, drain: bool) -> str:
        """Drain a server at the gateway and wait until it is idle, or take it back; return why that failed, or ""."""
        gateway = next((g.service for g in self.statuses.values() if g.service.role is ServiceRole.GATEWAY), None)
        if gateway is None:
            return ""
        body = {"replica": status.service.address, "drain": drain, "wait": _DRAIN_SECONDS}
        key = {"Authorization": f"Bearer {gateway.environment[ADMIN_KEY]}"}
        try:
            async with open_async_client(timeout=_DRAIN_SECONDS + 10, verify=gateway.tls_verification()) as http:
                answer = await http.post(f"{gateway.url}/gateway/drain", json=body, headers=key)
                answer.raise_for_status()
        except (httpx.HTTPError, LlamadoError) as error:
            return str(error) or type(error).__name__
        return ""

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _set_phase(self, status: ServiceStatus, phase: str, message: str) -> None:
        state = status.state
        if (state.phase, state.message) == (phase, message):
            return
        if state.phase != phase:
            state.since = time.time()
        state.phase, state.message = phase, message
        if phase == READY:
            status.ready.set()
        else:
            status.ready.clear()
        self._on_change(status)

    async def _supervise(self, status: ServiceStatus) -> None:
        """Run a service and restart it until it is drained. Raises StartFailed."""
        backoff = Backoff(self._restart.first, self._restart.longest)
        was_ready, crashes = False, 0
        while not status.drained:
            needs = () if was_ready and status.service.needs_once else status.service.needs
            if missing := [name for name in needs if not self.statuses[name].ready.is_set()]:
                self._set_phase(status, WAITING, f"for {', '.join(missing)}")
                await self.statuses[missing[0]].ready.wait()
                continue
            self._set_phase(status, STARTING, "")
            if not status.service.command:
                await self._wait_until_ready(status)
                return
            ready_for, code = await self._run_process(status)
            if status.drained:
                return
            was_ready = was_ready or ready_for is not None
            lines = self._last_lines(status)
            ended = f"ended with exit code {code}" if code < _SIGNALLED else f"was ended by {_signal_name(code)}"
            if ready_for is not None and ready_for >= self._restart.settled:
                crashes = 0
                backoff.reset()
            crashes += 1
            looping = crashes >= self._restart.crashes
            if not was_ready and (code < _SIGNALLED or looping):
                raise StartFailed(
                    f"{status.service.name} {ended} before it was ready; the last lines of {status.state.log}:\n{lines}"
                )
            pause = backoff.pause()
            status.state.restarts += 1
            last = f": {lines.splitlines()[-1]}" if lines else ""
            self._set_phase(status, LOOPING if looping else PAUSED, f"{ended}; restart in {pause:.1f} s{last}")
            await asyncio.sleep(pause)

    async def _run_process(self, status: ServiceStatus) -> tuple[float | None, int]:
        """Run one process to its end. Return for how many seconds it was ready (None: never), and its exit code."""
        loop = asyncio.get_running_loop()
        exited: asyncio.Future[int] = loop.create_future()

        def on_exit(code: int) -> None:
            try:
                loop.call_soon_threadsafe(exited.set_result, code)
            except RuntimeError:
                pass  # the loop is closed

        arguments = self._arguments(status)
        if status.service.reservation is None:
            try:
                environment = {**child_environment(), **status.service.environment}
                status.process = GuardedProcess(
                    arguments, environment, self._guard, on_line=status.add_line, on_exit=on_exit
                )
            except (OSError, ValueError) as error:
                raise StartFailed(f"{status.service.name}: cannot start {arguments[0]}: {error}") from None
            status.state.mark = start_mark(status.process.pid)
        else:
            assert self._nodes is not None
            placed, status.process = await self._nodes.start(
                status.service,
                arguments,
                on_line=status.add_line,
                on_exit=on_exit,
                on_wait=lambda why: self._set_phase(status, STARTING, why),
            )
            status.service = replace(status.service, host=placed.host, port=placed.port)
            status.state.address = status.service.address
        status.exited = exited
        status.state.pid = status.process.pid
        self._on_change(status)
        for other in self.statuses.values():
            if other.ready.is_set():  # it may have become ready while this one waited for a node
                self._send_if_changed(status, other)
        looking = asyncio.create_task(self._wait_until_ready(status))
        try:
            code = await asyncio.shield(exited)
        finally:
            looking.cancel()
        done = looking.done() and not looking.cancelled() and looking.exception() is None
        became_ready = looking.result() if done else None
        status.state.pid, status.state.mark = 0, ""
        status.ready.clear()
        for other in self.statuses.values():
            if other.service.restarts_with_needs and status.service.name in other.service.needs and other.is_running:
                self._set_phase(other, STOPPING, f"{status.service.name} ended")
                self._start_task(self._end(other))
        return None if became_ready is None else loop.time() - became_ready, code

    def _arguments(self, status: ServiceStatus) -> list[str]:
        """Return the command line of a service, with the current addresses of others."""
        arguments: list[str] = []
        status.sent_addresses = {}
        for word in status.service.command:
            if isinstance(word, AddressFlag):
                there = [self.statuses[name] for name in word.services if self.statuses[name].ready.is_set()]
                status.sent_addresses |= {other.service.name: word.value(other.service.address) for other in there}
                arguments += word.arguments([other.service.address for other in there])
            else:
                arguments.append(word)
        return arguments

    def _announce(self, status: ServiceStatus) -> None:
        """Send the address of a service to every running one that has an older address of it or none."""
        for other in self.statuses.values():
            if other.is_running:
                self._send_if_changed(other, status)

    def _send_if_changed(self, other: ServiceStatus, status: ServiceStatus) -> None:
        """Send `other` the address of a service that its command names, if its process has another address of it."""
        name = status.service.name
        for word in other.service.command:
            if isinstance(word, AddressFlag) and name in word.services:
                now = word.value(status.service.address)
                if other.sent_addresses.get(name) != now:
                    self._start_task(self._send_address(other, status, now))

    async def _send_address(self, other: ServiceStatus, status: ServiceStatus, now: str) -> None:
        loop = asyncio.get_running_loop()
        began, name = loop.time(), status.service.name
        process, address = other.process, status.service.address
        while other.process is process and other.is_running and status.service.address == address:
            if await send_address(other.service, other.sent_addresses.get(name), now):
                other.sent_addresses[name] = now
                return
            if loop.time() - began > _ADDRESS_SECONDS:
                log.warning("%s: did not take %s at its new address %s; restarting it", other.service.name, name, now)
                await self._end(other)
                return
            await asyncio.sleep(_ADDRESS_PAUSE)

    async def _wait_until_ready(self, status: ServiceStatus) -> float:
        """Check a service until it is ready. Return the loop's time of that moment."""
        pause, longest = _PAUSES
        verify = status.service.tls_verification()
        async with AsyncLlamaServerClient(
            status.service.url, health_check_timeout=_CHECK_SECONDS, verify=verify
        ) as client:
            while True:
                state = await self._check(status, client)
                if state.ready:
                    self._set_phase(status, READY, "")
                    self._announce(status)
                    return asyncio.get_running_loop().time()
                shown = "" if state.progress is None else f" {state.progress:.0%}"
                self._set_phase(status, STARTING, f"{state.message}{shown}")
                await asyncio.sleep(pause)
                pause = min(2 * pause, longest)

    async def _check(self, status: ServiceStatus, client: AsyncLlamaServerClient) -> State:
        if status.service.role in (ServiceRole.WORKER, ServiceRole.TAP):
            return await asyncio.to_thread(greet, (status.service.host, status.service.port), _CHECK_SECONDS)
        return await client.check()

    async def _end(self, status: ServiceStatus) -> None:
        """Send SIGTERM, and SIGKILL after the stop timeout or a second `stop`."""
        if status.process is None or status.exited is None or status.exited.done():
            return
        if not status.drained:
            self._set_phase(status, STOPPING, "")
        status.process.signal(signal.SIGTERM)
        at_once = asyncio.create_task(self._at_once.wait())
        ends: list[asyncio.Future[Any]] = [status.exited, at_once]
        await asyncio.wait(ends, timeout=self._stop_timeout, return_when=asyncio.FIRST_COMPLETED)
        at_once.cancel()
        if not status.exited.done():
            status.process.signal(signal.SIGKILL)
            await asyncio.wait([status.exited], timeout=30.0)  # a process in uninterruptible sleep may not end at all
        if self._stop.is_set():
            status.state.pid, status.state.mark = 0, ""
            self._set_phase(status, ENDED, "")

    def _last_lines(self, status: ServiceStatus) -> str:
        lines = [] if status.process is None else list(status.process.last_lines)
        return "\n".join(lines[-8:])


def _signal_name(code: int) -> str:
    try:
        return signal.Signals(code - _SIGNALLED).name
    except ValueError:
        return f"signal {code - _SIGNALLED}"
