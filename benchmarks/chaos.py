"""Workers killed while answers stream: is anything lost, how soon is it noticed, how soon does it go on?

Two of our workers of one thread each and a server of four slots. In every round four answers stream at once, and one of
the workers is killed (kill -9) at some moment between the first byte sent and the last tokens; both are drawn by lot.

restart    the worker is started again 3 s later, on its port.
failover   it never is: `--rpc-failover 1` puts its layers on the devices left. Every round has a new server.
freeze     it is not killed but stopped (SIGSTOP), and goes on 3 s later.

Answers are compared byte by byte with those of an undisturbed run. /health is asked every 20 ms all the time, over one
connection. Noticed: from the kill to the first 503. Back: from the kill to the first 200 after it; where the worker is
restarted, the 3 s and the second or so until it listens are part of that. Silence: the longest time that any of the
four streams showed nothing.

usage: chaos.py [MODEL …] [--only restart|failover|freeze] [--rounds 20] [--seed 0] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from serving import prompt
from sides import HOST, model_path, our_command, server

MODES = ("restart", "failover", "freeze")
AWAY = 3.0
FAILOVER = 1.0
N_PREDICT = 128
WORDS = (8, 32, 64, 128)
_POLL = 0.02
_START_SECONDS = 60.0
_ROUND_SECONDS = 120.0


class Worker:
    """`llamado worker` on a port of its own."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            self.port: int = probe.getsockname()[1]
        self.start()

    def start(self) -> None:
        """Starts it, on the same port each time."""
        command = our_command("worker", "-H", HOST, "-p", str(self.port), "-t", "1")
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def wait(self) -> None:
        """Returns once it listens."""
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                socket.create_connection((HOST, self.port), 1).close()
                return
            except OSError:
                if time.monotonic() > deadline:
                    sys.exit(f"the worker on port {self.port} does not start")
                time.sleep(0.01)

    def kill(self) -> None:
        """kill -9"""
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        """SIGSTOP"""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT"""
        self._process.send_signal(signal.SIGCONT)


@dataclass
class Stream:
    """One answer so far."""

    text: str = ""
    times: list[float] = field(default_factory=list)
    over: bool = False


@dataclass
class Round:
    """Observations of one round; times in seconds since the kill, unless named otherwise."""

    worker: int = 0
    moment: float = 0.0
    """From the start of the round."""
    noticed: float | None = None
    back: float | None = None
    silence: float = 0.0
    total: float = 0.0
    """From the start to the last byte."""
    equal: int = 0
    complete: int = 0
    health_ms: float = 0.0
    """The slowest answer of /health."""


def requests(rng: random.Random) -> list[dict[str, Any]]:
    """Four prompts of different length, half of them sampled; nothing is reused from the rounds before."""
    return [
        {
            "prompt": prompt(words, rng.randrange(1 << 30)),
            "n_predict": N_PREDICT,
            "temperature": 0.8 * (i % 2),
            "seed": i,
            "ignore_eos": True,
            "cache_prompt": False,
            "stream": True,
        }
        for i, words in enumerate(WORDS)
    ]


async def read_answer(port: int, body: dict[str, Any], stream: Stream) -> None:
    """One request; every event goes into `stream`. An error inside it ends it."""
    reader, writer = await asyncio.open_connection(HOST, port)
    payload = json.dumps(body).encode()
    head = f"POST /completion HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(payload) + payload)
    try:
        while line := await reader.readline():
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                print(f"  {event['error']}", file=sys.stderr)
                return
            stream.text += event["content"]
            stream.times.append(time.perf_counter())
            stream.over = stream.over or (event["stop"] and event["tokens_predicted"] == N_PREDICT)
    finally:
        writer.close()


async def watch_health(port: int, seen: list[tuple[float, float, bool]]) -> None:
    """Asks /health until cancelled: when, seconds it took, whether all was well."""
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        while True:
            asked = time.perf_counter()
            writer.write(f"GET /health HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
            status = await reader.readline()
            length = 0
            while (line := await reader.readline()) not in (b"\r\n", b""):
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            await reader.readexactly(length)
            seen.append((asked, time.perf_counter() - asked, b" 200 " in status))
            await asyncio.sleep(_POLL)
    finally:
        writer.close()


async def play(
    port: int, bodies: Sequence[dict[str, Any]], mode: str = "", victim: Worker | None = None, moment: float = 0.0
) -> tuple[list[Stream], Round]:
    """A round: the answers, and what was seen when something happened to `victim` at `moment`."""
    seen: list[tuple[float, float, bool]] = []
    streams = [Stream() for _ in bodies]
    began = time.perf_counter()
    health = asyncio.ensure_future(watch_health(port, seen))
    answers = [asyncio.ensure_future(read_answer(port, body, s)) for body, s in zip(bodies, streams, strict=True)]
    killed = began
    if victim is not None:
        await asyncio.sleep(moment)
        killed = time.perf_counter()
        if mode == "freeze":
            victim.freeze()
        else:
            victim.kill()
        if mode != "failover":
            await asyncio.sleep(AWAY)
        if mode == "restart":
            victim.start()
        elif mode == "freeze":
            victim.thaw()
    await asyncio.wait(answers, timeout=_ROUND_SECONDS)
    ended = time.perf_counter()
    if victim is not None:  # also when the answers were over first
        deadline = ended + _ROUND_SECONDS
        while time.perf_counter() < deadline and not (any(not well for _, _, well in seen) and seen[-1][2]):
            await asyncio.sleep(_POLL)
    for task in (*answers, health):
        task.cancel()
    await asyncio.gather(*answers, health, return_exceptions=True)
    bad = [asked for asked, _, well in seen if not well]
    good = [asked for asked, _, well in seen if well and bad and asked > bad[-1]]
    found = Round(
        moment=moment,
        noticed=bad[0] - killed if bad else None,
        back=good[0] - killed if good else None,
        silence=max((b - a for s in streams for a, b in zip(s.times, s.times[1:], strict=False)), default=0.0),
        total=ended - began,
        complete=sum(stream.over for stream in streams),
        health_ms=1e3 * max((took for _, took, _ in seen), default=0.0),
    )
    return streams, found


@contextmanager
def running(model: Path, *options: str) -> Iterator[tuple[list[Worker], int]]:
    """Two workers and a server over them; its port."""
    with ExitStack() as stack:
        workers = []
        for _ in range(2):
            workers.append(Worker())
            stack.callback(workers[-1].kill)
        for worker in workers:
            worker.wait()
        rpc = ",".join(f"{HOST}:{worker.port}" for worker in workers)
        flags = ["-np", "4", "-c", "4096", "-ts", "1,1", "--rpc", rpc, *options]
        yield workers, stack.enter_context(server("llamado", model, flags)).port


def chaos(model: Path, mode: str, n_rounds: int, seed: int) -> list[Round]:
    """Rounds of one mode, printed as they end."""
    rng = random.Random(seed)
    bodies = requests(rng)
    rounds: list[Round] = []

    def one(workers: Sequence[Worker], port: int, expected: Sequence[Stream], seconds: float) -> None:
        victim = rng.randrange(2)
        moment = rng.uniform(0.0, 0.95 * seconds)
        streams, found = asyncio.run(play(port, bodies, mode, workers[victim], moment))
        found.worker = victim
        found.equal = sum(s.over and s.text == e.text for s, e in zip(streams, expected, strict=True))
        rounds.append(found)
        print(
            f"{len(rounds):5d}   RPC{victim}   {moment:6.2f}   {_ms(found.noticed):>10}   {_s(found.back):>6}   "
            f"{found.silence:9.2f}   {found.total:7.2f}   {found.health_ms:9.0f}   {found.complete:6d}/4   "
            f"{found.equal:3d}/4",
            flush=True,
        )

    def undisturbed(port: int) -> tuple[list[Stream], float]:
        asyncio.run(play(port, bodies))  # shapes are compiled
        streams, found = asyncio.run(play(port, bodies))
        if found.complete < len(bodies):
            sys.exit("an undisturbed run is not complete")
        return streams, found.total

    options = ("--rpc-failover", str(FAILOVER)) if mode == "failover" else ()
    with running(model, *options) as (workers, port):
        expected, seconds = undisturbed(port)
        print(f"\n{model.name}, {mode}: {n_rounds} rounds; undisturbed {seconds:.2f} s")
        print("round   killed   at s   noticed ms   back s   silence s   total s   health ms   complete   equal")
        if mode != "failover":
            for _ in range(n_rounds):
                one(workers, port, expected, seconds)
    if mode == "failover":
        for _ in range(n_rounds):
            with running(model, *options) as (workers, port):
                one(workers, port, expected, seconds)
    return rounds


def summary(rounds: Sequence[Round]) -> str:
    """One line on lost answers, one on times."""
    lost = sum(len(WORDS) - r.complete for r in rounds)
    changed = sum(r.complete - r.equal for r in rounds)
    noticed = [1e3 * r.noticed for r in rounds if r.noticed is not None]
    back = [r.back for r in rounds if r.back is not None]
    return (
        f"{len(rounds)} rounds, {len(WORDS) * len(rounds)} answers: {lost} lost, {changed} changed; "
        f"unnoticed {len(rounds) - len(noticed)}\n"
        f"noticed after {_spread(noticed, 0)} ms, back after {_spread(back, 2)} s, longest silence "
        f"{_spread([r.silence for r in rounds], 2)} s, slowest /health {_spread([r.health_ms for r in rounds], 0)} ms"
    )


def _spread(values: Sequence[float], digits: int) -> str:
    """Median (least … most)."""
    if not values:
        return "–"
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} … {max(values):.{digits}f})"


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1e3 * seconds:.0f}"


def _s(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["smollm2"], metavar="MODEL")
    parser.add_argument("--only", choices=MODES)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    failed = False
    for name in options.models:
        for mode in MODES if options.only is None else (options.only,):
            rounds = chaos(model_path(name), mode, options.rounds, options.seed)
            print(summary(rounds))
            failed |= any(r.equal < len(WORDS) for r in rounds)
            found.setdefault(name, {})[mode] = [asdict(r) for r in rounds]
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))
    sys.exit(failed)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
