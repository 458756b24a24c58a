"""What a client is answered when an application raises."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from llamado.errors import LlamadoError
from llamado.http.answer import answer_faults
from llamado.http.errors import ApiError, ClientDisconnected

log = logging.getLogger("llamado.test")
SCOPE = {"type": "http", "method": "GET", "path": "/x"}


def answered(error: BaseException | None, *, begun: bool = False, **more: Any) -> list[Any]:
    """What is sent where an application raises an error, before or after it began to answer."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        if error is not None:
            raise error

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(answer_faults(app, dict(SCOPE), receive, send, log, **more))
    return sent


@pytest.mark.parametrize(
    ("error", "status", "message", "logged"),
    [
        (ApiError("not_found_error", "nowhere"), 404, "nowhere", False),
        (LlamadoError("the disk is full"), 500, "the disk is full", False),
        (KeyError("k"), 500, "KeyError: 'k'", True),
    ],
)
def test_a_fault_before_the_answer_is_an_error_body(
    error: Exception, status: int, message: str, logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    start, body = answered(error)
    assert (start["status"], json.loads(body["body"])["error"]["message"]) == (status, message)
    assert bool(caplog.records) is logged


def test_an_application_may_name_its_faults_itself() -> None:
    start, _ = answered(KeyError("k"), translate=lambda error: ApiError("permission_error", repr(error)))
    assert start["status"] == 403


def test_an_answer_that_has_begun_is_not_begun_again() -> None:
    assert [message["type"] for message in answered(LlamadoError("late"), begun=True)] == ["http.response.start"]


def test_who_is_gone_is_not_answered() -> None:
    assert answered(ClientDisconnected("gone")) == []


def test_cancelled_requests_are_answered_only_where_the_process_ends() -> None:
    with pytest.raises(asyncio.CancelledError):
        answered(asyncio.CancelledError())
    start, _ = answered(asyncio.CancelledError(), ending=lambda: True)
    assert start["status"] == 503 and (b"retry-after", b"2") in start["headers"]
    assert len(answered(asyncio.CancelledError(), begun=True, ending=lambda: True)) == 1
