"""`llamado bench --roofline`: the work of a graph, and its share of the machine's limits."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from tiers import first_of
from tiny_models import make_llama

from llamado.commands import cli
from llamado.commands.bench import roofline
from llamado.commands.bench.machine import Machine, beyond_caches, caches
from llamado.commands.bench.roofline import (
    ATTENTION,
    REST,
    PassWork,
    Peaks,
    measured_pass,
    product_work,
    rows_of,
    total,
)
from llamado.devices.device import OperationTime
from llamado.engine.loaded_model import LoadedModel
from llamado.engine.options import EngineOptions
from llamado.ggml import Graph
from llamado.ggml import graph as g
from llamado.gguf.reader import GGUFFile
from llamado.gguf.types import TensorType as T

N_LAYER, N_HEAD, N_HEAD_KV, HEAD, N_VOCAB = 3, 4, 2, 32, 320
PEAKS = Peaks(read=2e8, integer=1e9, floats=5e8)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    types = {"ffn_down": "Q8_0", "output": "Q8_0"}
    folder = tmp_path_factory.mktemp("roofline")
    return make_llama(
        folder / "m.gguf", n_layer=N_LAYER, n_head=N_HEAD, n_head_kv=N_HEAD_KV, n_vocab=N_VOCAB, types=types
    )


class KnownMachine(Machine):
    """A machine with given limits."""

    def __init__(self) -> None:
        self.widths, self.tiles = (8,), False
        self.read: list[int] = []

    def read_bandwidth(self, n_bytes: int, threads: int) -> float:
        self.read.append(n_bytes)
        return 1e9

    def integer_products(self, threads: int, lanes: int) -> float:
        return 2e9

    def float_products(self, threads: int, lanes: int) -> float:
        return 3e9


@pytest.mark.parametrize("shape", first_of([(1, 40), (8, 24), (1, 0), (8, 0)], 2), ids=str)
def test_work_of_a_pass(path: Path, shape: tuple[int, int]) -> None:
    n, start = shape
    machine = KnownMachine()
    with LoadedModel.load(path, EngineOptions(n_ctx=256, n_slots=1, n_threads=1)) as llama:
        llama.engine.close()
        rows, peaks = measured_pass(llama, machine, n, start, 2, 1)
    with GGUFFile.open(path) as file:
        sizes = {name: (t.type.name, t.nbytes, t.n_elements) for name, t in file.tensors.items() if t.ne[1] > 1}
    found = {row.kernel: row for row in rows}
    for kind in ("Q4_0", "Q8_0"):
        of_kind = [
            (name, size) for name, (type_, *size) in sizes.items() if type_ == kind and name != "token_embd.weight"
        ]
        # only the last token has logits, so the last feed-forward network computes one token
        alone = ("output.weight", f"blk.{N_LAYER - 1}.ffn")
        operations = sum(2 * elements * (1 if name.startswith(alone) else n) for name, (_, elements) in of_kind)
        assert found[f"{kind} products"].work == PassWork(sum(n_bytes for _, (n_bytes, _) in of_kind), operations, 0)
    cell = 2 * 2 * N_HEAD_KV * HEAD  # keys and values in f16
    pairs = sum(start + i + 1 for i in range(n))
    assert found[ATTENTION].work == PassWork(N_LAYER * (start + n) * cell, 0, N_LAYER * 2 * pairs * N_HEAD * 2 * HEAD)
    assert found[REST].work == PassWork() and rows[-1].kernel == REST and found[REST].of_limit is None
    assert peaks == Peaks(1e9, 2e9, 3e9) and machine.read == [total(rows).work.n_bytes]


def test_times_add_up_to_the_pass(path: Path) -> None:
    """Close to the time of the same graph, on a machine with other load."""
    from llamado.engine.forward.runner import ModelRunner

    with LoadedModel.load(path, EngineOptions(n_ctx=256, n_slots=1, n_threads=1)) as llama:
        llama.engine.close()
        runner = llama.forward
        assert isinstance(runner, ModelRunner)
        graph, device = runner.profile(32, 0, 1).graph, runner.devices[0]
        for _ in range(100):
            rows, _ = measured_pass(llama, KnownMachine(), 32, 0, 10, 1)
            seconds = []
            for _ in range(20):
                began = time.perf_counter()
                device.submit(graph)
                seconds.append(time.perf_counter() - began)
            if 0.2 * min(seconds) < total(rows).seconds < 5 * max(seconds):
                return
    pytest.fail(f"{total(rows).seconds} s in total, {min(seconds)} to {max(seconds)} for a pass")


def test_share_of_the_limits() -> None:
    graph = Graph()
    w, x = g.new_tensor(T.Q8_0, 64, 100, name="blk.0.w"), g.new_tensor(T.F32, 64, 10)
    f, y = g.new_tensor(T.F16, 64, 50, name="f"), g.new_tensor(T.F32, 64, 2)
    graph.output("a", g.mul_mat(w, x))
    graph.output("b", g.mul_mat(f, y))
    operations = [
        OperationTime("Q8_0 blk.0.w", 3e-4, 1e-4),
        OperationTime("F16 f", 1e-4, 0.0),
        OperationTime("norm", 1.0, 0.5),
        OperationTime("Q8_0 blk.0.w", 1e-4, 0.0),  # a product split in two
    ]
    rows = rows_of(graph, operations, pytest.fail, PEAKS)
    assert [(row.kernel, row.n, row.seconds) for row in rows] == [
        ("Q8_0 products", 2, pytest.approx(5e-4)),
        ("F16 products", 1, pytest.approx(1e-4)),
        (REST, 1, 1.5),
    ]
    quantized, plain, _ = rows
    assert quantized.work == PassWork(100 * 68, 2 * 64 * 100 * 10, 0)
    assert quantized.of_limit == pytest.approx(128e-6 / 5e-4)  # bound by operations
    assert plain.work == PassWork(2 * 64 * 50, 0, 2 * 64 * 50 * 2)
    assert plain.of_limit == pytest.approx(32e-6 / 1e-4)  # bound by bytes
    assert total(rows).least == pytest.approx(128e-6 + 32e-6)


def test_float_operations_have_their_own_limit() -> None:
    assert PEAKS.seconds(PassWork(0, 3 * 10**9, 5 * 10**8)) == 4.0 and PEAKS.seconds(PassWork(10**9, 1, 1)) == 5.0


def test_bytes_of_experts() -> None:
    w = g.new_tensor(T.Q8_0, 64, 32, 16)
    for n_tokens, read in ((1, 4), (2, 8), (5, 16)):
        ids = g.new_tensor(T.I32, 4, n_tokens)
        node = g.mul_mat_id(w, g.new_tensor(T.F32, 64, 1, n_tokens), ids)
        assert product_work(node) == PassWork(read * 68 * 32, 2 * 64 * 32 * 4 * n_tokens, 0)


def test_masks_limit_the_work_of_attention() -> None:
    q = g.new_tensor(T.F32, 32, 3, 4)
    k, v = (g.new_tensor(T.F16, 32, 64, 2) for _ in range(2))
    mask = g.new_tensor(T.F16, 64, 3)
    node = g.flash_attn_ext(q, k, v, mask, 1.0)
    seen = np.full((1, 1, 3, 64), -np.inf, np.float16)
    seen[..., 0, 5:8] = seen[..., 1, 6:9] = 0  # a window of three; the last token is padding
    assert roofline.attention_work(node, lambda _: seen) == PassWork(4 * 2 * 2 * 32 * 2, 0, 2 * 6 * 4 * 64)
    assert roofline.attention_work(g.flash_attn_ext(q, k, v, None, 1.0), pytest.fail).floats == 2 * 3 * 64 * 4 * 64


@pytest.mark.slow
def test_command(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamado.commands.bench.machine.Machine", KnownMachine)
    given = ["bench", "-m", str(path), "--roofline", "-p", "8", "-n", "4", "-d", "0,16", "-r", "1", "-t", "1"]
    assert cli.main([*given, "-o", "json"]) == 0
    tests = json.loads(capsys.readouterr().out)
    assert [test["test"] for test in tests] == ["pp8", "tg4", "pp8 @ d16", "tg4 @ d16"]
    for test in tests:
        *kernels, whole = test["kernels"]
        assert whole["kernel"] == "total" and whole["n"] == sum(one["n"] for one in kernels) > 10
        assert {one["kernel"] for one in kernels} == {"Q4_0 products", "Q8_0 products", ATTENTION, REST}
        assert whole["work"]["n_bytes"] == sum(one["work"]["n_bytes"] for one in kernels)
    assert cli.main(given) == 0
    shown = capsys.readouterr().out
    assert shown.count("| total |") == 4 and "limits: 1.0 GB/s reading as many bytes, 2 GOP/s" in shown


def test_table() -> None:
    from rich.console import Console

    rows = [roofline.KernelRow("Q4_0 products", 3, 2e-3, PassWork(10**6, 2 * 10**6, 0), 1e-3)]
    console = Console(width=120)
    with console.capture() as capture:
        console.print(roofline.table("tg1", rows, PEAKS))
    assert "Q4_0 products │     3 │ 2.00 │  100% │ 1.0 │  0.5 │ 0.00 │     1 │      50%" in capture.get()


@pytest.mark.slow
def test_machine_limits_are_plausible() -> None:
    machine = Machine()
    assert 1e8 < machine.read_bandwidth(1 << 20, 2) < 1e13
    for lanes in machine.widths:
        assert 1e8 < machine.float_products(1, lanes) < machine.integer_products(1, lanes) * 4 < 1e14
    assert machine.tile_products(1) > 1e9 if machine.tiles else machine.tile_products(1) == 0.0


def test_cache_sizes(tmp_path: Path) -> None:
    for i, (level, kind, size) in enumerate([(1, "Data", "48K"), (1, "Instruction", "64K"), (3, "Unified", "700M")]):
        folder = tmp_path / f"index{i}"
        folder.mkdir()
        for name, text in (("level", str(level)), ("type", kind), ("size", size)):
            (folder / name).write_text(f"{text}\n")
    assert caches(tmp_path) == {1: 48 << 10, 3: 700 << 20}
    assert beyond_caches(caches(tmp_path)) == 1400 << 20
    assert beyond_caches({}) == beyond_caches({3: 32 << 20}) == 1 << 30
