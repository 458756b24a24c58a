"""Scheduling of model processes: start on demand, swap, restart after crashes, unload when idle.

Everything here runs on one event loop, so there are no locks. Waiting models form a queue:

- A request for a loaded model proceeds at once.
- Other requests wait. Their models queue in order of arrival; the first model gets the next place.
- A place is one of `models_max` plus the model's share of `memory`. A model that needs more than `memory` is loaded
  alone.
- To make room, the least recently used idle models are unloaded. If all are busy, the model that has been loaded the
  longest is drained: new requests queue, and it is unloaded when the running ones are complete. Before that it may keep
  its place for as long as it took to load, so that two models competing for a place do not spend all time loading.

Therefore every waiting model gets a place after those ahead of it, regardless of later requests.
"""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from llamado.http.upstream import UpstreamLost, get
from llamado.processes.guarded import Watchdog
from llamado.router.catalog import Catalog, Group, RoutedModel
from llamado.router.child import Child, LoadError
from llamado.server.errors import ApiError

log = logging.getLogger("llamado.router")

UNLOADED, LOADING, LOADED = "unloaded", "loading", "loaded"

Notify = Callable[[str, str, Any], None]
"""Called with an event's name, its model and its data."""


@dataclass(frozen=True, kw_only=True)
class FleetLimits:
    """Capacity and timing of a fleet."""

    models_max: int = 4
    """Models loaded at a time; 0: no limit."""
    memory: int = 0
    """Bytes that all loaded models may need together; 0: no limit."""
    waiting: int = 1024
    """Requests that may wait for models; more are rejected."""
    patience: float = 600.0
    """Seconds a request waits for its model's place."""
    backoff: float = 0.5
    """Seconds before the second restart in a row; doubles with each further one."""
    backoff_max: float = 30.0
    stable: float = 10.0
    """Seconds after which a process counts as stable, and its next crash as its first."""
    quantum: float = 0.25
    """Minimum seconds a busy model keeps its place."""
    quantum_max: float = 10.0
    sleep_check: float = 1.0
    """Seconds between checks whether a sleeping-capable model is asleep."""


@dataclass(eq=False)
class Instance:
    """A model and the state of its process."""

    model: RoutedModel
    need: int | None = None
    """Bytes of memory the model needs, 0 if unknown; None until it is determined."""
    status: str = UNLOADED
    asleep: bool = False
    """True if the process runs but has unloaded the model until the next request."""
    load_requested: bool = False
    """True if the model is to be loaded without a waiting request."""
    child: Child | None = None
    stopping: bool = False
    draining: bool = False
    """True if the model is draining: it gets no new requests and stops after the running ones."""
    in_flight: int = 0
    waiters: deque[Waiter] = field(default_factory=deque)
    last_used: float = 0.0
    loading_since: float = 0.0
    loaded_at: float = 0.0
    load_seconds: float = 0.0
    failed: bool = False
    """True if the last load failed."""
    exit_code: int = 0
    """Exit code of the last unexpected exit."""
    crashes: int = 0
    """Unexpected exits in a row."""
    restarts: int = 0
    retry_at: float = 0.0
    reason: str = ""
    info: dict[str, Any] = field(default_factory=dict)
    """The process's own entry in /v1/models."""
    progress: dict[str, Any] | None = None
    keep_alive: float | None = None
    """Idle seconds until unloading as set by a client, negative for never; None: `model.ttl` applies."""
    removed: bool = False
    """True if the model is no longer in the catalog. It is forgotten after its process has exited."""

    @property
    def running(self) -> bool:
        """True if the model occupies a place."""
        return self.child is not None

    @property
    def idle(self) -> bool:
        """True if no request uses or awaits the model."""
        return self.in_flight == 0 and not self.waiters

    @property
    def expires_at(self) -> float:
        """Monotonic time at which the model is unloaded if it stays idle; infinite for never."""
        ttl = self.model.ttl or -1.0 if self.keep_alive is None else self.keep_alive
        return max(self.last_used, self.loaded_at) + ttl if ttl >= 0 else math.inf

    @property
    def shown_status(self) -> str:
        """The status as reported by the API."""
        return "sleeping" if self.asleep and self.status == LOADED else self.status


