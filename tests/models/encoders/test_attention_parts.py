"""Attention of many positions is computed in parts, which have the bits of the whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from projectors import every, spec

from llamado.devices.cpu.device import CpuDevice
from llamado.ggml.ops import Op
from llamado.media.chunks import chunks_of
from llamado.media.media import Media, MediaKind
from llamado.models.encoders.parts import transformer


@pytest.mark.parametrize("name", ["gemma3", "qwen2vl_merger", "mimovl"])
def test_parts_have_the_bits_of_the_whole(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, encoder = spec.encoder_of(spec.make(every()[name], tmp_path / "mmproj.gguf"))
    picture = np.random.default_rng(0).integers(0, 256, (60, 80, 3), np.uint8)
    given = chunks_of(encoder.prepare(Media(MediaKind.IMAGE, picture)))[0].input
    device = CpuDevice(1)
    whole = spec.encode(device, file, encoder, given)
    n_whole = sum(node.op is Op.FLASH_ATTN_EXT for node in encoder.build(given.shape).nodes)
    monkeypatch.setattr(transformer, "_MOST_PAIRS", 300)
    parts = spec.encode(device, file, encoder, given)
    assert sum(node.op is Op.FLASH_ATTN_EXT for node in encoder.build(given.shape).nodes) > 2 * n_whole
    assert parts.tobytes() == whole.tobytes()
