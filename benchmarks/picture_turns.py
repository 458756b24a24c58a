"""A chat of five turns about one picture: prompt tokens computed per turn, and answers compared byte by byte.

here       one server on this machine.
restart    the server is ended after the third turn and started again, with --cache-disk.
workers    the model is divided among two workers.
killed     the same; one worker is killed (kill -9) during the fourth answer, and its layers move (--rpc-failover 1).

Every request sends the picture again, as clients do. The text model is Gemma 3 270M; the encoder has random weights.

usage: picture_turns.py [--only here|restart|workers|killed] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from chaos import Worker
from pictures import Encoder, picture, siglip_layer, write_encoder
from sides import HOST, model_path, server
from synthetic import kept

MODES = ("here", "restart", "workers", "killed")
QUESTIONS = (
    "What is in the picture?",
    "Which colors has it?",
    "Is there a person?",
    "Describe the upper half.",
    "Give it a title.",
)
N_PREDICT = 48
SMALL = Encoder(
    "gemma3", {"image_size": 448, "patch_size": 14, "projection_dim": 640, "clip.use_gelu": True},
    384, 1536, 4, 6, siglip_layer,
    {
        "v.patch_embd.weight": (14, 14, 3, 384), "v.patch_embd.bias": (384,), "v.position_embd.weight": (384, 1024),
        "v.post_ln.weight": (384,), "v.post_ln.bias": (384,),
        "mm.soft_emb_norm.weight": (384,), "mm.input_projection.weight": (640, 384),
    },
)  # fmt: skip


@dataclass
class Turns:
    """Answers of a chat, and tokens of each prompt: in all, and computed."""

    answers: list[str] = field(default_factory=list)
    n_prompt: list[int] = field(default_factory=list)
    n_computed: list[int] = field(default_factory=list)


@contextmanager
def running(options: list[str]) -> Iterator[int]:
    """Port of a server of the text model with the small encoder."""
    projector = kept("mmproj-small-f16.gguf", lambda path: write_encoder(path, SMALL))
    flags = ["-np", "2", "-c", "4096", "-t", "2", "--chat-template", "gemma", "--mmproj", str(projector), *options]
    with server("llamado", model_path("gemma3"), flags) as started:
        yield started.port


def ask(port: int, turns: Turns, worker: Worker | None = None) -> None:
    """Ask the next question; `worker` is killed in the middle of the answer."""
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture(7, 448)}"}}
    messages: list[dict[str, Any]] = []
    for question, answer in zip(QUESTIONS, [*turns.answers, ""], strict=False):
        content = [image, {"type": "text", "text": question}] if not messages else question
        messages += [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    body = {
        "messages": messages[:-1], "max_tokens": N_PREDICT, "temperature": 0.8, "seed": len(turns.answers),
        "ignore_eos": True, "stream": True, "timings_per_token": True,
    }  # fmt: skip
    text, n_parts = "", 0
    timings: dict[str, Any] = {}
    url = f"http://{HOST}:{port}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=300) as stream:
        stream.raise_for_status()
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            timings = event.get("timings", timings)
            for choice in event.get("choices", []):
                text += choice["delta"].get("content") or ""
                n_parts += 1
            if worker is not None and n_parts == N_PREDICT // 3:
                worker.kill()
                worker = None
    turns.answers.append(text)
    turns.n_computed.append(timings["prompt_n"])
    turns.n_prompt.append(timings["prompt_n"] + timings["cache_n"])


def chat(mode: str) -> Turns:
    """Return the turns of a chat."""
    turns = Turns()
    with ExitStack() as opened:
        if mode in ("here", "restart"):
            folder = opened.enter_context(tempfile.TemporaryDirectory())
            options = ["--cache-disk", folder] if mode == "restart" else []
            for questions in (QUESTIONS[:3], QUESTIONS[3:]) if mode == "restart" else (QUESTIONS,):
                with running(options) as port:
                    for _ in questions:
                        ask(port, turns)
            return turns
        workers = [Worker(), Worker()]
        for worker in workers:
            opened.callback(worker.kill)
            worker.wait()
        addresses = ",".join(f"{HOST}:{worker.port}" for worker in workers)
        with running(["--rpc", addresses, "--rpc-failover", "1"]) as port:
            for i, _ in enumerate(QUESTIONS):
                ask(port, turns, workers[1] if mode == "killed" and i == 3 else None)
    return turns


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=MODES, action="append")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    flags = parser.parse_args()
    results: dict[str, Turns] = {}
    print("| | " + " | ".join(f"turn {i + 1}" for i in range(len(QUESTIONS))) + " | answers equal |", flush=True)
    print("|---|" + "---:|" * (len(QUESTIONS) + 1), flush=True)
    for mode in flags.only or MODES:
        turns = results[mode] = chat(mode)
        first = next(iter(results.values()))
        equal = sum(a == b for a, b in zip(turns.answers, first.answers, strict=True))
        computed = " | ".join(f"{n} of {whole}" for n, whole in zip(turns.n_computed, turns.n_prompt, strict=True))
        print(f"| {mode} | {computed} | {equal} of {len(QUESTIONS)} |", flush=True)
    if flags.json:
        rows = {mode: vars(turns) for mode, turns in results.items()}
        flags.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
