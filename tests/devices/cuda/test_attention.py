"""Attention on a fake card: the bits of the CPU device, in the card's own kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from attention_cases import Attention, causal
from running import Array, Case, new, values
from tiers import chosen

from cuda.cards import fake_device
from cuda.emulation import FlatMemory
from llamado.devices.cpu.device import CpuDevice
from llamado.devices.cuda.device import CudaDevice
from llamado.devices.cuda.kernels.attention import tile_list
from llamado.devices.cuda.kernels.attention.tile_list import TileList, form_tiles
from llamado.devices.cuda.kernels.attention.visible import SHARED_BYTES, THREADS, VisibleRow, find_visible
from llamado.devices.cuda.lowerings.emulated import Emulation, Watch
from llamado.devices.kernels.attention import visible
from llamado.ggml import Tensor
from llamado.ggml import graph as g
from llamado.gguf.types import TensorType as T


@pytest.fixture(scope="module")
def card() -> Iterator[CudaDevice]:
    device = fake_device(total_bytes=64 << 20)
    yield device
    device.close()


@pytest.fixture(scope="module")
def watched() -> Iterator[CudaDevice]:
    device = fake_device(watched=True, total_bytes=8 << 20)
    yield device
    device.close()


def kernels_of(device: CudaDevice) -> set[str]:
    """The labels of the operations of the last graph."""
    return set([*device._programs][-1].labels)


FEW = {"visible cells", "attention, scores", "attention, values"}
"""Operations of a few tokens."""


def check(
    cpu: CpuDevice, card: CudaDevice, attention: Attention, mask: Array | None, n: int, operations: set[str] = FEW
) -> None:
    """Compare the bits of attention of `n` tokens, and the operations."""
    q = attention.queries(n)
    found = attention.run(card, q, mask)
    assert kernels_of(card) == operations
    expected = attention.run(cpu, q, mask)
    assert np.isfinite(expected).all()
    differs = np.flatnonzero(found.view(np.int32) != expected.view(np.int32))
    assert not differs.size, f"{differs.size} of {expected.size} numbers, the first at {differs[0]}"


FORMS: dict[str, dict[str, Any]] = {
    "heads of 32": {"head": 32, "n_heads": 4, "n_heads_kv": 2},
    "heads of 64": {"head": 64, "n_heads": 3, "n_heads_kv": 1},
    "heads of 72": {"head": 72, "n_heads": 2, "n_heads_kv": 2},
    "heads of 80": {"head": 80, "n_heads": 4, "n_heads_kv": 1},
    "heads of 128": {"head": 128, "n_heads": 8, "n_heads_kv": 2},
    "heads of 256": {"head": 256, "n_heads": 2, "n_heads_kv": 1},
    "a group of 12": {"head": 32, "n_heads": 12, "n_heads_kv": 1},
    "sinks": {"head": 32, "n_heads": 4, "n_heads_kv": 2, "sinks": np.array([-30.0, 0.0, 60.0, 5.0], np.float32)},
    "soft cap": {"head": 32, "n_heads": 4, "n_heads_kv": 2, "softcap": 20.0},
    "other values": {"head": 48, "n_heads": 4, "n_heads_kv": 2, "head_v": 24},
    "latent": {"head": 96, "n_heads": 16, "n_heads_kv": 1, "head_v": 64, "latent": True},
    "wide latent": {"head": 576, "n_heads": 8, "n_heads_kv": 1, "head_v": 512, "latent": True},
}
COMMON = ("heads of 64", "heads of 128", "a group of 12", "sinks", "other values", "latent")
TYPES = (T.F16, T.F32, T.BF16, T.Q8_0, T.Q4_0)


@pytest.mark.slow
@pytest.mark.parametrize("form", chosen(FORMS, COMMON))
def test_forms(cpu: CpuDevice, card: CudaDevice, form: str) -> None:
    attention = Attention(n_kv=100, **FORMS[form])
    for n in (1, 3):
        check(cpu, card, attention, causal(n, 100, 70), n)
    check(cpu, card, attention, None, 2)


@pytest.mark.parametrize("type_k", chosen(TYPES, (T.F16, T.Q8_0), lambda t: str(t.name)))
@pytest.mark.parametrize("type_v", chosen(TYPES, (T.F16, T.Q8_0), lambda t: str(t.name)))
def test_cache_types(cpu: CpuDevice, card: CudaDevice, type_k: T, type_v: T) -> None:
    check(cpu, card, Attention(64, 4, 2, 70, type_k, type_v), causal(2, 70, 60), 2)


def test_rows_that_are_not_aligned(cpu: CpuDevice, card: CudaDevice) -> None:
    """Keys of 2 · 24 + 2 · 24 bytes per cell lie at multiples of eight."""
    check(cpu, card, Attention(24, 4, 2, 45, T.F32, T.F16), causal(2, 45, 40), 2)


@pytest.mark.parametrize("n_kv", [1, 31, 33, 64])
def test_any_number_of_cells(cpu: CpuDevice, card: CudaDevice, n_kv: int) -> None:
    check(cpu, card, Attention(32, 3, 1, n_kv), causal(2, n_kv, max(0, n_kv - 2)), 2)


@pytest.mark.slow
def test_masks(cpu: CpuDevice, card: CudaDevice) -> None:
    """Holes, windows, rows that see nothing, numbers, a mask for each head, slopes."""
    rng, attention = np.random.default_rng(5), Attention(32, 4, 2, 300)
    holes = np.where(rng.random((4, 300)) < 0.02, 0.0, -np.inf)
    nothing = np.where(np.arange(300) == 299, [[0.0], [-np.inf]] * 2, -np.inf)
    soft = np.where(rng.random((4, 300)) < 0.5, rng.standard_normal((4, 300)), -np.inf)
    heads = np.where(rng.random((4, 2, 300)) < 0.1, rng.standard_normal((4, 2, 300)), -np.inf)
    for mask in (holes, nothing, soft, causal(4, 300, 250, window=37)):
        check(cpu, card, attention, mask, 4)
    check(cpu, card, attention, heads, 2)
    check(cpu, card, Attention(32, 4, 2, 300, max_bias=8.0), soft[:2], 2)


@pytest.mark.slow
def test_several_segments(cpu: CpuDevice, card: CudaDevice) -> None:
    """Segments are counted in blocks that a token sees, from its first one on."""
    n_kv = 2 * 2048 + 500
    attention = Attention(8, 2, 1, n_kv, sinks=np.array([0.5, -1.0], np.float32))
    mask = np.concatenate([causal(1, n_kv, n_kv - 1), causal(1, n_kv, 900, 1000), causal(1, n_kv, 4000, window=2500)])
    attention.keys[0] = 4 * attention.queries(3)[0, 0]  # the greatest score: all later blocks are scaled by it
    check(cpu, card, attention, mask, 3, {*FEW, "attention, segments"})


def check_unseen_cells(cpu: CpuDevice, card: CudaDevice) -> None:
    """Compare attention over cells that hold NaN and infinities, seen by the last token or by none."""
    attention = Attention(32, 4, 2, 160)
    attention.keys[130:136], attention.keys[136:] = np.nan, np.inf
    attention.values[130:136], attention.values[136:] = np.inf, np.nan
    q, mask = attention.queries(3), causal(3, 160, 128)
    holes = np.arange(5, 160, 32)
    mask[:, holes], attention.keys[holes], attention.values[holes] = -np.inf, np.nan, np.nan
    found, expected = attention.run(card, q, mask), attention.run(cpu, q, mask)
    assert np.isfinite(expected[:2]).all()
    assert not np.isfinite(expected[2]).any()
    np.testing.assert_array_equal(found, expected)


def test_contents_of_unseen_cells_do_not_matter(cpu: CpuDevice, card: CudaDevice) -> None:
    check_unseen_cells(cpu, card)


RACES = [
    pytest.param(type, n_kv, marks=() if n_kv == 270 and type is T.F16 else pytest.mark.full, id=f"{type.name} {n_kv}")
    for type in (T.F16, T.Q8_0)
    for n_kv in (270, 2048 + 70)
]
"""Types of caches, and cells: several blocks, several segments."""


@pytest.mark.slow
@pytest.mark.parametrize(("type", "n_kv"), RACES)
def test_kernels_have_no_races(
    cpu: CpuDevice, watched: CudaDevice, type: T, n_kv: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One block of threads takes all keys and all segments."""
    for name in ("_BLOCKS_PER_PROCESSOR", "_SEGMENTS_PER_PROCESSOR"):
        monkeypatch.setattr(f"llamado.devices.cuda.compile.attend.{name}", 0)
    attention = Attention(32, 2, 1, n_kv, type, type, sinks=np.zeros(2, np.float32))
    operations = FEW if n_kv < 2048 else {*FEW, "attention, segments"}
    check(cpu, watched, attention, causal(1, n_kv, n_kv - 10, window=n_kv - 40), 1, operations)


