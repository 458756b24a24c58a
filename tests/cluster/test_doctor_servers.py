"""Checks of servers by `llamado doctor`: each symptom is provoked on real sockets."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from email.utils import formatdate
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from doctor_stand_ins import Certificates, accepting, listening, saying, swallowing
from fakes import FakeEngine
from odd_json import FEW, HTML, ODD, TOO_DEEP, bent
from ports import free_port
from scripted_server import Exchange, ScriptedServer
from scripted_worker import ScriptedWorker
from tiers import first_of

from llamado.cluster.doctor import machine, probes, servers
from llamado.cluster.doctor.servers import examine_servers
from llamado.cluster.doctor.symptoms import SYMPTOMS, Finding
from llamado.cluster.doctor.workers import examine_workers
from llamado.devices import registry
from llamado.devices.split.placement import SplitOptions
from llamado.engine.request import Away, Fault

Enter = Callable[..., object]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def look(*urls: str, key: str | None = None, timeout: float = 5.0, patience: float = 0.3) -> list[Finding]:
    return examine_servers(urls, key=key, timeout=timeout, patience=patience)


def one(*urls: str, **given: object) -> Finding:
    (found,) = look(*urls, **given)  # type: ignore[arg-type]
    return found


def scripted(stack: ExitStack, *answers: tuple[int, object], **headers: str) -> str:
    """Start a server whose /health gives these answers in turn, the last one repeatedly; other paths get 404."""
    left = itertools.chain(answers, itertools.repeat(answers[-1]))

    def answer(exchange: Exchange) -> None:
        status, body = next(left) if exchange.path == "/health" else (404, {"error": {"message": "no"}})
        exchange.answer(status, body, **headers)

    return stack.enter_context(ScriptedServer(answer)).url


def failure(message: str) -> dict[str, object]:
    return {"error": {"code": 503, "message": message}}


def answering(stack: ExitStack, bodies: dict[str, object], status: int = 200) -> str:
    """Start a server that returns these bodies by path, and 404 for other paths; return its URL."""

    def answer(exchange: Exchange) -> None:
        exchange.answer(status if exchange.path in bodies else 404, bodies.get(exchange.path, {}))

    return stack.enter_context(ScriptedServer(answer)).url


@pytest.mark.slow
def test_a_healthy_server_has_no_findings() -> None:
    with listening(metrics=True) as (url, _):
        assert look(url) == []
    with listening(keys=(b"secret",)) as (url, _):
        assert look(url, key="secret") == []


def test_refused() -> None:
    port = free_port()
    found = one(f"http://127.0.0.1:{port}")
    assert found.symptom == "refused" and str(port) in found.command


def test_unknown_host() -> None:
    assert one("http://no-such-host.invalid:8080").symptom == "unknown-host"


def test_unreachable() -> None:
    with swallowing() as port:
        assert one(f"http://127.0.0.1:{port}", timeout=0.5).symptom == "unreachable"


def test_silent() -> None:
    with accepting() as port:
        found = one(f"http://127.0.0.1:{port}", timeout=0.5)
    assert found.symptom == "silent" and "kill -CONT" in found.command


def test_only_health_responds(stack: ExitStack) -> None:
    def answer(exchange: Exchange) -> None:
        if exchange.path == "/health":
            exchange.answer(200, {"status": "ok"})
        else:
            exchange.connection.recv(1)  # until the client gives up

    url = stack.enter_context(ScriptedServer(answer)).url
    found = one(url, timeout=0.5)
    assert found.symptom == "silent" and "/props" in found.found


def test_another_program_on_the_port() -> None:
    with saying(b"220 mail ready\r\n") as port:
        assert one(f"http://127.0.0.1:{port}").symptom == "not-a-server"


@pytest.mark.parametrize(
    ("status", "body", "symptom", "text"),
    [
        (200, b"<html>hello", "not-a-server", ""),
        (404, b"no", "not-a-server", ""),
        (401, b"<html>Authorization Required", "wrong-key", "a proxy"),
        (502, b"<html>Bad Gateway", "proxy-error", "502"),
        (503, b"<html>Bad Gateway", "proxy-error", "503"),
        (504, b"<html>Bad Gateway", "proxy-error", "504"),
        (503, failure("the server is shutting down"), "ended", "shutting down"),
        (503, failure("no idea"), "unready", "no idea"),
        (503, failure("Loading model"), "loading", "reports no progress"),
        (
            503,
            {"status": "no slot available", "slots_idle": 0, "slots_processing": 32},
            "no-slots",
            "",
        ),  # older servers
    ],
)
def test_responses_of_health(status: int, body: object, symptom: str, text: str, stack: ExitStack) -> None:
    found = one(scripted(stack, (status, body)))
    assert found.symptom == symptom and text in found.found


def test_the_address_of_a_worker() -> None:
    with ScriptedWorker() as worker:
        found = one(f"http://{worker.endpoint}")
    assert found.symptom == "worker-address" and f"--rpc {worker.endpoint}" in found.command


def test_tls_only_on_the_server(certificates: Certificates) -> None:
    with listening(tls=certificates) as (url, _):
        found = one(url.replace("https", "http"))
    assert found.symptom == "wants-tls" and url in found.command


def test_tls_only_on_a_server_that_returns_400_to_plain_http(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """nginx returns 400 to plain HTTP on its TLS port."""
    url = scripted(stack, (400, b"<html>The plain HTTP request was sent to HTTPS port"))
    assert one(url, timeout=0.5).symptom == "not-a-server"
    monkeypatch.setattr(servers, "speaks_tls", lambda *_: True)
    assert one(url).symptom == "wants-tls"


def test_tls_only_on_the_client() -> None:
    with listening() as (url, _):
        assert one(url.replace("http", "https")).symptom == "no-tls"


def test_an_untrusted_certificate(certificates: Certificates) -> None:
    with listening(tls=certificates) as (url, _):
        assert one(url).symptom == "certificate"


def test_loading_with_progress(stack: ExitStack) -> None:
    def loading(progress: float) -> tuple[int, object]:
        return 503, {"error": {"message": "Loading model"}, "progress": progress, "stage": "weights"}

    found = one(scripted(stack, loading(0.1), loading(0.2)), patience=30)
    assert found.symptom == "loading" and "weights" in found.found and "llamado wait" in found.command


@pytest.mark.slow
def test_loading_without_progress() -> None:
    with listening(loaded=False) as (url, state):
        state.progress, state.stage = 0.4, "sending weights to RPC0"
        found = one(url)
    assert found.symptom == "stuck-loading" and "sending weights to RPC0" in found.found and "40%" in found.found


def test_a_server_that_becomes_ready_has_no_findings(stack: ExitStack) -> None:
    loading = 503, {"error": {"message": "Loading model"}, "progress": 0.5}
    assert look(scripted(stack, loading, (200, {"status": "ok"})), patience=30) == []


@pytest.mark.parametrize(
    ("reason", "cause"),
    [("out of memory: the model needs 9 GB", "weights, context"), ("something unheard of", "the model's file")],
)
def test_a_model_that_failed_to_load(reason: str, cause: str) -> None:
    with listening(loaded=False) as (url, state):
        state.failure = reason
        found = one(url)
    assert found.symptom == "failed-to-load" and reason in found.found and found.cause.startswith(cause)
    assert ("-ctk q8_0" in found.command) == ("memory" in reason), "a known reason has its own remedy"


def test_a_stopped_process_on_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with accepting() as port:
        proc = fake_proc(tmp_path, port, "T")
        monkeypatch.setattr(machine, "find_stopped_listener", partial(machine.find_stopped_listener, root=tmp_path))
        found = one(f"http://127.0.0.1:{port}", timeout=0.2)
        assert (found.symptom, found.command) == ("stopped", "kill -CONT 77") and "a server" in found.found
        (proc / "stat").write_text("77 (x) S 1")
        assert one(f"http://127.0.0.1:{port}", timeout=0.2).symptom == "silent"
        (proc / "stat").write_text("77 (x) T 1")
        (found,) = examine_workers(SplitOptions(rpc=(f"127.0.0.1:{port}",)), timeout=0.2)
        assert (found.symptom, found.command) == ("stopped", "kill -CONT 77")
        engine = FakeEngine()
        engine.fault = Fault(f"RPC0[127.0.0.1:{port}]", "it gives no sign of life", time.time())
        with listening(engine=engine) as (url, _):
            assert one(url).command == "kill -CONT 77"
        monkeypatch.setattr(machine, "is_local", lambda host: False)
        assert one(f"http://127.0.0.1:{port}", timeout=0.2).symptom == "silent"


def fake_proc(root: Path, port: int, state: str) -> Path:
    """Make a /proc with one process, 77, that listens on a port; return the process's folder."""
    (root / "proc/net").mkdir(parents=True)
    row = f"0: 0100007F:{port:04X} 00000000:0000 0A 0:0 00:0 0 0 0 4242 1"
    (root / "proc/net/tcp").write_text(f"head\n{row}\n")
    process = root / "proc/77"
    (process / "fd").mkdir(parents=True)
    (process / "fd/3").symlink_to("socket:[4242]")
    (process / "cmdline").write_bytes(b"a\0server\0")
    (process / "stat").write_text(f"77 (a (b) c) {state} 1")
    return process


