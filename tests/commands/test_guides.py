"""Commands and scripts from guides to llama.cpp, unchanged: program names, shell loops, Python with `requests`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from tiny_models import make_llama
from waiting import until

from llamado.router.swap_config import read_swap_config

pytestmark = pytest.mark.slow
Start = Callable[..., tuple[subprocess.Popen[bytes], str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model.gguf`, and `bin` with links of llama.cpp's names to llamado."""
    folder = tmp_path_factory.mktemp("guides")
    make_llama(folder / "model.gguf", n_layer=4)
    program = folder / "bin" / "llamado"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable} -P\nimport sys\nfrom llamado.commands.cli import main\nsys.exit(main())\n")
    program.chmod(0o755)
    for name in ("llama-server", "rpc-server"):
        (folder / "bin" / name).symlink_to("llamado")
    return folder


@pytest.fixture(scope="module")
def start(folder: Path) -> Iterator[Start]:
    """Run a command in the folder; return its process, and the address from its log."""
    running: list[subprocess.Popen[bytes]] = []

    def start(line: str, **variables: str) -> tuple[subprocess.Popen[bytes], str]:
        log = folder / f"{len(running)}.log"
        path = f"{folder / 'bin'}:{os.environ['PATH']}"
        command = ["bash", "-c", f"exec {line}"]
        with log.open("wb") as file:
            environment = os.environ | {"PATH": path} | variables
            process = subprocess.Popen(command, cwd=folder, env=environment, stdout=file, stderr=file)
        running.append(process)
        listens = re.compile(r"(?:listening on http://|worker on )(\S+)")
        until(lambda: listens.search(log.read_text()) or process.poll() is not None, log.read_text)
        found = listens.search(log.read_text())
        assert found is not None, log.read_text()
        return process, found[1]

    yield start
    for process in running:
        process.terminate()
    for process in running:
        process.wait(60)


@pytest.fixture(scope="module")
def url(start: Start) -> str:
    """URL of a server that is starting."""
    return "http://" + start("llama-server -m model.gguf --port 0 --parallel 2 --ctx-size 512")[1]


def _is_ready(url: str) -> bool:
    while requests.get(f"{url}/health", timeout=5).status_code != 200:
        time.sleep(0.05)
    return True


def shell(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=60)


@pytest.mark.full
def test_waiting_in_the_shell(url: str) -> None:
    loops = [
        f"""while ! curl -s {url}/health | grep -q '"ok"'; do
              echo "Waiting for server..."
              sleep 0.2
            done
            echo "Server ready!" """,
        f"while ! curl -sf {url}/health; do sleep 0.2; done; echo Server ready!",
        f"curl -f {url}/health && echo Server ready!",
        f"""SERVER_URL={url}
            while true; do
              status=$(curl -s -o /dev/null -w "%{{http_code}}" --connect-timeout 5 --max-time 10 \\
                  "${{SERVER_URL}}/health" 2>/dev/null)
              case $status in
                  200) echo "Server ready!"; exit 0 ;;
                  503) echo "Loading model..." ;;
                  000) echo "Connection failed, retrying..." ;;
                  *) echo "Unexpected status: $status"; exit 1 ;;
              esac
              sleep 0.2
            done""",
    ]
    for loop in loops:
        done = shell(loop)
        assert done.returncode == 0 and done.stdout.endswith("Server ready!\n"), done


@pytest.mark.full
def test_waiting_in_python(url: str) -> None:
    def wait_for_server_ready(url: str, timeout: int = 60, check_interval: float = 0.1) -> bool:
        start_time = time.time()
        while time.time() - start_time < timeout:
            try:
                response = requests.get(f"{url}/health", timeout=5)
                if response.status_code == 200:
                    return True
                assert response.status_code == 503
            except (requests.exceptions.ConnectionError, requests.exceptions.Timeout):
                pass
            time.sleep(check_interval)
        return False

    assert wait_for_server_ready(url)
    assert not wait_for_server_ready("http://127.0.0.1:1", timeout=1)


class GuidesClient:
    """`LlamaServerClient` from a guide."""

    def __init__(self, base_url: str, startup_timeout: int = 300, health_check_timeout: int = 5) -> None:
        self.base_url = base_url.rstrip("/")
        self.startup_timeout = startup_timeout
        self.health_check_timeout = health_check_timeout

    def wait_until_ready(self) -> bool:
        start = time.time()
        last_status = None
        while time.time() - start < self.startup_timeout:
            try:
                resp = requests.get(f"{self.base_url}/health", timeout=self.health_check_timeout)
                if resp.status_code == 200:
                    return True
                if resp.status_code == 503:
                    data = resp.json()
                    msg = data.get("error", {}).get("message", "Loading")
                    if msg != last_status:
                        print(f"Server status: {msg}")
                        last_status = msg
            except requests.exceptions.ConnectionError:
                if last_status != "connecting":
                    print("Waiting for server to start...")
                    last_status = "connecting"
            time.sleep(0.1)
        return False

    def get_slot_status(self) -> Any:
        resp = requests.get(f"{self.base_url}/slots", timeout=self.health_check_timeout)
        return resp.json() if resp.status_code == 200 else None


