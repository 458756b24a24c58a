"""Bodies with many prompts: the event loop answers others while requests are submitted and answers are written."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from fakes import FakeEngine, client, read, run

from llamado.engine.errors import QueueFull
from llamado.engine.request import Event, Request, Result
from llamado.server.generate.formats import NativeFormat
from llamado.server.generate.streaming import Generation, Mailbox

N = 400
BODY = {"prompt": ["x"] * N, "n_predict": 1}


class TurnsEngine(FakeEngine):
    """Counts the requests that are submitted in each turn of the event loop; rejects those after the first `most`."""

    def __init__(self, most: int = N) -> None:
        super().__init__("a")
        self.turn, self.most = 0, most
        self.submitted: Counter[int] = Counter()

    def submit(
        self, request: Request, emit: Callable[[Event], None], *, flush: Callable[[], None] | None = None
    ) -> int:
        if self.submitted.total() == self.most:
            raise QueueFull(self.most, 1)
        self.submitted[self.turn] += 1
        return super().submit(request, emit, flush=flush)


async def post(engine: TurnsEngine, body: Any) -> tuple[int, Any]:
    """Post a completion while the turns of the event loop are counted."""

    async def count() -> None:
        while True:
            await asyncio.sleep(0)
            engine.turn += 1

    async with client(engine) as http:
        counting = asyncio.ensure_future(count())
        answer = await http.post("/completion", json=body)
        counting.cancel()
    return read(answer)


def test_others_run_between_the_requests_of_one_body() -> None:
    engine = TurnsEngine()
    status, answers = run(post(engine, BODY))
    assert status == 200 and [answer["index"] for answer in answers] == list(range(N))
    assert engine.submitted.total() == N and max(engine.submitted.values()) <= 64


def test_a_request_that_is_rejected_cancels_the_earlier_ones() -> None:
    engine = TurnsEngine(most=100)
    status, _ = run(post(engine, BODY))
    assert status == 503 and sorted(set(engine.cancelled)) == list(range(1, 101))


def test_events_before_a_rejection_do_not_count_as_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    mailboxes: set[Mailbox] = set()
    count_unread = Mailbox.count_unread

    def noted(self: Mailbox, generation: Generation, events: Sequence[tuple[int, Event]]) -> None:
        mailboxes.add(self)
        count_unread(self, generation, events)

    monkeypatch.setattr(Mailbox, "count_unread", noted)
    status, _ = run(post(TurnsEngine(most=0), {"prompt": [[], "x"]}))
    (mailbox,) = mailboxes
    assert status == 503 and (mailbox._unread, mailbox._total) == ({}, 0)


def test_many_results_are_written_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[int, bool]] = []
    answer = NativeFormat.answer

    def noted(self: NativeFormat, results: Sequence[Result]) -> bytes:
        written.append((len(results), threading.current_thread() is threading.main_thread()))
        return answer(self, results)

    monkeypatch.setattr(NativeFormat, "answer", noted)
    assert run(post(TurnsEngine(), BODY))[0] == 200
    assert run(post(TurnsEngine(), {"prompt": "x"}))[0] == 200
    assert written == [(N, False), (1, True)]
