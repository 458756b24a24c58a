"""Time from process start to the first 200 of /health, and peak memory, of `llamado serve` and llama-server.

"Cold" is our first start ever on a machine: an empty cache of machine code. (The model is there already; fetching it is
no part of this.) Peak memory is what the kernel saw (VmHWM) after one prompt of 512 tokens and 64 generated ones.

usage: startup.py [MODEL …] [--repeats 3] [--threads 2] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from sides import HOST, SIDES, Server, model_path, server, settle

N_PROMPT, N_GENERATE = 512, 64


def answer_once(running: Server) -> None:
    """One prompt of N_PROMPT tokens (ids every vocabulary has), N_GENERATE tokens generated."""
    tokens = np.random.default_rng(0).integers(300, 20_000, N_PROMPT).tolist()
    body = {"prompt": tokens, "n_predict": N_GENERATE, "ignore_eos": True, "temperature": 0, "cache_prompt": False}
    answer = httpx.post(f"http://{HOST}:{running.port}/completion", json=body, timeout=300).raise_for_status().json()
    assert answer["tokens_predicted"] == N_GENERATE and answer["tokens_evaluated"] == N_PROMPT, answer


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help="default: smollm2 gemma3")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    flags = parser.parse_args()
    settings = ["-t", str(flags.threads), "-np", "1", "-c", "4096"]
    results: list[dict[str, Any]] = []
    print("| model | side | start, warm s | start, cold s | peak memory MB |\n|---|---|---:|---:|---:|", flush=True)
    for name in flags.models or ("smollm2", "gemma3"):
        path = model_path(name)
        starts: dict[str, list[float]] = {side: [] for side in SIDES}
        memory: dict[str, list[float]] = {side: [] for side in SIDES}
        with server(SIDES[0], path, settings):
            pass  # compiles what is not compiled yet
        for _ in range(flags.repeats):
            for side in SIDES:
                with server(side, path, settings) as running:
                    starts[side].append(running.start_seconds)
                    answer_once(running)
                    settle([running])
                    memory[side].append(1e-6 * running.peak_memory())
        with (
            tempfile.TemporaryDirectory() as cache,
            server(SIDES[0], path, settings, {"LLAMADO_CACHE": cache}) as running,
        ):
            cold = running.start_seconds
        for side in SIDES:
            warm, peak = statistics.median(starts[side]), statistics.median(memory[side])
            shown = f"{cold:.2f}" if side == SIDES[0] else ""
            print(f"| {name} | {side} | {warm:.2f} | {shown} | {peak:.0f} |", flush=True)
        more = statistics.median(memory[SIDES[0]]) - statistics.median(memory[SIDES[1]])
        print(f"| {name} | difference | | | {more:+.0f} |", flush=True)
        results.append({"model": name, "start_seconds": starts, "cold_start_seconds": cold, "peak_megabytes": memory})
    if flags.json:
        flags.json.write_text(json.dumps({"settings": settings, "rows": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
