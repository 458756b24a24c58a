"""Idle sleep: unload an idle model, and reload it on the next request."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NoReturn, Protocol

from llamado.engine.errors import EngineClosed
from llamado.engine.request import EngineSnapshot, Event, Request
from llamado.http.access import HEALTH
from llamado.processes import memory
from llamado.server.errors import ApiError
from llamado.server.model import ServedModel

log = logging.getLogger("llamado.server")

# Endpoints of probes and dashboards, which neither wake a model nor keep it awake.
QUIET = HEALTH | {
    "/props",
    "/models",
    "/v1/models",
    "/metrics",
    "/cluster",
    "/cluster/events",
    "/live/cache",
    "/live/events",
    "/live/requests",
    "/lab",
    "/usage",
    "/api/tags",
    "/api/ps",
    "/api/version",
}

CLOSE_SECONDS = 10.0  # for closing an idle engine


class SleepingEngine:
    """The engine of an unloaded model: returns its last snapshot, and rejects requests."""

    def __init__(self, last: EngineSnapshot) -> None:
        self._last = last

    def submit(
        self, request: Request, emit: Callable[[Event], None], *, flush: Callable[[], None] | None = None
    ) -> int:
        raise EngineClosed("the model is asleep")

    def cancel(self, task_id: int) -> None:
        pass

    def snapshot(self) -> EngineSnapshot:
        return self._last

    def stalled(self) -> float:
        return 0.0

    def save_slot(self, id_slot: int, path: Path) -> NoReturn:
        raise EngineClosed("the model is asleep")

    restore_slot = save_slot

    def erase_slot(self, id_slot: int) -> NoReturn:
        raise EngineClosed("the model is asleep")


class ModelHolder(Protocol):
    """The part of a server's state that holds its model."""

    served: ServedModel | None


class Sleep:
    """Unloads the model of a server after `seconds` without a request, and reloads it with `load`, in a thread."""

    def __init__(self, state: ModelHolder, load: Callable[[], ServedModel], seconds: float) -> None:
        self._state = state
        self._load = load
        self._seconds = seconds
        self._n_active = 0
        self._last_request = time.monotonic()
        self._change = asyncio.Lock()
        self._stay: float | None = None
        self.asleep = False

    def stay(self, seconds: float | None) -> None:
        """Set the idle time in seconds until the next sleep; negative: no sleep; None: the server's default."""
        self._stay = math.inf if seconds is not None and seconds < 0 else seconds

    @property
    def seconds(self) -> float:
        """Idle seconds after which the model is unloaded."""
        return self._seconds if self._stay is None else self._stay

    @property
    def left(self) -> float | None:
        """Seconds until the model is unloaded if no request comes; None: never."""
        until = self._last_request + self.seconds - time.monotonic()
        return max(0.0, until) if math.isfinite(until) else None

    @asynccontextmanager
    async def awake(self) -> AsyncIterator[None]:
        """Keep the model loaded during a request; reload it first if it is asleep. Raises ApiError."""
        self._n_active += 1
        try:
            if self.asleep:
                async with self._change:
                    await self._wake()
            yield
        finally:
            self._n_active -= 1
            self._last_request = time.monotonic()

    async def _wake(self) -> None:
        if not self.asleep:
            return  # another request has reloaded it
        began = time.perf_counter()
        log.info("waking up: loading the model")
        try:
            self._state.served = await asyncio.get_running_loop().run_in_executor(None, self._load)
        except Exception as error:
            log.error("waking up: failed to reload the model: %s", error)
            raise ApiError("unavailable_error", f"Failed to load model: {error}", retry_after=5) from None
        self.asleep = False
        memory.freeze()
        log.info("awake after %.2f s", time.perf_counter() - began)

    def _idle(self) -> bool:
        served = self._state.served
        if served is None or self.asleep or self._n_active:
            return False
        snapshot = served.snapshot()
        if snapshot.requests_processing or snapshot.requests_deferred:
            self._last_request = time.monotonic()
        return time.monotonic() - self._last_request >= self.seconds

    async def watch(self) -> None:
        """Unload the model whenever it was idle for long enough; runs until cancelled."""
        while True:
            await asyncio.sleep(min(1.0, self._seconds / 4))
            if self._idle():
                async with self._change:
                    await self._fall_asleep()

    async def _fall_asleep(self) -> None:
        served = self._state.served
        if served is None:
            return
        # From here on requests wait for `_change`, so none reaches the closing engine.
        self.asleep = True
        engine = SleepingEngine(served.snapshot())
        self._state.served = dataclasses.replace(
            served, engine=engine, embeddings=None, grammars=None, cluster=None, close=lambda timeout: None
        )
        await asyncio.get_running_loop().run_in_executor(None, served.close, CLOSE_SECONDS)
        del served
        # The frozen objects of loading are garbage now in part.
        gc.unfreeze()
        memory.trim()
        log.info("no request for %g s: the model is unloaded until the next one", self.seconds)
        self._stay = None