@dataclass(frozen=True, eq=False)
class Waiter:
    """A request that waits for a model; `count`: it counts as use of the model."""

    granted: asyncio.Future[Lease]
    count: bool


class Lease:
    """A request's hold on a model's process."""

    __slots__ = ("_count", "_fleet", "_open", "child", "instance")

    def __init__(self, fleet: Fleet, instance: Instance, child: Child, count: bool) -> None:
        self._fleet = fleet
        self._count = count
        self.instance = instance
        self.child = child
        self._open = True
        instance.in_flight += 1

    def release(self) -> None:
        """End the hold. Idempotent."""
        if self._open:
            self._open = False
            self._fleet.end_use(self.instance, self._count)


class Fleet:
    """All model processes of a router."""

    def __init__(
        self,
        catalog: Catalog,
        limits: FleetLimits,
        notify: Notify | None = None,
        need_of: Callable[[RoutedModel], int] = lambda model: 0,
    ) -> None:
        """`need_of`: returns the bytes of memory a model needs, 0 if unknown; called in a thread."""
        self.limits = limits
        self._need_of = need_of
        self._measuring: set[str] = set()
        self.catalog = catalog
        self.instances: dict[str, Instance] = {name: Instance(model) for name, model in catalog.models.items()}
        self.swaps = 0
        self._queue: list[Instance] = []
        self._waiting = 0
        self._notify = notify or (lambda event, model, data: None)
        self._loop = asyncio.get_running_loop()
        self._folder = Path(tempfile.mkdtemp(prefix="llamado-"))
        grace = max([2.0, *(model.launch.stop_timeout for model in catalog.models.values())])
        self._watchdog = Watchdog(min(grace, 60.0), self._folder)
        self._number = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    # Requests

    def find(self, name: str) -> Instance | None:
        """Return the instance with this model name or alias."""
        model = self.catalog.find(name)
        return None if model is None else self.instances.get(model.name)

    async def acquire(self, instance: Instance, *, count: bool = True) -> Lease:
        """Wait until a model is loaded and return a lease on its process. `count`: the request counts as use of the
        model.

        Raises ApiError if the model fails to load or too many requests wait.
        """
        if self._closed:
            raise _busy("the router is shutting down")
        model = instance.model
        if model.limit and instance.in_flight + len(instance.waiters) >= model.limit:
            message = f"model '{model.name}' works on {model.limit} requests already"
            raise ApiError("unavailable_error", message, status=429, retry_after=1)
        if count:
            instance.last_used = time.monotonic()
        if instance.status == LOADED and not instance.draining and not instance.stopping and instance.child is not None:
            return Lease(self, instance, instance.child, count)
        if instance.failed and instance.retry_at > time.monotonic():
            # The last load failed a moment ago. Retrying for every request would keep the machine busy.
            wait = math.ceil(instance.retry_at - time.monotonic())
            raise _failed(instance, retry_after=max(1, wait))
        if self._waiting >= self.limits.waiting:
            raise _busy(f"{self._waiting} requests wait for models already")
        waiter = Waiter(self._loop.create_future(), count)
        instance.waiters.append(waiter)
        self._waiting += 1
        if instance not in self._queue and (instance.status != LOADING or instance.stopping):
            self._queue.append(instance)
        self._schedule()
        try:
            async with asyncio.timeout(self.limits.patience):
                return await waiter.granted
        except BaseException as error:
            granted = waiter.granted
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                granted.result().release()  # granted at the moment the wait was cancelled
            elif waiter in instance.waiters:
                instance.waiters.remove(waiter)
            if not instance.waiters and not instance.load_requested and instance in self._queue:
                self._queue.remove(instance)
            self._schedule()
            if isinstance(error, TimeoutError):
                raise _busy(f"no place for model '{model.name}' within {self.limits.patience:g} s") from None
            raise
        finally:
            self._waiting -= 1

    def end_use(self, instance: Instance, count: bool) -> None:
        """End a request's use of a model."""
        instance.in_flight -= 1
        if count:
            instance.last_used = time.monotonic()
        if instance.in_flight == 0:
            self._schedule()

    def _grant(self, instance: Instance) -> None:
        child = instance.child
        assert child is not None
        while instance.waiters:
            waiter = instance.waiters.popleft()
            if not waiter.granted.done():
                waiter.granted.set_result(Lease(self, instance, child, waiter.count))

    def _refuse(self, instance: Instance, error: ApiError) -> None:
        while instance.waiters:
            waiter = instance.waiters.popleft()
            if not waiter.granted.done():
                waiter.granted.set_exception(error)
        instance.load_requested = False
        if instance in self._queue:
            self._queue.remove(instance)

    # Scheduling

    def _schedule(self) -> None:
        """Start, drain and stop models according to the queue and the clock."""
        if self._closed:
            return
        now = time.monotonic()
        wake = math.inf
        running = [instance for instance in self.instances.values() if instance.running]
        drained = [instance for instance in running if instance.draining and not instance.stopping]
        for instance in drained:
            instance.draining = False
        limit = self.limits.models_max or math.inf
        budget = self.limits.memory or math.inf
        ahead: list[Instance] = []
        reserved = reserved_bytes = 0
        for instance in list(self._queue):
            if instance.status == LOADING and not instance.stopping:
                self._queue.remove(instance)  # its waiters are granted when it is ready
                continue
            if instance.status == LOADED and not instance.draining and not instance.stopping:
                self._queue.remove(instance)
                self._grant(instance)
                continue
            if instance.retry_at > now and not instance.running:
                wake = min(wake, instance.retry_at)
                continue
            if instance.need is None:
                self._determine_need(instance)
                continue
            blocked = any(_conflict(instance, other) or _conflict(other, instance) for other in ahead)
            ahead.append(instance)
            if blocked:
                continue
            in_the_way = [other for other in running if other is not instance and _conflict(instance, other)]
            for other in in_the_way:
                wake = min(wake, self._drain(other, now))
            staying = [other for other in running if not other.stopping and not other.draining]
            while staying:
                crowded = len(staying) + reserved + 1 > limit
                if not crowded and _fits(instance, _need(staying) + reserved_bytes, budget):
                    break
                able = [other for other in running if crowded or other.need]
                victim, when = self._victim(able, drained, now)
                wake = min(wake, when)
                if victim is None:
                    break
                self._drain(victim, now, forced=True)
                staying.remove(victim)
            reserved += 1
            reserved_bytes += instance.need
            in_the_way = [other for other in in_the_way if other.running]
            held = [other for other in running if other.running]
            fits = len(held) < limit and _fits(instance, _need(held), budget)
            if not instance.running and not in_the_way and fits:
                self._queue.remove(instance)
                self._start(instance)
                running.append(instance)
                reserved -= 1
                reserved_bytes -= instance.need
        for instance in running:
            if instance.draining and not instance.stopping and instance.in_flight == 0:
                self._stop(instance)
            elif instance.status == LOADED and instance.idle and not instance.stopping:
                if instance.expires_at <= now:
                    seconds = instance.expires_at - max(instance.last_used, instance.loaded_at)
                    log.info("model %s: %g s without a request: unloaded", instance.model.name, seconds)
                    self._stop(instance)
                else:
                    wake = min(wake, instance.expires_at)
        self._wake_at(wake, now)

    def _determine_need(self, instance: Instance) -> None:
        """Determine a model's memory need, then schedule again."""
        name, model = instance.model.name, instance.model
        if not self.limits.memory:
            instance.need = 0
            self._loop.call_soon(self._schedule)
        elif name not in self._measuring:
            self._measuring.add(name)
            self._task(self._measure_need(instance, model))

    async def _measure_need(self, instance: Instance, model: RoutedModel) -> None:
        need = 0
        try:
            need = await asyncio.to_thread(self._need_of, model)
        except Exception:
            log.exception("model %s: memory need unknown", model.name)
        finally:
            self._measuring.discard(model.name)
        if instance.model is model:
            instance.need = need
            if need > self.limits.memory:
                message = "model %s: needs %d MiB, more than the %d MiB for all models: it is loaded alone"
                log.warning(message, model.name, need >> 20, self.limits.memory >> 20)
        self._schedule()

    def _wake_at(self, when: float, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if when < math.inf:
            self._timer = self._loop.call_later(max(0.001, when - now), self._schedule)

    def _quantum_end(self, instance: Instance) -> float:
        seconds = min(max(instance.load_seconds, self.limits.quantum), self.limits.quantum_max)
        return instance.loaded_at + seconds

    def _drain(self, instance: Instance, now: float, *, forced: bool = False) -> float:
        """Drain a model as soon as its quantum allows; return when to check again."""
        if instance.stopping or instance.draining or instance.status == LOADING:
            return math.inf
        if instance.idle:
            self._stop(instance)
            return math.inf
        end = self._quantum_end(instance)
        if not forced and end > now:
            return end
        instance.draining = True
        return math.inf

    def _victim(self, running: list[Instance], drained: list[Instance], now: float) -> tuple[Instance | None, float]:
        """Return the model to evict; if there is none yet, also the time when there may be one."""
        able = [
            instance
            for instance in running
            if instance.status == LOADED and not instance.stopping and not instance.draining
        ]
        before = [instance for instance in able if instance in drained]
        if before:
            return before[0], math.inf
        if idle := [instance for instance in able if instance.idle]:
            return min(idle, key=lambda instance: instance.last_used), math.inf
        if ripe := [instance for instance in able if self._quantum_end(instance) <= now]:
            return min(ripe, key=lambda instance: instance.loaded_at), math.inf
        return None, min((self._quantum_end(instance) for instance in able), default=math.inf)

    # Processes

    def _task(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _start(self, instance: Instance) -> None:
        self._number += 1
        instance.status = LOADING
        instance.load_requested = instance.failed = False
        instance.exit_code = 0
        instance.reason = ""
        instance.progress = None
        instance.info = {}
        instance.loading_since = time.monotonic()
        instance.child = Child(
            instance.model, self._folder, self._number, self._watchdog, lambda child: self._on_exit(instance, child)
        )
        self._notify("model_status", instance.model.name, {"status": LOADING})
        self._task(self._load(instance, instance.child))

    async def _load(self, instance: Instance, child: Child) -> None:
        name = instance.model.name
        try:
            if not await child.port_is_free():
                raise LoadError(f"another process listens on {child.pool.address} already")
            if child.stopping or self._closed:
                raise LoadError("it was unloaded")
            child.start()
            log.info("model %s: loading, process %d: %s", name, child.pid, " ".join(child.args)[:2000])
            await child.ready(lambda value, stage: self._progress(instance, child, value, stage))
        except LoadError as error:
            await child.stop(at_once=True)
            self._load_failed(instance, child, error)
            return
        except Exception as error:
            log.exception("model %s: loading failed unexpectedly", name)
            await child.stop(at_once=True)
            self._load_failed(instance, child, LoadError(f"{type(error).__name__}: {error}"))
            return
        info = await self._ask_info(instance, child)
        if instance.stopping or child.exit.done() or instance.child is not child:
            return
        instance.info = info
        instance.status = LOADED
        instance.loaded_at = time.monotonic()
        instance.load_seconds = instance.loaded_at - instance.loading_since
        instance.progress = None
        self.swaps += 1
        log.info("model %s: loaded in %.2f s", name, instance.load_seconds)
        self._notify("status_change", name, {"status": LOADED, "info": instance.info})
        self._grant(instance)
        self._schedule()
        if instance.model.sleeps:
            self._task(self._watch_sleep(instance, child))

    def _progress(self, instance: Instance, child: Child, value: float, stage: str) -> None:
        if instance.child is not child or child.stopping:
            return
        progress = {"stages": ["text_model"], "current": "text_model", "value": round(value, 4)}
        if progress != instance.progress:
            instance.progress = progress
            self._notify("status_change", instance.model.name, {"status": LOADING, "progress": progress})

    async def _ask_info(self, instance: Instance, child: Child) -> dict[str, Any]:
        """Return the process's own description of its model; {} if it has none."""
        try:
            status, body = await get(child.pool, "/v1/models", timeout=2.0)
            found = orjson.loads(body)["data"][0] if status == 200 else {}
            return found if isinstance(found, dict) else {}
        except (UpstreamLost, TimeoutError, ValueError, KeyError, IndexError, TypeError):
            return {}

    async def _watch_sleep(self, instance: Instance, child: Child) -> None:
        while not child.exit.done() and not child.stopping:
            await asyncio.wait([child.exit], timeout=self.limits.sleep_check)
            await self.update_sleep(instance)

    async def update_sleep(self, instance: Instance) -> None:
        """Query whether a model that may sleep is asleep."""
        child = instance.child
        if child is None or not instance.model.sleeps or instance.status != LOADED:
            return
        try:
            _, body = await get(child.pool, "/props", timeout=1.0)
            asleep = bool(orjson.loads(body).get("is_sleeping"))
        except (UpstreamLost, TimeoutError, ValueError, AttributeError):
            return
        if asleep != instance.asleep and instance.child is child:
            instance.asleep = asleep
            self._notify("status_change", instance.model.name, {"status": instance.shown_status})

    def _load_failed(self, instance: Instance, child: Child, error: LoadError) -> None:
        if instance.child is not child:
            return
        was_requested = instance.stopping
        self._reset(instance)
        if was_requested:
            self._schedule()
            return
        instance.failed = True
        instance.exit_code = error.exit_code or 1
        instance.reason = str(error)
        instance.crashes += 1
        self._back_off(instance, instance.crashes)
        log.error("model %s: failed to load: %s", instance.model.name, error)
        self._notify("status_change", instance.model.name, {"status": UNLOADED, "exit_code": instance.exit_code})
        self._refuse(instance, _failed(instance))
        self._schedule()

    def _back_off(self, instance: Instance, times: int) -> None:
        """Delay the next start; no delay after the first crash."""
        seconds = self.limits.backoff * 2 ** min(times - 1, 16) if times > 0 else 0.0
        instance.retry_at = time.monotonic() + min(seconds, self.limits.backoff_max)

    def _reset(self, instance: Instance) -> None:
        instance.child = None
        instance.keep_alive = None
        instance.status = UNLOADED
        instance.stopping = instance.draining = False
        instance.asleep = False
        instance.progress = None
        if instance.removed and self.instances.get(instance.model.name) is instance:
            del self.instances[instance.model.name]

    def _on_exit(self, instance: Instance, child: Child) -> None:
        """Handle the exit of a process."""
        if instance.child is not child:
            return
        code = child.exit_code or 0
        name = instance.model.name
        if instance.status == LOADING and not instance.stopping:
            return  # handled by `_load`
        was_requested = instance.stopping
        lived = time.monotonic() - instance.loaded_at
        self._reset(instance)
        if was_requested:
            log.info("model %s: unloaded", name)
            instance.crashes = 0
            self._notify("status_change", name, {"status": UNLOADED, "exit_code": 0})
            self._schedule()
            return
        log.error("model %s: died: %s", name, child.describe_exit())
        instance.exit_code = code
        instance.reason = f"it died with exit code {code}"
        instance.crashes = 1 if lived > self.limits.stable else instance.crashes + 1
        self._back_off(instance, instance.crashes - 1)
        self._notify("status_change", name, {"status": UNLOADED, "exit_code": code})
        if self._closed or instance.removed:
            return
        instance.restarts += 1
        # It had a place, so it goes first. It is restarted even without waiting requests.
        instance.load_requested = True
        if instance not in self._queue:
            self._queue.insert(0, instance)
        self._schedule()

    def _stop(self, instance: Instance, *, at_once: bool = False) -> None:
        child = instance.child
        if child is None or instance.stopping:
            return
        instance.stopping = True
        self._task(self._stop_child(instance, child, at_once))

    async def _stop_child(self, instance: Instance, child: Child, at_once: bool) -> None:
        await child.stop(at_once=at_once, idle=instance.in_flight == 0)
        if instance.child is child and (child.pid == 0 or not child.exit.done()):
            self._reset(instance)
            self._schedule()

    # Operator actions

    def load(self, instance: Instance) -> None:
        """Load a model without a request."""
        instance.retry_at = 0.0
        if not instance.running or instance.stopping:
            instance.load_requested = True
            if instance not in self._queue:
                self._queue.append(instance)
        self._schedule()

    def unload(self, instance: Instance) -> None:
        """Stop a model. A loading one is killed; running requests get the time between SIGTERM and SIGKILL."""
        instance.load_requested = False
        if instance in self._queue and not instance.waiters:
            self._queue.remove(instance)
        loading = instance.status == LOADING
        self._stop(instance, at_once=loading)
        if loading:
            name = instance.model.name
            self._refuse(instance, ApiError("invalid_request_error", f"model name={name} is not running"))

    async def wait_unloaded(self, instances: Iterable[Instance]) -> None:
        """Wait until the processes have exited."""
        exits = [instance.child.exit for instance in instances if instance.child is not None and instance.child.pid]
        if exits:
            await asyncio.wait(exits)

    def replace(self, catalog: Catalog) -> None:
        """Switch to another catalog; unload models that were removed or changed."""
        self.catalog = catalog
        for name, instance in list(self.instances.items()):
            model = catalog.models.get(name)
            if model is None:
                instance.removed = True
                self._refuse(instance, ApiError("invalid_request_error", f"model '{name}' not found"))
                if instance.running:
                    self.unload(instance)
                else:
                    del self.instances[name]
                continue
            instance.removed = False
            if model != instance.model:
                instance.model, instance.need = model, None
                if instance.running:
                    log.info("model %s: its settings changed: unloaded", name)
                    self.unload(instance)
            if not instance.running:
                instance.failed = False
                instance.retry_at = 0.0
        for name, model in catalog.models.items():
            if name not in self.instances:
                self.instances[name] = Instance(model)
        self.instances = {name: self.instances[name] for name in sorted(self.instances)}
        self._notify("models_reload", "*", None)
        self._schedule()

    async def close(self) -> None:
        """Stop all processes."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for instance in self.instances.values():
            self._refuse(instance, _busy("the router is shutting down"))
        children = [instance.child for instance in self.instances.values() if instance.child is not None]
        for instance in self.instances.values():
            instance.stopping = True
        await asyncio.gather(*(child.stop() for child in children), return_exceptions=True)
        for task in list(self._tasks):
            task.cancel()
        self._watchdog.end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        """Kill all processes without waiting."""
        self._closed = True
        for instance in self.instances.values():
            if instance.child is not None:
                instance.child.kill()


def _need(instances: Iterable[Instance]) -> int:
    """Return the bytes that models need together."""
    return sum(instance.need or 0 for instance in instances)


def _fits(instance: Instance, used: int, budget: float) -> bool:
    """Return True if the model's memory fits beside `used` bytes of other models."""
    return not used or used + (instance.need or 0) <= budget


def _conflict(instance: Instance, other: Instance) -> bool:
    """Return True if `other` must stop before `instance` starts."""
    mine, its = instance.model.group, other.model.group
    if instance is other or mine is None or its is None:
        return False
    return mine.swap if _same(mine, its) else mine.exclusive and not its.persistent


def _same(a: Group, b: Group) -> bool:
    return a.name == b.name


def _busy(message: str) -> ApiError:
    return ApiError("unavailable_error", message, retry_after=2)


def _failed(instance: Instance, retry_after: int | None = None) -> ApiError:
    message = f"model name={instance.model.name} failed to load"
    return ApiError("server_error", message, retry_after=retry_after, reason=instance.reason)