@pytest.mark.parametrize("ready", [True, False])
def test_a_gateway_with_missing_replicas(ready: bool, stack: ExitStack) -> None:
    """The finding lists them, whether the gateway is ready or not, except drained ones."""
    states = {"10.0.0.2:8080": "cannot connect", "large": "Loading model"}
    replicas = [{"name": name, "ready": False, "state": "connecting", "message": s} for name, s in states.items()]
    replicas += [{"name": "ok", "ready": True, "state": "ready"}, {"name": "d", "ready": False, "state": "draining"}]

    error = {"error": {"code": 503, "message": "no replica is ready", "replicas": states}}
    bodies = {"/health": {"status": "ok"} if ready else error, "/gateway/status": {"replicas": replicas}}
    found = one(answering(stack, bodies, 200 if ready else 503))
    assert found.symptom == "replica-missing" and found.command == "llamado doctor http://10.0.0.2:8080"
    assert found.found == "replica 10.0.0.2:8080: cannot connect; replica large: Loading model"


def test_a_gateway_with_all_replicas(stack: ExitStack) -> None:
    bodies = {"/health": {"status": "ok"}, "/gateway/status": {"replicas": [{"name": "a", "ready": True}]}}
    assert look(answering(stack, bodies)) == []


def test_a_lost_worker() -> None:
    engine = FakeEngine()
    engine.fault = Fault("RPC0[10.0.0.2:50052]", "it closed the connection", time.time())
    with listening(engine=engine) as (url, _):
        found = one(url)
    assert found.symptom == "worker-lost"
    assert found.command.startswith("llamado worker -p 50052   # on 10.0.0.2;")


