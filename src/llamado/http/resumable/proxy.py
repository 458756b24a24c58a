"""Resumable streams of upstream processes: the owner of each conversation's stream, and the requests about it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, NamedTuple, TypeVar
from urllib.parse import quote_from_bytes

import orjson
from starlette.requests import Request

from llamado.http.access import digest
from llamado.http.answer import App, Receive, Scope, Send, json_response
from llamado.http.errors import ApiError, not_found
from llamado.http.exchange import STREAM_CLAIM, Exchange
from llamado.http.resumable import requests
from llamado.http.resumable.registry import stream_state
from llamado.http.routing import ApiRoute
from llamado.http.upstream import Pool, UpstreamLost, call

log = logging.getLogger("llamado.http")

MOST_CLAIMS = 10_000
_SECONDS = 5.0  # for an upstream to stop or look up streams
_REPLACED = "another request of the conversation replaced this one"

Owner = TypeVar("Owner", bound=Hashable)


class Upstream(NamedTuple):
    """The connections to an owner. `key`: sent instead of the client's, unless it is empty."""

    pool: Pool
    key: bytes = b""


class StreamClaim(Generic[Owner]):
    """One request for a resumable stream: its owner, which keeps the stream, and the request while it runs.

    `owner`: its owner, if it is known from the beginning. `key`: the client's.
    """

    def __init__(self, proxy: StreamProxy[Owner], id: bytes, owner: Owner | None, key: bytes) -> None:
        self._proxy = proxy
        self._key_digest = digest(key)
        self.id = id
        self.owner = owner
        self.key = key
        """The client's key while the request runs."""
        self.started_at = int(time.time())
        self.exchange: Exchange | None = None
        self.n_readers = 0
        """Clients that read the stream by GET."""
        self.is_provisional = False
        """True if the conversation belongs to a request with another key until the owner accepts this one."""
        self.status = 0
        """Status of the response; 0 before it starts."""

    @property
    def outlives_client(self) -> bool:
        """True if the request goes on when its client disconnects: until the shutdown begins."""
        return not self._proxy.closed

    @property
    def waits(self) -> bool:
        """True if its owner will get the request later."""
        return self.exchange is not None and not self.exchange.sent

    def has_key(self, key: bytes) -> bool:
        """Return True if the request was sent with this key."""
        return self._key_digest == digest(key)

    def begin(self, exchange: Exchange) -> None:
        """Replace the earlier request of the conversation if it has the same key."""
        self.exchange = exchange
        self._proxy.begin(self)

    def move(self, owner: Owner) -> None:
        """Set the owner, before it gets the request. An earlier owner stops the stream that it may have."""
        if self.owner is not None and self.owner != owner:
            self._proxy.stop_soon(self.owner, self.id, self.key)
        self.owner = owner

    async def wait_for_stops(self) -> None:
        """Wait until the owner has stopped earlier streams of the conversation: a late stop would end this one."""
        if self.owner is not None:
            await self._proxy.wait_for_stops(self.owner, self.id)

    def respond(self, status: int) -> None:
        """Note the start of the response. 200: the owner has accepted the key."""
        self.status = status
        if status == 200 and self.is_provisional:
            self._proxy.replace(self)

    def end(self) -> None:
        """Forget the request. Its owner still has the stream if its response was 200."""
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            self._proxy.end(self, exchange)
        self.key = b""


