"""Bytes that arrived, on their way to becoming messages."""

from __future__ import annotations


class MessageBuffer:
    """Bytes that arrived and were not used yet, and how much bulk comes before the next message."""

    def __init__(self) -> None:
        self._held = bytearray()
        self.bulk = 0
        """Bytes of the last message's data that are still to come or to be taken."""

    @property
    def held(self) -> int:
        """Bytes that were fed and not used yet."""
        return len(self._held)

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Bytes as they arrived, cut anywhere."""
        self._held += data

    def take(self, target: memoryview) -> int:
        """Moves bulk that is here already into `target`; gives how many bytes."""
        n = min(self.bulk, len(self._held), len(target))
        if n:
            target[:n] = memoryview(self._held)[:n]
            del self._held[:n]
            self.bulk -= n
        return n

    def drop(self) -> int:
        """Throws away bulk that is here already; gives how many bytes."""
        n = min(self.bulk, len(self._held))
        del self._held[:n]
        self.bulk -= n
        return n

    def bypass(self, n: int) -> None:
        """`n` bytes of bulk were read around this reader, straight from the transport. Only when none are `held`."""
        if self._held or n > self.bulk:
            raise ValueError(f"{n} bytes of {self.bulk} cannot have come, {len(self._held)} are held")
        self.bulk -= n