def test_a_lost_worker_whose_layers_were_taken() -> None:
    engine = FakeEngine()
    engine.degraded = (
        Away(device="RPC1", since=1.0, why="it closed the connection", layers="layers 0 to 3", now={"CPU": "0-3"}),
    )
    with listening(engine=engine) as (url, _):
        found = one(url)
    assert found.symptom == "degraded" and found.command.startswith("start the worker")
    assert found.found == "RPC1 is lost (it closed the connection); other devices have taken layers 0 to 3"


def test_a_lost_card_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._LOCAL_KINDS, "cuda", "stand_in_cards:CardBackend")
    engine = FakeEngine()
    engine.degraded = (
        Away(device="CUDA0", since=1.0, why="it has fallen off the bus", layers="all", now={"CPU": "all"}),
    )
    with listening(engine=engine) as (url, _):
        found = one(url)
    assert found.symptom == "card-lost" and found.command.startswith("sudo dmesg")


@pytest.mark.parametrize(("waiting", "slots"), [([0], 1), ([3, 0], 4), ([3, 2], 4)])
def test_no_slot_is_free(waiting: list[int], slots: int, stack: ExitStack) -> None:
    """Only requests that stay queued are a finding; busy slots are normal."""
    left = itertools.chain(waiting, itertools.repeat(waiting[-1]))

    def answer(exchange: Exchange) -> None:
        if exchange.path == "/metrics":
            exchange.answer(200, f"llamacpp:requests_deferred {next(left)}\n".encode())
            return
        bodies = {"/health": {"status": "ok"}, "/slots": [{"is_processing": True}] * slots}
        exchange.answer(200 if exchange.path in bodies else 404, bodies.get(exchange.path, {}))

    found = look(stack.enter_context(ScriptedServer(answer)).url)
    if waiting[-1]:
        (only,) = found
        assert only.symptom == "no-slots" and "all 4 slots are busy, 2 requests wait" in only.found
        assert "-np 8" in only.command
    else:
        assert found == []


