"""A router in front of fake models: routing, swapping, crashes and restarts, streams, limits."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import httpx
import pytest
from router_process import Running, Start, alive, config, fake
from tiers import first_of
from waiting import GUARD, until

from llamado.http import bodies
from llamado.http.bodies import MAX_MEDIA_BODY
from llamado.http.json_body import parse_json
from llamado.router.fleet import Lease
from llamado.router.proxy import ProxiedRequest


async def parse_copy(body: bytes) -> Any:
    """Parse a copy of a body, which is not kept."""
    return parse_json(bytes(body))


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]


@pytest.mark.slow
def test_requests_go_to_the_model_they_name(start_router: Start) -> None:
    models = {"a": fake("A"), "b": fake("B", aliases=["bee", "x/y:z"]), "c": fake("C", unlisted=True)}
    router = start_router(config(models))
    assert router.http.get("/health").json() == {"status": "ok"}
    assert [router.ask(name).json()["name"] for name in ("a", "b", "bee", "x/y:z", "c")] == ["A", "B", "B", "B", "C"]
    listed = {m["id"]: m for m in router.http.get("/v1/models").json()["data"]}
    assert set(listed) == {"a", "b"}
    assert listed["a"]["status"]["value"] == "loaded" and listed["a"]["meta"] == {"n_params": 7}
    assert router.http.get("/props", params={"model": "bee"}).json()["name"] == "B"
    assert router.http.get("/props").json()["role"] == "router"
    assert router.http.get("/upstream/x/y:z/state", params={"q": "1"}).json()["name"] == "B"
    assert router.http.get("/upstream/x%2Fy%3Az/state").json()["name"] == "B"
    moved = router.http.get("/upstream/x%2Fy:z?k=v")
    assert moved.status_code == 301 and moved.headers["location"] == "/upstream/x%2Fy:z/?k=v"
    assert router.http.post("/upstream/x%2Fy:z").status_code == 308  # with its body
    assert {e["model"]: e["state"] for e in router.running().values()} == dict.fromkeys("abc", "ready")


def test_bodies_and_headers_pass_unchanged(start_router: Start) -> None:
    router = start_router(config({"a": fake("A")}))
    body = b'{ "model":"a",\n "echo" : true, "u":"\xc3\xa9\\u00e9", "n": 1.0e0 }'
    headers = {"X-Mine": "1", "Connection": "x-hop", "X-Hop": "2", "X-Forwarded-For": "10.0.0.1", "Authorization": "k"}
    answer = router.http.post("/v1/completions?a=%20b", content=body, headers=headers).json()
    assert answer["body"].encode("latin-1") == body
    assert answer["first"] == "POST /v1/completions?a=%20b HTTP/1.1"
    got = answer["headers"]
    assert got["x-mine"] == "1" and "x-hop" not in got and got["authorization"] == "k"
    assert got["x-forwarded-for"] == "10.0.0.1, 127.0.0.1" and got["x-forwarded-proto"] == "http"
    assert got["x-forwarded-host"] == router.url.removeprefix("http://") and got["host"].startswith("127.0.0.1:")
    assert "accept-encoding" not in got


PICTURE = "data:image/png;base64," + "iVBORw0K" * 40_000


def test_pictures_and_sounds_pass_unchanged(start_router: Start) -> None:
    router = start_router(config({"a": fake("A"), "b": fake("B")}))
    content = [{"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": PICTURE}}]
    chat = json.dumps({"messages": [{"role": "user", "content": content}], "echo": True, "model": "b"}, indent=1)
    answer = router.http.post("/v1/chat/completions", content=chat).json()
    assert (answer["name"], answer["body"]) == ("B", chat)
    for path in ("/v1/audio/transcriptions", "/v1/audio/transcriptions?x=1"):
        sound = ("a.wav", bytes(range(256)) * 1000)
        request = router.http.build_request("POST", path, data={"model": "a", "language": "es"}, files={"file": sound})
        form = request.read()
        answer = router.http.send(request).json()
        assert answer["name"] == "A" and answer["body"].encode("latin-1") == form
        assert answer["first"] == f"POST {path} HTTP/1.1"
        assert answer["headers"]["content-type"] == request.headers["content-type"]
    refused = router.http.post("/v1/audio/transcriptions", data={"model": "none"}, files={"file": sound})
    assert refused.status_code == 400 and "'none' not found" in refused.json()["error"]["message"]


def test_media_are_listed_before_a_model_is_loaded(start_router: Start, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "eye"
    folder.mkdir(parents=True)
    (folder / "m.gguf").touch()
    writer = gguf.GGUFWriter(folder / "mmproj.gguf", "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    router = start_router(None, "--models-dir", str(folder.parent))
    listed = {one["id"]: one for one in router.http.get("/v1/models").json()["data"]}
    assert listed["eye"]["architecture"] == {"input_modalities": ["text", "image"], "output_modalities": ["text"]}
    assert listed["eye"]["status"]["value"] == "unloaded"


def test_changes_of_bodies_keep_pictures(start_router: Start) -> None:
    router = start_router(config({"a": fake("A", filters={"stripParams": "top_k"})}))
    content = [{"type": "image_url", "image_url": {"url": PICTURE}}]
    answer = router.ask("a", echo=True, top_k=1, messages=[{"role": "user", "content": content}]).json()
    assert json.loads(answer["body"])["messages"][0]["content"] == content and "top_k" not in answer["body"]


def test_configured_changes_of_bodies(start_router: Start) -> None:
    filters = {
        "stripParams": "temperature, top_k,model",
        "setParams": {"seed": 7, "model": "no"},
        "setParamsByID": {"${MODEL_ID}:hot": {"t": 2}},
    }
    router = start_router(config({"a": fake("A", useModelName="org/A", filters=filters)}))
    for name, more in (("a", {}), ("a:hot", {"t": 2})):
        answer = router.ask(name, echo=True, temperature=1, top_k=3, keep="é").json()
        assert (
            json.loads(answer["body"].encode("latin-1"))
            == {"model": "org/A", "echo": True, "keep": "é", "seed": 7} | more
        )


@pytest.mark.slow
def test_errors_are_llama_servers(start_router: Start) -> None:
    router = start_router(config({"a": fake("A")}), "--no-models-autoload")

    def error(response: httpx.Response) -> tuple[int, str]:
        told = response.json()["error"]
        assert told["code"] == response.status_code
        return response.status_code, told["message"]

    post = router.http.post
    missing = (400, "model name is missing from the request")
    for body in ({}, {"model": 5}, {"model": None}, {"model": ""}, [], "x"):
        assert error(post("/v1/chat/completions", json=body)) == missing
    assert error(post("/tokenize", json={"model": "no"})) == (400, "model 'no' not found")
    assert error(router.http.get("/slots")) == missing
    assert error(router.http.get("/metrics?model=no")) == (400, "model 'no' not found")
    assert error(post("/completion", json={"model": "a"})) == (400, "model is not loaded")
    assert post("/completion?autoload=1", json={"model": "a"}).json()["name"] == "A"
    assert error(post("/models/load", json={"model": "a"})) == (400, "model is already running")
    assert error(post("/models/load", json={"model": "no"}))[0] == 404
    assert error(post("/models/unload", json={"model": "no"})) == (400, "model is not found")
    assert error(router.http.delete("/models")) == (400, "model must be a non-empty string")
    assert error(router.http.delete("/models?model=a"))[0] == 500
    assert error(post("/models", json={"model": "no quant of this"}))[0] == 400
    assert error(post("/models", json={"model": "a"})) == (400, "model 'a' already exists")
    assert error(router.http.get("/nope"))[0] == error(router.http.put("/models"))[0] == 404


@pytest.mark.slow
def test_hostile_requests(start_router: Start) -> None:
    """Requests beyond the limits are rejected, and the router keeps serving."""
    router = start_router(config({"a": fake("A")}))
    post = router.http.post
    assert post("/v1/completions", content=b"x" * (MAX_MEDIA_BODY + 1)).status_code == 413
    # Unknown length: rejected as soon as it is too long, before it is complete.
    with socket.create_connection(("127.0.0.1", int(router.url.rpartition(":")[2])), 30) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n")
        raw.sendall(b"%x\r\n" % (2 * MAX_MEDIA_BODY) + b"x" * (MAX_MEDIA_BODY + 1))
        assert raw.recv(1000).startswith(b"HTTP/1.1 413 ")
    assert post("/v1/completions", json={"model": "m" * 10**6}).status_code == 400
    assert post("/v1/completions", content=b"[" * 10**6).status_code == 400
    assert post("/v1/completions", content=b'{"model":"a","x":' + b"[" * 5000 + b"]" * 5000 + b"}").status_code == 400
    for content in (b"", b"{bad", b'{"model":"\xff"}', b'{"model":"\\ud800"}', b"null", b"\x00"):
        assert post("/v1/completions", content=content).status_code == 400
    for name in ("../a", "..%2fa", "a\r\nx: y", "/etc/passwd", "a/../../b", "\x00", "${PORT}"):
        assert post("/v1/completions", json={"model": name}).status_code == 400
    for path in ("/upstream/../../etc/passwd", "/upstream/", "/upstream//", "/upstream/%00/x"):
        assert router.http.get(path).status_code in (400, 404)
    # The path after a model's name is forwarded unchanged, and only to that model's process.
    assert router.http.get("/upstream/a/%2e%2e/%2e%2e/state").json()["name"] == "A"
    with socket.create_connection(("127.0.0.1", int(router.url.rpartition(":")[2]))) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\n\r\nab")
    assert post("/v1/completions", json={"model": "a"}).json()["name"] == "A"


@pytest.mark.slow
def test_keys_and_prefix(start_router: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = config({"a": fake("A")}, apiKeys=["one", "${env.SECOND_KEY}"])
    monkeypatch.setenv("SECOND_KEY", "two")
    router = start_router(setup, "--api-prefix", "/llm", "--api-key", "three")
    assert router.http.get("/llm/health").status_code == 200
    assert router.http.get("/health").status_code == 404
    body = {"model": "a", "echo": True}
    assert router.http.post("/llm/completion", json=body).status_code == 401
    for headers in ({"Authorization": "Bearer one"}, {"X-Api-Key": "two"}, {"Authorization": "bearer three"}):
        answer = router.http.post("/llm/completion", json=body, headers=headers | {"Origin": "http://localhost:1"})
        # The models' processes do not see the router's keys.
        assert not {"authorization", "x-api-key"} & set(answer.json()["headers"])
        assert answer.json()["first"].startswith("POST /completion ")
        assert answer.headers["access-control-allow-origin"] == "http://localhost:1"
    assert router.http.options("/llm/completion").status_code == 200
    router.http.headers["X-Api-Key"] = "one"
    router.http.base_url = httpx.URL(router.url + "/llm")


@pytest.mark.slow
def test_parts_of_a_stream_are_not_held_back(start_router: Start, tmp_path: Path) -> None:
    """The model sends a part after the one before has arrived: a router that buffers would stop the stream."""
    router = start_router(config({"a": fake("A")}))
    router.ask("a")
    seen = tmp_path / "seen"
    seen.touch()
    body = {"model": "a", "stream": 20, "seen": str(seen)}
    with router.http.stream("POST", "/v1/completions", json=body) as response, seen.open("ab", buffering=0) as arrived:
        assert response.headers["content-type"] == "text/event-stream"
        for part in response.iter_raw():
            arrived.write(b"." * len(events(part.decode())))
    assert seen.stat().st_size == 20


@pytest.mark.slow
def test_disconnecting_cancels_at_once(start_router: Start, tmp_path: Path) -> None:
    router = start_router(config({"a": fake("A"), "b": fake("B", f"ready={tmp_path / 'ready'}")}))

    def state() -> dict[str, Any]:
        found: dict[str, Any] = router.http.get("/upstream/a/state").json()
        return found

    def hang_up(model: str, asked: Callable[[], object]) -> None:
        """Send a slow request to a model, and disconnect once it has arrived."""
        body = json.dumps({"model": model, "delay": 600}).encode()
        with socket.create_connection(("127.0.0.1", int(router.url.rpartition(":")[2]))) as sock:
            sock.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
            )
            until(asked)

    router.ask("a")
    with router.http.stream("POST", "/v1/completions", json={"model": "a", "stream": 1000, "delay": 0.05}) as response:
        next(response.iter_raw())
    until(lambda: state()["active"] == 0)
    hang_up("a", lambda: state()["active"] == 1)
    hang_up("b", lambda: router.status("b")["value"] == "loading")  # waiting requests are cancelled, too
    until(lambda: state()["active"] == 0)
    assert state()["cancelled"] == 2
    (tmp_path / "ready").touch()
    until(lambda: router.running()["a"]["requests"] == 0)
    until(lambda: router.status("b")["value"] == "loaded")
    assert router.http.get("/upstream/b/state").json()["requests"] == 0


@pytest.mark.slow
def test_slow_readers_slow_the_model_instead_of_filling_memory(start_router: Start) -> None:
    router = start_router(config({"a": fake("A")}))
    router.ask("a")
    with router.http.stream("POST", "/v1/completions", json={"model": "a", "big": 40_000_000}) as response:
        time.sleep(0.2)
        assert httpx.get(f"{router.url}/upstream/a/state").json()["active"] == 1  # the model is blocked in writing
        (instance,) = router.server.router.fleet.instances.values()
        assert max(connection._size for connection in instance.child.pool._all) < 2**20
        assert sum(len(part) for part in response.iter_raw()) > 40_000_000


@pytest.mark.slow
def test_the_least_recently_used_makes_room(start_router: Start) -> None:
    models = {name: fake(name.upper()) for name in "abc"}
    router = start_router(config(models), "--models-max", "2")
    for name in "abac":
        assert router.ask(name).json()["name"] == name.upper()
    assert set(router.running()) == {"a", "c"}
    assert router.status("b") == {"value": "unloaded", "args": router.status("b")["args"]}
    assert router.http.post("/models/load", json={"model": "b"}).json() == {"success": True}
    until(lambda: router.status("b")["value"] == "loaded")
    until(lambda: set(router.running()) == {"b", "c"})


@pytest.mark.slow
def test_a_busy_model_finishes_before_it_is_swapped(start_router: Start) -> None:
    router = start_router(config({"a": fake("A"), "b": fake("B")}), "--models-max", "1")
    router.ask("a")
    with ThreadPoolExecutor() as pool:
        first = pool.submit(lambda: events(router.ask("a", stream=10, delay=0.05).text))
        until(lambda: router.running()["a"]["requests"])
        assert router.ask("b").json()["name"] == "B"
        assert len(first.result()) == 10 and not any("error" in e for e in first.result())
    assert set(router.running()) == {"b"}


@pytest.mark.slow
def test_a_killed_model_restarts_and_answers_its_requests(start_router: Start, tmp_path: Path) -> None:
    router = start_router(config({"a": fake("A")}))
    router.ask("a")
    pid = router.running()["a"]["pid"]
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(router.ask, "a", delay=0.3) for _ in range(5)]
        until(lambda: router.running()["a"]["requests"] == 5)
        os.kill(pid, signal.SIGKILL)
        answers = [one.result() for one in waiting]
    assert {(answer.status_code, answer.json()["name"]) for answer in answers} == {(200, "A")}
    assert pid not in {answer.json()["pid"] for answer in answers}
    # A request whose process dies once is answered by the next process.
    assert router.ask("a", die="before", once=str(tmp_path / "once")).json()["name"] == "A"
    # The model is restarted even without waiting requests.
    os.kill(router.running()["a"]["pid"], signal.SIGKILL)
    until(lambda: router.status("a")["value"] == "loaded" and router.running().get("a", {}).get("restarts") == 3)


@pytest.mark.slow
def test_a_cut_stream_ends_with_an_error(start_router: Start) -> None:
    router = start_router(config({"a": fake("A")}))
    told = events(router.ask("a", stream=10, delay=0.01, die="3").text)
    assert [e["i"] for e in told[:3]] == [0, 1, 2] and len(told) == 4
    assert told[3]["error"]["type"] == "server_error" and "middle of its answer" in told[3]["error"]["message"]
    with pytest.raises(httpx.RemoteProtocolError):
        # Other bodies end without their last chunk, which the client notices.
        router.ask("a", stream=10, delay=0.01, die="3", type="text/plain")


def requests_of(count: Path) -> int:
    """Return the number of requests that all processes of the fake models got."""
    return sum(line.startswith("request") for line in count.read_text().splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("name", first_of(["SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT"]))
def test_a_request_whose_process_crashed_is_not_sent_again(start_router: Start, tmp_path: Path, name: str) -> None:
    count = tmp_path / "count"
    router = start_router(config({"a": fake("A", f"count={count}")}))
    router.ask("a")
    for asked in (1, 2):  # on a pooled connection and on a new one
        answer = router.ask("a", die="before", signal=name)
        assert answer.status_code == 502 and f"crashed ({name})" in answer.json()["error"]["message"]
        assert requests_of(count) == 1 + asked
    assert router.ask("a").json()["name"] == "A"


@pytest.mark.slow
def test_a_crash_noticed_late_is_not_retried(
    start_router: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the connection is lost before the exit is noticed, the request is not sent again either."""
    real = ProxiedRequest._wait_for_exit
    leases: list[Lease] = []

    async def wait_from_the_second_on(request: ProxiedRequest, lease: Lease) -> None:
        if leases:
            await real(request, lease)
        leases.append(lease)

    monkeypatch.setattr(ProxiedRequest, "_wait_for_exit", wait_from_the_second_on)
    count = tmp_path / "count"
    router = start_router(config({"a": fake("A", f"count={count}")}))
    answer = router.ask("a", die="before", signal="SIGSEGV")
    assert answer.status_code == 502 and "crashed (SIGSEGV)" in answer.json()["error"]["message"]
    assert requests_of(count) == 1


