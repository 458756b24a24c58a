"""Three models in two places: random requests, each answer checked, and a model's process killed every 20 seconds.

Every answer must be the one its model gave to the same prompt when nothing else was going on. A quarter of the requests
stream; a stream that had begun when its process was killed can only say so, and is counted apart. Everything else must
be answered: the exit code is 1 if anything was not.

usage: router.py [--seconds 180] [--clients 8] [--kill-every 20] [--models-max 2] [--threads 2] [--seed 1] [--json FILE]
                 [--log FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from sides import HOST, N_PREDICT, PROMPTS, model_path

MODELS = {"small": "smollm2", "gemma": "gemma3", "noise": "synthetic-tiny"}


@dataclass
class Tally:
    """Counts and times of one run."""

    requests: int = 0
    streams: int = 0
    wrong: int = 0
    errors: list[str] = field(default_factory=list)
    cut_streams: int = 0
    """Streams that had begun when their process was killed."""
    kills: int = 0
    hit: int = 0
    """Requests under way in the processes that were killed."""
    deaths: int = 0
    loads: int = 0
    seconds: list[float] = field(default_factory=list)
    by_model: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MODELS, 0))


@contextmanager
def router(models_max: int, threads: int, keep: Path | None) -> Iterator[str]:
    """The address of a router for the models."""
    flags = []
    for alias, name in MODELS.items():
        path = model_path(name)
        flags += ["-m", str(path), "--alias", f"{alias}={path}"]
    flags += [
        "--models-max",
        str(models_max),
        "-t",
        str(threads),
        "-c",
        "2048",
        "--host",
        HOST,
        "--port",
        "0",
        "--log-timestamps",
    ]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as out:
            process = subprocess.Popen([sys.executable, "-m", "llamado", "serve", *flags], stderr=out, stdout=out)
        try:
            while True:
                if process.poll() is not None:
                    raise SystemExit(log.read_text())
                lines = log.read_text().splitlines()
                if found := [line.split()[-1] for line in lines if "listening on http" in line]:
                    break
                time.sleep(0.05)
            yield found[0]
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(60)
            if keep:
                keep.write_bytes(log.read_bytes())
            if code:
                print(log.read_text()[-5000:], file=sys.stderr)


def request(model: str, prompt: str, stream: bool) -> dict[str, Any]:
    greedy = {"temperature": 0, "seed": 1, "n_predict": N_PREDICT, "stream": stream}
    return {"model": model, "prompt": prompt, **greedy}


async def expected(http: httpx.AsyncClient) -> dict[tuple[str, str], str]:
    """Each model's answer to each prompt, alone."""
    found = {}
    for model in MODELS:
        for prompt in PROMPTS:
            answer = await http.post("/completion", json=request(model, prompt, False))
            if answer.status_code != 200:
                raise SystemExit(f"{model}: {answer.text}")
            found[model, prompt] = answer.json()["content"]
    for prompt in PROMPTS:
        if len({found[model, prompt] for model in MODELS}) < len(MODELS):
            raise SystemExit(f"two models say the same to {prompt!r}: nothing could be told from it")
    return found


async def ask_whole(http: httpx.AsyncClient, model: str, prompt: str) -> str:
    answer = await http.post("/completion", json=request(model, prompt, False))
    if answer.status_code != 200:
        raise RuntimeError(f"status {answer.status_code}: {answer.text[:300]}")
    return str(answer.json()["content"])


async def ask_stream(http: httpx.AsyncClient, model: str, prompt: str) -> str | None:
    """The streamed text; None when the process was killed after the stream had begun."""
    text = ""
    async with http.stream("POST", "/completion", json=request(model, prompt, True)) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"status {answer.status_code}: {(await answer.aread()).decode()[:300]}")
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    return None
                text += event["content"]
    return text


async def client(
    http: httpx.AsyncClient, number: int, seed: int, end: float, known: dict[Any, str], tally: Tally
) -> None:
    chosen = random.Random(seed * 1000 + number)
    while time.monotonic() < end:
        model, prompt = chosen.choice(list(MODELS)), chosen.choice(PROMPTS)
        stream = chosen.random() < 0.25
        tally.requests += 1
        tally.streams += stream
        began = time.monotonic()
        try:
            text = await (ask_stream if stream else ask_whole)(http, model, prompt)
        except (httpx.HTTPError, RuntimeError) as error:
            tally.errors.append(f"{model}: {type(error).__name__}: {error}")
            continue
        if text is None:
            tally.cut_streams += 1
            continue
        tally.seconds.append(time.monotonic() - began)
        tally.by_model[model] += 1
        if text != known[model, prompt]:
            tally.wrong += 1
            tally.errors.append(f"{model}: {prompt!r} → {text!r}, expected {known[model, prompt]!r}")


