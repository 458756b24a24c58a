"""Flash attention against the reference, and one numerics, as bits."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from attention_cases import Attention, causal
from running import Array, values
from tiers import chosen, first_of

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.kernel import Kernel, kernel
from llamado.devices.kernels.attention import visible
from llamado.devices.kernels.attention.visible import BLOCK, SEGMENT
from llamado.devices.simd import Code, Type, Work
from llamado.gguf.types import TensorType as T

CACHES = (T.F32, T.F16, T.BF16, T.Q8_0)


EACH_CACHE = chosen(CACHES, (T.F16, T.Q8_0), lambda t: str(t.name))
MIXED = {(T.F16, T.Q8_0), (T.Q8_0, T.F16)}


def ids(type: T) -> str:
    return type.name


@pytest.mark.slow
@pytest.mark.parametrize("head", first_of([64, 72, 128, 8, 16, 40, 80, 96, 256], 3))
def test_head_sizes(device: CpuDevice, head: int) -> None:
    for n in (1, 11):
        Attention(head, 6, 2, 64).check(device, causal(n, 64, 30), n)


@pytest.mark.slow
@pytest.mark.parametrize("type", EACH_CACHE)
def test_cache_types(device: CpuDevice, type: T) -> None:
    for n in (2, 9):
        Attention(32, 4, 2, 96, type, type).check(device, causal(n, 96, 70), n)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("type_k", "type_v"),
    [
        pytest.param(k, v, marks=() if (k, v) in MIXED else pytest.mark.full, id=f"{k.name}-{v.name}")
        for k in CACHES
        for v in CACHES
    ],
)
def test_keys_and_values_of_different_types(best: CpuDevice, type_k: T, type_v: T) -> None:
    for n in (2, 9):
        Attention(32, 4, 2, 96, type_k, type_v).check(best, causal(n, 96, 70), n)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [(1, 1), (4, 1), (6, 2), (9, 3), (5, 5), (16, 2)])
def test_groups_of_heads(device: CpuDevice, heads: tuple[int, int]) -> None:
    for n in (1, 7, 8, 9, 40):
        Attention(32, *heads, 64).check(device, causal(n, 64, 20), n)


@pytest.mark.slow
@pytest.mark.parametrize("n_kv", [1, 5, 8, 31, 32, 33, 100, 256, 1000, 1024])
def test_any_number_of_cells(device: CpuDevice, n_kv: int) -> None:
    for n in (1, 13):
        attention = Attention(32, 3, 1, n_kv)
        attention.check(device, None, n)
        attention.check(device, causal(n, n_kv, max(0, n_kv - n)), n)


@pytest.mark.slow
@pytest.mark.parametrize("softcap", [0.0, 5.0, 50.0])
def test_soft_caps(device: CpuDevice, softcap: float) -> None:
    for n in (1, 12):
        Attention(64, 4, 2, 64, softcap=softcap).check(device, causal(n, 64, 50), n)


@pytest.mark.slow
def test_values_of_another_size_than_keys(device: CpuDevice) -> None:
    for n in (1, 20):
        Attention(48, 4, 2, 64, head_v=24).check(device, causal(n, 64, 40), n)


@pytest.mark.slow
@pytest.mark.parametrize("heads", first_of([(192, 128), (576, 512), (112, 48)], 1))
def test_keys_wider_than_values(device: CpuDevice, heads: tuple[int, int]) -> None:
    for n in (1, 11):
        Attention(heads[0], 6, 2, 64, head_v=heads[1]).check(device, causal(n, 64, 30), n)


@pytest.mark.slow
@pytest.mark.parametrize("type", EACH_CACHE)
@pytest.mark.parametrize("heads", first_of([(20, 1), (6, 2), (2, 1), (5, 1)], 2))
def test_values_that_are_the_beginning_of_their_keys(device: CpuDevice, type: T, heads: tuple[int, int]) -> None:
    for n in (1, 3, 11):
        attention = Attention(96, *heads, 80, type, type, head_v=64, latent=True)
        attention.check(device, causal(n, 80, 60), n)


@pytest.mark.slow
@pytest.mark.parametrize("n_heads", [1, 4, 12, 20])
def test_biases_by_distance(device: CpuDevice, n_heads: int) -> None:
    """ALiBi: the mask holds distances, and every head minds them in its own measure."""
    for n in (1, 5, 12):
        far = -np.abs(np.arange(64)[None] - (40 + np.arange(n)[:, None])).astype(np.float32)
        attention = Attention(32, n_heads, n_heads // 4 or 1, 64, max_bias=8.0)
        attention.check(device, far + causal(n, 64, 40), n)
        attention.check(device, far, n)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [(1, 1), (4, 1), (6, 3), (12, 12)])
def test_a_mask_for_each_head(device: CpuDevice, heads: tuple[int, int]) -> None:
    """Biases of a head's own, and cells that only some heads see."""
    rng = np.random.default_rng(3)
    for n in (1, 2, 5, 33):
        attention = Attention(32, *heads, 96)
        biases = rng.standard_normal((heads[0], n, 96)).astype(np.float32)
        attention.check(device, biases + causal(n, 96, 60), n)
        attention.check(device, np.where(rng.random(biases.shape) < 0.5, biases, -np.inf), n)


