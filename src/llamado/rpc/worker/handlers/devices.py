"""Properties of the worker's devices."""

from __future__ import annotations

from llamado.rpc import wire
from llamado.rpc.worker.client import Client
from llamado.rpc.worker.decode import tensor_bytes
from llamado.rpc.worker.handlers.handler import Handlers, handles

ALIGNMENT = 64
"""A cache line; ggml's CPU asks for 32."""
MAX_SIZE = (1 << 64) - 1
"""No limit, as on ggml's CPU (SIZE_MAX)."""


class DeviceHandlers(Handlers):
    """Handlers of requests about devices."""

    def __init__(self, client: Client) -> None:
        self._client = client

    @handles(wire.DeviceCount)
    def count(self, _: wire.DeviceCount) -> wire.Number:
        return wire.Number(len(self._client.worker.devices))

    @handles(wire.GetAlignment)
    def alignment(self, request: wire.GetAlignment) -> wire.Number:
        self._client.device(request.device)
        return wire.Number(ALIGNMENT)

    @handles(wire.GetMaxSize)
    def max_size(self, request: wire.GetMaxSize) -> wire.Number:
        self._client.device(request.device)
        return wire.Number(MAX_SIZE)

    @handles(wire.GetDeviceMemory)
    def memory(self, request: wire.GetDeviceMemory) -> wire.DeviceMemory:
        return wire.DeviceMemory(*self._client.device(request.device).memory())

    @handles(wire.GetAllocSize)
    def alloc_size(self, request: wire.GetAllocSize) -> wire.Number:
        self._client.device(request.device)
        return wire.Number(tensor_bytes(request.tensor))

    @handles(wire.GetNumerics)
    def numerics(self, request: wire.GetNumerics) -> wire.Numerics:
        words = (self._client.device(request.device).device.numerics or "").encode()
        return wire.Numerics(words if len(words) <= wire.NUMERICS_BYTES else b"")
