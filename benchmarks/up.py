"""`llamado up --nodes 3` while its processes are killed, and while its nodes come and go: answers stay equal.

Two parts (the exit code is 1 where an answer differs, is lost, or a process is left):

- `kills`: each round kills every process once with SIGKILL, waits until all are ready again and compares the answer of
  a fixed prompt with the first one. At the end `llamado up` itself is killed, and what is left of it is counted.
- `members`: while eight clients stream without a pause, a worker joins, one of up's is drained, another joins, one
  freezes until its layers are elsewhere, and comes back. Every text must be the one of before; `/health` is asked 50
  times a second by a process of its own, and its 99th percentile must be 50 ms at most.

    python benchmarks/up.py -m smollm2 --rounds 10
    PATH=$PATH:…/bin python benchmarks/up.py --parts kills --engine llama.cpp
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from sides import PROMPTS, our_command

from llamado.cluster.state import ClusterState, all_clusters

GUARD = 600.0  # seconds
HEALTH_MS = 50.0
CLIENTS = 8
TOKEN = "benchmark"
HEALTH = """
import http.client, json, sys, time
host, port, file = sys.argv[1], int(sys.argv[2]), open(sys.argv[3], "w")
connection = http.client.HTTPConnection(host, port, timeout=60)
while True:
    began = time.monotonic()
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        answer.read()
        status = answer.status
    except (OSError, http.client.HTTPException):
        connection.close()
        status = 0
    now = time.monotonic()
    file.write(json.dumps([began, 1e3 * (now - began), status]) + "\\n")
    file.flush()
    time.sleep(max(0.0, began + 0.02 - now))
"""


def until(condition: Callable[[], Any], what: str) -> Any:
    """The condition's value once it is true."""
    end = time.monotonic() + GUARD
    while not (value := condition()):
        if time.monotonic() > end:
            raise SystemExit(f"it did not happen: {what}")
        time.sleep(0.05)
    return value


class Up:
    """A running `llamado up`."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.process, self.folder = process, folder

    def state(self) -> ClusterState | None:
        """Return the state that it reports to other terminals."""
        return next(iter(all_clusters()), None)

    def ready(self, changed: dict[str, int] | None = None) -> ClusterState:
        """Its state once all is ready and processes in `changed` are others."""

        def found() -> ClusterState | None:
            if self.process.poll() is not None:
                raise SystemExit(f"llamado up ended:\n{(self.folder / 'out').read_text()[-2000:]}")
            state = self.state()
            new = state is not None and all(one.pid != (changed or {}).get(one.name) for one in state.services)
            return state if state is not None and state.phase == "ready" and new else None

        state: ClusterState = until(found, "all are ready")
        return state

    def left(self) -> list[str]:
        """Names of programs that anything here started and that still run."""
        found = []
        for path in Path("/proc").iterdir():
            try:
                if path.name.isdigit() and int(path.name) != os.getpid():
                    marked = str(self.folder).encode() in (path / "environ").read_bytes()
                    zombie = (path / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
                    if marked and not zombie:
                        found.append((path / "cmdline").read_text().replace("\0", " "))
            except OSError:
                pass
        return found

    def gone(self) -> list[str]:
        """Return the processes that are left after half a minute at most."""
        end = time.monotonic() + 30
        while (left := self.left()) and time.monotonic() < end:
            time.sleep(0.05)
        return left


@contextmanager
def up(given: argparse.Namespace, *server: str) -> Iterator[Up]:
    """Started from nothing; SIGTERM ends it, unless it has ended."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["XDG_RUNTIME_DIR"] = name
        file = folder / "cluster.yaml"  # or pauses would grow: all this looks like a crash loop
        file.write_text("restart: {longest: 1}\n")
        command = our_command("up", str(file), "-m", given.model, "--nodes", str(given.nodes), "--port", "0")
        command += ["--latency", given.latency, "--engine", given.engine, "--", *server]
        with (folder / "out").open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out)
        running = Up(process, folder)
        try:
            yield running
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(GUARD)


