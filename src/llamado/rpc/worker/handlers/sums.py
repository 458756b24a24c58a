"""Sums of a tensor over two workers (llama.cpp's `-sm tensor`)."""

from __future__ import annotations

import math

import numpy as np

from llamado.gguf.types import TensorType
from llamado.rpc import wire
from llamado.rpc.worker.client import Client
from llamado.rpc.worker.comm import Comm, connect_ranks
from llamado.rpc.worker.decode import tensor_bytes
from llamado.rpc.worker.handlers.buffers import BufferHandlers
from llamado.rpc.worker.handlers.handler import Handlers, handles


class SumHandlers(Handlers):
    """Handlers of COMM_INIT to COMM_FREE."""

    def __init__(self, client: Client, buffers: BufferHandlers) -> None:
        self._client, self._buffers = client, buffers
        self._comms: dict[int, Comm] = {}

    @handles(wire.CommInit)
    def init(self, request: wire.CommInit) -> wire.Number:
        client, worker = self._client, self._client.worker
        client.device(request.device)
        if request.device not in self._comms:
            here = client.connection.local_address
            comm = connect_ranks(
                request, here, client.identity, worker.dialer, worker.may_connect, lambda: client.is_ending
            )
            if comm is not None:
                self._comms[request.device] = comm
                if client.is_ending:  # `interrupt` may have missed this one
                    comm.shut()
        return wire.Number(int(request.device in self._comms))

    @handles(wire.CommAllReduce)
    def add(self, request: wire.CommAllReduce) -> None:
        """Add the other worker's values. Requests run in order, so the tensor is computed by now."""
        comm = self._comms.get(request.device)
        if comm is None:
            raise wire.WireError(f"COMM_ALLREDUCE of device {request.device} without COMM_INIT")
        tensor = request.tensor
        size = tensor_bytes(tensor)
        if tensor.type != TensorType.F32 or size != 4 * math.prod(tensor.ne):
            raise wire.WireError(f"COMM_ALLREDUCE of {tensor.label}: only F32 without gaps is added up")
        region, start = self._buffers.locate(tensor, 0, size)
        if size:
            own = np.frombuffer(b"".join(region.read(start, size)), np.float32)
            region.write(start, comm.add(own).data.cast("B"))

    @handles(wire.CommFree)
    def free(self, request: wire.CommFree) -> None:
        comm = self._comms.pop(request.device, None)
        if comm is not None:
            comm.shut()
            comm.close()

    def interrupt(self) -> None:
        for comm in [*self._comms.values()]:
            comm.shut()

    def release(self) -> None:
        while self._comms:
            self._comms.popitem()[1].close()
