"""A whole model on this machine: equal to the reference, and the same bits however it is evaluated."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference import ReferenceModel
from rows import start_at
from tiers import chosen
from tiny import TINY, make
from tiny_models import make_gemma3, make_llama

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.split.placement import Placement
from llamado.engine.forward.contract import ForwardError
from llamado.engine.forward.pipeline import Depth
from llamado.engine.forward.runner import ModelRunner
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType as T

from .conftest import OpenModel

Array = np.ndarray[Any, Any]
Open = Callable[..., ModelRunner]

MAKERS: dict[str, Callable[..., Path]] = {"llama": make_llama, "gemma3": make_gemma3}
TYPES = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
MIXED = {"ffn_down": "Q6_K", "attn_v": "Q8_0", "token_embd": "Q5_0", "ffn_gate": "Q4_1", "attn_output": "F16"}


@pytest.fixture
def start(open_model: OpenModel) -> Open:
    def open_(path: Path, n_threads: int = 2, **options: Any) -> ModelRunner:
        return open_model(path, n_threads, **{"n_cells": 2048, "whole": True, **options})

    return open_


def text(n: int, n_vocab: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, n_vocab, n).tolist()


def run(forward: ModelRunner, rows: list[tuple[int, int, int]], outputs: list[int] | None = None) -> Array:
    """Return the logits of a batch of (token, position, start)."""
    tokens, positions, starts = zip(*rows, strict=True)
    chosen = range(len(rows)) if outputs is None else outputs
    return start_at(forward, tokens, positions, starts, chosen).result().copy()


def copy(forward: ModelRunner, src: int, dst: int, n: int) -> None:
    forward.rows.copy_rows(forward.memory.tensors, src, dst, n)


def feed(forward: ModelRunner, tokens: list[int], *, start: int = 0, first: int = 0, chunk: int = 512) -> Array:
    """Return the logits of every token of a sequence, evaluated in chunks."""
    rows = [(token, first + i, start) for i, token in enumerate(tokens)]
    return np.concatenate([run(forward, rows[i : i + chunk]) for i in range(0, len(rows), chunk)])


def same(a: Array, b: Array) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


# --- against the reference --------------------------------------------------------------------------------------------


def assert_close(found: Array, right: Array, tolerance: float) -> None:
    """Check the largest error, in standard deviations of the logits."""
    assert np.abs(found - right).max() < tolerance * right.std()


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    chosen(
        itertools.product(MAKERS, TYPES),
        [("llama", "F16"), ("gemma3", "Q4_0"), ("llama", "Q8_0"), ("gemma3", "Q4_K")],
        id="-".join,
    ),
)
def test_logits_equal_the_reference(tmp_path: Path, start: Open, case: tuple[str, str]) -> None:
    name, wtype = case
    path = MAKERS[name](tmp_path / "m.gguf", n_embd=256, n_ff=512, wtype=wtype)
    tokens = text(40, 300)
    reference = ReferenceModel(path)
    right = reference.logits(tokens, outputs=range(40))
    forward = start(path, n_cells=256)
    tolerance = 0.01 if wtype in ("F32", "F16", "BF16") else 0.2
    assert_close(feed(forward, tokens), right, tolerance)
    assert_close(feed(forward, tokens, chunk=3), right, tolerance)


@pytest.mark.parametrize(
    "options",
    [
        {"biases": True},
        {"freq_factors": True, "tied": True},
        {"rope_scaling": ("linear", 4.0)},
        {"rope_scaling": ("yarn", 4.0)},
        {"n_head": 6, "n_head_kv": 2, "n_embd": 192, "n_vocab": 333},
        {"n_head": 4, "n_head_kv": 4, "n_layer": 1},
    ],
    ids=str,
)
def test_variants_of_llama(tmp_path: Path, start: Open, options: dict[str, Any]) -> None:
    path = make_llama(tmp_path / "m.gguf", wtype="F32", **options)
    tokens = text(30, 300)
    assert_close(feed(start(path), tokens), ReferenceModel(path).logits(tokens, outputs=range(30)), 0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"softcap": 20.0}, {"n_swa": 8, "swa_period": 3, "n_layer": 3}, {"tied": False}], ids=str
)
def test_variants_of_gemma3(tmp_path: Path, start: Open, options: dict[str, Any]) -> None:
    path = make_gemma3(tmp_path / "m.gguf", wtype="F32", **options)
    tokens = text(60, 500)
    assert_close(feed(start(path), tokens), ReferenceModel(path).logits(tokens, outputs=range(60)), 0.01)


@pytest.mark.slow
@pytest.mark.parametrize("types", [(T.F32, T.F32), (T.BF16, T.F16), (T.Q8_0, T.Q8_0), (T.F16, T.Q8_0)], ids=str)
def test_cache_types(tmp_path: Path, start: Open, types: tuple[T, T]) -> None:
    path = make_llama(tmp_path / "m.gguf", wtype="F32")
    tokens = text(30, 300)
    reference = ReferenceModel(path, type_k=types[0], type_v=types[1])
    forward = start(path, type_k=types[0], type_v=types[1])
    assert_close(feed(forward, tokens, chunk=9), reference.logits(tokens, outputs=range(30)), 0.05)


@pytest.mark.full
def test_file_read_into_memory_gives_the_same_bits(tmp_path: Path, start: Open) -> None:
    """--no-mmap, and --mlock if it is allowed."""
    path = make_llama(tmp_path / "m.gguf", n_embd=256, wtype="Q4_K", types=MIXED)
    tokens = text(20, 300)
    mapped, read = start(path), start(path, mmap=False, mlock=True)
    path.unlink()  # the weights in memory no longer need the file
    assert same(feed(mapped, tokens), feed(read, tokens))


# --- the same bits ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every kind of product, row counts that are not multiples of eight, and a sliding window in one of the models."""
    path = tmp_path_factory.mktemp("model") / f"{request.param}.gguf"
    if request.param == "llama":
        return make_llama(
            path, n_embd=256, n_ff=512, n_head=8, n_head_kv=2, n_vocab=331, wtype="Q4_K", types=MIXED, tied=True
        )
    return make_gemma3(path, n_embd=256, n_ff=512, n_head=3, n_swa=100, n_vocab=509, wtype="Q5_K", types=MIXED)