@pytest.mark.slow
def test_a_crash_fails_all_running_requests(start_router: Start, tmp_path: Path) -> None:
    """Running requests may have caused the crash and fail; waiting ones are answered by the next process."""
    count = tmp_path / "count"
    router = start_router(config({"a": fake("A", "ready=0.5", f"count={count}")}))
    pid = router.ask("a").json()["pid"]
    with ThreadPoolExecutor() as pool:
        under_way = [pool.submit(router.ask, "a", delay=60) for _ in range(3)]
        until(lambda: requests_of(count) == 4)
        assert router.ask("a", die="before", signal="SIGSEGV").status_code == 502
        until(lambda: router.running().get("a", {}).get("pid") not in (None, 0, pid))
        waiting = [pool.submit(router.ask, "a") for _ in range(3)]
        for one in under_way:
            answer = one.result()
            assert answer.status_code == 502 and "crashed (SIGSEGV)" in answer.json()["error"]["message"]
        for one in waiting:
            assert one.result().status_code == 200 and one.result().json()["pid"] != pid
    assert requests_of(count) == 8


def test_a_response_may_end_with_its_connection(start_router: Start) -> None:
    router = start_router(config({"a": fake("A")}))
    answer = router.ask("a", unframed=True)
    assert (answer.status_code, answer.text) == (200, "until the end")


