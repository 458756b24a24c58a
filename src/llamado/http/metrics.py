"""HTTP requests counted by endpoint, status and duration; on the event loop only."""

from __future__ import annotations

from bisect import bisect_left

from llamado.engine.request import Histogram

# Seconds. Answers take from a millisecond (a health check) to minutes (long generations).
BOUNDS = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Traffic:
    """What came and how long it took. Endpoints are the routes' own paths, so that there are few of them."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, str, int], int] = {}
        """(method, endpoint, status) → count."""
        self.cancelled = 0
        """Those whose clients went away before all of their answers were complete, whatever their status."""
        self._durations: dict[str, tuple[list[int], list[float]]] = {}

    def count(self, method: str, endpoint: str, status: int, seconds: float, *, cancelled: bool = False) -> None:
        """Note a request that is over."""
        self.cancelled += cancelled
        key = (method, endpoint, status)
        self.requests[key] = self.requests.get(key, 0) + 1
        counts, total = self._durations.setdefault(endpoint, ([0] * (len(BOUNDS) + 1), [0.0]))
        counts[bisect_left(BOUNDS, seconds)] += 1
        total[0] += seconds

    @property
    def durations(self) -> dict[str, Histogram]:
        """Seconds from a request's first byte to the end of its answer, by endpoint."""
        return {
            endpoint: Histogram(BOUNDS, tuple(counts), total[0])
            for endpoint, (counts, total) in self._durations.items()
        }