@pytest.mark.slow
@pytest.mark.parametrize("softcap", [0.0, 20.0])
def test_sinks(device: CpuDevice, softcap: float) -> None:
    """One more key for each head, a weak one, one among the others, one above all; who sees nothing gets nothing."""
    sinks = np.array([-30.0, 0.0, 2.0, 60.0, -1.0, 5.0], np.float32)
    for n in (1, 4, 12):
        attention = Attention(32, 6, 2, 96, softcap=softcap, sinks=sinks)
        attention.check(device, causal(n, 96, 60), n)
        attention.check(device, None, n)
        attention.check(device, np.full((n, 96), -np.inf), n)


def test_masks_with_holes_windows_and_rows_that_see_nothing(device: CpuDevice) -> None:
    rng = np.random.default_rng(5)
    for n in (1, 3, 8, 9, 33):
        attention = Attention(32, 4, 2, 300)
        holes = np.where(rng.random((n, 300)) < 0.1, 0.0, -np.inf)
        nothing = np.full((n, 300), -np.inf)
        nothing[n // 2, 299] = 0.0
        one = np.where(np.arange(300) == rng.integers(0, 300, (n, 1)), 0.0, -np.inf)
        soft = np.where(rng.random((n, 300)) < 0.5, rng.standard_normal((n, 300)), -np.inf)
        for mask in (holes, nothing, one, soft, causal(n, 300, 250, window=37), np.full((n, 300), -np.inf)):
            attention.check(device, mask, n)


@pytest.mark.slow
def test_sequences_in_one_pool(device: CpuDevice) -> None:
    attention = Attention(32, 6, 2, 1024)
    rows = [causal(1, 1024, 77, 0), causal(3, 1024, 0, 256), causal(1, 1024, 255, 512), causal(12, 1024, 30, 768)]
    for parts in (rows, rows[::-1], rows[:3]):
        mask = np.concatenate(parts)
        attention.check(device, mask, len(mask))


@pytest.mark.slow
def test_great_scores_do_not_overflow(device: CpuDevice) -> None:
    attention = Attention(16, 2, 1, 64, T.F32, T.F32)
    attention.keys = attention.keys * 200
    attention.check(device, causal(9, 64, 50), 9)
    attention.check(device, causal(1, 64, 50), 1)


# --- one numerics -----------------------------------------------------------------------------------------------------


FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sinks": {"sinks": np.linspace(-3, 3, 12, dtype=np.float32)},
    "latent": {"latent": True, "head_v": 32},
}