@pytest.mark.slow
def test_a_request_whose_process_is_killed_is_sent_once_more(start_router: Start, tmp_path: Path) -> None:
    count = tmp_path / "count"
    router = start_router(config({"a": fake("A", f"count={count}")}))
    answer = router.ask("a", die="before")
    assert answer.status_code == 502 and "closed 2 times" in answer.json()["error"]["message"]
    assert requests_of(count) == 2
    assert router.ask("a").json()["name"] == "A"


@pytest.mark.slow
def test_a_model_that_fails_to_load(start_router: Start, tmp_path: Path) -> None:
    count = tmp_path / "count"
    broken = {
        "a": fake("A", "fail=3", f"count={count}"),
        "b": fake("B"),
        "c": {"cmd": "/no/such", "proxy": "http://x:1"},
    }
    router = start_router(config(broken))
    answer = router.ask("a")
    assert answer.status_code == 500 and answer.json()["error"]["message"] == "model name=a failed to load"
    assert answer.json()["error"]["reason"] == "exit code 3: error: made to fail"
    for _ in range(20):
        assert router.ask("a").status_code == 500
    assert len(count.read_text().splitlines()) < 5  # not started once per request
    status = router.status("a")
    assert (status["value"], status["failed"], status["exit_code"]) == ("unloaded", True, 3)
    assert router.ask("c").status_code == 500 and "No such file" in router.status("c")["reason"]
    assert router.ask("b").json()["name"] == "B"


