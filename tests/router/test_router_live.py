"""`/live/events` of a router: its models, its log, and the events of one model."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from router_process import Start, config, fake
from waiting import GUARD, until


@contextlib.contextmanager
def events(router: Any, **query: str) -> Iterator[Iterator[dict[str, Any]]]:
    with router.http.stream("GET", "/live/events", params=query, timeout=GUARD) as answer:
        assert answer.status_code == 200 and "event-stream" in answer.headers["content-type"]
        yield (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: "))


def states(event: dict[str, Any]) -> dict[str, str]:
    return {model["id"]: model["state"] for model in event["models"]}


@pytest.mark.slow
def test_events_follow_loading_and_unloading(start_router: Start, tmp_path: Path) -> None:
    router = start_router(
        config({"a": fake("A", f"ready={tmp_path / 'ready'}"), "b": fake("B"), "c": fake("C", unlisted=True)})
    )
    with events(router) as told:
        first = next(told)
        assert first["first"] and states(first) == {"a": "unloaded", "b": "unloaded"}
        httpx.post(f"{router.url}/models/load", json={"model": "a"})
        seen: list[str] = []
        lines: list[str] = []
        for event in told:
            lines += [line["text"] for line in event.get("log", ())]
            if "models" in event:
                seen.append(states(event)["a"])
                if seen[-1] == "loaded":
                    break
                if seen.count("loading") == 1 == len(seen):
                    early = httpx.get(f"{router.url}/live/events", params={"model": "a"}, timeout=GUARD)
                    assert early.status_code == 400 and "not loaded" in early.text
                    (tmp_path / "ready").touch()
        assert "loading" in seen
        pid = next(model["pid"] for model in event["models"] if model["id"] == "a")
        assert pid == router.running()["a"]["pid"]
        httpx.post(f"{router.url}/models/unload", json={"model": "a"})
        for event in told:
            lines += [line["text"] for line in event.get("log", ())]
            if "models" in event and states(event)["a"] == "unloaded":
                break
    assert any("model a: loaded in" in line for line in lines)


@pytest.mark.slow
def test_listening_neither_loads_nor_keeps_a_model(start_router: Start) -> None:
    router = start_router(config({"a": fake("A", ttl=1), "b": fake("B")}))
    for name, why in (("a", "not loaded"), ("nobody", "not found")):
        refused = router.http.get("/live/events", params={"model": name})
        assert refused.status_code == 400 and why in refused.json()["error"]["message"]
    assert router.running() == {}
    router.ask("a")
    with events(router, model="a") as told:
        assert next(told)["name"] == "A"
        assert router.running()["a"]["requests"] == 0
        # Listening does not count as a request; the stream ends with the process.
        assert len([*told]) > 5
    until(lambda: router.status("a")["value"] == "unloaded")
