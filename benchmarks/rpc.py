"""A model on two workers of one thread each, ours and the real llama.cpp's in turns: slow links, speed, loading.

--delay    every graph 0, 5, 10 and 20 ms late (taps before all workers): one stream, and eight streams in all. Both
           servers keep running with their own two workers and get the same requests over HTTP: 16 words in, 64 tokens
           out, greedily. llama-bench over two more of llama.cpp's workers shows the best of their single stream.
--workers  the real llama-bench over two of our workers and over two of its own.
--load     a model's weights onto two of our workers, and a plain copy of as many bytes to two processes that only
           receive: nothing known of the model, then with its hashes known, workers with empty and with warm caches.

usage: rpc.py [--delay] [--workers] [--load] [MODEL …] [--rounds 3 | --quick] [--json FILE]     (all three by default)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from serving import Load, ask, prompt
from sides import HOST, SIDES, Server, model_path, our_command, peer_program, run, server, settle

from llamado.cluster.taps import Taps
from llamado.devices.split.placement import SplitOptions
from llamado.engine.loaded_model import LoadedModel
from llamado.engine.options import EngineOptions
from llamado.gguf.sources.resolve import cache_dir
from llamado.rpc.endpoint import Endpoint

N_WORKERS = 2
STREAMS = 8
WORDS, GENERATE = 16, 64
OURS, THEIRS = SIDES
_START_SECONDS = 120


@contextmanager
def workers(
    side: str, *options: str, n: int = N_WORKERS, environment: Mapping[str, str] | None = None
) -> Iterator[list[Endpoint]]:
    """`n` running workers of one side, one thread each; ended when the block is left."""
    with ExitStack() as running:
        endpoints = []
        for _ in range(n):
            with socket.socket() as probe:
                probe.bind((HOST, 0))
                port: int = probe.getsockname()[1]
            arguments = ["-H", HOST, "-p", str(port), "-t", "1", *options]
            ours = our_command("worker", "--protocol", "7", *arguments)  # the real llama.cpp of b11434 is to use it
            command = ours if side == OURS else [peer_program("ggml-rpc-server"), *arguments]
            running.enter_context(_process(command, port, environment or {}))
            endpoints.append(Endpoint(HOST, port))
        yield endpoints


@contextmanager
def _process(command: list[str], port: int, environment: Mapping[str, str]) -> Iterator[None]:
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **environment})
        try:
            began = time.perf_counter()
            while not _accepts(port):
                if process.poll() is not None or time.perf_counter() - began > _START_SECONDS:
                    log.seek(0)
                    sys.exit(f"{' '.join(command)}\ndoes not listen:\n{log.read().decode(errors='replace')[-2000:]}")
                time.sleep(0.01)
            yield
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _accepts(port: int) -> bool:
    try:
        socket.create_connection((HOST, port), timeout=5).close()
    except OSError:
        return False
    return True


def listed(endpoints: Sequence[Endpoint | str]) -> str:
    return ",".join(map(str, endpoints))


def in_turns(turn: int, sides: Sequence[str] = SIDES) -> list[str]:
    """Alternate the first side, so that neither always finds the machine as the other left it."""
    return list(sides) if turn % 2 == 0 else list(reversed(sides))


# --- slow links -------------------------------------------------------------------------------------------------------

DELAY_HEADER = f"""
| model | delay ms | one stream: llamado | llama-server | llama-bench | ratio to the better \
| {STREAMS} streams: llamado | llama-server | ratio | llamado, of its own at the first delay |
|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"""


async def one_stream(port: int, seed: int, n_predict: int) -> float:
    """Tokens per second from the first to the last token of one answer."""
    seconds = (await ask(port, prompt(WORDS, seed), n_predict)).seconds
    return (len(seconds) - 1) / (seconds[-1] - seconds[0])


def bench_alone(path: Path, endpoints: Sequence[str]) -> float:
    """Tokens per second of llama-bench's generation."""
    (result,) = json.loads(run(bench_command(path, endpoints, 0, GENERATE)))
    rate: float = result["avg_ts"]
    return rate


