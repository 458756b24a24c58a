"""Proxying one request to a model's process, with one retry if the response is lost.

If a process crashed (`child.CRASHES`), one of its requests probably crashed it, and there is no way to find out which.
None of them is retried, or one request could crash every process. After any other loss (the process was killed, exited,
or closed the connection) a request is sent once more. Requests that had not been sent yet are always retried.
"""

from __future__ import annotations

import asyncio
import logging
import signal

from llamado.http.answer import Receive, Scope, Send
from llamado.http.errors import ApiError
from llamado.http.exchange import Exchange
from llamado.http.resumable.requests import stopped_before_start
from llamado.http.upstream import UpstreamLost
from llamado.router.child import CRASHES, Child
from llamado.router.fleet import Fleet, Instance, Lease

log = logging.getLogger("llamado.router")

TRIES = 4
"""Most attempts to find a process that accepts the request."""
SENDS = 2
"""Most times a request is sent if its response is lost."""


class ProxiedRequest:
    """A response that proxies its request to a model. Raises ApiError if the model's response has not started.

    `forward_key`: forward the client's key. `count`: the request counts as use of the model. `autoload`: load the model
    if necessary.
    """

    def __init__(
        self,
        fleet: Fleet,
        instance: Instance,
        body: bytes,
        *,
        forward_key: bool,
        count: bool = True,
        autoload: bool = True,
    ) -> None:
        self._fleet = fleet
        self._instance = instance
        self._body = body
        self._forward_key = forward_key
        self._count = count
        self._autoload = autoload

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self._body, forward_key=self._forward_key)
        self._body = b""  # the exchange releases it when the response starts
        async with exchange:
            try:
                await self._run(exchange, scope["raw_path"], scope["query_string"])
            except UpstreamLost as error:
                if not exchange.disconnected:
                    await exchange.fail(error, "the model's process")

    async def _run(self, exchange: Exchange, path: bytes, query: bytes) -> None:
        name = self._instance.model.name
        last_child: Child | None = None
        lost = 0
        for _ in range(TRIES):
            lease = await self._lease(exchange)
            if exchange.was_stopped:
                raise stopped_before_start()
            if lease is None:
                return
            try:
                if last_child is not lease.child:
                    self._raise_if_crashed(name, last_child)
                connection = await exchange.forward(lease.child.pool, path, query, ended=lease.child.exit.done)
                await exchange.deliver(connection)
                return
            except UpstreamLost as error:
                if exchange.disconnected or exchange.started:
                    raise
                if exchange.was_stopped:
                    raise stopped_before_start() from None
                reason = str(error)
            finally:
                lease.release()
            await self._wait_for_exit(lease)
            if exchange.sent:
                lost += 1
                last_child = lease.child
                self._raise_if_crashed(name, last_child)
                if lost == SENDS:
                    message = f"model '{name}' gave no answer: its connection was closed {SENDS} times"
                    raise ApiError("server_error", message, status=502)
            log.warning("model %s: request not answered: %s; sending it again", name, reason)
        raise ApiError("server_error", f"model '{name}' took no request in {TRIES} tries: {reason}", status=502)

    async def _lease(self, exchange: Exchange) -> Lease | None:
        """Return a lease; None if the client disconnected, or the request was stopped, while waiting."""
        if exchange.disconnected or exchange.was_stopped:
            return None
        if not self._autoload and not self._instance.running:
            raise ApiError("invalid_request_error", "model is not loaded")
        return await exchange.unless_disconnected(self._fleet.acquire(self._instance, count=self._count))

    async def _wait_for_exit(self, lease: Lease) -> None:
        """Wait briefly for the process's exit, the likely cause of a lost response."""
        await asyncio.wait([lease.child.exit], timeout=0.5)

    def _raise_if_crashed(self, name: str, last_child: Child | None) -> None:
        """Raise ApiError if the process that had the request has crashed."""
        code = None if last_child is None else last_child.exit_code
        if code is not None and code in CRASHES:
            message = (
                f"the process of model '{name}' crashed ({signal.Signals(code - 128).name}) while it worked on this "
                "request; the request is not sent again, because it may be what ended it"
            )
            raise ApiError("server_error", message, status=502)
