"""Resumable streams: answers that survive their clients (X-Conversation-Id, `/v1/stream`, `/v1/streams/lookup`)."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fakes import ANSWER
from resumable import BODY, CHAT, GatedEngine, post, read_some, text_of
from waiting import GUARD, until
from wire import Wire, read_answers, serving

from llamado.http.access import AccessRules


@contextlib.contextmanager
def gated(allowed: int = 0, **options: Any) -> Iterator[tuple[Wire, GatedEngine, httpx.Client]]:
    engine = GatedEngine(allowed=allowed)
    with serving(engine, **options) as wire, httpx.Client(base_url=wire.url, timeout=GUARD) as http:
        yield wire, engine, http
        engine.allow()


def get(http: httpx.Client, id: str = "c", offset: int | str = 0, **more: Any) -> httpx.Response:
    return http.get("/v1/stream", params={"conv_id": id, "from": offset}, **more)


def state(http: httpx.Client, id: str = "c") -> dict[str, Any] | None:
    found = http.post("/v1/streams/lookup", json={"conversation_ids": [id]}).json()
    assert len(found) < 2
    return found[0] if found else None


def written(http: httpx.Client, id: str = "c") -> int:
    found = state(http, id)
    return found["total_bytes"] if found else 0


def is_done(http: httpx.Client, id: str = "c") -> bool:
    found = state(http, id)
    return found is not None and found["is_done"]


def test_an_answer_goes_on_without_its_client() -> None:
    """The client leaves after or before the first token, comes back, and gets every byte once."""
    with gated(allowed=3) as (wire, engine, http):
        with post(wire.address) as sock:
            read_some(sock)
        with post(wire.address, b"early"):
            until(lambda: state(http, "early"))
        engine.allow()
        until(lambda: is_done(http) and is_done(http, "early"))
        assert not engine.cancelled
        whole = get(http)
        assert whole.status_code == 200 and whole.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert whole.headers["x-accel-buffering"] == "no"
        assert text_of(whole.content) == text_of(get(http, "early").content) == ANSWER
        for offset in (1, len(whole.content) - 1, len(whole.content), len(whole.content) + 1, 2**64 - 1):
            assert get(http, offset=offset).content == whole.content[offset:]
        assert get(http, offset="").content == whole.content
        assert state(http) == {
            "conversation_id": "c",
            "is_done": True,
            "total_bytes": len(whole.content),
            "started_at": state(http)["started_at"],  # type: ignore[index]
            "completed_at": state(http)["completed_at"],  # type: ignore[index]
        }


def test_a_client_that_stays_gets_the_same_bytes() -> None:
    with gated(allowed=10_000) as (_, _, http):
        response = http.post(CHAT, json=BODY, headers={"x-conversation-id": "c"})
        assert response.headers["transfer-encoding"] == "chunked"
        assert text_of(response.content) == ANSWER and get(http).content == response.content


def test_a_client_without_the_header_cancels_by_leaving() -> None:
    with gated(allowed=3) as (wire, engine, http):
        with post(wire.address, b"") as sock:
            read_some(sock)
        until(lambda: engine.cancelled)
        assert state(http) is None


def test_readers_follow_a_running_stream() -> None:
    """Two clients read at once, and one of them leaves."""
    with gated(allowed=2) as (wire, engine, http), post(wire.address) as sock:
        read_some(sock)
        bodies: list[bytes] = []
        reading = threading.Thread(target=lambda: bodies.append(get(http).content))
        reading.start()
        with http.stream("GET", "/v1/stream", params={"conv_id": "c"}) as leaving:
            assert b"data: " in next(leaving.iter_raw())
        stream = wire.state.streams.find(b"c")
        until(lambda: stream is not None and stream.n_readers == 2)
        offset = written(http)
        late = threading.Thread(target=lambda: bodies.append(get(http, offset=offset).content))
        late.start()
        engine.allow()
        reading.join(GUARD)
        late.join(GUARD)
        whole = get(http).content
        assert sorted(bodies) == sorted([whole, whole[offset:]]) and text_of(whole) == ANSWER


def test_delete_stops_an_answer() -> None:
    """Its client and its readers get the end of the stream, and its slot is free."""
    with gated(allowed=3) as (wire, engine, http), post(wire.address) as sock:
        started = read_some(sock)
        with http.stream("GET", "/v1/stream", params={"conv_id": "c"}) as reader:
            parts = reader.iter_raw()
            next(parts)
            response = http.delete("/v1/stream", params={"conv_id": "c"})
            assert (response.status_code, response.content) == (204, b"")
            assert response.headers["content-type"] == "application/json"
            assert b"[DONE]" not in b"".join(parts)  # ends without an error of the transport
        while not started.endswith(b"0\r\n\r\n"):
            started += sock.recv(65536)
        assert b"[DONE]" not in started and b"error" not in started
        until(lambda: not engine.busy)
        assert engine.cancelled and state(http) is None and get(http).status_code == 404
        assert http.delete("/v1/stream", params={"conv_id": "c"}).status_code == 204


def test_a_stop_before_the_first_token() -> None:
    with gated() as (wire, engine, http), post(wire.address) as sock:
        until(lambda: engine.busy)
        assert http.delete("/v1/stream", params={"conv_id": "c"}).status_code == 204
        ((status, _, body),) = read_answers(sock, 1)
        assert status == 400 and b"cancelled by a stop" in body
        until(lambda: not engine.busy)


def test_a_new_request_replaces_the_stream() -> None:
    with gated(allowed=3) as (wire, engine, http), post(wire.address) as first:
        read_some(first)
        bodies: list[bytes] = []
        waiting = threading.Thread(target=lambda: bodies.append(get(http).content))
        waiting.start()
        stream = wire.state.streams.find(b"c")
        until(lambda: stream is not None and stream.n_readers == 2)
        with post(wire.address) as second:
            waiting.join(GUARD)
            assert b"[DONE]" not in bodies[0]
            until(lambda: engine.cancelled)
            engine.allow()
            read_some(second, b"[DONE]")
            assert text_of(get(http).content) == ANSWER


def test_errors_before_the_first_event_keep_no_stream() -> None:
    """The body is rejected, or the engine fails at once. After the first event the error is an event."""
    with gated(allowed=10_000) as (_, engine, http):
        headers = {"x-conversation-id": "c"}
        bad = http.post(CHAT, json={"stream": True}, headers=headers)
        assert bad.status_code == 400 and bad.json()["error"]["type"] == "invalid_request_error"
        assert state(http) is None
        engine.fail = RuntimeError("broken")
        failed = http.post(CHAT, json=BODY, headers=headers)
        assert failed.status_code == 500 and state(http) is None and get(http).status_code == 404
        engine.fail_after = 2
        assert "broken" in http.post(CHAT, json=BODY, headers=headers).text
        assert "broken" in get(http).text


def test_an_answer_that_is_not_streamed_keeps_nothing() -> None:
    with gated() as (wire, engine, http):
        with post(wire.address, body=BODY | {"stream": False}):
            until(lambda: engine.busy)
        until(lambda: engine.cancelled)  # its client left
        until(lambda: state(http) is None)
        engine.allow()
        assert http.post(CHAT, json=BODY | {"stream": False}, headers={"x-conversation-id": "c"}).status_code == 200
        assert state(http) is None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completion", {"prompt": "Hi", "stream": True}),
        ("/v1/completions", {"prompt": "Hi", "stream": True}),
        ("/v1/responses", {"input": "Hi", "stream": True}),
        ("/v1/messages", {**BODY, "max_tokens": 10}),
        ("/infill", {"input_prefix": "a", "input_suffix": "b", "stream": True}),
        ("/api/chat", {"model": "fake", "messages": BODY["messages"]}),
        ("/api/generate", {"model": "fake", "prompt": "Hi"}),
    ],
)
def test_all_apis_have_resumable_streams(path: str, body: dict[str, Any]) -> None:
    with gated(allowed=10_000) as (_, _, http):
        response = http.post(path, json=body, headers={"x-conversation-id": "c"})
        again = get(http)
        assert response.status_code == 200 and again.content == response.content
        assert again.headers["content-type"] == response.headers["content-type"]


def test_a_reader_that_comes_before_the_first_token_gets_the_type() -> None:
    with gated() as (wire, engine, http):
        body = {"model": "fake", "messages": BODY["messages"]}
        with post(wire.address, path="/api/chat", body=body):
            until(lambda: state(http))
            with http.stream("GET", "/v1/stream", params={"conv_id": "c"}) as reader:
                assert reader.headers["content-type"] == "application/x-ndjson"
            engine.allow()


def test_rejected_requests() -> None:
    """llama-server's statuses and messages."""
    with gated(allowed=10_000) as (wire, _, http):
        for method in ("GET", "DELETE"):
            missing = http.request(method, "/v1/stream")
            assert missing.json()["error"] == {
                "code": 400,
                "message": "Missing conversation id in path",
                "type": "invalid_request_error",
            }
        assert get(http, "none").json()["error"] == {
            "code": 404,
            "message": "File Not Found",
            "type": "not_found_error",
        }
        http.post(CHAT, json=BODY, headers={"x-conversation-id": "c"})
        for wrong in ("x", "-1", "9" * 20, "9" * 5000):
            assert get(http, offset=wrong).json()["error"]["message"] == "Invalid 'from' offset"
        lookups: list[tuple[bytes, Any]] = [(b"{}", []), (b"[]", []), (b"7", []), (b'{"conversation_ids": "c"}', [])]
        for sent, expected in lookups:
            assert http.post("/v1/streams/lookup", content=sent).json() == expected
        ids = ["c", "c", 7, None, "", "none", "😀"]
        assert len(http.post("/v1/streams/lookup", json={"conversation_ids": ids}).json()) == 1
        for broken in (b"", b"{", b'{"conversation_ids": ["\\ud800"]}'):
            refused = http.post("/v1/streams/lookup", content=broken)
            error = refused.json()["error"]
            assert refused.status_code == 400 and error["message"].startswith("invalid body: ")
            assert error["type"] == "invalid_request_error" and len(error) == 2
        with post(wire.address, b"x" * 3000) as sock:
            assert read_answers(sock, 1)[0][0] == 400