def bench_command(path: Path, endpoints: Sequence[Endpoint | str], n_prompt: int, n_generate: int) -> list[str]:
    """llama-bench over workers, an equal share of the layers on each, one run after its warm-up."""
    shares = "/".join("1" for _ in endpoints)
    command = [peer_program("llama-bench"), "-m", str(path), "-rpc", listed(endpoints), "-ngl", "99", "-ts", shares]
    return [*command, "-t", "1", "-p", str(n_prompt), "-n", str(n_generate), "-r", "1", "-o", "json"]


def delay_table(
    names: Sequence[str], delays: Sequence[float], rounds: int, spec_type: str = "auto"
) -> list[dict[str, Any]]:
    print(DELAY_HEADER, flush=True)
    results: list[dict[str, Any]] = []
    for name in names:
        path = model_path(name)
        with ExitStack() as running:
            groups = [running.enter_context(workers(side)) for side in (OURS, THEIRS, THEIRS)]
            taps = Taps([endpoint for group in groups for endpoint in group])
            running.callback(taps.close)
            behind = [taps.endpoints[i : i + N_WORKERS] for i in range(0, len(taps.endpoints), N_WORKERS)]
            servers: dict[str, Server] = {}
            for side, endpoints in zip(SIDES, behind[:2], strict=True):
                options = ["-t", "1", "-np", str(STREAMS), "-c", str(512 * STREAMS), "-ngl", "99", "-ts", "1,1"]
                options += ["--spec-type", spec_type] if side == OURS else []
                servers[side] = running.enter_context(server(side, path, [*options, "--rpc", listed(endpoints)]))
            first: float | None = None
            for delay in delays:
                taps.delay(delay)
                single: dict[str, list[float]] = {side: [] for side in (*SIDES, "llama-bench")}
                loads = {side: Load() for side in SIDES}
                for turn in range(-1, rounds):
                    # The round before the first warms up: machine code for this number of streams, batches in flight.
                    load = loads if turn >= 0 else {side: Load() for side in SIDES}
                    n_predict = GENERATE if turn >= 0 else GENERATE // 4
                    for side in in_turns(turn):
                        settle(servers.values())
                        seed = 1000 * (turn + 1)
                        rate = asyncio.run(one_stream(servers[side].port, seed, n_predict))
                        asyncio.run(load[side].round(servers[side].port, STREAMS, WORDS, n_predict, seed + 1))
                        if turn >= 0:
                            single[side].append(rate)
                    if turn >= 0:
                        settle(servers.values())
                        single["llama-bench"].append(bench_alone(path, behind[2]))
                ours, theirs, bench = (statistics.median(rates) for rates in single.values())
                many = {side: statistics.median(loads[side].tokens_per_second) for side in SIDES}
                first = many[OURS] if first is None else first
                ratios = ours / max(theirs, bench), many[OURS] / many[THEIRS], many[OURS] / first
                print(
                    f"| {name} | {delay:g} | {ours:.1f} | {theirs:.1f} | {bench:.1f} | **{ratios[0]:.2f}** "
                    f"| {many[OURS]:.1f} | {many[THEIRS]:.1f} | **{ratios[1]:.2f}** | {ratios[2]:.2f} |",
                    flush=True,
                )
                results.append(
                    {
                        "model": name,
                        "delay_ms": delay,
                        "single_tokens_per_second": single,
                        "streams_tokens_per_second": {side: loads[side].tokens_per_second for side in SIDES},
                        "single_ratio": ratios[0],
                        "streams_ratio": ratios[1],
                        "streams_of_own_first": ratios[2],
                    }
                )
    return results


# --- the real master over either's workers ----------------------------------------------------------------------------

WORKERS_HEADER = """
| model | llama-bench over 2 workers | llamado's | llama.cpp's | ratio |
|---|---|---:|---:|---:|"""


