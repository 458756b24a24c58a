"""One replica: its health, load, models, and running requests."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import orjson

from llamado.client.health import Phase, State, judge
from llamado.gateway.breaker import Breaker
from llamado.gateway.options import GatewayOptions, ReplicaOptions
from llamado.http.exchange import Exchange
from llamado.http.upstream import Pool, UpstreamAddress, UpstreamLost, UpstreamRefused, get
from llamado.outgoing import Maybe, fit

log = logging.getLogger("llamado.gateway")

LOOK_SECONDS = 2.0
"""Time between two queries of a replica's slots and models."""
METRICS_TIMEOUT = 2.0
_numbers = itertools.count(1)
_REQUESTS = re.compile(r"^llamacpp:requests_(?:processing|deferred)(?:{[^}]*})? (\d[\d.e+]*)$", re.MULTILINE)
_MOST_REQUESTS = 1e9
_LARGEST = 64 << 20  # bytes of `/slots` and `/metrics`

UNKNOWN = State(Phase.CONNECTING, "not asked yet")


class Rate:
    """Events per second over the last minute, counted by seconds."""

    SECONDS = 60

    def __init__(self) -> None:
        self._counts: deque[tuple[int, int]] = deque(maxlen=self.SECONDS + 1)  # (second, events in it)
        self._began: float | None = None

    def record(self, now: float) -> None:
        """Count an event."""
        self._began = now if self._began is None else self._began
        second = int(now)
        if self._counts and self._counts[-1][0] == second:
            self._counts[-1] = (second, self._counts[-1][1] + 1)
        else:
            self._counts.append((second, 1))

    def per_second(self, now: float) -> float:
        """Return the rate; over a shorter time if the first event is less than a minute ago."""
        if self._began is None:
            return 0.0
        recent = sum(n for second, n in self._counts if second > now - self.SECONDS)
        return recent / max(1.0, min(self.SECONDS, now - self._began))


