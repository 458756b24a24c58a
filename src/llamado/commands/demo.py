"""Python part of `demo.sh`: download a model, run `llamado up` in the background and ask one question.

The server splits the model across two workers, or WORKERS=N. LATENCY1=20 delays the link of the first worker by 20 ms
(LATENCY2: of the second, and so on) and raises the number of workers if necessary. LLAMADO_DEMO_PORT: server port.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from pathlib import Path

import httpx
import orjson

from llamado.cluster.state import GONE, StateFolder, all_clusters
from llamado.commands.up.running import run_down
from llamado.commands.up.start import start_in_background
from llamado.engine.options import EngineOptions, ModelSource
from llamado.engine.supported import fetch_model
from llamado.errors import LlamadoError
from llamado.gguf.errors import SourceError
from llamado.gguf.reader import GGUFFile
from llamado.gguf.sources.catalog import CATALOG, LARGE
from llamado.gguf.sources.resolve import progress_bar
from llamado.terminal.console import Console
from llamado.terminal.text import print, printable

NAME, FOLDER = "demo", ".demo"
PORT, WORKERS = 8080, 2
CONTEXT, SLOTS = 4096, 4
QUESTION = "What is a llama? Answer in two sentences."
TEXT = "The llama is an animal that"

console = Console(highlight=False, soft_wrap=True)


class DemoError(LlamadoError):
    """The demo cannot continue."""


def fetch(spec: str) -> Path:
    """Return the path of the model, which is downloaded if needed. Raises LlamadoError if it does not run here."""
    known = CATALOG.get(spec) or LARGE.get(spec)
    console.print(f"model: {known.about if known else spec}")
    try:
        with progress_bar(console, spec) as progress:
            options = EngineOptions(n_ctx=CONTEXT, n_slots=SLOTS)
            return fetch_model(ModelSource(spec=spec), options, progress=progress, warn=say, say=say)
    except SourceError as error:
        if known is None and ":" not in spec:
            raise
        raise DemoError(
            f"{error}\nWithout a network, copy a .gguf file from another machine and run ./demo.sh PATH.gguf"
        ) from None


def say(text: str) -> None:
    """Print a text without markup."""
    console.print(text, markup=False)


def free_port() -> int:
    """Return the port of LLAMADO_DEMO_PORT (8080), or a free one with a message if it is in use. Raises DemoError."""
    text = os.environ.get("LLAMADO_DEMO_PORT") or str(PORT)
    if not text.isdecimal() or int(text) > 65535:
        raise DemoError(f"LLAMADO_DEMO_PORT: expected a port, 0 to 65535 (0: any), got {text!r}")
    wanted = int(text)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError:
            probe.bind(("127.0.0.1", 0))
            console.print(f"port {wanted} is in use; using {probe.getsockname()[1]}")
        port: int = probe.getsockname()[1]
        return port


def latencies() -> list[float]:
    """Return the link latency of each worker in ms, from WORKERS and LATENCY1, LATENCY2 … Raises DemoError."""
    given = {name: value for name, value in os.environ.items() if re.fullmatch("LATENCY[1-9]", name) and value}
    try:
        n = max([int(os.environ.get("WORKERS") or WORKERS), *(int(name[-1]) for name in given)])
        found = [float(given.get(f"LATENCY{i + 1}", 0)) for i in range(n)]
    except ValueError as error:
        raise DemoError(f"WORKERS and LATENCY1, LATENCY2 …: expected numbers: {error}") from None
    if int(os.environ.get("WORKERS") or 0) < 0 or any(not 0 <= latency < 10_000 for latency in found):
        raise DemoError("WORKERS: expected 0 or more; LATENCY1, LATENCY2 …: expected 0 to 10,000 milliseconds")
    return found


def start(model: Path, alias: str, port: int, links: list[float]) -> str:
    """Run `llamado up` in the background with logs in `.demo`; return the server's URL. Raises LlamadoError."""
    arguments = ["-m", str(model), "--name", NAME, "--port", str(port), "--log-folder", FOLDER]
    arguments += ["--nodes", str(len(links) + 1), "--latency", ",".join(f"{ms:g}" for ms in links)]
    state = start_in_background(NAME, arguments, ["-a", alias, "-c", str(CONTEXT), "--metrics"])
    addresses = {service.name: service.address for service in state.services}
    for number, latency in enumerate(links, 1):
        link = f", link latency {latency:g} ms" if latency else ""
        console.print(f"worker {number}: {addresses.get(f'tap{number}') or addresses[f'worker{number}']}{link}")
    return state.url


def stop() -> int:
    """Stop the demo (`demo.sh stop`) and return the exit code."""
    if all(state.name != NAME for state in all_clusters()):
        console.print("no demo is running")
        return 0
    return run_down(NAME)


def has_chat_template(model: Path) -> bool:
    """Return True if a model has a chat template; without one it can only continue texts."""
    with GGUFFile.open(model) as file:
        return "tokenizer.chat_template" in file.metadata


def ask(url: str, text: str, *, chat: bool) -> float:
    """Print the answer to a question (chat) or the continuation of a text while it is generated.

    Return the seconds from the request to the first token. Raises DemoError.
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
                sys.stdout.write(printable(piece))
                sys.stdout.flush()
    print()
    return first


def main() -> int:
    """Run `python -m llamado.commands.demo [MODEL | stop]`. `LLAMADO_DEMO_BEGAN`: Unix time of its start."""
    spec = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    script_began = float(os.environ.get("LLAMADO_DEMO_BEGAN") or time.time())
    try:
        if spec == "stop":
            return stop()
        running = StateFolder(NAME).read()
        if running is not None and running.phase != GONE:
            raise DemoError(f"a demo is already running at {running.url}; ./demo.sh stop ends it")
        port, links = free_port(), latencies()
        model = fetch(spec)
        url = start(model, spec if spec in CATALOG or spec in LARGE else model.stem, port, links)
        console.print(f"ready: {url}")
        chat = has_chat_template(model)
        if chat:
            console.print(f"[bold]> {QUESTION}[/bold]")
        else:
            console.print("this model has no chat template, so it continues a text")
            console.print(f"[bold]{TEXT}[/bold]", end="")
        asked = time.time()
        first = ask(url, QUESTION if chat else TEXT, chat=chat)
    except LlamadoError as error:
        console.print(str(error), style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("\ninterrupted; ./demo.sh stop ends what is still running")
        return 130
    since_script = asked + first - script_began
    console.print(
        f"\ntime to first token: {first:.2f} s after the request, {since_script:.1f} s after the start of the script"
    )
    console.print(f"the demo keeps running at {url} (logs: {FOLDER}/; llamado ps); ./demo.sh stop ends it")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