def workers_table(names: Sequence[str], rounds: int, n_prompt: int, n_generate: int) -> list[dict[str, Any]]:
    print(WORKERS_HEADER, flush=True)
    results: list[dict[str, Any]] = []
    for name in names:
        path = model_path(name)
        with workers(OURS) as ours, workers(THEIRS) as theirs:
            endpoints = {OURS: ours, THEIRS: theirs}
            for test, lengths in {f"pp{n_prompt}": (n_prompt, 0), f"tg{n_generate}": (0, n_generate)}.items():
                rates: dict[str, list[float]] = {side: [] for side in SIDES}
                for turn in range(rounds):
                    for side in in_turns(turn):
                        (result,) = json.loads(run(bench_command(path, endpoints[side], *lengths)))
                        rates[side].append(result["avg_ts"])
                medians = [statistics.median(rates[side]) for side in SIDES]
                cells = [
                    f"{median:.1f} ({min(rates[side]):.1f} … {max(rates[side]):.1f})"
                    for side, median in zip(SIDES, medians, strict=True)
                ]
                ratio = medians[0] / medians[1]
                print(f"| {name} | {test} | {' | '.join(cells)} | **{ratio:.2f}** |", flush=True)
                results.append({"model": name, "test": test, "tokens_per_second": rates, "ratio": ratio})
    return results


# --- loading ----------------------------------------------------------------------------------------------------------

LOAD_HEADER = """
| model | weights onto 2 workers | seconds | MB/s | of a plain copy |
|---|---|---:|---:|---:|"""


class _WeightsLoaded(Exception):
    """The weights are there; what would follow is not measured."""


def load_seconds(path: Path, endpoints: Sequence[Endpoint], cache: Path | None = None) -> tuple[float, int]:
    """From the start of connecting until the workers have all weights; and bytes of those.

    With `cache` the model stays loaded until the workers have written all of it there.
    """
    began = ended = 0.0
    n_bytes = 0

    def progress(what: str, done: int, total: int) -> None:
        nonlocal began, ended, n_bytes
        if what.startswith("connecting"):
            began = time.perf_counter()
        elif what.startswith("sending"):
            n_bytes = total
        elif what.startswith("compiling"):
            ended = time.perf_counter()
            if cache is not None:
                until_written(cache)
            raise _WeightsLoaded

    split = SplitOptions(rpc=tuple(map(str, endpoints)), tensor_split=(1.0, 1.0), n_gpu_layers=99)
    try:
        LoadedModel.load(path, EngineOptions(n_ctx=512, split=split, n_threads=1), progress=progress).close()
    except _WeightsLoaded:
        pass
    return ended - began, n_bytes


