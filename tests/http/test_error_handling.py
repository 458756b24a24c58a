"""Error responses for exceptions that an application raises."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from llamado.errors import LlamadoError
from llamado.http.answer import handle_errors
from llamado.http.errors import ApiError, ClientDisconnected

log = logging.getLogger("llamado.test")
SCOPE = {"type": "http", "method": "GET", "path": "/x"}


def messages_sent(error: BaseException | None, *, started: bool = False, **more: Any) -> list[Any]:
    """Return the messages sent for an application that raises an error before or after its response has started."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if started:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        if error is not None:
            raise error

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(handle_errors(app, dict(SCOPE), receive, send, log, **more))
    return sent


@pytest.mark.parametrize(
    ("error", "status", "message", "logged"),
    [
        (ApiError("not_found_error", "nowhere"), 404, "nowhere", False),
        (LlamadoError("the disk is full"), 500, "the disk is full", False),
        (KeyError("k"), 500, "KeyError: 'k'", True),
    ],
)
def test_an_exception_becomes_an_error_response(
    error: Exception, status: int, message: str, logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    start, body = messages_sent(error)
    assert (start["status"], json.loads(body["body"])["error"]["message"]) == (status, message)
    assert bool(caplog.records) is logged


def test_exceptions_can_be_translated() -> None:
    start, _ = messages_sent(KeyError("k"), translate=lambda error: ApiError("permission_error", repr(error)))
    assert start["status"] == 403


def test_a_started_response_is_not_started_again() -> None:
    assert [message["type"] for message in messages_sent(LlamadoError("late"), started=True)] == ["http.response.start"]


def test_disconnected_clients_get_no_response() -> None:
    assert messages_sent(ClientDisconnected("gone")) == []


def test_cancelled_requests_get_a_response_only_at_shutdown() -> None:
    with pytest.raises(asyncio.CancelledError):
        messages_sent(asyncio.CancelledError())
    start, _ = messages_sent(asyncio.CancelledError(), is_ending=lambda: True)
    assert start["status"] == 503 and (b"retry-after", b"5") in start["headers"]
    assert len(messages_sent(asyncio.CancelledError(), started=True, is_ending=lambda: True)) == 1