class Replica:
    """A server behind the gateway, monitored from `start` to `close`. Calls `changed` when its availability changes."""

    def __init__(self, options: ReplicaOptions, settings: GatewayOptions, changed: Callable[[], None]) -> None:
        self.options = options
        self.name = options.name
        self.backup = options.backup
        self.pool = Pool(UpstreamAddress.parse(options.url))
        self.key = options.key.encode()
        self.breaker = Breaker()
        self.state = UNKNOWN
        self.since = time.time()
        """Time of the last change of state (seconds of the epoch)."""
        self.draining = False
        self.number = next(_numbers)
        """Identifies the contents of its cache; changes whenever it may have lost them."""
        self.in_flight = 0
        self.n_begun = 0
        """Requests sent to it, ever."""
        self.others = 0
        """Requests of others that it is processing, by its slots, or by its metrics if it hides its slots."""
        self.n_slots: int | None = None
        self.models: list[dict[str, Any]] = []
        self.build = ""
        self.model_names: frozenset[str] = frozenset()
        self.statuses: Counter[int] = Counter()
        """Responses by status."""
        self.losses: Counter[str] = Counter()
        """Unanswered requests, by reason."""
        self._rate = Rate()
        self._settings = settings
        self._changed = changed
        self._waiting: set[Exchange] = set()
        self._silent_since: float | None = None
        self._look_now = asyncio.Event()
        self._free = asyncio.Event()
        self._free.set()
        self._tasks: list[asyncio.Task[None]] = []

    # Monitoring

    def start(self) -> None:
        """Start monitoring."""
        self._tasks = [asyncio.ensure_future(self._watch()), asyncio.ensure_future(self._query())]

    async def close(self) -> None:
        """Stop monitoring and close all connections; running responses are cut short."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.pool.close()

    @property
    def ready(self) -> bool:
        """True if its `/health` reports ready."""
        return self.state.ready

    @property
    def load(self) -> float:
        """Running requests in proportion to its weight."""
        return (self.in_flight + self.others) / self.options.weight

    def check_now(self) -> None:
        """Check its health at once, after a request failed."""
        self._look_now.set()

    async def _watch(self) -> None:
        while True:
            self._look_now.clear()
            self._set_state(await self._health())
            try:
                async with asyncio.timeout(self._settings.health_interval):
                    await self._look_now.wait()
            except TimeoutError:
                pass

    async def _health(self) -> State:
        timeout = self._settings.health_timeout
        try:
            status, body = await get(self.pool, "/health", timeout=timeout, key=self.key)
        except TimeoutError:
            self._on_silence(timeout)
            return State(Phase.CONNECTING, f"accepts connections, and does not answer within {timeout:g} s")
        except UpstreamLost as error:
            self._silent_since = None
            return State(Phase.CONNECTING if isinstance(error, UpstreamRefused) else Phase.UNHEALTHY, str(error))
        self._silent_since = None
        return judge(status, {}, body)

    def _on_silence(self, timeout: float) -> None:
        """Handle a frozen replica: abort requests without a response, and in the end all others."""
        now = time.monotonic()
        if self._silent_since is None:
            self._silent_since = now - timeout
        for exchange in list(self._waiting):
            exchange.abort(f"replica {self.name} does not answer within {timeout:g} s")
        if now - self._silent_since >= self._settings.stall_timeout:
            self.pool.abort_all(f"replica {self.name} was silent for {now - self._silent_since:.0f} s")

    def _set_state(self, state: State) -> None:
        before, self.state = self.state, state
        if state.ready == before.ready and state.phase is before.phase:
            return
        self.since = time.time()
        if state.ready and not before.ready:
            self.breaker.reset()
        log.log(logging.INFO if state.alive else logging.WARNING, "replica %s: %s", self.name, state.message)
        if before.ready and not state.ready and state.phase is not Phase.BUSY and self._silent_since is None:
            self.number = next(_numbers)  # it was probably restarted with an empty cache
        self._changed()

    async def _query(self) -> None:
        """Query its models once it is ready, and its load regularly."""
        described: int | None = None
        while True:
            if self.ready:
                try:
                    if described != self.number or not self.models:
                        await self._describe()
                        described = self.number
                    await self._count()
                except (UpstreamLost, TimeoutError, ValueError):
                    pass
            await asyncio.sleep(LOOK_SECONDS if described == self.number else self._settings.health_interval)

    async def _describe(self) -> None:
        timeout = self._settings.health_timeout
        _, body = await get(self.pool, "/v1/models", timeout=timeout, key=self.key)
        answer = orjson.loads(body)
        listed = answer.get("data") if isinstance(answer, dict) else None
        given = listed if isinstance(listed, list) else []
        self.models = [m for m in given if isinstance(m, dict) and isinstance(m.get("id"), str)]
        names = [[m["id"], *fit(m, {"aliases": [""]})["aliases"]] for m in self.models]
        self.model_names = frozenset(name for group in names for name in group if name)
        _, body = await get(self.pool, "/props", timeout=timeout, key=self.key)
        props = fit(orjson.loads(body), {"total_slots": Maybe(0), "build_info": ""})
        self.n_slots, self.build = props["total_slots"], props["build_info"]
        self._changed()

    async def _count(self) -> None:
        slots = await self.slots()
        busy = sum(bool(slot.get("is_processing")) for slot in slots)
        if not slots and (text := await self.metrics()) is not None:  # --no-slots
            busy = int(min(sum(map(float, _REQUESTS.findall(text))), _MOST_REQUESTS))
        self.others = max(0, busy - self.in_flight)

    async def slots(self) -> list[dict[str, Any]]:
        """Return `/slots`; [] if it is disabled. Raises UpstreamLost, TimeoutError, ValueError."""
        timeout = self._settings.health_timeout
        status, body = await get(self.pool, "/slots", timeout=timeout, limit=_LARGEST, key=self.key)
        answer = orjson.loads(body) if status == 200 else []
        return [slot for slot in answer if isinstance(slot, dict)] if isinstance(answer, list) else []

    async def metrics(self) -> str | None:
        """Return its metrics; None if they are disabled. Raises UpstreamLost, TimeoutError."""
        status, body = await get(self.pool, "/metrics", timeout=METRICS_TIMEOUT, limit=_LARGEST, key=self.key)
        return body.decode("utf-8", "replace") if status == 200 else None

    # Requests

    def begin(self, exchange: Exchange) -> bool:
        """Count a request that is about to be sent; return True if it is a probe of the breaker."""
        self.in_flight += 1
        self.n_begun += 1
        self._rate.record(time.monotonic())
        self._free.clear()
        self._waiting.add(exchange)
        return self.breaker.begin()

    def response_started(self, exchange: Exchange) -> None:
        """Count the start of a response."""
        self._waiting.discard(exchange)

    def end(self, exchange: Exchange) -> None:
        """Count the end of a request."""
        self._waiting.discard(exchange)
        self.in_flight -= 1
        if not self.in_flight:
            self._free.set()

    async def wait_idle(self) -> None:
        """Wait until no request is running."""
        await self._free.wait()

    @property
    def admin_status(self) -> dict[str, Any]:
        """Return its entry in `/gateway/replicas`."""
        return {"url": self.options.url, **self.status}

    @property
    def status(self) -> dict[str, Any]:
        """Return its entry in `/gateway/status`."""
        return {
            "name": self.name,
            "ready": self.ready,
            "backup": self.backup,
            "weight": self.options.weight,
            "state": "draining" if self.draining else self.state.phase.value,
            "message": self.state.message,
            "since": round(self.since, 3),
            "circuit": self.breaker.state.value,
            "in_flight": self.in_flight,
            "others": self.others,
            "slots": self.n_slots,
            "requests": self.n_begun,
            "requests_per_second": round(self._rate.per_second(time.monotonic()), 3),
            "answers": {str(status): n for status, n in sorted(self.statuses.items())},
            "losses": dict(self.losses),
            "models": [model["id"] for model in self.models],
            "build": self.build,
        }