@pytest.mark.slow
def test_another_process_on_the_port_does_not_count_as_ready(start_router: Start) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(100)
        port = other.getsockname()[1]
        entry = fake("A") | {"cmd": fake("A")["cmd"].replace("${PORT}", str(port)), "proxy": f"http://127.0.0.1:{port}"}
        router = start_router({"models": {"a": entry}})
        answer = router.ask("a")
    assert answer.status_code == 500 and "another process listens" in answer.json()["error"]["reason"]


@pytest.mark.slow
def test_unloading_waits_and_force_kills(start_router: Start) -> None:
    left = {"cmd": f"sh -c 'setsid -f {fake('L')['cmd']}; sleep 100'"}
    router = start_router(config({"a": fake("A", "stubborn"), "b": fake("B", "ready=600"), "c": fake("L") | left}))
    router.ask("a")
    daemon = router.ask("c").json()["pid"]
    pid = router.running()["a"]["pid"]
    os.kill(pid, signal.SIGTERM)
    assert router.ask("a").json()["pid"] == pid
    loading = threading.Thread(target=router.ask, args=("b",))
    loading.start()
    until(lambda: router.status("b")["value"] == "loading" and "progress" in router.status("b"))
    assert router.http.post("/models/unload", json={"model": "b"}).status_code == 200
    loading.join()
    until(lambda: "b" not in router.running())
    assert router.http.get("/unload").text == "OK"  # waits out the stop timeout
    assert not alive(pid) and not alive(daemon) and router.running() == {}
    assert router.status("a")["value"] == "unloaded" and "failed" not in router.status("a")


