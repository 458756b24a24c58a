"""A gateway before two real llama-servers, and what `llamado verify` finds between them and one of ours."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from peer_server import llama_server

from llamado.commands import cli
from llamado.gateway.options import GatewayOptions, ReplicaOptions
from llamado.gateway.serve import make_gateway
from llamado.http.sockets import listen

pytestmark = [pytest.mark.interop, pytest.mark.full]

OPTIONS = ("-c", "4096", "-np", "4", "-t", "1", "-a", "m", "--metrics")


@pytest.fixture(scope="module")
def servers(peer_bin: Path, smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    folder = tmp_path_factory.mktemp("replicas")
    with ExitStack() as stack:
        logs = [folder / f"{i}.log" for i in range(2)]
        running = [stack.enter_context(llama_server(peer_bin, smollm2_path, log, *OPTIONS)) for log in logs]
        yield [str(client.base_url).rstrip("/") for client in running]


@pytest.fixture(scope="module")
def gateway(servers: list[str]) -> Iterator[httpx.Client]:
    replicas = tuple(ReplicaOptions(url=url, name=name) for url, name in zip(servers, "ab", strict=True))
    server = make_gateway(GatewayOptions(replicas=replicas, admin_key="k"))
    sockets = listen(("127.0.0.1",), 0)
    thread = threading.Thread(target=server.run, args=(sockets,), daemon=True)
    thread.start()
    with httpx.Client(base_url=f"http://127.0.0.1:{sockets[0].getsockname()[1]}", timeout=300) as http:
        end = time.monotonic() + 120
        while [len(m["replicas"]) for m in http.get("/v1/models").json()["data"]] != [2]:
            assert time.monotonic() < end
            time.sleep(0.05)
        yield http
    server.should_exit = server.force_exit = True
    thread.join(60)


def test_real_servers_are_replicas(gateway: httpx.Client) -> None:
    assert gateway.get("/health").status_code == 200
    homes: dict[int, set[str]] = {}
    for turn in (1, 2, 3):
        for chat in range(4):
            said = [f"Chat {chat}, turn {i}: tell me about stones, rivers and gardens. " * 6 for i in range(turn)]
            messages = [{"role": "user", "content": text} for text in said]
            answer = gateway.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 4})
            assert answer.status_code == 200
            homes.setdefault(chat, set()).add(answer.headers["x-llamado-replica"])
            if turn > 1:
                assert answer.json()["timings"]["cache_n"] > 50
    assert all(len(names) == 1 for names in homes.values())
    assert {name for names in homes.values() for name in names} == {"a", "b"}
    text = gateway.get("/metrics").text
    for name in "ab":
        label = rf'engine="llama.cpp",engine_version="[^"]+",model_id="m",replica="{name}"'
        assert re.search(rf"^llamacpp:prompt_tokens_total{{{label}}} \d", text, re.MULTILINE)
    assert {slot["replica"] for slot in gateway.get("/slots").json()} == {"a", "b"}


def test_a_stream_passes_to_its_end(gateway: httpx.Client) -> None:
    body = {"prompt": "Once upon a time", "n_predict": 24, "ignore_eos": True, "stream": True}
    with gateway.stream("POST", "/completion", json=body) as answer:
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")]
    assert events[-1]["stop"] and events[-1]["tokens_predicted"] == 24


def test_verify_asks_real_servers(
    servers: list[str], smollm2_path: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Two of them that are asked for one thing at a time are equal; against ours the first differing token is shown."""
    small = ["-n", "3", "--n-predict", "8", "--parallel", "1", "--json"]
    assert cli.main(["verify", *servers, *small]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["equal"] and all("build" in one["receipt"] for one in found["servers"])
    log = tmp_path / "ours.log"
    command = [sys.executable, "-m", "llamado", "serve", "-m", str(smollm2_path), "-t", "1", "--port", "0", *OPTIONS]
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as ours:
        try:
            end = time.monotonic() + 120
            while not (address := re.search(r"listening on (http\S+)", log.read_text())):
                assert ours.poll() is None and time.monotonic() < end
                time.sleep(0.05)
            while httpx.get(f"{address[1]}/health").status_code != 200:
                assert time.monotonic() < end
                time.sleep(0.05)
            cli.main(["verify", address[1], servers[0], *small, "--temp", "5"])
        finally:
            ours.terminate()
    found = json.loads(capsys.readouterr().out)
    assert found["servers"][0]["receipt"]["files"][0]["sha256"]
    assert found["notes"] and "no receipts" in found["notes"][-1]
    for difference in found["differences"]:
        tops = [[token["id"] for token in side["top"]] for side in difference["sides"]]
        assert tops[0][0] == tops[1][0]  # what is likeliest there is the same for both