def test_ids_are_bytes() -> None:
    """Slashes, colons, UTF-8, and bytes that are no text."""
    with gated(allowed=10_000) as (wire, _, http):
        for id in (b"c::org/model:Q8_0", "ä 😀".encode(), b"\xff\xfe", b"a&b=c#d%20"):
            with post(wire.address, id) as sock:
                read_some(sock, b"[DONE]")
            quoted = "".join(f"%{byte:02x}" for byte in id)
            assert text_of(http.get(f"/v1/stream?conv_id={quoted}&from=0").content) == ANSWER
        found = http.post("/v1/streams/lookup", json={"conversation_ids": ["c", "ä 😀"]}).json()
        assert [one["conversation_id"] for one in found] == ["c::org/model:Q8_0", "ä 😀"]


def test_streams_need_the_key() -> None:
    with gated(allowed=10_000, access=AccessRules(api_keys=(b"secret",))) as (_, _, http):
        key = {"authorization": "Bearer secret"}
        assert http.post(CHAT, json=BODY, headers=key | {"x-conversation-id": "c"}).status_code == 200
        refused = [
            get(http),
            http.delete("/v1/stream", params={"conv_id": "c"}),
            http.post("/v1/streams/lookup", json={"conversation_ids": ["c"]}),
            http.post(CHAT, json=BODY, headers={"x-conversation-id": "c"}),
        ]
        assert [response.status_code for response in refused] == [401] * 4
        assert text_of(get(http, headers=key).content) == ANSWER  # nothing was stopped or replaced


