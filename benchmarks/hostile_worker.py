"""A worker among clients that mean harm, while a server computes on it and newcomers ask it for memory.

`llamado worker --mem 600M -c` has one half of a model's layers, whose server answers the same greedy question once a
second. Each attack comes from addresses of its own (127.0.1.9 …), as from another machine:

arena        sums over a tensor whose strides are 0: nothing to send, gigabytes to compute with
abandoned    six products as large as are taken, whose client goes away at once
kernels      as many different kernels as a client gets, by client after client
idle         200 connections that say HELLO and nothing more
preimage     other bytes with the hash of a weight, uploaded to the cache before it is used again
garbage      5,000 connections that send what is no HELLO, or half of one
sizes        memory, places and counts at the ends of 64 bits

Printed for each: seconds, what newcomers met, how long they took for a connection and a megabyte of memory, how long
the server's /health took, and the worker's memory before, at most, and after. Ends with 1 when the worker or the server
died, when an answer was wrong, when a newcomer was turned away or waited for more than 2 s, when /health took more than
50 ms at the 99th percentile, when memory stays more than 150 MB above where it was, or when the attacks write more than
1,000 lines to the worker's log.

usage: hostile_worker.py [--model smollm2] [--only PHASE] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
from endurance import resident
from hostile import MOST_KEPT, MOST_MS, Tally, compare, drained, go_through, look, milliseconds, settle, watcher
from second_preimage import fnv1a, second_preimage
from sides import HOST, Server, model_path, our_command, server

from llamado.devices.device import DeviceError
from llamado.ggml import graph as g
from llamado.ggml.graph import Graph
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType
from llamado.rpc.client.device import RemoteDevice, connect
from llamado.rpc.wire import (
    AllocBuffer,
    BufferGetBase,
    CopyTensor,
    DeviceCount,
    FreeBuffer,
    GetAlignment,
    GetTensor,
    Hello,
    Number,
    Request,
    SetTensor,
    SetTensorHash,
    WireTensor,
    write_request,
)

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "rpc"))
from wire_client import Client

MOST_NEWCOMER_MS = 2000.0
NEWLINE = b"\n"
MEM = "600M"
MOST_LINES = 1000
"""Lines of a worker's log."""


@contextmanager
def worker() -> Iterator[Server]:
    """A worker with a cache of its own, once it listens."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as log:
        command = our_command("worker", "-H", HOST, "-p", str(port), "-t", "2", "--mem", MEM, "-c")
        environment = {**os.environ, "LLAMADO_CACHE": folder}
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            while True:
                try:
                    socket.create_connection((HOST, port), 1).close()
                    break
                except OSError:
                    if process.poll() is not None or time.perf_counter() - began > 60:
                        sys.exit("the worker does not start")
                    time.sleep(0.05)
            yield Server(port, process.pid, time.perf_counter() - began)
            log.seek(0)
            said = log.read()
            if process.poll() is not None:
                sys.exit(f"FAULT: the worker ended with {process.returncode}: {said[-2000:].decode()}")
            print(f"{said.count(NEWLINE)} lines in the worker's log")
            if said.count(NEWLINE) > MOST_LINES:
                sys.exit(f"FAULT: {said.count(NEWLINE)} lines in the worker's log")
        finally:
            process.terminate()
            process.wait(60)


@contextmanager
def device(port: int, tally: Tally) -> Iterator[RemoteDevice | None]:
    """A client's device, or None where it is turned away, which is noted."""
    try:
        found = connect(f"{HOST}:{port}", timeout=30)[0]
    except DeviceError as error:
        tally.statuses[type(error).__name__] += 1
        yield None
        return
    try:
        yield found
    except DeviceError as error:
        tally.statuses[type(error).__name__] += 1
    finally:
        found.close()


def run(device: RemoteDevice, out: Tensor, *, wait: bool = True) -> None:
    """Computes a tensor in a graph of its own."""
    device.place([out])
    graph = Graph()
    graph.output("out", out)
    device.submit(graph)
    if wait:
        device.read(out, 0, 4).result(120)
    else:
        device.flush()


# --- attacks ----------------------------------------------------------------------------------------------------------


def _arena(port: int, tally: Tally) -> None:
    for n in (16, 64, 256):  # MB sent, and read 32 times over
        with device(port, tally) as one:
            if one is None:
                continue
            small = g.new_tensor(TensorType.F32, n << 10, 256, name="small")
            one.place([small])
            wide = g.view_4d(small, *small.ne[:2], 32, 1, small.nb[1], 0, 0, 0)
            for out in (g.sum_all(wide), g.sum_rows(wide), g.mean(g.sqr(wide))):
                run(one, out)
            tally.statuses["computed"] += 1


