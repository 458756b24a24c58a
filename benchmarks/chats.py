"""Many chats that begin with the same long system prompt: memory and time, and every answer of ours beside the same
chat alone.

All chats ask their next turn at once, greedily; their prompts are tokens, so both sides read the same ones. A server
that holds the beginning once needs cells for it once, and computes it once.

usage: chats.py [MODEL] [--chats 64] [--turns 20] [--system 2000] [--quick] [--sides llamado,llama.cpp] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from sides import HOST, SIDES, Server, model_path, server, settle
from turns import anonymous

QUESTION, ANSWER = 12, 12
"""Tokens of a question, and of an answer."""
_LEAST, _MOST = 1000, 20000
"""Tokens that questions are made of: words of the vocabularies of all models here."""


def tokens(n: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(_LEAST, _MOST), k=n)


class Done(NamedTuple):
    """Chats of one side: their answers, and the prompt tokens that were computed or cached."""

    answers: list[list[list[int]]]
    seconds: float
    first_turn: float
    computed: int
    cached: int


async def _turn(client: httpx.AsyncClient, prompt: list[int], *, cached: bool) -> dict[str, Any]:
    body = {"prompt": prompt, "n_predict": ANSWER, "temperature": 0, "seed": 1, "cache_prompt": cached}
    answer = await client.post("/completion", json={**body, "ignore_eos": True, "return_tokens": True})
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


async def chats(port: int, n_system: int, which: list[int], n_turns: int, *, at_once: bool) -> Done:
    """Chats by their numbers: those of a turn all at once, or one chat after the other, each read anew."""
    said = {number: tokens(n_system, n_system) for number in which}
    answers: dict[int, list[list[int]]] = {number: [] for number in which}
    computed = known = 0
    first_turn = 0.0
    began = time.perf_counter()
    limits = httpx.Limits(max_connections=len(which))
    async with httpx.AsyncClient(base_url=f"http://{HOST}:{port}", timeout=3600, limits=limits) as client:

        async def one(number: int, turn: int) -> None:
            nonlocal computed, known
            said[number] += tokens(QUESTION, 1 + number * n_turns + turn)
            answer = await _turn(client, said[number], cached=at_once or turn > 0)
            said[number] += answer["tokens"]
            answers[number].append(answer["tokens"])
            computed += answer["timings"]["prompt_n"]
            known += answer["timings"]["cache_n"]

        if at_once:
            for turn in range(n_turns):
                await asyncio.gather(*(one(number, turn) for number in which))
                first_turn = first_turn or time.perf_counter() - began
        else:
            for number in which:
                for turn in range(n_turns):
                    await one(number, turn)
    return Done([answers[number] for number in which], time.perf_counter() - began, first_turn, computed, known)


def shared_cells(to: Server) -> int:
    """Cells of the KV cache that several chats have."""
    text = httpx.get(f"http://{HOST}:{to.port}/metrics").text
    return int(next(float(line.split()[1]) for line in text.splitlines() if line.startswith("llamado_cache_shared_")))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--chats", type=int, default=64)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--system", type=int, default=2000, help="tokens of the system prompt")
    parser.add_argument("--quick", action="store_true", help="8 chats of 3 turns, of which 2 are compared")
    parser.add_argument("--alone", type=int, default=-1, help="how many chats are compared; -1: all")
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args()
    if flags.quick:
        flags.chats, flags.turns, flags.alone = 8, 3, 2
    path = model_path(flags.model)
    each = flags.system + flags.turns * (QUESTION + ANSWER)
    # Cells for all chats, if none shares what it begins with.
    n_ctx = -(-flags.chats * (each + 64) // 256) * 256
    settings = ["-t", str(flags.threads), "-np", str(flags.chats), "-c", str(n_ctx), "--kv-unified", "--metrics"]
    print(
        f"{flags.model}: {flags.chats} chats of {flags.turns} turns behind {flags.system} tokens; {' '.join(settings)}",
        end="\n\n",
    )
    print("| side | seconds in all | first turn | prompts' tokens computed / known | memory grown, MiB | peak, MiB |")
    print("|---|---:|---:|---:|---:|---:|", flush=True)
    kept: dict[str, Any] = {}
    for side in flags.sides.split(","):
        with server(side, path, settings) as to:
            asyncio.run(chats(to.port, 64, [10**6 + i for i in range(min(flags.chats, 8))], 1, at_once=True))  # warm
            settle([to])
            before = anonymous(to.pid)
            done = asyncio.run(chats(to.port, flags.system, [*range(flags.chats)], flags.turns, at_once=True))
            grown, peak = (anonymous(to.pid) - before) / 2**20, to.peak_memory() / 2**20
            counts = f"{done.computed} / {done.cached}"
            print(
                f"| {side} | {done.seconds:.1f} | {done.first_turn:.1f} | {counts} | {grown:+.0f} | {peak:.0f} |",
                flush=True,
            )
            kept[side] = {**done._asdict(), "grown_mib": grown, "peak_mib": peak}
            if side == "llamado":
                kept[side]["shared_cells"] = shared_cells(to)
    if "llamado" in kept:
        print(f"\nCells that several chats of llamado have: {kept['llamado']['shared_cells']}.")
        which = [*range(flags.chats if flags.alone < 0 else min(flags.alone, flags.chats))]
        alone = ["-t", str(flags.threads), "-np", "1", "-c", str(each + 64)]
        with server("llamado", path, alone) as to:
            right = asyncio.run(chats(to.port, flags.system, which, flags.turns, at_once=False)).answers
        same = sum(a == b for a, b in zip(kept["llamado"]["answers"], right, strict=False))
        print(f"Chats of llamado whose answers are those of the chat alone: {same} of {len(which)}.")
    if flags.json:
        flags.json.write_text(json.dumps(kept))


if __name__ == "__main__":
    main()
