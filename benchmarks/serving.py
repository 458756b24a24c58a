"""Answers over HTTP: `llamado serve` and llama-server with equal settings, loaded in turns by 1, 4 and 8 clients.

Every client asks for 64 tokens after a prompt of 128 words, greedily, streaming, with nothing reused from earlier
prompts. The generator is bare asyncio: it looks at bytes and parses only the last event of an answer, because it shares
the processor with what it measures. Both servers run all the time; a round begins when neither does anything.

usage: serving.py [MODEL …] [--clients 1,4,8] [--rounds 3 | --quick] [--threads 2] [--only SIDE] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sides import HOST, MODELS, SIDES, model_path, server, settle

WORDS = """time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work government number night point home water room
mother area money story fact month lot right study book eye job word business issue side kind head house"""


def prompt(words: int, seed: int) -> str:
    """Words in random order: every prompt is another one."""
    chosen = random.Random(seed)
    return " ".join(chosen.choices(WORDS.split(), k=words))


@dataclass(frozen=True)
class Answer:
    """Seconds from the request to each event with a token, and the tokens generated."""

    seconds: list[float]
    n_tokens: int


async def ask(port: int, text: str, n_predict: int) -> Answer:
    """One request; its answer read event by event."""
    body = {"prompt": text, "n_predict": n_predict, "stream": True, "ignore_eos": True, "temperature": 0}
    payload = json.dumps({**body, "cache_prompt": False, "seed": 1}).encode()
    head = (
        f"POST /completion HTTP/1.1\r\nHost: {HOST}:{port}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    )
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(payload) + payload)
    status = await reader.readline()
    if b" 200 " not in status:
        raise SystemExit(f"port {port} answers {status.decode().strip()}: {(await reader.read(2000)).decode()}")
    chunked = False
    while (line := await reader.readline()) not in (b"\r\n", b""):
        chunked |= line.lower().startswith(b"transfer-encoding: chunked")
    assert chunked, "a stream without an end is not understood"
    seconds: list[float] = []
    last = b""
    while size := int(await reader.readline(), 16):
        chunk = (await reader.readexactly(size + 2))[:-2]
        now = time.perf_counter() - began
        for event in chunk.split(b"\n\n"):
            if b'"stop":true' in event:
                last = event
            elif event.startswith(b"data: {"):
                seconds.append(now)
    writer.close()
    return Answer(seconds, json.loads(last.removeprefix(b"data: "))["tokens_predicted"])


@dataclass
class Load:
    """Results of one side with one number of clients, round by round."""

    tokens_per_second: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    async def round(self, port: int, clients: int, words: int, n_predict: int, seed: int) -> None:
        """All clients ask at once; the round ends with the last answer."""
        began = time.perf_counter()
        texts = [prompt(words, seed + i) for i in range(clients)]
        answers = await asyncio.gather(*(ask(port, text, n_predict) for text in texts))
        seconds = time.perf_counter() - began
        self.tokens_per_second.append(sum(answer.n_tokens for answer in answers) / seconds)
        for answer in answers:
            self.first.append(answer.seconds[0])
            self.gaps += [b - a for a, b in zip(answer.seconds, answer.seconds[1:], strict=False)]

    def summary(self) -> dict[str, Any]:
        """Medians over rounds and requests; times in milliseconds."""
        return {
            "tokens_per_second": statistics.median(self.tokens_per_second),
            "rounds_tokens_per_second": self.tokens_per_second,
            "ttft_p50_ms": 1e3 * statistics.median(self.first),
            "itl_p50_ms": 1e3 * statistics.median(self.gaps),
            "itl_p99_ms": 1e3 * percentile(self.gaps, 0.99),
        }


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of all values do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


HEADER = """| model | clients | side | tokens/s in all | time to first token, p50 ms | between tokens, p50 / p99 ms |
|---|---:|---|---:|---:|---:|"""


def line(model: str, clients: int, side: str, summary: dict[str, Any]) -> str:
    gaps = f"{summary['itl_p50_ms']:.1f} / {summary['itl_p99_ms']:.1f}"
    rate, first = summary["tokens_per_second"], summary["ttft_p50_ms"]
    return f"| {model} | {clients} | {side} | {rate:.1f} | {first:.0f} | {gaps} |"


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"default: {' '.join(MODELS)}")
    parser.add_argument("--clients", default="1,4,8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="1 round")
    parser.add_argument("--words", type=int, default=128)
    parser.add_argument("--generate", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=SIDES, action="append", help="one side alone")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    flags = parser.parse_args()
    clients = [int(part) for part in flags.clients.split(",")]
    # Every slot has room for a prompt and its answer; the other settings are the defaults of both.
    settings = ["-t", str(flags.threads), "-np", str(max(clients)), "-c", str(1024 * max(clients))]
    sides = flags.only or list(SIDES)
    results: list[dict[str, Any]] = []
    print(HEADER, flush=True)
    for name in flags.models or MODELS:
        path = model_path(name)
        with ExitStack() as running:
            servers = {side: running.enter_context(server(side, path, settings)) for side in sides}
            for n in clients:
                loads = {side: Load() for side in sides}
                for turn in range(-1, 1 if flags.quick else flags.rounds):
                    for side in sides if turn % 2 == 0 else reversed(sides):
                        # The round before the first warms up: machine code for this number of clients, caches.
                        load = loads[side] if turn >= 0 else Load()
                        n_predict = flags.generate if turn >= 0 else 4
                        seed = 10_000 * n + 100 * (turn + 1)
                        settle(servers.values())
                        asyncio.run(load.round(servers[side].port, n, flags.words, n_predict, seed))
                summaries = {side: load.summary() for side, load in loads.items()}
                for side, summary in summaries.items():
                    print(line(name, n, side, summary), flush=True)
                result: dict[str, Any] = {"model": name, "clients": n, **summaries}
                if len(sides) == 2:
                    ours, theirs = (summaries[side] for side in SIDES)
                    ratios = {key: ours[key] / theirs[key] for key in ours if isinstance(ours[key], float)}
                    result["ratio"] = ratios
                    shown = [f"**{ratios[key]:.2f}**" for key in ("tokens_per_second", "ttft_p50_ms")]
                    gaps = f"{ratios['itl_p50_ms']:.2f} / {ratios['itl_p99_ms']:.2f}"
                    print(f"| {name} | {n} | ratio | {' | '.join(shown)} | {gaps} |", flush=True)
                results.append(result)
    if flags.json:
        flags.json.write_text(json.dumps({"settings": settings, "rows": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
