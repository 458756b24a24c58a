"""Many clients for minutes, some of whom hang up: `llamado serve` and llama-server with equal settings, in turns.

64 clients ask without a pause for answers of many kinds (completion and chat, streamed and whole, greedy and drawn,
short and long prompts); one in six hangs up in the middle. Every answer of ours is compared with what the same request
gave alone, as text and token by token. Another process asks for /health all the time. Printed: tokens per second of
both sides, answers that differ, what is left over (slots, memory), and how long /health took.

usage: endurance.py [--clients 64] [--seconds 300] [--turns 4] [--slots 16] [--only SIDE] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import httpx
from serving import percentile, prompt
from sides import HOST, SIDES, Server, model_path, server, settle

N_KINDS = 160
"""Different requests; each comes up many times, so that caches are hit, too."""
PROBE_SECONDS = 0.05
"""Pause between two looks at /health."""


@dataclass(frozen=True)
class Question:
    """One request: where it goes, its body, and whether it is streamed."""

    path: str
    body: dict[str, Any]
    stream: bool


def questions(seed: int) -> list[Question]:
    """All kinds of requests, the same for both sides."""
    rng = random.Random(seed)
    kinds = []
    for i in range(N_KINDS):
        words = rng.choice([8, 24, 64, 128, 256])
        text = prompt(words, seed + i // 2)  # pairs share a prompt
        body: dict[str, Any] = {"n_predict": rng.randrange(8, 97), "temperature": rng.choice([0.0, 0.8]), "seed": i}
        stream = rng.random() < 0.7
        if rng.random() < 0.3:
            body["max_tokens"] = body.pop("n_predict")
            body["messages"] = [{"role": "user", "content": text}]
            kinds.append(Question("/v1/chat/completions", body, stream))
        else:
            kinds.append(Question("/completion", {**body, "prompt": text, "return_tokens": True}, stream))
    return kinds


@dataclass(frozen=True)
class Answer:
    """Received so far: the text, the tokens if the API sends them, their number, and True if the answer is complete."""

    text: str
    tokens: tuple[int, ...]
    n_tokens: int
    complete: bool


class Wrong(Exception):
    """A request was not answered as it should be."""


def connection(port: int) -> httpx.AsyncClient:
    """A client that opens a new connection for each request: llama-server ends one after its hundredth request."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=f"http://{HOST}:{port}", timeout=600, limits=limits)


