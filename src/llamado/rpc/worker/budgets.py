"""What strangers may have done for them: nobody keeps the compiler busy for ever, or fills memory with machine code."""

from __future__ import annotations

import threading
import time

_KERNELS = 512
"""A model needs a few dozen."""
_KERNELS_A_SECOND = 4.0
"""A fraction of what is compiled in a second."""
_CLIENTS = 4096


class Budgets:
    """Kernels (or other things) that each client may still have made: `most` at once and for one graph; what was used
    comes back with time.
    """

    def __init__(self, most: int = _KERNELS, a_second: float = _KERNELS_A_SECOND) -> None:
        self.most, self.a_second = most, a_second
        self._lock = threading.Lock()
        self._used: dict[str, tuple[float, float]] = {}  # kernels, and when that was so

    def left(self, client: str) -> int:
        """How many it may have made now."""
        with self._lock:
            return int(self.most - self._now(client))

    def spend(self, client: str, kernels: int) -> None:
        """It has had so many made."""
        if kernels:
            with self._lock:
                self._used[client] = self._now(client) + kernels, time.monotonic()
                if len(self._used) > _CLIENTS:
                    self._used = {name: used for name, used in self._used.items() if self._now(name)}

    def _now(self, client: str) -> float:
        used, at = self._used.get(client, (0.0, 0.0))
        return max(0.0, used - self.a_second * (time.monotonic() - at))
