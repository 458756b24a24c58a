"""Load balancing: the least loaded replica gets a request, unless another one has cached much of its prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable

from llamado.gateway.options import GatewayOptions, ReplicaOptions
from llamado.gateway.prefixes import Chain, Prefixes
from llamado.gateway.replica import Replica
from llamado.http.errors import ApiError

REQUEST_BYTES = 2048
"""A running request weighs as much as this many prompt bytes to prefill: about 500 tokens."""


class Balancer:
    """The replicas of a gateway, and the choice among them."""

    def __init__(self, options: GatewayOptions) -> None:
        self._options = options
        self._prefixes = Prefixes()
        self._changed = asyncio.Event()
        self._leaving: set[asyncio.Task[None]] = set()
        self.replicas: dict[str, Replica] = {}
        self.prompt_bytes = self.known_bytes = 0
        """Bytes of all prompts sent, and those of them sent to a replica that had cached them."""
        for replica in options.replicas:
            self.add(replica)

    def add(self, options: ReplicaOptions) -> Replica:
        """Add a replica. Raises ApiError if the name is taken."""
        if options.name in self.replicas:
            raise ApiError("invalid_request_error", f"there is a replica {options.name!r} already", status=409)
        replica = self.replicas[options.name] = Replica(options, self._options, self.wake)
        replica.start()
        return replica

    def remove(self, replica: Replica) -> None:
        """Stop sending requests to a replica; close it after its running requests are complete."""
        del self.replicas[replica.name]
        replica.draining = True
        task = asyncio.ensure_future(self._close_when_idle(replica))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _close_when_idle(self, replica: Replica) -> None:
        await replica.wait_idle()
        await replica.close()

    async def close(self) -> None:
        """Close all replicas."""
        for task in self._leaving:
            task.cancel()
        await asyncio.gather(*(replica.close() for replica in self.replicas.values()))

    def find(self, name: str) -> Replica | None:
        """Return the replica with this name or URL."""
        by_url = (r for r in self.replicas.values() if r.options.url == name.rstrip("/"))
        return self.replicas.get(name) or next(by_url, None)

    @property
    def ready(self) -> bool:
        """True if a request would find a replica."""
        return any(self._usable(self.replicas.values(), ()))

    def choose(self, chain: Chain, model: str | None, without: Collection[Replica]) -> Replica | None:
        """Return the replica for a request; None if there is none at the moment.

        `chain`: hashes of its prompt's prefixes. `model`: the model it names. `without`: replicas that have failed it.
        """
        usable = self._usable(self.replicas.values(), without)
        serving = [replica for replica in usable if model in replica.model_names]
        candidates = serving or (usable if not self._is_known(model) else [])
        if not candidates:
            return None
        cached = self._prefixes.cached_bytes(chain)
        return min(
            candidates, key=lambda r: (REQUEST_BYTES * r.load - cached.get(r.number, 0), sum(r.statuses.values()))
        )

    def _usable(self, replicas: Iterable[Replica], without: Collection[Replica]) -> list[Replica]:
        up = [r for r in replicas if r.ready and not r.draining and r not in without]
        for group in ([r for r in up if not r.backup], [r for r in up if r.backup]):
            passing = [replica for replica in group if replica.breaker.allows_request]
            if passing:
                return passing
        return []

    def _is_known(self, model: str | None) -> bool:
        """Return True if any replica, ready or not, lists the model. llama-server accepts any name."""
        return any(model in replica.model_names for replica in self.replicas.values())

    def record(self, chain: Chain, replica: Replica) -> None:
        """Record that a prompt was sent to a replica."""
        if chain:
            self.prompt_bytes += chain[-1][1]
            self.known_bytes += self._prefixes.cached_bytes(chain).get(replica.number, 0)
            self._prefixes.add(chain, replica.number)

    def wake(self) -> None:
        """Wake the requests that wait for a replica, after one became available or left."""
        self._changed.set()

    async def wait_for_change(self) -> None:
        """Wait until a replica becomes available or leaves."""
        self._changed.clear()
        await self._changed.wait()