@pytest.mark.slow
def test_killing_the_router_ends_all_processes(router_process: Start, tmp_path: Path) -> None:
    """This includes processes started by a shell, detached ones, and loading ones."""
    shell = f"sh -c '{fake('S')['cmd']} & wait'"
    left = f"setsid -f {fake('L')['cmd']}"
    models = {
        "plain": fake("P"),
        "shell": fake("S") | {"cmd": shell},
        "left": fake("L") | {"cmd": f"sh -c '{left}; sleep 100'"},
        "loading": fake("D", "ready=600"),
    }
    router = router_process(config(models))
    pids = [router.ask("plain").json()["pid"]]
    # Killing their watchdog does not save them.
    (watchdog,) = [pid for pid in children(router.process.pid) if "watchdog.py" in command_line(pid)]
    os.kill(watchdog, signal.SIGKILL)
    pids += [router.ask(name).json()["pid"] for name in ("shell", "left")]
    asking = threading.Thread(target=ask_dying_router, args=(router, "loading"), daemon=True)
    asking.start()
    until(lambda: router.running().get("loading", {}).get("pid"))
    pids += [entry["pid"] for entry in router.running().values()]
    assert all(alive(pid) for pid in pids)
    router.process.kill()
    router.process.wait()
    for pid in pids:
        until(lambda pid=pid: not alive(pid))
    until(lambda: not any(tmp_path.glob("llamado-*")))


