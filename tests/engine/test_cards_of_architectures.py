"""Every architecture on a stand-in for a card: with its cache there or with the CPU, and without its experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stand_in_cards import Card, Cards
from tiers import chosen
from tiny import TINY, make

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.cpu.jit import Jit
from llamado.devices.split.placement import Placement
from llamado.engine.forward.options import RunnerOptions
from llamado.engine.forward.runner import ModelRunner
from llamado.gguf.reader import GGUFFile
from llamado.models import ARCHITECTURES, load_model
from llamado.models.encoder import Encoder
from llamado.models.memory import Span
from llamado.models.parts.name_patterns import EXPERTS

pytestmark = pytest.mark.slow

DECODERS = [name for name, tiny in TINY.items() if not issubclass(ARCHITECTURES[tiny.architecture].load(), Encoder)]
FEW = ("deepseek2", "mamba2", "gpt-oss")
TOKENS = np.random.default_rng(5).integers(3, 300, 30).astype(np.int32)


def logits(runner: ModelRunner) -> np.ndarray[Any, Any]:
    """Return the logits of a prompt and of single tokens behind it."""
    handle = runner.memory.allocate(64)
    assert handle is not None
    found = []
    for n in (24, 4, 1, 1):
        used = handle.used
        spans = [Span(handle, used, n, before=TOKENS[:used].tolist())]
        rows = np.arange(n, dtype=np.int32)
        found.append(runner.start(TOKENS[used : used + n], spans, rows).result(60).copy())
        handle.used += n
    runner.memory.free(handle)
    return np.concatenate(found)


@pytest.fixture(scope="module")
def jit() -> Jit:
    return Jit()


@pytest.mark.parametrize("name", chosen(DECODERS, FEW))
def test_the_bits_of_the_cpu(name: str, tmp_path: Path, jit: Jit) -> None:
    """Caches, states and the small weights beside them, such as sinks and convolutions, may be with the CPU."""
    options = RunnerOptions(n_cells=256, n_sequences=2, max_batch=32)
    with GGUFFile.open(make(TINY[name], tmp_path / "m.gguf")) as file:
        n = load_model(file).hparams.n_layer
        on_card = Placement((1,) * n, 1)
        placements = [on_card, Placement((1,) * n, 1, cache=0), Placement((0,) * (n // 2) + (1,) * (n - n // 2), 1)]
        if any("exps" in tensor for tensor in file.tensors):
            placements.append(Placement((1,) * n, 1, overrides=((EXPERTS, 0),)))
        runner = ModelRunner(file, load_model(file), [CpuDevice(1, jit=jit)], options)
        right = logits(runner)
        runner.close()
        for placement in placements:
            card: Any = Card(Cards(jit=jit), 0)
            runner = ModelRunner(file, load_model(file), [CpuDevice(1, jit=jit), card], options, placement)
            assert logits(runner).tobytes() == right.tobytes(), placement
            assert card.computed >= 4
            runner.close()
