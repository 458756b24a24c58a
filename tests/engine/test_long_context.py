"""Memory use of a long context: its keys and values, and a row of the mask for each token of a batch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tiny import TINY, make

_BATCH = 512
_PEAK = """
import sys
from pathlib import Path
import numpy as np
from llamado.devices.cpu.device import CpuDevice
from llamado.engine.forward.options import RunnerOptions
from llamado.engine.forward.runner import ModelRunner
from llamado.gguf.reader import GGUFFile
from llamado.models import load_model
from llamado.models.memory import Span

n_ctx, n_batch = int(sys.argv[2]), int(sys.argv[3])
with GGUFFile.open(sys.argv[1]) as file:
    runner = ModelRunner(file, load_model(file), [CpuDevice(2)], RunnerOptions(n_cells=n_ctx, max_batch=n_batch))
    handle = runner.memory.allocate(n_ctx)
    handle.used = n_ctx - n_batch
    span = Span(handle, handle.used, n_batch)
    logits = runner.start(np.full(n_batch, 5, np.int32), [span], np.array([n_batch - 1], np.int32)).result()
    assert np.isfinite(logits).all()
    lines = Path("/proc/self/status").read_text().splitlines()
    print(next(line.split()[1] for line in lines if line.startswith("VmHWM")))
    runner.close()
"""


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not say what a process has used")
def test_memory_grows_with_the_context_and_not_with_its_square(tmp_path: Path) -> None:
    tiny = TINY["llama"]
    path = make(replace(tiny, keys={**tiny.keys, "context_length": 1 << 17}, n_layer=1), tmp_path / "m.gguf")

    def peak(n_ctx: int) -> int:
        command = [sys.executable, "-c", _PEAK, str(path), str(n_ctx), str(_BATCH)]
        return 1024 * int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout)

    small, middle, large = (peak(n_ctx) for n_ctx in (1 << 14, 1 << 16, 1 << 17))
    # Bytes per token: its keys and values (2 heads of 32 elements of 2 bytes, for each), and two bytes of the mask
    # for each token of the batch; the mask is built in pieces.
    most = 2 * 2 * 32 * 2 + 2 * _BATCH
    slack = 24 << 20
    assert middle - small <= 3 * (1 << 14) * most + slack
    assert large - middle <= (1 << 16) * most + slack
