"""Which models' processes run: started on demand, swapped for one another, restarted when they die, ended when idle.

Everything here happens on one event loop; nothing is locked. Requests take turns by a queue of models:

- A request for a loaded model goes to it at once.
- Others wait. Their models stand in line by who asked first; the first in line gets the next place.
- A place is one of `models_max`, and as much of `memory` as the model needs. One that needs more than all of it gets
  all of it.
- To make room, the least recently used idle models are unloaded. If all are busy, the one that has been loaded for the
  longest time takes no further requests (they queue behind) and is unloaded once its answers are complete. It may have
  its place for as long as loading it took before that, so that two models that fight for one place do not spend all
  their time loading.

So every waiting model gets a place after those ahead of it, whatever the others do.
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
from llamado.router.child import Child, LoadFailed
from llamado.server.errors import ApiError

log = logging.getLogger("llamado.router")

UNLOADED, LOADING, LOADED = "unloaded", "loading", "loaded"

Notify = Callable[[str, str, Any], None]
"""Told of an event: its name, the model, its data."""


@dataclass(frozen=True, kw_only=True)
class FleetLimits:
    """How much waits, and for how long."""

    models_max: int = 4
    """Models loaded at a time; 0: no limit."""
    memory: int = 0
    """Bytes that models loaded at a time may need together; 0: no limit."""
    waiting: int = 1024
    """Requests that wait for a model; more are turned away."""
    patience: float = 600.0
    """Seconds a request waits for a place."""
    backoff: float = 0.5
    """Seconds before the second restart in a row; doubles each time."""
    backoff_max: float = 30.0
    stable: float = 10.0
    """Seconds after which a process counts as one that runs well."""
    quantum: float = 0.25
    """Least seconds a busy model keeps its place."""
    quantum_max: float = 10.0
    sleep_check: float = 1.0
    """Seconds between looks at whether a model that may sleep does."""


@dataclass
class Instance:
    """A model of the catalog and what is known of its process."""

    model: RoutedModel
    need: int | None = None
    """Bytes of memory it needs, 0 if that cannot be known; None: not looked at yet."""
    status: str = UNLOADED
    asleep: bool = False
    """Loaded, but its process has put the model aside until the next request."""
    wanted: bool = False
    """To be loaded though nobody waits for it."""
    child: Child | None = None
    stopping: bool = False
    leaving: bool = False
    """Takes no further requests; ends when its last answer is complete."""
    in_flight: int = 0
    waiters: deque[asyncio.Future[Lease]] = field(default_factory=deque)
    last_used: float = 0.0
    loading_since: float = 0.0
    loaded_at: float = 0.0
    load_seconds: float = 0.0
    failed: bool = False
    """It could not be loaded."""
    exit_code: int = 0
    """Of its last end that nobody asked for."""
    crashes: int = 0
    """Ends that nobody asked for, in a row."""
    restarts: int = 0
    retry_at: float = 0.0
    reason: str = ""
    info: dict[str, Any] = field(default_factory=dict)
    """What its process says of itself in /v1/models."""
    progress: dict[str, Any] | None = None
    keep_alive: float | None = None
    """Seconds without a request after which a client wants it unloaded, negative for never; None: `model.ttl` holds."""
    removed: bool = False
    """No longer in the catalog; forgotten when its process has ended."""

    @property
    def running(self) -> bool:
        """Whether it takes up a place."""
        return self.child is not None

    @property
    def idle(self) -> bool:
        """Whether nobody uses it."""
        return self.in_flight == 0 and not self.waiters

    @property
    def over(self) -> float:
        """When it is unloaded if nobody asks for it, by the monotonic clock; infinite for never."""
        ttl = self.model.ttl or -1.0 if self.keep_alive is None else self.keep_alive
        return max(self.last_used, self.loaded_at) + ttl if ttl >= 0 else math.inf

    @property
    def shown_status(self) -> str:
        """The status as the API names it."""
        return "sleeping" if self.asleep and self.status == LOADED else self.status


class Lease:
    """A request's right to use a model's process; release it."""

    __slots__ = ("_count", "_fleet", "_open", "child", "instance")

    def __init__(self, fleet: Fleet, instance: Instance, child: Child, count: bool = True) -> None:
        self._fleet = fleet
        self._count = count
        self.instance = instance
        self.child = child
        self._open = True
        instance.in_flight += 1

    def release(self) -> None:
        """Give it back; harmless when done twice."""
        if self._open:
            self._open = False
            self._fleet.released(self.instance, self._count)


class Fleet:
    """The models' processes."""

    def __init__(
        self,
        catalog: Catalog,
        limits: FleetLimits,
        notify: Notify | None = None,
        need_of: Callable[[RoutedModel], int] = lambda model: 0,
    ) -> None:
        """`need_of`: bytes of memory that a model needs, 0 if unknown; called in a thread."""
        self.limits = limits
        self._need_of = need_of
        self._looking: set[str] = set()
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
        """The instance of a model's name or alias."""
        model = self.catalog.find(name)
        return None if model is None else self.instances.get(model.name)

    async def acquire(self, instance: Instance, *, count: bool = True) -> Lease:
        """Use a model's process once it is loaded. `count`: whether this keeps the model from being unloaded as idle.

        Raises ApiError: it cannot be loaded, or too many wait.
        """
        if self._closed:
            raise _busy("the router is ending")
        model = instance.model
        if model.limit and instance.in_flight + len(instance.waiters) >= model.limit:
            message = f"model '{model.name}' works on {model.limit} requests already"
            raise ApiError("unavailable_error", message, status=429, retry_after=1)
        if count:
            instance.last_used = time.monotonic()
        if instance.status == LOADED and not instance.leaving and not instance.stopping and instance.child is not None:
            return Lease(self, instance, instance.child, count)
        if instance.failed and instance.retry_at > time.monotonic():
            # It failed a moment ago. Trying at each request would make a machine do nothing else.
            wait = math.ceil(instance.retry_at - time.monotonic())
            raise _failed(instance, retry_after=max(1, wait))
        if self._waiting >= self.limits.waiting:
            raise _busy(f"{self._waiting} requests wait for models already")
        waiter: asyncio.Future[Lease] = self._loop.create_future()
        instance.waiters.append(waiter)
        self._waiting += 1
        if instance not in self._queue and (instance.status != LOADING or instance.stopping):
            self._queue.append(instance)
        self._schedule()
        try:
            async with asyncio.timeout(self.limits.patience):
                return await waiter
        except BaseException as error:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                waiter.result().release()  # it came while we gave up
            elif waiter in instance.waiters:
                instance.waiters.remove(waiter)
            if not instance.waiters and not instance.wanted and instance in self._queue:
                self._queue.remove(instance)
            self._schedule()
            if isinstance(error, TimeoutError):
                raise _busy(f"no place for model '{model.name}' within {self.limits.patience:g} s") from None
            raise
        finally:
            self._waiting -= 1

    def released(self, instance: Instance, count: bool) -> None:
        """A request is over."""
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
            if not waiter.done():
                waiter.set_result(Lease(self, instance, child))

    def _refuse(self, instance: Instance, error: ApiError) -> None:
        while instance.waiters:
            waiter = instance.waiters.popleft()
            if not waiter.done():
                waiter.set_exception(error)
        instance.wanted = False
        if instance in self._queue:
            self._queue.remove(instance)

    # Who runs

    def _schedule(self) -> None:
        """Start, drain and stop what the queue and the clock ask for."""
        if self._closed:
            return
        now = time.monotonic()
        wake = math.inf
        running = [instance for instance in self.instances.values() if instance.running]
        drained = [instance for instance in running if instance.leaving and not instance.stopping]
        for instance in drained:
            instance.leaving = False
        limit = self.limits.models_max or math.inf
        budget = self.limits.memory or math.inf
        ahead: list[Instance] = []
        reserved = reserved_bytes = 0
        for instance in list(self._queue):
            if instance.status == LOADING and not instance.stopping:
                self._queue.remove(instance)  # its waiters go on when it is ready
                continue
            if instance.status == LOADED and not instance.leaving and not instance.stopping:
                self._queue.remove(instance)
                self._grant(instance)
                continue
            if instance.retry_at > now and not instance.running:
                wake = min(wake, instance.retry_at)
                continue
            if instance.need is None:
                self._look_at_need(instance)
                continue
            blocked = any(_conflict(instance, other) or _conflict(other, instance) for other in ahead)
            ahead.append(instance)
            if blocked:
                continue
            in_the_way = [other for other in running if other is not instance and _conflict(instance, other)]
            for other in in_the_way:
                wake = min(wake, self._drain(other, now))
            staying = [other for other in running if not other.stopping and not other.leaving]
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
            if instance.leaving and not instance.stopping and instance.in_flight == 0:
                self._stop(instance)
            elif instance.status == LOADED and instance.idle and not instance.stopping:
                if instance.over <= now:
                    seconds = instance.over - max(instance.last_used, instance.loaded_at)
                    log.info("model %s: %g s without a request: unloaded", instance.model.name, seconds)
                    self._stop(instance)
                else:
                    wake = min(wake, instance.over)
        self._wake_at(wake, now)

    def _look_at_need(self, instance: Instance) -> None:
        """Find out how much memory a model needs, and go on then."""
        name, model = instance.model.name, instance.model
        if not self.limits.memory:
            instance.need = 0
            self._loop.call_soon(self._schedule)
        elif name not in self._looking:
            self._looking.add(name)
            self._task(self._learn_need(instance, model))

    async def _learn_need(self, instance: Instance, model: RoutedModel) -> None:
        need = 0
        try:
            need = await asyncio.to_thread(self._need_of, model)
        except Exception:
            log.exception("model %s: its memory cannot be told", model.name)
        finally:
            self._looking.discard(model.name)
        if instance.model is model:
            instance.need = need
            if need > self.limits.memory:
                told = "model %s: needs %d MiB, and all models together may take %d MiB: it is loaded alone"
                log.warning(told, model.name, need >> 20, self.limits.memory >> 20)
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
        """Let a model leave as soon as it may; returns when to look again."""
        if instance.stopping or instance.leaving or instance.status == LOADING:
            return math.inf
        if instance.idle:
            self._stop(instance)
            return math.inf
        end = self._quantum_end(instance)
        if not forced and end > now:
            return end
        instance.leaving = True
        return math.inf

    def _victim(self, running: list[Instance], drained: list[Instance], now: float) -> tuple[Instance | None, float]:
        """The model that makes room, and if there is none yet, when there may be one."""
        able = [
            instance
            for instance in running
            if instance.status == LOADED and not instance.stopping and not instance.leaving
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
        instance.wanted = instance.failed = False
        instance.exit_code = 0
        instance.reason = ""
        instance.progress = None
        instance.info = {}
        instance.loading_since = time.monotonic()
        instance.child = Child(
            instance.model, self._folder, self._number, self._watchdog, lambda child: self._ended(instance, child)
        )
        self._notify("model_status", instance.model.name, {"status": LOADING})
        self._task(self._load(instance, instance.child))

    async def _load(self, instance: Instance, child: Child) -> None:
        name = instance.model.name
        try:
            if not await child.port_is_free():
                raise LoadFailed(f"somebody else listens on {child.pool.address} already")
            if child.stopping or self._closed:
                raise LoadFailed("it was unloaded")
            child.start()
            log.info("model %s: loading, process %d: %s", name, child.pid, " ".join(child.args)[:2000])
            await child.ready(lambda value, stage: self._progress(instance, child, value, stage))
        except LoadFailed as error:
            await child.stop(at_once=True)
            self._load_failed(instance, child, error)
            return
        except Exception as error:
            log.exception("model %s: loading failed unexpectedly", name)
            await child.stop(at_once=True)
            self._load_failed(instance, child, LoadFailed(f"{type(error).__name__}: {error}"))
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
        told = {"stages": ["text_model"], "current": "text_model", "value": round(value, 4)}
        if told != instance.progress:
            instance.progress = told
            self._notify("status_change", instance.model.name, {"status": LOADING, "progress": told})

    async def _ask_info(self, instance: Instance, child: Child) -> dict[str, Any]:
        """What the process tells of its model; not every server does."""
        try:
            status, body = await get(child.pool, "/v1/models", timeout=2.0)
            found = orjson.loads(body)["data"][0] if status == 200 else {}
            return found if isinstance(found, dict) else {}
        except (UpstreamLost, TimeoutError, ValueError, KeyError, IndexError, TypeError):
            return {}

    async def _watch_sleep(self, instance: Instance, child: Child) -> None:
        while not child.exit.done() and not child.stopping:
            await asyncio.wait([child.exit], timeout=self.limits.sleep_check)
            await self.look_asleep(instance)

    async def look_asleep(self, instance: Instance) -> None:
        """Ask a model that may sleep whether it does."""
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

    def _load_failed(self, instance: Instance, child: Child, error: LoadFailed) -> None:
        if instance.child is not child:
            return
        asked = instance.stopping
        self._end_of(instance)
        if asked:
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
        """Put off the next start; not at all after the first time."""
        seconds = self.limits.backoff * 2 ** min(times - 1, 16) if times > 0 else 0.0
        instance.retry_at = time.monotonic() + min(seconds, self.limits.backoff_max)

    def _end_of(self, instance: Instance) -> None:
        instance.child = None
        instance.keep_alive = None
        instance.status = UNLOADED
        instance.stopping = instance.leaving = False
        instance.asleep = False
        instance.progress = None
        if instance.removed and self.instances.get(instance.model.name) is instance:
            del self.instances[instance.model.name]

    def _ended(self, instance: Instance, child: Child) -> None:
        """A process has ended."""
        if instance.child is not child:
            return
        code = child.exit_code or 0
        name = instance.model.name
        if instance.status == LOADING and not instance.stopping:
            return  # whoever loads it sees that
        asked = instance.stopping
        lived = time.monotonic() - instance.loaded_at
        self._end_of(instance)
        if asked:
            log.info("model %s: unloaded", name)
            instance.crashes = 0
            self._notify("status_change", name, {"status": UNLOADED, "exit_code": 0})
            self._schedule()
            return
        log.error("model %s: died: %s", name, child.end())
        instance.exit_code = code
        instance.reason = f"it died with exit code {code}"
        instance.crashes = 1 if lived > self.limits.stable else instance.crashes + 1
        self._back_off(instance, instance.crashes - 1)
        self._notify("status_change", name, {"status": UNLOADED, "exit_code": code})
        if self._closed or instance.removed:
            return
        instance.restarts += 1
        # It had a place, so it goes first; with nobody waiting it comes back all the same.
        instance.wanted = True
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
            self._end_of(instance)
            self._schedule()

    # What operators ask for

    def load(self, instance: Instance) -> None:
        """Load a model without a request."""
        instance.retry_at = 0.0
        if not instance.running or instance.stopping:
            instance.wanted = True
            if instance not in self._queue:
                self._queue.append(instance)
        self._schedule()

    def unload(self, instance: Instance, *, at_once: bool = False) -> None:
        """Stop a model; one that is loading is killed. Requests under way get what SIGTERM lets them have."""
        instance.wanted = False
        if instance in self._queue and not instance.waiters:
            self._queue.remove(instance)
        loading = instance.status == LOADING
        self._stop(instance, at_once=at_once or loading)
        if loading:
            name = instance.model.name
            self._refuse(instance, ApiError("invalid_request_error", f"model name={name} is not running"))

    async def unloaded(self, instances: Iterable[Instance]) -> None:
        """Wait until the processes have ended."""
        exits = [instance.child.exit for instance in instances if instance.child is not None and instance.child.pid]
        if exits:
            await asyncio.wait(exits)

    def replace(self, catalog: Catalog) -> None:
        """Take another catalog: what is gone or different is unloaded."""
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
        """End all processes."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for instance in self.instances.values():
            self._refuse(instance, _busy("the router is ending"))
        children = [instance.child for instance in self.instances.values() if instance.child is not None]
        for instance in self.instances.values():
            instance.stopping = True
        await asyncio.gather(*(child.stop() for child in children), return_exceptions=True)
        for task in list(self._tasks):
            task.cancel()
        self._watchdog.end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        """End all processes without waiting for anything."""
        self._closed = True
        for instance in self.instances.values():
            if instance.child is not None:
                instance.child.kill()


def _need(instances: Iterable[Instance]) -> int:
    """Bytes that models need together."""
    return sum(instance.need or 0 for instance in instances)


def _fits(instance: Instance, used: int, budget: float) -> bool:
    """Return True if a model may have the memory it needs beside the `used` bytes of others."""
    return not used or used + (instance.need or 0) <= budget


def _conflict(instance: Instance, other: Instance) -> bool:
    """Whether `other` must not run when `instance` starts."""
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
