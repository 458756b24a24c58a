"""Resumable streams behind a proxy, without processes: claims, keys, and stops at the owners."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import orjson
import pytest
from starlette.requests import Request

from llamado.http import exchange as exchange_module
from llamado.http.errors import ApiError
from llamado.http.exchange import CONVERSATION, STREAM_CLAIM, Exchange
from llamado.http.resumable import proxy as proxy_module
from llamado.http.resumable.proxy import StreamClaim, StreamProxy, Upstream
from llamado.http.upstream import Pool, UpstreamAddress, UpstreamLost

CHAT = "/v1/chat/completions"


class Owners:
    """Upstreams by name. Each requires its key, if it has one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **keys: bytes) -> None:
        self.keys = keys
        self.is_resumable = True
        self.states: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.gate: asyncio.Event | None = None
        """Responses to DELETE wait for this event."""
        self.proxy: StreamProxy[str] = StreamProxy(lambda owner: Upstream(cast(Pool, owner)), forward_key=True)
        monkeypatch.setattr(proxy_module, "call", self._call)
        monkeypatch.setattr(proxy_module.requests, "looked_up_ids", self._looked_up_ids)

    async def _looked_up_ids(self, request: Request) -> list[bytes]:
        return [b"c"]

    async def _call(
        self, pool: Any, method: str, path: str, body: bytes = b"", *, timeout: float, key: bytes
    ) -> tuple[int, bytes]:
        self.calls.append(f"{method} {pool}")
        if self.gate is not None and method == "DELETE":
            await self.gate.wait()
        if self.keys.get(pool) not in (None, key):
            return 401, b""
        if not self.is_resumable:
            return 404, b""
        return (204, b"") if method == "DELETE" else (200, orjson.dumps(self.states))

    async def request(self, call: Callable[[Request], Awaitable[Any]], key: bytes = b"") -> Any:
        """Send a request about the stream `c`; return the response, or the status of an error."""
        headers = [(b"authorization", b"Bearer " + key)] if key else []
        scope = {"type": "http", "method": "POST", "path": "/", "headers": headers, "query_string": b"conv_id=c"}
        try:
            return await call(Request(scope))
        except ApiError as error:
            return error.status

    async def stop(self, key: bytes = b"") -> int:
        response = await self.request(self.proxy._stop, key)
        return response if isinstance(response, int) else int(response.status_code)

    async def resume(self, key: bytes = b"") -> int:
        response = await self.request(self.proxy._resume, key)
        return response if isinstance(response, int) else 200

    async def total_bytes(self) -> list[int]:
        """Look the stream up; return the size of each stream that was found."""
        response = await self.request(self.proxy._look_up)
        return [state["total_bytes"] for state in orjson.loads(response.body)]


def claim_of(owners: Owners, key: bytes = b"", id: bytes = b"c", owner: str | None = None) -> StreamClaim[str]:
    headers = [(CONVERSATION, id), *([(b"authorization", b"Bearer " + key)] if key else [])]
    scope: dict[str, Any] = {"method": "POST", "path": CHAT, "headers": headers}
    owners.proxy.claim(scope, {"stream": True}, owner)
    claim: StreamClaim[str] = scope[STREAM_CLAIM]
    return claim


class FakeExchange:
    """The request of a claim."""

    def __init__(self, claim: StreamClaim[str]) -> None:
        self.claim = claim
        self.sent = self.is_complete = False
        self.is_stopped = False
        self.abort_reason = ""
        claim.begin(cast(Exchange, self))

    def send(self, owner: str, status: int = 0) -> FakeExchange:
        """Send the request; let its response begin with this status."""
        self.claim.move(owner)
        self.sent = True
        if status:
            self.claim.respond(status)
        return self

    def end(self) -> None:
        self.is_complete = True
        self.claim.end()

    def stop(self) -> None:
        self.is_stopped = True

    def abort(self, reason: str) -> None:
        self.abort_reason = reason

    def end_without_client(self) -> None:
        self.claim.end()


