"""One request on its way to a model's process and back: a lost answer is asked for again.

A process that crashed (`child.CRASHES`) was probably ended by one of the requests it worked on, and nothing tells by
which: none of them is sent to another process, or one request could end them all. After any other loss (the process
was killed or ended by itself, or closed the connection) the request is sent once more. Requests that were not sent yet
are not concerned.
"""

from __future__ import annotations

import asyncio
import logging
import signal

from llamado.http.answer import Receive, Scope, Send
from llamado.http.errors import ApiError
from llamado.http.exchange import Exchange
from llamado.http.upstream import UpstreamLost
from llamado.router.child import CRASHES, Child
from llamado.router.fleet import Fleet, Instance, Lease

log = logging.getLogger("llamado.router")

TRIES = 4
"""How often a process is looked for that takes the request."""
SENDS = 2
"""How often a request is sent whose answer was lost."""


class Passage:
    """Carries one request to a model and its answer back."""

    def __init__(self, fleet: Fleet, scope: Scope, receive: Receive, send: Send, body: bytes, *, keys: bool) -> None:
        self._fleet = fleet
        self._exchange = Exchange(scope, receive, send, body, keys=keys)

    async def run(self, instance: Instance, path: bytes, query: bytes, *, count: bool, autoload: bool) -> None:
        """Answer the request. Raises ApiError while nothing of the answer is sent."""
        async with self._exchange as exchange:
            try:
                await self._run(exchange, instance, path, query, count, autoload)
            except UpstreamLost as error:
                if not exchange.disconnected:
                    await exchange.fail(error, "the model's process")

    async def _run(
        self, exchange: Exchange, instance: Instance, path: bytes, query: bytes, count: bool, autoload: bool
    ) -> None:
        name = instance.model.name
        asked: Child | None = None
        lost = 0
        for _ in range(TRIES):
            lease = await self._lease(instance, count, autoload)
            if lease is None:
                return
            exchange.sent = False
            try:
                if asked is not lease.child:
                    self._stop_at_a_crash(name, asked)
                connection = await exchange.forward(lease.child.pool, path, query, ended=lease.child.exit.done)
                await exchange.deliver(connection)
                return
            except UpstreamLost as error:
                if exchange.disconnected or exchange.started:
                    raise
                reason = str(error)
            finally:
                lease.release()
            await self._settle(lease)
            if exchange.sent:
                lost += 1
                asked = lease.child
                self._stop_at_a_crash(name, asked)
                if lost == SENDS:
                    message = f"model '{name}' gave no answer: its connection was closed {SENDS} times"
                    raise ApiError("server_error", message, status=502)
            log.warning("model %s: request not answered: %s; sending it again", name, reason)
        raise ApiError("server_error", f"model '{name}' took no request in {TRIES} tries: {reason}", status=502)

    async def _lease(self, instance: Instance, count: bool, autoload: bool) -> Lease | None:
        """None when the client went away while it waited."""
        if self._exchange.disconnected:
            return None
        if not autoload and not instance.running:
            raise ApiError("invalid_request_error", "model is not loaded")
        return await self._exchange.unless_disconnected(self._fleet.acquire(instance, count=count))

    async def _settle(self, lease: Lease) -> None:
        """After a lost answer: wait a moment for the process's end, which is probably why."""
        await asyncio.wait([lease.child.exit], timeout=0.5)

    def _stop_at_a_crash(self, name: str, asked: Child | None) -> None:
        """Raises ApiError where the process that had the request has crashed."""
        code = None if asked is None else asked.exit_code
        if code is not None and code in CRASHES:
            message = (
                f"the process of model '{name}' crashed ({signal.Signals(code - 128).name}) while it worked on this "
                "request; the request is not sent again, because it may be what ended it"
            )
            raise ApiError("server_error", message, status=502)
