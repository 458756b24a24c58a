"""`llamado bench --latency 0,5,10,20,30 --nodes 3,4,5`: what slow links cost, by the number of machines.

N nodes are this machine and N−1 workers, each behind a tap that delays graphs: the first of `--rpc`, or without it
workers of one thread that are started here. Layers are divided evenly unless `--tensor-split` says otherwise, because
what is asked is what a link costs, not where layers would go best. Measured: tokens per second of one stream, and of
eight streams together, from the first token of any of them to the last; prompts are short.

A tap delays what goes to a worker, a graph or what another worker passes on, and no answer; so N workers cost N delays
with a ring and without. `--both-ways` delays everything both ways: 2 N of them without, N + 1 with a ring.
"""

from __future__ import annotations

import json
import os
import queue
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from llamado.cluster.taps import Taps
from llamado.commands.options import engine_options, model_source
from llamado.devices.split.placement import SplitOptions
from llamado.engine.options import EngineOptions, ModelSource
from llamado.engine.request import Defaults, Done, Event, Failed, Token
from llamado.errors import LlamadoError
from llamado.flags import FlagError, Parsed
from llamado.http import logs
from llamado.installation import install_command, own_command
from llamado.rpc.endpoint import Endpoint
from llamado.terminal.text import print

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from llamado.engine.loaded_model import LoadedModel

STREAMS = 8
_PROMPT_TOKENS = 16
_WARM_UP_TOKENS = 16
_GENERATE = 64
_REPETITIONS = 2
_CONTEXT = 2048
_LATENCIES, _NODES = "0,5,10,20,30", "3,4,5"
_START_SECONDS = 60.0


class LatencyError(LlamadoError):
    """A measurement over workers that cannot be made: one does not start, or what draws the table is missing."""


@dataclass(frozen=True)
class Measured:
    """Generated tokens per second at one latency of the links."""

    nodes: int
    latency_ms: float
    single: float
    streams: float
    """Of STREAMS answers at once, in all."""
    ring: bool = False
    """Workers passed what they computed straight to the next one."""


# --- what is measured -------------------------------------------------------------------------------------------------


def generation_rate(llama: LoadedModel, n_streams: int, n_predict: int, seed: int = 0) -> float:
    """Tokens per second that `n_streams` answers at once get in all, from the first token of any to the last."""
    times: list[float] = []  # one for each token
    ended: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def emit(event: Event) -> None:
        if isinstance(event, Token):
            times.extend([time.perf_counter()] * len(event.tokens))
        elif isinstance(event, Done | Failed):
            ended.put(event)

    random = np.random.default_rng(seed)
    defaults = Defaults(cache_prompt=False)
    for _ in range(n_streams):
        prompt = random.integers(0, llama.forward.n_vocab, _PROMPT_TOKENS).tolist()
        llama.engine.submit(
            defaults.request(prompt, n_predict=n_predict, temperature=0.0, ignore_eos=True, seed=1), emit
        )
    for _ in range(n_streams):
        event = ended.get()
        if isinstance(event, Failed):
            raise event.error
    return (len(times) - 1) / (max(times) - min(times))


def measure(llama: LoadedModel, n_predict: int, repetitions: int) -> tuple[float, float]:
    """Medians of one stream and of STREAMS of them, after a short round of each that warms up."""
    rates = []
    for n_streams in (1, STREAMS):
        generation_rate(llama, n_streams, _WARM_UP_TOKENS)
        rates.append(statistics.median(generation_rate(llama, n_streams, n_predict, i) for i in range(repetitions)))
    return rates[0], rates[1]


# --- workers and the taps before them ---------------------------------------------------------------------------------


@contextmanager
def own_workers(n: int) -> Iterator[list[Endpoint]]:
    """`n` workers of one thread on this machine, ended when the block is left. Raises LatencyError."""
    command = own_command("worker", "-p", "0", "-t", "1")
    running: list[subprocess.Popen[str]] = []
    try:
        for _ in range(n):
            running.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        yield [Endpoint("127.0.0.1", listening_port(process)) for process in running]
    finally:
        for process in running:
            process.terminate()
        for process in running:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