def _abandoned(port: int, tally: Tally) -> None:
    for _ in range(3):
        with device(port, tally) as one:
            if one is None:
                continue
            a, b = g.new_tensor(TensorType.F32, 4096, 4096), g.new_tensor(TensorType.F32, 4096, 256)
            one.place([a, b])
            columns = g.view_3d(b, 4096, 256, 32, b.nb[1], 0, 0)
            total: Tensor | None = None
            for i in range(6):  # 6 * 137 * 10^9 multiplications
                rows = g.view_3d(a, 4096, 4096 - i, 32, a.nb[1], 0, 0)
                part = g.sum_all(g.mul_mat(rows, columns))
                total = part if total is None else g.add(total, part)
            assert total is not None
            run(one, total, wait=False)
            tally.statuses["submitted"] += 1


def _kernels(port: int, tally: Tally) -> None:
    for client in range(6):
        with device(port, tally) as one:
            if one is None:
                continue
            for n in range(200):
                width = 33 + client * 200 + n
                a = g.new_tensor(TensorType.F32, width, 3)
                out = g.scale(g.add(g.rms_norm(a, 1e-5 + n * 1e-7), a), 1.0 + n)
                one.place([a])
                run(one, out)
            tally.statuses["200 graphs"] += 1


def _preimage(port: int, tally: Tally) -> None:
    genuine = random.Random(7).randbytes(1 << 20)
    named = fnv1a(genuine)
    forged = second_preimage(named, len(genuine))
    for data in (genuine, forged):
        with Wire(port) as wire:
            wire.send(SetTensor(wire.tensor, 1, 0, len(data)), data)
            wire.get(wire.tensor, 1)  # it is there
            time.sleep(1)  # entries are written by and by, while their client is there
    with Wire(port) as wire:
        answer = wire.ask(SetTensorHash(wire.tensor, 0, named))
        found = wire.read() if isinstance(answer, Number) and answer.value else b""
    if found == forged:
        tally.bad.append("the bytes of an attacker were given for those of a hash")
    tally.statuses["genuine" if found == genuine else "not there" if not found else "forged"] += 1


def _garbage(port: int, tally: Tally) -> None:
    hello = write_request(Hello())
    kinds = (
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01" + bytes(200),
        b"\xff" * 64,
        hello[:9],
        b"",
        hello + b"\xff" * 99,
    )
    for n in range(5000):
        one = socket.socket()
        one.bind((f"127.0.{10 + n % 100}.9", 0))
        try:
            one.connect((HOST, port))
            one.sendall(kinds[n % len(kinds)])
            tally.statuses["sent"] += 1
        except OSError as error:
            tally.statuses[type(error).__name__] += 1
        finally:
            one.close()


def _sizes(port: int, tally: Tally) -> None:
    asks: tuple[Callable[[Wire, int], object], ...] = (
        lambda wire, n: wire.ask(AllocBuffer(0, n)),
        lambda wire, n: wire.ask(BufferGetBase(n)),
        lambda wire, n: wire.ask(GetAlignment(n % 2**32)),
        lambda wire, n: wire.tell(FreeBuffer(n)),
        lambda wire, n: wire.tell(SetTensor(wire.tensor, 0, n, 1), b"x"),
        lambda wire, n: wire.ask(GetTensor(wire.tensor, n, 1)),
        lambda wire, n: wire.ask(GetTensor(wire.tensor, 0, n)),
        lambda wire, n: wire.ask(CopyTensor(wire.tensor, wire.tensor._replace(data=n))),
    )
    for size in (0, 1, 2**32 - 1, 2**62, 2**63, 2**64 - 1):
        for ask in asks:
            try:
                with Wire(port) as wire:
                    ask(wire, size)
                tally.statuses["answered"] += 1
            except (OSError, OverflowError, struct.error) as error:
                tally.statuses[type(error).__name__] += 1


class Wire(Client):
    """A connection that sends the given messages, with a tensor of a megabyte."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        ptr, base = self.alloc(1 << 20)
        ne, nb = (1 << 20, 1, 1, 1), (1, 1 << 20, 1 << 20, 1 << 20)
        self.tensor = WireTensor(1, int(TensorType.I8), ptr, ne, nb, base, name=b"weight")

    def tell(self, request: Request, data: bytes = b"") -> None:
        """Send a message that has no response, and wait until the worker has read it."""
        self.send(request, data)
        self.ask(DeviceCount())

    def read(self) -> bytes:
        """The tensor's bytes."""
        return self.get(self.tensor, 1 << 20)


async def in_thread(attack: Callable[[int, Tally], None], port: int, tally: Tally) -> None:
    """Runs a blocking attack; those who are turned away have reached what they can."""
    try:
        await asyncio.to_thread(attack, port, tally)
    except (DeviceError, ConnectionResetError) as error:
        tally.statuses[type(error).__name__] += 1


async def arena(port: int, tally: Tally) -> None:
    """Sums over tensors of stride 0."""
    await in_thread(_arena, port, tally)


async def abandoned(port: int, tally: Tally) -> None:
    """Six huge products whose client goes."""
    await in_thread(_abandoned, port, tally)


async def kernels(port: int, tally: Tally) -> None:
    """Clients that have kernels compiled, one after the other."""
    await in_thread(_kernels, port, tally)


async def preimage(port: int, tally: Tally) -> None:
    """An attacker's bytes under the hash of a weight."""
    await in_thread(_preimage, port, tally)


