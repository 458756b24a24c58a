"""Names of the graphs that a worker still has, to run them again by name."""

from __future__ import annotations

from llamado.rpc import wire


class SentGraphs:
    """The graphs that a worker keeps for one device, counted exactly as the worker counts them.

    A worker does not report dropped graphs. Both sides forget all graphs before one more than the protocol allows is
    sent. Once a buffer was freed, a worker runs none of them again, though it still counts them.
    """

    def __init__(self, protocol: wire.Protocol) -> None:
        self._most = protocol.graphs
        self._counted: set[int] = set()
        self._usable: set[int] = set()
        self._freed = 0

    def can_rerun(self, uid: int, freed: int) -> bool:
        """Return True if the worker can run a graph by name. If not, count it as sent now.

        `freed`: number of buffers freed so far.
        """
        if freed != self._freed:
            self._usable.clear()
            self._freed = freed
        if uid in self._usable:
            return True
        if len(self._counted) >= self._most:
            self._counted.clear()
            self._usable.clear()
        self._counted.add(uid)
        self._usable.add(uid)
        return False