def listening_port(process: subprocess.Popen[str]) -> int:
    """The port a worker says it listens on; what it says later is read and dropped. Raises LatencyError."""
    said: list[str] = []
    found: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    def read() -> None:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                said.append(line)
                if match := re.search(r"127\.0\.0\.1:(\d+)", line):
                    found.put(int(match[1]))
        except ValueError:
            pass  # closed while it was being read
        found.put(None)

    threading.Thread(target=read, name="worker-log", daemon=True).start()
    try:
        port = found.get(timeout=_START_SECONDS)
    except queue.Empty:
        port = None
    if port is None:
        raise LatencyError(f"a worker did not start: {''.join(said[-5:]).strip() or 'it said nothing'}")
    return port


# --- the table and the drawing ----------------------------------------------------------------------------------------


HEADER = f"""| Nodes | Latency | Ring | tok/s | vs baseline | {STREAMS} streams tok/s | vs baseline |
|-------|---------|------|------:|-------------|---------------:|-------------|"""


def line(measured: Measured, baseline: Measured) -> str:
    """A row of the table; the baseline is the first."""
    cells = [f"{measured.nodes}", f"{measured.latency_ms:g}ms", "on" if measured.ring else "off"]
    for rate, first in ((measured.single, baseline.single), (measured.streams, baseline.streams)):
        cells += [f"{rate:.1f}", f"{rate / first:.2f}×"]
    return f"| {' | '.join(cells)} |"


def can_draw() -> bool:
    """Whether matplotlib is there."""
    try:
        import matplotlib.figure
    except ImportError:
        return False
    return bool(matplotlib.figure)