def body(prompt: str, n_predict: int) -> dict[str, Any]:
    return {"prompt": prompt, "n_predict": n_predict, "temperature": 0, "ignore_eos": True, "seed": 1}


def answer(url: str) -> str:
    """The answer, asked for again while the connection breaks or the server loads."""

    def asked() -> str | None:
        try:
            response = httpx.post(f"{url}/completion", json=body(PROMPTS[1], 48), timeout=GUARD)
        except httpx.TransportError:
            return None
        return str(response.json()["content"]) if response.status_code == 200 else None

    found: str = until(asked, "an answer")
    return found


def kills(given: argparse.Namespace) -> bool:
    """Each process killed in turn; whether nothing was lost or left."""
    wrong = 0
    seconds: dict[str, list[float]] = {}
    began = time.monotonic()
    with up(given, "-c", "512", "-np", "1") as running:
        state = running.ready()
        expected = answer(state.url)
        print(f"{given.engine}, {given.nodes} nodes: first answer after {time.monotonic() - began:.1f} s", flush=True)
        for number in range(given.rounds):
            for name in [one.name for one in state.services]:
                state = running.ready()
                pid = next(one.pid for one in state.services if one.name == name)
                killed = time.monotonic()
                os.kill(pid, signal.SIGKILL)
                state = running.ready({name: pid})
                seconds.setdefault(name, []).append(time.monotonic() - killed)
                wrong += answer(state.url) != expected
            print(f"round {number + 1}: {wrong} answers differ", flush=True)
        running.ready()
        running.process.kill()
        running.process.wait()
        left = running.gone()
    for name, times in seconds.items():
        print(f"{name}: ready again after {statistics.median(times):.1f} s (median), {max(times):.1f} s at most")
    kept = not wrong and not left
    n_kills = sum(len(times) for times in seconds.values())
    print(f"kills: {'' if kept else 'NOT '}kept: {wrong} of {n_kills} answers differ; "
          f"{len(left)} processes left after kill -9 of up", *left, sep="\n  ")  # fmt: skip
    return kept


class Streams:
    """Clients that stream one answer after the other."""

    def __init__(self, url: str, n_predict: int) -> None:
        self._url, self._n_predict = url, n_predict
        self._over = threading.Event()
        self.expected = [self._text(i) for i in range(CLIENTS)]
        self.answers = self.wrong = 0
        self.errors: list[str] = []
        self.longest = 0.0
        """Seconds between two events of a stream."""
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _text(self, number: int) -> str:
        text, last = "", time.monotonic()
        told = {**body(f"{PROMPTS[number % len(PROMPTS)]} ({number})", self._n_predict), "stream": True}
        with httpx.stream("POST", f"{self._url}/completion", json=told, timeout=GUARD) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise ValueError(f"{event['error']}")
                    text += event["content"]
                    now = time.monotonic()
                    self.longest = max(getattr(self, "longest", 0.0), now - last)
                    last = now
        return text

    def _run(self, number: int) -> None:
        while not self._over.is_set():
            try:
                text = self._text(number)
            except (httpx.HTTPError, ValueError, KeyError) as error:
                self.errors.append(f"{type(error).__name__}: {error}"[:300])
                continue
            self.answers += 1
            self.wrong += text != self.expected[number]

    def end(self) -> None:
        """Wait for the answers that have begun."""
        self._over.set()
        for thread in self._threads:
            thread.join(GUARD)


def joined(url: str, more: int) -> bool:
    """Return True if that many workers have layers."""
    devices = httpx.get(f"{url}/cluster", timeout=60).json()["devices"]
    return [one["endpoint"] is not None and one["state"] == "ready" for one in devices].count(True) == more


