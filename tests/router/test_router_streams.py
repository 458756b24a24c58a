"""Resumable streams behind a router: each belongs to the process of a model."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from router_process import Running, Start, config, fake
from waiting import GUARD, until

sys.path.append(str(Path(__file__).parents[1] / "server"))

from fakes import ANSWER
from resumable import BODY, post, read_some, text_of

MODEL = str(Path(__file__).parent / "streaming_model.py")
ID = {"conv_id": "c"}


def streaming(file: Path, **more: Any) -> dict[str, Any]:
    """Return a model with resumable streams for a config.yaml. Its answers are complete once `file` exists."""
    return {"cmd": f"{sys.executable} {MODEL} ${{PORT}} {file}", "proxy": "http://127.0.0.1:${PORT}", **more}


def ask(router: Running, model: str, id: bytes = b"c", **more: Any) -> Any:
    url = urlsplit(router.url)
    return post((str(url.hostname), int(url.port or 0)), id, body=BODY | {"model": model} | more)


def states(router: Running, prefix: str = "") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = router.http.post(
        f"{prefix}/v1/streams/lookup", json={"conversation_ids": ["c", "none"]}
    ).json()
    return found


@pytest.mark.slow
def test_a_model_answers_on_without_its_client(start_router: Start, tmp_path: Path) -> None:
    """The model stays loaded until the answer ends; clients can read the stream meanwhile."""
    router = start_router(config({"a": streaming(tmp_path / "go", ttl=1), "b": streaming(tmp_path / "go")}))
    with ask(router, "a") as sock:
        read_some(sock)
    assert [state["is_done"] for state in states(router)] == [False]
    bodies: list[bytes] = []
    reading = threading.Thread(target=lambda: bodies.append(router.http.get("/v1/stream", params=ID).content))
    reading.start()
    assert router.running()["a"]["requests"] == 1  # its reader does not count
    (tmp_path / "go").touch()
    reading.join(GUARD)
    assert text_of(bodies[0]) == ANSWER
    until(lambda: router.running()["a"]["requests"] == 0)
    assert router.http.get("/v1/stream", params=ID | {"from": 7}).content == bodies[0][7:]
    until(lambda: "a" not in router.running())  # idle
    gone = router.http.get("/v1/stream", params=ID)
    assert gone.status_code == 404 and gone.json()["error"]["message"] == "File Not Found"
    assert states(router) == []


@pytest.mark.slow
def test_streams_are_stopped_and_replaced(
    start_router: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A request with the same id replaces the stream, even if it is for another model.

    A shutdown waits neither for detached answers nor for their readers.
    """
    router = start_router(config({"a": streaming(tmp_path / "go"), "b": streaming(tmp_path / "go-b")}))
    with ask(router, "a") as sock:
        read_some(sock)
    assert router.http.delete("/v1/stream", params=ID).status_code == 204
    assert states(router, "/upstream/a") == [] and router.http.get("/v1/stream", params=ID).status_code == 404
    until(lambda: router.running()["a"]["requests"] == 0)
    (tmp_path / "go").touch()
    with ask(router, "a") as sock:
        read_some(sock)
    until(lambda: states(router, "/upstream/a"))
    with ask(router, "b") as sock:
        until(lambda: not states(router, "/upstream/a"))
        read_some(sock)
        assert len(states(router)) == 1 and states(router) == states(router, "/upstream/b")
    for method in ("GET", "DELETE"):
        assert router.http.request(method, "/v1/stream").status_code == 400
        assert router.http.request(method, "/v1/stream", params={"conv_id": "none"}).status_code in (404, 204)
    assert router.http.post("/v1/streams/lookup", content=b"{").json() == []  # as llama-server's router
    access = router.server.access
    with router.http.stream("GET", "/v1/stream", params=ID) as reader:
        next(reader.iter_raw())
    router.server.should_exit = True
    until(lambda: access.draining and not access.n_running)
    assert "unfinished" not in caplog.text  # what is left at the end of the grace period


@pytest.mark.slow
def test_a_request_waits_for_its_model_without_its_client(start_router: Start, tmp_path: Path) -> None:
    """Its stream appears when the model is loaded; a stop removes it from the queue."""
    router = start_router(config({"a": fake("A", f"ready={tmp_path / 'ready'}", f"count={tmp_path / 'count'}")}))
    with ask(router, "a", steps=2) as replaced, ask(router, "a", b"other", steps=2) as stopped:
        until(lambda: router.status("a")["value"] == "loading")
        until(lambda: router.http.get("/v1/stream", params={"conv_id": "other"}).status_code == 503)
        until(lambda: router.http.get("/v1/stream", params=ID).status_code == 503)
        (waiting,) = states(router)
        assert (waiting["conversation_id"], waiting["total_bytes"], waiting["is_done"]) == ("c", 0, False)
        assert router.http.delete("/v1/stream", params={"conv_id": "other"}).status_code == 204
        assert b"cancelled by a stop" in read_some(stopped, b"}}")
        with ask(router, "a", steps=2):
            assert b"cancelled by a stop" in read_some(replaced, b"}}")
    assert router.http.get("/v1/stream", params={"conv_id": "other"}).status_code == 404
    (tmp_path / "ready").touch()
    count = tmp_path / "count"
    until(lambda: count.exists() and "request A" in count.read_text())
    until(lambda: router.running()["a"]["requests"] == 0)
    assert count.read_text().count("request A") == 1


@pytest.mark.slow
def test_a_stream_ends_with_its_process(start_router: Start, tmp_path: Path) -> None:
    router = start_router(config({"a": streaming(tmp_path / "go")}))
    with ask(router, "a") as sock:
        read_some(sock)
        with router.http.stream("GET", "/v1/stream", params=ID) as reader:
            parts = reader.iter_raw()
            next(parts)
            os.kill(router.running()["a"]["pid"], signal.SIGKILL)
            assert b"ended in the middle" in b"".join(parts)
        assert b"ended in the middle" in read_some(sock, b"}}")
    until(lambda: router.running().get("a", {}).get("restarts") and router.status("a")["value"] == "loaded")
    assert router.http.get("/v1/stream", params=ID).status_code == 404


@pytest.mark.slow
def test_models_without_resumable_streams(start_router: Start, tmp_path: Path) -> None:
    """DELETE closes the connection to the model, which has no other way to stop an answer."""
    router = start_router(config({"a": fake("A")}))
    (tmp_path / "seen").write_bytes(b"")

    def cancelled() -> int:
        count: int = router.http.get("/upstream/a/state").json()["cancelled"]
        return count

    with ask(router, "a", steps=9, seen=str(tmp_path / "seen")) as sock:
        read_some(sock)
    assert cancelled() == 0
    assert router.http.delete("/v1/stream", params=ID).status_code == 204
    until(lambda: cancelled() == 1)
    with ask(router, "a", b"", steps=9, seen=str(tmp_path / "seen")) as sock:
        read_some(sock)
    until(lambda: cancelled() == 2)  # without the header