@pytest.mark.slow
@pytest.mark.parametrize("type", EACH_CACHE)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "heads", [(9, 3), *(pytest.param(heads, marks=pytest.mark.full) for heads in ((4, 2), (12, 1)))]
)
def test_a_query_has_the_same_bits_in_any_batch(
    teams: list[CpuDevice], type: T, heads: tuple[int, int], form: str
) -> None:
    """Same bits alone, beside other sequences, anywhere in the batch, in a longer cache, with any number of threads."""
    given = dict(FORMS[form])
    if "sinks" in given:
        given["sinks"] = given["sinks"][: heads[0]]
    attention = Attention(64, *heads, 1024, type, type, **given)
    starts = [0, 256, 512, 512, 768]
    mask = np.concatenate(
        [causal(8, 1024, 90 - 13 * i, start, window=(0, 0, 50)[i % 3]) for i, start in enumerate(starts)]
    )
    q = attention.queries(40)
    checked = [0, 3, 7, 8, 15, 16, 20, 23, 24, 27, 31, 32, 39]
    alone = {i: attention.run(teams[0], q[i : i + 1], mask[i : i + 1]).tobytes() for i in checked}
    for count, devices in (
        (2, teams[1:2]), (5, teams[:1]), (8, teams[2:]), (9, teams[1:2]), (17, teams[3:]), (40, teams),
    ):  # fmt: skip
        for device in devices:
            order = np.random.default_rng(count + device.n_threads).permutation(checked if count <= 9 else 40)[:count]
            found = attention.run(device, q[order], mask[order])
            for row, i in zip(found, order, strict=True):
                assert i not in alone or row.tobytes() == alone[i], (count, device.n_threads, i)


def test_contents_of_masked_cells_do_not_matter(best: CpuDevice) -> None:
    """Bits: cells that a query does not see may hold anything, infinities and NaN of another sequence too."""
    clean, spoiled = (Attention(64, 3, 1, 1024) for _ in range(2))
    spoiled.keys, spoiled.values = clean.keys.copy(), clean.values.copy()
    for array in (spoiled.keys, spoiled.values):
        array[256:512:2], array[257:512:2] = np.nan, np.inf
        array[600:] = -np.inf
    mask = np.concatenate([causal(4, 1024, 200, 0), causal(7, 1024, 10, 256), causal(6, 1024, 60, 512)])
    q = clean.queries(len(mask))
    others = [0, 1, 2, 3, *range(11, 17)]
    right = clean.run(best, q, mask)
    found = spoiled.run(best, q, mask)
    assert found[others].tobytes() == right[others].tobytes()
    for i in others:
        assert spoiled.run(best, q[i : i + 1], mask[i : i + 1]).tobytes() == right[i : i + 1].tobytes()


@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (16, 1)])
def test_nan_reaches_only_queries_that_see_it(device: CpuDevice, heads: tuple[int, int]) -> None:
    """Bits: cells in the middle of a block, which some of a tile's tokens see, hold no numbers."""
    attention = Attention(32, *heads, 256)
    n, seen = 64, 30  # tokens in tiles of eight and more; those that do not see cell 70
    q, mask = attention.queries(n), causal(n, 256, 40)
    right = attention.run(device, q, mask)
    for spoiled in (attention.keys, attention.values):
        spoiled[70:76], spoiled[76:] = np.nan, np.inf
        found = attention.run(device, q, mask)
        assert found[:seen].tobytes() == right[:seen].tobytes()
        assert all(found[i].tobytes() != right[i].tobytes() for i in range(seen, n))
        for i in (0, seen - 1, seen):
            assert attention.run(device, q[i : i + 1], mask[i : i + 1]).tobytes() == found[i].tobytes(), i


@pytest.mark.full
@pytest.mark.parametrize("type", CACHES, ids=ids)
@pytest.mark.parametrize("heads", [(6, 2), (14, 1)])
def test_lowerings_agree_to_the_bit(lowerings: dict[str, CpuDevice], type: T, heads: tuple[int, int]) -> None:
    n_kv = SEGMENT_CELLS + 200
    attention = Attention(64, *heads, n_kv, type, type, softcap=30.0)
    for n in (1, 4, 33):
        mask, q = np.concatenate([causal(1, n_kv, 40), causal(n, n_kv, n_kv - 40)]), attention.queries(n + 1)
        found = {name: attention.run(device, q, mask).tobytes() for name, device in lowerings.items()}
        assert len(set(found.values())) == 1, list(found)


