"""The memory limit shared by all request bodies: waiting, rejection, and release on every path."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from traceback import walk_tb
from typing import Any

import httpx
import pytest
from fakes import run
from waiting import GUARD, until
from wire import Wire, serving

from llamado.http import bodies
from llamado.http.bodies import SMALL_BODY, Body, BodyBudget
from llamado.http.errors import ApiError, ClientDisconnected

MOST = 3 * 2**20
ONE = 2**20


class Client:
    """A client that sends the parts of a body one by one; `sent` of them were read."""

    def __init__(self, size: int | None) -> None:
        self.scope = {"headers": [] if size is None else [(b"content-length", b"%d" % size)]}
        self.parts: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.n_reads = 0

    def send(self, size: int, more: bool = True) -> None:
        self.parts.put_nowait({"type": "http.request", "body": b"x" * size, "more_body": more})

    def leave(self) -> None:
        self.parts.put_nowait({"type": "http.disconnect"})

    async def receive(self) -> Any:
        self.n_reads += 1
        return await self.parts.get()


def reading(room: BodyBudget, client: Client) -> tuple[Body, asyncio.Task[bytes]]:
    body = Body(room)
    return body, asyncio.ensure_future(body.read(client.scope, client.receive))


async def rest() -> None:
    """Run all ready tasks of the loop."""
    for _ in range(10):
        await asyncio.sleep(0)


def with_room(work: Callable[[BodyBudget], Awaitable[None]]) -> None:
    """Run with a budget of 3 MiB, which must be free again at the end."""

    async def main() -> None:
        room = BodyBudget(MOST)
        await work(room)
        await rest()
        assert room.free == MOST and not room._waiting and not room._reading

    run(main())


def test_a_small_body_does_not_overtake_a_waiting_large_one() -> None:
    async def test(room: BodyBudget) -> None:
        first, large, small = (Body(room) for _ in range(3))
        await room.reserve(first, MOST - 100)
        waiting = [asyncio.ensure_future(room.reserve(body, size)) for body, size in ((large, 200), (small, 100))]
        await rest()
        assert not any(one.done() for one in waiting) and room.free == 100
        first.release()
        await asyncio.gather(*waiting)
        assert room.free == MOST - 300
        for body in (large, small):
            body.release()
        for body in (first, large, small):
            room.end(body)

    with_room(test)


def test_a_body_beyond_the_budget_waits_unread() -> None:
    async def work(room: BodyBudget) -> None:
        clients = [Client(ONE) for _ in range(5)]
        held = [reading(room, client) for client in clients]
        await rest()
        assert [client.n_reads for client in clients] == [1, 1, 1, 0, 0] and room.free == 0
        small = Client(SMALL_BODY)
        small.send(SMALL_BODY, more=False)
        body, task = reading(room, small)
        assert len(await task) == SMALL_BODY and body.held == 0
        clients[1].send(ONE, more=False)
        assert len(await held[1][1]) == ONE
        await rest()
        assert clients[3].n_reads == 0  # the request with the read body still runs
        held[1][0].release()
        held[1][0].release()
        await rest()
        assert [client.n_reads for client in clients[3:]] == [1, 0]  # in order of arrival
        for (body, task), client in zip(held, clients, strict=True):
            client.send(ONE, more=False)
            await task
            body.release()

    with_room(work)


def test_a_body_of_unknown_length_reserves_the_most_it_may_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_BODY", 2 * ONE)

    async def work(room: BodyBudget) -> None:
        client = Client(None)
        body, task = reading(room, client)
        client.send(SMALL_BODY)
        await rest()
        assert room.free == MOST
        client.send(1)
        await rest()
        assert room.free == MOST - 2 * ONE
        client.send(ONE, more=False)
        assert len(await task) == SMALL_BODY + 1 + ONE == MOST - room.free
        body.release()

    with_room(work)


def held_by(error: BaseException) -> int:
    """Return the bytes that the frames of an error's traceback keep alive in lists."""
    lists = [value for frame, _ in walk_tb(error.__traceback__) for value in frame.f_locals.values()]
    return sum(len(part) for value in lists if isinstance(value, list) for part in value if isinstance(part, bytes))