async def ask(client: httpx.AsyncClient, question: Question, hang_up_after: int | None = None) -> Answer:
    """One request; after `hang_up_after` parts of a stream the client goes away."""
    if not question.stream:
        response = await client.post(question.path, json=question.body)
        if response.status_code != 200:
            raise Wrong(f"{response.status_code}: {response.text[:200]}")
        body = response.json()
        if "choices" in body:
            used = body["usage"]["completion_tokens"]
            return Answer(body["choices"][0]["message"]["content"], (), used, True)
        return Answer(body["content"], tuple(body["tokens"]), body["tokens_predicted"], True)
    text, tokens, n, complete, parts = [], [], 0, False, 0
    async with client.stream("POST", question.path, json={**question.body, "stream": True}) as response:
        if response.status_code != 200:
            raise Wrong(f"{response.status_code}: {(await response.aread())[:200]!r}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                complete |= line == "data: [DONE]"
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise Wrong(str(event["error"]))
            if "choices" in event:
                delta = event["choices"][0]["delta"] if event["choices"] else {}
                text.append(delta.get("content") or "")
                n += bool(delta.get("content"))
                if "timings" in event:
                    n = event["timings"]["predicted_n"]
            else:
                text.append(event["content"])
                tokens += event["tokens"]
                n = event["tokens_predicted"]
                complete |= event["stop"]
            parts += 1
            if parts == hang_up_after:
                break
    return Answer("".join(text), tuple(tokens), n, complete)


@dataclass
class Side:
    """Events of one side."""

    n_tokens: int = 0
    n_answers: int = 0
    n_hung_up: int = 0
    n_different: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    """Resident bytes, once a second."""


async def load(
    one: Server, side: Side, kinds: list[Question], expected: list[Answer], clients: int, seconds: float, seed: int
) -> None:
    """All clients ask for this long; what has begun is seen to its end."""
    rng = random.Random(seed)
    began = time.perf_counter()
    async with connection(one.port) as client:

        async def keep_asking() -> None:
            while time.perf_counter() - began < seconds:
                number = rng.randrange(len(kinds))
                question = kinds[number]
                hang_up = rng.randrange(1, 20) if question.stream and rng.random() < 0.24 else None
                try:
                    answer = await ask(client, question, hang_up)
                except (Wrong, httpx.HTTPError) as error:
                    side.failures.append(f"{question.path}: {type(error).__name__} {error}")
                    continue
                side.n_tokens += answer.n_tokens
                if not answer.complete:
                    if hang_up is None:
                        side.failures.append(f"{question.path}: it ended before its end")
                    side.n_hung_up += 1
                    continue
                side.n_answers += 1
                alone = expected[number]
                side.n_different += (answer.text, answer.tokens) != (alone.text, alone.tokens)

        async def weigh() -> None:
            while True:
                side.memory.append(resident(one.pid))
                await asyncio.sleep(1)

        weighing = asyncio.ensure_future(weigh())
        await asyncio.gather(*(keep_asking() for _ in range(clients)))
        weighing.cancel()
    side.seconds += time.perf_counter() - began


def resident(pid: int) -> int:
    """Bytes of RAM a process has."""
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * 4096


def probe(port: int, over: Event, found: multiprocessing.Queue[list[tuple[float, float]]]) -> None:
    """Asks for /health on a new connection each time: (when, seconds it took)."""
    import socket

    seen = []
    while not over.is_set():
        began = time.perf_counter()
        try:
            with socket.create_connection((HOST, port), 5) as connection:
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                healthy = connection.recv(64).startswith(b"HTTP/1.1 200")
        except OSError:
            healthy = False
        seen.append((time.time(), time.perf_counter() - began if healthy else 5.0))
        time.sleep(PROBE_SECONDS)
    found.put(seen)


async def alone(port: int, kinds: list[Question]) -> list[Answer]:
    """Each request by itself."""
    async with connection(port) as client:
        return [await ask(client, question) for question in kinds]


def left_over(one: Server) -> str:
    """Return the requests that still run after all clients are done."""
    slots = httpx.get(f"http://{HOST}:{one.port}/slots").json()
    busy = [slot["id"] for slot in slots if slot["is_processing"]]
    return f"slots still busy: {busy}" if busy else "all slots idle"


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=300, help="of load, for each side")
    parser.add_argument("--turns", type=int, default=4, help="how often the sides take turns in it")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--only", choices=SIDES, action="append")
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args()
    kinds = questions(1)
    # Prompts kept in memory are bounded tightly: whether memory stays flat shows within minutes then.
    settings = ["-t", "2", "-np", str(flags.slots), "-c", str(1024 * flags.slots), "--slots", "--cache-ram", "256"]
    sides = {name: Side() for name in flags.only or SIDES}
    results: dict[str, Any] = {}
    with ExitStack() as running:
        path = model_path(flags.model)
        servers = {name: running.enter_context(server(name, path, settings)) for name in sides}
        print(f"{len(kinds)} requests, each alone …", flush=True)
        expected = {name: asyncio.run(alone(one.port, kinds)) for name, one in servers.items()}
        probes = {}
        for name, one in servers.items():
            over: Event = multiprocessing.Event()
            found: multiprocessing.Queue[list[tuple[float, float]]] = multiprocessing.Queue()
            process = multiprocessing.Process(target=probe, args=(one.port, over, found), daemon=True)
            probes[name] = over, found, process
        for turn in range(flags.turns):
            for name, one in servers.items():
                settle(servers.values())
                if turn == 0:
                    probes[name][2].start()
                seconds = flags.seconds / flags.turns
                asyncio.run(load(one, sides[name], kinds, expected[name], flags.clients, seconds, 100 + turn))
                side = sides[name]
                print(f"{name}: turn {turn + 1}, {side.n_tokens / side.seconds:.1f} tokens/s so far", flush=True)
        settle(servers.values())
        for name, one in servers.items():
            over, found, process = probes[name]
            over.set()
            looks = found.get(timeout=30)
            process.join()
            side, memory = sides[name], sides[name].memory
            tenth = max(1, len(looks) // 10)
            p99 = [1e3 * percentile([s for _, s in part], 0.99) for part in (looks[:tenth], looks, looks[-tenth:])]
            results[name] = {
                "tokens_per_second": side.n_tokens / side.seconds,
                "answers": side.n_answers,
                "different": side.n_different,
                "hung_up": side.n_hung_up,
                "failures": side.failures[:10],
                "n_failures": len(side.failures),
                "memory_mib": [memory[len(memory) * i // 4 - (i == 4)] >> 20 for i in range(5)],
                "health_p99_ms": p99,
                "health_worst_ms": 1e3 * max(s for _, s in looks),
                "left": left_over(one),
            }
            r = results[name]
            print(
                f"{name}: {r['tokens_per_second']:.1f} tokens/s; {r['answers']} answers, {r['different']} differ from "
                f"the same alone, {r['hung_up']} hung up, {r['n_failures']} failed {r['failures']}; {r['left']}; memory"
                f" MiB {r['memory_mib']}; /health p99 ms: first tenth {p99[0]:.1f}, all {p99[1]:.1f}, last tenth "
                f"{p99[2]:.1f}, worst {r['health_worst_ms']:.0f}"
            )
    if len(sides) == 2:
        ours, theirs = (results[name]["tokens_per_second"] for name in SIDES)
        print(f"ratio of tokens per second: {ours / theirs:.2f}")
    if flags.json:
        flags.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