SEGMENT_CELLS = BLOCK * SEGMENT


def pieces(n_kv: int, *runs: tuple[int, int]) -> Array:
    """The mask of one token that sees several runs of cells, from … to."""
    cell = np.arange(n_kv)
    return np.where(np.any([(cell >= first) & (cell < stop) for first, stop in runs], axis=0), 0.0, -np.inf)[None]


@pytest.mark.slow
@pytest.mark.parametrize("heads", first_of([(6, 2), (3, 1)]))
@pytest.mark.parametrize("sinks", [None, np.linspace(-2, 4, 6, dtype=np.float32)], ids=["plain", "sinks"])
def test_several_segments(best: CpuDevice, heads: tuple[int, int], sinks: Array | None) -> None:
    n_kv = 2 * SEGMENT_CELLS + 500
    attention = Attention(32, *heads, n_kv, sinks=None if sinks is None else sinks[: heads[0]])
    for n in (1, 3, 30):
        attention.check(best, causal(n, n_kv, n_kv - 40), n)
        attention.check(best, causal(n, n_kv, n_kv - 40, window=SEGMENT_CELLS + 77), n)
        attention.check(best, None, n)


@pytest.mark.slow
@pytest.mark.parametrize("group", first_of([1, 2, 5, 12, 16, *set(range(1, 17)) - {1, 2, 5, 12, 16}], 5))
def test_any_number_of_queries_reads_keys_together(best: CpuDevice, group: int) -> None:
    for n in (1, 2, 9):
        Attention(24, 2 * group, 2, 300).check(best, causal(n, 300, 280), n)


@pytest.mark.slow
def test_a_sequence_gives_the_same_wherever_it_lies(best: CpuDevice) -> None:
    """Bits: in one run of cells, in two far apart, in three; also where segments meet in the middle of a run."""
    n_kv, own = 4 * SEGMENT_CELLS, SEGMENT_CELLS + 700
    attention = Attention(64, 6, 2, n_kv)
    q, plain = attention.queries(1), (attention.keys.copy(), attention.values.copy())
    right = attention.run(best, q, pieces(n_kv, (0, own)))
    whole = SEGMENT_CELLS // 2
    for places in ([(768, 0)], [(0, 0), (3 * SEGMENT_CELLS, whole)], [(96, 0), (4096, 512), (6144, 2304)]):
        attention.keys, attention.values = np.full_like(plain[0], np.nan), np.full_like(plain[1], np.inf)
        runs = []
        for i, (to, first) in enumerate(places):
            stop = places[i + 1][1] if i + 1 < len(places) else own
            runs.append((to, to + stop - first))
            for array, source in zip((attention.keys, attention.values), plain, strict=True):
                array[to : to + stop - first] = source[first:stop]
        mask = pieces(n_kv, *runs)
        assert attention.run(best, q, mask).tobytes() == right.tobytes(), places
        # among tokens that see other cells, and many like itself
        others = [causal(1, n_kv, 50, 0), mask, causal(1, n_kv, 2500, 256), *[mask] * 24]
        keys, values_ = attention.keys, attention.values
        attention.keys, attention.values = (np.where(np.isfinite(a), a, 0.5) for a in (keys, values_))
        found = attention.run(best, np.repeat(q, len(others), 0), np.concatenate(others))
        attention.keys, attention.values = keys, values_
        assert {row.tobytes() for row in found[[1, *range(3, len(others))]]} == {right[0].tobytes()}