def members(given: argparse.Namespace) -> bool:
    """Nodes that come and go while all stream; whether nothing was lost and /health was quick."""
    given.engine = "llamado"
    options = ["-c", "4096", "-np", str(CLIENTS), "--cluster-token", TOKEN, "--rpc-failover", "1"]
    rows: dict[str, tuple[float, float]] = {}
    workers: list[subprocess.Popen[bytes]] = []
    with up(given, *options) as running:
        state = running.ready()
        log, address = running.folder / "health", httpx.URL(state.url)
        n_workers = given.nodes - 1
        streams = Streams(state.url, given.tokens)
        watching = subprocess.Popen([sys.executable, "-c", HEALTH, address.host, str(address.port), str(log)])

        def phase(name: str, change: Callable[[], None]) -> None:
            began = time.monotonic()
            change()
            rows[name] = (began, time.monotonic())
            answers = streams.answers
            until(lambda: streams.answers >= answers + CLIENTS or streams.errors, "answers after it")
            print(f"{name}: {rows[name][1] - began:.1f} s", flush=True)

        def join() -> None:
            command = our_command("worker", "-p", "0", "-t", "1", "--join", f"{address.host}:{address.port}")
            with (running.folder / f"joined{len(workers)}").open("wb") as out:
                workers.append(subprocess.Popen([*command, "--token", TOKEN], stdout=out, stderr=out))
            until(lambda: joined(state.url, n_workers + 1), "the worker has layers")

        def drain() -> None:
            subprocess.run(our_command("drain", "worker1"), check=True, stdout=subprocess.DEVNULL)

        def leave(number: int) -> None:
            workers[number].terminate()
            workers[number].wait(GUARD)

        def freeze() -> None:
            pid = next(one.pid for one in state.services if one.name == "worker2")
            os.kill(pid, signal.SIGSTOP)
            try:
                until(lambda: "degraded" in httpx.get(f"{state.url}/health", timeout=60).text, "its layers move")
            finally:
                os.kill(pid, signal.SIGCONT)
            until(lambda: "degraded" not in httpx.get(f"{state.url}/health", timeout=60).text, "it has them again")

        try:
            phase("nothing changes", lambda: time.sleep(5))
            phase("join", join)
            phase("drain", drain)
            phase("join again", join)
            phase("freeze and re-placement", freeze)
            for number in range(len(workers)):
                phase(f"leave {number + 1}", partial(leave, number))
            streams.end()
        finally:
            streams.end()
            watching.kill()
            watching.wait()
            for one in workers:
                one.kill()
                one.wait()
        looks = [json.loads(line) for line in log.read_text().splitlines()]
        running.process.terminate()
        running.process.wait(GUARD)
        left = running.gone()
    slow = 0.0
    for name, (began, ended) in rows.items():
        times = sorted(ms for at, ms, _ in looks if began <= at <= ended)
        p99 = times[int(0.99 * (len(times) - 1))]
        slow = max(slow, p99)
        print(f"/health, {name}: {len(times)} looks, median {statistics.median(times):.1f} ms, 99% {p99:.1f} ms, "
              f"at most {times[-1]:.1f} ms")  # fmt: skip
    refused = sum(status != 200 for _, _, status in looks)
    kept = not streams.wrong and not streams.errors and not left
    print(f"members: {'' if kept else 'NOT '}kept: {streams.answers} streams, {streams.wrong} differ, "
          f"{len(streams.errors)} broke off, {streams.longest:.1f} s between two tokens at most; {len(left)} processes "
          f"left", *streams.errors[:5], *left, sep="\n  ")  # fmt: skip
    print(f"/health: {'' if slow <= HEALTH_MS else 'NOT '}kept: 99% within {slow:.1f} ms; {refused} of {len(looks)} "
          "looks found it not ready")  # fmt: skip
    return kept and slow <= HEALTH_MS


PARTS: dict[str, Callable[[argparse.Namespace], bool]] = {"kills": kills, "members": members}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; exit code 1 when something was lost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("--parts", default="kills,members", help="kills, members")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--latency", default="1", help="ms of links, so that there is a tap (default: 1)")
    parser.add_argument("--engine", default="llamado", choices=["llamado", "llama.cpp"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=64, help="of each stream")
    given = parser.parse_args(arguments)
    kept = [PARTS[name](given) for name in re.split("[, ]+", given.parts)]
    return 0 if all(kept) else 1


if __name__ == "__main__":
    raise SystemExit(main())
