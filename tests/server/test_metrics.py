"""`/metrics`: names and types, histograms, labels, HTTP counters; read back by Prometheus's own parser."""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import Any

import pytest
from fakes import FakeEngine, client, run, served
from prometheus_client.parser import text_string_to_metric_families

from llamado import __version__
from llamado.engine.request import Counters, EngineSnapshot, Histogram, KindCounts
from llamado.http.access import HEALTH, LIVE, AccessRules, busy_app
from llamado.http.answer import answer
from llamado.http.monitoring.counter import RequestCounter
from llamado.http.monitoring.families import traffic_families
from llamado.http.monitoring.metrics import BOUNDS, Traffic
from llamado.server.api.metrics import Scrape
from llamado.server.state import ServerState

# llama-server's table (tools/server/README.md, b11434), with the types its /metrics gives.
REFERENCE = {
    "prompt_tokens_total": "counter",
    "prompt_tokens_cached_total": "counter",
    "prompt_seconds_total": "counter",
    "tokens_predicted_total": "counter",
    "tokens_predicted_seconds_total": "counter",
    "n_decode_total": "counter",
    "n_tokens_max": "counter",
    "spec_decode_num_draft_tokens_total": "counter",
    "spec_decode_num_accepted_tokens_total": "counter",
    "spec_decode_num_drafts_total": "counter",
    "prompt_tokens_seconds": "gauge",
    "predicted_tokens_seconds": "gauge",
    "requests_processing": "gauge",
    "requests_deferred": "gauge",
    "n_busy_slots_per_decode": "gauge",
}
OLDER = {"kv_cache_usage_ratio": "gauge", "kv_cache_tokens": "gauge"}


class CountingEngine(FakeEngine):
    """A fake engine whose snapshot has all optional parts."""

    def snapshot(self) -> EngineSnapshot:
        histogram = Histogram((0.1, 1.0), (3, 2, 1), 4.5)
        counters = Counters(
            prompt_tokens_total=10,
            n_tokens_max=30,
            n_drafts=4,
            n_drafted=9,
            n_accepted=5,
            accepted_at=(3, 2),
            first_token_seconds=histogram,
            inter_token_seconds=histogram,
            queue_seconds=histogram,
            batch_tokens=Histogram((8.0,), (6, 0), 24.0),
            drafts=(KindCounts("suffix", 3, 6, 3), KindCounts("draft-simple", 1, 3, 2)),
        )
        return super().snapshot()._replace(counters=counters)


def scrape(**switches: Any) -> str:
    async def work() -> str:
        async with client(CountingEngine(), metrics=True, **switches) as http:
            await http.post("/completion", json={"prompt": "a", "n_predict": 1})
            await http.get("/nowhere")
            await http.get("/also/nowhere")
            return (await http.get("/metrics")).text

    text: str = run(work())
    return text


def samples(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def test_names_and_types_are_those_of_llama_server() -> None:
    text = scrape()
    for name, kind in (REFERENCE | OLDER).items():
        assert f"# TYPE llamacpp:{name} {kind}\n" in text and f"# HELP llamacpp:{name} " in text
        assert f"\nllamacpp:{name} " in text
    values = samples(text)
    assert values["llamacpp:spec_decode_num_draft_tokens_total"] == {(): 9}
    assert values["llamacpp:spec_decode_num_accepted_tokens_total"] == {(): 5}
    assert values["llamacpp:spec_decode_num_drafts_total"] == {(): 4}
    assert values["llamacpp:spec_decode_num_accepted_tokens_per_pos_total"] == {
        (("position", "0"),): 3,
        (("position", "1"),): 2,
    }
    by_kind = {"suffix": (6, 3), "draft-simple": (3, 2)}
    for i, name in enumerate(("draft", "accepted")):
        found = values[f"llamacpp:spec_decode_num_{name}_tokens_per_kind_total"]
        assert found == {(("kind", kind),): numbers[i] for kind, numbers in by_kind.items()}
    assert "\nllamacpp:n_tokens_max 30.0\n" in text


def test_histograms_add_up() -> None:
    values = samples(scrape())
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "request_queue_time_seconds"):
        buckets = values[f"llamacpp:{name}_bucket"]
        assert buckets == {(("le", "0.1"),): 3, (("le", "1.0"),): 5, (("le", "+Inf"),): 6}
        assert values[f"llamacpp:{name}_count"] == {(): 6} and values[f"llamacpp:{name}_sum"] == {(): 4.5}
    assert values["llamacpp:batch_tokens_sum"] == {(): 24}