def begin(owners: Owners, key: bytes = b"", id: bytes = b"c", owner: str | None = None) -> FakeExchange:
    return FakeExchange(claim_of(owners, key, id, owner))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def run(work: Callable[[Owners], Awaitable[None]], **keys: bytes) -> None:
        async def start() -> None:
            await work(Owners(monkeypatch, **keys))

        asyncio.run(start())

    return run


Run = Callable[..., None]


def test_only_a_key_of_the_owner_stops_a_stream(run: Run) -> None:
    async def work(owners: Owners) -> None:
        running = begin(owners, b"k").send("a", 200)
        assert await owners.stop() == 401
        assert not running.is_stopped and not running.abort_reason
        assert await owners.resume(b"k") == 200
        assert await owners.stop(b"k") == 204
        assert running.is_stopped and await owners.resume(b"k") == 404

    run(work, a=b"k")


def test_a_request_with_another_key_replaces_an_answer_once_it_is_accepted(run: Run) -> None:
    async def work(owners: Owners) -> None:
        running = begin(owners, b"k").send("a", 200)
        refused = begin(owners).send("b", 401)
        refused.end()
        assert not running.is_stopped and owners.calls == []
        assert await owners.resume(b"k") == 200
        accepted = begin(owners, b"other").send("b")
        assert not running.is_stopped
        accepted.claim.respond(200)
        await owners.proxy.wait_closed()
        assert running.is_stopped and owners.calls == ["DELETE a"] and not running.abort_reason
        accepted.end()
        begin(owners, b"k").send("b").claim.respond(200)
        assert owners.calls == ["DELETE a"]  # the owner has replaced its own stream

    run(work, a=b"k")


def test_a_request_that_waits_is_stopped_with_its_own_key(run: Run) -> None:
    """A waiting request has no owner yet, which alone could check another key."""

    async def work(owners: Owners) -> None:
        waiting = begin(owners, b"k")
        assert await owners.stop() == 401
        other = begin(owners)
        assert not waiting.is_stopped and not other.is_stopped
        assert await owners.resume(b"k") == 503
        assert await owners.stop(b"k") == 204
        assert waiting.is_stopped

    run(work)


def test_a_stop_comes_before_the_next_attempt(run: Run) -> None:
    """The request is not sent again while its owner handles the stop."""

    async def work(owners: Owners) -> None:
        owners.gate = asyncio.Event()
        running = begin(owners).send("a")
        stopping = asyncio.ensure_future(owners.stop())
        while not owners.calls:
            await asyncio.sleep(0)
        assert running.is_stopped
        owners.gate.set()
        assert await stopping == 204

    run(work)


def test_a_request_is_sent_after_the_stop_of_the_earlier_one(run: Run) -> None:
    async def work(owners: Owners) -> None:
        owners.gate = asyncio.Event()
        begin(owners).send("a", 200)
        new = begin(owners)
        new.claim.move("b")
        await new.claim.wait_for_stops()  # another owner's stop does not matter
        new.claim.move("a")
        ready = asyncio.ensure_future(new.claim.wait_for_stops())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not ready.done()
        owners.gate.set()
        await ready

    run(work)


def test_a_shutdown_stops_streams_at_their_owners(run: Run) -> None:
    async def work(owners: Owners) -> None:
        attached, complete = begin(owners, id=b"1").send("a", 200), begin(owners, id=b"2").send("b", 200)
        owners.proxy._running.discard(attached.claim)  # its client is connected
        owners.proxy._running.discard(complete.claim)
        begin(owners, id=b"3").send("c", 200)
        owners.proxy.close()
        attached.claim.end()
        complete.end()
        await owners.proxy.wait_closed()
        assert owners.calls == ["DELETE c", "DELETE a"]

    run(work)


def test_failed_requests_leave_no_claim(run: Run) -> None:
    async def work(owners: Owners) -> None:
        for n, status in enumerate((400, 401, 503, 0)):
            begin(owners, b"k" * 1000, b"%d" % n).send("a", status).end()
        assert not owners.proxy._claims and not owners.proxy._running
        ended = begin(owners, b"k").send("a", 200)
        ended.end()
        assert owners.proxy._claims == {b"c": ended.claim} and not ended.claim.key

    run(work)


