"""Ollama's API on a router: lists, names with tags, keep_alive, downloading and deleting."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import gguf
import pytest
from router_process import Start, config, fake
from tiny_models import make_llama
from waiting import GUARD, until

sys.path += [str(Path(__file__).parents[1] / room) for room in ("gguf", "server")]
import stand_in_sites as loopback
from ollama_documents import PS, SHOW, STATUS, TAGS, problems

from llamado.gguf.errors import SourceError
from llamado.router.downloads import Downloads

HELLO = [{"role": "user", "content": "Hello!"}]


def licensed(writer: gguf.GGUFWriter) -> None:
    writer.add_license("apache-2.0")
    writer.add_chat_template("{% for m in messages %}<think>{{ m.content }}</think>{% endfor %}")


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_models_are_listed_and_shown_without_being_loaded(start_router: Start, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    make_llama(tmp_path / "m" / "small.gguf", edit=licensed)
    router = start_router(None, "--models-dir", str(tmp_path / "m"))
    tags = router.http.get("/api/tags").json()
    assert problems(tags, TAGS) == []
    (entry,) = tags["models"]
    assert entry["name"] == "small:latest" and entry["size"] == (tmp_path / "m" / "small.gguf").stat().st_size
    assert entry["details"]["family"] == "llama" and entry["details"]["quantization_level"] == "Q4_0"
    assert len(entry["digest"]) == 64
    for name in ("small", "small:latest"):
        told = router.http.post("/api/show", json={"model": name}).json()
        assert problems(told, SHOW) == []
    assert told["license"] == "apache-2.0" and "<think>" in told["template"] and "thinking" in told["capabilities"]
    assert told["model_info"]["llama.block_count"] == 2 and told["model_info"]["tokenizer.ggml.tokens"] == []
    told = router.http.post("/api/show", json={"model": "small", "verbose": True}).json()
    assert len(told["model_info"]["tokenizer.ggml.tokens"]) == 320 and problems(told, SHOW) == []
    assert {tensor["name"]: tensor["shape"] for tensor in told["tensors"]}["blk.0.ffn_up.weight"] == [128, 256]
    assert router.running() == {} and router.http.get("/api/ps").json() == {"models": []}


@pytest.mark.slow
def test_requests_go_to_the_model_they_name(start_router: Start) -> None:
    router = start_router(config({"a": fake("A"), "b:7b": fake("B"), "d:latest": fake("D")}))
    for name, path, answers in (
        ("a", "chat", "A"), ("a:latest", "generate", "A"), ("b:7b", "embed", "B"), ("b:7b", "embeddings", "B"),
        ("d:latest", "chat", "D"),
    ):  # fmt: skip
        body = {"model": name, "messages": HELLO, "prompt": "x", "input": "x"}
        assert router.http.post(f"/api/{path}", json=body).json()["name"] == answers
    for name, status in (("c", 404), ("b", 404), ("", 400)):
        answer = router.http.post("/api/chat", json={"model": name, "messages": HELLO})
        assert answer.status_code == status and isinstance(answer.json()["error"], str)
    assert router.http.post("/api/chat", json={"model": "c"}).json() == {"error": "model 'c' not found"}
    assert router.http.post("/api/show", json={"model": "c"}).status_code == 404
    assert router.http.post("/api/create", json={"model": "c"}).status_code == 501
    assert router.http.get("/api/chat").json() == {"error": "File Not Found"}
    assert router.http.post("/api/tags", json={"model": "a"}).status_code == 404
    assert router.http.get("/api/version").json()["version"]


@pytest.mark.slow
def test_keep_alive(start_router: Start) -> None:
    router = start_router(config({"a": fake("A"), "b": fake("B")}))

    def loaded() -> dict[str, float]:
        """Return the seconds until each loaded model is unloaded."""
        told = router.http.get("/api/ps").json()
        assert problems(told, PS) == []
        return {
            entry["name"]: (datetime.fromisoformat(entry["expires_at"]) - datetime.now(UTC)).total_seconds()
            for entry in told["models"]
        }

    def chat(**body: Any) -> dict[str, Any]:
        answer: dict[str, Any] = router.http.post("/api/chat", json={"model": "a", "messages": HELLO, **body}).json()
        return answer

    chat()
    assert loaded().keys() == {"a:latest"} and loaded()["a:latest"] > 1e9
    chat(keep_alive="10m")
    assert 590 < loaded()["a:latest"] <= 600
    chat(keep_alive=-1)
    assert loaded()["a:latest"] > 1e9
    told = chat(messages=[], keep_alive=0)
    assert told["done_reason"] == "unload" and told["message"] == {"role": "assistant", "content": ""}
    assert loaded() == {}
    router.http.post("/api/generate", json={"model": "b", "prompt": "x", "keep_alive": 0})
    until(lambda: not router.running())
    chat(keep_alive=0.2)
    until(lambda: not router.running())
    assert "0.2 s without a request: unloaded" in router.log.read_text()
    assert chat(keep_alive="soon") == {"error": "keep_alive: invalid duration 'soon'"}


@pytest.mark.slow
def test_a_cut_stream_of_lines_ends_with_an_error(start_router: Start) -> None:
    router = start_router(config({"a": fake("A")}))
    body = {"model": "a", "messages": HELLO, "stream": 5, "die": "2", "type": "application/x-ndjson"}
    last = router.http.post("/api/chat", json=body).text.splitlines()[-1]
    assert "ended in the middle of its answer" in json.loads(last)["error"]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[loopback.Site]:
    """Serve a hub with one model."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    model = make_llama(tmp_path / "one.gguf").read_bytes()
    with loopback.serve(loopback.Site(headers={"ETag": f'"{"e" * 40}"'})) as site:
        loopback.add_repo(site, "me/good", {"good-Q8_0.gguf": model})
        monkeypatch.setenv("HF_ENDPOINT", site.url)
        yield site


