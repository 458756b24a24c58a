"""Discovery: workers announced in the network join the cluster, and are drained when they announce that they leave."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from llamado.errors import LlamadoError
from llamado.loglines import LineLimit
from llamado.server.model import ServedCluster, ServedModel

log = logging.getLogger("llamado.server.discovery")
log.addFilter(LineLimit())

_ATTEMPTS = 5
_PAUSE = 2.0  # seconds between two of them


class LoadState(Protocol):
    """The state of a server's model: loaded (`served`), failed (`failure`), or still loading."""

    served: ServedModel | None
    failure: str | None


class Listener(Protocol):
    """A listener on the network; stops when closed."""

    def close(self) -> None: ...


Listen = Callable[[Callable[[str, float], bool], Callable[[str], None]], Listener]
"""Start a listener. It calls the first function for each worker found (endpoint, share), which returns True if the
worker joined, and the second one for each worker that left, on threads that may block.
"""


class LanWorkers:
    """Workers on the local network: joins and drains announced ones for the lifetime of a server."""

    def __init__(self, state: LoadState, listen: Listen) -> None:
        """Raises the errors of `listen`."""
        self._state = state
        self._closed = False
        self._discovery = listen(self._join, self._drain)
        log.warning(
            "discovery: accepting every worker that is announced in this network; "
            "use --discover in trusted networks only"
        )

    def _join(self, endpoint: str, share: float) -> bool:
        return self._change(f"worker {endpoint}: not joined", lambda cluster: cluster.join(endpoint, share))

    def _drain(self, endpoint: str) -> None:
        self._change(f"worker {endpoint}: not drained", lambda cluster: cluster.drain(endpoint))

    def _change(self, failure: str, change: Callable[[ServedCluster], object]) -> bool:
        """Return True once the change is made. Waits until the model is loaded, so it runs on a thread of its own."""
        for left in range(_ATTEMPTS)[::-1]:
            while (served := self._state.served) is None or served.cluster is None:
                if self._closed or self._state.failure is not None:
                    return False
                time.sleep(0.1)
            try:
                change(served.cluster)
                return True
            except LlamadoError as error:
                log.warning("%s: %s", failure, error)
            if not left or self._closed:
                break
            time.sleep(_PAUSE)
        return False

    def close(self) -> None:
        """Stop listening."""
        self._closed = True
        self._discovery.close()