def test_waiting_requests_without_slots_endpoint(stack: ExitStack) -> None:
    found = one(answering(stack, {"/health": {"status": "ok"}, "/metrics": b"llamacpp:requests_deferred 3\n"}))
    assert found.symptom == "no-slots" and "3 requests wait" in found.found


@pytest.mark.parametrize("key", [None, "wrong"])
def test_a_required_key(key: str | None) -> None:
    with listening(keys=(b"right",)) as (url, _):
        found = one(url, key=key)
    assert found.symptom == "wrong-key" and "--api-key" in found.command


def test_open_to_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "is_loopback", lambda host: False)
    with listening() as (url, _):
        found = one(url)
    assert found.symptom == "no-key" and "--api-key" in found.command
    assert probes.is_loopback("127.0.0.7") and probes.is_loopback("::1") and not probes.is_loopback("10.0.0.1")


def test_another_address_of_this_machine() -> None:
    with listening() as (url, _):
        port = int(url.rpartition(":")[2])
        found = one(f"http://127.0.0.2:{port}")
    assert found.symptom == "bind-address" and url in found.command and "--host 127.0.0.2" in found.command


def test_ipv6_only() -> None:
    with listening("::1") as (url, _):
        assert look(url) == []
        port = int(url.rpartition(":")[2])
        found = one(f"http://127.0.0.1:{port}")
    assert found.symptom == "bind-address" and "[::1]" in found.command


def test_clocks_differ(stack: ExitStack) -> None:
    url = scripted(stack, (200, {"status": "ok"}), Date=formatdate(time.time() - 7200, usegmt=True))
    found = one(url)
    assert found.symptom == "clock" and "behind" in found.found


def test_slow_health(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "_LATE", -1.0)
    assert one(scripted(stack, (200, {"status": "ok"}))).symptom == "slow-health"


def replica(stack: ExitStack, build: str, size: int) -> str:
    bodies = {
        "/health": {"status": "ok"},
        "/props": {"build_info": build},
        "/v1/models": {"data": [{"id": "m", "meta": {"size": size, "n_params": 5, "n_ctx": 64}}]},
    }

    return answering(stack, bodies)


def test_replicas_are_compared(stack: ExitStack) -> None:
    same, newer, other = replica(stack, "b1", 7), replica(stack, "b2", 7), replica(stack, "b1", 8)
    assert look(same, same) == []
    found = one(same, newer)
    assert found.symptom == "builds-differ" and "b1" in found.found and "b2" in found.found
    assert one(same, other).symptom == "models-differ"


def test_a_server_that_stops_responding_while_it_loads(stack: ExitStack) -> None:
    def answer(exchange: Exchange) -> None:
        if len(server.requests) == 1:
            exchange.answer(503, {**failure("Loading model"), "progress": 0.1})

    server = stack.enter_context(ScriptedServer(answer))
    found = one(server.url, patience=30)
    assert found.symptom == "silent" and "then stopped responding" in found.found


