"""Graphs: compute them when it is the client's turn on the device."""

from __future__ import annotations

import logging
import math
import struct
import time

from llamado.devices.device import Device, DeviceError, KernelQuota, NoKernelsLeft
from llamado.errors import LlamadoError
from llamado.rpc import wire
from llamado.rpc.worker.client import Client
from llamado.rpc.worker.decode import DecodedGraph
from llamado.rpc.worker.graph_cache import GraphCache
from llamado.rpc.worker.handlers.buffers import BufferHandlers
from llamado.rpc.worker.handlers.handler import Handlers, handles
from llamado.rpc.worker.memory import SharedDevice

log = logging.getLogger("llamado.rpc.worker.server")

KERNELS_PER_TURN = 16
"""Kernels compiled before other clients get their turn: at most about a second's work."""
_LOG_INTERVAL = 5.0
"""Least seconds between two lines about a client's memory, which it allocates in many pieces."""
_BUDGET_POLL_SECONDS = 0.1


class WorkerStopping(LlamadoError):
    """The worker is about to end."""


class GraphHandlers(Handlers):
    """Handlers of graphs."""

    def __init__(self, client: Client, buffers: BufferHandlers) -> None:
        self._client, self._buffers = client, buffers
        self._cache = GraphCache(client.connection, buffers.regions, self._forget)
        buffers.on_free = self._cache.free
        self._logged_bytes, self._logged_at = 0, -math.inf

    @handles(wire.GraphCompute)
    def compute(self, request: wire.GraphCompute) -> None:
        device = self._client.device(request.device)
        self._run(device, self._cache.add(request))

    @handles(wire.GraphRecompute)
    def recompute(self, request: wire.GraphRecompute) -> None:
        device = self._client.device(request.device)
        self._run(device, self._cache.get(request))

    def release(self) -> None:
        self._cache.clear()

    def _forget(self, graph: DecodedGraph) -> None:
        """Release the device's working memory of a graph that the client cannot run again."""
        self._client.worker.devices[graph.request.device].drop_graphs([graph.graph])

    def _run(self, shared: SharedDevice, graph: DecodedGraph) -> None:
        """Compute a graph in the client's turn. A graph with many kernels takes several turns to compile."""
        if graph.empty:
            return
        client, worker = self._client, self._client.worker
        n_compiled = 0
        done = False
        while not done and not client.is_gone:
            with shared.turn(client):
                if worker.is_stopping:
                    raise WorkerStopping("the worker is about to end")
                if client.is_gone:
                    break
                n = self._prepare(shared.device, graph, worker.kernels.most - n_compiled)
                if n is None:
                    began = time.monotonic()
                    shared.device.submit(graph.graph)
                    client.computed_s = time.monotonic() - began
                    done = True
                else:
                    n_compiled += n
            if not done:
                self._wait_for_budget()
        if client.is_gone:
            raise ConnectionAbortedError("gone while its graph was computed")
        self._log_memory()
        client.work.graphs += 1
        client.work.tokens += graph.n_tokens

    def _prepare(self, device: Device, graph: DecodedGraph, most: int) -> int | None:
        """Compile a graph as far as one turn goes. Returns None if it is ready, else the number of new kernels.

        `most`: kernels that may still be compiled for this graph. Raises NoKernelsLeft if it needs more.
        """
        client, kernels = self._client, self._client.worker.kernels
        allowance = min(KERNELS_PER_TURN, most, kernels.left(client.identity))
        quota = KernelQuota(allowance)
        try:
            device.prepare(graph.graph, quota)
        except NoKernelsLeft:
            if most > allowance:
                return allowance
            raise
        except (ArithmeticError, ValueError, LookupError, TypeError, AssertionError, struct.error) as error:
            log.debug("%s", error, exc_info=True)
            raise DeviceError(f"the graph has parameters that make no sense: {error!r}") from error
        finally:
            kernels.spend(client.identity, allowance - quota.left)
        return None

    def _wait_for_budget(self) -> None:
        """Wait until the client's budget of kernels is worth another turn."""
        client, kernels = self._client, self._client.worker.kernels
        enough = min(KERNELS_PER_TURN, kernels.most)
        while kernels.left(client.identity) < enough and not (client.is_gone or client.worker.is_stopping):
            time.sleep(_BUDGET_POLL_SECONDS)

    def _log_memory(self) -> None:
        now = time.monotonic()
        if self._logged_at < now - _LOG_INTERVAL and self._logged_bytes != (held := self._buffers.held_bytes):
            self._logged_bytes, self._logged_at = held, now
            log.info("%s: holds %.1f MB", self._client.name, held / 1e6)