@pytest.mark.slow
@pytest.mark.parametrize("type", EACH_CACHE)
@pytest.mark.parametrize("heads", first_of([(9, 3), (4, 4), (16, 1)], 1))
def test_batches_of_all_kinds_of_tokens(teams: list[CpuDevice], type: T, heads: tuple[int, int]) -> None:
    """Bits: prompts, single tokens, tokens that share a beginning, windows, over several segments, on any threads."""
    n_kv = 3 * SEGMENT_CELLS
    attention = Attention(32, *heads, n_kv, type, type)
    shared = [pieces(n_kv, (0, 1024), (2048 + 256 * i, 2048 + 256 * i + 33 * i + 1)) for i in range(6)]
    long = [pieces(n_kv, (0, 1024), (3584, n_kv - i)) for i in range(3)]
    masks = [
        *shared, *long, causal(30, n_kv, 1000), causal(1, n_kv, 200, 1280), causal(20, n_kv, 5000, 512, window=2500),
        np.full((1, n_kv), -np.inf), causal(3, n_kv, 40, 96),
    ]  # fmt: skip
    mask = np.concatenate(masks).astype(np.float32)
    q = attention.queries(len(mask))
    checked = [*range(9), 12, 38, 39, 40, 55, 59, 60, 61]
    alone = {i: attention.run(teams[0], q[i : i + 1], mask[i : i + 1]).tobytes() for i in checked}
    everyone = np.arange(len(mask))
    permuted = np.random.default_rng(1).permutation(everyone)
    for device, orders in zip(teams, ([everyone[::-1]], [permuted, np.arange(9)], [everyone], [permuted]), strict=True):
        for order in orders:
            found = attention.run(device, q[order], mask[order])
            for place, i in enumerate(order):
                assert i not in alone or found[place].tobytes() == alone[i], (device.n_threads, place, i)


@pytest.mark.parametrize("n_kv", [20, 256, 2048, 5000])
def test_visible_cells_are_found_in_masks(best: CpuDevice, n_kv: int) -> None:
    """Bitmaps, where segments begin, last cells; every token is in one tile, and unlike ones are in different ones."""
    rng = np.random.default_rng(n_kv)
    mask = np.where(rng.random((6, n_kv)) < 0.02, 0.0, -np.inf).astype(np.float16)
    mask[0], mask[1], mask[3, 1:] = -np.inf, 0, -np.inf
    mask[4:], n_words = causal(2, n_kv, n_kv - 2), visible.words_of(n_kv)
    step, tiles = visible.MaskRow.bytes(n_words), np.zeros(100, np.int64)
    rows = np.zeros(6 * step, np.uint8)
    rows_at, mask_at = rows.ctypes.data, mask.ctypes.data
    call(best, visible.visible_blocks, (mask_at, 2 * n_kv, n_kv, n_words, 6, rows_at, step), masked=True)
    call(
        best, visible.find_tiles,
        (mask_at, 2 * n_kv, n_kv, n_words, 6, rows_at, step, step, 0, 6, 1, 1, 3, 64, 1, 1, tiles.ctypes.data),
        masked=True, divided=False,
    )  # fmt: skip
    for row, shown in zip(rows.reshape(6, step), np.isfinite(mask), strict=True):
        blocks = np.flatnonzero(np.add.reduceat(shown, np.arange(0, n_kv, BLOCK)))
        assert np.array_equal(np.flatnonzero(np.unpackbits(row[8 : 8 + 8 * n_words], bitorder="little")), blocks)
        last, n = row[:8].view(np.int32)
        assert last == max(np.flatnonzero(shown), default=-1) + 1
        starts = row[8 + 8 * n_words :].view(np.int32)
        assert starts[:n].tolist() == blocks[::SEGMENT].tolist()
        assert starts[n] == max(blocks, default=-1) + 1
    n_tiles, heads, key_heads = tiles[:3]
    found = tiles[3 : 3 + 5 * n_tiles].reshape(n_tiles, 5)
    assert (heads, key_heads) == (3, 1)
    assert [t for _, first, n, _, _ in found for t in range(first, first + n)] == list(range(6))
    together = found[:, 1:3].tolist()
    assert [0, 1] in together  # sees nothing, its neighbor everything
    assert [4, 2] in together or n_kv == 20


