"""`llamado bench --latency 0,5,10,20,30 --nodes 3,4,5`: decoding speed over slow links, by the number of machines.

N nodes are this machine and N−1 workers, each with a tap in front that delays graphs. The workers are the first ones of
`--rpc`; without it, workers of one thread are started here. Layers are divided evenly unless `--tensor-split` is given,
because the table shows the cost of links, not the best placement.

The table measures plain decoding of one stream: no drafts, and activations pass through this machine. A token then
takes about compute + (N−1) × latency. `--compare` adds columns for methods that reduce it.

Texts are sampled, not greedy: greedy text soon repeats itself, and drafts that only repeat would look far too good.
Each cell is the median over rounds. A round measures every configuration once, so a slow minute of the machine reaches
all of them.

A tap delays graphs and results of other workers on their way to a worker, but no responses, so N−1 workers cost N−1
delays, with and without a ring. `--both-ways` delays both directions: 2 (N−1) delays without a ring, N with one.
"""

from __future__ import annotations

import json
import queue
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llamado.cluster.taps import Taps
from llamado.commands.options import engine_options, model_source
from llamado.commands.split_options import listed
from llamado.devices.split.placement import SplitOptions
from llamado.engine.options import DraftOptions, EngineOptions, ModelSource
from llamado.engine.request import Defaults, Done, Event, Failure, Token
from llamado.errors import LlamadoError
from llamado.flags import FlagError, ParsedFlags
from llamado.http.monitoring import logs
from llamado.installation import install_command, own_command
from llamado.rpc.endpoint import Endpoint
from llamado.terminal.text import print

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from llamado.engine.loaded_model import LoadedModel

STREAMS = 8
PLAIN, PREDICTED = "plain", "predicted"
COMPARED = ("ring", "drafts", "streams", PREDICTED)
"""Values of --compare, in the order of their columns."""
OPENINGS = (
    "The harbor was quiet before dawn, and the first boat to leave carried",
    "Every machine in the workshop had a name, and the oldest of them was",
    "When the letter finally arrived, it was addressed to someone who",
    "The recipe called for three things that nobody in the village had, so",
    "On the last day of the expedition the geologists found",
    "My grandfather kept bees behind the station, and in summer he",
    "The court had to decide a simple question: who owns",
    "There are two ways to cross the mountain in winter. The first",
)
_WARM_UP_TOKENS = 8
_GENERATE = 64
_ROUNDS = 3
_CONTEXT = 2048
_LATENCIES, _NODES = "0,5,10,20,30", "3,4,5"
_START_SECONDS = 60.0
_NO_DRAFTS = DraftOptions(kinds=())


class LatencyError(LlamadoError):
    """A measurement is impossible: a worker does not start, or the package for plots is missing."""


@dataclass(frozen=True)
class Row:
    """Generated tokens per second at one latency of the links, by column: `plain` and those of --compare."""

    nodes: int
    latency_ms: float
    tokens_per_second: Mapping[str, float]


# --- the measurement --------------------------------------------------------------------------------------------------


def generation_rate(llama: LoadedModel, n_streams: int, n_predict: int, seed: int) -> float:
    """Return the tokens per second of `n_streams` answers in all, from the first token of any to the last.

    The same seed gives the same texts, whatever the configuration.
    """
    times: list[float] = []  # one for each token
    ended: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def emit(event: Event) -> None:
        if isinstance(event, Token):
            times.extend([time.perf_counter()] * len(event.tokens))
        elif isinstance(event, Done | Failure):
            ended.put(event)

    defaults = Defaults(cache_prompt=False)
    for i in range(n_streams):
        prompt = llama.tokenize(OPENINGS[(seed + i) % len(OPENINGS)], add_special=True)
        request = defaults.request(prompt, n_predict=n_predict, ignore_eos=True, seed=seed * STREAMS + i)
        llama.engine.submit(request, emit)
    for _ in range(n_streams):
        event = ended.get()
        if isinstance(event, Failure):
            raise event.error
    return (len(times) - 1) / (max(times) - min(times))


@dataclass(frozen=True)
class Configuration:
    """A way to load the model; `columns`: those measured with it, and the streams of each."""

    columns: Mapping[str, int]
    ring: bool = False
    drafts: DraftOptions = _NO_DRAFTS

    def options(self, base: EngineOptions, split: SplitOptions) -> EngineOptions:
        """Apply this configuration and a split to `base`."""
        return replace(base, drafts=self.drafts, split=replace(split, ring=self.ring))


def configurations(compared: Sequence[str], drafts: DraftOptions) -> list[Configuration]:
    """The configurations that measure plain decoding and the columns of --compare."""
    found = [Configuration({PLAIN: 1} | ({"streams": STREAMS} if "streams" in compared else {}))]
    if "ring" in compared:
        found.append(Configuration({"ring": 1}, ring=True))
    if "drafts" in compared:
        found.append(Configuration({"drafts": 1}, drafts=drafts))
    return found