def ask_dying_router(router: Running, model: str, **body: Any) -> None:
    """Send a request whose router exits."""
    with contextlib.suppress(httpx.HTTPError):
        assert router.ask(model, **body).status_code == 503


def children(pid: int) -> list[int]:
    found = []
    for path in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (path / "children").read_text().split()]
    return found


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


@pytest.mark.slow
def test_groups(start_router: Start) -> None:
    models = {name: fake(name) for name in ("a1", "a2", "b1", "b2", "p", "d1", "d2")}
    groups = {
        "swaps": {"swap": True, "exclusive": False, "members": ["a1", "a2"]},
        "together": {"swap": False, "exclusive": True, "members": ["b1", "b2"]},
        "stays": {"swap": False, "exclusive": False, "persistent": True, "members": ["p"]},
    }
    router = start_router({"startPort": config(models)["startPort"], "models": models, "groups": groups})

    def then(name: str) -> set[str]:
        assert router.ask(name).json()["name"] == name
        return set(router.running())

    assert then("p") == {"p"}
    assert then("a1") == {"p", "a1"}
    assert then("a2") == {"p", "a2"}
    assert then("b1") == {"p", "b1"}
    assert then("b2") == {"p", "b1", "b2"}
    assert then("a1") == {"p", "b1", "b2", "a1"}
    assert then("d1") == {"p", "d1"}
    assert then("d2") == {"p", "d2"}


@pytest.mark.slow
def test_preload_and_limits(start_router: Start) -> None:
    setup = config({"a": fake("A", concurrencyLimit=2), "b": fake("B")}, hooks={"on_startup": {"preload": ["b", "zz"]}})
    router = start_router(setup)
    until(lambda: router.status("b")["value"] == "loaded")
    router.ask("a")
    with ThreadPoolExecutor() as pool:
        two = [pool.submit(router.ask, "a", delay=0.5) for _ in range(2)]
        until(lambda: router.running()["a"]["requests"] == 2)
        refused = router.ask("a")
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        assert {one.result().status_code for one in two} == {200}
    assert "zz" in router.log.read_text()