def test_requests_are_counted_by_endpoint() -> None:
    values = samples(scrape())
    requests = {
        (dict(labels)["method"], dict(labels)["endpoint"], dict(labels)["status"]): n
        for labels, n in values["llamacpp:http_requests_total"].items()
    }
    # Unknown paths share one row, so that clients cannot create rows.
    assert requests == {("POST", "/completion", "200"): 1, ("GET", "other", "404"): 2}
    assert values["llamacpp:http_request_duration_seconds_count"][(("endpoint", "/completion"),)] == 1
    traffic = Traffic()
    for seconds in (0.0, BOUNDS[0], BOUNDS[-1] + 1):
        traffic.count("GET", "/", 200, seconds)
    assert traffic.durations["/"].counts == (2, *[0] * (len(BOUNDS) - 1), 1)


def test_metrics_while_loading() -> None:
    """Monitoring sees a starting server; probes do not count as errors."""

    async def work() -> tuple[Any, Any]:
        async with client(loaded=False, metrics=True) as http:
            for path in ("/health", "/v1/health", "/readyz", "/livez", "/healthz"):
                for method in ("GET", "HEAD"):
                    await http.request(method, path)
            await http.post("/v1/chat/completions", json={})
            await http.get("/slots/1?action=save")
            await http.get("/props")
            loading = await http.get("/metrics")
            http.state.served = served(http.engine)
            return loading, await http.get("/metrics")

    loading, loaded = run(work())
    assert loading.status_code == 200
    values = samples(loading.text)
    assert values["llamado_is_loading"] == {(): 1} and values["llamacpp:requests_processing"] == {(): 0}
    requests = {tuple(dict(labels).values()): n for labels, n in values["llamacpp:http_requests_total"].items()}
    assert requests == {
        ("/v1/chat/completions", "POST", "503"): 1,
        ("/props", "GET", "503"): 1,
        ("other", "GET", "503"): 1,
    }
    assert not any(
        dict(labels)["endpoint"] in HEALTH for labels in values["llamacpp:http_request_duration_seconds_sum"]
    )
    probes = {tuple(dict(labels).values()): n for labels, n in values["llamacpp:http_probes_total"].items()}
    unready = {(path, "503"): 2 for path in HEALTH - LIVE}
    assert probes == unready | {(path, "200"): 2 for path in LIVE}
    assert samples(loaded.text)["llamado_is_loading"] == {(): 0}


def test_metrics_while_loading_need_the_key() -> None:
    async def work() -> list[int]:
        async with client(loaded=False, metrics=True, access=AccessRules(api_keys=(b"k",))) as http:
            answers = [await http.get("/metrics", headers=headers) for headers in ({}, {"Authorization": "Bearer k"})]
            return [answer.status_code for answer in answers]

    assert run(work()) == [401, 200]


@pytest.mark.parametrize("refusal", ["key", "host", "end", "connections"])
def test_refused_requests_count_under_their_endpoint(refusal: str) -> None:
    async def work() -> dict[tuple[str, str, int], int]:
        access = AccessRules(api_keys=(b"k",)) if refusal == "key" else AccessRules()
        async with client(access=access, metrics=True, api_prefix="/llm") as http:
            app = http._transport.app
            app.access.draining = refusal == "end"
            if refusal == "connections":
                http._transport.app = busy_app(lambda: app, "/llm", app.refused)
            host = {"host": "evil.example"} if refusal == "host" else {}
            for method in ("POST", "GET"):
                await http.request(method, "/llm/v1/completions", headers=host)
            await http.get("/llm/v1/models", headers=host)
            found: dict[tuple[str, str, int], int] = http.state.traffic.requests
            return found

    status = {"key": 401, "host": 403, "end": 503, "connections": 503}[refusal]
    assert run(work()) == {
        ("POST", "/v1/completions", status): 1,
        ("GET", "other", status): 1,
        ("GET", "/v1/models", status): 1,
    }