def copy_seconds(path: Path, n_bytes: int) -> float:
    """Seconds to send as many bytes of a mapped file, half to each of two processes that receive into new memory."""
    context = multiprocessing.get_context("spawn")
    receivers = []
    for share in (n_bytes // 2, n_bytes - n_bytes // 2):
        pipe, other = context.Pipe()
        process = context.Process(target=_receive, args=(other, share), daemon=True)
        process.start()
        connection = socket.create_connection((HOST, pipe.recv()))
        receivers.append((share, process, connection))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        data = memoryview(mapped)

        def send(connection: socket.socket, at: int, share: int) -> None:
            connection.sendall(data[at : at + share])
            assert connection.recv(1) == b"!"

        began = time.perf_counter()
        threads = [
            threading.Thread(target=send, args=(connection, i * (n_bytes // 2), share))
            for i, (share, _, connection) in enumerate(receivers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - began
        data.release()
    for _, process, connection in receivers:
        connection.close()
        process.join()
    return seconds


def _receive(pipe: Connection, n_bytes: int) -> None:
    with socket.create_server((HOST, 0)) as listener:
        pipe.send(listener.getsockname()[1])
        connection, _ = listener.accept()
    memory, at = np.empty(n_bytes, np.uint8).data, 0
    while at < n_bytes:
        at += connection.recv_into(memory[at:])
    connection.sendall(b"!")
    connection.close()


@contextmanager
def unknown_hashes(path: Path) -> Iterator[Path]:
    """The model under a new name, without stored hashes; hashes stored meanwhile are removed afterwards."""
    kept = cache_dir() / "hashes"
    before = set(kept.glob("*"))
    with tempfile.TemporaryDirectory(dir=path.resolve().parent) as folder:
        link = Path(folder) / path.name
        os.link(path.resolve(), link)
        yield link
    for file in set(kept.glob("*")) - before:
        file.unlink()


def until_written(cache: Path) -> None:
    """Returns when workers have nothing left to write to their cache: they do it after the load."""
    before = -1
    while (now := sum(file.stat().st_size for file in [*cache.rglob("*")] if file.is_file())) != before:
        before = now
        time.sleep(1.0)


def load_table(names: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    print(LOAD_HEADER, flush=True)
    results: list[dict[str, Any]] = []
    for name in names:
        path = model_path(name)
        read_once(path)
        times: dict[str, list[float]] = {}
        n_bytes = 0

        def note(what: str, seconds: float, times: dict[str, list[float]] = times) -> None:
            times.setdefault(what, []).append(seconds)

        for _ in range(rounds):
            # Plain workers first: all that follows is compared with the copy right after it.
            with workers(OURS) as endpoints:
                with unknown_hashes(path) as fresh:
                    seconds, n_bytes = load_seconds(fresh, endpoints)
                    note("nothing known, no caches", seconds)
                load_seconds(path, endpoints)  # from now on its hashes are known
                note("hashes known, no caches", load_seconds(path, endpoints)[0])
            note("a plain copy", copy_seconds(path, n_bytes))
            with tempfile.TemporaryDirectory() as cache, ExitStack() as running:
                (Path(cache) / "kernels").symlink_to(cache_dir() / "kernels")  # compiled already
                all_ = running.enter_context(workers(OURS, "-c", environment={"LLAMADO_CACHE": cache}))
                note("caches empty (they are written)", load_seconds(path, all_, Path(cache) / "rpc")[0])
                note("caches warm", load_seconds(path, all_)[0])
        medians = {what: statistics.median(seconds) for what, seconds in times.items()}
        copy = medians["a plain copy"]
        for what, seconds in medians.items():
            print(
                f"| {name} | {what} | {seconds:.2f} | {1e-6 * n_bytes / seconds:.0f} | **{seconds / copy:.2f}** |",
                flush=True,
            )
        results.append({"model": name, "bytes": n_bytes, "seconds": times})
    return results


def read_once(path: Path) -> None:
    """So that no measurement waits for the disk."""
    with path.open("rb") as file:
        while file.read(1 << 24):
            pass


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help="default: smollm2; for --load synthetic-1b")
    parser.add_argument("--delay", action="store_true")
    parser.add_argument("--workers", action="store_true")
    parser.add_argument("--load", action="store_true")
    parser.add_argument("--delays", default="0,5,10,20", help="ms")
    parser.add_argument("--spec-type", default="auto", help="ours with --delay: none shows what drafted tokens add")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="1 round")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--generate", type=int, default=128)
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    flags = parser.parse_args()
    rounds = 1 if flags.quick else flags.rounds
    delays = [float(part) for part in flags.delays.split(",")]
    names = flags.models or ["smollm2"]
    tables: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "delay": lambda: delay_table(names, delays, rounds, flags.spec_type),
        "workers": lambda: workers_table(names, rounds, flags.prompt, flags.generate),
        "load": lambda: load_table(flags.models or ["synthetic-1b"], rounds),
    }
    chosen = [key for key in tables if getattr(flags, key)] or list(tables)
    results = {key: tables[key]() for key in chosen}
    if flags.json:
        flags.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
