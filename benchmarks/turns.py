"""A chat of twenty turns: tokens of its prompts that are computed, time to the first token, and memory that grows.

Both servers get the same messages, and their own answers back as history. Then the middle of the chat is asked in
another way, and ours is started anew with what it left on disk.

usage: turns.py [MODEL …] [--turns 20] [--sides llamado,llama.cpp] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from sides import HOST, SIDES, Server, model_path, server, settle

WORDS = (
    "river", "stone", "garden", "window", "paper", "winter", "music", "letter", "bridge", "candle", "silver", "forest",
    "copper", "lantern", "harbour", "meadow", "orchard", "thunder", "velvet", "compass", "anchor", "marble", "feather",
    "island", "cotton", "planet", "saddle", "pepper", "mirror", "ladder",
)  # fmt: skip
SYSTEM = "You are a patient guide who answers in short plain sentences. " + " ".join(WORDS * 6)
ANSWER = 48
"""Tokens of an answer, at most."""


class Turn(NamedTuple):
    """A server's figures of a request: cached and computed prompt tokens, seconds to the first token."""

    cached: int
    computed: int
    seconds: float
    memory: int
    """Bytes of the process's own memory behind it (RssAnon)."""


def question(n: int, words: int = 40) -> str:
    """Another text for every turn."""
    return f"Question {n}: " + " ".join(WORDS[(7 * n + 3 * i * i) % len(WORDS)] for i in range(words)) + "?"


def anonymous(pid: int) -> int:
    """Memory that is no file's."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    raise OSError(f"no RssAnon for process {pid}")


class Chat:
    """A conversation with one server."""

    def __init__(self, to: Server, messages: Sequence[dict[str, str]] = ()) -> None:
        self._to = to
        self.messages = list(messages) or [{"role": "system", "content": SYSTEM}]

    def ask(self, text: str) -> Turn:
        self.messages.append({"role": "user", "content": text})
        body = {"messages": self.messages, "max_tokens": ANSWER, "temperature": 0, "seed": 1, "cache_prompt": True}
        began = time.perf_counter()
        answer: dict[str, Any] = httpx.post(
            f"http://{HOST}:{self._to.port}/v1/chat/completions", json=body, timeout=600
        ).json()
        timings = answer["timings"]
        self.messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"] or ""})
        seconds = time.perf_counter() - began - timings["predicted_ms"] / 1e3
        return Turn(timings["cache_n"], timings["prompt_n"], seconds, anonymous(self._to.pid))


def measure(side: str, model: Path, n_turns: int) -> dict[str, list[Turn]]:
    """Turns of a chat, of one that changes its middle, and for ours those after a restart."""
    options = ["-t", "2", "-np", "1", "-c", "16384"]
    found: dict[str, list[Turn]] = {}
    with tempfile.TemporaryDirectory() as folder:
        if side == "llamado":
            options += ["--cache-disk", folder]
        with server(side, model, options) as to:
            settle([to])
            warm = Chat(to, [{"role": "user", "content": "Hello"}])
            warm.ask("Who are you?")
            chat = Chat(to)
            found["start"] = [Turn(0, 0, 0.0, anonymous(to.pid))]
            found["turns"] = [chat.ask(question(n)) for n in range(n_turns)]
            middle = chat.messages[: n_turns // 2 * 2 + 1]
            found["changed"] = [Chat(to, middle).ask(question(100))]
            other = Chat(to, [{"role": "system", "content": "Be brief."}])
            found["another chat"] = [other.ask(question(n, 100)) for n in (200, 201)]
            found["back"] = [chat.ask(question(n_turns))]
        if side == "llamado":
            with server(side, model, options) as to:
                settle([to])
                again = Chat(to, chat.messages)
                found["restarted"] = [again.ask(question(300 + n)) for n in range(2)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", default=["gemma3", "smollm2"])
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    kept: dict[str, Any] = {}
    for name in args.models:
        print(f"\n{name}, {args.turns} turns\n")
        print("| side | part | prompts' tokens | computed | seconds to the first token, in all | memory, MiB |")
        print("|---|---|---:|---:|---:|---:|")
        for side in args.sides.split(","):
            parts = measure(side, model_path(name), args.turns)
            kept[f"{name} {side}"] = parts
            before = parts.pop("start")[0].memory
            for part, turns in parts.items():
                asked, computed = sum(t.cached + t.computed for t in turns), sum(t.computed for t in turns)
                grown = f"+{(turns[-1].memory - before) / (1 << 20):.0f}" if part != "restarted" else ""
                seconds = sum(t.seconds for t in turns)
                print(f"| {side} | {part} | {asked} | {computed} | {seconds:.2f} | {grown} |", flush=True)
    if args.json:
        args.json.write_text(json.dumps(kept))


if __name__ == "__main__":
    main()
