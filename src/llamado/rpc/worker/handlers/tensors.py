"""Tensor data: write, read, copy and set the bytes of tensors."""

from __future__ import annotations

from llamado.rpc import wire
from llamado.rpc.worker.client import Client
from llamado.rpc.worker.decode import tensor_bytes
from llamado.rpc.worker.handlers.buffers import BufferHandlers
from llamado.rpc.worker.handlers.handler import Handlers, handles
from llamado.rpc.worker.handlers.weights import WeightHandlers
from llamado.rpc.worker.memory import Region

_ROWS_BYTES = 1 << 20
"""Bytes of rows of a tensor that are gathered before they are passed on."""


class TensorHandlers(Handlers):
    """Handlers of requests about the bytes of tensors."""

    def __init__(self, client: Client, buffers: BufferHandlers, weights: WeightHandlers) -> None:
        self._client, self._connection = client, client.connection
        self._buffers, self._weights = buffers, weights

    @handles(wire.SetTensor)
    def set(self, request: wire.SetTensor) -> None:
        size = request.size
        region, start = self._buffers.locate(request.tensor, request.offset, size)
        self._connection.receive(region, start, size)
        self._client.work.received += size
        if request.cache_flag:
            self._weights.cache(region, start, size)

    @handles(wire.GetTensor)
    def get(self, request: wire.GetTensor) -> None:
        size = request.size
        region, start = self._buffers.locate(request.tensor, request.offset, size)
        self._client.work.sent += size
        head = wire.write_response(wire.Command.GET_TENSOR, wire.TensorData(size))
        for piece in region.read(start, size):
            self._connection.send(head, piece)
            head = b""

    @handles(wire.SetTensor2D)
    def set_rows(self, request: wire.SetTensor2D) -> None:
        region, start = self._locate_rows(request)
        row, rows = request.row, max(1, _ROWS_BYTES // request.row)
        buffer = memoryview(bytearray(row * min(rows, request.rows)))
        for first in range(0, request.rows, rows):
            n = min(rows, request.rows - first)
            self._connection.fill(buffer[: n * row])
            region.write_pieces(start + first * request.stride, request.stride, buffer[: n * row], row)
        self._client.work.received += request.size

    @handles(wire.GetTensor2D)
    def get_rows(self, request: wire.GetTensor2D) -> None:
        region, start = self._locate_rows(request)
        row, rows = request.row, max(1, _ROWS_BYTES // request.row)
        self._client.work.sent += request.size
        head = wire.write_response(wire.Command.GET_TENSOR_2D, wire.TensorData(request.size))
        for first in range(0, request.rows, rows):
            n = min(rows, request.rows - first)
            self._connection.send(head, region.read_pieces(start + first * request.stride, request.stride, n, row))
            head = b""

    def _locate_rows(self, request: wire.SetTensor2D | wire.GetTensor2D) -> tuple[Region, int]:
        """Return the region of rows of a tensor and the start of the first one. Raises WireError."""
        span = (request.rows - 1) * request.stride + request.row
        size = tensor_bytes(request.tensor)
        if not request.size or request.offset + span > size:
            raise wire.WireError(
                f"{request.rows} times {request.row} bytes, {request.stride} apart from {request.offset} on, are not "
                f"inside tensor {request.tensor.label} of {size} bytes"
            )
        return self._buffers.locate(request.tensor, request.offset, span)

    @handles(wire.CopyTensor)
    def copy(self, request: wire.CopyTensor) -> wire.Number:
        size = tensor_bytes(request.src)
        source, start = self._buffers.locate(request.src, 0, size)
        target, offset = self._buffers.locate(request.dst, 0, size)
        target.copy(offset, source, start, size)
        return wire.Number(1)

    @handles(wire.InitTensor)
    def init(self, request: wire.InitTensor) -> None:
        """Check the tensor's place. Our devices have no padding behind a tensor that needs to be cleared."""
        self._buffers.locate(request.tensor, 0, tensor_bytes(request.tensor))

    @handles(wire.MemsetTensor)
    def memset(self, request: wire.MemsetTensor) -> None:
        size = tensor_bytes(request.tensor)
        if request.offset + request.size > size:
            raise wire.WireError(
                f"{request.size} bytes at {request.offset} of tensor {request.tensor.label} of {size} bytes"
            )
        region, start = self._buffers.locate(request.tensor, request.offset, request.size)
        region.fill(start, request.size, request.value)
