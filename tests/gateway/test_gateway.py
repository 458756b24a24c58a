"""Load balancing, failover, draining and administration of a gateway."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from stand_ins import Ask, RunningGateway, StandIn
from waiting import until

from llamado.commands import cli
from llamado.gateway import breaker
from llamado.gateway.balance import REQUEST_BYTES
from llamado.gateway.replica import Rate
from llamado.http.access import AccessRules
from llamado.http.bodies import MAX_MEDIA_BODY

Make = Callable[..., StandIn]
Start = Callable[..., RunningGateway]
StartTwo = Callable[..., tuple[StandIn, StandIn, RunningGateway]]


def metrics(gateway: RunningGateway) -> dict[str, float]:
    found = {}
    for line in gateway.http.get("/metrics").text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name] = float(value)
    return found


def talk(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


def test_the_least_loaded_replica_gets_the_request(start_two: StartTwo) -> None:
    a, b, gateway = start_two()
    held = gateway.hold(6)
    until(lambda: len(a.requests) + len(b.requests) == 6)
    assert len(a.requests) == len(b.requests) == 3
    a.go()
    gateway.until("a", in_flight=0)
    assert gateway.ask(messages=talk("next")).json()["name"] == "a"
    b.go()
    assert {ask.answer().status_code for ask in held} == {200}


def test_weights_and_requests_of_others_count(stand_in: Make, start_gateway: Start) -> None:
    a, b = stand_in("a"), stand_in("b")
    b.slots = [{"id": i, "is_processing": i < 3} for i in range(4)]
    gateway = start_gateway(a, b, weights={"a": 3.0})
    gateway.until("b", others=3)
    held = gateway.hold(8)
    until(lambda: len(a.requests) + len(b.requests) == 8)
    assert len(b.requests) == 0  # 3 requests of others at weight 1 equal 9 at weight 3
    a.go()
    assert {ask.answer().json()["name"] for ask in held} == {"a"}


@pytest.mark.slow
def test_own_requests_do_not_count_twice(stand_in: Make, start_gateway: Start) -> None:
    a = stand_in("a")
    gateway = start_gateway(a)
    held = gateway.hold(2)
    until(lambda: len(a.requests) == 2)
    a.slots = [{"id": i, "is_processing": i < 3} for i in range(4)]
    gateway.until("a", in_flight=2, others=1)
    a.go()
    assert {ask.answer().status_code for ask in held} == {200}


def test_requests_of_others_are_read_from_metrics_without_slots(stand_in: Make, start_gateway: Start) -> None:
    a, b = stand_in("a"), stand_in("b")
    b.metrics = 'llamacpp:requests_processing{model="m"} 2\nllamacpp:requests_deferred 3\nllamacpp:n_busy 9\n'
    gateway = start_gateway(a, b)
    gateway.until("b", others=5)
    gateway.until("a", others=0)
    held = gateway.hold(4)
    until(lambda: len(a.requests) == 4)
    a.go()
    assert {ask.answer().json()["name"] for ask in held} == {"a"}


def test_a_restarted_replica_has_no_cached_prompts(start_two: StartTwo) -> None:
    a, b, gateway = start_two()
    prompt = "z" * (3 * REQUEST_BYTES)
    home, other = (a, b) if gateway.ask(prompt=prompt, messages=None).json()["name"] == "a" else (b, a)
    assert gateway.ask(prompt=prompt, messages=None).json()["name"] == home.name
    home.kill()
    gateway.until(home.name, state="connecting")
    home.start()
    gateway.until(home.name, state="ready")
    held = gateway.hold(2)
    until(lambda: len(other.requests) == 1 and len(home.requests) == 3)
    other.go()
    gateway.until(other.name, in_flight=0)
    assert gateway.ask(prompt=prompt, messages=None).json()["name"] == other.name  # the old home is busy
    home.go()
    assert {ask.answer().status_code for ask in held} == {200}


@pytest.mark.slow
def test_a_conversation_stays_on_its_replica(stand_in: Make, start_gateway: Start) -> None:
    replicas = [stand_in(name) for name in "abc"]
    gateway = start_gateway(*replicas)
    homes: dict[int, set[str]] = {}
    for turn in range(1, 5):
        for chat in range(7):  # not a multiple of three, so round-robin would move the chats
            said = talk(*(f"chat {chat}, turn {i}: " + "x" * 300 for i in range(turn)))
            homes.setdefault(chat, set()).add(gateway.ask(messages=said).json()["name"])
    assert all(len(names) == 1 for names in homes.values())
    assert len({name for names in homes.values() for name in names}) == 3
    numbers = metrics(gateway)
    sent = numbers["llamado_gateway_prompt_bytes_total"]
    assert numbers["llamado_gateway_prompt_bytes_known_total"] / sent > 0.5


def test_load_outweighs_the_cache(start_two: StartTwo) -> None:
    a, b, gateway = start_two()
    prompt = "y" * (2 * REQUEST_BYTES)  # weighs as much as two running requests
    home, other = (a, b) if gateway.ask(prompt=prompt, messages=None).json()["name"] == "a" else (b, a)
    held = [Ask(gateway, hold="all", prompt=prompt, messages=None) for _ in range(4)]
    until(lambda: len(a.requests) + len(b.requests) == 5)
    assert len(other.requests) >= 1 and len(home.requests) >= 3
    a.go()
    b.go()
    assert {ask.answer().status_code for ask in held} == {200}


def test_requests_go_to_replicas_that_serve_the_model(stand_in: Make, start_gateway: Start) -> None:
    a, b = stand_in("a", models=("one",)), stand_in("b", models=("one", "two"))
    gateway = start_gateway(a, b)
    assert {gateway.ask(model=m).json()["name"] for m in ("two", "two-alias") for _ in range(3)} == {"b"}
    assert gateway.ask(model="anything else").status_code == 200  # as in llama-server
    listed = gateway.http.get("/v1/models").json()["data"]
    assert {m["id"]: m["replicas"] for m in listed} == {"one": ["a", "b"], "two": ["b"]}


@pytest.mark.slow
def test_a_lost_request_is_retried_on_another_replica(stand_in: Make, start_gateway: Start) -> None:
    replicas = [stand_in(name) for name in "abc"]
    a = replicas[0]
    gateway = start_gateway(*replicas)
    a.drop = 10**6
    assert gateway.names(6) == {"b", "c"}
    assert a.requests and metrics(gateway)['llamado_gateway_retries_total{reason="lost"}'] >= 1
    a.drop = 0
    until(lambda: gateway.ask(messages=talk("well again")).json()["name"] == "a")
    for one in replicas:
        one.drop = 10**6
    answer = gateway.ask(messages=talk("the end of all"))
    assert answer.status_code == 502 and "lost with this request" in answer.json()["error"]["message"]
    ends = [any(r["messages"] == talk("the end of all") for r in one.requests) for one in replicas]
    assert sum(ends) == 2  # the third replica is spared


def test_a_started_stream_is_not_retried(start_two: StartTwo) -> None:
    a, b, gateway = start_two()
    with gateway.streaming(hold="rest") as answer:
        parts = answer.iter_text()
        first = next(parts)
        name = json.loads(first.removeprefix("data: "))["name"]
        assert answer.headers["x-llamado-replica"] == name
        (a if name == "a" else b).kill()
        rest = "".join(parts)
    error = json.loads(rest.strip().removeprefix("data: "))["error"]
    assert error["code"] == 500 and f"replica {name} ended in the middle of its answer" in error["message"]
    assert len(a.requests) + len(b.requests) == 1
    assert gateway.ask().json()["name"] != name


def test_a_killed_replica_loses_no_unstarted_response(start_two: StartTwo) -> None:
    a, b, gateway = start_two()
    held = gateway.hold(8)
    until(lambda: len(a.requests) == len(b.requests) == 4)
    a.kill()
    gateway.until("a", state="connecting")
    until(lambda: len(b.requests) == 8)
    b.go()
    assert {ask.answer().json()["name"] for ask in held} == {"b"}
    a.start()
    gateway.until("a", state="ready")
    a.go()
    assert gateway.names(20, "again ") == {"a", "b"}


@pytest.mark.slow
def test_a_frozen_replica_differs_from_a_slow_one(start_two: StartTwo) -> None:
    a, b, gateway = start_two(health_timeout=2.0)
    held = gateway.hold(2)
    until(lambda: len(a.requests) == len(b.requests) == 1)
    # Neither responds to its request, but both answer /health, many times.
    before = a.checks
    until(lambda: a.checks > before + 100)
    assert len(a.requests) == len(b.requests) == 1
    a.freeze()
    until(lambda: len(b.requests) == 2)
    b.go()
    assert {ask.answer().json()["name"] for ask in held} == {"b"}
    assert metrics(gateway)['llamado_gateway_retries_total{reason="frozen"}'] == 1
    assert gateway.names(5, "then ") == {"b"}
    a.thaw()
    a.go()
    gateway.until("a", state="ready")


@pytest.mark.slow
def test_a_frozen_replica_keeps_started_responses_for_a_while(stand_in: Make, start_gateway: Start) -> None:
    a = stand_in("a")
    gateway = start_gateway(a, health_timeout=1.0, stall_timeout=2.5, patience=0.0)
    with gateway.streaming(hold="rest") as answer:
        parts = answer.iter_text()
        next(parts)
        a.freeze()
        gateway.until("a", state="connecting")
        assert "silent" in "".join(parts)
    assert gateway.ask().status_code == 503


@pytest.mark.slow
def test_busy_and_failing_replicas_are_avoided(start_two: StartTwo) -> None:
    a, b, gateway = start_two()
    for status in (429, 502, 503, 504):
        a.status = status
        until(lambda: gateway.states()["a"]["circuit"] != "open")
        assert {gateway.ask(messages=talk(f"{status} {i}")).json()["name"] for i in range(4)} == {"b"}
    b.status = 503
    a.status = 503
    last = gateway.ask()
    assert last.status_code == 503 and last.headers["retry-after"] == "7" and "said" in last.text
    a.status = b.status = 200
    for status in (400, 500):  # the request itself is at fault
        before = len(a.requests) + len(b.requests)
        assert gateway.ask(status=status).status_code == status
        assert len(a.requests) + len(b.requests) == before + 1


@pytest.mark.slow
def test_the_circuit_opens_and_a_probe_closes_it(start_two: StartTwo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaker, "FIRST_PAUSE", 0.5)
    monkeypatch.setattr(breaker, "LONGEST_PAUSE", 1.0)
    a, _, gateway = start_two()
    a.drop = 10**6  # its /health is fine
    held = [Ask(gateway, messages=talk(str(i))) for i in range(12)]
    assert {ask.answer().json()["name"] for ask in held} == {"b"}
    for i in range(40):
        gateway.ask(messages=talk(f"more {i}"))
    assert gateway.states()["a"]["circuit"] in ("open", "half-open")
    seen = len(a.requests)
    assert seen < 30  # of 52 requests, some sent twice
    a.drop = 0
    until(lambda: gateway.ask(messages=talk("probe")).json()["name"] == "a")
    assert gateway.states()["a"]["circuit"] == "closed"


def test_backups_are_used_while_no_other_replica_is_up(stand_in: Make, start_gateway: Start) -> None:
    a, b = stand_in("a"), stand_in("b")
    gateway = start_gateway(a, backups=(b,))
    assert gateway.names(6) == {"a"}
    a.kill()
    assert gateway.names(6) == {"b"}
    a.start()
    gateway.until("a", state="ready")
    assert gateway.ask(messages=talk("new")).json()["name"] == "a"


def test_loading_is_not_ready(stand_in: Make, start_gateway: Start, caplog: pytest.LogCaptureFixture) -> None:
    """Loading is not a failure: it is not logged as a warning."""
    caplog.set_level("INFO", "llamado.gateway")
    a = stand_in("a")
    a.health = (503, {"error": {"code": 503, "message": "Loading model"}})
    gateway = start_gateway(a, ready=False)
    gateway.until("a", state="loading")
    for path in ("/health", "/v1/health", "/readyz", "/healthz"):
        answer = gateway.http.get(path)
        assert answer.status_code == 503 and answer.json()["error"]["replicas"] == {"a": "Loading model"}
    assert gateway.http.get("/livez").status_code == 200
    waiting = Ask(gateway)
    a.health = (200, {"status": "ok"})
    assert waiting.answer().json()["name"] == "a"  # the request waited for the model
    assert gateway.http.get("/health").json() == {"status": "ok"}
    assert "replica a: Loading model" in caplog.text
    assert not [one for one in caplog.records if one.levelname == "WARNING"]


def test_without_replicas_the_error_gives_the_reasons(stand_in: Make, start_gateway: Start) -> None:
    a = stand_in("a")
    gateway = start_gateway(a, patience=0.0)
    a.kill()
    gateway.until("a", state="connecting")
    answer = gateway.ask()
    assert answer.status_code == 503 and answer.headers["retry-after"]
    assert "a: cannot connect" in answer.json()["error"]["message"]


def test_draining_finishes_streams_and_gets_no_new_requests(start_two: StartTwo) -> None:
    a, b, gateway = start_two()
    with gateway.streaming(hold="rest") as answer:
        parts = answer.iter_text()
        name = json.loads(next(parts).removeprefix("data: "))["name"]
        one = a if name == "a" else b
        shown = gateway.admin("POST", "/gateway/drain", replica=name).json()
        assert shown["state"] == "draining" and shown["in_flight"] == 1
        assert name not in gateway.names(6)
        one.go()
        assert "".join(parts).count("data: ") == 2
    assert gateway.admin("POST", "/gateway/drain", replica=one.url, wait=60).json()["in_flight"] == 0
    assert gateway.admin("POST", "/gateway/drain", replica=name, drain=False).json()["state"] == "ready"
    assert name in gateway.names(4, "x")


def test_the_drain_command(
    stand_in: Make, start_gateway: Start, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = start_gateway(stand_in("a"), stand_in("b"))
    words = ["drain", "a", "--gateway", gateway.url]
    assert cli.main(words) == 2 and "--admin-key" in capsys.readouterr().err
    monkeypatch.setenv("LLAMADO_ADMIN_KEY", gateway.admin_key)
    assert cli.main(words) == 0 and capsys.readouterr().out == "a: drained\n"
    assert gateway.states()["a"]["state"] == "draining" and {gateway.ask().json()["name"] for _ in range(4)} == {"b"}
    assert cli.main([*words, "--undo"]) == 0 and capsys.readouterr().out == "a: resumed\n"
    assert gateway.states()["a"]["state"] == "ready"
    assert cli.main(["drain", "c", *words[2:]]) == 1 and "expected the name or URL of one" in capsys.readouterr().err


def test_status_of_replicas_for_everyone(start_two: StartTwo) -> None:
    """Everyone can read state, load and rates of each replica; addresses are for administrators only."""
    a, b, gateway = start_two()
    b.kill()
    gateway.until("b", ready=False)
    for _ in range(3):
        gateway.ask()
    text = gateway.http.get("/gateway/status").text
    one, other = json.loads(text)["replicas"]
    assert (one["name"], one["ready"], one["requests"], one["answers"]) == ("a", True, 3, {"200": 3})
    assert 0 < one["requests_per_second"] <= 3 and (other["ready"], other["requests"]) == (False, 0)
    assert a.url not in text and "llamado_gateway_http_requests_total" in gateway.http.get("/metrics").text


def test_rates_cover_the_last_minute() -> None:
    rate = Rate()
    assert rate.per_second(5.0) == 0
    for second in range(100):
        rate.record(second + 0.5)
        rate.record(second + 0.6)
    assert rate.per_second(99.9) == 2.0 and rate.per_second(130.0) == pytest.approx(29 * 2 / 60)
    assert rate.per_second(300.0) == 0
    fresh = Rate()
    fresh.record(10.0)
    assert fresh.per_second(10.5) == 1.0 and fresh.per_second(14.0) == 0.25


def test_an_idle_draining_replica_gets_no_requests(start_two: StartTwo) -> None:
    a, b, gateway = start_two()
    gateway.admin("POST", "/gateway/drain", replica="a")
    held = gateway.hold(4)
    until(lambda: len(a.requests) + len(b.requests) == 4)
    assert not a.requests
    gateway.admin("POST", "/gateway/drain", replica="a", drain=False)
    assert gateway.ask().json()["name"] == "a"
    with ThreadPoolExecutor(1) as pool:
        drained = pool.submit(gateway.admin, "POST", "/gateway/drain", replica="b", wait=60)
        gateway.until("b", state="draining")
        b.go()
        assert drained.result().json()["in_flight"] == 0  # after the four requests are complete
    assert {ask.answer().json()["name"] for ask in held} == {"b"}


def test_replicas_are_added_and_removed(stand_in: Make, start_gateway: Start) -> None:
    a, b = stand_in("a"), stand_in("b")
    gateway = start_gateway(a)
    added = gateway.admin("POST", "/gateway/replicas", url=b.url, name="b", weight=2.0)
    assert (
        added.status_code == 201 and gateway.admin("POST", "/gateway/replicas", url=b.url, name="b").status_code == 409
    )
    gateway.until("b", state="ready", weight=2.0)
    with gateway.streaming(hold="rest", messages=talk("elsewhere")) as answer:
        parts = answer.iter_text()
        first = json.loads(next(parts).removeprefix("data: "))["name"]
        one = a if first == "a" else b
        assert gateway.admin("DELETE", "/gateway/replicas", replica=first).status_code == 200
        assert list(gateway.states()) == [("b" if first == "a" else "a")]
        one.go()
        assert "".join(parts).count("data: ") == 2  # its stream completes
    assert gateway.ask().json()["name"] != first
    for method, path, body, status in (
        ("POST", "/gateway/replicas", {"url": "ftp://x"}, 400),
        ("POST", "/gateway/replicas", {"url": b.url, "nme": "c"}, 400),
        ("POST", "/gateway/drain", {"replica": "nobody"}, 404),
        ("DELETE", "/gateway/replicas", {"replica": "nobody"}, 404),
    ):
        assert gateway.admin(method, path, **body).status_code == status, (path, body)
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        for method in ("GET", "POST", "DELETE"):
            assert gateway.http.request(method, "/gateway/replicas", headers=headers).status_code == 401


def test_disconnecting_cancels_the_request(stand_in: Make, start_gateway: Start) -> None:
    a = stand_in("a")
    gateway = start_gateway(a)
    with gateway.streaming(hold="rest") as answer:
        next(answer.iter_text())
    until(lambda: a.cancelled == 1)
    with pytest.raises(httpx.ReadTimeout):
        gateway.http.post("/completion", json={"prompt": "x", "hold": "all"}, timeout=httpx.Timeout(60, read=0.2))
    until(lambda: a.cancelled == 2)
    gateway.until("a", in_flight=0, circuit="closed")


@pytest.mark.slow
def test_metrics_of_all_with_labels(stand_in: Make, start_gateway: Start) -> None:
    a, b = stand_in("a"), stand_in("b", models=("other",), build="b9000-abcdef")
    gateway = start_gateway(a, b, labels={"pool_id": "p"})
    gateway.ask(messages=talk("one"))
    numbers = metrics(gateway)
    of_a = 'engine="llamado",engine_version="1.0",model_id="m",replica="a",pool_id="p"'
    of_b = 'engine="llama.cpp",engine_version="b9000-abcdef",model_id="other",replica="b",pool_id="p"'
    assert numbers[f"llamacpp:n{{{of_a}}}"] == numbers[f"llamacpp:n{{{of_b}}}"] == 1
    assert numbers['llamado_gateway_replica_up{pool_id="p",replica="a"}'] == 1
    assert sum(n for name, n in numbers.items() if name.startswith("llamado_gateway_answers_total")) == 1
    b.freeze()  # its metrics are left out
    assert f"llamacpp:n{{{of_a}}}" in gateway.http.get("/metrics").text
    b.thaw()


@pytest.mark.parametrize(
    "raw",
    [
        "HTTP/1.1 999 X\r\ncontent-length: 0\r\n\r\n",
        "HTTP/1.1 200 OK\r\n" + "x: y\r\n" * 20_000 + "\r\n",
        "HTTP/1.1 200 OK\r\nx: " + "y" * 200_000,
        "garbage\r\n\r\n",
    ],
)
def test_a_malformed_response_is_502(stand_in: Make, start_gateway: Start, raw: str) -> None:
    gateway = start_gateway(stand_in("a"))
    answer = gateway.ask(raw=raw)
    assert answer.status_code == 502 and answer.json()["error"]["type"] == "server_error"
    assert gateway.ask().status_code == 200


def test_bytes_after_a_response_are_dropped(stand_in: Make, start_gateway: Start) -> None:
    gateway = start_gateway(stand_in("a"))
    one = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx-{}: 1\r\n\r\n{}"
    answer = gateway.ask(raw=one.format("a", "{}") + one.format("b", "[]"))
    assert answer.json() == {} and "x-a" in answer.headers and "x-b" not in answer.headers
    chunked = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nset-cookie: a\r\n\r\n"
    answer = gateway.ask(raw=chunked)
    assert answer.json() == {} and "set-cookie" not in answer.headers
    assert gateway.ask().json()["name"] == "a"


def test_endpoints_of_single_replicas_are_not_forwarded(stand_in: Make, start_gateway: Start) -> None:
    a = stand_in("a")
    a.slots = [{"id": 0, "is_processing": False}]
    gateway = start_gateway(a)
    for path in ("/props", "/lora-adapters", "/slots/0?action=save"):
        assert gateway.http.post(path, json={}).status_code == 501
    assert gateway.http.post("/nowhere", json={}).status_code == 404
    assert gateway.http.get("/props").json()["who"] == "a"
    assert gateway.http.get("/slots").json() == [{"replica": "a", "id": 0, "is_processing": False}]
    assert not a.requests


def test_describing_one_model(stand_in: Make, start_gateway: Start) -> None:
    gateway = start_gateway(stand_in("a", models=("m", "n")))
    for name in ("n", "n-alias"):
        assert gateway.http.get(f"/v1/models/{name}").json() == {"id": name, "aliases": ["n-alias"], "replicas": ["a"]}
    assert gateway.http.get("/v1/models/no").status_code == 404


def test_without_a_key_only_known_hosts_are_served(start_gateway: Start) -> None:
    gateway = start_gateway(ready=False, access=AccessRules(allowed_hosts=("my.gateway",)))
    for path in ("/livez", "/v1/models", "/metrics", "/gateway/replicas"):
        assert gateway.http.get(path, headers={"Host": "evil.com"}).status_code == 403
        assert gateway.http.get(path, headers={"Host": "my.gateway:80"}).status_code != 403


def test_bodies_pass_unchanged(stand_in: Make, start_gateway: Start) -> None:
    a = stand_in("a")
    gateway = start_gateway(a)
    body: dict[str, Any] = {"messages": talk("ä" * 100_000), "seed": 2**64 - 1, "deep": [[[1]]]}
    assert gateway.http.post("/v1/chat/completions", json=body).status_code == 200
    assert a.requests == [body]
    assert gateway.http.post("/v1/chat/completions", content=b"x" * (MAX_MEDIA_BODY + 1)).status_code == 413


def test_pictures_and_sounds_pass_unchanged(stand_in: Make, start_gateway: Start) -> None:
    a, b = stand_in("a", models=("ear",)), stand_in("b", models=("eye",))
    gateway = start_gateway(a, b)
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBORw0K" * 40_000}}
    chat = json.dumps({"model": "eye", "messages": [{"role": "user", "content": [picture]}]}, indent=1).encode()
    assert gateway.http.post("/v1/chat/completions", content=chat).json()["name"] == "b"
    assert b.bodies == [chat] and not a.bodies
    sound = ("a.wav", bytes(range(256)) * 1000)
    request = gateway.http.build_request(
        "POST", "/v1/audio/transcriptions", data={"model": "ear"}, files={"file": sound}
    )
    form = request.read()
    assert gateway.http.send(request).json()["name"] == "a"
    assert a.bodies == [form] and a.headers[-1]["content-type"] == request.headers["content-type"]


def test_a_chat_with_a_picture_stays_on_its_replica(start_two: StartTwo) -> None:
    a, b, gateway = start_two()

    def talk_about(letter: str, *more: dict[str, str]) -> str:
        url = "data:image/png;base64," + letter * 200_000
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
        messages = [{"role": "user", "content": content}, *more]
        name: str = gateway.ask(messages=messages).json()["name"]
        return name

    first = {letter: talk_about(letter) for letter in "AB"}
    answer = {"role": "assistant", "content": "A cat."}
    for letter in "ABAB":
        assert talk_about(letter, answer, {"role": "user", "content": "Sure?"}) == first[letter]
    assert len(a.requests) + len(b.requests) == 6