def predicted(rows: Sequence[Row], row: Row, *, both_ways: bool) -> float:
    """Return the tokens per second predicted by compute + (N−1) × latency.

    Compute is the time per token without links, from the row with the same number of nodes and the least latency.
    """
    delays = (row.nodes - 1) * (2 if both_ways else 1)
    nearest = min((other for other in rows if other.nodes == row.nodes), key=lambda other: other.latency_ms)
    more_ms = delays * (row.latency_ms - nearest.latency_ms)
    return 1e3 / (1e3 / nearest.tokens_per_second[PLAIN] + more_ms)


# --- workers and the taps before them ---------------------------------------------------------------------------------


@contextmanager
def own_workers(n: int) -> Iterator[list[Endpoint]]:
    """Start `n` workers of one thread on this machine, and stop them on exit. Raises LatencyError."""
    command = own_command("worker", "-p", "0", "-d", "CPU", "-t", "1")
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
    """Return the port in the output of a worker; later output is read and dropped. Raises LatencyError."""
    output: list[str] = []
    found: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    def read() -> None:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                output.append(line)
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
        raise LatencyError(f"a worker did not start: {''.join(output[-5:]).strip() or 'no output'}")
    return port


# --- the table and the drawing ----------------------------------------------------------------------------------------

_TITLES = {PLAIN: "tok/s", "streams": f"{STREAMS} streams tok/s"}


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of the table. The baseline of all columns is plain decoding in the first row."""
    columns = list(rows[0].tokens_per_second)
    titles = [_TITLES.get(column, f"{column} tok/s") for column in columns]
    head, rule = "| Nodes | Latency |", "|-------|---------|"
    for title in titles:
        head += f" {title} | vs baseline |"
        rule += f"{'-' * (len(title) + 1)}:|-------------|"
    yield head
    yield rule
    baseline = rows[0].tokens_per_second[PLAIN]
    for row in rows:
        line = f"| {row.nodes:<5} | {f'{row.latency_ms:g}ms':<7} |"
        for column, title in zip(columns, titles, strict=True):
            rate = row.tokens_per_second[column]
            line += f" {rate:>{len(title)}.1f} | {f'{rate / baseline:.2f}×':<11} |"
        yield line


def can_draw() -> bool:
    """Return True if matplotlib is installed."""
    try:
        import matplotlib.figure
    except ImportError:
        return False
    return bool(matplotlib.figure)


def draw(rows: Sequence[Row], title: str, folder: Path) -> list[Path]:
    """Write `latency.png` and `latency.svg`. Raises LatencyError."""
    figure = _figure(rows, title)
    paths = [folder / "latency.png", folder / "latency.svg"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in paths:
            figure.savefig(path, dpi=150)
    except OSError as error:
        raise LatencyError(f"--out {folder}: {error.strerror or error}") from None
    return paths


def _figure(rows: Sequence[Row], title: str) -> Figure:
    # Without pyplot, which needs a window system.
    from matplotlib.figure import Figure

    columns = list(rows[0].tokens_per_second)
    figure = Figure(figsize=(5 * len(columns), 4.2), layout="constrained")
    figure.suptitle(title)
    for axes, column in zip(figure.subplots(1, len(columns), squeeze=False)[0], columns, strict=True):
        for nodes in dict.fromkeys(row.nodes for row in rows):
            points = sorted((row.latency_ms, row.tokens_per_second[column]) for row in rows if row.nodes == nodes)
            axes.plot(*zip(*points, strict=True), marker="o", label=f"{nodes} nodes")
        axes.set_title(column)
        axes.set_xlabel("latency of each graph, ms")
        axes.set_ylabel("tokens per second")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    return figure


# --- the command ------------------------------------------------------------------------------------------------------


def latencies_of(text: str) -> list[float]:
    """Parse comma-separated milliseconds. Raises FlagError."""
    try:
        values = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        values = []
    if not values or not all(0 <= value < 1e6 for value in values):
        raise FlagError(f"--latency: expected milliseconds, comma-separated, got {text!r}")
    return values


def nodes_of(text: str, n_workers: int | None) -> list[int]:
    """Parse comma-separated numbers of machines. `n_workers`: limit, None for no limit. Raises FlagError."""
    try:
        values = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        values = []
    if not values or min(values) < 2:
        raise FlagError(f"--nodes: expected numbers of machines from 2 on, comma-separated, got {text!r}")
    if n_workers is not None and max(values) > n_workers + 1:
        raise FlagError(f"--nodes: {max(values)} nodes need {max(values) - 1} workers, --rpc names {n_workers}")
    return values


def compared_of(flags: ParsedFlags) -> list[str]:
    """Return the columns besides plain decoding. Flags of speculative decoding add its column. Raises FlagError."""
    found = set(listed([flags.compare or ""]))
    if unknown := found - set(COMPARED):
        raise FlagError(f"--compare: expected some of {', '.join(COMPARED)}, got {min(unknown)!r}")
    if flags.given & {"spec_type", "spec_default", "model_draft", "hf_repo_draft"} and flags.spec_type != "none":
        found.add("drafts")
    return [column for column in COMPARED if column in found]


def split_for(given: SplitOptions | None, endpoints: Sequence[str], *, even: bool) -> SplitOptions:
    """Divide the model among this machine and the workers at `endpoints`."""
    split = SplitOptions(rpc=tuple(endpoints)) if given is None else replace(given, rpc=tuple(endpoints), gpus=False)
    return replace(split, tensor_split=(1.0,) * (len(endpoints) + 1)) if even else split


def _load(source: ModelSource, options: EngineOptions, nodes: int) -> LoadedModel:
    from llamado.engine.loaded_model import LoadedModel

    llama = LoadedModel.load(source, options)
    devices = len(getattr(llama.forward, "devices", [None]))
    if devices < nodes:
        llama.close()
        raise LatencyError(f"the model was loaded on {devices} of {nodes} devices")
    return llama


def bench_latency(flags: ParsedFlags) -> int:
    """Run the command. Raises LlamadoError."""
    logs.configure(verbosity=9 if flags.verbose else min(flags.log_verbosity, 2))
    latencies, compared = latencies_of(flags.latency or _LATENCIES), compared_of(flags)
    base = engine_options(flags, n_slots=STREAMS if "streams" in compared else 1)
    if "drafts" in compared and base.drafts.kinds == ():
        raise FlagError("--compare drafts: --spec-type none disables drafts")
    if "ring" in compared and flags.rpc_ring == "off":
        raise FlagError("--compare ring: --rpc-ring off disables the ring")
    if base.split is not None and not base.split.rpc:
        base = replace(base, split=None)
    given = None if base.split is None else [Endpoint.parse(text) for text in base.split.rpc]
    if given is not None and any(endpoint.tls for endpoint in given):
        raise FlagError("--latency: graph commands inside TLS cannot be delayed; use workers without tls://")
    default = _NODES if given is None else str(len(given) + 1)
    nodes = nodes_of(flags.nodes or default, None if given is None else len(given))
    n_predict, rounds = _GENERATE, _ROUNDS
    if "n_gen" in flags.given:
        n_predict = _whole(flags.n_gen, "-n/--n-gen")
    if "repetitions" in flags.given:
        rounds = _whole(str(flags.repetitions), "-r/--repetitions")
    if flags.out and not can_draw():
        hint = f'drawing needs matplotlib, the extra "plot": {install_command("plot")}'
        raise LatencyError(f"--out {flags.out}: {hint}")
    source = model_source(flags)
    longest = max(len(opening) for opening in OPENINGS)  # at most one token per letter
    base = base.with_context(max(base.n_ctx, _CONTEXT, base.n_slots * (longest + n_predict)))
    configs = configurations(compared, base.drafts)
    rates: dict[tuple[int, float], dict[str, list[float]]] = {(n, latency): {} for n in nodes for latency in latencies}
    with ExitStack() as running:
        workers = given or running.enter_context(own_workers(max(nodes) - 1))
        taps = running.enter_context(closing(Taps(workers[: max(nodes) - 1], both_ways=flags.both_ways)))
        for round_ in range(rounds):
            for n in nodes:
                print(f"round {round_ + 1} of {rounds}: {n} nodes", file=sys.stderr, flush=True)
                split = split_for(base.split, taps.endpoints[: n - 1], even="tensor_split" not in flags.given)
                for config in configs:
                    taps.delay(0.0)
                    with _load(source, config.options(base, split), n) as llama:
                        for i, latency in enumerate(latencies):
                            taps.delay(latency)
                            for column, n_streams in config.columns.items():
                                # Each seed is used once per engine: drafts would repeat its earlier outputs.
                                seed = 2 * (round_ * len(latencies) + i)
                                generation_rate(llama, n_streams, min(_WARM_UP_TOKENS, n_predict), seed + 1)
                                rate = generation_rate(llama, n_streams, n_predict, seed)
                                rates[n, latency].setdefault(column, []).append(rate)
    rows = _rows(rates, compared, both_ways=flags.both_ways)
    if flags.output == "json":
        print(json.dumps([{"model": source.name, **asdict(row)} for row in rows], indent=2))
    else:
        print(*table(rows), sep="\n", flush=True)
    if flags.out:
        for path in draw(rows, f"{source.name}: this machine and its workers", Path(flags.out)):
            print(f"drawn: {path}", file=sys.stderr)
    return 0


def _rows(
    rates: Mapping[tuple[int, float], Mapping[str, Sequence[float]]], compared: Sequence[str], *, both_ways: bool
) -> list[Row]:
    """Return the rows of the table: the median rate of each cell, and predictions if requested."""
    medians = [
        Row(n, latency, {column: statistics.median(values) for column, values in columns.items()})
        for (n, latency), columns in rates.items()
    ]
    rows = []
    for row in medians:
        found = dict(row.tokens_per_second)
        if PREDICTED in compared:
            found[PREDICTED] = predicted(medians, row, both_ways=both_ways)
        rows.append(replace(row, tokens_per_second={column: found[column] for column in (PLAIN, *compared)}))
    return rows


def _whole(text: str, flag: str) -> int:
    try:
        n = int(text)
    except ValueError:
        n = 0
    # A rate needs the time between two tokens.
    least = 2 if flag.endswith("--n-gen") else 1
    if n < least:
        raise FlagError(f"{flag}: expected one whole number, {least} or more, got {text!r}")
    return n