def test_running_requests_keep_their_claims(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_module, "MOST_CLAIMS", 2)

    async def work(owners: Owners) -> None:
        running = begin(owners).send("a", 200)
        for n in range(5):
            begin(owners, id=b"%d" % n).send("a", 200).end()
        assert set(owners.proxy._claims) == {b"c", b"4"}
        assert owners.proxy._claims[b"c"] is running.claim

    run(work)


@pytest.mark.parametrize("owner", ["a", "b"])
def test_an_owner_without_resumable_streams_loses_its_client(run: Run, owner: str) -> None:
    async def work(owners: Owners) -> None:
        owners.is_resumable = False
        for key in (b"", b"other"):  # replaced at once, or when accepted
            running = begin(owners).send("a", 200)
            new = begin(owners, key).send(owner, 200)
            await owners.proxy.wait_closed()
            assert running.abort_reason
            new.end()
            owners.proxy._claims.clear()

    run(work)


def test_lookups_have_requests_without_a_stream(run: Run) -> None:
    """Lookups list requests that wait or were just sent, even if an earlier stream of the id has ended."""

    async def work(owners: Owners) -> None:
        earlier = begin(owners, owner="a").send("a", 200)
        assert await owners.total_bytes() == [0]
        owners.states = [{"conversation_id": "c", "total_bytes": 7}]
        assert await owners.total_bytes() == [7]
        earlier.end()
        assert await owners.total_bytes() == [7] and await owners.resume() == 200
        begin(owners)
        assert await owners.total_bytes() == [0] and await owners.resume() == 503

    run(work)


class SlowPool(Pool):
    """A pool that connects once `go` is set."""

    def __init__(self) -> None:
        super().__init__(UpstreamAddress())
        self.go = asyncio.Event()
        self.sent = 0

    async def connect(self, *, fresh: bool = False) -> Any:
        await self.go.wait()
        return SlowConnection(self)


class SlowConnection:
    used = has_begun = hung_up = False

    def __init__(self, pool: SlowPool) -> None:
        self._pool = pool

    def hang_up(self, reason: str) -> None:
        self.hung_up = True

    def abort(self) -> None: ...

    def send(self, head: bytes, body: bytes) -> None:
        if self.hung_up:
            raise UpstreamLost("hung up")
        self._pool.sent += 1

    async def wait_for_response(self) -> None:
        raise UpstreamLost("no response")


def test_a_request_is_stopped_while_it_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "request_head", lambda *_, **__: b"")

    async def work() -> None:
        async def receive() -> Any:
            await asyncio.Event().wait()

        async def send(message: Any) -> None: ...

        pool = SlowPool()
        async with Exchange({}, receive, send, b"", forward_key=False) as exchange:
            sending = asyncio.ensure_future(exchange.forward(pool, b"/", b""))
            await asyncio.sleep(0)
            exchange.stop()
            pool.go.set()
            with pytest.raises(UpstreamLost):
                await sending
        assert not pool.sent and not exchange.sent

    asyncio.run(work())


def test_an_answer_is_read_to_its_end_while_a_client_follows_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "MOST_UNREAD", 10)

    async def work(owners: Owners) -> None:
        async def receive() -> Any:
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None: ...

        claim = claim_of(owners)
        pool = SlowPool()
        async with Exchange({STREAM_CLAIM: claim}, receive, send, b"", forward_key=False) as exchange:
            connection = exchange._connection = cast(Any, SlowConnection(pool))
            while not exchange._is_client_gone:
                await asyncio.sleep(0)
            claim.n_readers = 1
            for _ in range(5):
                await exchange._pass_on(b"x" * 8)
            claim.n_readers = 0
            await exchange._pass_on(b"x" * 8)
            assert not connection.hung_up
            await exchange._pass_on(b"x" * 8)
            assert connection.hung_up and exchange.disconnected

    run(work)