@pytest.mark.slow
def test_events_and_logs(start_router: Start) -> None:
    router = start_router(config({"a": fake("A", "ready=0.2"), "b": fake("B")}))
    seen: list[dict[str, Any]] = []
    lines: list[str] = []
    listening = threading.Semaphore(0)

    def listen() -> None:
        with httpx.stream("GET", f"{router.url}/models/sse", timeout=GUARD) as response:
            listening.release()
            for line in response.iter_lines():
                if line.startswith("data: "):
                    seen.append(json.loads(line[6:]))

    def read() -> None:
        with httpx.stream("GET", f"{router.url}/logs/stream/a?no-history", timeout=GUARD) as response:
            listening.release()
            lines.extend(response.iter_lines())

    threads = [threading.Thread(target=listen, daemon=True), threading.Thread(target=read, daemon=True)]
    for thread in threads:
        thread.start()
    assert listening.acquire(timeout=60) and listening.acquire(timeout=60)
    router.ask("a")
    router.ask("b")
    router.http.post("/models/unload", json={"model": "a"})

    def told(event: str) -> list[dict[str, Any]]:
        return [one["data"] for one in tuple(seen) if one["model"] == "a" and one["event"] == event]

    until(lambda: "a" not in router.running() and len(told("model_status")) >= 4 and len(told("status_change")) >= 3)
    assert [one["status"] for one in told("model_status")] == ["loading", "loading", "loaded", "unloaded"]
    real = told("status_change")
    assert real[0]["progress"]["value"] == 0.5 and real[1]["info"]["id"] == "A" and real[2]["exit_code"] == 0
    until(lambda: "[a] A listens" in router.http.get("/logs").text and "[b] B listens" in router.log.read_text())
    # Both streams end at shutdown and do not delay it.
    router.server.should_exit = True
    for thread in threads:
        thread.join(GUARD)
        assert not thread.is_alive()
    assert lines == ["[a] A listens"]


@pytest.mark.slow
def test_shutdown_finishes_responses(start_router: Start) -> None:
    router = start_router(config({"a": fake("A")}))
    router.ask("a")
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(router.ask, "a", stream=10, delay=0.05)
        until(lambda: router.running()["a"]["requests"])
        router.server.handle_exit(signal.SIGTERM, None)
        assert len(events(answer.result().text)) == 10


@pytest.mark.slow
def test_a_second_signal_kills_everything(start_router: Start) -> None:
    router = start_router(config({"a": fake("A", "stubborn")}))
    pid = router.ask("a").json()["pid"]
    asking = threading.Thread(target=ask_dying_router, args=(router, "a"), kwargs={"delay": 60}, daemon=True)
    asking.start()
    until(lambda: router.running()["a"]["requests"])
    router.server.handle_exit(signal.SIGINT, None)
    time.sleep(0.2)
    assert alive(pid)
    router.server.handle_exit(signal.SIGINT, None)
    until(lambda: not alive(pid))
    asking.join(GUARD)


def n_pooled(router: Running) -> int:
    """Return the number of pooled connections to the models."""
    return sum(
        len(instance.child.pool._all) for instance in router.server.router.fleet.instances.values() if instance.child
    )


@pytest.mark.slow
def test_connections_are_kept_and_stale_ones_replaced(start_router: Start) -> None:
    router = start_router(config({"a": fake("A")}))
    router.ask("a")
    before = n_pooled(router)
    for _ in range(30):
        router.ask("a")
    assert n_pooled(router) == before == 1
    with ThreadPoolExecutor(16) as pool:
        assert {r.status_code for r in pool.map(lambda _: router.ask("a", delay=0.1), range(32))} == {200}


def test_a_request_to_upgrade_keeps_its_body(start_router: Start) -> None:
    """The body is not parsed as a request, and the model's process gets no Upgrade header."""
    router = start_router(config({"a": fake("A")}))
    body = json.dumps(
        {"model": "a", "echo": True, "text": "\n\nGET /unload HTTP/1.1\r\nHost: localhost\r\n\r\n"}
    ).encode()
    chunked = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    for upgrade in (
        b"Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAE",
        b"upgrade\r\nUpgrade: websocket",
    ):
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: " + upgrade + b"\r\n"
        for framed in (b"Content-Length: %d\r\n\r\n%b" % (len(body), body), chunked):
            last = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            with socket.create_connection(("127.0.0.1", int(router.url.rpartition(":")[2])), timeout=GUARD) as raw:
                raw.sendall((head + framed) * 2 + last)
                answer = b"".join(iter(lambda: raw.recv(65536), b""))
            assert answer.count(b"HTTP/1.1 200 OK\r\n") == 3, answer
            told = [json.loads(text) for text in re.findall(rb'\{"name".*?\}(?=HTTP/1.1 200)', answer)]
            assert [t["body"].encode("latin-1") for t in told] == [body] * 2
            assert not {"upgrade", "http2-settings"} & set(told[0]["headers"])
    assert router.running()["a"]["state"] == "ready"


