"""Copies of the inputs in a worker's buffer, so that a write sends only the bytes it changes.

From one token to the next a mask changes by two bytes, and a batch's output rows not at all.
"""

from __future__ import annotations

import numpy as np

from llamado.devices.device import Bytes

_LARGEST = 1 << 20
"""Largest input that is copied, in bytes; comparing a larger one takes longer than it saves."""


class SentInputs:
    """Contents of inputs by their start in the buffer. Inputs of several graphs may share a place."""

    def __init__(self) -> None:
        self._known: dict[int, Bytes] = {}
        self._changing: list[tuple[int, int]] = []

    def write(self, start: int, offset: int, source: Bytes) -> tuple[int, int]:
        """Record that `source` is written `offset` bytes into the input at `start`.

        Returns the range of `source` (start, end) that differs from the worker's content.
        """
        n = source.nbytes
        end = offset + n
        known = self._known.get(start)
        self.forget(start + offset, start + end, but=start)
        if known is not None and end <= known.nbytes:
            before = known[offset:end]
            if not n or (before[0] != source[0] and before[-1] != source[-1]):
                before[...] = source
                return 0, n
            changed = np.flatnonzero(before != source)
            if not changed.size:
                return 0, 0
            span = int(changed[0]), int(changed[-1]) + 1
            before[slice(*span)] = source[slice(*span)]
            return span
        self._known.pop(start, None)
        first = 0 if known is None else known.nbytes
        if offset <= first and end <= _LARGEST and not self._is_changing(start, start + end):
            self._known[start] = source.copy() if not offset or known is None else np.append(known[:offset], source)
        return 0, n

    def forget(self, start: int, end: int, but: int = -1) -> None:
        """Drop inputs that overlap bytes changed by other means, except the input at `but`."""
        for at in [at for at, known in self._known.items() if at < end and start < at + known.nbytes and at != but]:
            del self._known[at]

    def exclude(self, start: int, end: int) -> None:
        """Exclude bytes that a graph writes."""
        self.forget(start, end)
        if (start, end) not in self._changing:
            self._changing.append((start, end))

    def _is_changing(self, start: int, end: int) -> bool:
        return any(first < end and start < last for first, last in self._changing)

    def clear(self) -> None:
        """Drop all contents."""
        self._known.clear()
        self._changing.clear()
