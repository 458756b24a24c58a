"""The commands as processes: workers join a server during answers, leave it at SIGTERM, and join again."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ports import free_port
from tiny_models import make_llama
from waiting import until

from llamado.commands.cluster import make

pytestmark = pytest.mark.slow
ASKED = {"prompt": "Once upon a time", "temperature": 0, "ignore_eos": True, "return_tokens": True}


class Program:
    """A command of llamado whose log can be waited for."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "llamado", *arguments]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            command, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._lines: list[str] = []
        self._more = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._more:
                self._lines.append(line)
                self._more.notify_all()

    def said(self) -> str:
        return "".join(self._lines)

    def expect(self, pattern: str) -> re.Match[str]:
        with self._more:
            found = self._more.wait_for(lambda: re.search(pattern, self.said()), 120)
        assert found, self.said()
        return found

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def start() -> Iterator[Callable[..., Program]]:
    started: list[Program] = []

    def one(*arguments: str) -> Program:
        started.append(Program(*arguments))
        return started[-1]

    yield one
    for program in started:
        program.kill()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("m") / "m.gguf"
    return make_llama(path, n_embd=256, n_ff=512, n_layer=4, n_ctx=4096, wtype="Q4_0")


def streamed(url: str, n: int, tokens: list[int], some: threading.Event) -> None:
    with httpx.stream(
        "POST", f"{url}/completion", json={**ASKED, "n_predict": n, "stream": True}, timeout=300
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                tokens += json.loads(line[6:]).get("tokens") or []
                if len(tokens) > 8:
                    some.set()


def states(url: str) -> dict[str, Any]:
    return {device["endpoint"]: device for device in httpx.get(f"{url}/cluster", timeout=60).json()["devices"]}


@pytest.mark.full
def test_workers_join_leave_and_join_again(model: Path, start: Callable[..., Program]) -> None:
    port, workers = free_port(), (free_port(), free_port())
    url = f"http://127.0.0.1:{port}"
    join = ("worker", "-t", "1", "--join", f"127.0.0.1:{port}", "--token", "secret")
    first = start(*join, "-p", str(workers[0]))  # before the server
    first.expect("cannot be joined")
    server = start("serve", "-m", str(model), "--port", str(port), "-t", "1", "-ts", "1", "-np", "2", "-c", "4096",
                   "--cluster-token", "secret")  # fmt: skip
    server.expect("all slots are idle")
    first.expect("joined; RPC0")
    tokens: list[int] = []
    some = threading.Event()
    stream = threading.Thread(target=streamed, args=(url, 1500, tokens, some))
    stream.start()
    assert some.wait(120)
    second = start(*join, "-p", str(workers[1]))
    second.expect("joined; RPC1")
    assert set(states(url)) == {None, *(f"127.0.0.1:{one}" for one in workers)}
    assert first.end() == 0 and "left" in first.said()
    assert set(states(url)) == {None, f"127.0.0.1:{workers[1]}"}
    again = start(*join, "-p", str(workers[0]))
    again.expect("joined; RPC0")
    stream.join(300)
    assert len(tokens) == 1500
    kinds = [event["kind"] for event in httpx.get(f"{url}/cluster").json()["events"] if event["kind"] != "moved"]
    assert kinds == ["joined", "joined", "drained", "joined"]
    shown = subprocess.run([sys.executable, "-m", "llamado", "top", url, "--once"], capture_output=True, text=True,
                           timeout=120, env={**os.environ, "COLUMNS": "200"})  # fmt: skip
    assert shown.returncode == 0 and f"RPC1[127.0.0.1:{workers[1]}]" in shown.stdout and "drained" in shown.stdout
    assert again.end() == 0 and second.end() == 0
    alone = httpx.post(f"{url}/completion", json={**ASKED, "n_predict": 1500, "cache_prompt": False}, timeout=300)
    assert alone.json()["tokens"] == tokens, "on the server alone"
    assert set(states(url)) == {None} and server.end() == 0


@pytest.mark.full
def test_joining_needs_a_token_or_a_certificate(model: Path, start: Callable[..., Program], tmp_path: Path) -> None:
    make(tmp_path, (), [()], 2)
    port, worker_port = free_port(), free_port()
    server = start("serve", "-m", str(model), "--port", str(port), "-t", "1", "-ts", "1", "--cluster-token", "secret",
                   "-c", "1024", "--rpc-ca", f"{tmp_path}/ca.pem", "--rpc-cert", f"{tmp_path}/server.pem", "--rpc-key",
                   f"{tmp_path}/server-key.pem", "--ssl-cert-file", f"{tmp_path}/server.pem", "--ssl-key-file",
                   f"{tmp_path}/server-key.pem")  # fmt: skip
    server.expect("all slots are idle")
    worker = ("worker", "-t", "1", "-p", str(worker_port), "--join", f"https://127.0.0.1:{port}", "--tls-cert",
              f"{tmp_path}/worker1.pem", "--tls-key", f"{tmp_path}/worker1-key.pem", "--tls-client-ca",
              f"{tmp_path}/ca.pem")  # fmt: skip
    unknown = start(*worker, "--token", "guessed")
    unknown.expect("401: the header x-cluster-token")
    unknown.kill()
    friend = start(*worker, "--token", "secret")
    friend.expect(rf"joined; RPC0\[tls://127.0.0.1:{worker_port}\]: layers")
    assert friend.end() == 0


@pytest.mark.full
def test_an_announced_worker_is_joined(model: Path, start: Callable[..., Program]) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    server = start("serve", "-m", str(model), "--port", str(port), "-t", "1", "-ts", "1", "-c", "1024", "--discover")
    server.expect("all slots are idle")
    assert "accepting every worker that is announced" in server.said()
    worker_port = free_port()
    worker = start("worker", "-t", "1", "-p", str(worker_port), "--announce")
    server.expect(rf"\[127.0.0.1:{worker_port}\]: joined")
    assert states(url)[f"127.0.0.1:{worker_port}"]["state"] == "ready"
    assert worker.end() == 0
    until(lambda: set(states(url)) == {None})
