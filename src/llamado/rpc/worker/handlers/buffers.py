"""Buffers of one client: allocate and free them, and find the bytes of a tensor in them."""

from __future__ import annotations

import logging
from collections.abc import Callable

from llamado.rpc import wire
from llamado.rpc.worker.client import Client
from llamado.rpc.worker.handlers.handler import Handlers, handles
from llamado.rpc.worker.memory import Region

log = logging.getLogger("llamado.rpc.worker.server")

MAX_BUFFERS = 4096
"""Buffers of one client; Linux maps some 65,000 for a process."""


class BufferHandlers(Handlers):
    """Handlers of requests about buffers. `on_free` is called with the `ptr` of each buffer before it is freed."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.regions: dict[int, Region] = {}
        self.on_free: Callable[[int], None] = lambda ptr: None

    @property
    def held_bytes(self) -> int:
        """Bytes of all buffers; from any thread."""
        return sum(region.size for region in [*self.regions.values()])

    def locate(self, tensor: wire.WireTensor, offset: int, size: int) -> tuple[Region, int]:
        """Return the region of `size` bytes at `offset` of a tensor, and their start in it. Raises WireError."""
        region = self.regions.get(tensor.buffer)
        if region is None:
            region = self._region(tensor.buffer)
        start = tensor.data - region.base + offset
        if start < 0 or start + size > region.size:
            raise wire.WireError(
                f"{size} bytes at {offset} of tensor {tensor.label} lie outside its buffer of {region.size} bytes"
            )
        return region, start

    def _region(self, ptr: int) -> Region:
        region = self.regions.get(ptr)
        if region is None:
            raise wire.WireError(f"buffer {ptr:#x} is not one of this connection's")
        return region

    @handles(wire.AllocBuffer)
    def alloc(self, request: wire.AllocBuffer) -> wire.AllocResponse:
        client = self._client
        device = client.device(request.device)
        region = device.allocate(request.size) if len(self.regions) < MAX_BUFFERS else None
        if region is None:
            free = device.memory()[0]
            # The first words are those of a server's log, which operators search for.
            log.warning(
                "tensor allocation failed: %s: no room for %.1f MB (%.1f MB are free)",
                client.name, request.size / 1e6, free / 1e6,
            )  # fmt: skip
            return wire.AllocResponse(0, 0)
        if not self.regions and not client.work.graphs:
            log.info("%s: connected (RPC %d.%d.%d)", client.name, *client.connection.protocol.version)
        self.regions[region.ptr] = region
        return wire.AllocResponse(region.ptr, region.size)

    @handles(wire.BufferGetBase)
    def base(self, request: wire.BufferGetBase) -> wire.Number:
        return wire.Number(self._region(request.ptr).base)

    @handles(wire.FreeBuffer)
    def free(self, request: wire.FreeBuffer) -> None:
        region = self._region(request.ptr)
        self.on_free(request.ptr)
        del self.regions[request.ptr]
        region.free()

    @handles(wire.BufferClear)
    def clear(self, request: wire.BufferClear) -> None:
        region = self._region(request.ptr)
        region.fill(0, region.size, request.value)

    def release(self) -> None:
        while self.regions:
            self.regions.popitem()[1].free()