def test_a_router_and_a_gateway_count_their_own_answers() -> None:
    """They have the same series as a server."""
    traffic = Traffic()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"].endswith("/fails"):
            raise RuntimeError
        await answer(send, b"", 503)

    async def work() -> None:
        counted = RequestCounter(app, traffic, lambda method, path: f"{method} {path}", "/llm")
        for method, path in (("GET", "/health"), ("HEAD", "/v1/models"), ("POST", "/fails")):
            sent: list[Any] = []

            async def send(message: Any, sent: list[Any] = sent) -> None:
                sent.append(message)

            with contextlib.suppress(RuntimeError):
                await counted({"type": "http", "method": method, "path": f"/llm{path}"}, None, send)  # type: ignore[arg-type]

    run(work())
    assert traffic.probes == {("GET /health", 503): 1}
    assert traffic.requests == {("HEAD", "GET /v1/models", 503): 1, ("POST", "POST /fails", 500): 1}
    names = {family.name for family in traffic_families(traffic, "llamado_router_")}
    assert {name.replace("llamado_router_", "llamacpp:") for name in names} < set(
        re.findall("^# TYPE (\\S+?)(?:_total)? ", scrape(), re.MULTILINE)
    )


@pytest.mark.slow
def test_labels() -> None:
    bare = samples(scrape(metrics_labels=()))
    own = {"engine": "llamado", "engine_version": __version__, "model_id": "fake"}
    assert all(own.items() <= dict(labels).items() for rows in bare.values() for labels in rows)
    more = samples(scrape(metrics_labels=(("pool_id", "a"), ("replica_id", 'b"\\'))))
    for rows in more.values():
        for labels in rows:
            assert (own | {"pool_id": "a", "replica_id": 'b"\\'}).items() <= dict(labels).items()
    assert all("engine" not in dict(labels) for rows in samples(scrape()).values() for labels in rows)


def test_process_and_build() -> None:
    values = samples(scrape())
    assert values["process_resident_memory_bytes"][()] > 1e6
    ((labels, one),) = values["llamado_build_info"].items()
    assert dict(labels)["version"] == __version__ and one == 1


async def call(http: Any, receive: Any, send: Any) -> None:
    """Call the application with a POST of `/completion`."""
    scope = {
        "type": "http", "method": "POST", "path": "/completion", "raw_path": b"/completion",
        "query_string": b"", "headers": [], "http_version": "1.1",
    }  # fmt: skip
    await http._transport.app(scope, receive, send)


def test_a_client_disconnect_is_counted() -> None:
    received = [
        {"type": "http.request", "body": b'{"prompt": "a"}', "more_body": False},
        {"type": "http.disconnect"},
    ]

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0.02)
        return received.pop(0)

    async def send(message: dict[str, Any]) -> None:
        raise AssertionError("the client is gone")

    async def work() -> Traffic:
        async with client(FakeEngine(delay=0.05), metrics=True) as http:
            await call(http, receive, send)
            traffic: Traffic = http.state.traffic  # type: ignore[attr-defined]
            return traffic

    traffic = run(work())
    assert traffic.requests == {("POST", "/completion", 499): 1} and traffic.cancelled == 1


@pytest.mark.parametrize("read", [2, 50], ids=["left", "read to its end"])
def test_a_client_disconnect_during_a_stream_is_counted(read: int) -> None:
    """Although the status 200 was sent."""
    sent: list[Any] = []
    received = [
        {
            "type": "http.request",
            "body": b'{"prompt": "a", "n_predict": 40, "stream": true}',
            "more_body": False,
        }
    ]

    async def work() -> float:
        gone = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if received:
                return received.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)
            if len(sent) > read:
                gone.set()

        async with client(FakeEngine(delay=0.01), metrics=True) as http:
            await call(http, receive, send)
            (n,) = samples((await http.get("/metrics")).text)["llamacpp:http_requests_cancelled_total"].values()
            return n

    assert run(work()) == (read == 2)
    assert sent[0]["status"] == 200


def test_rates_are_those_since_the_last_scrape() -> None:
    state = ServerState()
    scrape = Scrape(state)

    def rates(counters: Counters) -> tuple[float, float]:
        text = scrape.text(EngineSnapshot((), counters, 0, 0, 0, 1)).decode()
        found = {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples}
        return found["llamacpp:prompt_tokens_seconds"], found["llamacpp:predicted_tokens_seconds"]

    first = Counters(
        prompt_tokens_total=100, prompt_seconds_total=2.0, tokens_predicted_steps_total=30,
        tokens_predicted_seconds_total=3.0,
    )  # fmt: skip
    assert rates(first) == (50.0, 10.0)
    then = first._replace(
        prompt_tokens_total=400, prompt_seconds_total=3.0, tokens_predicted_steps_total=35,
        tokens_predicted_seconds_total=4.0,
    )  # fmt: skip
    assert rates(then) == (300.0, 5.0)
    assert rates(then) == (0.0, 0.0)  # no work in between
