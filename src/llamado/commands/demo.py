"""What `demo.sh` runs once the package is installed: fetch a model, serve it in the background, ask one question.

With WORKERS=N the model is divided among N workers, also in the background; LATENCY1=20 puts a link of 20 ms in front
of the first (LATENCY2 …), and makes as many workers as there are latencies, two at least: with one there is nothing to
compare its link with. LLAMADO_DEMO_PORT is the server's port.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import orjson
from rich.console import Console

from llamado.engine.options import EngineOptions, ModelSource
from llamado.engine.supported import fetch_model
from llamado.errors import LlamadoError
from llamado.gguf.errors import SourceError
from llamado.gguf.reader import GGUFFile
from llamado.gguf.sources.catalogue import CATALOGUE, LARGE
from llamado.gguf.sources.resolve import progress_bar
from llamado.installation import own_command

FOLDER = Path(".demo")
PORT = 8080
CONTEXT, SLOTS = 4096, 4
QUESTION = "What is a llama? Answer in two sentences."
BEGINNING = "The llama is an animal that"

started: list[subprocess.Popen[bytes]] = []
"""Processes in the background, in the order in which they were started."""

console = Console(highlight=False, soft_wrap=True)


class DemoError(LlamadoError):
    """The demo cannot go on."""


def running() -> tuple[int, str] | None:
    """Process id and address of a demo that is already running."""
    try:
        pid_text, url = (FOLDER / "server").read_text().split()
        pid = int(pid_text)
        os.kill(pid, 0)
        httpx.get(f"{url}/health", timeout=2)
    except (OSError, ValueError, httpx.HTTPError):
        return None
    return pid, url


def fetch(spec: str) -> Path:
    """The model's file, if it can run here. Raises LlamadoError; DemoError that says what to do without a network."""
    known = CATALOGUE.get(spec) or LARGE.get(spec)
    console.print(f"model: {known.about if known else spec}")
    try:
        with progress_bar(console, spec) as progress:
            options = EngineOptions(n_ctx=CONTEXT, n_slots=SLOTS)
            return fetch_model(ModelSource(spec=spec), options, progress=progress, warn=say, say=say)
    except SourceError as error:
        if known is None and ":" not in spec:
            raise
        raise DemoError(
            f"{error}\nWithout a network: copy a .gguf file here from another machine and run ./demo.sh PATH.gguf"
        ) from None


def say(text: str) -> None:
    """Prints what has no markup."""
    console.print(text, markup=False)


def free_port() -> int:
    """The port of LLAMADO_DEMO_PORT (8080), or where it is taken, a free one with a word about it. Raises DemoError."""
    text = os.environ.get("LLAMADO_DEMO_PORT") or str(PORT)
    if not text.isdecimal() or int(text) > 65535:
        raise DemoError(f"LLAMADO_DEMO_PORT is a port, 0 to 65535 (0: any), got {text!r}")
    wanted = int(text)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError:
            probe.bind(("127.0.0.1", 0))
            console.print(f"port {wanted} is taken; using {probe.getsockname()[1]}")
        port: int = probe.getsockname()[1]
        return port


def latencies() -> list[float]:
    """Milliseconds of the link to each worker, from WORKERS and LATENCY1, LATENCY2 … Raises DemoError."""
    given = {name: value for name, value in os.environ.items() if re.fullmatch("LATENCY[1-9]", name) and value}
    try:
        n = max([int(os.environ.get("WORKERS") or 0), *(max(2, int(name[-1])) for name in given)])
        found = [float(given.get(f"LATENCY{i + 1}", 0)) for i in range(n)]
    except ValueError as error:
        raise DemoError(f"WORKERS and LATENCY1, LATENCY2 … are numbers: {error}") from None
    if n < 0 or any(not 0 <= latency < 10_000 for latency in found):
        raise DemoError("WORKERS is 0 or more, LATENCY1, LATENCY2 … are 0 to 10,000 milliseconds")
    return found