@pytest.mark.parametrize("loads", [True, False])
def test_a_server_that_ends_during_the_check(loads: bool, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it loads, and between two requests."""
    reached, loading = iter([True, False]), iter([loads, False])

    def probe_connection(*_: object) -> tuple[probes.ConnectResult, str]:
        return (probes.ConnectResult.OPEN if next(reached) else probes.ConnectResult.REFUSED), ""

    def answer(exchange: Exchange) -> None:
        if exchange.path == "/health" and next(loading):
            exchange.answer(503, {**failure("Loading model"), "progress": 0.1})
        elif exchange.path == "/health" and not loads:
            exchange.answer(200, {"status": "ok"})

    monkeypatch.setattr(servers, "probe_connection", probe_connection)
    server = stack.enter_context(ScriptedServer(answer))
    assert one(server.url, patience=30).symptom == "ended"


def test_the_page_is_up_to_date() -> None:
    from llamado.cluster.doctor.symptoms import page

    assert (Path(__file__).parents[2] / "docs" / "doctor.md").read_text() == page()


def test_every_symptom_is_provoked_by_a_test() -> None:
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_doctor_*.py"))
    assert [symptom for symptom in SYMPTOMS if f'"{symptom}"' not in tests] == []


HEALTH = {"status": "ok", "degraded": [{"device": "RPC0", "since": 1.0, "why": "gone", "layers": "0 to 3", "now": {}}]}
NO_REPLICA = {"error": {"message": "no replica", "replicas": {"10.0.0.2:80": "lost"}}}
UNREADY = {"error": {"message": "no worker", "worker": "RPC0"}, "worker": "RPC1", "progress": 0.5, "stage": "weights"}
MODELS = {"data": [{"id": "m", "meta": {"size": 1, "n_params": 2, "n_ctx": 3}}]}
ANSWERS = {
    "/health": HEALTH, "/props": {"build_info": "b1"}, "/v1/models": MODELS, "/slots": [{"is_processing": True}],
    "/metrics": None,
    "/gateway/status": {"replicas": [{"name": "10.0.0.2:80", "message": "gone", "state": "lost", "ready": False}]},
}  # fmt: skip
NO_BODIES = (HTML, TOO_DEEP, b"", b"\xff", b"x{ 1", b"llamacpp:requests_deferred NaN\n", b'a{b="\\', b"1e999")


def examined(path: str, body: bytes, status: int = 200, **headers: str) -> list[Finding]:
    """Return the findings of a server that gives one path an unexpected response."""

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == path:
            return httpx.Response(status, content=body, headers=headers)
        given = ANSWERS[request.url.path]
        return httpx.Response(200, content=b"" if given is None else json.dumps(given).encode())

    server = servers._Server("http://127.0.0.1:9", "127.0.0.1", 9, False, None, 5.0, 0.0)
    result = servers.ServerExamination(server.url)
    with httpx.Client(transport=httpx.MockTransport(answer), base_url=server.url) as client:
        response = client.get("/health")
        unready = servers._unready(server, client, response)
        result.findings += [unready] if unready else []
        result.findings += [*servers._degraded(server, response), *servers._ready(server, client, result)]
    json.dumps([str(one) for one in (*result.findings, *servers._compare([result, result]))])
    return result.findings


@pytest.mark.slow
@pytest.mark.parametrize("values", first_of([FEW, ODD], ids=["few", "all"]))
@pytest.mark.parametrize("path", ["/props", "/v1/models", "/slots", "/health", "/gateway/status"])
def test_unexpected_json_raises_no_error(path: str, values: tuple[Any, ...]) -> None:
    for body in bent(ANSWERS[path], values):
        examined(path, json.dumps(body).encode())
    if path == "/health":
        for body in (*bent(UNREADY, values), *bent(NO_REPLICA, values)):
            examined(path, json.dumps(body).encode(), 503)


@pytest.mark.parametrize("path", ANSWERS)
@pytest.mark.parametrize("status", [200, 503])
def test_invalid_bodies_raise_no_error(path: str, status: int) -> None:
    for body in NO_BODIES:
        examined(path, body, status, date="Mon, 01 Jan 0001 00:00:00 -2359")