N = 530


@pytest.fixture(scope="module")
def kept(keep_model: OpenModel) -> Open:
    def open_(path: Path, n_threads: int = 2, **options: Any) -> ModelRunner:
        return keep_model(path, n_threads, **{"n_cells": 2048, "whole": True, **options})

    return open_


@pytest.fixture(scope="module")
def alone(model: Path, kept: Open) -> Array:
    return feed(kept(model), text(N, 300))


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunk_size_does_not_change_bits(model: Path, kept: Open, alone: Array, chunk: int) -> None:
    assert same(feed(kept(model), text(N, 300), chunk=chunk), alone)


@pytest.mark.slow
def test_position_in_the_pool_does_not_change_bits(model: Path, kept: Open, alone: Array) -> None:
    forward = kept(model)
    feed(forward, text(2048, 300, seed=9)[:1900], chunk=512)  # earlier contents of the cells do not matter
    for place in (256, 1280, 0):
        assert same(feed(forward, text(N, 300), start=place), alone)


@pytest.mark.slow
def test_thread_count_does_not_change_bits(model: Path, kept: Open, alone: Array) -> None:
    for n_threads in (1, 3):
        assert same(feed(kept(model, n_threads), text(N, 300), chunk=100), alone)


@pytest.mark.slow
def test_other_sequences_do_not_change_bits(model: Path, kept: Open, alone: Array) -> None:
    """One of eight sequences: some decode, some prefill, some come and go; ours is anywhere in the batch."""
    forward = kept(model, n_cells=8192)
    ours = text(N, 300)
    rng = np.random.default_rng(3)
    others = [text(1000, 300, seed=20 + i) for i in range(7)]
    places = [1024 * (i + 1) for i in range(7)]
    read, got = [0] * 7, []
    at = 0
    while at < 200:
        own = min(int(rng.choice([1, 1, 1, 2, 13, 40])), 200 - at)
        groups: list[list[tuple[int, int, int]]] = [[(ours[at + i], at + i, 0) for i in range(own)]]
        for i, tokens in enumerate(others):
            count = int(rng.choice([0, 1, 1, 1, 5, 30]))
            if read[i] + count > 1000:
                read[i] = 0  # another sequence takes the cells
            groups.append([(tokens[read[i] + j], read[i] + j, places[i]) for j in range(count)])
            read[i] += count
        order = rng.permutation(len(groups))
        rows = [row for g in order for row in groups[g]]
        first = sum(len(groups[g]) for g in order[: list(order).index(0)])
        logits = run(forward, rows)
        got.append(logits[first : first + own])
        at += own
    assert same(np.concatenate(got), alone[:200])


