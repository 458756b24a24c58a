"""Discovery: workers that are announced in the network join, and are drained when their leaving is announced."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from llamado.errors import LlamadoError
from llamado.loglines import LineLimit
from llamado.server.model import Served, ServedCluster

log = logging.getLogger("llamado.server.discovery")
log.addFilter(LineLimit())

_ATTEMPTS = 5
_PAUSE = 2.0  # seconds between two of them


class Loading(Protocol):
    """What becomes of the model of a server."""

    served: Served | None
    failure: str | None


class Listening(Protocol):
    """A listener on the network; stops when closed."""

    def close(self) -> None: ...


Listen = Callable[[Callable[[str, float], bool], Callable[[str], None]], Listening]
"""Start a listener. It calls the first function for each worker found (endpoint, share), which returns True if the
worker joined, and the second one for each worker that left, on threads that may block.
"""


class LanWorkers:
    """Joins and drains announced workers for the lifetime of a server."""

    def __init__(self, state: Loading, listen: Listen) -> None:
        """Raises what `listen` raises."""
        self._state = state
        self._closed = False
        self._discovery = listen(self._found, self._gone)
        log.warning(
            "discovery: accepting every worker that is announced in this network; "
            "use --discover in trusted networks only"
        )

    def _found(self, endpoint: str, share: float) -> bool:
        return self._change(f"{endpoint} announces itself", lambda cluster: cluster.join(endpoint, share))

    def _gone(self, endpoint: str) -> None:
        self._change(f"{endpoint} says that it leaves", lambda cluster: cluster.drain(endpoint))

    def _change(self, what: str, change: Callable[[ServedCluster], object]) -> bool:
        """Return True once a change is made; on a thread of its own, which may wait until the model is loaded."""
        for left in range(_ATTEMPTS)[::-1]:
            while (served := self._state.served) is None or served.cluster is None:
                if self._closed or self._state.failure is not None:
                    return False
                time.sleep(0.1)
            try:
                change(served.cluster)
                return True
            except LlamadoError as error:
                log.warning("%s: %s", what, error)
            if not left or self._closed:
                break
            time.sleep(_PAUSE)
        return False

    def close(self) -> None:
        """Stop listening."""
        self._closed = True
        self._discovery.close()
