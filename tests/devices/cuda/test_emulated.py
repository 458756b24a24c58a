"""The emulation of a GPU: addresses and races that it must find, and instructions of warps."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cuda.emulation import FlatMemory
from llamado.devices.cuda.lowerings.emulated import Emulation, EmulationError, Watch
from llamado.devices.cuda.simt import Register, SimtCode
from llamado.devices.simd import I8, I16, I32, I64

Trace = Callable[[SimtCode, SimpleNamespace], None]


def run(
    trace: Trace, *, threads: int = 64, blocks: int = 1, shared: int = 1024, x: NDArray[Any] | None = None,
    n: int = 1024,
) -> NDArray[np.int32]:  # fmt: skip
    """Run a kernel with races found; return the `n` words of y, which are zero before. `x`: input."""
    memory, watch = FlatMemory(), Watch()
    given = np.arange(1, 1025, dtype=np.int32) if x is None else x
    at, to = memory.put(given), memory.put(np.zeros(n, np.int32))
    Emulation(trace, ("x", "y"), {}).run(memory, (blocks, 1), threads, shared, [at, to], watch)
    return memory.get(to, np.zeros(n, np.int32))


def word(base: Register, number: Register) -> Register:
    """Address of a word."""
    return base + (number * 4).to(base.type)


# --- races ---


def _exchange(wait: Callable[[SimtCode], None], distance: int, *, shared: bool) -> Trace:
    """Each thread stores a word, and then loads that of another thread."""

    def trace(c: SimtCode, a: SimpleNamespace) -> None:
        me = c.thread()
        base = c.shared() if shared else a.y
        c.store(word(base, me), c.load(I32, word(a.x, me)))
        wait(c)
        other = c.load(I32, word(base, me ^ distance))
        c.store(word(a.y, me + 256), other)

    return trace


WAITS: dict[str, tuple[Callable[[SimtCode], None], int]] = {
    "barrier": (lambda c: c.barrier(), 32),
    "warp": (lambda c: c.sync(), 8),
    "group": (lambda c: c.sync(8), 1),
}
"""Ways to wait, and the least distance of threads for which the next one is needed."""


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "global"])
@pytest.mark.parametrize("distance", [1, 4, 8, 16, 32])
def test_threads_that_exchange_words_wait_for_each_other(distance: int, shared: bool) -> None:
    for wait, least in WAITS.values():
        trace = _exchange(wait, distance, shared=shared)
        if distance < {1: 8, 8: 32, 32: 64}[least]:
            assert run(trace)[256:320].tolist() == [(i ^ distance) + 1 for i in range(64)]
        else:
            with pytest.raises(EmulationError, match="a read of what another thread wrote"):
                run(trace)
    with pytest.raises(EmulationError, match="a read of what another thread wrote"):
        run(_exchange(lambda c: None, distance, shared=shared))


@pytest.mark.parametrize("threads", [64, 1024], ids=["at once", "one after the other"])
def test_blocks_do_not_wait_for_each_other(threads: int) -> None:
    """Blocks of 4,096 threads are emulated at once, further ones later."""

    def trace(c: SimtCode, a: SimpleNamespace) -> None:
        me = c.thread() + c.block() * c.threads()
        c.store(word(a.y, me), me)
        c.barrier()
        c.store(word(a.y, me + 8 * threads), c.load(I32, word(a.y, me ^ (4 * threads))))

    with pytest.raises(EmulationError, match="a read of what another thread wrote"):
        run(trace, threads=threads, blocks=8, n=16 * threads)


def test_blocks_have_shared_memory_of_their_own() -> None:
    def trace(c: SimtCode, a: SimpleNamespace) -> None:
        me = c.thread()
        c.store(word(c.shared(), me), c.block() * 100 + me)
        c.barrier()
        c.store(word(a.y, c.block() * 64 + me), c.load(I32, word(c.shared(), 63 - me)))

    expected = [100 * block + 63 - i for block in range(4) for i in range(64)]
    assert run(trace, blocks=4)[:256].tolist() == expected


def test_a_thread_need_not_wait_for_itself() -> None:
    """This holds for blocks that are emulated later, too."""

    def trace(c: SimtCode, a: SimpleNamespace) -> None:
        me = c.thread() + c.block() * c.threads()
        c.store(word(a.y, me), me)
        c.store(word(a.y, me), c.load(I32, word(a.y, me)) + 1)

    assert run(trace, threads=1024, blocks=8, n=8192).tolist() == list(range(1, 8193))


def test_launches_wait_for_each_other() -> None:
    memory, watch = FlatMemory(), Watch()
    one, other = (memory.put(np.arange(64, dtype=np.int32)) for _ in range(2))

    def trace(c: SimtCode, a: SimpleNamespace) -> None:
        c.store(word(a.y, c.thread()), c.load(I32, word(a.x, c.thread() ^ 1)) * 3)

    emulation = Emulation(trace, ("x", "y"), {})
    for given in ((one, other), (other, one)):
        emulation.run(memory, (1, 1), 64, 0, given, watch)
    assert memory.get(one, np.zeros(64, np.int32)).tolist() == [9 * i for i in range(64)]


@pytest.mark.parametrize("waits", [True, False])
def test_a_word_is_overwritten_once_it_is_read(waits: bool) -> None:
    def trace(c: SimtCode, a: SimpleNamespace) -> None:
        me, at = c.thread(), c.shared()
        c.store(word(at, me), me)
        c.barrier()
        other = c.load(I32, word(at, me ^ 1))
        if waits:
            c.barrier()
        c.store(word(at, me), other * 3)

    if waits:
        run(trace)
        return
    with pytest.raises(EmulationError, match="a write of what another thread reads"):
        run(trace)


def test_an_early_reader_is_not_forgotten() -> None:
    """The second warp reads and waits for itself, which orders nothing after the read of the first one."""

    def trace(c: SimtCode, a: SimpleNamespace) -> None:
        me = c.thread()
        with c.when(me < 32):
            c.load(I32, a.y)
        with c.when(me >= 32):
            c.load(I32, a.y)
            c.sync()
            with c.when(me.equals(40)):
                c.store(a.y, me)

    with pytest.raises(EmulationError, match="a write of what another thread reads"):
        run(trace)


@pytest.mark.parametrize("writer", [0, 63])
def test_the_writer_of_a_word_may_have_read_it_last(writer: int) -> None:
    """Other threads that read it may be late nevertheless."""

    def trace(c: SimtCode, a: SimpleNamespace) -> None:
        me = c.thread()
        c.store(word(a.y, me + 1), c.load(I32, a.y) + c.load(I32, a.y))
        with c.when(me.equals(writer)):
            c.load(I32, a.y)
            c.store(a.y, me + 5)

    with pytest.raises(EmulationError, match="a write of what another thread reads"):
        run(trace)


@pytest.mark.parametrize("same", [True, False])
def test_threads_may_write_the_same_number_only(same: bool) -> None:
    def trace(c: SimtCode, a: SimpleNamespace) -> None:
        value = c.i32(5) if same else c.thread() // 32
        with c.when(c.thread() < 32):
            c.store(a.y, value)
        with c.when(c.thread() >= 32):
            c.store(a.y, value)

    if same:
        assert run(trace)[0] == 5
        return
    with pytest.raises(EmulationError, match="two writes"):
        run(trace)


def _copied(waits: int | None, commits: bool = True, barrier: bool = True, neighbor: int = 1) -> Trace:
    """Two groups of copies of 16 bytes for each thread; a word of the first group that a neighbor copied is stored."""

    def trace(c: SimtCode, a: SimpleNamespace) -> None:
        me, at = c.thread(), c.shared()
        for part in range(2):
            at_part = me + 32 * part
            c.copy16(at + at_part * 16, a.x + (at_part * 16).to(I64))
            if commits:
                c.commit()
        if waits is not None:
            c.wait(waits)
        if barrier:
            c.barrier()
        c.store(word(a.y, me), c.load(I32, word(at, (me ^ neighbor) * 4)))

    return trace


def test_copies_are_waited_for() -> None:
    expected = [(i ^ 1) * 4 + 1 for i in range(32)]
    for waits in (0, 1):
        assert run(_copied(waits), threads=32)[:32].tolist() == expected
    for waits in (2, None):
        with pytest.raises(EmulationError, match="a copy that is not finished"):
            run(_copied(waits), threads=32)
    with pytest.raises(EmulationError, match="a copy that is not finished"):
        run(_copied(1, commits=False), threads=32)
    with pytest.raises(EmulationError, match="a read of what another thread wrote"):
        run(_copied(0, barrier=False), threads=32)
    assert run(_copied(0, barrier=False, neighbor=0), threads=32)[5] == 21


def test_atomic_additions_are_no_race() -> None:
    def trace(c: SimtCode, a: SimpleNamespace) -> None:
        c.store(word(a.y, c.thread() + 1), c.atomic_add(a.y, c.thread()))

    found = run(trace)
    assert found[0] == 64 * 63 // 2 and found[1:65].tolist() == [i * (i - 1) // 2 for i in range(64)]


# --- addresses ---


@pytest.mark.parametrize(
    ("at", "error"),
    [
        (4096, "outside allocated memory"),
        (4093, "not a multiple of 4"),
        (-4, "outside allocated memory"),
        (1 << 30, "outside the card's memory"),
        (-(1 << 41), "outside the card's memory"),
    ],
)
@pytest.mark.parametrize("stores", [True, False])
def test_global_addresses_are_checked(at: int, error: str, stores: bool) -> None:
    def trace(c: SimtCode, a: SimpleNamespace) -> None:
        offset = c.select(c.thread().equals(5), c.i64(at), c.i64(0))
        if stores:
            c.store(a.x + offset, c.load(I32, a.x + offset * 0))
        else:
            c.load(I32, a.x + offset)

    with pytest.raises(EmulationError, match=error):
        run(trace)

    def masked(c: SimtCode, a: SimpleNamespace) -> None:
        with c.when(c.thread().differs(5)):
            trace(c, a)

    run(masked)


def test_accesses_that_end_outside_are_found() -> None:
    with pytest.raises(EmulationError, match="outside allocated memory"):
        run(lambda c, a: [c.load(I64, a.x + 4092, align=4)])  # type: ignore[arg-type, return-value]
    with pytest.raises(EmulationError, match="outside allocated memory"):
        run(lambda c, a: [*c.load_words(a.x + 4096, 4)], x=np.zeros(1026, np.int32))  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(("at", "error"), [(1024, "outside"), (-4, "outside"), (1022, "not a multiple of 4")])
def test_shared_addresses_are_checked(at: int, error: str) -> None:
    with pytest.raises(EmulationError, match=error):
        run(lambda c, a: c.store(c.shared() + at, c.thread() * 0))
    run(lambda c, a: c.store(c.shared() + 1020, c.thread() * 0), blocks=3)


def test_copies_of_16_bytes_are_aligned() -> None:
    for to, source in ((8, 0), (0, 8)):
        with pytest.raises(EmulationError, match="not a multiple of 16"):
            run(lambda c, a, to=to, source=source: c.copy16(c.shared() + to, a.x + source), threads=1)  # type: ignore[misc]


def test_words_are_aligned_to_all_of_them() -> None:
    with pytest.raises(EmulationError, match="not a multiple of 16"):
        run(lambda c, a: [*c.load_words(a.x + 8, 4)])  # type: ignore[arg-type, return-value]


# --- threads together ---


@pytest.mark.parametrize("what", ["barrier", "sync", "shuffle", "shuffle_xor"])
@pytest.mark.parametrize("limit", [40, 32])
def test_threads_that_wait_are_together(what: str, limit: int) -> None:
    """`limit`: threads of the branch; a warp may take a branch of its own, a block may not."""

    def trace(c: SimtCode, a: SimpleNamespace) -> None:
        with c.when(c.thread() < limit):
            if what == "shuffle":
                c.shuffle(c.thread(), 3)
            elif what == "shuffle_xor":
                c.shuffle_xor(c.thread(), 1)
            else:
                getattr(c, what)()

    if limit == 32 and what != "barrier":
        run(trace)
        return
    with pytest.raises(EmulationError, match=r"divergent branch|not together"):
        run(trace)


def test_threads_leave_loops_one_by_one() -> None:
    def trace(c: SimtCode, a: SimpleNamespace) -> None:
        count = c.var(c.i32(0))
        with c.loop() as loop:
            count.value = count.value + 1
            c.leave(loop, count.value > c.thread())
            with c.when(c.thread() > 60):
                count.value = count.value + 100
        with c.range(0, c.thread() % 5) as i:
            count.value = count.value + i * 1000
        c.store(word(a.y, c.thread()), count.value)

    expected = [(i + 1 if i <= 60 else 102) + 1000 * sum(range(i % 5)) for i in range(64)]
    assert run(trace)[:64].tolist() == expected


# --- instructions of warps ---


def test_products_of_fragments_are_matrix_products() -> None:
    rng = np.random.default_rng(0)
    for k in (32, 16):
        left, right = rng.integers(-128, 128, (16, k), np.int8), rng.integers(-128, 128, (k, 8), np.int8)
        total = rng.integers(-1000, 1000, (16, 8), np.int32)

        def trace(c: SimtCode, a: SimpleNamespace, k: int = k) -> None:
            """Load fragments as documented for mma.m16n8k32 and m16n8k16."""
            lane = c.thread()
            row, four = lane // 4, (lane % 4) * 4

            def words(first: int, rows: Register, at: Register, width: int) -> Register:
                address = a.x + (rows * width + at + first).to(I64)
                return c.load(I32, address)

            n = k // 16
            lefts = [words(0, row + 8 * (i % 2), four + 16 * (i // 2), k) for i in range(2 * n)]
            rights = [words(16 * k, row, four + 16 * i, k) for i in range(n)]  # columns of the right one are rows here
            start = 24 * k
            totals = [words(start, (row + 8 * (i // 2)) * 8 + (lane % 4) * 2 + i % 2, c.i32(0), 4) for i in range(4)]
            for i, value in enumerate(c.mma(lefts, rights, totals)):
                c.store(word(a.y, (row + 8 * (i // 2)) * 8 + (lane % 4) * 2 + i % 2), value)

        x = np.concatenate(
            [left.reshape(-1), np.ascontiguousarray(right.T).reshape(-1), total.reshape(-1).view(np.int8)]
        )
        found = run(trace, threads=32, x=x.view(np.int32))[:128].reshape(16, 8)
        assert np.array_equal(found, left.astype(np.int32) @ right.astype(np.int32) + total)


def test_matrices_are_loaded_by_rows() -> None:
    def trace(c: SimtCode, a: SimpleNamespace) -> None:
        me, at = c.thread(), c.shared()
        for part in range(4):
            c.store(word(at, me + 32 * part), c.load(I32, word(a.x, me + 32 * part)))
        c.barrier()
        for i, value in enumerate(c.load_matrices(at + me * 16)):
            c.store(word(a.y, me * 4 + i), value)

    found = run(trace, threads=32)[:128].reshape(32, 4)
    rows = np.arange(1, 129).reshape(4, 8, 4)  # matrix, row, word
    assert np.array_equal(found, np.stack([rows[i].reshape(-1) for i in range(4)], axis=1))


def test_instructions_of_bytes() -> None:
    rng = np.random.default_rng(1)
    x = rng.integers(-(2**31), 2**31, 256, np.int64).astype(np.int32)

    def trace(c: SimtCode, a: SimpleNamespace) -> None:
        me = c.thread()
        one, two, three = (c.load(I32, word(a.x, me + 64 * i)) for i in range(3))
        for i, value in enumerate((
            c.dot4(one, two, three, signed=True), c.dot4(one, two, three, signed=False), c.permute(one, two, 0x6413),
            one.to(I8).to(I32), one.to(I16).zext(I32), c.shuffle(one, (me * 5) & 7, 8), c.shuffle_xor(one, 16),
            c.funnel(one, two, me),
        )):  # fmt: skip
            c.store(word(a.y, me + 64 * i), value)

    found = run(trace, x=x, n=512).reshape(8, 64)
    one, two, three = (x[64 * i : 64 * i + 64] for i in range(3))
    signed, unsigned, other = (v.view(t).reshape(64, 4).astype(np.int64)
                               for v, t in ((one, np.int8), (one, np.uint8), (two, np.int8)))  # fmt: skip
    for i, left in enumerate((signed, unsigned)):
        assert np.array_equal(found[i], ((left * other).sum(1) + three).astype(np.int32))
    both = np.concatenate([one.view(np.uint8).reshape(64, 4), two.view(np.uint8).reshape(64, 4)], axis=1)
    assert np.array_equal(found[2], np.ascontiguousarray(both[:, [3, 1, 4, 6]]).view(np.int32).reshape(-1))
    assert np.array_equal(found[3], one.astype(np.int8)) and np.array_equal(found[4], one & 0xFFFF)
    lane = np.arange(64)
    assert np.array_equal(found[5], one[lane // 8 * 8 + lane * 5 % 8]) and np.array_equal(found[6], one[lane ^ 16])
    wide = (two.astype(np.int64) << 32) | (one.astype(np.int64) & 0xFFFFFFFF)
    assert np.array_equal(found[7], (wide >> (lane & 31)).astype(np.int32))