def count_tensors() -> int:
    gc.collect()
    return sum(type(found) is Tensor for found in gc.get_objects())


def test_operations_of_compiled_graphs_are_dropped(model: Path, kept: Open) -> None:
    forward = kept(model)
    run(forward, [(1, 0, 0)])
    before = count_tensors()
    shapes = 0
    for n in range(2, 9):
        run(forward, [(1, i, 0) for i in range(n)])
        shapes += 1
    assert count_tensors() - before <= 8 * shapes, "inputs and results of each graph, but no operations"


def test_graphs_of_dropped_programs_are_built_again(model: Path, start: Open, alone: Array) -> None:
    forward = start(model)
    tokens = text(N, 300)
    assert same(feed(forward, tokens[:3], chunk=1), alone[:3])
    small = forward.devices[0].working_bytes
    assert same(feed(forward, tokens[:300], chunk=300), alone[:300])
    assert forward.devices[0].working_bytes > max(small, 1 << 20), "the arena grew, which drops all programs"
    assert same(feed(forward, tokens[:3], chunk=1), alone[:3])


@pytest.mark.slow
def test_copied_prefix_gives_the_same_bits(model: Path, kept: Open, alone: Array) -> None:
    forward = kept(model)
    tokens = text(N, 300)
    feed(forward, tokens[:300])
    copy(forward, 0, 768, 300)
    feed(forward, text(400, 300, seed=5))  # another takes the first position
    assert same(feed(forward, tokens[300:], start=768, first=300, chunk=50), alone[300:])
    copy(forward, 768, 1024, N)  # overlapping
    assert same(feed(forward, tokens[-1:], start=1024, first=N - 1), alone[-1:])


@pytest.mark.slow
def test_rewound_sequence_gives_the_same_bits(model: Path, kept: Open, alone: Array) -> None:
    """Rejected drafts leave their keys in the cells; the next tokens overwrite them."""
    forward = kept(model)
    tokens = text(N, 300)
    feed(forward, tokens[:100])
    for at in range(100, 130, 3):
        feed(forward, text(6, 300, seed=at), first=at)
        assert same(feed(forward, tokens[at : at + 3], first=at), alone[at : at + 3])


@pytest.mark.slow
def test_number_of_outputs_does_not_change_bits(model: Path, kept: Open, alone: Array) -> None:
    forward = kept(model)
    rows = [(token, i, 0) for i, token in enumerate(text(200, 300))]
    assert run(forward, rows[:64], []).shape == (0, forward.n_vocab)
    for outputs in ([0], [99], [3, 17, 18, 50, 99], list(range(0, 100, 9))):
        assert same(run(forward, rows[:100], outputs), alone[outputs])
    assert same(run(forward, rows[100:], [99]), alone[[199]])


