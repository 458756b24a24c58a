"""Resumable streams here and in the real llama-server: the same requests get the same responses."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx
import pytest
from peer_server import llama_server
from ports import free_port
from waiting import GUARD, until

pytestmark = [pytest.mark.interop, pytest.mark.full]

OPTIONS = ("-c", "4096", "-np", "2", "-t", "1", "-a", "m")
ID = "conv::org/model:Q8_0"
GREEDY = {"stream": True, "temperature": 0, "seed": 1}
CHAT = {"messages": [{"role": "user", "content": "Count."}], "max_tokens": 8, **GREEDY}
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/completion": {"prompt": "One, two,", "n_predict": 8, **GREEDY},
    "/v1/messages": CHAT,
}
HEADERS = ("content-type", "x-accel-buffering", "transfer-encoding")


@contextmanager
def ours(model: Path, log: Path) -> Iterator[httpx.Client]:
    port = free_port()
    command = [sys.executable, "-m", "llamado", "serve", "-m", str(model), "--port", str(port), *OPTIONS]
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=GUARD) as http:
                until(lambda: _is_healthy(http))
                yield http
        finally:
            process.terminate()


def _is_healthy(http: httpx.Client) -> bool:
    try:
        return http.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def response(reply: httpx.Response) -> tuple[int, dict[str, str], bytes]:
    """Return what both servers must have in common."""
    headers = {name: reply.headers[name].partition(";")[0] for name in HEADERS if name in reply.headers}
    return reply.status_code, headers, reply.content


def session(http: httpx.Client) -> list[Any]:
    """Send the requests; return the responses without times, ids and sizes."""
    http.headers["connection"] = "close"  # llama-server closes some connections after a stream, unannounced
    found: list[Any] = []
    for path, body in PATHS.items():
        live = http.post(path, json=body, headers={"X-Conversation-Id": ID})
        again = http.get("/v1/stream", params={"conv_id": ID})
        assert again.content == live.content
        middle = len(live.content) // 2
        for offset in (middle, len(live.content), len(live.content) + 7):
            assert http.get("/v1/stream", params={"conv_id": ID, "from": offset}).content == live.content[offset:]
        kinds = [kind for kind, _ in groupby(re.findall(rb"^event: (?!ping)(.*)$", live.content, re.MULTILINE))]
        found += [response(live)[:2], response(again)[:2], kinds]
        (state,) = http.post("/v1/streams/lookup", json={"conversation_ids": ["conv", "none"]}).json()
        assert state["total_bytes"] == len(live.content)
        found.append(sorted((name, type(value).__name__) for name, value in state.items()))
        found.append((state["conversation_id"], state["is_done"], state["completed_at"] - state["started_at"] >= 0))
    for query in (
        {},
        {"conv_id": ""},
        {"conv_id": "none"},
        *({"conv_id": ID, "from": x} for x in ("x", "7x", "9" * 30)),
    ):
        reply = http.get("/v1/stream", params=query)
        found.append((query, reply.status_code, reply.json()["error"] if reply.status_code != 200 else "stream"))
    for body in ({}, [], {"conversation_ids": 3}, {"conversation_ids": [3, ""]}):
        found.append(response(http.post("/v1/streams/lookup", json=body)))
    broken = http.post("/v1/streams/lookup", content=b"{")
    error = broken.json()["error"]
    found.append((broken.status_code, sorted(error), error["type"], error["message"].partition(":")[0]))
    bad = {"stream": True, "prompt": [[]], "n_predict": 1, "grammar": "root ::="}
    http.post("/completion", json=bad, headers={"X-Conversation-Id": ID})
    found.append(http.get("/v1/stream", params={"conv_id": ID}).status_code)
    for query in ({}, {"conv_id": ID}, {"conv_id": ID}):
        gone = http.delete("/v1/stream", params=query)
        found.append((gone.status_code, gone.headers["content-type"].partition(";")[0]))
    return [*found, *_detached(http)]


def _detached(http: httpx.Client) -> list[Any]:
    """Leave after the first token; return what a stream without its client has."""
    body = CHAT | {"max_tokens": 200, "ignore_eos": True}
    with http.stream("POST", "/v1/chat/completions", json=body, headers={"X-Conversation-Id": "left"}) as stream:
        next(stream.iter_raw())
    until(lambda: http.post("/v1/streams/lookup", json={"conversation_ids": ["left"]}).json()[0]["is_done"])
    whole = http.get("/v1/stream", params={"conv_id": "left"}).content
    return [whole.endswith(b"data: [DONE]\n\n"), whole.count(b'"finish_reason":"length"')]


def test_both_servers_respond_alike(peer_bin: Path, smollm2_path: Path, tmp_path: Path) -> None:
    with llama_server(peer_bin, smollm2_path, tmp_path / "theirs", *OPTIONS) as http:
        theirs = session(http)
    with ours(smollm2_path, tmp_path / "ours") as http:
        assert session(http) == theirs
