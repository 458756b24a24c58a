"""Memory of a session: servers with one slot and with several, a prompt of 2,000 tokens in each slot.

Memory is the process's own (RssAnon): weights are a mapped file's. What one more session takes is the difference of
both servers over the difference of their slots, so memory that a server takes before it is used counts as well.

usage: sessions.py [MODEL …] [--sessions 8] [--tokens 2000] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from sides import HOST, SIDES, model_path, server, settle
from turns import anonymous

_GENERATE = 8


def ask(port: int, slot: int, n_tokens: int) -> None:
    """One prompt of its own into a slot."""
    tokens = np.random.default_rng(slot).integers(300, 20_000, n_tokens).tolist()
    body = {"prompt": tokens, "n_predict": _GENERATE, "ignore_eos": True, "temperature": 0, "id_slot": slot}
    answer = httpx.post(f"http://{HOST}:{port}/completion", json=body, timeout=1200).raise_for_status().json()
    assert answer["tokens_evaluated"] == n_tokens and answer["tokens_predicted"] == _GENERATE, answer


def held(side: str, path: Path, n_sessions: int, n_tokens: int) -> int:
    """Bytes of a server whose slots all have had their prompt."""
    room = -(-(n_tokens + _GENERATE) // 256) * 256
    options = ["-t", "2", "-np", str(n_sessions), "-c", str(n_sessions * room)]
    with server(side, path, options) as running:
        settle([running])
        with ThreadPoolExecutor(n_sessions) as pool:
            list(pool.map(lambda slot: ask(running.port, slot, n_tokens), range(n_sessions)))
        settle([running])
        return anonymous(running.pid)


def measure(side: str, path: Path, n_sessions: int, n_tokens: int) -> dict[str, float]:
    """Bytes with one session, with all, and of one more."""
    one, all_of_them = (held(side, path, n, n_tokens) for n in (1, n_sessions))
    return {"one": one, "all": all_of_them, "each": (all_of_them - one) / (n_sessions - 1)}


def table(result: dict[str, Any]) -> str:
    """A line for each model and side; `result`: as it is written to a file."""
    head = f"| model | side | 1 session, MB | {result['sessions']} sessions, MB | one more session, MB |"
    lines = [head, "|---|---|---:|---:|---:|"]
    for row in result["rows"]:
        for side in SIDES:
            one, every, each = (1e-6 * row[side][key] for key in ("one", "all", "each"))
            lines.append(f"| {row['model']} | {side} | {one:.0f} | {every:.0f} | {each:.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help="default: smollm2 gemma3")
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    flags = parser.parse_args()
    rows = []
    for name in flags.models or ("smollm2", "gemma3"):
        path = model_path(name)
        sides = {side: measure(side, path, flags.sessions, flags.tokens) for side in SIDES}
        rows.append({"model": name, **sides})
    result = {"sessions": flags.sessions, "tokens": flags.tokens, "rows": rows}
    print(table(result))
    if flags.json:
        flags.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
