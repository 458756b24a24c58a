"""Time to first token of simultaneous clients: `llamado serve` and llama-server with equal settings.

Prompts are tokens, other ones in every round, and nothing of earlier ones is reused. `alike`: eight prompts of 512
tokens; `short`: eight of 64; `mixed`: eight of 64 to 2,048; `behind`: seven of 128 that come a tenth of a second after
one of 4,096. Both servers run all the time; a round begins when neither does anything.

usage: waits.py [MODEL] [--mixes alike,short,mixed,behind] [--rounds 3] [--generate 32] [--threads 2]
                [--sides llamado,llama.cpp] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
from serving import percentile
from sides import HOST, SIDES, model_path, server, settle

MIXES: dict[str, list[tuple[float, int]]] = {
    "alike": [(0.0, 512)] * 8,
    "short": [(0.0, 64)] * 8,
    "mixed": [(0.0, n) for n in (512, 64, 2048, 128, 256, 1024, 64, 512)],
    "behind": [(0.0, 4096), *[(0.1, 128)] * 7],
}
"""Of each client, after how many seconds it asks, and how many tokens its prompt has."""
_LEAST, _MOST = 1000, 20000
"""Tokens that prompts are made of: words of the vocabularies of all models here."""


async def _ask(client: httpx.AsyncClient, seed: int, after: float, n: int, n_predict: int) -> tuple[float, float]:
    """Seconds until the first token of an answer, and until its last."""
    prompt = random.Random(seed).choices(range(_LEAST, _MOST), k=n)
    body = {"prompt": prompt, "n_predict": n_predict, "stream": True, "ignore_eos": True, "temperature": 0}
    await asyncio.sleep(after)
    began, first = time.perf_counter(), 0.0
    async with client.stream("POST", "/completion", json={**body, "cache_prompt": False}) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: ") and not first:
                first = time.perf_counter() - began
    return first, time.perf_counter() - began


async def _round(port: int, mix: list[tuple[float, int]], n_predict: int, seed: int) -> tuple[list[float], float]:
    """Seconds that each client waits for its first token, and until the last answer is there."""
    limits = httpx.Limits(max_connections=len(mix))
    async with httpx.AsyncClient(base_url=f"http://{HOST}:{port}", timeout=600, limits=limits) as client:
        began = time.perf_counter()
        found = await asyncio.gather(*(_ask(client, seed + i, *who, n_predict) for i, who in enumerate(mix)))
    return [first for first, _ in found], time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--mixes", default=",".join(MIXES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--generate", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    flags = parser.parse_args()
    path, sides = model_path(flags.model), flags.sides.split(",")
    settings = ["-t", str(flags.threads), "-np", "8", "-c", str(8 * 4608)]
    kept: dict[str, Any] = {}
    print("| model | clients | side | first token, mean / p95 ms | longest prompt's | last answer, s |")
    print("|---|---|---|---:|---:|---:|", flush=True)
    with ExitStack() as running:
        servers = {side: running.enter_context(server(side, path, settings)) for side in sides}
        for name in flags.mixes.split(","):
            mix = MIXES[name]
            longest = max(range(len(mix)), key=lambda i: mix[i][1])
            firsts: dict[str, list[list[float]]] = {side: [] for side in sides}
            whole: dict[str, list[float]] = {side: [] for side in sides}
            for turn in range(-1, flags.rounds):
                for side in sides if turn % 2 == 0 else reversed(sides):
                    settle(servers.values())
                    first, seconds = asyncio.run(_round(servers[side].port, mix, flags.generate, 100 * (turn + 2)))
                    if turn >= 0:  # the round before warms up
                        firsts[side].append(first)
                        whole[side].append(seconds)
            for side in sides:
                mean = statistics.median(statistics.mean(first) for first in firsts[side])
                late = statistics.median(percentile(first, 0.95) for first in firsts[side])
                its = statistics.median(first[longest] for first in firsts[side])
                shown = f"{1e3 * mean:.0f} / {1e3 * late:.0f} | {1e3 * its:.0f} | {statistics.median(whole[side]):.2f}"
                print(f"| {flags.model} | {name} | {side} | {shown} |", flush=True)
            kept[name] = {"first_seconds": firsts, "seconds": whole}
    if flags.json:
        flags.json.write_text(json.dumps({"model": flags.model, "settings": settings, "mixes": kept}, indent=2) + "\n")


if __name__ == "__main__":
    main()
