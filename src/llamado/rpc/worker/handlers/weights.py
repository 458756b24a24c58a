"""Weights from this machine's disk: the tensor cache, and the model files the worker has itself."""

from __future__ import annotations

import logging

from llamado.gguf.types import TensorType
from llamado.rpc import wire
from llamado.rpc.worker.client import Client
from llamado.rpc.worker.decode import tensor_bytes
from llamado.rpc.worker.handlers.buffers import BufferHandlers
from llamado.rpc.worker.handlers.handler import Handlers, handles
from llamado.rpc.worker.memory import Region
from llamado.rpc.worker.weights.own_files import PlacedWeight
from llamado.rpc.worker.weights.tensor_cache import HashedBytes

log = logging.getLogger("llamado.rpc.worker.server")

_LOOKUPS_AT_ONCE = 4
"""Cache entries that are checked at a time."""
_MAX_MISSES = 1 << 14
"""Hashes remembered until their weights are uploaded."""


class WeightHandlers(Handlers):
    """Handlers of requests that save the upload of weights."""

    def __init__(self, client: Client, buffers: BufferHandlers) -> None:
        self._client, self._buffers = client, buffers
        self._misses: dict[tuple[int, int], int] = {}  # hashes that were not in the cache, by buffer and offset

    def cache(self, region: Region, start: int, size: int) -> None:
        """Keep uploaded bytes in the cache of weights, if there is one."""
        cache = self._client.worker.cache
        if cache is not None and region.memory is not None:
            cache.keep(self._client.identity, region, start, size, self._misses.pop((region.ptr, start), None))

    @handles(wire.SetTensorHash)
    def set_by_hash(self, request: wire.SetTensorHash) -> None:
        """Look up several requests in a row together, so that their entries are checked in parallel."""
        connection = self._client.connection
        requests = [request]
        while len(requests) < _LOOKUPS_AT_ONCE and (following := connection.following(wire.SetTensorHash)) is not None:
            requests.append(following)
        wanted = []
        for one in requests:
            size = tensor_bytes(one.tensor)
            if one.offset > size:
                raise wire.WireError(f"byte {one.offset} of tensor {one.tensor.label} of {size}")
            region, start = self._buffers.locate(one.tensor, one.offset, size - one.offset)
            wanted.append(HashedBytes(one.hash, region, start, size - one.offset))
        cache = self._client.worker.cache
        found = [False] * len(wanted) if cache is None else cache.load(self._client.identity, wanted)
        for want, hit in zip(wanted, found, strict=True):
            if not hit and cache is not None and len(self._misses) < _MAX_MISSES:
                self._misses[want.region.ptr, want.offset] = want.hash
        answers = [wire.write_response(wire.Command.SET_TENSOR_HASH, wire.Number(int(hit))) for hit in found]
        connection.sock.sendall(b"".join(answers))

    @handles(wire.Offer)
    def offer(self, request: wire.Offer) -> None:
        files, found = self._client.worker.files, bytes(request.size)
        if files is not None:
            # 2: the weight can be mapped if it lies in its page as in the file. 1: it is copied.
            mapped = all(shared.device.local for shared in self._client.worker.devices)
            found = bytes(has * (2 if mapped else 1) for has in files.offer(request.weights))
        self._answer(wire.Command.OFFER, found)

    @handles(wire.Bind)
    def bind(self, request: wire.Bind) -> None:
        client = self._client
        files, done = client.worker.files, [False] * request.size
        if files is not None:
            placed = []
            for want in request.weights:
                place = raw_tensor(want.buffer, want.data, want.size, want.name)
                region, start = self._buffers.locate(place, 0, want.size)
                placed.append(PlacedWeight(region, start, want.size, want.sha256, want.name))
            done = files.bind(placed, lambda: client.is_ending)
            n = sum(want.size for want, there in zip(request.weights, done, strict=True) if there)
            if n:
                log.info("%s: read %d weights (%.1f MB) from this machine's own disk", client.name, sum(done), n / 1e6)
        self._answer(wire.Command.BIND, bytes(done))

    def _answer(self, command: wire.Command, found: bytes) -> None:
        self._client.connection.send(wire.write_response(command, wire.TensorData(len(found))), memoryview(found))


def raw_tensor(buffer: int, data: int, size: int, name: bytes) -> wire.WireTensor:
    """Return `size` bytes of a buffer as a tensor."""
    return wire.WireTensor(1, int(TensorType.I8), buffer, (size, 1, 1, 1), (1, size, size, size), data, name=name)