async def garbage(port: int, tally: Tally) -> None:
    """Connections that speak something else."""
    await in_thread(_garbage, port, tally)


async def sizes(port: int, tally: Tally) -> None:
    """Numbers at the ends of 64 bits."""
    await in_thread(_sizes, port, tally)


async def idle(port: int, tally: Tally) -> None:
    """Connections that greet and stay."""
    held: list[socket.socket] = []
    try:
        for i in range(200):
            one = socket.socket()
            one.bind((f"127.0.{1 + i // 100}.9", 0))
            one.settimeout(10)
            one.connect((HOST, port))
            one.sendall(write_request(Hello()))
            held.append(one)
            tally.statuses["open"] += 1
        await asyncio.sleep(15)
    finally:
        for one in held:
            one.close()


ATTACKS: dict[str, Callable[[int, Tally], Awaitable[None]]] = {
    "arena": arena,
    "abandoned": abandoned,
    "kernels": kernels,
    "idle": idle,
    "preimage": preimage,
    "garbage": garbage,
    "sizes": sizes,
}


# --- watching ---------------------------------------------------------------------------------------------------------


def newcomers(port: int, over: Event, found: multiprocessing.Queue[tuple[float, float, str]]) -> None:
    """Connects, takes a megabyte and writes to it, five times a second: (when, seconds it took, what was wrong)."""
    while not over.is_set():
        began = time.monotonic()
        wrong = ""
        try:
            one = connect(f"{HOST}:{port}", timeout=30)[0]
            try:
                tensor = g.new_tensor(TensorType.F32, 1 << 18)
                one.place([tensor])
                wanted = struct.pack("<d", began)
                one.write(tensor, np.frombuffer(wanted, np.uint8))
                if one.read(tensor, 0, 8).result(60).tobytes() != wanted:
                    wrong = "read other bytes than were written"
            finally:
                one.close()
        except DeviceError as error:
            wrong = str(error)
        took = time.monotonic() - began
        found.put((began, took, wrong))
        time.sleep(max(0.0, 0.2 - took))


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--only", choices=ATTACKS, action="append")
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args()
    faults: list[str] = []
    rows: list[dict[str, Any]] = []
    looks: list[tuple[float, float]] = []
    compared: list[tuple[float, str]] = []
    arrivals: list[tuple[float, float, str]] = []
    with worker() as helping:
        options = ["-np", "2", "-c", "2048", "-t", "1", "--rpc", f"{HOST}:{helping.port}", "--tensor-split", "1,1"]
        with server("llamado", model_path(flags.model), options) as one:
            watchers = [watcher(look, one.port), watcher(compare, one.port), watcher(newcomers, helping.port)]
            seen: list[list[Any]] = [looks, compared, arrivals]
            asyncio.run(settle(helping))
            base = last = resident(helping.pid)
            print(
                "| attack | s | met | newcomers p50 / p99 / worst ms | /health p50 / p99 / worst ms | MiB | answers |"
            )
            print("|---|---|---|---|---|---|---|")
            for name in flags.only or ATTACKS:
                phase = asyncio.run(go_through(helping, helping.port, name, ATTACKS[name]))
                last = phase.after
                for (_, found, _), into in zip(watchers, seen, strict=True):
                    drained(found, into)
                waited = milliseconds([look[:2] for look in arrivals], phase.began, phase.settled)
                took = milliseconds(looks, phase.began, phase.ended)
                memory = [m >> 20 for m in (phase.before, phase.most, phase.after)]
                answers = Counter(
                    w if w == "right" else "other" for t, w in compared if phase.began <= t < phase.settled
                )
                met = ", ".join(f"{n}× {what}" for what, n in phase.tally.statuses.items())
                cells = [
                    name,
                    f"{phase.ended - phase.began:.0f}",
                    met,
                    *(" / ".join(f"{x:.1f}" for x in y) for y in (waited, took)),
                ]
                cells += [" / ".join(map(str, memory)), ", ".join(f"{n} {what}" for what, n in answers.items())]
                print(f"| {' | '.join(cells)} |", flush=True)
                rows.append(
                    {"attack": name, "met": met, "newcomers_ms": waited, "health_ms": took, "memory_mib": memory}
                )
                faults += phase.tally.bad
                if waited[2] > MOST_NEWCOMER_MS:
                    faults.append(f"{name}: a newcomer waited {waited[2] / 1e3:.1f} s")
                if took[1] > MOST_MS:
                    faults.append(f"{name}: /health took {took[1]:.0f} ms at the 99th percentile")
            for over, _, process in watchers:
                over.set()
                process.join(70)
    faults += [f"newcomer: {wrong}" for _, _, wrong in arrivals if wrong]
    faults += [f"answer: {what}" for _, what in compared if what not in ("right", "503")]
    if last - base > MOST_KEPT:
        faults.append(f"{(last - base) >> 20} MiB of memory stay")
    if flags.json:
        flags.json.write_text(json.dumps({"attacks": rows, "faults": faults}, indent=2) + "\n")
    for fault, n in Counter(faults).most_common(30):
        print(f"FAULT ({n}×): {fault}")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
