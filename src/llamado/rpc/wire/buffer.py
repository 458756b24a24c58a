"""Received bytes on their way to becoming messages."""

from __future__ import annotations


class MessageBuffer:
    """Received bytes that were not consumed yet, and the count of bulk bytes before the next message."""

    def __init__(self) -> None:
        self._held = bytearray()
        self.bulk = 0
        """Bytes of the last message's data that were not received or consumed yet."""

    @property
    def held(self) -> int:
        """Bytes that were fed and not consumed yet."""
        return len(self._held)

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Add received bytes, cut anywhere."""
        self._held += data

    def take(self, target: memoryview) -> int:
        """Move bulk data that was fed already into `target`. Returns the number of bytes."""
        n = min(self.bulk, len(self._held), len(target))
        if n:
            target[:n] = memoryview(self._held)[:n]
            del self._held[:n]
            self.bulk -= n
        return n

    def drop(self) -> int:
        """Discard bulk data that was fed already. Returns the number of bytes."""
        n = min(self.bulk, len(self._held))
        del self._held[:n]
        self.bulk -= n
        return n

    def bypass(self, n: int) -> None:
        """Count `n` bytes of bulk data that were read straight from the transport. Only while none are `held`."""
        if self._held or n > self.bulk:
            raise ValueError(f"{n} bytes of {self.bulk} cannot have come, {len(self._held)} are held")
        self.bulk -= n
