"""Liveness and readiness probes."""

from __future__ import annotations

import math
from typing import Any

import httpx
import pytest
from fakes import FakeEngine, run, served

from llamado.engine.request import Fault
from llamado.http.access import AccessRules
from llamado.server.app import ServerApp, create_app
from llamado.server.state import ServerState
from llamado.server.switches import Switches

LIVE = ("/livez", "/healthz")
READY = ("/readyz", "/health")


def ask(state: ServerState, *paths: str, draining: bool = False) -> list[httpx.Response]:
    found: list[httpx.Response] = []

    async def asking() -> None:
        app: ServerApp = create_app(state)
        app.access.draining = draining
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            found.extend([await client.get(path) for path in paths])

    run(asking())
    return found


@pytest.fixture
def engine() -> Any:
    engine = FakeEngine()
    yield engine
    engine.close()


def ready(engine: FakeEngine, **options: Any) -> ServerState:
    return ServerState(served=served(engine), **options)


def test_a_healthy_server(engine: FakeEngine) -> None:
    state = ready(engine, access=AccessRules(api_keys=(b"secret",)))
    for answer in ask(state, *LIVE, *READY):
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"}), "no probe needs a key"


def test_a_loading_server_is_live_but_not_ready() -> None:
    state = ServerState()
    state.report(0.25, "waiting for workers: 10.0.0.7:50052 is missing since 12:00:00: connection refused")
    *live, readyz, health = ask(state, *LIVE, *READY)
    assert [answer.status_code for answer in live] == [200, 200]
    assert (readyz.status_code, health.status_code) == (503, 503) and readyz.json() == health.json()
    assert "10.0.0.7:50052 is missing since 12:00:00" in readyz.json()["stage"]


def test_the_health_of_a_loading_server_names_the_model_unless_keys_are_required() -> None:
    (health,) = ask(ServerState(loading_model="smollm2"), "/health")
    assert health.json()["model"] == "smollm2" and health.json()["error"]["message"] == "Loading model"
    access = AccessRules(api_keys=(b"secret",))
    (health,) = ask(ServerState(loading_model="smollm2", access=access), "/health")
    assert "smollm2" not in health.text


def test_a_server_with_a_lost_worker_is_live_but_not_ready(engine: FakeEngine) -> None:
    engine.fault = Fault("RPC0[10.0.0.7:50052]", "connection reset", 1_750_000_000.0)
    *live, readyz, health = ask(ready(engine), *LIVE, *READY)
    assert [answer.status_code for answer in live] == [200, 200]
    assert (readyz.status_code, health.status_code) == (503, 503)
    assert "10.0.0.7:50052" in readyz.json()["error"]["message"]


def test_a_draining_server_is_live_but_not_ready(engine: FakeEngine) -> None:
    *live, readyz, _ = ask(ready(engine), *LIVE, *READY, draining=True)
    assert [answer.status_code for answer in live] == [200, 200]
    assert readyz.status_code == 503 and "shutting down" in readyz.json()["error"]["message"]


@pytest.mark.parametrize(("seconds", "limit", "status"), [
    (599.0, 600.0, 200), (601.0, 600.0, 503), (math.inf, 600.0, 503), (1e9, 0.0, 200), (5.0, 4.0, 503),
])  # fmt: skip
def test_a_hanging_engine_is_not_live(engine: FakeEngine, seconds: float, limit: float, status: int) -> None:
    engine.step_seconds = seconds
    answers = ask(ready(engine, switches=Switches(hang_timeout=limit)), *LIVE)
    assert [answer.status_code for answer in answers] == [status] * 2
    if status == 503:
        assert "the engine hangs" in answers[0].json()["error"]["message"]
