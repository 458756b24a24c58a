"""Comparison with llama.cpp: llama-server as one of our models, and the same requests to both routers."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ports import free_port
from router_process import Running, Start, alive
from waiting import GUARD, until

pytestmark = [pytest.mark.interop, pytest.mark.full]

Both = tuple[Running, httpx.Client]


def test_llama_server_behind_our_router(start_router: Start, peer_bin: Path, smollm2_path: Path) -> None:
    """llama-swap's configuration may run llama-server."""
    setup = {
        "macros": {
            "server": f"{peer_bin}/llama-server --port ${{PORT}} --host 127.0.0.1 -ngl 0 -t 1 -c 512 --no-webui"
        },
        "startPort": 20000 + os.getpid() % 20000,
        "models": {
            "small": {
                "cmd": "${server} -m " + str(smollm2_path),
                "aliases": ["gpt"],
                "filters": {"setParams": {"seed": 1}},
            },
            "again": {"cmd": "${server} -m " + str(smollm2_path) + " --alias again"},
        },
    }
    router = start_router(setup)
    body = {"prompt": "The capital of France is", "n_predict": 4, "temperature": 0}

    def ask(model: str) -> str:
        answer = router.http.post("/completion", json={"model": model, **body}, timeout=120)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["content"]
        return text

    said = ask("gpt")
    assert said.strip().startswith("Paris") and set(router.running()) == {"small"}
    assert router.http.get("/props?model=small").json()["total_slots"] == 4
    os.kill(router.running()["small"]["pid"], signal.SIGKILL)
    assert ask("small") == said and ask("again") == said and set(router.running()) == {"again"}
    pid = router.running()["again"]["pid"]
    streamed = router.http.post("/completion", json={"model": "again", **body, "stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream") and streamed.text.count("data: ") >= 4
    assert router.http.get("/unload").text == "OK" and not alive(pid)


@pytest.fixture
def both(
    start_router: Start, peer_bin: Path, smollm2_path: Path, tmp_path: Path
) -> Iterator[tuple[Running, httpx.Client]]:
    """Start our router and llama.cpp's over the same folder and presets."""
    folder = tmp_path / "models"
    (folder / "sub").mkdir(parents=True)
    (folder / "smol.gguf").symlink_to(smollm2_path)
    (folder / "sub" / "x.gguf").symlink_to(smollm2_path)
    (folder / "mmproj-x.gguf").write_bytes(b"")
    (folder / "broken.gguf").write_bytes(b"this is no model")
    ini = tmp_path / "p.ini"
    ini.write_text(
        f"version = 1\n[*]\nc = 512\n[smol]\nparallel = 1\n[own]\nmodel = {smollm2_path}\nalias = mine\ntags = t\n"
    )
    port = free_port()
    common = ["--models-dir", str(folder), "--models-preset", str(ini), "--models-max", "2", "-t", "1"]
    command = [str(peer_bin / "llama-server"), *common, "--port", str(port), "-ngl", "0", "--offline"]
    with (tmp_path / "peer.log").open("wb") as out:
        environment = {**os.environ, "LLAMA_CACHE": str(tmp_path / "none")}
        process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=environment)
    theirs = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120)
    try:
        ours = start_router(None, *common)
        until(lambda: answers(theirs))
        yield ours, theirs
    finally:
        theirs.close()
        process.terminate()
        process.wait(GUARD)
        shutil.rmtree(folder, ignore_errors=True)


def answers(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.HTTPError:
        return False


QUESTIONS: list[tuple[str, str, Any]] = [
    ("GET", "/health", None),
    ("GET", "/v1/health", None),
    ("GET", "/slots", None),
    ("GET", "/props?model=nope", None),
    ("GET", "/metrics?model=nope", None),
    ("GET", "/lora-adapters", None),
    ("GET", "/slots?model=smol&autoload=false", None),
    ("POST", "/v1/chat/completions", {"messages": []}),
    ("POST", "/v1/chat/completions", {"model": "nope"}),
    ("POST", "/v1/chat/completions", {"model": 5}),
    ("POST", "/v1/chat/completions", {"model": None}),
    ("POST", "/v1/chat/completions", []),
    ("POST", "/v1/chat/completions", "x"),
    ("POST", "/v1/chat/completions?autoload=false", {"model": "smol"}),
    ("POST", "/completion?autoload=0", {"model": "mine"}),
    ("POST", "/tokenize", {"content": "a"}),
    ("POST", "/infill", {"model": "nope"}),
    ("POST", "/slots/0?action=save", {}),
    ("GET", "/nope", None),
    ("POST", "/nope", {}),
    ("PUT", "/models", {}),
    ("DELETE", "/models", None),
    ("DELETE", "/models?model=smol", None),
    ("DELETE", "/models?model=nope", None),
    ("POST", "/models/load", {}),
    ("POST", "/models/load", {"model": "nope"}),
    ("POST", "/models/unload", {"model": "smol"}),
    ("POST", "/models/unload", {"model": "nope"}),
    ("POST", "/models", {}),
    ("POST", "/tokenize", {"model": "mine", "content": "héllo"}),
    ("POST", "/models/load", {"model": "own"}),
    ("POST", "/completion", {"model": "mine", "prompt": 5}),
    ("POST", "/detokenize?autoload=false", {"model": "own", "tokens": [1, 2, 3]}),
]
BAD_JSON = (b"", b"{bad", b'{"model":"\xff"}')


def test_llama_servers_router_gives_the_same_responses(both: tuple[Running, httpx.Client]) -> None:
    ours, theirs = both
    for method, path, body in QUESTIONS:
        one, two = (client.request(method, path, json=body) for client in (ours.http, theirs))
        assert (one.status_code, one.json()) == (two.status_code, two.json()), (method, path, body)
    for content in BAD_JSON:
        one, two = (client.post("/completion", content=content) for client in (ours.http, theirs))
        assert one.status_code == two.status_code == 400
        assert one.json()["error"]["type"] == two.json()["error"]["type"]
    broken = [client.post("/completion", json={"model": "broken"}) for client in (ours.http, theirs)]
    assert len({(b.status_code, b.json()["error"]["message"], b.json()["error"]["type"]) for b in broken}) == 1
    props = [client.get("/props").json() for client in (ours.http, theirs)]
    own = {"ui", "tools_enabled", "models_memory"}  # read by the page and by operators
    assert set(props[0]) - own == set(props[1]) and props[0]["max_instances"] == props[1]["max_instances"] == 2
    listed = [{m["id"]: m for m in client.get("/v1/models").json()["data"]} for client in (ours.http, theirs)]
    assert set(listed[0]) == set(listed[1]) == {"broken", "own", "smol", "sub"}
    for name, real in listed[1].items():
        mine = listed[0][name]
        assert set(real) <= set(mine) and set(real["status"]) <= set(mine["status"])
        for key in ("aliases", "tags", "source", "can_remove", "architecture", "object"):
            assert mine[key] == real[key], (name, key)
        for key in ("value", "failed", "exit_code"):
            assert mine["status"].get(key) == real["status"].get(key), (name, key)