@pytest.mark.parametrize("n_kv", [40, 2 * 8192 + 37])
@pytest.mark.parametrize("wide", [True, False])
def test_visible_blocks(n_kv: int, wide: bool) -> None:
    """Numbers, bitmaps and counts of visible blocks, in rows that take several passes of a block of threads."""
    n_kv, n_words = n_kv - n_kv % 8 if wide else n_kv, visible.words_of(n_kv)
    rng, memory = np.random.default_rng(3), FlatMemory(1 << 18)
    mask = np.where(rng.random((3, n_kv)) < 0.02, 0.0, -np.inf).astype(np.float16)
    mask[1] = -np.inf
    step = VisibleRow.bytes(n_words)
    mask_at, rows_at = memory.put(mask), memory.put(np.zeros((3, step), np.uint8))
    emulation = Emulation(find_visible.trace, find_visible.fields, {"masked": True, "wide": wide})
    emulation.run(memory, (3, 1), THREADS, SHARED_BYTES, (mask_at, 2 * n_kv, n_kv, n_words, rows_at, step), Watch())
    rows = memory.get(rows_at, np.zeros((3, step), np.uint8))
    for row, shown in zip(rows, np.isfinite(mask), strict=True):
        blocks = np.flatnonzero(np.add.reduceat(shown, np.arange(0, n_kv, visible.BLOCK)))
        bitmap, numbers = row[8 : 8 + 8 * n_words], row[8 + 8 * n_words :].view(np.int32)
        assert row[:4].view(np.int32)[0] == len(blocks)
        assert np.array_equal(np.flatnonzero(np.unpackbits(bitmap, bitorder="little")), blocks)
        assert np.array_equal(numbers[: len(blocks)], blocks)