async def killer(http: httpx.AsyncClient, every: float, seed: int, tally: Tally) -> None:
    chosen = random.Random(seed)
    while True:
        await asyncio.sleep(every)
        while True:
            running = (await http.get("/running")).json()["running"]
            busy = [entry for entry in running if entry["state"] == "ready" and entry["requests"]]
            if busy:
                break
            await asyncio.sleep(0.1)
        victim = chosen.choice(busy)
        os.kill(victim["pid"], signal.SIGKILL)
        tally.kills += 1
        tally.hit += victim["requests"]
        print(f"  killed {victim['model']} with {victim['requests']} request(s) under way")


async def listener(http: httpx.AsyncClient, tally: Tally) -> None:
    async with http.stream("GET", "/models/sse") as events:
        async for line in events.aiter_lines():
            if line.startswith("data: "):
                told = json.loads(line[6:])
                if told["event"] == "status_change":
                    tally.loads += told["data"]["status"] == "loaded"
                    tally.deaths += bool(told["data"].get("exit_code"))


async def added_latency(http: httpx.AsyncClient, times: int = 300) -> tuple[float, float]:
    """Milliseconds of a small request, straight to a model's process and through the router: medians."""
    body = {"model": "small", "content": "a"}
    await http.post("/tokenize", json=body)
    running = (await http.get("/running")).json()["running"]
    socket = next(entry["proxy"] for entry in running if entry["model"] == "small")
    straight = httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=socket), base_url="http://localhost")
    took: dict[str, list[float]] = {"straight": [], "router": []}
    async with straight:
        for _ in range(times):
            for name, side in (("straight", straight), ("router", http)):
                began = time.perf_counter()
                await side.post("/tokenize", json=body)
                took[name].append((time.perf_counter() - began) * 1e3)
    return tuple(sorted(times)[len(times) // 2] for times in took.values())  # type: ignore[return-value]


async def measure(options: argparse.Namespace, url: str) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=options.clients + 8)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as http:
        known = await expected(http)
        tally = Tally()
        watching = [
            asyncio.ensure_future(listener(http, tally)),
            asyncio.ensure_future(killer(http, options.kill_every, options.seed, tally)),
        ]
        end = time.monotonic() + options.seconds
        began = time.monotonic()
        await asyncio.gather(*(client(http, i, options.seed, end, known, tally) for i in range(options.clients)))
        took = time.monotonic() - began
        for task in watching:
            task.cancel()
        straight, through = await added_latency(http)
    tally.seconds.sort()
    middle, late = (tally.seconds[int(len(tally.seconds) * share)] for share in (0.5, 0.95))
    print(
        f"requests          {tally.requests} in {took:.0f} s ({tally.streams} streams), by model {dict(tally.by_model)}"
    )
    print(f"errors            {len(tally.errors)} ({tally.wrong} wrong answers)")
    print(f"streams cut       {tally.cut_streams} (had begun when their process was killed)")
    print(f"kills             {tally.kills}, of processes that worked on {tally.hit} requests")
    # A process that was killed while its place was promised to another model comes back in its turn, not at once.
    print(f"loads             {tally.loads}, of them {tally.deaths} restarts at once")
    print(f"seconds           median {middle:.2f}, 95% {late:.2f}")
    print(f"added latency     {through - straight:.2f} ms ({straight:.2f} straight, {through:.2f} through the router)")
    for error in tally.errors[:10]:
        print("  " + error)
    latency = {"straight_ms": straight, "router_ms": through}
    return {**asdict(tally), "seconds": {"median": middle, "p95": late}, "took": took, **latency}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--kill-every", type=float, default=20)
    parser.add_argument("--models-max", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--log", type=Path, help="where to keep the log of the router and its models")
    options = parser.parse_args()
    with router(options.models_max, options.threads, options.log) as url:
        result = asyncio.run(measure(options, url))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    return 1 if result["errors"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