def background(name: str, *arguments: str) -> subprocess.Popen[bytes]:
    """A command of llamado that goes on when this program ends, its log in `.demo/NAME.log`."""
    FOLDER.mkdir(exist_ok=True)
    with open(FOLDER / f"{name}.log", "wb") as log:
        process = subprocess.Popen(
            own_command(*arguments),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    started.append(process)
    with open(FOLDER / "processes", "a") as processes:
        processes.write(f"{process.pid}\n")
    return process


def listening(name: str, process: subprocess.Popen[bytes]) -> str:
    """The address that a worker or tap says it listens on. Raises DemoError."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        log = (FOLDER / f"{name}.log").read_text(errors="replace")
        if found := re.search(r"(?:on|port) (127\.0\.0\.1:\d+)", log):
            return found[1]
        if process.poll() is not None:
            raise DemoError(f"{name} ended (exit code {process.returncode}); its log says:\n{log}")
        time.sleep(0.02)
    raise DemoError(f"{name} did not start within 30 s; see {FOLDER}/{name}.log")


def start_workers(links: list[float]) -> list[str]:
    """Workers in the background, behind taps where links are to be slow: their addresses."""
    endpoints = []
    for i, latency in enumerate(links, 1):
        name = f"worker{i}"
        endpoint = listening(name, background(name, "worker", "-p", "0", "-t", "1"))
        if latency:
            port = endpoint.rpartition(":")[2]
            name = f"tap{i}"
            tap = ("tap", "--listen-port", "0", "--target-port", port, "--latency-ms", str(latency))
            endpoint = listening(name, background(name, *tap))
        console.print(f"worker {i}: {endpoint}" + (f", a link of {latency:g} ms" if latency else ""))
        endpoints.append(endpoint)
    return endpoints


def start(model: Path, alias: str, port: int, links: list[float]) -> subprocess.Popen[bytes]:
    """`llamado serve` in the background, its log in `.demo/server.log`."""
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "processes").unlink(missing_ok=True)
    workers = start_workers(links)
    arguments = ["serve", "-m", str(model), "-a", alias, "--port", str(port), "-c", str(CONTEXT), "--metrics"]
    if workers:
        arguments += ["--rpc", ",".join(workers), "--tensor-split", ",".join("1" for _ in workers)]
    server = background("server", *arguments)
    (FOLDER / "server").write_text(f"{server.pid} http://127.0.0.1:{port}\n")
    return server


def end_all() -> None:
    """End what this demo has started in the background."""
    for process in started:
        process.terminate()
    for process in started:
        process.wait()
    (FOLDER / "server").unlink(missing_ok=True)
    (FOLDER / "processes").unlink(missing_ok=True)


def wait_ready(server: subprocess.Popen[bytes], url: str) -> None:
    """Show what `/health` waits for until it is ready. Raises DemoError when the server ends instead."""
    with console.status("starting the server") as status, httpx.Client(timeout=5) as http:
        while True:
            if server.poll() is not None:
                log = (FOLDER / "server.log").read_text(errors="replace").strip()
                raise DemoError(f"the server ended (exit code {server.returncode}); its log says:\n{log}")
            try:
                response = http.get(f"{url}/health")
                if response.status_code == 200:
                    return
                body = response.json()
                status.update(f"/health: {body['error']['message']}: {body['stage']} {body['progress']:.0%}")
            except (httpx.HTTPError, ValueError, KeyError):
                pass  # not listening yet
            time.sleep(0.02)


def chats(model: Path) -> bool:
    """Whether a model brings a chat template; one without only continues texts."""
    with GGUFFile.open(model) as file:
        return "tokenizer.chat_template" in file.metadata


def ask(url: str, text: str, *, chat: bool) -> float:
    """Print the answer to a question (chat) or the continuation of a text as it comes.

    Returns seconds from the request to its first token. Raises DemoError.
    """
    route = "/v1/chat/completions" if chat else "/completion"
    body: dict[str, object] = {"max_tokens": 128 if chat else 48, "temperature": 0, "stream": True}
    body |= {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    began = time.perf_counter()
    first = 0.0
    with httpx.Client(timeout=None) as http, http.stream("POST", url + route, json=body) as response:
        if response.status_code != 200:
            raise DemoError(f"{url}: {response.read().decode(errors='replace')}")
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            message = orjson.loads(line.removeprefix("data: "))
            if "error" in message:
                raise DemoError(message["error"]["message"])
            if chat:
                piece = message["choices"][0]["delta"].get("content") if message["choices"] else None
            else:
                piece = message["content"]
            if piece:
                first = first or time.perf_counter() - began
                sys.stdout.write(piece)
                sys.stdout.flush()
    print()
    return first


def main() -> int:
    """`python -m llamado.commands.demo [MODEL]`; `LLAMADO_DEMO_BEGAN`: when the script started (seconds since 1970)."""
    spec = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    script_began = float(os.environ.get("LLAMADO_DEMO_BEGAN") or time.time())
    try:
        already = running()
        if already is not None:
            raise DemoError(f"a demo is already running at {already[1]} (process {already[0]}); ./demo.sh stop ends it")
        port, links = free_port(), latencies()
        model = fetch(spec)
        url = f"http://127.0.0.1:{port}"
        try:
            server = start(model, spec if spec in CATALOGUE or spec in LARGE else model.stem, port, links)
            wait_ready(server, url)
        except DemoError:
            end_all()
            raise
        console.print(f"ready: {url}")
        chat = chats(model)
        if chat:
            console.print(f"[bold]> {QUESTION}[/bold]")
        else:
            console.print("this model has no chat template: it continues a text")
            console.print(f"[bold]{BEGINNING}[/bold]", end="")
        asked = time.time()
        first = ask(url, QUESTION if chat else BEGINNING, chat=chat)
    except LlamadoError as error:
        console.print(str(error), style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("\ninterrupted; ./demo.sh stop ends a server that is still running")
        return 130
    since_script = asked + first - script_began
    console.print(
        f"\ntime to first token: {first:.2f} s after the request, {since_script:.1f} s after the script began"
    )
    console.print(f"the server keeps running at {url} (log: {FOLDER}/server.log); stop it with ./demo.sh stop")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
