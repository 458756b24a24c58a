"""Services on Ray: one actor per service, on any node with enough free resources.

Ray recreates an actor on another node after it or its node ends (max_restarts); the supervisor then starts the process
in it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from llamado.cluster.file import RayConfig
from llamado.cluster.ray.actor import LOST, ProcessActor, ProcessInfo
from llamado.cluster.services import Reservation, Service
from llamado.errors import LlamadoError
from llamado.installation import install_command

log = logging.getLogger("llamado.up")

_READ_SECONDS = 5.0
"""Seconds that an actor waits for new lines in one call."""
_REPORT_SECONDS = 1.0
"""Seconds between two reports on a missing actor."""
_RETRY_SECONDS = 0.25
"""Seconds before another call to an actor that Ray recreates."""
_CONNECT_SECONDS = 5.0
"""Timeout of the connection to Ray's head, in seconds."""
_THREADS = 4
"""Concurrent calls to an actor: one reads output, others start and signal."""


class RayUnavailable(LlamadoError):
    """Ray is not installed, cannot be reached, or has not enough free resources."""


class RayProcess:
    """A process in a Ray actor."""

    def __init__(self, actor: Any, info: ProcessInfo, kill: Callable[[], None]) -> None:
        self.pid, self.host, self.port = info.pid, info.host, info.port
        self.last_lines: deque[str] = deque(maxlen=20)
        self._actor, self._run, self._kill = actor, info.run, kill

    def signal(self, sig: int) -> None:
        """Send a signal. SIGKILL ends the actor too, because it may be unresponsive."""
        if sig == signal.SIGKILL:
            self._kill()
        else:
            self._actor.signal.remote(self._run, sig)

    async def read_output(self, errors: type[Exception], on_line: Callable[[str], None]) -> int:
        """Call `on_line` with each line of output until the process ends. Return its exit code.

        An exception of type `errors` means that the actor is lost.
        """
        seen = 0
        while True:
            try:
                lines, code = await self._actor.read_output.remote(self._run, seen, _READ_SECONDS)
            except errors:
                return LOST
            seen += len(lines)
            for line in lines:
                self.last_lines.append(line)
                on_line(line)
            if code is not None:
                found: int = code
                return found


class RayNodes:
    """The nodes of a Ray cluster, usable until `close`. Its coroutines belong to one event loop."""

    def __init__(self, ray: Any, config: RayConfig, grace: float) -> None:
        self._ray, self._config, self._grace = ray, config, grace
        self._actors: dict[str, Any] = {}
        self._placed: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(
        self,
        service: Service,
        arguments: Sequence[str],
        *,
        on_line: Callable[[str], None],
        on_exit: Callable[[int], None],
        on_wait: Callable[[str], None],
    ) -> tuple[Service, RayProcess]:
        """Start a service's process in its actor. Return the service with its new address, and the process.

        `on_line` gets each line of output, `on_exit` the exit code, `on_wait` the reason while Ray has no free
        resources. Raises RayUnavailable.
        """
        info = await self._start_in_actor(service, arguments, on_wait)
        self._placed.add(service.name)
        actor = self._actors[service.name]
        process = RayProcess(actor, info, lambda: self._ray.kill(actor, no_restart=False))
        self._start_task(self._read_to_end(process, on_line, on_exit))
        return replace(service, host=process.host, port=process.port), process

    async def _start_in_actor(
        self, service: Service, arguments: Sequence[str], on_wait: Callable[[str], None]
    ) -> ProcessInfo:
        exceptions = self._ray.exceptions
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            actor = self._actors.get(service.name)
            if actor is None:
                actor = self._actors[service.name] = self._create_actor(service)
            answer = asyncio.ensure_future(_result_of(actor.start.remote(list(arguments), dict(service.environment))))
            try:
                while not (await asyncio.wait([answer], timeout=_REPORT_SECONDS))[0]:
                    why = self._placement_problem(service)
                    on_wait(why)
                    if service.name not in self._placed and loop.time() - began > self._config.wait:
                        raise RayUnavailable(f"{service.name}: after {self._config.wait:g} s {why}")
                return ProcessInfo(*answer.result())
            except exceptions.ActorUnavailableError:
                on_wait("Ray is recreating its actor")
            except exceptions.RayError as error:
                if service.name not in self._placed:
                    raise RayUnavailable(f"{service.name}: {_cause(error)}") from None
                on_wait(_cause(error))
                self._ray.kill(actor)
                del self._actors[service.name]
            finally:
                answer.cancel()
            await asyncio.sleep(_RETRY_SECONDS)

    async def _read_to_end(
        self, process: RayProcess, on_line: Callable[[str], None], on_exit: Callable[[int], None]
    ) -> None:
        on_exit(await process.read_output(self._ray.exceptions.RayError, on_line))

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _create_actor(self, service: Service) -> Any:
        reservation = service.reservation
        assert reservation is not None
        return (
            self._ray.remote(ProcessActor)
            .options(
                num_cpus=reservation.cpus,
                memory=reservation.memory or None,
                scheduling_strategy="SPREAD"
                if reservation.node is None
                else self._node_strategy(service.name, reservation.node),
                max_restarts=-1,
                max_task_retries=0,
                max_concurrency=_THREADS,
            )
            .remote(self._grace)
        )

    def _node_strategy(self, name: str, node: str) -> Any:
        """Return the scheduling strategy that requires a node. `name`: the service. Raises RayUnavailable."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        alive = self._alive()
        for one in alive:
            if node in (one["NodeID"], one["NodeManagerAddress"], one["NodeName"]):
                return NodeAffinitySchedulingStrategy(node_id=one["NodeID"], soft=False)
        there = ", ".join(f"{one['NodeManagerAddress']} ({one['NodeID'][:8]}…)" for one in alive)
        raise RayUnavailable(f"{name}: Ray has no node {node}; its nodes are {there}")

    def _alive(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _placement_problem(self, service: Service) -> str:
        """Return in words why Ray has not placed a service's actor."""
        assert service.reservation is not None
        nodes = [node["Resources"] for node in self._alive()]
        if not any(_fits(service.reservation, node) for node in nodes):
            return (
                f"no Ray node is large enough: {_requirements(service.reservation)}; the nodes have {_capacity(nodes)}"
            )
        free = self._ray.available_resources()
        return (
            f"Ray has not enough free resources: {_requirements(service.reservation)}; of the nodes' "
            f"{_capacity(nodes)}, {_amount(free)} are free"
        )

    def close(self) -> None:
        """End all actors and disconnect from Ray."""
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(self._ray.exceptions.RayError):
            for actor in self._actors.values():
                self._ray.kill(actor)
        self._ray.shutdown()


