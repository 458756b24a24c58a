"""`llamado up --nodes 3`, each of its processes killed in turn, for some rounds: answers stay equal, nothing is left.

    python benchmarks/up.py -m smollm2 --rounds 10
    PATH=$PATH:…/bin python benchmarks/up.py -m smollm2 --engine llama.cpp

Each round kills every process once with SIGKILL, waits until `llamado ps` calls all ready again and compares the answer
of a fixed prompt with the first one. At the end `llamado up` itself is killed, and what is left of it is counted.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import httpx

GUARD = 600.0  # seconds
BODY = {"prompt": "Once upon a time there was", "n_predict": 48, "temperature": 0, "ignore_eos": True, "seed": 1}


def clusters(environment: dict[str, str]) -> list[dict[str, Any]]:
    """What `llamado ps --json` says."""
    command = [sys.executable, "-m", "llamado", "ps", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def ready(environment: dict[str, str], changed: dict[str, int]) -> tuple[dict[str, Any], float]:
    """The cluster once all is ready and processes in `changed` are others; seconds that it took."""
    began = time.monotonic()
    while time.monotonic() < began + GUARD:
        for state in clusters(environment):
            new = all(one["pid"] != changed.get(one["name"]) for one in state["services"])
            if state["phase"] == "ready" and new:
                return state, time.monotonic() - began
    raise SystemExit("the cluster did not get ready")


def answer(url: str) -> str:
    """The answer, asked for again while the connection breaks or the server loads."""
    end = time.monotonic() + GUARD
    while time.monotonic() < end:
        try:
            response = httpx.post(f"{url}/completion", json=BODY, timeout=GUARD)
            if response.status_code == 200:
                found: str = response.json()["content"]
                return found
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise SystemExit("no answer")


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def main() -> int:
    """The command; exit code 1 when an answer differs or a process is left."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--latency", default="1", help="ms of links, so that there is a tap (default: 1)")
    parser.add_argument("--engine", default="llamado", choices=["llamado", "llama.cpp"])
    parser.add_argument("--rounds", type=int, default=10)
    given = parser.parse_args()
    wrong, seconds = 0, {}
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"XDG_RUNTIME_DIR": folder}
        command = [sys.executable, "-m", "llamado", "up", "-m", given.model, "--nodes", str(given.nodes), "--port", "0"]
        command += ["--latency", given.latency, "--engine", given.engine, "--", "-c", "512", "-np", "1"]
        began = time.monotonic()
        with open(os.path.join(folder, "out"), "wb") as out:
            process = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
        state, _ = ready(environment, {})
        expected = answer(state["url"])
        print(f"{given.engine}, {given.nodes} nodes: first answer after {time.monotonic() - began:.1f} s")
        for number in range(given.rounds):
            for name in [one["name"] for one in state["services"]]:
                state, _ = ready(environment, {})
                pid = next(one["pid"] for one in state["services"] if one["name"] == name)
                os.kill(pid, signal.SIGKILL)
                state, took = ready(environment, {name: pid})
                seconds.setdefault(name, []).append(took)
                wrong += answer(state["url"]) != expected
            print(f"round {number + 1}: {wrong} answers differ", flush=True)
        state, _ = ready(environment, {})
        process.kill()
        process.wait()
        end = time.monotonic() + 30
        pids = [one["pid"] for one in state["services"]]
        while any(map(alive, pids)) and time.monotonic() < end:
            time.sleep(0.05)
        left = sum(map(alive, pids))
    for name, times in seconds.items():
        print(f"{name}: ready again after {statistics.median(times):.1f} s (median), {max(times):.1f} s at most")
    print(f"{wrong} of {sum(map(len, seconds.values()))} answers differ; {left} processes left after kill -9 of up")
    return 1 if wrong or left else 0


if __name__ == "__main__":
    raise SystemExit(main())