def test_scores_that_take_much_memory_are_computed_in_passes(
    cpu: CpuDevice, card: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llamado.devices.cuda.compile.attend._MOST_SCORES", 100_000)
    check(cpu, card, Attention(32, 4, 2, 300), causal(5, 300, 250), 5)


def test_cards_with_too_little_shared_memory_run_the_kernels_of_the_cpu(cpu: CpuDevice) -> None:
    card = fake_device(total_bytes=64 << 20, shared_bytes=4 << 10)
    check(cpu, card, Attention(32, 4, 2, 96), causal(2, 96, 80), 2, {"visible_blocks", "tiles", "attention"})
    card.close()


def check_streams(cpu: CpuDevice, card: CudaDevice, n: int, operations: set[str]) -> None:
    """Compare two streams, which have tokens and caches of their own."""
    found = []
    for device in (card, cpu):
        q, k, v = new(32, n, 4, 2), new(32, 70, 2, 2, type=T.F16), new(32, 70, 2, 2, type=T.F16)
        mask = new(70, n, 1, 2, type=T.F16)
        data: dict[Tensor, Array] = {t: values(*t.ne, seed=i) for i, t in enumerate((q, k, v))}
        data[mask] = np.stack([causal(n, 70, first)[None] for first in (10, 60)])
        found.append(Case({"out": g.flash_attn_ext(q, k, v, mask, 0.2)}, data).run(device)["out"])
    assert kernels_of(card) == operations
    assert found[0].tobytes() == found[1].tobytes()


def test_streams(cpu: CpuDevice, card: CudaDevice) -> None:
    check_streams(cpu, card, 3, FEW)


# --- many tokens ------------------------------------------------------------------------------------------------------

MANY = {"visible cells", "tiles", "attention"}
"""Operations of many tokens."""


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a token as many as it takes for tiles."""
    monkeypatch.setattr("llamado.devices.cuda.compile.attend._FEW_TOKENS", 0)


def test_many_tokens_take_tiles(cpu: CpuDevice, card: CudaDevice) -> None:
    check(cpu, card, Attention(32, 4, 2, 96), causal(65, 96, 20), 65, MANY)


@pytest.mark.slow
@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("form", chosen(FORMS, ("heads of 64", "heads of 80", "sinks", "latent")))
def test_forms_in_tiles(cpu: CpuDevice, card: CudaDevice, form: str) -> None:
    attention = Attention(n_kv=75, **FORMS[form])
    operations = FEW if attention.head > 256 else MANY
    check(cpu, card, attention, causal(18, 75, 50), 18, operations)


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("type_k", chosen(TYPES, (T.F16, T.Q8_0), lambda t: str(t.name)))
@pytest.mark.parametrize("type_v", chosen(TYPES, (T.F16, T.Q8_0), lambda t: str(t.name)))
def test_cache_types_in_tiles(cpu: CpuDevice, card: CudaDevice, type_k: T, type_v: T) -> None:
    check(cpu, card, Attention(64, 4, 2, 70, type_k, type_v), causal(3, 70, 60), 3, MANY)


@pytest.mark.full
@pytest.mark.usefixtures("many")
def test_masks_in_tiles(cpu: CpuDevice, card: CudaDevice) -> None:
    rng, attention = np.random.default_rng(5), Attention(32, 4, 2, 300)
    holes = np.where(rng.random((20, 300)) < 0.02, 0.0, -np.inf)
    holes[7] = -np.inf
    sequences = np.concatenate([causal(3, 300, 20, 0), causal(9, 300, 3, 100), causal(1, 300, 40, 200)])
    heads = np.where(rng.random((4, 2, 300)) < 0.1, rng.standard_normal((4, 2, 300)), -np.inf)
    for mask in (holes, sequences, causal(20, 300, 250, window=37)):
        check(cpu, card, attention, mask, len(mask), MANY)
    check(cpu, card, attention, None, 5, MANY)
    check(cpu, card, attention, heads, 2, MANY)
    check(cpu, card, Attention(32, 4, 2, 300, max_bias=8.0), holes, 20, MANY)


@pytest.mark.usefixtures("many")
def test_streams_in_tiles(cpu: CpuDevice, card: CudaDevice) -> None:
    check_streams(cpu, card, 5, MANY)


@pytest.mark.full
@pytest.mark.usefixtures("many")
def test_several_segments_in_tiles(cpu: CpuDevice, card: CudaDevice) -> None:
    """Segments of the tokens of a tile begin in different blocks."""
    n_kv = 2 * 2048 + 500
    attention = Attention(8, 2, 1, n_kv, sinks=np.array([0.5, -1.0], np.float32))
    mask = np.concatenate([causal(2, n_kv, n_kv - 2, window=n_kv - 50 - 700 * i) for i in range(4)])
    check(cpu, card, attention, mask, 8, MANY)


@pytest.mark.usefixtures("many")
def test_contents_of_unseen_cells_do_not_matter_in_tiles(cpu: CpuDevice, card: CudaDevice) -> None:
    check_unseen_cells(cpu, card)


@pytest.mark.slow
@pytest.mark.usefixtures("many")
@pytest.mark.parametrize(("type", "n_kv"), RACES)
def test_tiles_have_no_races(cpu: CpuDevice, watched: CudaDevice, type: T, n_kv: int) -> None:
    attention = Attention(32, 2, 1, n_kv, type, type, sinks=np.zeros(2, np.float32))
    mask = np.concatenate([causal(2, n_kv, n_kv - 2), causal(2, n_kv, n_kv - 58, 30)])
    check(cpu, watched, attention, mask, 4, MANY)


@pytest.mark.full
@pytest.mark.usefixtures("many")
def test_a_block_of_threads_takes_several_tiles(cpu: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of threads do not race, even if the bitmaps of visible blocks come in parts."""
    monkeypatch.setattr("llamado.devices.cuda.compile.attend._TILES_PER_PROCESSOR", 0)
    monkeypatch.setattr("llamado.devices.cuda.kernels.attention.tiles._WORDS", 2)
    n_kv, card = 4200, fake_device(watched=True, total_bytes=8 << 20)
    mask = np.full((6, n_kv), -np.inf, np.float32)
    for token, first in enumerate((0, 0, 2100, 2100, 4190)):
        mask[token, first : first + 3 + token] = 0.0
    mask[5, : 66 * 32 : 32] = 0.0  # two segments
    check(cpu, card, Attention(16, 2, 1, n_kv), mask, 6, MANY)
    card.close()


def ones(bits: Array) -> int:
    """The number of bits that are set."""
    return int(np.unpackbits(bits).sum())


@pytest.mark.parametrize("most", [5, 1000])
def test_tiles_have_tokens_that_see_mostly_the_same(most: int) -> None:
    n_tokens, n_words, step = 300, 2, VisibleRow.bytes(2)
    rng, memory = np.random.default_rng(4), FlatMemory(1 << 20)
    rows = np.zeros((2, n_tokens, step), np.uint8)
    bits = rng.integers(0, 256, (2, 40, 16)).astype(np.uint8).repeat(8, axis=1)[:, :n_tokens]
    bits ^= (rng.random(bits.shape) < 0.1).astype(np.uint8)
    rows[:, :, 8:24] = bits
    tiles_at = memory.put(np.zeros(TileList.bytes(2 * n_tokens), np.uint8))
    emulation = Emulation(form_tiles.trace, form_tiles.fields, {})
    emulation.run(
        memory, (1, 1), tile_list.THREADS, tile_list.SHARED_BYTES,
        (memory.put(rows), step, n_tokens * step, n_words, n_tokens, 2, most, tiles_at), Watch(),
    )  # fmt: skip
    found = memory.get(tiles_at, np.zeros(1 + 3 * 2 * n_tokens, np.int32))
    expected = list[tuple[int, int, int]]()
    for stream, row in enumerate(bits):
        first = 0
        for token in range(n_tokens):
            ends = token + 1 == n_tokens or token + 1 - first >= most
            if ends or 2 * ones(row[token] & row[token + 1]) < ones(row[token] | row[token + 1]):
                expected.append((stream, first, token + 1 - first))
                first = token + 1
    assert found[0] == len(expected) > 70
    assert found[1 : 1 + 3 * found[0]].reshape(-1, 3).tolist() == [list(tile) for tile in expected]
