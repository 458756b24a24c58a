"""Recent requests with their timings and token counts, without any text of prompts or answers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any

from llamado.engine.request import SlotSnapshot
from llamado.http.monitoring.request_log import Record

_KEPT = 100
_LONGEST_PATH = 100  # characters


class RecentRequests:
    """The requests that are running and the last that ended; event loop only."""

    def __init__(self, n_kept: int = _KEPT) -> None:
        self._running: dict[int, Record] = {}
        self._started: dict[int, float] = {}
        self._ended: deque[dict[str, Any]] = deque(maxlen=n_kept)
        self._n_begun = 0
        self.n_ended = 0
        self.n_errors = 0
        """Ended requests with a status of 400 or more, except those whose client disconnected."""

    def begin(self, record: Record) -> int:
        """Add a request; return its number for `end`."""
        self._n_begun += 1
        # GET requests would show mostly the live view's own polling.
        if record.method == "POST":
            self._running[self._n_begun] = record
        return self._n_begun

    def end(self, number: int, record: Record, model: str, *, cancelled: bool) -> None:
        """Move a request to the ended ones. `cancelled`: its client disconnected."""
        started = self._started.pop(number, None)
        if self._running.pop(number, None) is None:
            return
        self.n_errors += record.status >= 400 and not cancelled
        if record.first_token is not None and record.prompt_seconds:
            started = record.first_token - record.prompt_seconds
        shown = _shown(number, record, started)
        shown |= {
            "model": model,
            "status": record.status,
            "seconds": round(time.perf_counter() - record.began, 4),
            "prompt": record.n_prompt,
            "cached": record.n_cached,
            "predicted": record.n_predicted,
            "first": _after(record, record.first_token),
            "rate": round(record.tokens_per_second, 2),
            "stop": "cancelled" if cancelled else ", ".join(dict.fromkeys(record.stops)),
            "reason": record.reason,
        }
        self._ended.append(shown)
        self.n_ended += 1

    def ended(self, n: int = 0) -> list[dict[str, Any]]:
        """Return the kept ones of the requests that ended after the first `n`."""
        new = min(self.n_ended - n, len(self._ended))
        return [*islice(self._ended, len(self._ended) - new, None)]

    def running(self, slots: Sequence[SlotSnapshot]) -> list[dict[str, Any]]:
        """Return the running requests with their slots."""
        places = {slot.id_task: slot.id for slot in slots if slot.is_processing}
        found = []
        for number, record in self._running.items():
            answering = record.answering
            tasks = () if answering is None else answering.tasks
            mine = [places[task] for task in tasks if task in places]
            if mine:
                self._started.setdefault(number, time.perf_counter())
            shown = _shown(number, record, self._started.get(number))
            if answering is not None:
                shown |= {
                    "prompt": answering.n_prompt,
                    "predicted": answering.n_predicted,
                    "first": _after(record, answering.first_token),
                }
            found.append(shown | {"slots": mine})
        return found


def _shown(number: int, record: Record, started: float | None) -> dict[str, Any]:
    ago = time.perf_counter() - record.began
    return {
        "number": number,
        "id": record.id,
        "at": round(time.time() - ago, 3),
        "path": record.path[:_LONGEST_PATH],
        "client": record.client,
        "started": _after(record, started),
    }


def _after(record: Record, moment: float | None) -> float | None:
    """Return the seconds from the request's arrival to a moment."""
    return None if moment is None else round(max(0.0, moment - record.began), 4)