@pytest.mark.slow
def test_invalid_batches_raise_forward_error(model: Path, kept: Open) -> None:
    forward = kept(model, n_cells=300, max_batch=16)
    assert forward.memory.n_cells == 512
    for rows in ([], [(1, 0, 0)] * 17, [(1, 0, 512)], [(1, 300, 256)], [(1, -1, 256)], [(1, 0, -1)]):
        with pytest.raises(ForwardError):
            start_at(forward, *([row[i] for row in rows] for i in range(3)), [0])
    for tokens in ([-1], [forward.n_vocab]):
        with pytest.raises(ForwardError, match="token"):
            run(forward, [(tokens[0], 0, 0)])
    for outputs in ([1], [-1], [0, 0]):
        with pytest.raises(ForwardError, match="output"):
            run(forward, [(5, 0, 0)], outputs)
    for cells in ((0, 300, 300), (-1, 0, 1), (0, 1, -1), (500, 0, 20)):
        with pytest.raises(ForwardError, match="rows"):
            copy(forward, *cells)
    assert np.isfinite(run(forward, [(5, 0, 256)])).all()


# --- real models ------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("name", ["smollm2_path", "gemma3_path"])
def test_real_models_give_the_same_bits_in_any_batch(name: str, request: pytest.FixtureRequest, start: Open) -> None:
    path: Path = request.getfixturevalue(name)
    tokens = text(66, 40000)
    one, two = start(path, 1), start(path, 2)
    rows = [(token, i, 0) for i, token in enumerate(tokens)]

    def last(forward: ModelRunner, rows: list[tuple[int, int, int]]) -> Array:
        return run(forward, rows, [len(rows) - 1])

    whole = last(two, rows)
    assert same(last(one, rows), whole)
    # in chunks, at another position in the pool
    moved = [(token, i, 512) for token, i, _ in rows]
    for i in range(0, 60, 7):
        run(two, moved[i : min(i + 7, 60)], [])
    for row in moved[60:65]:
        run(two, [row], [0])
    assert same(last(two, [moved[65]]), whole)
    # among other sequences, after a copy
    copy(two, 512, 1024, 60)
    for i in range(60, 66):
        others = [(token, i, 256 * place) for place, token in ((1, 7), (6, 99), (3, 1234))]
        logits = run(two, [*others[:2], (tokens[i], i, 1024), others[2]])
    assert same(logits[2:3], whole)


# --- on several devices -----------------------------------------------------------------------------------------------


def split_as(*layers: int, overrides: tuple[tuple[str, int], ...] = ()) -> Placement:
    """Return a placement by layers, with the head on the last device."""
    return Placement(layers, layers[-1], 0, overrides)


@pytest.fixture
def spread(open_model: OpenModel) -> Callable[..., ModelRunner]:
    """Return a function that opens a model on three devices of this machine, one thread each."""
    return partial(open_model, n_threads=1, n_devices=3, n_cells=2048, whole=True)


PLACEMENTS = [
    split_as(1, 1, 2, 2),
    split_as(0, 0, 0, 1),
    split_as(2, 2, 1, 1),
    split_as(1, 1, 1, 1),
    split_as(1, 1, 2, 2, overrides=(("ffn_up", 0), (r"blk\.3\.attn_output", 1))),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    chosen(
        [(name, number) for name in MAKERS for number in range(len(PLACEMENTS))],
        [("llama", 1), ("llama", 2), ("gemma3", 4)],
        id=lambda case: f"{case[0]}-{case[1]}",
    ),
)
def test_the_same_bits_on_several_devices(
    tmp_path: Path, start: Open, spread: Callable[..., ModelRunner], case: tuple[str, int]
) -> None:
    name, number = case
    path = MAKERS[name](tmp_path / "m.gguf", n_embd=256, n_ff=512, n_layer=4, wtype="Q4_K")
    tokens = text(60, 300)
    right = feed(start(path), tokens)
    several = spread(path, placement=PLACEMENTS[number])
    assert same(feed(several, tokens), right)
    assert same(feed(several, tokens, chunk=7, start=256), right)
    assert same(feed(several, tokens, chunk=1, start=512), right)


