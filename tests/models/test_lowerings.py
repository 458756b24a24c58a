"""One numerics on every lowering: a model with weights of many types gives the same bits with any number of threads and
in any batches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bits import BITS
from tiny_models import make_llama

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.cpu.jit import Jit
from llamado.devices.cpu.lowerings import LOWERINGS, can_run
from llamado.devices.cpu.lowerings.host import processor
from llamado.engine.forward.options import RunnerOptions
from llamado.engine.forward.runner import ModelRunner
from llamado.gguf.reader import GGUFFile
from llamado.gguf.types import TensorType as T
from llamado.models import load_model
from llamado.models.memory import Handle, Span

Array = np.ndarray[Any, Any]

N = 52
TOKENS = np.random.default_rng(5).integers(3, 300, (3, N)).astype(np.int32)

MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
USUAL = (T.Q4_0, T.Q4_1, T.Q5_0, T.Q8_0, T.Q4_K, T.Q5_K, T.Q6_K)


def make(path: Path, types: tuple[T, ...]) -> Path:
    """Make a model whose matrices have these types in turn."""
    layers = -(-len(types) // len(MATRICES))
    names = [f"blk.{layer}.{matrix}" for layer in range(layers) for matrix in MATRICES]
    chosen = {name: types[i % len(types)].name for i, name in enumerate(names)}
    return make_llama(
        path, n_embd=256, n_ff=512, n_layer=layers, types={**chosen, "token_embd": "Q8_0", "output": "Q6_K"}
    )


def logits(runner: ModelRunner, batches: list[list[tuple[int, int]]]) -> Array:
    """Return the logits of the first sequence; a batch is a list of (sequence, number of tokens)."""
    handles: dict[int, Handle] = {}
    found = []
    for batch in batches:
        spans, tokens, ours = [], [], []
        for number, n in batch:
            if number not in handles:
                handle = runner.memory.allocate(N)
                assert handle is not None
                handles[number] = handle
            handle, text = handles[number], TOKENS[number]
            if number == 0:
                first = sum(part.size for part in tokens)
                ours = list(range(first, first + n))
            spans.append(Span(handle, handle.used, n, before=text[: handle.used].tolist()))
            tokens.append(text[handle.used : handle.used + n])
        result = runner.start(np.concatenate(tokens), spans, np.array(ours, np.int32)).result(60)
        found.append(result.copy())
        for span in spans:
            span.handle.used += span.n
    for handle in handles.values():
        runner.memory.free(handle)
    return np.concatenate(found)


AT_ONCE = [[(0, N)]]
WAYS = {
    1: [[(0, 33)], [(0, 1)], [(0, 1)], [(0, 4)], [(0, 7)], [(0, 6)]],
    2: [[(1, 5), (0, 20)], [(2, 1), (0, 1), (1, 1)], [(0, 1), (2, 30)], [(1, 2), (0, 30), (2, 2)]],
    3: [[(0, 17)], [(2, 3), (1, 9), (0, 19)], [(0, 1), (1, 1)], [(0, 15), (2, 1)]],
    4: [[(0, 40), (1, 40)], *[[(1, 1), (0, 1)]] * 12],
}
"""Batches by number of threads: the first sequence alone or with others."""


@pytest.mark.full
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_every_lowering_gives_the_same_bits(lowering: str, tmp_path: Path) -> None:
    """Compare the bits within a lowering and, by `BITS`, with all others."""
    if not can_run(LOWERINGS[lowering], processor()[1]):
        pytest.skip(f"this processor has no {' '.join(LOWERINGS[lowering].needs)}")
    check(make(tmp_path / "m.gguf", USUAL), Jit(LOWERINGS[lowering]))


def check(path: Path, jit: Jit) -> None:
    """Compare the logits of all ways to read the text."""
    right = None
    for threads, way in WAYS.items():
        with GGUFFile.open(path) as file:
            device = CpuDevice(threads, jit=jit)
            runner = ModelRunner(
                file, load_model(file), [device], RunnerOptions(n_cells=1024, n_sequences=3, max_batch=160)
            )
            if right is None:
                right = logits(runner, AT_ONCE)
                assert np.isfinite(right).all() and right.std() > 0.1
            assert logits(runner, way).tobytes() == right.tobytes(), threads
            runner.close()
            device.close()
    assert right is not None
    BITS.note([np.fromfile(path, np.uint8)], [right])
