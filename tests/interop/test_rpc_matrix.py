"""Every server over every kind of worker: {ours, llama-server} × {our workers, ggml-rpc-servers, mixed}, one to three.

Ten prompts go to a server at once and are continued greedily by 64 tokens. Who computes decides what must come out:

- Our server on our workers: the very bytes, and the very probabilities, it gives without workers.
- llama-server on our workers: our numbers again; it only converts them to probabilities and prints them.
- Wherever a real worker computes: what `test_parity` demands of quantized weights. Our forward pass without workers,
  teacher-forced along the answer, must not be farther from the reported probabilities than llama.cpp is from itself
  when one norm changes by its last bit. The same holds for the probabilities in the answer and those of llama.cpp on
  its own worker, as long as both say the same.

The two servers take their turns side by side, each with workers of its own: a real worker serves one at a time.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from parity import HEADER, N_PREDICT, N_TOP, Comparison, Step, continuation, log_softmax, reported_again
from peer_server import llama_server
from ports import free_port
from rows import start_at
from rpc_workers import WorkerProcess, healthy, our_worker, real_worker, running, wait_until
from short_texts import SHORT_TEXTS
from weights import with_nudged_norm

from llamado.devices.split.placement import SplitOptions
from llamado.engine.forward.runner import ModelRunner
from llamado.engine.loaded_model import LoadedModel
from llamado.engine.options import EngineOptions
from llamado.engine.request import Result

pytestmark = [pytest.mark.interop, pytest.mark.full]

N_PROMPTS = len(SHORT_TEXTS)
N_CTX = 256
"""Tokens of a slot; there is a slot for each prompt."""
ANSWER_SECONDS = 240.0
AGREEMENT = 0.99
MEAN_DIFFERENCE = 0.05
# Standard errors that two shares of agreement may be apart by chance: there are dozens of comparisons.
CHANCE = 4.0
# Largest difference of log-probabilities that computing them from the same logits in another way makes.
SAME = 1e-3

Kinds = tuple[str, ...]
"""Workers of a cell, in order: "ours" or "real" (llama.cpp's)."""
_COMMON: tuple[Kinds, ...] = (
    ("ours",),
    ("real",),
    ("ours", "ours"),
    ("real", "real"),
    ("ours", "real"),
    ("ours", "ours", "ours"),
    ("real", "real", "real"),
)
WORKERS: dict[str, tuple[Kinds, ...]] = {
    "ours": (*_COMMON, ("ours", "ours", "real")),
    "real": (*_COMMON, ("real", "real", "ours")),
}
"""By server: ours, and llama-server."""


@dataclass
class Cell:
    """Answers of one server with its workers."""

    answers: list[list[Step]]
    graphs: list[int]
    """Graphs that each worker computed meanwhile."""
    results: list[Result] = field(default_factory=list)
    """The answers of our server as it gives them."""
    layers: list[int] = field(default_factory=list)
    """Layers of each worker, where our server placed them."""
    seconds: float = 0.0

    @property
    def tokens(self) -> list[list[int]]:
        return [[step.token for step in answer] for answer in self.answers]


@dataclass
class Workshop:
    """Three of our workers and three real ones, for one server at a time."""

    workers: dict[str, list[WorkerProcess]]

    def pick(self, kinds: Kinds) -> list[WorkerProcess]:
        left = {kind: iter(workers) for kind, workers in self.workers.items()}
        return [next(left[kind]) for kind in kinds]


@dataclass
class Matrix:
    """All cells of one model; one that failed holds why."""

    path: Path
    prompts: list[list[int]]
    alone: list[Result]
    cells: dict[tuple[str, Kinds], Cell | Exception]
    from_ours: dict[tuple[str, Kinds], Comparison]
    """Reported probabilities against our forward pass without workers, along each answer."""
    from_theirs: dict[tuple[str, Kinds], Comparison]
    """Reported probabilities against those of llama.cpp on one worker of its own, up to where the answers part."""
    itself: Comparison
    """llama.cpp on one worker of its own against itself with one norm nudged."""

    def __getitem__(self, key: tuple[str, Kinds]) -> Cell:
        cell = self.cells[key]
        if isinstance(cell, Exception):
            raise cell
        return cell


@pytest.fixture(scope="module")
def workshops(peer_bin: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Workshop]]:
    logs = tmp_path_factory.mktemp("workers")
    with ExitStack() as stack:

        def workshop(server: str) -> Workshop:
            ours = [stack.enter_context(our_worker(logs / f"{server}-ours-{i}.log")) for i in range(3)]
            real = [stack.enter_context(real_worker(peer_bin, logs / f"{server}-real-{i}.log")) for i in range(3)]
            return Workshop({"ours": ours, "real": real})

        yield {server: workshop(server) for server in WORKERS}


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def matrix(
    request: pytest.FixtureRequest,
    workshops: dict[str, Workshop],
    peer_bin: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Matrix:
    path: Path = request.getfixturevalue(f"{request.param}_path")
    logs = tmp_path_factory.mktemp("servers")
    began = time.monotonic()
    with load(path) as llama:
        prompts = tokenized(llama)
        alone = answers_of(llama, prompts)
        llama.engine.close()  # the forward pass is driven from here

        def real_server(workers: Sequence[WorkerProcess]) -> Cell:
            with on_workers(peer_bin, path, logs / "llama-server.log", workers) as client:
                return on_llama_server(client, llama, prompts, workers)

        def itself(theirs: Cell) -> Comparison:
            nudged = with_nudged_norm(path, logs / "nudged.gguf")
            with on_workers(peer_bin, nudged, logs / "nudged.log", workshops["real"].pick(("real",))) as client:
                nudged.unlink()
                return follow(client, llama, prompts, theirs)

        def row(name: str, server: Callable[[Sequence[WorkerProcess]], Cell]) -> dict[Kinds, Cell | Exception]:
            return {kinds: attempt(server, workshops[name].pick(kinds)) for kinds in WORKERS[name]}

        with ThreadPoolExecutor(2) as lanes:
            one = lanes.submit(row, "ours", lambda workers: on_our_server(path, prompts, workers))
            other = lanes.submit(row, "real", real_server)
            cells = {("real", kinds): cell for kinds, cell in other.result().items()}
            theirs = cells["real", ("real",)]
            if isinstance(theirs, Exception):
                raise theirs
            control = lanes.submit(itself, theirs)
            cells |= {("ours", kinds): cell for kinds, cell in one.result().items()}
        good = {key: cell for key, cell in cells.items() if isinstance(cell, Cell)}
        from_ours = along(llama, prompts, good)
    from_theirs = {key: as_long_as_equal(cell, theirs) for key, cell in good.items()}
    matrix = Matrix(path, prompts, alone, cells, from_ours, from_theirs, control.result())
    show(*table(request.param, matrix), f"{time.monotonic() - began:.0f} s")
    return matrix


# --- servers ----------------------------------------------------------------------------------------------------------


def load(path: Path, split: SplitOptions | None = None) -> LoadedModel:
    """Our engine with a slot for each prompt."""
    threads = 2 if split is None else 1
    return LoadedModel.load(
        path,
        EngineOptions(
            n_ctx=N_PROMPTS * N_CTX, n_slots=N_PROMPTS, unified=False, n_ubatch=256, n_threads=threads, split=split
        ),
    )


def tokenized(llama: LoadedModel) -> list[list[int]]:
    texts = [text if isinstance(text, str) else llama.template.render(text) for text in SHORT_TEXTS.values()]
    return [llama.tokenize(text, add_special=True) for text in texts]


def answers_of(llama: LoadedModel, prompts: Sequence[list[int]]) -> list[Result]:
    """All prompts at once, continued greedily. Closes `llama` where that takes too long."""
    options = {"n_predict": N_PREDICT, "n_probs": N_TOP, "temperature": 0.0, "cache_prompt": False}
    with ThreadPoolExecutor(len(prompts)) as clients:
        futures = [clients.submit(llama.complete, prompt, **options) for prompt in prompts]
        deadline = time.monotonic() + ANSWER_SECONDS
        try:
            return [future.result(max(0.0, deadline - time.monotonic())) for future in futures]
        except BaseException:
            llama.close()  # so that no request waits for an answer any more
            raise


def on_our_server(path: Path, prompts: Sequence[list[int]], workers: Sequence[WorkerProcess]) -> Cell:
    split = SplitOptions(rpc=tuple(worker.endpoint for worker in workers), tensor_split=(1.0,) * len(workers))
    with load(path, split) as llama:
        began, before = time.monotonic(), [worker.graphs() for worker in workers]
        results = answers_of(llama, prompts)
        graphs = [worker.graphs() - n for worker, n in zip(workers, before, strict=True)]
        seconds = time.monotonic() - began
        placement = llama.forward.placement  # type: ignore[attr-defined]
    answers = [
        [Step(p.token.id, tuple((top.id, top.logprob) for top in p.top)) for p in result.probs] for result in results
    ]
    layers = [placement.layers.count(device) for device in range(1, len(workers) + 1)]
    return Cell(answers, graphs, results, layers, seconds)


@contextmanager
def on_workers(programs: Path, path: Path, log: Path, workers: Sequence[WorkerProcess]) -> Iterator[httpx.Client]:
    """Client of a llama-server with all layers on `workers`."""
    slots = ["-np", str(N_PROMPTS), "-c", str(N_PROMPTS * N_CTX), "--no-kv-unified", "--swa-full"]
    compute = ["-t", "1", "-fa", "on", "-ctk", "f16", "-ctv", "f16", "--no-warmup", "-fit", "off"]
    split = ["--rpc", ",".join(worker.endpoint for worker in workers), "-ts", ",".join("1" for _ in workers)]
    with llama_server(programs, path, log, *slots, *compute, *split, "-ngl", "99") as client:
        yield client


def on_llama_server(
    client: httpx.Client, llama: LoadedModel, prompts: Sequence[list[int]], workers: Sequence[WorkerProcess]
) -> Cell:
    began, before = time.monotonic(), [worker.graphs() for worker in workers]
    with ThreadPoolExecutor(N_PROMPTS) as clients:
        answers = list(clients.map(lambda prompt: continuation(client, llama.tokenizer, prompt), prompts))
    graphs = [worker.graphs() - n for worker, n in zip(workers, before, strict=True)]
    return Cell(answers, graphs, seconds=time.monotonic() - began)


def follow(client: httpx.Client, llama: LoadedModel, prompts: Sequence[list[int]], cell: Cell) -> Comparison:
    """Compare a cell's probabilities with those of another llama-server that is forced to the same answers."""

    def one(name: str, prompt: list[int], answer: list[Step]) -> Comparison:
        comparison = Comparison()
        for n, (step, logprobs) in enumerate(reported_again(client, prompt, answer, llama.forward.n_vocab)):
            comparison.add(f"{name}+{n}", step, logprobs)
        return comparison

    with ThreadPoolExecutor(N_PROMPTS) as clients:
        return total(clients.map(one, SHORT_TEXTS, prompts, cell.answers))


def attempt(server: Callable[[Sequence[WorkerProcess]], Cell], workers: Sequence[WorkerProcess]) -> Cell | Exception:
    """One cell, or why there is none: the others are filled all the same."""
    try:
        return server(workers)
    except Exception as error:
        return error


@contextmanager
def our_server(path: Path, log: Path, workers: Sequence[WorkerProcess]) -> Iterator[httpx.Client]:
    """Client of `llamado serve` with the model on `workers`; its output goes to `log`."""
    port = free_port()
    command = [sys.executable, "-m", "llamado", "serve", "-m", str(path), "--host", "127.0.0.1"]
    command += ["--port", str(port), "-t", "1", "-np", str(N_PROMPTS), "-c", str(N_PROMPTS * N_CTX)]
    command += ["--rpc", ",".join(worker.endpoint for worker in workers), "-ts", ",".join("1" for _ in workers)]
    with running(command, log) as process, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as client:
        wait_until(lambda: healthy(client), process, log)
        yield client


# --- comparisons ------------------------------------------------------------------------------------------------------


def along(
    llama: LoadedModel, prompts: Sequence[list[int]], cells: dict[tuple[str, Kinds], Cell]
) -> dict[tuple[str, Kinds], Comparison]:
    """`parity.compare` for all cells. What answers have in common is evaluated once: it is in the KV cache."""
    comparisons = {key: Comparison() for key in cells}
    for i, (name, prompt) in enumerate(zip(SHORT_TEXTS, prompts, strict=True)):
        by_answer: dict[tuple[int, ...], list[tuple[str, Kinds]]] = {}
        for key, cell in cells.items():
            by_answer.setdefault(tuple(cell.tokens[i]), []).append(key)
        known: list[int] = []
        rows: list[NDArray[np.float64]] = []  # after the prompt, and after each token of the answer
        for answer, keys in sorted(by_answer.items()):
            tokens = [*prompt, *answer[:-1]]
            new = n_common(tokens, known)
            first = max(new, len(prompt) - 1)
            rows[first - len(prompt) + 1 :] = logprobs_after(llama, tokens, new, first)
            known = tokens
            for key in keys:
                for n, (step, row) in enumerate(zip(cells[key].answers[i], rows, strict=True)):
                    if step.top:
                        comparisons[key].add(f"{name}+{n}", step, row)
    return comparisons


def n_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix of two sequences."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def logprobs_after(llama: LoadedModel, tokens: Sequence[int], new: int, first: int) -> list[NDArray[np.float64]]:
    """Our log-probabilities after each of tokens[first:]; those before `new` are in the cache."""
    if new == len(tokens):
        return []
    positions = np.arange(new, len(tokens), dtype=np.int32)
    outputs = np.arange(first - new, len(positions), dtype=np.int32)
    assert isinstance(llama.forward, ModelRunner)
    rows = start_at(llama.forward, tokens[new:], positions, np.zeros(len(positions)), outputs).result(ANSWER_SECONDS)
    return [log_softmax(row) for row in rows]


def as_long_as_equal(cell: Cell, reference: Cell) -> Comparison:
    """Return the reports of both at each place up to and including the first where their answers differ."""
    comparison = Comparison()
    for name, answer, right in zip(SHORT_TEXTS, cell.answers, reference.answers, strict=True):
        for n, (step, right_step) in enumerate(zip(answer, right, strict=False)):
            if step.top and right_step.top:
                logprobs = np.full(1 + max(token for token, _ in (*step.top, *right_step.top)), -np.inf)
                for token, logprob in step.top:
                    logprobs[token] = logprob
                comparison.add(f"{name}+{n}", right_step, logprobs)
            if step.token != right_step.token:
                break
    return comparison


def total(comparisons: Iterable[Comparison]) -> Comparison:
    """The positions of all of them."""
    whole = Comparison()
    for part in comparisons:
        whole.positions += part.positions
        whole.agreed += part.agreed
        whole.ties += part.ties
        whole.differences += part.differences
        whole.disagreements += part.disagreements
    return whole


def chance(*comparisons: Comparison) -> float:
    """Return the distance that two shares of agreement may have by chance."""
    return CHANCE * math.sqrt(sum(c.agreement * (1 - c.agreement) / c.positions for c in comparisons))


def assert_close(comparison: Comparison, itself: Comparison, slack: float) -> None:
    """Assert that a comparison is as close as `test_parity` requires for quantized weights."""
    assert comparison.mean_difference <= max(MEAN_DIFFERENCE, 1.25 * itself.mean_difference)
    assert comparison.agreement >= min(AGREEMENT, itself.agreement - slack), comparison.disagreements


def equal_answers(cell: Cell, other: Cell) -> int:
    return sum(a == b for a, b in zip(cell.tokens, other.tokens, strict=True))


def table(model: str, matrix: Matrix) -> list[str]:
    """Two lines per cell: against our forward pass without workers, and against llama.cpp on one worker of its own."""
    lines = [HEADER, matrix.itself.row(f"{model}: llama.cpp and itself nudged")]
    for key in matrix.from_ours:
        server, kinds = key
        cell = matrix[key]
        title = f"{model}: {server} on {'+'.join(kinds)}"
        graphs = f"({'/'.join(map(str, cell.graphs))} graphs, {cell.seconds:.1f} s)"
        equal = equal_answers(cell, matrix["real", ("real",)])
        lines.append(matrix.from_ours[key].row(f"{title} {graphs}, from ours"))
        lines.append(matrix.from_theirs[key].row(f"{title}, from theirs ({equal} answers equal)"))
    return lines


def show(*lines: str) -> None:
    print("", *lines, sep="\n", file=sys.stderr)


# --- what must be so --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("server", "kinds"),
    [
        pytest.param(server, kinds, id=f"{server} on {'+'.join(kinds)}")
        for server, row in WORKERS.items()
        for kinds in row
    ],
)
def test_answers(matrix: Matrix, server: str, kinds: Kinds) -> None:
    cell = matrix[server, kinds]
    # One that drafts several tokens at a time needs fewer graphs than there are tokens.
    assert min(cell.graphs) >= (N_PREDICT // 2 if server == "ours" else N_PREDICT), "a worker had nothing to do"
    assert all(cell.layers)
    ours, theirs, itself = matrix.from_ours[server, kinds], matrix.from_theirs[server, kinds], matrix.itself
    assert ours.positions >= 0.9 * N_PROMPTS * N_PREDICT
    if "real" not in kinds:
        if server == "ours":
            for name, result, right in zip(SHORT_TEXTS, cell.results, matrix.alone, strict=True):
                assert result.content == right.content, name
                assert result.tokens == right.tokens, name
                assert result.probs == right.probs, name
                assert result.stop_type == right.stop_type, name
        assert ours.agreed == ours.positions, ours.disagreements
        assert max(ours.differences) <= SAME
    for comparison in (ours, theirs):
        assert_close(comparison, itself, chance(itself, comparison))


def test_all_answers_that_real_workers_had_a_part_in(matrix: Matrix) -> None:
    """More positions leave less to chance."""
    whole = total(comparison for (_, kinds), comparison in matrix.from_ours.items() if "real" in kinds)
    show(HEADER, whole.row("all of them"))
    assert whole.positions >= 5000
    assert_close(whole, matrix.itself, 0.02)


@pytest.mark.parametrize("matrix", ["smollm2"], indirect=True)
def test_answers_over_http(matrix: Matrix, workshops: dict[str, Workshop], tmp_path: Path) -> None:
    """`llamado serve --rpc` gives the same texts as the engine without workers."""
    workers = workshops["ours"].pick(("ours", "ours"))
    before = [worker.graphs() for worker in workers]
    body = {"n_predict": N_PREDICT, "temperature": 0, "return_tokens": True, "cache_prompt": False}
    with our_server(matrix.path, tmp_path / "server.log", workers) as client, ThreadPoolExecutor(N_PROMPTS) as clients:
        answers = list(clients.map(lambda p: client.post("/completion", json={**body, "prompt": p}), matrix.prompts))
    for answer, right in zip(answers, matrix.alone, strict=True):
        said = answer.raise_for_status().json()
        assert (said["content"], said["tokens"]) == (right.content, right.tokens)
    assert all(worker.graphs() - n >= N_PREDICT // 2 for worker, n in zip(workers, before, strict=True))
