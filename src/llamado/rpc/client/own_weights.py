"""Weights that our worker has in its own files: the worker maps them and no bytes are sent."""

from __future__ import annotations

import hashlib
import os
from collections.abc import MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from llamado.devices.device import Bytes, LoadProgress
from llamado.rpc import wire
from llamado.rpc.client.connection import WorkerConnection
from llamado.rpc.client.upload import Weight

_LEAST = 256 << 10
"""Smaller weights are sent: that costs less than a request."""
_AT_ONCE = 64 << 20
"""Bytes of weights per BIND; meanwhile the hashes of later weights are computed."""
_THREADS = 4
_MAPPED = 2
"""Response to OFFER: the worker maps the weight if it lies in its page as in the file."""


class OwnWeights:
    """Weights in the worker's own files for one device. `digests`: SHA-256 by name; computed ones are added."""

    def __init__(self, connection: WorkerConnection, digests: MutableMapping[str, int]) -> None:
        self._connection, self.digests = connection, digests
        self._offers: dict[str, int] = {}
        self._hashing: dict[str, Future[int]] = {}
        self._pool: ThreadPoolExecutor | None = None

    def announce(self, weights: Sequence[tuple[str, Bytes]]) -> None:
        """Offer weights to the worker. Both sides start to hash those it may have, in the background."""
        if not self._connection.has_own_files:
            return
        new = [(name, data) for name, data in weights if data.nbytes >= _LEAST and name not in self._offers]
        if not new:
            return
        offer = wire.Offer(tuple(wire.OfferedWeight(name.encode(), data.nbytes) for name, data in new))
        for (name, data), answer in zip(new, self._connection.fetch(offer).result().tolist(), strict=True):
            self._offers[name] = answer
            if answer and name not in self.digests:
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(max(1, min(_THREADS, os.cpu_count() or 1)), "llamado-hash")
                self._hashing[name] = self._pool.submit(_digest, data)

    def is_mapped(self, name: str) -> bool:
        """Return True if the worker maps a weight that lies in its page as in the file."""
        return self._offers.get(name) == _MAPPED

    def bind(self, weights: Sequence[Weight], progress: LoadProgress | None) -> list[Weight]:
        """Let the worker fill in the weights it has; all were passed to `announce`. Returns those that must be sent."""
        left: list[Weight] = []
        groups: list[list[Weight]] = [[]]
        for weight in weights:
            if not self._offers.pop(weight.name, 0):
                left.append(weight)
                continue
            if sum(one.data.nbytes for one in groups[-1]) >= _AT_ONCE:
                groups.append([])
            groups[-1].append(weight)
        answers = []
        for group in filter(None, groups):
            request = wire.Bind(tuple([self._bound(weight) for weight in group]))
            answers.append((group, self._connection.fetch(request)))
        for group, answer in answers:
            for weight, done in zip(group, answer.result().tolist(), strict=True):
                if not done:
                    left.append(weight)
                elif progress is not None:
                    progress(weight.data.nbytes)
        return left

    def _bound(self, weight: Weight) -> wire.BoundWeight:
        hashing = self._hashing.pop(weight.name, None)
        if hashing is not None:
            self.digests[weight.name] = hashing.result()
        digest = self.digests[weight.name].to_bytes(wire.SHA256_BYTES, "big")
        tensor = weight.tensor
        return wire.BoundWeight(tensor.buffer, tensor.data, weight.data.nbytes, digest, weight.name.encode())

    def close(self) -> None:
        """Cancel running hashes."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _digest(data: Bytes) -> int:
    return int.from_bytes(hashlib.sha256(data.data).digest(), "big")
