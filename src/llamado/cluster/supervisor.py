"""The processes of a cluster: started in order, known to be ready, started again when they end, ended in order."""

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
from llamado.cluster.file import RestartConfig
from llamado.cluster.greeting import greet
from llamado.cluster.moving import tell_address
from llamado.cluster.services import ADMIN_KEY, CLUSTER_TOKEN, Addresses, Service, ServiceRole
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

_LOG_BYTES = 32 << 20  # of a service's log, and as much again of what came before
_LOOK = 2.0  # seconds that one look at a service may take
_PAUSES = 0.03, 0.5  # seconds between looks, the first and the longest
FAILED = "cannot be started again"
_DRAIN = 3600.0  # seconds that a drained server may take for what it has begun
_TELL_PAUSE = 1.0  # seconds between two attempts to tell a service where another one is now
_TELL = 60.0  # seconds after which it is started again instead
_SIGNALLED = 128
"""Exit codes from here on say that a signal ended a process."""


class StartFailed(LlamadoError):
    """A service ended before it was ready for the first time."""


class Process(Protocol):
    """A process of a service."""

    last_lines: deque[str]

    @property
    def pid(self) -> int:
        """Its number on its machine."""

    def signal(self, sig: int) -> None:
        """Send it a signal."""


class Nodes(Protocol):
    """Machines on which services run that reserve something: which one is chosen there."""

    async def start(
        self,
        service: Service,
        words: Sequence[str],
        *,
        said: Callable[[str], None],
        ended: Callable[[int], None],
        waiting: Callable[[str], None],
    ) -> tuple[Service, Process]:
        """Start a process of a service with these arguments: the service with its address now, and the process.

        `waiting` is told why there is none yet. Raises LlamadoError.
        """


class Standing:
    """One service and how it stands."""

    def __init__(self, service: Service, log_folder: Path) -> None:
        self.service = service
        self.state = ServiceState(service.name, str(service.role), service.address, WAITING, since=time.time())
        self.ready = asyncio.Event()
        self.last_line = ""
        self.process: Process | None = None
        self.exited: asyncio.Future[int] | None = None
        self.drained = False
        self.knows: dict[str, str] = {}
        """Addresses of other services that its process was told."""
        self._log: logging.handlers.RotatingFileHandler | None = None
        if service.command:
            path = log_folder / f"{service.name}.log"
            path.unlink(missing_ok=True)
            self.state.log = str(path)
            self._log = logging.handlers.RotatingFileHandler(path, maxBytes=_LOG_BYTES, backupCount=1, encoding="utf-8")

    @property
    def running(self) -> bool:
        """Whether it has a process."""
        return self.exited is not None and not self.exited.done()

    def said(self, line: str) -> None:
        """A line of its process; called in a thread."""
        self.last_line = line
        if self._log is not None:
            self._log.handle(logging.LogRecord(self.service.name, logging.INFO, "", 0, line, None, None))

    def close(self) -> None:
        """Nothing more is logged."""
        if self._log is not None:
            self._log.close()