@pytest.mark.parametrize(
    ("sequences", "threads", "n_key_heads", "together"),
    [
        ([4 * SEGMENT], 1, 3, 3),
        ([4 * SEGMENT], 2, 3, 3),
        ([3 * SEGMENT], 2, 8, 4),  # in equal parts, where six would do
        ([SEGMENT + 1], 2, 8, 2),
        ([4 * SEGMENT], 16, 8, 1),
        ([20] * 8, 2, 3, 3),
        ([4, 4, 200], 2, 2, 1),
    ],
)
def test_key_heads_are_grouped_while_threads_stay_busy(
    best: CpuDevice, sequences: list[int], threads: int, n_key_heads: int, together: int
) -> None:
    """`sequences`: blocks that each of them sees."""
    blocks = np.cumsum([0, *sequences])
    n_kv = int(blocks[-1]) * BLOCK
    cell = np.arange(n_kv)
    seen = [(cell >= a * BLOCK) & (cell < b * BLOCK) for a, b in pairwise(blocks)]
    mask = np.where(seen, 0.0, -np.inf).astype(np.float16)
    n, n_words = len(sequences), visible.words_of(n_kv)
    step, tiles = visible.MaskRow.bytes(n_words), np.zeros(3 + 5 * n * n_words, np.int64)
    rows = np.zeros(n * step, np.uint8)
    fields = (mask.ctypes.data, 2 * n_kv, n_kv, n_words, n, rows.ctypes.data, step)
    call(best, visible.visible_blocks, fields, masked=True)
    rest = (step, 0, n, 1, n_key_heads, 3, 64, 4 * threads, threads, tiles.ctypes.data)
    call(best, visible.find_tiles, (*fields, *rest), masked=True, divided=n == 1)
    assert tiles[:3].tolist() == [n if n > 1 else -(-sequences[0] // SEGMENT), 3, together]


def call(device: CpuDevice, kernel: Kernel, fields: tuple[int, ...], **parameters: int) -> None:
    """Runs a kernel as the only thread."""
    packed, counters = np.array(fields, np.int64), np.zeros(2, np.int64)
    device.jit.function(kernel, **parameters)(packed.ctypes.data, 0, 1, counters.ctypes.data, 8)


@kernel("x", "out")
def lane_sums(c: Code, a: SimpleNamespace, work: Work, *, lanes: int) -> None:
    """Sums of eight vectors' lanes, and those of each alone."""
    step = 4 * lanes
    vectors = [c.load(Type("f32", lanes), a.x + i * step) for i in range(8)]
    c.store(a.out, c.sum_lanes8(vectors))
    for i, vector in enumerate(vectors):
        for half in range(lanes // 8):
            eight = c.shuffle(vector, None, range(8 * half, 8 * half + 8))
            c.store(a.out + (step + 4 * (8 * half + i)), c.sum_lanes(eight))


@pytest.mark.parametrize("lanes", [8, 16])
def test_lanes_of_a_product_are_summed_in_one_tree(lowerings: dict[str, CpuDevice], lanes: int) -> None:
    """Bits: i and i + 4, then i and i + 2, then the two that are left."""
    x = (values(lanes, 8, seed=7) * np.float32(10) ** np.arange(-4, 4)[:, None]).astype(np.float32)
    found = np.zeros((2, lanes), np.float32)
    eights = x.reshape(8, lanes // 8, 8).swapaxes(0, 1).reshape(lanes, 8)
    fours = eights[:, :4] + eights[:, 4:]
    twos = fours[:, :2] + fours[:, 2:]
    right = twos[:, 0] + twos[:, 1]
    for name, device in lowerings.items():
        call(device, lane_sums, (x.ctypes.data, found.ctypes.data), lanes=lanes)
        assert found[0].tobytes() == found[1].tobytes() == right.tobytes(), name
