"""Operators' and browsers' view of this server and of llama-server compared: keys, public paths, CORS, metrics,
properties, and RoPE flags."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from peer_server import llama_server
from ports import free_port

pytestmark = [pytest.mark.interop, pytest.mark.full]


@contextmanager
def our_server(model: Path, *options: str) -> Iterator[httpx.Client]:
    port = free_port()
    command = [sys.executable, "-m", "llamado", "serve", "-m", str(model), "--port", str(port), *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as client:
                for _ in range(2400):
                    assert process.poll() is None
                    try:
                        if client.get("/health").status_code == 200:
                            break
                    except httpx.TransportError:
                        pass
                    time.sleep(0.05)
                yield client
        finally:
            process.terminate()


@contextmanager
def both(
    programs: Path, model: Path, tmp_path: Path, options: Sequence[str]
) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    common = ["-c", "2048", "-t", "1", *options]
    with llama_server(programs, model, tmp_path / "log", *common) as theirs, our_server(model, *common) as ours:
        yield ours, theirs


def shape(value: Any) -> Any:
    """Keys and types."""
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__


def test_public_paths_equal_llama_servers(peer_bin: Path, smollm2_path: Path, tmp_path: Path) -> None:
    options = ["--api-key", "k1,k2", "--metrics", "--props", "--no-webui"]
    key = {"Authorization": "Bearer k2"}
    with both(peer_bin, smollm2_path, tmp_path, options) as servers:
        for client in servers:
            body = {"prompt": "The capital of France is", "n_predict": 4}
            assert client.post("/completion", json=body, headers=key).status_code == 200
        ours, theirs = servers
        for path in (
            "/health",
            "/v1/health",
            "/",
            "/props",
            "/slots",
            "/metrics",
            "/models",
            "/nope",
            "/lora-adapters",
        ):
            for headers in ({}, key, {"X-Api-Key": "k1"}, {"Authorization": "k1"}, {"Authorization": "Bearer k3"}):
                a, b = ours.get(path, headers=headers), theirs.get(path, headers=headers)
                assert a.status_code == b.status_code, (path, headers)
                assert a.headers["content-type"] == b.headers["content-type"], (path, headers)
        for path in ("/props", "/slots?fail_on_no_slot=1", "/v1/models", "/health"):
            a, b = ours.get(path, headers=key).json(), theirs.get(path, headers=key).json()
            if path.startswith("/slots"):
                a, b = (max(slots, key=len) for slots in (a, b))  # the one that worked
            if path == "/props":
                assert (
                    a.pop("tools_enabled") is False
                )  # ours: so that the page asks for tools only where there are some
            assert shape(a) == shape(b), path
        a, b = ours.get("/metrics", headers=key), theirs.get("/metrics", headers=key)
        types = {line for line in b.text.splitlines() if line.startswith("# TYPE")}
        assert types <= set(a.text.splitlines())
        assert "process-start-time-unix" in a.headers
        assert ours.post("/props", json={}, headers=key).json() == theirs.post("/props", json={}, headers=key).json()


@pytest.mark.parametrize(
    "options",
    [["--cors-origins", "*"], ["--cors-origins", "localhost"], ["--cors-origins", "http://a.b"]],
    ids=["any", "localhost", "one origin"],
)
def test_cors_equals_llama_server(peer_bin: Path, smollm2_path: Path, tmp_path: Path, options: list[str]) -> None:
    names = ("origin", "methods", "headers", "credentials")
    with both(peer_bin, smollm2_path, tmp_path, options) as servers:
        for origin in ("http://a.b", "http://localhost:3000", "http://localhost.evil.com"):
            for method in ("OPTIONS", "GET"):
                told = []
                for client in servers:
                    response = client.request(method, "/v1/models", headers={"Origin": origin})
                    assert response.status_code == 200
                    told.append([response.headers.get(f"access-control-allow-{name}") for name in names])
                assert told[0] == told[1], (method, origin)


@pytest.mark.parametrize(
    "options",
    [
        ["--rope-freq-base", "30000"],
        ["--rope-scaling", "yarn", "--yarn-ext-factor", "0.5", "--rope-freq-scale", "0.5", "--yarn-beta-fast", "16"],
    ],
)
def test_rope_flags_do_the_same(peer_bin: Path, smollm2_path: Path, tmp_path: Path, options: list[str]) -> None:
    body = {"prompt": "The capital of France is", "n_predict": 1, "temperature": 0, "n_probs": 5}
    with both(peer_bin, smollm2_path, tmp_path, options) as servers:
        found = []
        for client in servers:
            top = client.post("/completion", json=body).json()["completion_probabilities"][0]["top_logprobs"]
            found.append({entry["id"]: entry["logprob"] for entry in top})
        likely = [token for token, logprob in found[1].items() if logprob > -3.5]
        assert likely and all(abs(found[0].get(token, 0) - found[1][token]) < 0.5 for token in likely), found
