"""The stream `/cluster/events`: the whole view first, then its changes as JSON Patches (RFC 6902).

The view is computed and encoded once per change, however many clients listen.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from llamado.server.api.cluster.bodies import ClusterBody, cluster_body, json_values
from llamado.server.live.stream import PING_SECONDS
from llamado.server.state import ServerState

_POLL_SECONDS = 0.1  # between two checks for a change, while there are listeners
_FIGURES_SECONDS = 1.0  # between two messages if only figures changed


@dataclass(frozen=True)
class WholeView:
    """First message of the stream, and of a listener that missed a change."""

    sequence: int
    cluster: ClusterBody


@dataclass(frozen=True)
class Replacement:
    """An operation of a JSON Patch; the only one that is used."""

    op: Literal["replace"]
    path: str
    """A JSON Pointer (RFC 6901)."""
    value: Any


@dataclass(frozen=True)
class ViewChange:
    """Message that turns the view of the message before it (`sequence` - 1) into the present one."""

    sequence: int
    patch: tuple[Replacement, ...]


def difference(old: Any, new: Any, path: str = "") -> list[Replacement]:
    """Return the shortest replacements that turn one JSON value into another."""
    if old == new:
        return []
    whole = [Replacement("replace", path, new)]
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        names = {name.replace("~", "~0").replace("/", "~1"): name for name in new}
        parts = [one for token, name in names.items() for one in difference(old[name], new[name], f"{path}/{token}")]
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        parts = [one for i in range(len(new)) for one in difference(old[i], new[i], f"{path}/{i}")]
    else:
        return whole
    return parts if len(orjson.dumps(parts)) < len(orjson.dumps(whole)) else whole


class ClusterPublisher:
    """Computes the view once per change and hands the same bytes to every listener. Event loop only."""

    def __init__(self, state: ServerState, clock: Callable[[], float] = time.monotonic) -> None:
        self._state, self._clock = state, clock
        self._listeners = 0
        self._polling: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()  # replaced by a new one at each change
        self._view: Any = None
        self._mark: object = None
        self._at = 0.0
        self._sequence = 0
        self._whole = self._change = b""

    async def listen(self) -> AsyncGenerator[bytes]:
        """Yield the messages of one listener, and b"" when a keep-alive is due, until the server shuts down.

        A listener that missed a change because its client reads slowly gets the whole view. Raises ApiError if the
        model is not loaded.
        """
        if self._polling is None:
            self.refresh(force=True)
            self._polling = asyncio.create_task(self._poll())
        polling, sent = self._polling, -1
        self._listeners += 1
        try:
            while not polling.done():
                changed = self._changed
                if sent != self._sequence:
                    message = self._change if sent == self._sequence - 1 else self._whole_message()
                    sent = self._sequence
                    yield message
                    continue
                try:
                    async with asyncio.timeout(PING_SECONDS):
                        await changed.wait()
                except TimeoutError:
                    yield b""
            polling.result()
        finally:
            self._listeners -= 1
            if not self._listeners:
                polling.cancel()
                self._polling = None

    async def _poll(self) -> None:
        try:
            while not self._state.ending():
                await asyncio.sleep(_POLL_SECONDS)
                self.refresh()
        finally:
            self._wake()

    def refresh(self, *, force: bool = False) -> None:
        """Publish changes: those of membership and layers at once, figures once a second."""
        served, now = self._state.loaded(), self._clock()
        mark = served.cluster, None if served.cluster is None else served.cluster.mark()
        if not force and mark == self._mark and now < self._at + _FIGURES_SECONDS:
            return
        self._mark, self._at = mark, now
        view = json_values(cluster_body(served))
        if patch := difference(self._view, view):
            self._sequence += 1
            self._view, self._whole = view, b""
            self._change = orjson.dumps(ViewChange(self._sequence, tuple(patch)))
            self._wake()

    def _whole_message(self) -> bytes:
        if not self._whole:
            self._whole = orjson.dumps({"sequence": self._sequence, "cluster": self._view})
        return self._whole

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
