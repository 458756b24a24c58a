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

Owner = TypeVar("Owner", bound=Hashable)


class Upstream(NamedTuple):
    """The connections to an owner. `key`: sent instead of the client's, unless it is empty."""

    pool: Pool
    key: bytes = b""


class StreamClaim(Generic[Owner]):
    """One request for a resumable stream: its owner, which keeps the stream, and the request while it runs.

    `target`: its owner, if it is known from the beginning. `key`: the client's.
    """

    def __init__(self, proxy: StreamProxy[Owner], id: bytes, target: Owner | None, key: bytes) -> None:
        self._proxy = proxy
        self._target = target
        self._key = key
        self.id = id
        self.started_at = int(time.time())
        self.owner: Owner | None = None
        self.exchange: Exchange | None = None

    @property
    def outlives_client(self) -> bool:
        """True if the request goes on when its client disconnects: until the shutdown begins."""
        return not self._proxy.closed

    @property
    def waits(self) -> bool:
        """True if its owner will get the request later."""
        return self.exchange is not None and self._proxy.is_waiting(self)

    def begin(self, exchange: Exchange) -> None:
        """Replace the earlier request of the conversation, and stop it if it waits for its owner."""
        self.exchange = exchange
        self._proxy.replace(self)
        if self._target is not None:
            self.move(self._target)

    def move(self, owner: Owner) -> None:
        """Set the owner, before it gets the request. An earlier owner stops the stream that it may have."""
        if self.owner is not None and self.owner != owner:
            self._proxy.stop_soon(self.owner, self.id, self._key)
        self.owner = owner

    def end(self) -> None:
        """Forget the request. Its owner still has the stream."""
        self.exchange = None


class StreamProxy(Generic[Owner]):
    """The latest conversations with their owners; event loop only.

    `upstream_of`: returns the connections to an owner; None: it has lost its streams. `is_loading`: returns True if
    an owner will get the request later.
    """

    def __init__(
        self,
        upstream_of: Callable[[Owner], Upstream | None],
        is_loading: Callable[[Owner], bool] = lambda owner: False,
        *,
        forward_key: bool,
    ) -> None:
        self._upstream_of = upstream_of
        self._is_loading = is_loading
        self._forward_key = forward_key
        self._claims: OrderedDict[bytes, StreamClaim[Owner]] = OrderedDict()
        self._tasks: set[asyncio.Task[int]] = set()
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

    def replace(self, claim: StreamClaim[Owner]) -> None:
        """Make a claim that of its conversation."""
        earlier = self._claims.pop(claim.id, None)
        if earlier is not None:
            claim.owner = earlier.owner
            if earlier.exchange is not None:
                earlier.exchange.stop()
        self._claims[claim.id] = claim
        if len(self._claims) > MOST_CLAIMS:
            self._claims.popitem(last=False)

    def is_waiting(self, claim: StreamClaim[Owner]) -> bool:
        """Return True if a running request has not reached an owner yet."""
        owner = claim.owner
        return owner is None or (self._upstream_of(owner) is None and self._is_loading(owner))

    def close(self) -> None:
        """Let requests end with their clients from now on: the process is shutting down."""
        self.closed = True
        for claim in self._claims.values():
            if claim.exchange is not None:
                claim.exchange.end_without_client()

    def stop_soon(self, owner: Owner, id: bytes, key: bytes) -> None:
        """Stop a stream at its owner, without waiting for it."""
        task = asyncio.ensure_future(self._stop_at(owner, id, key))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

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
        upstream = None if claim.owner is None else self._upstream_of(claim.owner)
        if upstream is None:
            if claim.waits:
                raise ApiError("unavailable_error", "Stream owner model is loading, retry later", retry_after=1)
            raise not_found()
        return _ForwardedStream(upstream, forward_key=self._forward_key)

    async def _stop(self, request: Request) -> App:
        id = requests.named_id(request)
        claim = self._claims.pop(id, None)
        if claim is not None:
            exchange = claim.exchange
            if exchange is not None:
                exchange.stop()
            status = 0 if claim.owner is None else await self._stop_at(claim.owner, id, self._key_of(request.scope))
            if status != 204 and exchange is not None:  # an upstream without resumable streams
                exchange.abort("a client stopped the answer")
        return requests.stopped()

    async def _look_up(self, request: Request) -> App:
        try:
            ids = await requests.looked_up_ids(request)
        except ApiError:
            ids = []  # as llama-server's router, unlike its server
        waiting: list[Any] = []
        by_owner: dict[Owner, list[str]] = {}
        for id in ids:
            claim = self._claims.get(id)
            if claim is not None and claim.waits:
                waiting.append(stream_state(id, started_at=claim.started_at))
            elif claim is not None and claim.owner is not None:
                by_owner.setdefault(claim.owner, []).append(id.decode())
        key = self._key_of(request.scope)
        found = await asyncio.gather(*(self._look_up_at(owner, own, key) for owner, own in by_owner.items()))
        return json_response(orjson.dumps([*waiting, *(state for states in found for state in states)]))

    async def _look_up_at(self, owner: Owner, ids: list[str], key: bytes) -> list[Any]:
        upstream = self._upstream_of(owner)
        if upstream is None:
            return []
        body = orjson.dumps({"conversation_ids": ids})
        try:
            status, answer = await call(
                upstream.pool, "POST", requests.LOOKUP, body, timeout=_SECONDS, key=upstream.key or key
            )
            states = orjson.loads(answer) if status == 200 else []
        except (UpstreamLost, TimeoutError, ValueError):
            return []
        return [state for state in states if isinstance(state, dict)] if isinstance(states, list) else []


class _ForwardedStream:
    """A response that forwards a GET to the owner of a stream. It does not count as use of the owner."""

    def __init__(self, upstream: Upstream, *, forward_key: bool) -> None:
        self._upstream = upstream
        self._forward_key = forward_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