@pytest.mark.full
def test_the_client_of_the_guide(url: str, start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    client = GuidesClient(url)
    assert client.wait_until_ready() and [slot["id"] for slot in client.get_slot_status()] == [0, 1]
    capsys.readouterr()
    # A missing worker keeps the server loading.
    _, address = start("llama-server -m model.gguf --port 0 --rpc 127.0.0.1:1")
    assert not GuidesClient(f"http://{address}/", startup_timeout=1).wait_until_ready()
    assert capsys.readouterr().out == "Server status: Loading model\n"


@pytest.mark.full
def test_requests_of_the_guide(url: str) -> None:
    """Chat, completions, and a stream whose "content" is printed."""
    assert _is_ready(url)
    body: dict[str, Any] = {
        "model": "local-model",
        "messages": [{"role": "user", "content": "Hello!"}],
        "temperature": 0.0,
        "max_tokens": 12,
    }
    result = requests.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
    said = result["choices"][0]["message"]["content"]
    completion = {"model": "local-model", "prompt": "The capital of France is", "max_tokens": 5, "temperature": 0.1}
    result = requests.post(f"{url}/v1/completions", json=completion, timeout=60).json()
    assert isinstance(result["choices"][0]["text"], str)

    response = requests.post(f"{url}/v1/chat/completions", json=body | {"stream": True}, stream=True, timeout=60)
    printed = ""
    for line in response.iter_lines():
        if line:
            line = line.decode("utf-8")
            if line.startswith("data: "):
                data = line[6:]
                if data == "[DONE]":
                    break
                try:
                    chunk = json.loads(data)
                    content = chunk["choices"][0]["delta"].get("content", "")
                    printed += str(content)
                except json.JSONDecodeError:
                    continue
    assert printed == said and said


@pytest.mark.full
def test_a_greedy_request_of_the_guide(url: str) -> None:
    assert _is_ready(url)
    asked = {"prompt": "Once upon", "max_tokens": 16, "do_sample": False, "top_p": 1}
    texts = set()
    for seed in range(4):
        body = asked | {"temperature": 0, "seed": seed}
        texts.add(requests.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"])
    assert len(texts) == 1


@pytest.mark.full
def test_a_server_and_its_worker(start: Start, folder: Path) -> None:
    """Two workers on one machine, -ngl 99, the lines of the log, and a chat."""
    workers = [start(f"./bin/rpc-server -d {device} -p 0")[1] for device in ("MTL0", "CPU")]
    ports = [worker.rpartition(":")[2] for worker in workers]
    for port in ports:
        assert shell(f'timeout 5 bash -c "</dev/tcp/127.0.0.1/{port}" && echo OK').stdout == "OK\n"
    line = f"-m model.gguf --rpc {','.join(workers)} --tensor-split 0.5,0.5,0 -ngl 99 --host 0.0.0.0 --port 0"
    _, address = start(f"./bin/llama-server {line}", LLAMA_LOG_VERBOSITY="10")
    port = address.rpartition(":")[2]
    assert _is_ready(f"http://127.0.0.1:{port}")
    log = max(folder.glob("*.log"), key=lambda path: int(path.stem)).read_text()  # the last one started
    for said in (
        f"server is listening on http://0.0.0.0:{port}\n",
        "model loaded in ",
        "server listening on ",
        "all slots are idle\n",
        f"layer 0: RPC0[{workers[0]}]\n",
        f"layer 3: RPC1[{workers[1]}]\n",
    ):
        assert said in log
    question = '{"model":"test","messages":[{"role":"user","content":"Hello!"}],"max_tokens":20}'
    done = shell(
        f"curl -s http://localhost:{port}/v1/chat/completions -H 'Content-Type: application/json' -d '{question}'"
    )
    assert json.loads(done.stdout)["choices"][0]["message"]["role"] == "assistant"


def test_a_llama_swap_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        """models:
  "llama-70b":
    cmd: "llama-server --port 8999 -m /models/llama-70b.gguf --rpc worker:50052"
    proxy: "http://127.0.0.1:8999"
    checkEndpoint: "/health"
    ttl: 300

  "qwen-32b":
    cmd: "llama-server --port 8999 -m /models/qwen-32b.gguf"
    proxy: "http://127.0.0.1:8999"
    checkEndpoint: "/health"
    ttl: 300
"""
    )
    first, second = read_swap_config(tmp_path / "config.yaml").models
    assert (first.name, second.name) == ("llama-70b", "qwen-32b")
    assert first.launch.args[:3] == second.launch.args[:3] == ("llama-server", "--port", "8999")