def test_numerics_depend_on_the_computing_devices(
    tmp_path: Path, spread: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numerics depend on the devices that compute cells, including single weights, but not on the head's device."""
    path, kinds = make_llama(tmp_path / "m.gguf", n_layer=2), ["here", "here", "here"]
    monkeypatch.setattr(CpuDevice, "numerics", property(lambda self: kinds[runner.devices.index(self)]))
    runner = spread(path, placement=Placement((0, 1), 2, 0))
    assert runner.numerics == "here"
    kinds[2] = "there"
    assert runner.numerics == "here"
    kinds[1] = "there"
    mixed = runner.numerics
    assert mixed not in ("here", "there", None)
    kinds[:] = "here", "here", "there"
    runner = spread(path, placement=Placement((0, 1), 0, 0, (("ffn_up", 2),)))
    elsewhere = runner.numerics
    assert elsewhere not in ("here", mixed)
    kinds[2] = None  # type: ignore[call-overload]
    assert runner.numerics is None


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [(("_exps", 0),), ((r"blk\.(0|3)\..*_exps", 0), ("up_exps", 2))])
def test_experts_on_other_devices_give_the_same_bits(
    tmp_path: Path, start: Open, spread: Callable[..., ModelRunner], overrides: tuple[tuple[str, int], ...]
) -> None:
    path = make(TINY["qwen3moe"], tmp_path / "m.gguf", wtype="Q8_0")
    tokens = text(40, 300)
    right = feed(start(path), tokens)
    several = spread(path, placement=split_as(1, 1, 2, 2, overrides=overrides))
    assert same(feed(several, tokens), right)
    assert same(feed(several, tokens, chunk=1, start=256), right)


@pytest.mark.slow
def test_batches_in_flight_give_the_same_bits(tmp_path: Path, start: Open, spread: Callable[..., ModelRunner]) -> None:
    """Chunks of one sequence start before the previous chunk is done, with another sequence between them."""
    path = make_llama(tmp_path / "m.gguf", n_embd=256, n_ff=512, n_layer=4, wtype="Q4_K")
    one, two = text(64, 300), text(64, 300, seed=1)
    alone = start(path)
    right = [feed(alone, one)[-1], feed(alone, two, start=256)[-1]]
    several = spread(path, placement=split_as(1, 1, 2, 2))
    started = []
    for at in range(0, 64, 8):
        for tokens, where in ((one, 0), (two, 512)):
            outputs = [7] if at == 56 else []
            started.append(start_at(several, tokens[at : at + 8], range(at, at + 8), [where] * 8, outputs))
    found = [future.result() for future in started][-2:]
    assert same(found[0][0], right[0]) and same(found[1][0], right[1])
    copy(several, 512, 1024, 64)
    again = run(several, [(two[63], 63, 1024)])
    assert same(again[0], right[1])


# --- how many batches at a time ---------------------------------------------------------------------------------------


def throughput(depth: int, latency: float, n: int = 8) -> float:
    """Rows per second of two linked devices with `n` sequences in `depth` groups; 2 ms per step, 0.6 ms per row."""
    groups = min(depth, n)
    service = 0.002 + 0.0006 * n / groups
    return n / max(groups * service, latency + 2 * service)


@pytest.mark.parametrize("latency", [0.0, 0.01, 0.04, 0.2])
def test_pipeline_depth_maximizes_throughput(latency: float) -> None:
    depth, now = Depth(2), 0.0
    seen = []
    for _ in range(3000):
        rows = max(1, 8 // depth.value)
        now += rows / throughput(depth.value, latency)
        depth.note(rows, now, full=depth.value <= 8)
        seen.append(throughput(depth.value, latency))
    best = max(throughput(n, latency) for n in range(2, 9))
    assert np.mean(seen[500:]) > 0.9 * best
