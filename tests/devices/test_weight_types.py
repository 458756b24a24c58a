"""Weights unpacked: the bits of the numpy reference, for every value that a block can hold."""

from __future__ import annotations

import numpy as np
import pytest
from block_types import CODES, SCALES, decode, random_blocks
from running import CODEBOOKS, WEIGHTS, Array, Case, new

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.kernels.formats import FORMATS
from llamado.devices.kernels.formats.format import Blocks
from llamado.ggml import graph as g
from llamado.gguf.types import TensorType as T


def rows_of(device: CpuDevice, type: T, blocks: Array) -> Array:
    """Each block as a row of a table, read by its number."""
    table, ids = new(type.block_size, len(blocks), type=type), new(len(blocks), type=T.I32)
    case = Case({"y": g.get_rows(table, ids)}, {table: blocks.reshape(-1), ids: np.arange(len(blocks))})
    return case.run(device)["y"][0, 0]


def equal(found: Array, right: Array) -> bool:
    """The same bits, whatever the sign of zero."""
    return np.array_equal(found + np.float32(0), right + np.float32(0))


def test_all_types_of_weights_are_tested() -> None:
    assert {type for type, form in FORMATS.items() if isinstance(form, Blocks)} == {*WEIGHTS, *CODEBOOKS}
    assert {*SCALES, *CODES} == {*WEIGHTS, *CODEBOOKS}


@pytest.mark.slow
@pytest.mark.parametrize("type", [*WEIGHTS, *CODEBOOKS], ids=lambda t: t.name)
def test_unpacked_weights_have_the_bits_of_the_reference(device: CpuDevice, type: T) -> None:
    blocks = random_blocks(np.random.default_rng(1), type, 300, 0.02)
    for i, byte in enumerate((0x00, 0xFF, 0x80, 0x7F, 0x55, 0xAA)):  # all quants the same, all scales in turn
        at = {*SCALES.get(type, ()), *(at + 1 for at in SCALES.get(type, ()))} | set(range(CODES.get(type, 0)))
        blocks[i, [k for k in range(type.block_bytes) if k not in at]] = byte
    assert equal(rows_of(device, type, blocks), decode(blocks, type))


@pytest.mark.parametrize(("type", "n"), [(T.MXFP4, 255), (T.NVFP4, 128)], ids=["MXFP4", "NVFP4"])
def test_every_scale_of_one_byte(device: CpuDevice, type: T, n: int) -> None:
    """E8M0 from 2^-128 on, which is denormal, to what overflows; UE4M3 with what would be no number."""
    blocks = random_blocks(np.random.default_rng(2), type, n, 1.0)
    for k in range(CODES[type]):
        blocks[:, k] = np.roll(np.arange(n), 32 * k)
    with np.errstate(over="ignore"):
        right = decode(blocks, type)
    assert (np.abs(right) > 0).mean() > 0.8
    assert equal(rows_of(device, type, blocks), right)
