"""Upload of weights: by hash if the worker may have them cached, else straight from the mapped file."""

from __future__ import annotations

from collections import deque
from collections.abc import MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from llamado.devices.device import Bytes, LoadProgress
from llamado.rpc import wire
from llamado.rpc.client.connection import WorkerConnection
from llamado.rpc.hashing import LANES, fnv1a_many

HASH_THRESHOLD = 10 << 20
"""Bytes above which a ggml worker is pending for a weight by hash before the weight is sent, as ggml's client does."""
OWN_HASH_THRESHOLD = 256 << 10
"""The same for our workers: all matrices of a model, not only the largest ones."""


class Weight(NamedTuple):
    """A placed tensor and its bytes. `name` is the key of its hash."""

    name: str
    tensor: wire.WireTensor
    data: Bytes


def send_weights(
    connection: WorkerConnection,
    weights: Sequence[Weight],
    progress: LoadProgress | None,
    hashes: MutableMapping[str, int],
    threshold: int,
) -> None:
    """Upload weights and return when the worker has them all. Those above `threshold` bytes are tried by hash first.

    `hashes` has known hashes by name; the missing ones are computed during the upload and added.
    """
    large = [w for w in weights if w.data.nbytes > threshold]
    known = [w for w in large if w.name in hashes]
    unknown = [w for w in large if w.name not in hashes]
    pending: deque[tuple[Weight, Future[wire.Response]]] = deque()

    def try_hashes(group: Sequence[Weight]) -> None:
        with connection.batch():
            for weight in group:
                request = wire.SetTensorHash(weight.tensor, 0, hashes[weight.name])
                pending.append((weight, connection.start_call(request)))

    with ThreadPoolExecutor(1, "hash") as pool:
        groups = [unknown[i : i + LANES] for i in range(0, len(unknown), LANES)]
        hashing = deque((group, pool.submit(fnv1a_many, [w.data for w in group])) for group in groups)
        try:
            try_hashes(known)
            for weight in weights:
                if weight.data.nbytes <= threshold:
                    _send(connection, weight, 0, progress)
            while pending or hashing:
                # The hashes are sent before the data of earlier weights, so that their responses arrive in time.
                while hashing and (not pending or hashing[0][1].done()):
                    group, future = hashing.popleft()
                    for weight, value in zip(group, future.result(), strict=True):
                        hashes[weight.name] = value
                    try_hashes(group)
                weight, answer = pending.popleft()
                response = answer.result()
                assert isinstance(response, wire.Number)
                if not response.value:
                    _send(connection, weight, 1, progress)
                elif progress is not None:
                    progress(weight.data.nbytes)
        finally:
            for _, future in hashing:
                future.cancel()
    connection.call(wire.DeviceCount(), wire.Number)  # responds once all earlier requests are done


def _send(connection: WorkerConnection, weight: Weight, cache_flag: int, progress: LoadProgress | None) -> None:
    head = wire.write_request(wire.SetTensor(weight.tensor, cache_flag, 0, weight.data.nbytes))
    connection.send_bulk(head, weight.data, progress)
