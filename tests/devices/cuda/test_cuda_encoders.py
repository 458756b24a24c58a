"""Encoders on cards that are emulated: the embeddings have the CPU's bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from projectors import every, spec
from projectors.sounds import SOUNDS

from cuda.fake_libcuda import FakeCard
from cuda.fake_machine import install
from llamado.devices.accelerators import Accelerators
from llamado.devices.cpu.device import CpuDevice
from llamado.engine.media.encoder_runner import EncoderRunner
from llamado.engine.media.placed_encoders import PlacedEncoders, missing_operation
from llamado.gguf.reader import GGUFFile
from llamado.media.chunks import chunks_of
from llamado.media.media import Media, MediaKind
from llamado.models.encoders.registry import load_encoders

PROJECTORS = {**every(), **{tiny.name: tiny for tiny in SOUNDS}}
NAMES = "idefics3", "qwen2.5vl_merger", "adapter", "llama4", "qwen3a", "lfm2a", "gemma4a"
"""Projectors whose small files the emulated card computes in seconds."""
FEW = ("idefics3",)


def medium(kind: MediaKind, rate: int) -> Media:
    rng = np.random.default_rng(0)
    if kind is MediaKind.AUDIO:
        return Media(kind, rng.standard_normal(rate // 2).astype(np.float32) / 8, rate)
    return Media(kind, rng.integers(0, 256, (56, 64, 3), np.uint8))


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(one, marks=() if one in FEW else pytest.mark.full) for one in NAMES])
def test_embeddings_have_the_bytes_of_the_cpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = PROJECTORS[name]
    library = install(FakeCard(total_bytes=128 << 20, processors=2), replace=monkeypatch.setattr)
    (card,) = Accelerators().take()
    file = GGUFFile.open(spec.make(tiny, tmp_path / "mmproj.gguf"))
    there, here = load_encoders(file), load_encoders(file)
    assert missing_operation(card, there) == ""
    cpu = EncoderRunner(file, here, CpuDevice(1))
    runner = EncoderRunner(file, here, CpuDevice(1), PlacedEncoders(file, there, card))
    encoder = here.of(tiny.kind)
    chunk = chunks_of(encoder.prepare(medium(tiny.kind, encoder.rate)))[0]
    library.launches.clear()
    found = []
    for one in (cpu, runner):
        run = one.begin(chunk)
        while (rows := run.advance()) is None:
            pass
        found.append(rows)
    assert runner.accelerated is not None and library.launches
    assert found[0].tobytes() == found[1].tobytes() and np.isfinite(found[0]).all()
    runner.close()
