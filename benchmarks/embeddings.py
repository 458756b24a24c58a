"""Embeddings per second over HTTP: `llamado serve` and llama-server with all-MiniLM-L6-v2, in turns.

Texts of a number of tokens each, sent as one request, or by several clients one text at a time. Both servers run all
the time; a round begins when neither does anything.

usage: embeddings.py [--types F16,F32,Q8_0] [--texts 64] [--tokens 128] [--clients 1,8] [--rounds 3] [--threads 2]
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
from sides import HOST, SIDES, server, settle

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from minilm import minilm  # where the tests' models are made, too

from llamado.gguf.sources.resolve import cache_dir

_FIRST_WORD, _LAST_WORD = 2000, 29000  # tokens of MiniLM's vocabulary that are words and parts of them


def texts(n: int, n_tokens: int, seed: int) -> list[list[int]]:
    """Random texts as tokens, each between [CLS] and [SEP]."""
    chosen = random.Random(seed)
    return [[101, *chosen.choices(range(_FIRST_WORD, _LAST_WORD), k=n_tokens - 2), 102] for _ in range(n)]


def measure(port: int, given: list[list[int]], clients: int) -> float:
    """Texts per second: with one client all in one request, with more one text each time."""
    url = f"http://{HOST}:{port}/v1/embeddings"
    with httpx.Client(timeout=600, limits=httpx.Limits(max_connections=clients)) as client:

        def ask(part: list[list[int]]) -> int:
            answer = client.post(url, json={"input": part, "encoding_format": "base64"})
            answer.raise_for_status()
            return len(answer.json()["data"])

        began = time.perf_counter()
        if clients == 1:
            done = ask(given)
        else:
            with ThreadPoolExecutor(clients) as pool:
                done = sum(pool.map(lambda text: ask([text]), given))
        seconds = time.perf_counter() - began
    assert done == len(given)
    return done / seconds


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--types", default="F16,F32,Q8_0")
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--clients", default="1,8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    flags = parser.parse_args()
    settings = ["--embeddings", "-t", str(flags.threads)]
    print("| MiniLM | clients | llamado, texts/s | llama.cpp, texts/s | ratio |\n|---|---:|---:|---:|---:|", flush=True)
    for wtype in flags.types.split(","):
        path = minilm(wtype, cache_dir() / "models")
        with ExitStack() as running:
            servers = {side: running.enter_context(server(side, path, settings)) for side in SIDES}
            for clients in map(int, flags.clients.split(",")):
                rates: dict[str, list[float]] = {side: [] for side in SIDES}
                for turn in range(-1, flags.rounds):  # the first is for machine code and caches
                    for side in SIDES if turn % 2 == 0 else reversed(SIDES):
                        settle(servers.values())
                        rate = measure(servers[side].port, texts(flags.texts, flags.tokens, turn), clients)
                        if turn >= 0:
                            rates[side].append(rate)
                ours, theirs = (statistics.median(rates[side]) for side in SIDES)
                print(f"| {wtype} | {clients} | {ours:.1f} | {theirs:.1f} | {ours / theirs:.2f} |", flush=True)


if __name__ == "__main__":
    main()
