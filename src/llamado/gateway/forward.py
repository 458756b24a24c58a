"""One request on its way to a replica and back: sent to another one as long as nothing of an answer has been passed on.

What makes the next replica the one to ask: nobody listens, the connection is closed, the replica is frozen (it says
nothing, on `/health` neither; a long prompt on a replica that lives is waited for without a limit), or it answers that
it cannot now (429, 502, 503, 504). A request that was lost in the work of SENDS replicas is given up: it may be what
ends them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping

from llamado.gateway.balance import Balancer
from llamado.gateway.meter import Meter
from llamado.gateway.prefixes import Chain
from llamado.gateway.replica import Replica
from llamado.http.answer import Scope
from llamado.http.errors import ApiError
from llamado.http.exchange import Exchange
from llamado.http.upstream import UpstreamLost

log = logging.getLogger("llamado.gateway")

SENDS = 2
"""How often a request is sent whose answer was lost, the replica being alive or gone; frozen ones do not count."""
NOT_NOW = frozenset({429, 502, 503, 504})
_FAILED = frozenset({502, 504})
_LOOK = 0.25  # seconds; a circuit half opens by itself
RETRY_AFTER = 2
REPLICA_HEADER = b"x-llamado-replica"


class Forwarding:
    """Carries one request to a replica and its answer back. `retries`: counts why requests were sent again."""

    def __init__(
        self, balancer: Balancer, scope: Scope, exchange: Exchange, retries: Counter[str], *, patience: float
    ) -> None:
        self._balancer = balancer
        self._exchange = exchange
        self._path: bytes = scope["raw_path"]
        self._query: bytes = scope["query_string"]
        self._retries = retries
        self._patience = patience
        self._tried: set[Replica] = set()

    async def run(self, chain: Chain, model: str | None, meter: Meter | None) -> None:
        """Answer the request. Raises ApiError while nothing of the answer is sent."""
        lost = 0
        end: float | None = None
        asked: dict[str, str] = {}
        while not self._exchange.disconnected:
            replica = self._balancer.choose(chain, model, self._tried)
            if replica is None:
                now = asyncio.get_running_loop().time()
                end = now + self._patience if end is None else end
                if now >= end:
                    raise self._unavailable(asked)
                await self._wait(end - now)
                self._tried.clear()
                continue
            self._tried.add(replica)
            reason = await self._try(replica, chain, model, meter)
            if reason is None:
                return
            asked[replica.name] = reason
            self._retries[reason] += 1
            if reason == "lost":
                lost += 1
                if lost == SENDS:
                    message = f"{SENDS} replicas were lost with this request; it is not sent again"
                    raise ApiError("server_error", message, status=502)

    async def _wait(self, seconds: float) -> None:
        """Until a replica comes, for a moment at most; or the client goes away."""
        try:
            await self._exchange.unless_disconnected(asyncio.wait_for(self._balancer.changed(), min(_LOOK, seconds)))
        except TimeoutError:
            pass

    async def _try(self, replica: Replica, chain: Chain, model: str | None, meter: Meter | None) -> str | None:
        """Ask a replica and pass its answer on; else the reason why another one is to be asked."""
        exchange = self._exchange
        self._balancer.note(chain, replica)
        probe = replica.begin(exchange)
        more = [] if meter is None else meter.begin(replica)
        try:
            connection = await exchange.forward(replica.pool, self._path, self._query, key=replica.key, more=more)
            status = connection.status
            self._judge(replica, probe, status)
            if status in NOT_NOW and self._balancer.choose(chain, model, self._tried) is not None:
                replica.suspect()
                return "failed" if status in _FAILED else "busy"
            replica.answering(exchange)
            name = (REPLICA_HEADER, replica.name.encode("ascii", "replace"))
            if meter is None:
                await exchange.deliver(connection, [name])
            else:
                meter.refused = status >= 400
                await exchange.deliver(connection, [name], meter.see, meter.settle)
            return None
        except UpstreamLost as error:
            return await self._lost(replica, probe, error)
        except BaseException:
            replica.breaker.forgotten(probe)
            raise
        finally:
            replica.end(exchange)
            exchange.drop()

    def _judge(self, replica: Replica, probe: bool, status: int) -> None:
        replica.statuses[status] += 1
        if status in _FAILED:
            replica.breaker.failed(probe)
        elif status in NOT_NOW:
            replica.breaker.forgotten(probe)
        else:
            replica.breaker.succeeded(probe)

    async def _lost(self, replica: Replica, probe: bool, error: UpstreamLost) -> str | None:
        exchange = self._exchange
        if exchange.disconnected:
            replica.breaker.forgotten(probe)
            return None
        replica.breaker.failed(probe)
        replica.suspect()
        if exchange.started:
            replica.losses["begun"] += 1
            await exchange.fail(error, f"replica {replica.name}")
            return None
        reason = "frozen" if exchange.was_aborted else "lost" if exchange.sent else "refused"
        replica.losses[reason] += 1
        log.warning("replica %s: request not answered: %s; trying another replica", replica.name, error)
        return reason

    def _unavailable(self, asked: Mapping[str, str]) -> ApiError:
        """The error where no replica took the request; `asked`: those that were, and what became of it."""
        told = [
            f"{r.name}: {'draining' if r.draining else asked.get(r.name) or r.state.message}"
            for r in self._balancer.replicas.values()
        ]
        message = "no replica takes the request: " + ("; ".join(told) or "there is none")
        return ApiError("unavailable_error", message, retry_after=RETRY_AFTER)
