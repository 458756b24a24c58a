"""Which graphs of a device the worker still has, so that their names are enough."""

from __future__ import annotations

from llamado.rpc import wire


class SentGraphs:
    """The names of graphs that a worker keeps for one device, counted exactly as it counts them.

    Nothing is ever said of a graph that was dropped: both sides forget all of them before one too many is sent, and a
    worker may not run any of them again once a buffer was freed, though it goes on counting their names.
    """

    def __init__(self, protocol: wire.Protocol) -> None:
        self._most = protocol.graphs
        self._counted: set[int] = set()
        self._usable: set[int] = set()
        self._freed = 0

    def again(self, uid: int, freed: int) -> bool:
        """Whether the worker can run a graph by its name, after so many buffers were `freed`; if not, it is sent."""
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
