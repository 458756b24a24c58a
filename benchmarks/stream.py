"""One stream over HTTP beside the same side's benchmark without a server: what the way from engine to client costs.

A client that does nothing but receive asks for N tokens, greedily; its rate is counted from the first event to the last
token's. Runs of `llamado bench` and llama-bench are between those of the servers, which run all the time.

usage: stream.py [MODEL …] [--tokens 256] [--alternations 5] [--threads 2] [--sides llamado,llama.cpp] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from sides import HOST, SIDES, model_path, our_command, peer_program, run, server, settle

PROMPT = "Once upon a time there was"


def stream(port: int, n: int) -> float:
    """Tokens per second of one streamed answer of `n` tokens."""
    body = json.dumps({"prompt": PROMPT, "n_predict": n, "stream": True, "ignore_eos": True, "temperature": 0}).encode()
    head = f"POST /completion HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    n_events, first, last, rest = 0, 0.0, 0.0, b""
    with socket.create_connection((HOST, port), timeout=300) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        while data := connection.recv(1 << 16):
            now = time.perf_counter()
            rest += data
            *events, rest = rest.split(b"\n\n")
            tokens = sum(b'"stop":false' in event for event in events)
            if tokens:
                first, last = first or now, now
                n_events += tokens
    if n_events < n:
        raise SystemExit(f"{n_events} of {n} tokens came")
    return (n_events - 1) / (last - first)


def bench(side: str, path: Path, n: int, threads: int) -> float:
    """Tokens per second without a server."""
    options = ["-m", str(path), "-p", "0", "-n", str(n), "-t", str(threads), "-r", "1", "-o", "json"]
    command = our_command("bench", *options) if side == SIDES[0] else [peer_program("llama-bench"), *options]
    result = json.loads(run(command))[0]
    return float(result["tokens_per_second" if side == SIDES[0] else "avg_ts"])


def table(rows: list[dict[str, Any]]) -> str:
    """Of the rows that `main` makes."""
    lines = ["| model | side | over HTTP, tokens/s | without a server | ratio | more ms a token |"]
    lines.append("|---|---|---:|---:|---:|---:|")
    for row in rows:
        http, alone = (statistics.median(row[key]) for key in ("http", "bench"))
        more = 1e3 * (1 / http - 1 / alone)
        rates = f"{http:.1f} | {alone:.1f} | **{http / alone:.2f}** | {more:.2f}"
        lines.append(f"| {row['model']} | {row['side']} | {rates} |")
    return "\n".join(lines)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help="default: smollm2 gemma3 synthetic-1b")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--alternations", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    flags = parser.parse_args()
    rows: list[dict[str, Any]] = []
    settings = ["-t", str(flags.threads), "-np", "1", "-c", "4096"]
    for name in flags.models or ("smollm2", "gemma3", "synthetic-1b"):
        path = model_path(name)
        with ExitStack() as running:
            found = []
            for side in flags.sides.split(","):
                one = running.enter_context(server(side, path, settings))
                stream(one.port, 16)
                settle([one])
                found.append((one, {"model": name, "side": side, "http": [], "bench": []}))
            for _ in range(flags.alternations):
                for one, row in found:
                    row["http"].append(stream(one.port, flags.tokens))
                    row["bench"].append(bench(row["side"], path, flags.tokens, flags.threads))
            rows += [row for _, row in found]
            print(table(rows[-len(found) :]), flush=True)
    if flags.json:
        flags.json.write_text(json.dumps({"settings": settings, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
