"""Which replica gets a request: the least loaded, unless another one has much of its prompt in the cache."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable

from llamado.gateway.options import GatewayOptions, ReplicaOptions
from llamado.gateway.prefixes import Chain, Prefixes
from llamado.gateway.replica import Replica
from llamado.http.errors import ApiError

REQUEST_BYTES = 2048
"""One more request under way weighs as much as this many bytes of a prompt that have to be read: about 500 tokens."""


class Balancer:
    """All replicas of a gateway, and the choice among them."""

    def __init__(self, options: GatewayOptions) -> None:
        self._options = options
        self._prefixes = Prefixes()
        self._changed = asyncio.Event()
        self._leaving: set[asyncio.Task[None]] = set()
        self.replicas: dict[str, Replica] = {}
        self.prompt_bytes = self.known_bytes = 0
        """Of all prompts that were sent, and of them those that were known where they went."""
        for replica in options.replicas:
            self.add(replica)

    def add(self, options: ReplicaOptions) -> Replica:
        """A further replica. Raises ApiError where there is one of that name."""
        if options.name in self.replicas:
            raise ApiError("invalid_request_error", f"there is a replica {options.name!r} already", status=409)
        replica = self.replicas[options.name] = Replica(options, self._options, self.wake)
        replica.start()
        return replica

    def remove(self, replica: Replica) -> None:
        """No request goes to it any more; it is let go of when those under way are answered."""
        del self.replicas[replica.name]
        replica.draining = True
        task = asyncio.ensure_future(self._let_go(replica))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _let_go(self, replica: Replica) -> None:
        await replica.idle()
        await replica.close()

    async def close(self) -> None:
        """Let go of all."""
        for task in self._leaving:
            task.cancel()
        await asyncio.gather(*(replica.close() for replica in self.replicas.values()))

    def find(self, name: str) -> Replica | None:
        """A replica by its name or its URL."""
        by_url = (r for r in self.replicas.values() if r.options.url == name.rstrip("/"))
        return self.replicas.get(name) or next(by_url, None)

    @property
    def ready(self) -> bool:
        """Whether a request would find a replica."""
        return any(self._usable(self.replicas.values(), ()))

    def choose(self, chain: Chain, model: str | None, without: Collection[Replica]) -> Replica | None:
        """The replica for a request; None where there is none now.

        `chain`: the beginnings of its prompt, `model`: the model it names, `without`: those that failed it already.
        """
        usable = self._usable(self.replicas.values(), without)
        serving = [replica for replica in usable if model in replica.model_names]
        candidates = serving or (usable if not self._is_known(model) else [])
        if not candidates:
            return None
        known = self._prefixes.known(chain)
        return min(
            candidates, key=lambda r: (REQUEST_BYTES * r.load - known.get(r.number, 0), sum(r.statuses.values()))
        )

    def _usable(self, replicas: Iterable[Replica], without: Collection[Replica]) -> list[Replica]:
        up = [r for r in replicas if r.ready and not r.draining and r not in without]
        for group in ([r for r in up if not r.backup], [r for r in up if r.backup]):
            passing = [replica for replica in group if replica.breaker.lets_through]
            if passing:
                return passing
        return []

    def _is_known(self, model: str | None) -> bool:
        """Whether some replica, ready or not, says that it serves a model; llama-server answers for any name."""
        return any(model in replica.model_names for replica in self.replicas.values())

    def note(self, chain: Chain, replica: Replica) -> None:
        """A prompt was sent to a replica."""
        if chain:
            self.prompt_bytes += chain[-1][1]
            self.known_bytes += self._prefixes.known(chain).get(replica.number, 0)
            self._prefixes.note(chain, replica.number)

    def wake(self) -> None:
        """A replica has come or gone: whoever waits for one looks again."""
        self._changed.set()

    async def changed(self) -> None:
        """Wait until a replica has come or gone."""
        self._changed.clear()
        await self._changed.wait()
