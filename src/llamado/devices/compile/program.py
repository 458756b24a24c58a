"""Operations of a compiled graph, and the plan of their memory.

An operation names the memory it reads and writes. That alone decides the placement of activations: memory is reused
after its last reader.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from numpy.typing import NDArray

from llamado.devices.first_fit import FOREVER, Lifetime, place
from llamado.devices.kernel import Kernel
from llamado.ggml.graph import Graph
from llamado.ggml.tensor import Tensor

_ALIGN = 64
_LINGER = 2
"""Operations during which freed memory is not reused: immediate reuse would only add a barrier."""


@dataclass(eq=False)
class Temporary:
    """Memory that the plan places: an activation, or an intermediate result that a kernel makes for another."""

    size: int
    keep: bool = False  # readable after the program has run
    first: int = -1
    last: int = -1
    offset: int = 0


@dataclass(eq=False)
class Constant:
    """Numbers that exist before the graph runs. The device that runs it provides their address."""

    values: NDArray[Any]


class Place(NamedTuple):
    """An address: `offset` bytes into a temporary or a constant, or absolute if `base` is None."""

    base: Temporary | Constant | None
    offset: int


class ByteSpan(NamedTuple):
    """`size` bytes from a place, read or written."""

    place: Place
    size: int


@dataclass
class Operation:
    """One kernel call; fields are numbers or places."""

    kernel: Kernel
    parameters: dict[str, Any]
    fields: dict[str, int | float | Place]
    reads: list[ByteSpan]
    writes: list[ByteSpan]
    address: int = 0
    label: str = ""


def plan(operations: list[Operation], scratch: Temporary | None = None) -> int:
    """Place every temporary, and scratch memory behind them. Return the size of the arena."""
    temporaries: dict[Temporary, None] = {}
    for i, operation in enumerate(operations):
        for span in (*operation.reads, *operation.writes):
            base = span.place.base
            if isinstance(base, Temporary):
                if base.first < 0:
                    base.first = i
                    temporaries[base] = None
                base.last = i
    lives = [Lifetime(t.first, FOREVER if t.keep else t.last, t.size) for t in temporaries]
    size, offsets = place(lives, alignment=_ALIGN, linger=_LINGER)
    for temporary, offset in zip(temporaries, offsets, strict=True):
        temporary.offset = offset
    if scratch is not None and scratch.size:  # every thread's own, used by all operations
        scratch.offset = -(-size // _ALIGN) * _ALIGN
        size = scratch.offset + scratch.size
    return size


class CompiledGraph(Protocol):
    """A program of a device, made of a graph."""

    @property
    def graph(self) -> Graph: ...

    @property
    def size(self) -> int:
        """Bytes of the arena that it needs."""

    @property
    def places(self) -> Mapping[Tensor, Temporary]:
        """Places of the graph's outputs in the arena."""


ProgramT = TypeVar("ProgramT", bound=CompiledGraph)


class Programs(Generic[ProgramT]):
    """The programs of a device. They run one at a time and share the arena.

    The least recently used one is dropped beyond `most`. `free` is called with each program that is dropped.
    """

    def __init__(self, free: Callable[[ProgramT], None] = lambda program: None, most: int = 160) -> None:
        self._free, self._most = free, most
        self._kept: OrderedDict[int, ProgramT] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[ProgramT]:
        return iter(self._kept.values())

    def get(self, graph: Graph) -> ProgramT | None:
        """Return the program of a graph; None if there is none."""
        found = self._kept.get(id(graph))
        if found is None or found.graph is not graph:
            return None
        self._kept.move_to_end(id(graph))
        return found

    def add(self, program: ProgramT) -> None:
        """Keep a program."""
        self._kept[id(program.graph)] = program
        program.graph.has_program = True
        if len(self._kept) > self._most:
            self._drop(self._kept.popitem(last=False)[1])

    def drop(self, graph: Graph) -> None:
        """Drop the program of a graph, if there is one."""
        if (program := self.get(graph)) is not None:
            del self._kept[id(graph)]
            self._drop(program)

    def clear(self) -> None:
        """Drop all programs."""
        for program in self._kept.values():
            self._drop(program)
        self._kept.clear()

    def _drop(self, program: ProgramT) -> None:
        program.graph.has_program = False
        self._free(program)

    @property
    def size(self) -> int:
        """Bytes of the arena that the programs need."""
        return max((program.size for program in self._kept.values()), default=0)

    def place(self, root: Tensor) -> Temporary | None:
        """Return the place of an output, in the latest program that has it."""
        latest_first = reversed(self._kept.values())
        return next((found for one in latest_first if (found := one.places.get(root)) is not None), None)
