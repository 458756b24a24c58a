"""Peers: other routers and servers whose models this router lists and serves (llama-swap's `peers`).

A peer's model is known by its own name, and always as `PEER/NAME`. This router's own models take precedence; a name
that two peers share needs the peer's prefix.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

from llamado.http.answer import Receive, Scope, Send
from llamado.http.errors import ApiError
from llamado.http.exchange import Exchange
from llamado.http.upstream import Pool, UpstreamAddress, UpstreamLost
from llamado.router.catalog import Rewrite

log = logging.getLogger("llamado.router")

HOPS = b"x-llamado-hops"
"""Header that counts the routers a request has passed through."""
MAX_HOPS = 8


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another server."""

    name: str
    url: str
    models: tuple[str, ...]
    key: str = field(default="", repr=False)
    """Sent to the peer instead of the client's key."""
    rewrite: Rewrite = field(default_factory=Rewrite)
    timeout: float = 60.0
    """Seconds until the response must start; 0: no limit."""


@dataclass(frozen=True)
class PeerModel:
    """A model on a peer."""

    peer: Peer
    model: str

    def listed(self, id: str, now: int) -> dict[str, Any]:
        """Return the model's entry in `/v1/models`."""
        return {
            "id": id,
            "aliases": [],
            "tags": [],
            "object": "model",
            "owned_by": "llamado",
            "created": now,
            "status": {"value": "remote"},
            "source": "peer",
            "can_remove": False,
            "name": f"{self.peer.name}: {self.model}",
            "meta": {"llamaswap": {"peerID": self.peer.name}},
        }


class Peers:
    """All peers and their connection pools."""

    def __init__(self, peers: Iterable[Peer] = ()) -> None:
        self._pools = {peer.name: Pool(UpstreamAddress.parse(peer.url)) for peer in peers}
        self._full: dict[str, PeerModel] = {}
        self._short: dict[str, PeerModel | None] = {}  # None: ambiguous
        for peer in peers:
            for model in dict.fromkeys(peer.models):
                found = PeerModel(peer, model)
                self._full[f"{peer.name}/{model}"] = found
                self._short[model] = None if model in self._short else found

    def find(self, name: str) -> PeerModel | None:
        """Return the model with this name."""
        return self._full.get(name) or self._short.get(name)

    def by_shortest_name(self, is_taken: Callable[[str], bool]) -> Iterator[tuple[str, PeerModel]]:
        """Yield all models by their shortest unambiguous names. `is_taken`: True for names of this router's models."""
        for name, found in self._full.items():
            short = self.find(found.model) == found and not is_taken(found.model)
            yield (found.model if short else name), found

    def proxy(self, found: PeerModel, fields: dict[str, Any] | None, body: bytes) -> PeerRequest:
        """Return the response to a request for a peer's model. `fields`: the parsed body; None: a form, which is passed
        on unchanged.
        """
        peer = found.peer
        if fields is None:
            return PeerRequest(peer, self._pools[peer.name], body)
        if peer.rewrite or fields.get("model") != found.model:
            requested = str(fields.get("model"))
            fields["model"] = found.model
            peer.rewrite.apply(fields, requested)
            body = orjson.dumps(fields)
        return PeerRequest(peer, self._pools[peer.name], body)

    def close(self) -> None:
        """Close all connections."""
        for pool in self._pools.values():
            pool.close()


class PeerRequest:
    """A response that proxies its request to a peer. Raises ApiError if the peer's response has not started."""

    def __init__(self, peer: Peer, pool: Pool, body: bytes) -> None:
        self._peer = peer
        self._pool = pool
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        peer = self._peer
        hops = next((value for name, value in scope["headers"] if name == HOPS), b"0")
        passed = int(hops) if hops.isdigit() and len(hops) < 4 else MAX_HOPS
        if passed >= MAX_HOPS:
            message = f"the request has passed {MAX_HOPS} routers: peers that name one another have no such model"
            raise ApiError("server_error", message, status=508)
        extra_headers = [(HOPS, b"%d" % (passed + 1))]
        key = peer.key.encode()
        if key:
            extra_headers.append((b"x-api-key", key))
        exchange = Exchange(scope, receive, send, self._body, forward_key=False)
        self._body = b""  # the exchange releases it when the response starts
        async with exchange:
            try:
                asking = asyncio.timeout(peer.timeout or None)
                async with asking:
                    connection = await exchange.unless_disconnected(
                        exchange.forward(
                            self._pool, scope["raw_path"], scope["query_string"], key=key, extra_headers=extra_headers
                        )
                    )
                if connection is not None:
                    await exchange.deliver(connection)
            except TimeoutError:
                exchange.drop()
                log.warning("peer %s: no response within %g s", peer.name, peer.timeout)
                message = f"the peer {peer.name!r} gave no answer within {peer.timeout:g} s"
                raise ApiError("server_error", message, status=504) from None
            except UpstreamLost as error:
                if exchange.disconnected:
                    return
                if exchange.started:
                    await exchange.fail(error, f"the peer {peer.name!r}")
                    return
                log.warning("peer %s: %s", peer.name, error)
                raise ApiError("server_error", f"the peer {peer.name!r} gave no answer: {error}", status=502) from None
