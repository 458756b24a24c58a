"""Ray as the place where services run: an actor for each, on whichever node has room.

Ray makes an actor anew elsewhere when it or its node ends (max_restarts); who keeps the services running then starts
the process in it again.
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
from llamado.cluster.ray.actor import GONE, Begun, ProcessActor
from llamado.cluster.services import Reservation, Service
from llamado.errors import LlamadoError
from llamado.installation import install_command

log = logging.getLogger("llamado.up")

_FOLLOW = 5.0
"""Seconds for which an actor waits for new lines in one call."""
_LOOK = 1.0
"""Seconds after which it is said again why an actor is not there yet."""
_PAUSE = 0.25
"""Seconds before an actor that is made anew is asked again."""
_KNOCK = 5.0
"""Seconds in which Ray's head has to take a connection."""
_THREADS = 4
"""Calls that an actor answers at once: one follows the output, others start and signal."""


class RayUnavailable(LlamadoError):
    """Ray is not installed, not there, or has no room."""


class RayProcess:
    """A process in an actor."""

    def __init__(self, actor: Any, begun: Begun, kill: Callable[[], None]) -> None:
        self.pid, self.host, self.port = begun.pid, begun.host, begun.port
        self.last_lines: deque[str] = deque(maxlen=20)
        self._actor, self._run, self._kill = actor, begun.run, kill

    def signal(self, sig: int) -> None:
        """Send a signal to it; SIGKILL ends its actor, which may not answer any more."""
        if sig == signal.SIGKILL:
            self._kill()
        else:
            self._actor.signal.remote(self._run, sig)

    async def follow(self, errors: type[Exception], said: Callable[[str], None]) -> int:
        """Tell each line of its output; its exit code, once it has ended or its actor is gone."""
        seen = 0
        while True:
            try:
                lines, code = await self._actor.follow.remote(self._run, seen, _FOLLOW)
            except errors:
                return GONE
            seen += len(lines)
            for line in lines:
                self.last_lines.append(line)
                said(line)
            if code is not None:
                found: int = code
                return found