def draw(rows: Sequence[Measured], title: str, folder: Path) -> list[Path]:
    """Writes `latency.png` and `latency.svg`. Raises LatencyError."""
    figure = _figure(rows, title)
    paths = [folder / "latency.png", folder / "latency.svg"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in paths:
            figure.savefig(path, dpi=150)
    except OSError as error:
        raise LatencyError(f"--out {folder}: {error.strerror or error}") from None
    return paths


def _figure(rows: Sequence[Measured], title: str) -> Figure:
    # Without pyplot, so that no window system is asked for.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    figure.suptitle(title)
    panels: tuple[tuple[str, Callable[[Measured], float]], ...] = (
        ("one stream", lambda row: row.single),
        (f"{STREAMS} streams, in all", lambda row: row.streams),
    )
    for i, (name, rate) in enumerate(panels):
        axes = figure.add_subplot(1, 2, i + 1)
        kinds = sorted({(row.nodes, row.ring) for row in rows})
        colours = {nodes: f"C{i}" for i, nodes in enumerate(dict.fromkeys(nodes for nodes, _ in kinds))}
        for nodes, ring in kinds:
            line_ = sorted(
                (row for row in rows if (row.nodes, row.ring) == (nodes, ring)), key=lambda row: row.latency_ms
            )
            axes.plot(
                [row.latency_ms for row in line_],
                [rate(row) for row in line_],
                marker="o",
                color=colours[nodes],
                linestyle="--" if ring else "-",
                label=f"{nodes} nodes{', ring' if ring else ''}",
            )
        axes.set_title(name)
        axes.set_xlabel("latency of each graph, ms")
        axes.set_ylabel("tokens per second")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    return figure


# --- the command ------------------------------------------------------------------------------------------------------


def latencies_of(text: str) -> list[float]:
    """Milliseconds, comma-separated. Raises FlagError."""
    try:
        values = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        values = []
    if not values or not all(0 <= value < 1e6 for value in values):
        raise FlagError(f"--latency: expected milliseconds, comma-separated, got {text!r}")
    return values


def nodes_of(text: str, n_workers: int | None) -> list[int]:
    """Numbers of machines; `n_workers` there are, None: as many as are needed. Raises FlagError."""
    try:
        values = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        values = []
    if not values or min(values) < 2:
        raise FlagError(f"--nodes: expected numbers of machines from 2 on, comma-separated, got {text!r}")
    if n_workers is not None and max(values) > n_workers + 1:
        raise FlagError(f"--nodes: {max(values)} nodes need {max(values) - 1} workers, --rpc names {n_workers}")
    return values


def linked(llama: LoadedModel) -> bool:
    """Whether workers pass what they compute straight to others."""
    return bool(getattr(llama.forward, "links", ()))


def split_for(given: SplitOptions | None, endpoints: Sequence[str], *, even: bool) -> SplitOptions:
    """How the model is divided among this machine and the workers at `endpoints`."""
    split = SplitOptions(rpc=tuple(endpoints)) if given is None else replace(given, rpc=tuple(endpoints))
    return replace(split, tensor_split=(1.0,) * (len(endpoints) + 1)) if even else split


def _load(source: ModelSource, options: EngineOptions, nodes: int) -> LoadedModel:
    from llamado.engine.loaded_model import LoadedModel

    llama = LoadedModel.load(source, options)
    devices = len(getattr(llama.forward, "devices", [None]))
    if devices < nodes:
        llama.close()
        raise LatencyError(f"the model was loaded on {devices} of {nodes} devices")
    return llama


def bench_latency(flags: Parsed) -> int:
    """The command. Raises LlamadoError."""
    logs.configure(verbosity=9 if flags.verbose else min(flags.log_verbosity, 2))
    latencies = latencies_of(flags.latency or _LATENCIES)
    base = engine_options(flags, n_slots=STREAMS)
    given = None if base.split is None else [Endpoint.parse(text) for text in base.split.rpc]
    if given is not None and any(endpoint.tls for endpoint in given):
        raise FlagError("--latency: graphs inside TLS cannot be delayed; name workers without tls://")
    default = _NODES if given is None else str(len(given) + 1)
    nodes = nodes_of(flags.nodes or default, None if given is None else len(given))
    n_predict, repetitions = _GENERATE, _REPETITIONS
    if "n_gen" in flags.given:
        n_predict = _whole(flags.n_gen, "-n/--n-gen")
    if "repetitions" in flags.given:
        repetitions = _whole(str(flags.repetitions), "-r/--repetitions")
    if not can_draw():
        hint = f'drawing needs matplotlib, the extra "plot": {install_command("plot")}'
        if flags.out:
            raise LatencyError(f"--out {flags.out}: {hint}")
        print(hint, file=sys.stderr)
    source = model_source(flags)
    base = base.with_context(max(base.n_ctx, _CONTEXT, STREAMS * (_PROMPT_TOKENS + n_predict)))
    rows: list[Measured] = []
    as_table = flags.output != "json"
    if as_table:
        print(HEADER, flush=True)
    with ExitStack() as running:
        workers = given or running.enter_context(own_workers(max(nodes) - 1))
        for n in nodes:
            taps = Taps(workers[: n - 1], both_ways=flags.both_ways)
            try:
                split = split_for(base.split, taps.endpoints, even="tensor_split" not in flags.given)
                # One worker has nobody to pass anything to.
                for ring in (False, True) if flags.compare_ring and n > 2 else (flags.rpc_ring == "auto",):
                    with _load(source, replace(base, split=replace(split, ring=ring)), n) as llama:
                        for latency in latencies:
                            taps.delay(latency)
                            rates = measure(llama, n_predict, repetitions)
                            rows.append(Measured(n, latency, *rates, ring=linked(llama)))
                            if as_table:
                                print(line(rows[-1], rows[0]), flush=True)
            finally:
                taps.close()
    if not as_table:
        print(json.dumps([{"model": source.name, **asdict(row)} for row in rows], indent=2))
    if can_draw():
        title = f"{source.name}: this machine and its workers"
        for path in draw(rows, title, Path(flags.out or os.curdir)):
            print(f"drawn: {path}", file=sys.stderr)
    return 0


def _whole(text: str, flag: str) -> int:
    try:
        n = int(text)
    except ValueError:
        n = 0
    # The time between tokens takes two of them.
    least = 2 if flag.endswith("--n-gen") else 1
    if n < least:
        raise FlagError(f"{flag}: expected one whole number, {least} or more, got {text!r}")
    return n