def test_a_lost_beginning_is_an_error() -> None:
    """A stream over its limit drops its oldest bytes. A slow reader of them is cut off."""
    with gated(allowed=2) as (wire, engine, http):
        wire.state.streams._stream_bytes = 1000
        with post(wire.address) as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            until(lambda: written(http))
            engine.allow()
            until(lambda: is_done(http))
        total = written(http)
        assert total > 1000
        lost = get(http, offset=total - 1001)
        assert lost.status_code == 400 and lost.json()["error"]["message"] == "Stream offset lost, please restart"
        assert get(http, offset=total - 1000).content.endswith(b"data: [DONE]\n\n")


def test_a_client_that_does_not_read_delays_nothing() -> None:
    """The answer is complete, and its slot free, although the client has read nothing."""
    engine = GatedEngine("x" * 30_000, allowed=100_000)
    with serving(engine) as wire, httpx.Client(base_url=wire.url, timeout=GUARD) as http, post(wire.address):
        until(lambda: is_done(http))
        assert not engine.busy and len(get(http, offset=written(http) - 10).content) == 10


def test_one_request_counts_once_at_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "llamado.server")
    path = f"POST {CHAT}"
    with gated(allowed=3, metrics=True) as (wire, engine, http):
        with post(wire.address) as sock:
            read_some(sock)
        until(lambda: state(http))
        assert path not in caplog.text
        assert http.get("/live/requests").json()["running"] == 1
        engine.allow()
        until(lambda: is_done(http))
        until(lambda: path in caplog.text)
        get(http)
        lines = [line for line in caplog.messages if path in line]
        assert len(lines) == 1 and f"{len(ANSWER.encode())} tokens" in lines[0] and "cancelled" not in lines[0]
        counts = http.get("/live/requests").json()
        assert (counts["running"], counts["cancelled"]) == (0, 0)
        assert http.get("/health").status_code == 200