@pytest.mark.parametrize("end", ["leaves", "too large", "cancelled", "cancelled while it waits", "no room"])
def test_every_end_releases_the_memory(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_BODY", 2 * ONE)
    if end == "no room":
        monkeypatch.setattr(bodies, "PATIENCE", 0.01)

    async def work(room: BodyBudget) -> None:
        client = Client(None if end == "too large" else 2 * ONE)
        body, task = reading(room, client)
        if end == "too large":
            client.send(SMALL_BODY + 1)
            client.send(2 * ONE)
            with pytest.raises(ApiError, match="exceeds") as error:
                await task
            assert error.value.status == 413
        elif end == "leaves":
            client.send(ONE)
            client.leave()
            with pytest.raises(ClientDisconnected) as gone:
                await task
            assert held_by(gone.value) < ONE  # no reference cycle keeps the body alive
        elif end == "cancelled":
            await rest()
            task.cancel()
            await asyncio.wait([task])
        else:
            await rest()
            second, waiting = reading(room, Client(2 * ONE))
            await rest()
            if end == "no room":
                with pytest.raises(ApiError) as error:
                    await waiting
                assert error.value.status == 503 and error.value.retry_after
            else:
                waiting.cancel()
                await asyncio.wait([waiting])
            second.release()
            client.leave()
            await asyncio.wait([task])
            assert isinstance(task.exception(), ClientDisconnected)
        body.release()

    with_room(work)


def test_memory_granted_to_a_cancelled_body_goes_to_the_next() -> None:
    async def work(room: BodyBudget) -> None:
        clients = [Client(MOST) for _ in range(3)]
        held = [reading(room, client) for client in clients]
        await rest()
        held[0][1].cancel()
        await asyncio.wait([held[0][1]])
        held[0][0].release()
        held[1][1].cancel()  # the memory is granted, but its task has not run since
        await rest()
        assert clients[2].n_reads == 1
        clients[2].leave()
        await asyncio.wait([held[1][1], held[2][1]])
        for body, _ in held:
            body.release()

    with_room(work)


@pytest.mark.slow
def test_slow_bodies_are_dropped_for_waiting_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slowest are dropped first, only as many as needed, and none while no body waits."""
    monkeypatch.setattr(bodies, "PACE_SECONDS", 0.5)
    monkeypatch.setattr(bodies, "PACE", 1e9)

    async def work(room: BodyBudget) -> None:
        clients = [Client(ONE) for _ in range(3)]
        held = [reading(room, client) for client in clients]
        for client in clients:
            client.send(ONE - 3000)
        await asyncio.sleep(0.3)
        assert not any(task.done() for _, task in held)
        fourth = Client(ONE)
        body, task = reading(room, fourth)
        await rest()
        for client, size in zip(clients, (2000, 10, 2500), strict=True):
            client.send(size)
        with pytest.raises(ApiError, match="too slowly") as error:
            await held[1][1]
        assert error.value.status == 408
        held[1][0].release()
        fourth.send(ONE, more=False)
        assert len(await task) == ONE
        assert not held[0][1].done() and not held[2][1].done()
        body.release()
        for (body, task), client in zip(held, clients, strict=True):
            client.leave()
            await asyncio.wait([task])
            body.release()

    with_room(work)


# -- a server -------------------------------------------------------------------------------------------------------


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    """A server with memory for two bodies of 1 MiB."""
    monkeypatch.setattr(bodies, "PACE_SECONDS", 0.2)
    monkeypatch.setattr(BodyBudget.__init__, "__defaults__", (2 * ONE, lambda: bodies.MAX_BODY))
    with serving() as wire:
        yield wire


def upload(size: int) -> bytes:
    return b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % size


@pytest.mark.slow
def test_held_bodies_do_not_block_other_requests(tight: Wire) -> None:
    """Clients hold back most of their bodies; small requests pass, and a large one that is complete gets memory."""
    held = [tight.connect() for _ in range(12)]
    for sock in held:
        sock.sendall(upload(ONE) + b"x" * (ONE - 1000))
    with httpx.Client(base_url=tight.url, timeout=GUARD) as http:
        assert http.post("/tokenize", json={"content": "abc"}).json() == {"tokens": [97, 98, 99]}
        assert http.get("/health").status_code == 200
        answer = http.post("/tokenize", json={"content": "x" * (ONE - 100)})
        assert answer.status_code == 200 and len(answer.json()["tokens"]) == ONE - 100
        assert b" 408 " in held[0].recv(100)
        for sock in held:
            sock.close()
        answer = http.post("/tokenize", json={"content": "x" * (2 * ONE - 100)})  # all of the memory
        assert answer.status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
def test_a_body_is_released_when_its_answer_begins(tight: Wire, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow answers do not keep the memory of their requests' bodies."""
    monkeypatch.setattr(bodies, "PATIENCE", 5)
    tight.engine.answer, tight.engine.delay = "x" * 1000, 0.5
    filler = "x" * (ONE - 4000)
    body = json.dumps({"prompt": "a", "stream": stream, "filler": filler}).encode()
    socks = [tight.connect() for _ in range(4)]
    for sock in socks:
        sock.sendall(upload(len(body)).replace(b"/tokenize", b"/completion") + body)
    # No answer is complete within minutes.
    until(lambda: len(tight.engine.requests) == 4, "the later ones got no room")
    for sock in socks:
        sock.close()
