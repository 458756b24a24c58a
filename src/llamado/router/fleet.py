"""Which models' processes run: started on demand, swapped for one another, restarted when they die, ended when idle.

Everything here happens on one event loop; nothing is locked. Requests take turns by a queue of models:

- A request for a loaded model goes to it at once.
- Others wait. Their models stand in line by who asked first; the first in line gets the next place.
- To make room, the least recently used idle model is unloaded. If all are busy, the one that has been loaded for the
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

from llamado.router.catalogue import Catalogue, Group, Model
from llamado.router.child import Child, Guard, LoadFailed
from llamado.router.upstream import UpstreamLost, get
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
class Place:
    """A model of the catalogue and what is known of its process."""

    model: Model
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
    removed: bool = False
    """No longer in the catalogue; forgotten when its process has ended."""

    @property
    def running(self) -> bool:
        """Whether it takes up a place."""
        return self.child is not None

    @property
    def idle(self) -> bool:
        """Whether nobody uses it."""
        return self.in_flight == 0 and not self.waiters

    @property
    def shown_status(self) -> str:
        """The status as the API names it."""
        return "sleeping" if self.asleep and self.status == LOADED else self.status


class Lease:
    """A request's right to use a model's process; release it."""

    __slots__ = ("_count", "_fleet", "_open", "child", "place")

    def __init__(self, fleet: Fleet, place: Place, child: Child, count: bool = True) -> None:
        self._fleet = fleet
        self._count = count
        self.place = place
        self.child = child
        self._open = True
        place.in_flight += 1

    def release(self) -> None:
        """Give it back; harmless when done twice."""
        if self._open:
            self._open = False
            self._fleet.released(self.place, self._count)


class Fleet:
    """The models' processes."""

    def __init__(self, catalogue: Catalogue, limits: FleetLimits, notify: Notify | None = None) -> None:
        self.limits = limits
        self.catalogue = catalogue
        self.places: dict[str, Place] = {name: Place(model) for name, model in catalogue.models.items()}
        self.swaps = 0
        self._queue: list[Place] = []
        self._waiting = 0
        self._notify = notify or (lambda event, model, data: None)
        self._loop = asyncio.get_running_loop()
        self._folder = Path(tempfile.mkdtemp(prefix="llamado-"))
        grace = max([2.0, *(model.launch.stop_timeout for model in catalogue.models.values())])
        self._guard = Guard(min(grace, 60.0), self._folder)
        self._number = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    # Requests

    def find(self, name: str) -> Place | None:
        """The place of a model's name or alias."""
        model = self.catalogue.find(name)
        return None if model is None else self.places.get(model.name)

    async def acquire(self, place: Place, *, count: bool = True) -> Lease:
        """Use a model's process once it is loaded. `count`: whether this keeps the model from being unloaded as idle.

        Raises ApiError: it cannot be loaded, or too many wait.
        """
        if self._closed:
            raise _busy("the router is ending")
        model = place.model
        if model.limit and place.in_flight + len(place.waiters) >= model.limit:
            message = f"model '{model.name}' works on {model.limit} requests already"
            raise ApiError("unavailable_error", message, status=429, retry_after=1)
        if count:
            place.last_used = time.monotonic()
        if place.status == LOADED and not place.leaving and not place.stopping and place.child is not None:
            return Lease(self, place, place.child, count)
        if place.failed and place.retry_at > time.monotonic():
            # It failed a moment ago. Trying at each request would make a machine do nothing else.
            wait = math.ceil(place.retry_at - time.monotonic())
            raise _failed(place, retry_after=max(1, wait))
        if self._waiting >= self.limits.waiting:
            raise _busy(f"{self._waiting} requests wait for models already")
        waiter: asyncio.Future[Lease] = self._loop.create_future()
        place.waiters.append(waiter)
        self._waiting += 1
        if place not in self._queue and (place.status != LOADING or place.stopping):
            self._queue.append(place)
        self._schedule()
        try:
            async with asyncio.timeout(self.limits.patience):
                return await waiter
        except BaseException as error:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                waiter.result().release()  # it came while we gave up
            elif waiter in place.waiters:
                place.waiters.remove(waiter)
            if not place.waiters and not place.wanted and place in self._queue:
                self._queue.remove(place)
            self._schedule()
            if isinstance(error, TimeoutError):
                raise _busy(f"no place for model '{model.name}' within {self.limits.patience:g} s") from None
            raise
        finally:
            self._waiting -= 1

    def released(self, place: Place, count: bool) -> None:
        """A request is over."""
        place.in_flight -= 1
        if count:
            place.last_used = time.monotonic()
        if place.in_flight == 0:
            self._schedule()

    def _grant(self, place: Place) -> None:
        child = place.child
        assert child is not None
        while place.waiters:
            waiter = place.waiters.popleft()
            if not waiter.done():
                waiter.set_result(Lease(self, place, child))

    def _refuse(self, place: Place, error: ApiError) -> None:
        while place.waiters:
            waiter = place.waiters.popleft()
            if not waiter.done():
                waiter.set_exception(error)
        place.wanted = False
        if place in self._queue:
            self._queue.remove(place)

    # Who runs

    def _schedule(self) -> None:
        """Start, drain and stop what the queue and the clock ask for."""
        if self._closed:
            return
        now = time.monotonic()
        wake = math.inf
        running = [place for place in self.places.values() if place.running]
        drained = [place for place in running if place.leaving and not place.stopping]
        for place in drained:
            place.leaving = False
        limit = self.limits.models_max or math.inf
        ahead: list[Place] = []
        reserved = 0
        for place in list(self._queue):
            if place.status == LOADING and not place.stopping:
                self._queue.remove(place)  # its waiters go on when it is ready
                continue
            if place.status == LOADED and not place.leaving and not place.stopping:
                self._queue.remove(place)
                self._grant(place)
                continue
            if place.retry_at > now and not place.running:
                wake = min(wake, place.retry_at)
                continue
            blocked = any(_conflict(place, other) or _conflict(other, place) for other in ahead)
            ahead.append(place)
            if blocked:
                continue
            in_the_way = [other for other in running if other is not place and _conflict(place, other)]
            for other in in_the_way:
                wake = min(wake, self._drain(other, now))
            staying = sum(1 for other in running if not other.stopping and not other.leaving)
            while staying + reserved + 1 > limit:
                victim, when = self._victim(running, drained, now)
                wake = min(wake, when)
                if victim is None:
                    break
                self._drain(victim, now, forced=True)
                staying -= 1
            reserved += 1
            in_the_way = [other for other in in_the_way if other.running]
            if not place.running and not in_the_way and sum(1 for other in running if other.running) < limit:
                self._queue.remove(place)
                self._start(place)
                running.append(place)
                reserved -= 1
        for place in running:
            if place.leaving and not place.stopping and place.in_flight == 0:
                self._stop(place)
            elif place.status == LOADED and place.model.ttl > 0 and place.idle and not place.stopping:
                over = max(place.last_used, place.loaded_at) + place.model.ttl
                if over <= now:
                    log.info("model %s: %g s without a request: unloaded", place.model.name, place.model.ttl)
                    self._stop(place)
                else:
                    wake = min(wake, over)
        self._wake_at(wake, now)

    def _wake_at(self, when: float, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if when < math.inf:
            self._timer = self._loop.call_later(max(0.001, when - now), self._schedule)

    def _quantum_end(self, place: Place) -> float:
        seconds = min(max(place.load_seconds, self.limits.quantum), self.limits.quantum_max)
        return place.loaded_at + seconds

    def _drain(self, place: Place, now: float, *, forced: bool = False) -> float:
        """Let a model leave as soon as it may; returns when to look again."""
        if place.stopping or place.leaving or place.status == LOADING:
            return math.inf
        if place.idle:
            self._stop(place)
            return math.inf
        end = self._quantum_end(place)
        if not forced and end > now:
            return end
        place.leaving = True
        return math.inf

    def _victim(self, running: list[Place], drained: list[Place], now: float) -> tuple[Place | None, float]:
        """The model that makes room, and if there is none yet, when there may be one."""
        able = [place for place in running if place.status == LOADED and not place.stopping and not place.leaving]
        before = [place for place in able if place in drained]
        if before:
            return before[0], math.inf
        if idle := [place for place in able if place.idle]:
            return min(idle, key=lambda place: place.last_used), math.inf
        if ripe := [place for place in able if self._quantum_end(place) <= now]:
            return min(ripe, key=lambda place: place.loaded_at), math.inf
        return None, min((self._quantum_end(place) for place in able), default=math.inf)

    # Processes

    def _task(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _start(self, place: Place) -> None:
        self._number += 1
        place.status = LOADING
        place.wanted = place.failed = False
        place.exit_code = 0
        place.reason = ""
        place.progress = None
        place.info = {}
        place.loading_since = time.monotonic()
        place.child = Child(
            place.model, self._folder, self._number, self._guard, lambda child: self._ended(place, child)
        )
        self._notify("model_status", place.model.name, {"status": LOADING})
        self._task(self._load(place, place.child))

    async def _load(self, place: Place, child: Child) -> None:
        name = place.model.name
        try:
            if not await child.port_is_free():
                raise LoadFailed(f"somebody else listens on {child.pool.address} already")
            if child.stopping or self._closed:
                raise LoadFailed("it was unloaded")
            child.start()
            log.info("model %s: loading, process %d: %s", name, child.pid, " ".join(child.args)[:2000])
            await child.ready(lambda value, stage: self._progress(place, child, value, stage))
        except LoadFailed as error:
            await child.stop(at_once=True)
            self._load_failed(place, child, error)
            return
        except Exception as error:
            log.exception("model %s: loading failed unexpectedly", name)
            await child.stop(at_once=True)
            self._load_failed(place, child, LoadFailed(f"{type(error).__name__}: {error}"))
            return
        info = await self._ask_info(place, child)
        if place.stopping or child.exit.done() or place.child is not child:
            return
        place.info = info
        place.status = LOADED
        place.loaded_at = time.monotonic()
        place.load_seconds = place.loaded_at - place.loading_since
        place.progress = None
        self.swaps += 1
        log.info("model %s: loaded in %.2f s", name, place.load_seconds)
        self._notify("status_change", name, {"status": LOADED, "info": place.info})
        self._grant(place)
        self._schedule()
        if place.model.sleeps:
            self._task(self._watch_sleep(place, child))

    def _progress(self, place: Place, child: Child, value: float, stage: str) -> None:
        if place.child is not child or child.stopping:
            return
        told = {"stages": ["text_model"], "current": "text_model", "value": round(value, 4)}
        if told != place.progress:
            place.progress = told
            self._notify("status_change", place.model.name, {"status": LOADING, "progress": told})

    async def _ask_info(self, place: Place, child: Child) -> dict[str, Any]:
        """What the process tells of its model; not every server does."""
        try:
            status, body = await get(child.pool, "/v1/models", timeout=2.0)
            found = orjson.loads(body)["data"][0] if status == 200 else {}
            return found if isinstance(found, dict) else {}
        except (UpstreamLost, TimeoutError, ValueError, KeyError, IndexError, TypeError):
            return {}

    async def _watch_sleep(self, place: Place, child: Child) -> None:
        while not child.exit.done() and not child.stopping:
            await asyncio.wait([child.exit], timeout=self.limits.sleep_check)
            await self.look_asleep(place)

    async def look_asleep(self, place: Place) -> None:
        """Ask a model that may sleep whether it does."""
        child = place.child
        if child is None or not place.model.sleeps or place.status != LOADED:
            return
        try:
            _, body = await get(child.pool, "/props", timeout=1.0)
            asleep = bool(orjson.loads(body).get("is_sleeping"))
        except (UpstreamLost, TimeoutError, ValueError, AttributeError):
            return
        if asleep != place.asleep and place.child is child:
            place.asleep = asleep
            self._notify("status_change", place.model.name, {"status": place.shown_status})

    def _load_failed(self, place: Place, child: Child, error: LoadFailed) -> None:
        if place.child is not child:
            return
        asked = place.stopping
        self._end_of(place)
        if asked:
            self._schedule()
            return
        place.failed = True
        place.exit_code = error.exit_code or 1
        place.reason = str(error)
        place.crashes += 1
        self._back_off(place, place.crashes)
        log.error("model %s failed to load: %s", place.model.name, error)
        self._notify("status_change", place.model.name, {"status": UNLOADED, "exit_code": place.exit_code})
        self._refuse(place, _failed(place))
        self._schedule()

    def _back_off(self, place: Place, times: int) -> None:
        """Put off the next start; not at all after the first time."""
        seconds = self.limits.backoff * 2 ** min(times - 1, 16) if times > 0 else 0.0
        place.retry_at = time.monotonic() + min(seconds, self.limits.backoff_max)

    def _end_of(self, place: Place) -> None:
        place.child = None
        place.status = UNLOADED
        place.stopping = place.leaving = False
        place.asleep = False
        place.progress = None
        if place.removed and self.places.get(place.model.name) is place:
            del self.places[place.model.name]

    def _ended(self, place: Place, child: Child) -> None:
        """A process has ended."""
        if place.child is not child:
            return
        code = child.exit_code or 0
        name = place.model.name
        if place.status == LOADING and not place.stopping:
            return  # whoever loads it sees that
        asked = place.stopping
        lived = time.monotonic() - place.loaded_at
        self._end_of(place)
        if asked:
            log.info("model %s: unloaded", name)
            place.crashes = 0
            self._notify("status_change", name, {"status": UNLOADED, "exit_code": 0})
            self._schedule()
            return
        words = child.last_words()
        log.error("model %s died with exit code %d%s", name, code, f": {words}" if words else "")
        place.exit_code = code
        place.reason = f"it died with exit code {code}"
        place.crashes = 1 if lived > self.limits.stable else place.crashes + 1
        self._back_off(place, place.crashes - 1)
        self._notify("status_change", name, {"status": UNLOADED, "exit_code": code})
        if self._closed or place.removed:
            return
        place.restarts += 1
        # It had a place, so it goes first; with nobody waiting it comes back all the same.
        place.wanted = True
        if place not in self._queue:
            self._queue.insert(0, place)
        self._schedule()

    def _stop(self, place: Place, *, at_once: bool = False) -> None:
        child = place.child
        if child is None or place.stopping:
            return
        place.stopping = True
        self._task(self._stop_child(place, child, at_once))

    async def _stop_child(self, place: Place, child: Child, at_once: bool) -> None:
        await child.stop(at_once=at_once, idle=place.in_flight == 0)
        if place.child is child and (child.pid == 0 or not child.exit.done()):
            self._end_of(place)
            self._schedule()

    # What operators ask for

    def load(self, place: Place) -> None:
        """Load a model without a request."""
        place.retry_at = 0.0
        if not place.running or place.stopping:
            place.wanted = True
            if place not in self._queue:
                self._queue.append(place)
        self._schedule()

    def unload(self, place: Place, *, at_once: bool = False) -> None:
        """Stop a model; one that is loading is killed. Requests under way get what SIGTERM lets them have."""
        place.wanted = False
        if place in self._queue and not place.waiters:
            self._queue.remove(place)
        loading = place.status == LOADING
        self._stop(place, at_once=at_once or loading)
        if loading:
            name = place.model.name
            self._refuse(place, ApiError("invalid_request_error", f"model name={name} is not running"))

    async def unloaded(self, places: Iterable[Place]) -> None:
        """Wait until the processes have ended."""
        exits = [place.child.exit for place in places if place.child is not None and place.child.pid]
        if exits:
            await asyncio.wait(exits)

    def replace(self, catalogue: Catalogue) -> None:
        """Take another catalogue: what is gone or different is unloaded."""
        self.catalogue = catalogue
        for name, place in list(self.places.items()):
            model = catalogue.models.get(name)
            if model is None:
                place.removed = True
                self._refuse(place, ApiError("invalid_request_error", f"model '{name}' not found"))
                if place.running:
                    self.unload(place)
                else:
                    del self.places[name]
                continue
            place.removed = False
            if model != place.model:
                place.model = model
                if place.running:
                    log.info("model %s: its settings changed: unloaded", name)
                    self.unload(place)
            if not place.running:
                place.failed = False
                place.retry_at = 0.0
        for name, model in catalogue.models.items():
            if name not in self.places:
                self.places[name] = Place(model)
        self.places = {name: self.places[name] for name in sorted(self.places)}
        self._notify("models_reload", "*", None)
        self._schedule()

    async def close(self) -> None:
        """End all processes."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for place in self.places.values():
            self._refuse(place, _busy("the router is ending"))
        children = [place.child for place in self.places.values() if place.child is not None]
        for place in self.places.values():
            place.stopping = True
        await asyncio.gather(*(child.stop() for child in children), return_exceptions=True)
        for task in list(self._tasks):
            task.cancel()
        self._guard.end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        """End all processes without waiting for anything."""
        self._closed = True
        for place in self.places.values():
            if place.child is not None:
                place.child.kill()


def _conflict(place: Place, other: Place) -> bool:
    """Whether `other` must not run when `place` starts."""
    mine, its = place.model.group, other.model.group
    if place is other or mine is None or its is None:
        return False
    return mine.swap if _same(mine, its) else mine.exclusive and not its.persistent


def _same(a: Group, b: Group) -> bool:
    return a.name == b.name


def _busy(message: str) -> ApiError:
    return ApiError("unavailable_error", message, retry_after=2)


def _failed(place: Place, retry_after: int | None = None) -> ApiError:
    message = f"model name={place.model.name} failed to load"
    return ApiError("server_error", message, retry_after=retry_after, reason=place.reason)