def test_a_shutdown_waits_for_no_detached_answer() -> None:
    """A shutdown still waits for answers that a client reads."""
    with gated(allowed=3) as (wire, engine, _), post(wire.address, b"read") as read, contextlib.ExitStack() as stack:
        read_some(read)
        left = stack.enter_context(post(wire.address, b"left"))
        until(lambda: wire.state.streams.find(b"left"))
        stack.close()
        left.close()
        stream = wire.state.streams.find(b"left")
        assert stream is not None
        until(lambda: not stream.n_readers)
        wire.server.should_exit = True
        until(lambda: stream.is_stopped)
        engine.allow()
        read_some(read, b"[DONE]")


def test_an_idle_model_stays_asleep() -> None:
    """Reading, looking up and stopping streams neither wakes a model nor keeps it awake; a detached answer does."""
    with gated(allowed=3) as (wire, engine, http):
        entered: list[str] = []

        class IdleWatch:
            asleep = False

            @contextlib.asynccontextmanager
            async def awake(self) -> Any:
                entered.append("begins")
                yield
                entered.append("ends")

        wire.state.sleep = IdleWatch()  # type: ignore[assignment]
        with post(wire.address) as sock:
            read_some(sock)
        until(lambda: state(http))
        assert entered == ["begins"]
        engine.allow()
        until(lambda: entered == ["begins", "ends"])
        get(http)
        http.delete("/v1/stream", params={"conv_id": "c"})
        assert entered == ["begins", "ends"]


def test_without_room_requests_work_as_without_the_header() -> None:
    with gated(allowed=2) as (wire, engine, http):
        wire.state.streams._most_streams = 0
        with post(wire.address) as sock:
            read_some(sock)
            assert state(http) is None
        until(lambda: engine.cancelled)