class StreamProxy(Generic[Owner]):
    """The latest conversations with their owners; event loop only.

    `upstream_of`: returns the connections to an owner; None: it has lost its streams.
    """

    def __init__(self, upstream_of: Callable[[Owner], Upstream | None], *, forward_key: bool) -> None:
        self._upstream_of = upstream_of
        self._forward_key = forward_key
        self._claims: OrderedDict[bytes, StreamClaim[Owner]] = OrderedDict()
        self._running: set[StreamClaim[Owner]] = set()
        self._stops: dict[asyncio.Task[int], tuple[Owner, bytes]] = {}
        """Stops under way: owner and conversation of each."""
        self.closed = False

    def claim(self, scope: Scope, fields: object, owner: Owner | None = None) -> None:
        """Let a request outlive its client if it asks for a resumable stream. Raises ApiError.

        `fields`: of its body. `owner`: the owner, if it is known.
        """
        id = requests.requested_id(scope)
        if id and requests.is_streamed(fields, scope["path"]):
            scope[STREAM_CLAIM] = StreamClaim(self, id, owner, self._key_of(scope))

    def _key_of(self, scope: Scope) -> bytes:
        """Return the client's key if upstreams get it."""
        headers: dict[bytes, bytes] = dict(scope["headers"])
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        if not self._forward_key:
            return b""
        return key if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")

    def routes(self) -> list[ApiRoute]:
        """Return the routes of resumable streams."""
        return [
            ApiRoute("GET", requests.STREAM, self._resume),
            ApiRoute("DELETE", requests.STREAM, self._stop),
            ApiRoute("POST", requests.LOOKUP, self._look_up),
        ]

    def begin(self, claim: StreamClaim[Owner]) -> None:
        """Begin a request. Only owners check keys, so one with another key replaces no earlier request yet."""
        self._running.add(claim)
        earlier = self._claims.get(claim.id)
        claim.is_provisional = earlier is not None and not earlier.has_key(claim.key)
        if not claim.is_provisional:
            self.replace(claim)

    def replace(self, claim: StreamClaim[Owner]) -> None:
        """Replace the conversation's claim, and stop the earlier request."""
        earlier = self._claims.pop(claim.id, None)
        self._claims[claim.id] = claim
        if earlier is not None and earlier.exchange is not None:
            earlier.exchange.stop()
            if claim.is_provisional and earlier.owner == claim.owner:
                earlier.exchange.abort(_REPLACED)  # its owner has replaced its stream, if it has resumable streams
            elif earlier.owner is not None:
                self.stop_soon(earlier.owner, earlier.id, earlier.key, earlier.exchange)
        elif earlier is not None:
            owner, claim.owner = claim.owner, earlier.owner
            if owner is not None:
                claim.move(owner)
        claim.is_provisional = False
        if len(self._claims) > MOST_CLAIMS:
            ended = next((id for id, one in self._claims.items() if one.exchange is None), None)
            if ended is not None:
                del self._claims[ended]

    def end(self, claim: StreamClaim[Owner], exchange: Exchange) -> None:
        """Forget the request of a claim, and the claim if there is no stream.

        During shutdown its owner stops the stream: no client can reach it any more.
        """
        self._running.discard(claim)
        if self._claims.get(claim.id) is not claim:
            return
        if claim.status != 200:
            del self._claims[claim.id]
        if claim.owner is not None and (not claim.status or (self.closed and not exchange.is_complete)):
            self.stop_soon(claim.owner, claim.id, claim.key)

    def close(self) -> None:
        """Let requests end with their clients from now on: the process is shutting down."""
        self.closed = True
        for claim in list(self._running):
            if claim.exchange is not None:
                claim.exchange.end_without_client()

    async def wait_closed(self) -> None:
        """Wait until the owners have stopped the streams of requests that the shutdown has ended."""
        if self._stops:
            await asyncio.wait(list(self._stops))

    def stop_soon(self, owner: Owner, id: bytes, key: bytes, exchange: Exchange | None = None) -> asyncio.Task[int]:
        """Stop a stream at its owner, in a task. `exchange`: aborted if the owner does not stop it."""
        task = asyncio.ensure_future(self._stop_or_abort(owner, id, key, exchange))
        self._stops[task] = owner, id
        task.add_done_callback(self._stops.pop)
        return task

    async def wait_for_stops(self, owner: Owner, id: bytes) -> None:
        """Wait until stops of a conversation at this owner are complete."""
        pending = [task for task, at in self._stops.items() if at == (owner, id)]
        if pending:
            await asyncio.wait(pending)

    async def _stop_or_abort(self, owner: Owner, id: bytes, key: bytes, exchange: Exchange | None) -> int:
        status = await self._stop_at(owner, id, key)
        if status != 204 and exchange is not None:  # an upstream without resumable streams
            exchange.abort(_REPLACED)
        return status

    async def _stop_at(self, owner: Owner, id: bytes, key: bytes) -> int:
        """Stop a stream at its owner; return the status of the response, 0 if there is none."""
        upstream = self._upstream_of(owner)
        if upstream is None:
            return 0
        path = f"{requests.STREAM}?conv_id={quote_from_bytes(id, safe='')}"
        try:
            status, _ = await call(upstream.pool, "DELETE", path, timeout=_SECONDS, key=upstream.key or key)
        except (UpstreamLost, TimeoutError) as error:
            log.warning("resumable streams: not stopped: %s", str(error) or f"no answer within {_SECONDS:g} s")
            return 0
        return status

    async def _resume(self, request: Request) -> App:
        claim = self._claims.get(requests.named_id(request))
        if claim is None:
            raise not_found()
        if claim.waits:
            raise ApiError("unavailable_error", "Stream owner model is loading, retry later", retry_after=1)
        upstream = None if claim.owner is None else self._upstream_of(claim.owner)
        if upstream is None:
            raise not_found()
        return _ForwardedStream(claim, upstream, forward_key=self._forward_key)

    async def _stop(self, request: Request) -> App:
        id = requests.named_id(request)
        claim = self._claims.get(id)
        if claim is None:
            return requests.stopped()
        key, owner, exchange = self._key_of(request.scope), claim.owner, claim.exchange
        has_key = claim.has_key(key)
        if claim.waits and not has_key:
            raise ApiError("authentication_error", "only the key of a request can stop it before its answer begins")
        if exchange is not None and has_key:
            exchange.stop()  # at once: it might be sent while its owner stops an earlier attempt
        status = 0 if owner is None else await asyncio.shield(self.stop_soon(owner, id, key))
        if status in (401, 403):
            raise ApiError("authentication_error", "the stream's owner does not accept the API key", status=status)
        if self._claims.get(id) is claim:
            del self._claims[id]
        if exchange is not None:
            exchange.stop()
            if status != 204:  # an upstream without resumable streams
                exchange.abort("a client stopped the answer")
        return requests.stopped()

    async def _look_up(self, request: Request) -> App:
        try:
            ids = await requests.looked_up_ids(request)
        except ApiError:
            ids = []  # as llama-server's router, unlike its server
        waiting: list[Any] = []
        by_owner: dict[Owner, list[StreamClaim[Owner]]] = {}
        for id in ids:
            claim = self._claims.get(id)
            if claim is not None and claim.waits:
                waiting.append(stream_state(id, started_at=claim.started_at))
            elif claim is not None and claim.owner is not None:
                by_owner.setdefault(claim.owner, []).append(claim)
        key = self._key_of(request.scope)
        found = await asyncio.gather(*(self._look_up_at(owner, own, key) for owner, own in by_owner.items()))
        return json_response(orjson.dumps([*waiting, *(state for states in found for state in states)]))

    async def _look_up_at(self, owner: Owner, claims: list[StreamClaim[Owner]], key: bytes) -> list[Any]:
        """Return the states of streams at their owner. A request that it is about to begin has no bytes."""
        upstream = self._upstream_of(owner)
        if upstream is None:
            return []
        body = orjson.dumps({"conversation_ids": [claim.id.decode() for claim in claims]})
        try:
            status, answer = await call(
                upstream.pool, "POST", requests.LOOKUP, body, timeout=_SECONDS, key=upstream.key or key
            )
            found = orjson.loads(answer) if status == 200 else None
        except (UpstreamLost, TimeoutError, ValueError):
            return []
        if not isinstance(found, list):
            return []
        states = [state for state in found if isinstance(state, dict)]
        ids = {state.get("conversation_id") for state in states}
        running = (claim for claim in claims if claim.exchange is not None and claim.id.decode() not in ids)
        return [*states, *(stream_state(claim.id, started_at=claim.started_at) for claim in running)]


class _ForwardedStream:
    """A response that forwards a GET to the owner of a stream. It does not count as use of the owner."""

    def __init__(self, claim: StreamClaim[Any], upstream: Upstream, *, forward_key: bool) -> None:
        self._claim = claim
        self._upstream = upstream
        self._forward_key = forward_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._claim.n_readers += 1
        try:
            await self._forward(scope, receive, send)
        finally:
            self._claim.n_readers -= 1

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, query = scope["raw_path"], scope["query_string"]
        async with Exchange(scope, receive, send, b"", forward_key=self._forward_key) as exchange:
            try:
                connection = await exchange.forward(self._upstream.pool, path, query, key=self._upstream.key)
                await exchange.deliver(connection)
            except UpstreamLost as error:
                if exchange.disconnected:
                    return
                if not exchange.started:
                    raise ApiError("server_error", f"the stream's owner does not answer: {error}", status=502) from None
                await exchange.fail(error, "the stream's owner")