class Supervisor:
    """Keeps services running, from `run` until `stop`; all but `run` are called in its event loop.

    `changed` is called after each change of how a service stands.
    """

    def __init__(
        self,
        services: Sequence[Service],
        restart: RestartConfig,
        stop_timeout: float,
        log_folder: Path,
        changed: Callable[[Standing], None],
        nodes: Nodes | None = None,
    ) -> None:
        self._nodes = nodes
        self.standings = {service.name: Standing(service, log_folder) for service in services}
        self._restart = restart
        self._stop_timeout = stop_timeout
        self._changed = changed
        self._guard = Watchdog(stop_timeout)
        self._stop = asyncio.Event()
        self._at_once = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def ready(self) -> bool:
        """Whether all are ready, but for those that are drained."""
        return all(one.ready.is_set() or one.drained or one.state.phase == DRAINING for one in self.standings.values())

    async def run(self) -> None:
        """Start all, keep them running, end all in the opposite order. Raises StartFailed."""
        keepers = {asyncio.create_task(self._keep(one)) for one in self.standings.values()}
        stop = asyncio.create_task(self._stop.wait())
        waiting: set[asyncio.Task[Any]] = {*keepers, stop}
        try:
            while not stop.done():
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done - {stop}:
                    task.result()
        finally:
            for task in (*keepers, *self._tasks, stop):
                task.cancel()
            for role in reversed(ServiceRole):
                await asyncio.gather(*(self._end(one) for one in self.standings.values() if one.service.role is role))
            self._guard.end()
            for one in self.standings.values():
                one.close()

    def stop(self) -> None:
        """End all in order; the second time at once."""
        if self._stop.is_set():
            self._at_once.set()
        self._stop.set()

    def drain(self, name: str) -> None:
        """End a service after what it is doing, and leave it so. One that is not there is left out.

        A worker and the tap before it go together, once their layers are elsewhere; where that cannot be they stay, and
        their message says why.
        """
        one = self.standings.get(name)
        if one is None or one.drained or one.state.phase == DRAINING:
            return
        self._set(one, DRAINING, "finishes what it is doing")
        if one.service.role in (ServiceRole.WORKER, ServiceRole.TAP):
            self._task(self._drain_worker(one))
        else:
            one.drained = True
            self._task(self._drain(one))

    def resume(self, name: str) -> None:
        """Start a drained server again and give it back to the gateway. One that is not drained is left as it is."""
        one = self.standings.get(name)
        if one is None or one.service.role is not ServiceRole.SERVER or not one.drained:
            return
        if one.state.phase == DRAINED:
            self._set(one, WAITING, "")
        self._task(self._resume(one))

    def kill(self, name: str) -> None:
        """Kill a worker that was started here, as if its machine lost its power; it is started again."""
        one = self.standings.get(name)
        if one is not None and one.service.role is ServiceRole.WORKER and one.process is not None and one.running:
            one.process.signal(signal.SIGKILL)

    async def _drain_worker(self, one: Standing) -> None:
        worker = self.standings[one.service.needs[0]] if one.service.role is ServiceRole.TAP else one
        around = [other for other in self.standings.values() if worker.service.name in other.service.needs]
        server = next(other for other in around if other.service.role is ServiceRole.SERVER)
        parts = [*(other for other in around if other.service.role is ServiceRole.TAP), worker]  # tap first
        for part in parts:
            self._set(part, DRAINING, f"{server.service.name} moves its layers")
        address = parts[0].service.address
        if why := await self._move_layers(server, address):
            for part in parts:
                if part.state.phase == DRAINING:
                    self._set(part, READY, f"not drained: {why}")
            return
        if not server.drained:
            server.service = server.service.without(address, [part.service.name for part in parts])
        for part in parts:
            part.drained = True
            await self._end(part)
            self._set(part, DRAINED, "")

    async def _move_layers(self, server: Standing, address: str) -> str:
        """Have a server give to others what its worker at `address` has; why it does not, or ""."""
        service = server.service
        token = service.environment.get(CLUSTER_TOKEN)
        if server.drained:
            return ""
        if token is None:
            return f"llama-server cannot do without a worker that it was started with: drain {service.name}"
        if not server.ready.is_set():
            return f"{service.name} is {server.state.phase}: it moves layers once it is ready"
        try:
            async with open_async_client(timeout=_DRAIN + 10, verify=service.trust()) as http:
                answer = await http.post(
                    f"{service.url}/cluster/drain", json={"endpoint": address}, headers={TOKEN_HEADER: token}
                )
        except (httpx.HTTPError, LlamadoError) as error:
            return f"{service.name} cannot be asked to move its layers: {error or type(error).__name__}"
        if answer.status_code in (200, 404):  # 404: it has nothing of that server's
            return ""
        return str(failure(answer))

    async def _drain(self, one: Standing) -> None:
        if one.service.role is ServiceRole.SERVER and (why := await self._tell_gateway(one, drain=True)):
            # The gateway is away, or asks for a key of its own. After SIGTERM the server finishes what it can in time.
            log.warning("%s: not drained at the gateway: %s", one.service.name, why)
        await self._end(one)
        self._set(one, DRAINED, "")

    async def _resume(self, one: Standing) -> None:
        while one.state.phase == DRAINING:
            await asyncio.sleep(_PAUSES[0])
        if not one.drained:  # asked twice
            return
        one.drained = False
        if why := await self._tell_gateway(one, drain=False):
            log.warning("%s: not taken back by the gateway: %s", one.service.name, why)
        try:
            await self._keep(one)
        except StartFailed as error:
            one.drained = True
            self._set(one, DRAINED, f"{FAILED}: {' '.join(str(error).split())}")

    async def _tell_gateway(self, one: Standing, *, drain: bool) -> str:
        """Drain a server at the gateway and wait until it is idle, or take it back; return why that failed, or ""."""
        gateway = next((g.service for g in self.standings.values() if g.service.role is ServiceRole.GATEWAY), None)
        if gateway is None:
            return ""
        body = {"replica": one.service.address, "drain": drain, "wait": _DRAIN}
        key = {"Authorization": f"Bearer {gateway.environment[ADMIN_KEY]}"}
        try:
            async with open_async_client(timeout=_DRAIN + 10, verify=gateway.trust()) as http:
                answer = await http.post(f"{gateway.url}/gateway/drain", json=body, headers=key)
                answer.raise_for_status()
        except (httpx.HTTPError, LlamadoError) as error:
            return str(error) or type(error).__name__
        return ""

    def _task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _set(self, one: Standing, phase: str, message: str) -> None:
        state = one.state
        if (state.phase, state.message) == (phase, message):
            return
        if state.phase != phase:
            state.since = time.time()
        state.phase, state.message = phase, message
        if phase == READY:
            one.ready.set()
        else:
            one.ready.clear()
        self._changed(one)

    async def _keep(self, one: Standing) -> None:
        """One service from its first start on. Raises StartFailed."""
        backoff = Backoff(self._restart.first, self._restart.longest)
        was_ready, crashes = False, 0
        while not one.drained:
            needs = () if was_ready and one.service.goes_without else one.service.needs
            if missing := [name for name in needs if not self.standings[name].ready.is_set()]:
                self._set(one, WAITING, f"for {', '.join(missing)}")
                await self.standings[missing[0]].ready.wait()
                continue
            self._set(one, STARTING, "")
            if not one.service.command:
                await self._until_ready(one)
                return
            ready_for, code = await self._life(one)
            if one.drained:
                return
            was_ready = was_ready or ready_for is not None
            words = self._last_words(one)
            ended = f"ended with exit code {code}" if code < _SIGNALLED else f"was ended by {_signal_name(code)}"
            if ready_for is not None and ready_for >= self._restart.settled:
                crashes = 0
                backoff.reset()
            crashes += 1
            looping = crashes >= self._restart.crashes
            if not was_ready and (code < _SIGNALLED or looping):
                raise StartFailed(f"{one.service.name} {ended} before it was ready; {one.state.log} says:\n{words}")
            pause = backoff.pause()
            one.state.restarts += 1
            last = f": {words.splitlines()[-1]}" if words else ""
            self._set(one, LOOPING if looping else PAUSED, f"{ended}; again in {pause:.1f} s{last}")
            await asyncio.sleep(pause)

    async def _life(self, one: Standing) -> tuple[float | None, int]:
        """One process from its start to its end: for how many seconds it was ready (None: never), and its exit code."""
        loop = asyncio.get_running_loop()
        exited: asyncio.Future[int] = loop.create_future()

        def ended(code: int) -> None:
            try:
                loop.call_soon_threadsafe(exited.set_result, code)
            except RuntimeError:
                pass  # the loop is closed

        words = self._words(one)
        if one.service.reserves is None:
            try:
                environment = {**child_environment(), **one.service.environment}
                one.process = GuardedProcess(words, environment, self._guard, said=one.said, ended=ended)
            except (OSError, ValueError) as error:
                raise StartFailed(f"{one.service.name}: cannot start {words[0]}: {error}") from None
            one.state.mark = start_mark(one.process.pid)
        else:
            assert self._nodes is not None
            placed, one.process = await self._nodes.start(
                one.service, words, said=one.said, ended=ended, waiting=lambda why: self._set(one, STARTING, why)
            )
            one.service = replace(one.service, host=placed.host, port=placed.port)
            one.state.address = one.service.address
        one.exited = exited
        one.state.pid = one.process.pid
        self._changed(one)
        for other in self.standings.values():
            if other.ready.is_set():  # also one that became ready while this one waited for a place
                self._tell_if_new(one, other)
        looking = asyncio.create_task(self._until_ready(one))
        try:
            code = await asyncio.shield(exited)
        finally:
            looking.cancel()
        done = looking.done() and not looking.cancelled() and looking.exception() is None
        became_ready = looking.result() if done else None
        one.state.pid, one.state.mark = 0, ""
        one.ready.clear()
        for other in self.standings.values():
            if other.service.follows and one.service.name in other.service.needs and other.running:
                self._set(other, STOPPING, f"{one.service.name} ended")
                self._task(self._end(other))
        return None if became_ready is None else loop.time() - became_ready, code

    def _words(self, one: Standing) -> list[str]:
        """The command of a service, with the addresses that others have now."""
        words: list[str] = []
        one.knows = {}
        for word in one.service.command:
            if isinstance(word, Addresses):
                there = [self.standings[name] for name in word.services if self.standings[name].ready.is_set()]
                one.knows |= {other.service.name: word.of(other.service.address) for other in there}
                words += word.words([other.service.address for other in there])
            else:
                words.append(word)
        return words

    def _tell_others(self, one: Standing) -> None:
        """Send the address of `one` to every running service that has an older one or none."""
        for other in self.standings.values():
            if other.running:
                self._tell_if_new(other, one)

    def _tell_if_new(self, other: Standing, one: Standing) -> None:
        """Send `other` the address of `one`, if its command names that service and its process has another address."""
        name = one.service.name
        for word in other.service.command:
            if isinstance(word, Addresses) and name in word.services:
                now = word.of(one.service.address)
                if other.knows.get(name) != now:
                    self._task(self._tell(other, one, now))

    async def _tell(self, other: Standing, one: Standing, now: str) -> None:
        loop = asyncio.get_running_loop()
        began, name = loop.time(), one.service.name
        process, address = other.process, one.service.address
        while other.process is process and other.running and one.service.address == address:
            if await tell_address(other.service, other.knows.get(name), now):
                other.knows[name] = now
                return
            if loop.time() - began > _TELL:
                log.warning("%s: did not take %s at its new address %s; restarting it", other.service.name, name, now)
                await self._end(other)
                return
            await asyncio.sleep(_TELL_PAUSE)

    async def _until_ready(self, one: Standing) -> float:
        """Look at a service until it is ready; the loop's time then."""
        pause, longest = _PAUSES
        verify = one.service.trust()
        async with AsyncLlamaServerClient(one.service.url, health_check_timeout=_LOOK, verify=verify) as client:
            while True:
                state = await self._look(one, client)
                if state.ready:
                    self._set(one, READY, "")
                    self._tell_others(one)
                    return asyncio.get_running_loop().time()
                shown = "" if state.progress is None else f" {state.progress:.0%}"
                self._set(one, STARTING, f"{state.message}{shown}")
                await asyncio.sleep(pause)
                pause = min(2 * pause, longest)

    async def _look(self, one: Standing, client: AsyncLlamaServerClient) -> State:
        if one.service.role in (ServiceRole.WORKER, ServiceRole.TAP):
            return await asyncio.to_thread(greet, (one.service.host, one.service.port), _LOOK)
        return await client.check()

    async def _end(self, one: Standing) -> None:
        """SIGTERM, and SIGKILL after the stop timeout, or when all is to end at once."""
        if one.process is None or one.exited is None or one.exited.done():
            return
        if not one.drained:
            self._set(one, STOPPING, "")
        one.process.signal(signal.SIGTERM)
        at_once = asyncio.create_task(self._at_once.wait())
        ends: list[asyncio.Future[Any]] = [one.exited, at_once]
        await asyncio.wait(ends, timeout=self._stop_timeout, return_when=asyncio.FIRST_COMPLETED)
        at_once.cancel()
        if not one.exited.done():
            one.process.signal(signal.SIGKILL)
            await asyncio.wait([one.exited], timeout=30.0)  # in uninterruptible sleep it cannot be waited for longer
        if self._stop.is_set():
            one.state.pid, one.state.mark = 0, ""
            self._set(one, ENDED, "")

    def _last_words(self, one: Standing) -> str:
        lines = [] if one.process is None else list(one.process.last_lines)
        return "\n".join(lines[-8:])


def _signal_name(code: int) -> str:
    try:
        return signal.Signals(code - _SIGNALLED).name
    except ValueError:
        return f"signal {code - _SIGNALLED}"
