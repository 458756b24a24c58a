"""Three replicas behind a gateway: what passing on costs, whether conversations stay, what is lost when replicas fail.

Five parts, each with the bound that it is held to (the exit code is 1 where one is missed):

- `chunks`: streams from a source that needs no model; milliseconds a chunk takes longer than without the gateway (0.3
  of one stream; of eight whose chunks come at the same moment, each waits for those before it).
- `chats`: conversations of several turns; the share of the last turn's prompt that the next one finds cached (0.9).
- `speed`: generated tokens a second of all clients, over the gateway and straight to the replicas by turns (0.97).
- `chaos`: while all clients ask, one replica is killed, one is frozen and thawed, one is drained, one joins; every
  request must be answered, but for streams that had begun on the killed one, and llamado's answers be those of before.
- `verify`: `llamado verify` asks two replicas for 200 drawn answers, eight at a time. Ours must be equal though one is
  divided over two workers, and both draft, have 8 slots and reuse prompts. Of the real one it is only told how many do.

usage: gateway.py [--parts chunks,chats,speed,chaos,verify] [--engine llamado] [--model smollm2] [--clients 64]
                  [--requests 6] [--chats 200] [--seconds 60] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
from sides import HOST, N_PREDICT, PROMPTS, SIDES, Server, model_path, our_command, server, settle

ADMIN = "benchmark"
CHUNK_MS, CACHED, SPEED = 0.3, 0.9, 0.97

SOURCE = """
import asyncio, sys, time
HEAD = b"HTTP/1.1 200 OK\\r\\ncontent-type: text/event-stream\\r\\ntransfer-encoding: chunked\\r\\n\\r\\n"
async def serve(reader, writer):
    try:
        while True:
            head = await reader.readuntil(b"\\r\\n\\r\\n")
            size = [int(l.split(b":")[1]) for l in head.split(b"\\r\\n") if l.lower().startswith(b"content-length")]
            await reader.readexactly(size[0] if size else 0)
            if head.startswith(b"GET"):
                body = b'{"status":"ok","data":[{"id":"m"}]}' if b"/slots" not in head else b"[]"
                writer.write(b"HTTP/1.1 200 OK\\r\\ncontent-length: %d\\r\\n\\r\\n%b" % (len(body), body))
                continue
            writer.write(HEAD)
            for i in range(int(sys.argv[2])):
                await asyncio.sleep(float(sys.argv[3]))
                part = b'data: {"sent": %.9f, "choices": [{"delta": {"content": " word"}}]}\\n\\n' % time.monotonic()
                writer.write(b"%x\\r\\n%b\\r\\n" % (len(part), part))
            writer.write(b"0\\r\\n\\r\\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
asyncio.run(main())
"""


@contextmanager
def gateway(urls: Sequence[str], *flags: str) -> Iterator[str]:
    """The address of a gateway before replicas."""
    command = our_command("gateway", "--host", HOST, "--port", "0", "--admin-key", ADMIN, *flags)
    for url in urls:
        command += ["--replica", url]
    with tempfile.NamedTemporaryFile("r") as log:
        with open(log.name, "wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out)
        try:
            began = time.monotonic()
            while not (found := re.search(r"listening on (http\S+)", Path(log.name).read_text())):
                if process.poll() is not None or time.monotonic() - began > 120:
                    sys.exit(f"the gateway does not start:\n{Path(log.name).read_text()[-2000:]}")
                time.sleep(0.02)
            while httpx.get(f"{found[1]}/readyz").status_code != 200:
                time.sleep(0.05)
            yield found[1]
        finally:
            process.terminate()
            process.wait(60)


@contextmanager
def source(chunks: int, pause: float) -> Iterator[str]:
    """A replica that streams chunks with the time they were sent at."""
    process = subprocess.Popen([sys.executable, "-c", SOURCE, "0", str(chunks), str(pause)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield f"http://{HOST}:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


def replicas(stack: ExitStack, side: str, model: Path, count: int, clients: int) -> list[Server]:
    """Running servers of one side."""
    slots = max(4, -(-clients // count))
    options = ["-c", str(1024 * slots), "-np", str(slots), "-t", "1", "--metrics"]
    return [stack.enter_context(server(side, model, options)) for _ in range(count)]


def url_of(one: Server) -> str:
    return f"http://{HOST}:{one.port}"


async def delays(url: str, streams: int) -> list[float]:
    """Milliseconds from each chunk's sending to its coming, over some streams at the same time."""
    found: list[float] = []

    async def read(http: httpx.AsyncClient) -> None:
        async with http.stream("POST", f"{url}/v1/chat/completions", json={"messages": [], "stream": True}) as answer:
            async for part in answer.aiter_raw():
                now = time.monotonic()
                found.extend(1e3 * (now - float(sent)) for sent in re.findall(rb'"sent": ([0-9.]+)', part))

    async with httpx.AsyncClient(timeout=60) as http:
        await asyncio.gather(*(read(http) for _ in range(streams)))
    return found


def chunks(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the delay that the gateway adds to a chunk."""
    found: dict[str, Any] = {}
    with source(400, 0.01) as url, gateway([url]) as over:
        for streams in (1, 8):
            direct, through = [], []
            for _ in range(3):
                direct += asyncio.run(delays(url, streams))
                through += asyncio.run(delays(over, streams))
            more = statistics.median(through) - statistics.median(direct)
            p99 = statistics.quantiles(through, n=100)[98] - statistics.quantiles(direct, n=100)[98]
            found[f"{streams} streams"] = {"ms": round(more, 4), "p99_ms": round(p99, 4), "chunks": len(through)}
    return found | {"kept": found["1 streams"]["ms"] <= CHUNK_MS}


async def _chat(http: httpx.AsyncClient, url: str, number: int, turns: int) -> tuple[int, int]:
    """Tokens of earlier turns' prompts that were asked for again, and how many of them were cached."""
    rng = random.Random(number)
    words = ["time", "water", "stone", "river", "garden", "music", "letter", "winter", "engine", "glass"]
    messages: list[dict[str, str]] = []
    asked = cached = before = 0
    for turn in range(turns):
        text = " ".join(rng.choice(words) for _ in range(120))
        messages.append({"role": "user", "content": f"Chat {number}, turn {turn}: {text}"})
        body = {"messages": messages, "max_tokens": 8, "temperature": 0, "seed": number, "timings_per_token": False}
        told = (await http.post(f"{url}/v1/chat/completions", json=body)).raise_for_status().json()
        if turn:
            asked += before
            cached += min(before, told["timings"]["cache_n"])
        before = told["usage"]["prompt_tokens"]
        messages.append({"role": "assistant", "content": told["choices"][0]["message"]["content"]})
    return asked, cached


def chats(options: argparse.Namespace) -> dict[str, Any]:
    """The share of earlier turns that the next ones find cached."""

    async def run(url: str) -> list[tuple[int, int]]:
        room = asyncio.Semaphore(min(options.clients, 16))

        async def one(number: int) -> tuple[int, int]:
            async with room:
                return await _chat(http, url, number, 3)

        async with httpx.AsyncClient(timeout=600) as http:
            return list(await asyncio.gather(*(one(i) for i in range(options.chats))))

    with ExitStack() as stack:
        running = replicas(stack, options.engine, model_path(options.model), 3, 16)
        url = stack.enter_context(gateway([url_of(one) for one in running]))
        found = asyncio.run(run(url))
    asked, cached = (sum(row[i] for row in found) for i in (0, 1))
    return {"chats": len(found), "tokens": asked, "cached": round(cached / asked, 4), "kept": cached / asked >= CACHED}


async def _tokens_per_second(urls: Sequence[str], clients: int, requests: int) -> float:
    """Generated tokens a second of so many clients, each asking one of the addresses."""
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)

    async def client(number: int, http: httpx.AsyncClient) -> int:
        done = 0
        for i in range(requests):
            prompt = f"{PROMPTS[(number + i) % len(PROMPTS)]} ({number})"
            body = {
                "prompt": prompt,
                "n_predict": N_PREDICT,
                "ignore_eos": True,
                "temperature": 0,
                "cache_prompt": False,
            }
            told = await http.post(f"{urls[number % len(urls)]}/completion", json=body)
            done += told.raise_for_status().json()["tokens_predicted"]
        return done

    async with httpx.AsyncClient(timeout=600, limits=limits) as http:
        began = time.perf_counter()
        done = sum(await asyncio.gather(*(client(i, http) for i in range(clients))))
        return done / (time.perf_counter() - began)


def speed(options: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second over the gateway, as a share of what the replicas give when asked directly."""
    with ExitStack() as stack:
        running = replicas(stack, options.engine, model_path(options.model), 3, options.clients)
        direct = [url_of(one) for one in running]
        over = stack.enter_context(gateway(direct))
        rows = []
        asyncio.run(_tokens_per_second(direct, options.clients, 1))  # caches of compiled graphs
        for _ in range(5):
            settle(running)
            a = asyncio.run(_tokens_per_second(direct, options.clients, options.requests))
            settle(running)
            b = asyncio.run(_tokens_per_second([over], options.clients, options.requests))
            rows.append((a, b))
    share = statistics.median(b / a for a, b in rows)
    return {"tokens_per_second": [[round(x, 1) for x in row] for row in rows], "share": round(share, 4),
            "kept": share >= SPEED}  # fmt: skip


class Chaos:
    """All clients ask until the time is over; what came of it."""

    def __init__(self, url: str, wanted: dict[str, str] | None) -> None:
        self._url = url
        self._wanted = wanted
        self.over = False
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self.killed = ""
        """The name of the replica that is killed."""

    async def client(self, http: httpx.AsyncClient, number: int) -> None:
        rng = random.Random(number)
        while not self.over:
            prompt = rng.choice(PROMPTS)
            stream = rng.random() < 0.3
            self.counts["requests"] += 1
            try:
                text = await (self._stream(http, prompt) if stream else self._whole(http, prompt))
            except (httpx.HTTPError, ValueError, KeyError) as error:
                self.errors.append(f"{type(error).__name__}: {error}"[:300])
                continue
            if text is not None and self._wanted is not None and text != self._wanted[prompt]:
                self.counts["wrong"] += 1

    def _body(self, prompt: str) -> dict[str, Any]:
        return {"prompt": prompt, "n_predict": N_PREDICT, "temperature": 0, "ignore_eos": True}

    async def _whole(self, http: httpx.AsyncClient, prompt: str) -> str:
        answer = await http.post(f"{self._url}/completion", json=self._body(prompt))
        if answer.status_code != 200:
            raise ValueError(f"{answer.status_code} {answer.text[:200]}")
        return str(answer.json()["content"])

    async def _stream(self, http: httpx.AsyncClient, prompt: str) -> str | None:
        """None for one that had begun on the killed replica."""
        self.counts["streams"] += 1
        text = ""
        async with http.stream(
            "POST", f"{self._url}/completion", json={**self._body(prompt), "stream": True}
        ) as answer:
            name = answer.headers.get("x-llamado-replica")
            if answer.status_code != 200:
                raise ValueError(f"{answer.status_code} {(await answer.aread())[:200]!r}")
            async for part in _events(answer):
                if "error" in part:
                    if name == self.killed:
                        self.counts["streams cut with the killed replica"] += 1
                        return None
                    raise ValueError(f"a stream of {name} broke off: {part['error']}")
                text += str(part["content"])
                if part["stop"]:
                    return text
        raise ValueError(f"a stream of {name} ended early")


async def _events(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in answer.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])


async def _disturb(chaos: Chaos, http: httpx.AsyncClient, url: str, running: Sequence[Server], seconds: float) -> None:
    """Kill, freeze, drain, join: one after the other, while all ask."""
    headers = {"Authorization": f"Bearer {ADMIN}"}
    step = seconds / 6
    killed, frozen, drained, joining = running
    await asyncio.sleep(step)
    chaos.killed = f"{HOST}:{killed.port}"
    os.kill(killed.pid, signal.SIGKILL)
    await asyncio.sleep(step)
    os.kill(frozen.pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(max(step, 12.0))  # until the gateway has noticed it, and gone on without it
    finally:
        os.kill(frozen.pid, signal.SIGCONT)
    added = await http.post(f"{url}/gateway/replicas", json={"url": url_of(joining)}, headers=headers)
    added.raise_for_status()
    await asyncio.sleep(step)
    body = {"replica": f"{HOST}:{drained.port}", "wait": 60}
    told = (await http.post(f"{url}/gateway/drain", json=body, headers=headers)).raise_for_status().json()
    chaos.counts["left on the drained replica"] = told["in_flight"]
    await asyncio.sleep(step)
    chaos.over = True


def chaos(options: argparse.Namespace) -> dict[str, Any]:
    """Count the requests lost when replicas fail."""

    async def references(url: str) -> dict[str, str]:
        async with httpx.AsyncClient(timeout=600) as http:
            one = Chaos(url, None)
            return {prompt: await one._whole(http, prompt) for prompt in PROMPTS}

    async def run(url: str, running: Sequence[Server], wanted: dict[str, str] | None) -> Chaos:
        found = Chaos(url, wanted)
        limits = httpx.Limits(max_connections=options.clients + 4)
        async with httpx.AsyncClient(timeout=600, limits=limits) as http:
            clients = [asyncio.ensure_future(found.client(http, i)) for i in range(options.clients)]
            try:
                await _disturb(found, http, url, running, options.seconds)
            finally:
                found.over = True
            await asyncio.gather(*clients)
        return found

    with ExitStack() as stack:
        running = replicas(stack, options.engine, model_path(options.model), 4, options.clients)
        # The real server's answers depend on what else it works on: only ours are compared.
        wanted = asyncio.run(references(url_of(running[0]))) if options.engine == "llamado" else None
        url = stack.enter_context(gateway([url_of(one) for one in running[:3]], "--patience", "30"))
        found = asyncio.run(run(url, running, wanted))
        retries = re.findall(r'retries_total\{reason="(\w+)"\} (\d+)', httpx.get(f"{url}/metrics").text)
    kept = not found.errors and not found.counts["wrong"] and not found.counts["left on the drained replica"]
    return {**found.counts, "retries": dict(retries), "errors": found.errors[:10], "kept": kept}


@contextmanager
def worker() -> Iterator[str]:
    """The address of a worker of ours with one thread."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(our_command("worker", "-p", str(port), "-t", "1"), stderr=subprocess.DEVNULL)
    try:
        yield f"{HOST}:{port}"
    finally:
        process.terminate()
        process.wait(60)


def verify(options: argparse.Namespace) -> dict[str, Any]:
    """Count the answers of two replicas that differ."""
    model = model_path(options.model)
    both = ["-c", "8192", "-np", "8", "-t", "1"]
    with ExitStack() as stack:
        flags = [both, both]
        if options.engine == "llamado":
            rpc = ",".join(stack.enter_context(worker()) for _ in range(2))
            flags = [[*both, "--spec-type", "ngram-simple"], [*both, "--rpc", rpc, "--tensor-split", "1,1,1"]]
        running = [stack.enter_context(server(options.engine, model, given)) for given in flags]
        command = our_command("verify", *map(url_of, running), "-n", "200", "--parallel", "8", "--json")
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    found = json.loads(done.stdout)
    idle = [side["repeats_itself"] for difference in found["differences"] for side in difference["sides"]]
    told = {name: found[name] for name in ("equal", "prompts", "parallel", "different_answers", "conflicts", "notes")}
    alone = f"{idle.count(False)} of {len(idle)} answers that were looked into are others when asked for alone"
    return {**told, "alone": alone, "kept": found["equal"] or options.engine != "llamado"}


PARTS = {"chunks": chunks, "chats": chats, "speed": speed, "chaos": chaos, "verify": verify}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--engine", choices=SIDES, default="llamado")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=6, help="of each client in a measurement of speed")
    parser.add_argument("--chats", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    for name in options.parts.split(","):
        found[name] = PARTS[name](options)
        print(f"{name}: {'' if found[name]['kept'] else 'NOT '}kept: {json.dumps(found[name])}", flush=True)
        if options.json:
            with contextlib.suppress(OSError):
                options.json.write_text(json.dumps({"engine": options.engine, **found}, indent=2))
    return 0 if all(row["kept"] for row in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
