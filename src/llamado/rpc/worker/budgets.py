"""Budgets of costly work per client, so that no client keeps the compiler busy or fills memory with machine code."""

from __future__ import annotations

import threading
import time

_KERNELS = 512
"""Kernels of a full budget; a model needs a few dozen."""
_KERNELS_A_SECOND = 4.0
"""Kernels regained per second: a fraction of the compiler's speed."""
_CLIENTS = 4096


class Budgets:
    """Kernels, or other units, that each client may still spend: `most` at once, regained at `a_second` per second."""

    def __init__(self, most: int = _KERNELS, a_second: float = _KERNELS_A_SECOND) -> None:
        self.most, self.a_second = most, a_second
        self._lock = threading.Lock()
        self._used: dict[str, tuple[float, float]] = {}  # units spent, and the time of that count

    def left(self, client: str) -> int:
        """Return the units that a client may spend now."""
        with self._lock:
            return int(self.most - self._now(client))

    def spend(self, client: str, units: int) -> None:
        """Charge units to a client."""
        if units:
            with self._lock:
                self._used[client] = self._now(client) + units, time.monotonic()
                if len(self._used) > _CLIENTS:
                    self._used = {name: used for name, used in self._used.items() if self._now(name)}

    def _now(self, client: str) -> float:
        used, at = self._used.get(client, (0.0, 0.0))
        return max(0.0, used - self.a_second * (time.monotonic() - at))