@pytest.mark.slow
def test_a_body_is_released_when_its_response_starts(start_router: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a budget of two bodies, three long streams run side by side."""
    monkeypatch.setattr(bodies, "PATIENCE", 5)
    monkeypatch.setattr(bodies.BodyBudget.__init__, "__defaults__", (2 * 2**20, lambda: bodies.MAX_BODY))
    router = start_router(config({"a": fake("A")}))
    body = {"model": "a", "stream": 1000, "delay": 0.1, "text": "x" * (2**20 - 1000)}
    streams = []  # their connections close when they are garbage-collected
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            answer = stack.enter_context(router.http.stream("POST", "/v1/completions", json=body))
            streams.append(answer.iter_lines())
            assert answer.status_code == 200 and next(streams[-1]).startswith("data: ")
        room = router.server.access.bodies
        assert room.free == 2 * 2**20 and router.server.access.n_running == 3


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/completions", "/upstream/a/v1/completions"])
def test_a_body_is_held_while_it_may_be_sent_again(
    start_router: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Bytes and budget are held until the response starts or the client disconnects, and released once."""
    released: list[int] = []

    class TrackedBytes(bytes):
        def __del__(self) -> None:
            released.append(len(self))

    original = bodies.Body.read

    async def read(self: bodies.Body, scope: Any, receive: Any) -> bytes:
        return TrackedBytes(await original(self, scope, receive))

    monkeypatch.setattr(bodies.Body, "read", read)
    monkeypatch.setattr("llamado.router.app.parse_body", parse_copy)
    count = tmp_path / "count"
    router = start_router(config({"a": fake("A", f"count={count}")}))
    room = router.server.access.bodies
    most = room.free

    def body_with(**more: Any) -> bytes:
        return json.dumps({"model": "a", "filler": "x" * 2**20, **more}).encode()

    # The response has not started: the body may have to be sent again.
    body = body_with(delay=600)
    head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(body))
    with socket.create_connection(("127.0.0.1", int(router.url.rpartition(":")[2]))) as sock:
        sock.sendall(head + body)
        until(lambda: count.exists() and requests_of(count) == 1)
        assert (room.free, released) == (most - len(body), [])
    until(lambda: released == [len(body)] and room.free == most)  # the client disconnected

    # The first process is killed before it responds; the second gets the same bytes.
    body = body_with(die="before", once=str(tmp_path / "once"), echo=True)
    assert router.http.post(path, content=body).json()["body"].encode() == body
    assert requests_of(count) == 3
    until(lambda: released[1:] == [len(body)] and room.free == most)

    # The response has started and goes on.
    body = body_with(stream=10_000, delay=0.1)
    with router.http.stream("POST", path, content=body) as answer:
        lines = answer.iter_lines()  # closes the connection when it is garbage-collected
        assert next(lines).startswith("data: ")
        until(lambda: released[2:] == [len(body)] and room.free == most)
        assert router.server.access.n_running == 1
    until(lambda: router.server.access.n_running == 0)
    assert room.free == most and len(released) == 3


@pytest.mark.slow
def test_the_router_keeps_chats(start_router: Start, tmp_path: Path) -> None:
    """In the router's process: no model is loaded for them."""
    router = start_router(config({"a": fake("A")}), "--chats", str(tmp_path / "chats"))
    assert router.http.get("/props").json()["chats_kept"] is True
    stored = router.http.put("/chats/x", content=b'{"n":1}', headers={"If-None-Match": "*"})
    assert stored.status_code == 200 and router.http.get("/chats/x").json() == {"n": 1}
    assert router.http.put("/chats/x", content=b'{"n":2}', headers={"If-None-Match": "*"}).status_code == 412
    assert router.http.delete("/chats/x", headers={"If-Match": stored.headers["etag"]}).status_code == 200
    assert router.http.get("/chats").json()["deleted"] == ["x"] and not router.running()