@contextlib.contextmanager
def connect(config: RayConfig, name: str, grace: float) -> Iterator[RayNodes]:
    """Connect to Ray while a cluster of this name runs.

    `grace`: seconds between SIGTERM and SIGKILL. Raises RayUnavailable.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no requests to the internet
    try:
        import ray
        from ray import init  # fails for a plain folder named ray, which Ray leaves in /tmp
    except ImportError:
        raise RayUnavailable(f"on: ray: Ray is not installed: {install_command('ray')}") from None
    where: Mapping[str, Any] = (
        {"address": "local", "include_dashboard": False} if config.address == "local" else {"address": config.address}
    )
    try:
        if config.address not in ("auto", "local"):
            _check_reachable(config.address)
        init(**where, namespace=f"llamado-{name}", log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RayUnavailable(
            f"cannot reach Ray at {config.address}: {reason} (ray start --head starts Ray; ray: {{address: local}} in "
            "the file starts one for this cluster)"
        ) from None
    nodes = RayNodes(ray, config, grace)
    try:
        yield nodes
    finally:
        nodes.close()


def _check_reachable(address: str) -> None:
    """Check that Ray's head accepts connections: Ray itself would retry for minutes. Raises OSError and ValueError."""
    parts = urlsplit(address if "://" in address else f"//{address}")
    if not parts.hostname or not parts.port:
        raise ValueError("expected host:port, auto or local")
    with socket.create_connection((parts.hostname, parts.port), _CONNECT_SECONDS):
        pass


async def _result_of(reference: Any) -> Any:
    return await reference


def _fits(reservation: Reservation, node: Mapping[str, float]) -> bool:
    return reservation.cpus <= node.get("CPU", 0) and reservation.memory <= node.get("memory", 0)


def _requirements(reservation: Reservation) -> str:
    memory = f" and {_gigabytes(reservation.memory)}" if reservation.memory else ""
    where = f" on {reservation.node}" if reservation.node else " on one node"
    return f"{reservation.cpus} CPUs{memory}{where} are needed"


def _capacity(nodes: Sequence[Mapping[str, float]]) -> str:
    return ", ".join(_amount(node) for node in nodes) or "nothing"


def _amount(resources: Mapping[str, float]) -> str:
    return f"{resources.get('CPU', 0):g} CPUs and {_gigabytes(resources.get('memory', 0))}"


def _gigabytes(n: float) -> str:
    return f"{n / 1e9:.1f} GB"


def _cause(error: Exception) -> str:
    """Return the last line of Ray's error, which has the reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
