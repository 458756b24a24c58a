"""The slowest /health while a server is busy: the first grammar, bodies of 10 MB, a worker that goes and returns.

/health is asked every 2 ms over one connection. llama.cpp is asked the same (it tokenizes long texts for minutes, of
which one is waited for), but for the worker: its server ends with it.

usage: health.py [MODEL] [--only llamado|llama.cpp] [--threads 1] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from chaos import Worker
from sides import HOST, SIDES, model_path, server

AWAY = 2.0
"""Seconds for which the worker is gone."""
PATIENCE = 60.0
"""Seconds until a response counts as too late; "took s" is about that then."""


def requests() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Requests: description, path, body."""
    short = {"prompt": "hello", "n_predict": 4, "cache_prompt": False}
    yield "the first grammar", "/completion", {**short, "json_schema": {"type": "object"}}
    yield "10 MB of text", "/tokenize", {"content": "once upon a time " * 580_000}
    yield "10 MB with escapes", "/tokenize", {"content": "é\n" * 590_000 + "a " * 2_500_000}
    yield (
        "a chat of 10 MB",
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "once upon a time " * 580_000}],
            "max_tokens": 1,
        },
    )
    yield "a prompt of 290,000 numbers", "/completion", {**short, "prompt": [1000] * 290_000}


def while_busy(port: int, work: Callable[[], None]) -> tuple[float, list[float]]:
    """Seconds that `work` takes, and of each /health meanwhile."""
    connection = http.client.HTTPConnection(HOST, port, timeout=60)
    took: list[float] = []

    def run() -> None:
        began = time.perf_counter()
        try:
            work()
        finally:
            took.append(time.perf_counter() - began)

    thread = threading.Thread(target=run)
    thread.start()
    waits: list[float] = []
    while not took:
        began = time.perf_counter()
        connection.request("GET", "/health")
        connection.getresponse().read()
        waits.append(time.perf_counter() - began)
        time.sleep(0.002)
    thread.join()
    return took[0], waits


def ask(port: int, path: str, body: dict[str, Any]) -> None:
    """Send one request, and wait up to PATIENCE seconds for its response, which does not matter."""
    connection = http.client.HTTPConnection(HOST, port, timeout=PATIENCE)
    with contextlib.suppress(ConnectionError, TimeoutError):  # refused in the middle, or takes too long
        connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        connection.getresponse().read()


def lose_worker(worker: Worker, port: int) -> None:
    """Kills the worker in the middle of an answer and starts it again; returns when the answer is complete."""
    body = {"prompt": "once upon a time", "n_predict": 200, "ignore_eos": True}
    answer = threading.Thread(target=ask, args=(port, "/completion", body))
    answer.start()
    time.sleep(0.5)
    worker.kill()
    time.sleep(AWAY)
    worker.start()
    answer.join()


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="gemma3", metavar="MODEL", help="default: gemma3")
    parser.add_argument("--only", choices=SIDES, help="one side")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    flags = parser.parse_args()
    path = model_path(flags.model)
    settings = ["-t", str(flags.threads), "-np", "1", "-c", "4096"]
    rows: list[dict[str, Any]] = []
    print("| side | while | took s | slowest /health ms | median ms |\n|---|---|---:|---:|---:|", flush=True)

    def measure(side: str, what: str, port: int, work: Callable[[], None]) -> None:
        took, waits = while_busy(port, work)
        milliseconds = sorted(1e3 * wait for wait in waits)
        rows.append({"side": side, "while": what, "seconds": took, "health_ms": milliseconds})
        slowest, median = milliseconds[-1], milliseconds[len(waits) // 2]
        print(f"| {side} | {what} | {took:.2f} | {slowest:.0f} | {median:.1f} |", flush=True)

    for side in [flags.only] if flags.only else SIDES:
        for what, where, body in requests():
            # A server of its own: an earlier request may still keep it busy.
            with server(side, path, settings) as running:
                ask(running.port, "/completion", {"prompt": "hello", "n_predict": 4})
                measure(side, what, running.port, partial(ask, running.port, where, body))
    if flags.only != SIDES[1]:
        worker = Worker()
        try:
            worker.wait()
            with server(SIDES[0], path, [*settings, "--rpc", f"{HOST}:{worker.port}"]) as running:
                ask(running.port, "/completion", {"prompt": "hello", "n_predict": 4})
                measure(SIDES[0], "a worker goes and returns", running.port, lambda: lose_worker(worker, running.port))
        finally:
            worker.kill()
    if flags.json:
        flags.json.write_text(json.dumps({"settings": settings, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
