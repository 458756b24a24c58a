"""Planning of memory and barriers: properties of random lists of operations."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamado.devices.compile.program import ByteSpan, Constant, Operation, Place, Programs, Temporary, plan
from llamado.devices.cpu.jit import LoadedKernel
from llamado.devices.cpu.program import link
from llamado.devices.kernel import Kernel
from llamado.ggml.graph import Graph
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType

ARENA = 1 << 20
KERNEL = Kernel("nothing", ("x",), lambda *_: None)


class FakeJit:
    def load(self, kernel: Kernel, **parameters: Any) -> LoadedKernel:
        return LoadedKernel(4711, None)


@st.composite
def programs(draw: st.DrawFn) -> list[Operation]:
    """Operations on a few temporaries (every one written before it is read) and on given memory."""
    temporaries = [
        Temporary(draw(st.integers(0, 400)), keep=draw(st.integers(0, 5)) == 0) for _ in range(draw(st.integers(1, 10)))
    ]
    operations = []
    for _ in range(draw(st.integers(1, 16))):

        def spans() -> list[ByteSpan]:
            found = []
            for _ in range(draw(st.integers(0, 3))):
                if draw(st.booleans()):
                    temporary = draw(st.sampled_from(temporaries))
                    offset = draw(st.integers(0, temporary.size))
                    size = draw(st.integers(0, temporary.size - offset))
                    found.append(ByteSpan(Place(temporary, offset), size))
                else:
                    found.append(ByteSpan(Place(None, draw(st.integers(0, 300))), draw(st.integers(0, 100))))
            return found

        reads, writes = spans(), spans()
        operations.append(
            Operation(KERNEL, {}, {"x": (reads + writes)[0].place if reads + writes else 0}, reads, writes)
        )
    return operations


def absolute(place: Place) -> int:
    assert not isinstance(place.base, Constant)
    return place.offset + (ARENA + place.base.offset if place.base else 0)


def conflict(a: Operation, b: Operation) -> bool:
    """Return True if two operations touch a byte that one of them writes."""
    for mine, mine_writes in ((a.reads, False), (a.writes, True)):
        for theirs, theirs_write in ((b.reads, False), (b.writes, True)):
            if mine_writes or theirs_write:
                for s in mine:
                    for t in theirs:
                        x, y = absolute(s.place), absolute(t.place)
                        if x < y + t.size and y < x + s.size:
                            return True
    return False


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(programs())
def test_temporaries_alive_together_never_overlap(operations: list[Operation]) -> None:
    size = plan(operations)
    lives: dict[Temporary, list[int]] = {}
    for i, operation in enumerate(operations):
        for span in (*operation.reads, *operation.writes):
            if isinstance(span.place.base, Temporary):
                lives.setdefault(span.place.base, []).append(i)
    for a, used in lives.items():
        assert a.offset % 64 == 0 and a.offset >= 0 and a.offset + a.size <= size
        for b, used_b in lives.items():
            if a is b:
                continue
            end_a, end_b = (len(operations) if t.keep else max(u) for t, u in ((a, used), (b, used_b)))
            together = min(used) <= end_b and min(used_b) <= end_a
            assert not together or a.offset + a.size <= b.offset or b.offset + b.size <= a.offset


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(programs())
def test_barriers_separate_conflicting_operations_only(operations: list[Operation]) -> None:
    program = link(operations, FakeJit(), ARENA, plan(operations), 64)  # type: ignore[arg-type]
    barriers = program.table[:, 2].astype(bool).tolist()
    last = 0
    for j, operation in enumerate(operations):
        needed = any(conflict(operations[i], operation) for i in range(last, j))
        assert barriers[j] == needed
        last = j if needed else last
    assert program.barriers == sum(barriers) and program.counters.shape[1] >= len(operations)


def test_fields_are_packed_by_name_and_places_become_addresses() -> None:
    kernel = Kernel("k", ("a", "b", "c"), lambda *_: None)
    temporary = Temporary(100)
    spans = [ByteSpan(Place(temporary, 0), 100)]
    operation = Operation(kernel, {}, {"c": 1.5, "a": Place(temporary, 8), "b": -7}, [], spans, label="one")
    program = link([operation], FakeJit(), ARENA, plan([operation]), 64)  # type: ignore[arg-type]
    assert program.fields.tolist() == [ARENA + temporary.offset + 8, -7, 0x3FC00000]
    assert program.table[0].tolist() == [4711, program.fields.ctypes.data, 0] and program.labels == ["one"]


def test_constants_are_read_where_they_are() -> None:
    """They take no room in the arena."""
    constant = Constant(np.arange(6, dtype=np.float32))
    place = Place(constant, 8)
    operation = Operation(KERNEL, {}, {"x": place}, [ByteSpan(place, 16)], [])
    size = plan([operation])
    program = link([operation], FakeJit(), ARENA, size, 64)  # type: ignore[arg-type]
    assert size == 0 and program.fields.tolist() == [constant.values.ctypes.data + 8]


class OneGraph(NamedTuple):
    """A program of the least that devices keep."""

    graph: Graph
    size: int
    places: dict[Tensor, Temporary]


def test_the_least_recently_used_program_is_dropped() -> None:
    freed: list[OneGraph] = []
    kept: Programs[OneGraph] = Programs(freed.append, most=2)
    output = Tensor(TensorType.F32, (1, 1, 1, 1), (4, 4, 4, 4))
    one, two, three = (OneGraph(Graph(), size, {output: Temporary(size)}) for size in (10, 30, 20))
    kept.add(one)
    kept.add(two)
    assert kept.place(output) is two.places[output] and kept.size == 30
    assert kept.get(one.graph) is one and kept.place(output) is one.places[output]
    kept.add(three)
    assert freed == [two] and kept.get(two.graph) is None and kept.size == 20
    kept.drop(three.graph)
    kept.drop(three.graph)
    kept.clear()
    assert freed == [two, three, one] and not kept and kept.place(output) is None


def test_scratch_memory_lies_behind_all_temporaries() -> None:
    temporary, scratch = Temporary(100), Temporary(64)
    span = ByteSpan(Place(temporary, 0), 100)
    operation = Operation(Kernel("k", (), lambda *_: None), {}, {}, [span], [])
    assert plan([operation], scratch) == scratch.offset + 64
    assert scratch.offset == 128 and plan([operation], Temporary(0)) == plan([operation])