def test_pull_downloads_and_delete_removes_a_model(start_router: Start, hub: loopback.Site) -> None:
    router = start_router(None)
    answer = router.http.post("/api/pull", json={"model": "hf.co/me/good:Q8_0"})
    assert answer.headers["content-type"] == "application/x-ndjson"
    told = lines(answer.text)
    assert [problems(step, STATUS) for step in told] == [[]] * len(told)
    assert told[0] == {"status": "pulling manifest"} and told[-1] == {"status": "success"}
    steps = [step for step in told if "total" in step]
    assert steps and steps[-1]["completed"] == steps[-1]["total"]
    names = [model["name"] for model in router.http.get("/api/tags").json()["models"]]
    assert names == ["me/good:Q8_0"]
    again = router.http.post("/api/pull", json={"model": "me/good:Q8_0", "stream": False})
    assert again.json() == {"status": "success"}
    removed = router.http.request("DELETE", "/api/delete", json={"model": "me/good:Q8_0"})
    assert removed.status_code == 200 and removed.content == b""
    assert router.http.get("/api/tags").json() == {"models": []}
    assert router.http.request("DELETE", "/api/delete", json={"model": "me/good:Q8_0"}).status_code == 404


def test_a_pull_that_fails_at_once_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure is reported even if it happened before the next update is awaited."""

    def fetch_model(*_: object, **__: object) -> Path:
        raise SourceError("no access")

    async def fetch() -> object:
        ended: asyncio.Queue[str] = asyncio.Queue()
        downloads = Downloads(lambda event, *_: ended.put_nowait(event), lambda: None)
        downloads.start("me/none")
        updates = downloads.join("me/none")
        while await ended.get() != "download_failed":
            pass
        assert not downloads.progress
        return updates.get_nowait()

    monkeypatch.setattr("llamado.engine.supported.fetch_model", fetch_model)
    assert asyncio.run(fetch()) == "no access"


def test_unknown_models_cannot_be_pulled(start_router: Start, hub: loopback.Site) -> None:
    router = start_router(None)
    answer = router.http.post("/api/pull", json={"model": "llama3.2"})
    assert answer.status_code == 500 and "user/model" in answer.json()["error"]
    told = lines(router.http.post("/api/pull", json={"model": "me/none"}).text)
    assert told[0] == {"status": "pulling manifest"} and "no access to me/none" in told[-1]["error"]
    answer = router.http.post("/api/pull", json={"model": "me/none", "stream": False})
    assert answer.status_code == 500 and "no access" in answer.json()["error"]


def slow_downloads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[threading.Event, threading.Event]:
    """Replace downloads by one of several minutes. Return the events of its start and its end."""
    began, stopped = threading.Event(), threading.Event()

    def fetch_model(source: object, options: object, *, progress: Any, warn: Any) -> Path:
        began.set()
        try:
            for done in range(100_000):
                progress(done, 100_000)
                time.sleep(0.005)
        finally:
            stopped.set()
        return tmp_path

    monkeypatch.setattr("llamado.engine.supported.fetch_model", fetch_model)
    return began, stopped


def test_a_pull_ends_when_all_clients_disconnect(
    start_router: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, stopped = slow_downloads(monkeypatch, tmp_path)
    router = start_router(None)
    with (
        router.http.stream("POST", "/api/pull", json={"model": "me/slow"}) as one,
        router.http.stream("POST", "/api/pull", json={"model": "me/slow"}) as other,
    ):
        first, second = one.iter_lines(), other.iter_lines()
        assert all("completed" in json.loads([next(each), next(each)][1]) for each in (first, second))
        one.close()
        assert not stopped.wait(0.3) and "completed" in json.loads(next(second))  # the other client still waits
    assert stopped.wait(GUARD)


@pytest.mark.slow
def test_a_pull_without_a_stream_ends_with_its_client(
    start_router: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    began, stopped = slow_downloads(monkeypatch, tmp_path)
    url = start_router(None).http.base_url
    assert url.port is not None
    body = json.dumps({"model": "me/slow", "stream": False}).encode()
    with socket.create_connection((url.host, url.port)) as client:
        head = f"POST /api/pull HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        assert began.wait(GUARD) and not stopped.is_set()
    assert stopped.wait(GUARD)


def test_ollama_clients_detect_the_server(start_router: Start) -> None:
    router = start_router(config({"a": fake("A")}))
    answer = router.http.get("/", headers={"Accept": "application/json"})
    assert answer.status_code == 200 and answer.text == "Ollama is running"
    assert router.http.head("/", headers={"Accept": "application/json"}).status_code == 200
    assert "<html" in router.http.get("/", headers={"Accept": "text/html,*/*;q=0.8"}).text
    assert "<html" in router.http.get("/").text
