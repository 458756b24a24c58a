"""Forwarding one request to a replica, with failover to another one until a response has started.

The next replica is tried if the connection is refused or closed, if the replica is frozen, or if it is unavailable
(429, 502, 503, 504). A frozen replica does not respond to `/health` either; a live one may process a long prompt
without a limit. A request that was lost by SENDS replicas fails: it may be what crashes them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from llamado.gateway.balance import Balancer
from llamado.gateway.meter import Meter
from llamado.gateway.prefixes import Chain
from llamado.gateway.replica import Replica
from llamado.http.answer import Receive, Scope, Send
from llamado.http.errors import ApiError
from llamado.http.exchange import STREAM_CLAIM, Exchange
from llamado.http.resumable.proxy import StreamClaim
from llamado.http.resumable.requests import stopped_before_start
from llamado.http.upstream import UpstreamLost

log = logging.getLogger("llamado.gateway")

SENDS = 2
"""Most times a request is sent if its response is lost. Frozen replicas do not count."""
NOT_NOW = frozenset({429, 502, 503, 504})
_FAILED = frozenset({502, 504})
_LOOK = 0.25  # seconds between two looks: an open circuit becomes half open without an event
RETRY_AFTER = 2
REPLICA_HEADER = b"x-llamado-replica"


@dataclass(frozen=True)
class Forwarder:
    """Settings and counters shared by all forwarded requests of a gateway."""

    balancer: Balancer
    retries: Counter[str]
    """Retries by reason."""
    patience: float
    """Seconds to wait for an available replica."""
    forward_key: bool
    """Forward the clients' keys."""


class ForwardedRequest:
    """A response that forwards its request to a replica. Raises ApiError if no replica's response has started."""

    def __init__(self, forwarder: Forwarder, body: bytes, chain: Chain, model: str | None, meter: Meter | None) -> None:
        self._forwarder = forwarder
        self._balancer = forwarder.balancer
        self._body = body
        self._chain = chain
        self._model = model
        self._meter = meter
        self._tried: set[Replica] = set()
        self._claim: StreamClaim[Replica] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self._body, forward_key=self._forwarder.forward_key)
        self._claim = scope.get(STREAM_CLAIM)
        self._body = b""  # the exchange releases it when the response starts
        try:
            async with exchange:
                await self._run(exchange, scope["raw_path"], scope["query_string"])
        finally:
            if self._meter is not None:
                was_ended = exchange.disconnected or exchange.was_stopped
                await self._meter.settle(charged=exchange.started or (was_ended and exchange.sent))

    async def _run(self, exchange: Exchange, path: bytes, query: bytes) -> None:
        lost = 0
        end: float | None = None
        attempts: dict[str, str] = {}
        while not exchange.disconnected:
            if exchange.was_stopped:
                raise stopped_before_start()
            replica = self._choose()
            if replica is None:
                now = asyncio.get_running_loop().time()
                end = now + self._forwarder.patience if end is None else end
                if now >= end:
                    raise self._unavailable(attempts)
                await self._wait(exchange, end - now)
                self._tried.clear()
                continue
            self._tried.add(replica)
            reason = await self._try(exchange, replica, path, query)
            if reason is None:
                return
            attempts[replica.name] = reason
            self._forwarder.retries[reason] += 1
            if reason == "lost":
                lost += 1
                if lost == SENDS:
                    message = f"{SENDS} replicas were lost with this request; it is not sent again"
                    raise ApiError("server_error", message, status=502)

    def _choose(self) -> Replica | None:
        return self._balancer.choose(self._chain, self._model, self._tried)

    async def _wait(self, exchange: Exchange, seconds: float) -> None:
        """Wait until a replica becomes available, at most _LOOK seconds, or the client disconnects."""
        change = asyncio.wait_for(self._balancer.wait_for_change(), min(_LOOK, seconds))
        try:
            await exchange.unless_disconnected(change)
        except TimeoutError:
            pass

    async def _try(self, exchange: Exchange, replica: Replica, path: bytes, query: bytes) -> str | None:
        """Send the request to a replica and deliver the response. Return the reason if another one must be tried."""
        meter = self._meter
        self._balancer.record(self._chain, replica)
        if self._claim is not None:
            self._claim.move(replica)
        probe = replica.begin(exchange)
        extra_headers = [] if meter is None else meter.begin(replica)
        try:
            connection = await exchange.forward(replica.pool, path, query, key=replica.key, extra_headers=extra_headers)
            status = connection.status
            self._judge(replica, probe, status)
            if status in NOT_NOW and self._choose() is not None:
                replica.check_now()
                return "failed" if status in _FAILED else "busy"
            replica.response_started(exchange)
            name = (REPLICA_HEADER, replica.name.encode("ascii", "replace"))
            if meter is None:
                await exchange.deliver(connection, [name])
            else:
                meter.refused = status >= 400
                await exchange.deliver(connection, [name], meter.observe, meter.settle)
            return None
        except UpstreamLost as error:
            return await self._lost(exchange, replica, probe, error)
        except BaseException:
            replica.breaker.release_probe(probe)
            raise
        finally:
            replica.end(exchange)
            exchange.drop()

    def _judge(self, replica: Replica, probe: bool, status: int) -> None:
        replica.statuses[status] += 1
        if status in _FAILED:
            replica.breaker.record_failure(probe)
        elif status in NOT_NOW:
            replica.breaker.release_probe(probe)
        else:
            replica.breaker.record_success(probe)

    async def _lost(self, exchange: Exchange, replica: Replica, probe: bool, error: UpstreamLost) -> str | None:
        if exchange.disconnected or exchange.was_stopped:
            replica.breaker.release_probe(probe)
            if exchange.was_stopped and not exchange.started:
                raise stopped_before_start()
            return None
        replica.breaker.record_failure(probe)
        replica.check_now()
        if exchange.started:
            replica.losses["begun"] += 1
            await exchange.fail(error, f"replica {replica.name}")
            return None
        reason = "frozen" if exchange.was_aborted else "lost" if exchange.sent else "refused"
        replica.losses[reason] += 1
        log.warning("replica %s: request not answered: %s; trying another replica", replica.name, error)
        return reason

    def _unavailable(self, attempts: Mapping[str, str]) -> ApiError:
        """Return the error for a request that no replica accepted. `attempts`: the result of each attempt."""
        reasons = [
            f"{r.name}: {'draining' if r.draining else attempts.get(r.name) or r.state.message}"
            for r in self._balancer.replicas.values()
        ]
        message = "no replica takes the request: " + ("; ".join(reasons) or "there is none")
        return ApiError("unavailable_error", message, retry_after=RETRY_AFTER)