class RayNodes:
    """Ray, from `connect` to `close`. Its coroutines belong to one event loop."""

    def __init__(self, ray: Any, config: RayConfig, grace: float) -> None:
        self._ray, self._config, self._grace = ray, config, grace
        self._actors: dict[str, Any] = {}
        self._was_there: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(
        self,
        service: Service,
        words: Sequence[str],
        *,
        said: Callable[[str], None],
        ended: Callable[[int], None],
        waiting: Callable[[str], None],
    ) -> tuple[Service, RayProcess]:
        """Start a service's process in its actor, wherever that is now: the service with its address, and the process.

        `said` is called with each line of its output, `ended` once with its exit code, `waiting` with the reason while
        Ray has no room. Raises RayUnavailable.
        """
        begun = await self._begun(service, words, waiting)
        self._was_there.add(service.name)
        actor = self._actors[service.name]
        process = RayProcess(actor, begun, lambda: self._ray.kill(actor, no_restart=False))
        self._task(self._follow(process, said, ended))
        return replace(service, host=process.host, port=process.port), process

    async def _begun(self, service: Service, words: Sequence[str], waiting: Callable[[str], None]) -> Begun:
        exceptions = self._ray.exceptions
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            actor = self._actors.get(service.name)
            if actor is None:
                actor = self._actors[service.name] = self._make(service)
            answer = asyncio.ensure_future(_answer(actor.start.remote(list(words), dict(service.environment))))
            try:
                while not (await asyncio.wait([answer], timeout=_LOOK))[0]:
                    why = self._why_not_there(service)
                    waiting(why)
                    if service.name not in self._was_there and loop.time() - began > self._config.wait:
                        raise RayUnavailable(f"{service.name}: after {self._config.wait:g} s {why}")
                return Begun(*answer.result())
            except exceptions.ActorUnavailableError:
                waiting("Ray makes its actor anew")
            except exceptions.RayError as error:
                if service.name not in self._was_there:
                    raise RayUnavailable(f"{service.name}: {_cause(error)}") from None
                waiting(_cause(error))
                self._ray.kill(actor)
                del self._actors[service.name]
            finally:
                answer.cancel()
            await asyncio.sleep(_PAUSE)

    async def _follow(self, process: RayProcess, said: Callable[[str], None], ended: Callable[[int], None]) -> None:
        ended(await process.follow(self._ray.exceptions.RayError, said))

    def _task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _make(self, service: Service) -> Any:
        reserves = service.reserves
        assert reserves is not None
        return (
            self._ray.remote(ProcessActor)
            .options(
                num_cpus=reserves.cpus,
                memory=reserves.memory or None,
                scheduling_strategy="SPREAD" if reserves.node is None else self._on(service.name, reserves.node),
                max_restarts=-1,
                max_task_retries=0,
                max_concurrency=_THREADS,
            )
            .remote(self._grace)
        )

    def _on(self, name: str, node: str) -> Any:
        """That an actor must be on a node. Raises RayUnavailable."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        alive = self._alive()
        for one in alive:
            if node in (one["NodeID"], one["NodeManagerAddress"], one["NodeName"]):
                return NodeAffinitySchedulingStrategy(node_id=one["NodeID"], soft=False)
        there = ", ".join(f"{one['NodeManagerAddress']} ({one['NodeID'][:8]}…)" for one in alive)
        raise RayUnavailable(f"{name}: Ray has no node {node}; there are {there}")

    def _alive(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _why_not_there(self, service: Service) -> str:
        """What Ray lacks for an actor, in words."""
        assert service.reserves is not None
        nodes = [node["Resources"] for node in self._alive()]
        if not any(_fits(service.reserves, node) for node in nodes):
            return f"no node of Ray's is large enough: {_needs(service.reserves)}; the nodes have {_held(nodes)}"
        free = self._ray.available_resources()
        return f"Ray has no room: {_needs(service.reserves)}; of the nodes' {_held(nodes)} {_amount(free)} are free"

    def close(self) -> None:
        """End all actors, and leave Ray."""
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(self._ray.exceptions.RayError):
            for actor in self._actors.values():
                self._ray.kill(actor)
        self._ray.shutdown()


@contextlib.contextmanager
def connected(config: RayConfig, name: str, grace: float) -> Iterator[RayNodes]:
    """Ray while a cluster of this name runs; `grace`: seconds between SIGTERM and SIGKILL. Raises RayUnavailable."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would ask the internet
    try:
        import ray
        from ray import init  # which a mere folder of that name has not, and Ray leaves one in /tmp
    except ImportError:
        raise RayUnavailable(f"on: ray: Ray is not installed: {install_command('ray')}") from None
    where: Mapping[str, Any] = (
        {"address": "local", "include_dashboard": False} if config.address == "local" else {"address": config.address}
    )
    try:
        if config.address not in ("auto", "local"):
            _knock(config.address)
        init(**where, namespace=f"llamado-{name}", log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RayUnavailable(
            f"no Ray is reached at {config.address}: {reason} (ray start --head starts one; ray: {{address: local}} in "
            "the file has one started for this cluster alone)"
        ) from None
    nodes = RayNodes(ray, config, grace)
    try:
        yield nodes
    finally:
        nodes.close()


def _knock(address: str) -> None:
    """Ray itself would look for its head for minutes. Raises OSError and ValueError."""
    parts = urlsplit(address if "://" in address else f"//{address}")
    if not parts.hostname or not parts.port:
        raise ValueError("expected host:port, auto or local")
    with socket.create_connection((parts.hostname, parts.port), _KNOCK):
        pass


async def _answer(reference: Any) -> Any:
    return await reference


def _fits(reserves: Reservation, node: Mapping[str, float]) -> bool:
    return reserves.cpus <= node.get("CPU", 0) and reserves.memory <= node.get("memory", 0)


def _needs(reserves: Reservation) -> str:
    memory = f" and {_gigabytes(reserves.memory)}" if reserves.memory else ""
    where = f" on {reserves.node}" if reserves.node else " on one node"
    return f"{reserves.cpus} CPUs{memory}{where} are needed"


def _held(nodes: Sequence[Mapping[str, float]]) -> str:
    return ", ".join(_amount(node) for node in nodes) or "nothing"


def _amount(resources: Mapping[str, float]) -> str:
    return f"{resources.get('CPU', 0):g} CPUs and {_gigabytes(resources.get('memory', 0))}"


def _gigabytes(n: float) -> str:
    return f"{n / 1e9:.1f} GB"


def _cause(error: Exception) -> str:
    """The last line of what Ray says, where the reason stands."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
