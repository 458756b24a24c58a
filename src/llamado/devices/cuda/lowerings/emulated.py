"""Runs GPU kernels in numpy, for machines without a GPU.

The trace of a kernel is recorded as a tree of operations, once. A run executes it for all threads of some blocks in
lock-step: a register is an array with one element for each thread, a branch a mask. Every address is checked. With a
`Watch`, accesses are also checked for what lock-step would hide: memory that another thread wrote or read without a
barrier or `sync` in between, and asynchronous copies that were not waited for.
"""

from __future__ import annotations

import ctypes
import gc
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llamado.devices.cuda.kernel import Image, simt_trace
from llamado.devices.cuda.simt import I1, S32, WARP, Number, Register, SimtCode, Trace, Variable, arguments
from llamado.devices.device import DeviceError
from llamado.devices.kernel import Kernel
from llamado.devices.simd import F32, I32, I64, Type

Array = NDArray[Any]

THREADS_AT_ONCE = 4096
"""Threads that are executed together, if blocks are not larger: their registers fit a cache."""

_DTYPES: dict[str, Any] = {
    "i1": np.bool_, "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64,
    "f16": np.float16, "f32": np.float32, "f64": np.float64, "s32": np.int32,
}  # fmt: skip
_WORD = np.dtype(np.int32)
_UNSIGNED: dict[Any, Any] = {np.dtype(f"i{n}"): np.dtype(f"u{n}") for n in (1, 2, 4, 8)}


class EmulationError(DeviceError):
    """A kernel did what a GPU forbids: an address outside its memory, or a race."""


class Memory(Protocol):
    """The memory of a card: the byte at device address `base` + i is `bytes[i]`, allocated if `valid[i]`."""

    base: int
    bytes: NDArray[np.uint8]
    valid: NDArray[np.bool_]


Step = Callable[["_Run"], None]


class _Cell:
    """A variable: its own register."""

    def __init__(self, code: EmulatedCode, number: int, type_: Type) -> None:
        self._code, self._number, self.type = code, number, type_

    @property
    def value(self) -> Register:
        number = self._number
        return self._code.emit(self.type, lambda m: m.registers[number])

    @value.setter
    def value(self, new: Register) -> None:
        number, source = self._number, new.ref

        def run(m: _Run) -> None:
            value = m.registers[source]
            m.registers[number] = value if m.mask is None else np.where(m.mask, value, m.registers[number])

        self._code.steps.append(run)


class EmulatedCode(SimtCode):
    """Records what a kernel does. A register's `ref` is its number."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.n_registers = 0
        self.constants: dict[int, Array] = {}
        self.tables: dict[str, tuple[int, bytes]] = {}
        self._known: dict[tuple[Type, bytes], Register] = {}

    def new(self) -> int:
        """Number of a new register."""
        self.n_registers += 1
        return self.n_registers - 1

    def emit(self, type_: Type, function: Callable[[_Run], Array]) -> Register:
        """Record an operation and return its result."""
        out = self.new()

        def run(m: _Run) -> None:
            m.registers[out] = function(m)

        self.steps.append(run)
        return Register(self, type_, out)

    def _apply(self, type_: Type, function: Callable[..., Array], *sources: Register) -> Register:
        """Record a function of registers that needs nothing else."""
        out = self.new()
        refs = [source.ref for source in sources]
        if len(refs) == 1:
            (a,) = refs

            def run(m: _Run) -> None:
                m.registers[out] = function(m.registers[a])
        elif len(refs) == 2:
            a, b = refs

            def run(m: _Run) -> None:
                m.registers[out] = function(m.registers[a], m.registers[b])
        else:

            def run(m: _Run) -> None:
                m.registers[out] = function(*[m.registers[ref] for ref in refs])

        self.steps.append(run)
        return Register(self, type_, out)

    # --- values ------------------------------------------------------------------------------------------------------
    def const(self, type_: Type, number: Number) -> Register:
        dtype = _DTYPES[type_.elem]
        if type_ == F32:
            number = struct.unpack("<f", struct.pack("<f", number))[0]
        if type_.is_float or type_ == I1:
            value = np.array([number]).astype(dtype)
        else:
            bits = 8 * np.dtype(dtype).itemsize
            value = np.array([((int(number) + (1 << (bits - 1))) % (1 << bits)) - (1 << (bits - 1))], np.int64).astype(
                dtype
            )
        key = type_, value.tobytes()
        if key not in self._known:
            register = self._known[key] = Register(self, type_, self.new())
            self.constants[register.ref] = value
        return self._known[key]

    def binary(self, name: str, a: Register, b: Register) -> Register:
        return self._apply(a.type, _BINARY[name], a, b)

    def negate(self, a: Register) -> Register:
        return self._apply(a.type, np.negative, a)

    def compare(self, op: str, a: Register, b: Register) -> Register:
        return self._apply(I1, _COMPARE[op], a, b)

    def select(self, condition: Register, yes: Register, no: Register) -> Register:
        return self._apply(yes.type, np.where, condition, yes, no)

    def convert(self, v: Register, type_: Type, *, unsigned: bool = False) -> Register:
        dtype = _DTYPES[type_.elem]
        if v.type == I1 and not unsigned:
            return self._apply(type_, lambda x: -(x.astype(dtype)), v)
        if unsigned and v.type != I1:
            return self._apply(type_, lambda x: _unsigned(x).astype(dtype), v)
        if type_ == I1:
            return self._apply(type_, lambda x: (x & 1).astype(np.bool_), v)
        return self._apply(type_, lambda x: x.astype(dtype), v)

    def bitcast(self, v: Register, type_: Type) -> Register:
        dtype = _DTYPES[type_.elem]
        return self._apply(type_, lambda x: np.ascontiguousarray(x).view(dtype), v)

    def fma(self, a: Register, b: Register, c: Register) -> Register:
        return self._apply(a.type, _fma, a, b, c)

    def function(self, name: str, a: Register) -> Register:
        return self._apply(a.type, _FUNCTIONS[name], a)

    def permute(self, a: Register, b: Register, selector: Register | int) -> Register:
        def chosen(x: Array, y: Array, digits: Array) -> Array:
            x, y, digits = np.broadcast_arrays(x, y, digits)
            both = np.concatenate([_bytes(x), _bytes(y)], axis=1)
            numbers = (digits[:, None] >> np.arange(0, 16, 4)) & 7
            return np.ascontiguousarray(np.take_along_axis(both, numbers, axis=1)).view(np.int32).reshape(-1)

        return self._apply(I32, chosen, a, b, selector if isinstance(selector, Register) else self.i32(selector))

    def funnel(self, low: Register, high: Register, bits: Register) -> Register:
        def shifted(x: Array, y: Array, n: Array) -> Array:
            both = (_unsigned(y).astype(np.uint64) << np.uint64(32)) | _unsigned(x)
            return (both >> (n & 31).astype(np.uint64)).astype(np.uint32).view(np.int32)

        return self._apply(I32, shifted, low, high, bits)

    def dot4(self, a: Register, b: Register, total: Register, *, signed: bool) -> Register:
        def dot(x: Array, y: Array, z: Array) -> Array:
            left, right = _bytes(x), _bytes(y).view(np.int8)
            products = (left.view(np.int8) if signed else left).astype(np.int32) * right
            made: Array = z + products.sum(axis=1, dtype=np.int32)
            return made

        return self._apply(I32, dot, a, b, total)

    # --- memory ------------------------------------------------------------------------------------------------------
    def load(self, type_: Type, address: Register, align: int = 0) -> Register:
        ref, space, dtype = address.ref, address.type, np.dtype(_DTYPES[type_.elem])
        alignment = align or dtype.itemsize
        return self.emit(type_, lambda m: m.space(space).read(m, m.registers[ref], dtype, alignment)[0])

    def load_words(self, address: Register, n: int) -> list[Register]:
        ref, space, outs = address.ref, address.type, [self.new() for _ in range(n)]

        def run(m: _Run) -> None:
            for out, word in zip(outs, m.space(space).read(m, m.registers[ref], _WORD, 4 * n, n), strict=True):
                m.registers[out] = word

        self.steps.append(run)
        return [Register(self, I32, out) for out in outs]

    def store(self, address: Register, value: Register, align: int = 0) -> None:
        ref, source, space = address.ref, value.ref, address.type
        alignment = align or value.type.bytes
        self.steps.append(lambda m: m.space(space).write(m, m.registers[ref], [m.registers[source]], alignment))

    def store_words(self, address: Register, words: Sequence[Register]) -> None:
        ref, sources, space = address.ref, [word.ref for word in words], address.type

        def run(m: _Run) -> None:
            m.space(space).write(m, m.registers[ref], [m.registers[source] for source in sources], 4 * len(sources))

        self.steps.append(run)

    def atomic_add(self, address: Register, amount: Register) -> Register:
        ref, more, dtype = address.ref, amount.ref, np.dtype(_DTYPES[amount.type.elem])

        def add(m: _Run) -> Array:
            at, on = m.all(m.registers[ref]), m.active()
            amounts, before = m.all(m.registers[more]), np.zeros(m.n_threads, dtype)
            memory = m.space(I64)
            for thread in np.flatnonzero(on):
                cell = memory.cells(m, at[thread : thread + 1], dtype)
                before[thread] = cell[0][cell[1]][0]
                cell[0][cell[1]] += amounts[thread]
            return before

        return self.emit(amount.type, add)

    def shared(self) -> Register:
        return self.const(S32, 0)

    def table(self, name: str, numbers: bytes) -> Register:
        if name not in self.tables:
            self.tables[name] = self.new(), numbers
        return Register(self, I64, self.tables[name][0])

    def copy16(self, to: Register, source: Register) -> None:
        to_ref, source_ref = to.ref, source.ref

        def run(m: _Run) -> None:
            words = m.space(I64).read(m, m.registers[source_ref], _WORD, 16, 4)
            m.space(S32).write(m, m.registers[to_ref], words, 16, asynchronous=True)

        self.steps.append(run)

    def prefetch(self, address: Register) -> None:
        """There are no caches here."""

    def commit(self) -> None:
        self.steps.append(lambda m: m.commit())

    def wait(self, left: int) -> None:
        self.steps.append(lambda m: m.wait(left))

    # --- threads -----------------------------------------------------------------------------------------------------
    def thread(self) -> Register:
        return self.emit(I32, lambda m: m.thread)

    def threads(self) -> Register:
        return self.emit(I32, lambda m: np.array([m.block_threads], np.int32))

    def block(self, axis: str = "x") -> Register:
        number = "xy".index(axis)
        return self.emit(I32, lambda m: m.block[number])

    def blocks(self, axis: str = "x") -> Register:
        number = "xy".index(axis)
        return self.emit(I32, lambda m: np.array([m.grid[number]], np.int32))

    def barrier(self) -> None:
        self.steps.append(lambda m: m.synchronize(0))

    def sync(self, width: int = WARP) -> None:
        self.steps.append(lambda m: m.synchronize(width))

    def shuffle(self, v: Register, lane: Register | int, width: int = WARP) -> Register:
        ref, chosen = v.ref, (lane if isinstance(lane, Register) else self.i32(lane)).ref

        def shuffled(m: _Run) -> Array:
            m.require_together(width)
            first = m.number & -width
            found: Array = m.all(m.registers[ref]).take(first + (m.registers[chosen] & (width - 1)))
            return found

        return self.emit(v.type, shuffled)

    def shuffle_xor(self, v: Register, mask: int, width: int = WARP) -> Register:
        ref = v.ref

        def shuffled(m: _Run) -> Array:
            m.require_together(width)
            found: Array = m.all(m.registers[ref]).take(m.number ^ mask)
            return found

        return self.emit(v.type, shuffled)

    def let_next_begin(self) -> None:
        """Launches run one after the other here."""

    def wait_for_last(self) -> None:
        """Launches run one after the other here."""

    def mma(self, a: Sequence[Register], b: Sequence[Register], c: Sequence[Register]) -> list[Register]:
        outs = [self.new() for _ in range(4)]
        refs = [[register.ref for register in registers] for registers in (a, b, c)]

        def run(m: _Run) -> None:
            m.require_together(WARP)
            for out, value in zip(outs, _mma(*[[m.all(m.registers[r]) for r in part] for part in refs]), strict=True):
                m.registers[out] = value

        self.steps.append(run)
        return [Register(self, I32, out) for out in outs]

    def load_matrices(self, address: Register) -> list[Register]:
        outs, ref = [self.new() for _ in range(4)], address.ref

        def run(m: _Run) -> None:
            m.require_together(WARP)
            rows = np.stack(m.space(S32).read(m, m.registers[ref], _WORD, 16, 4), axis=1).reshape(-1, WARP, 4)
            lane = np.arange(WARP)
            for i, out in enumerate(outs):
                m.registers[out] = np.ascontiguousarray(rows[:, 8 * i + lane // 4, lane % 4]).reshape(-1)

        self.steps.append(run)
        return [Register(self, I32, out) for out in outs]

    # --- control -----------------------------------------------------------------------------------------------------
    def var(self, initial: Register) -> Variable:
        number, source = self.new(), initial.ref

        def run(m: _Run) -> None:  # outside the mask, so that later masked changes find a value
            m.registers[number] = m.registers[source]

        self.steps.append(run)
        return _Cell(self, number, initial.type)

    @contextmanager
    def _body(self) -> Iterator[list[Step]]:
        """Record the following operations apart."""
        outer, self.steps = self.steps, []
        yield self.steps
        self.steps = outer

    @contextmanager
    def range(self, start: Register | int, stop: Register | int, step: int | Register = 1) -> Iterator[Register]:
        kind = next((v.type for v in (start, stop) if isinstance(v, Register)), I32)
        first = start if isinstance(start, Register) else self.const(kind, start)
        last = stop if isinstance(stop, Register) else self.const(kind, stop)
        more = step if isinstance(step, Register) else self.const(kind, step)
        counter = self.new()
        with self._body() as body:
            yield Register(self, kind, counter)

        def run(m: _Run) -> None:
            outer, i = m.mask, m.registers[first.ref]
            while True:
                on = i < m.registers[last.ref]
                if not m.restrict(outer, on):
                    break
                m.registers[counter] = i
                for one in body:
                    one(m)
                i = i + m.registers[more.ref]
            m.restore(outer)

        self.steps.append(run)

    @contextmanager
    def loop(self) -> Iterator[Any]:
        name = object()
        with self._body() as body:
            yield name

        def run(m: _Run) -> None:
            outer = m.mask
            m.left.append((name, np.zeros(m.n_threads, np.bool_)))
            while m.restrict(outer, None):
                for one in body:
                    one(m)
                    if m.all_left:
                        m.all_left = False
                        break
            m.left.pop()
            m.restore(outer)

        self.steps.append(run)

    def leave(self, loop: Any, condition: Register) -> None:
        ref = condition.ref

        def run(m: _Run) -> None:
            for name, left in m.left:
                if name is loop:
                    left |= m.active() & m.registers[ref]
            m.restore(m.mask)
            m.all_left = not m.any_active()

        self.steps.append(run)

    @contextmanager
    def when(self, condition: Register) -> Iterator[None]:
        ref = condition.ref
        with self._body() as body:
            yield

        def run(m: _Run) -> None:
            outer = m.mask
            if m.restrict(outer, m.registers[ref]):
                for one in body:
                    one(m)
            m.restore(outer)

        self.steps.append(run)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Pause the collector of cycles: all steps of a kernel that is recorded stay."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Emulation:
    """A recorded kernel."""

    def __init__(self, trace: Trace, fields: Sequence[str], parameters: dict[str, Any]) -> None:
        self._code = EmulatedCode()
        self._arguments = [self._code.new() for _ in fields]
        given = arguments(fields, [Register(self._code, I64, number) for number in self._arguments])
        with _no_collections():
            trace(self._code, given, **parameters)

    def run(
        self, memory: Memory, grid: tuple[int, int], threads: int, shared_bytes: int, arguments: Sequence[int],
        watch: Watch | None = None,
    ) -> None:  # fmt: skip
        """Run the kernel. Raises `EmulationError`."""
        code, n_blocks = self._code, grid[0] * grid[1]
        at_once = max(1, THREADS_AT_ONCE // threads)
        constants = dict(code.constants)
        for number, value in zip(self._arguments, arguments, strict=True):
            constants[number] = np.array([value & (2**64 - 1)], np.uint64).view(np.int64)
        if watch is not None:
            watch.begin(memory)
        with np.errstate(all="ignore"):
            for first in range(0, n_blocks, at_once):
                blocks = np.arange(first, min(first + at_once, n_blocks))
                m = _Run(memory, grid, threads, blocks, shared_bytes, watch)
                m.registers = [None] * code.n_registers  # type: ignore[list-item]
                for register, constant in constants.items():
                    m.registers[register] = constant
                for register, table in code.tables.values():
                    m.registers[register] = m.add_table(table)
                for step in code.steps:
                    step(m)
        if watch is not None:
            watch.end()


_TABLES = 1 << 62
"""Address of the first constant table: tables lie outside the card's memory."""


class _Run:
    """The state of some blocks of a launch."""

    registers: list[Array]

    def __init__(
        self, memory: Memory, grid: tuple[int, int], threads: int, blocks: Array, shared_bytes: int, watch: Watch | None
    ) -> None:
        self.grid, self.block_threads = grid, threads
        self.n_threads = len(blocks) * threads
        self.number = np.arange(self.n_threads)
        self.thread = (self.number % threads).astype(np.int32)
        of_thread = np.repeat(blocks, threads)
        self.block = (of_thread % grid[0]).astype(np.int32), (of_thread // grid[0]).astype(np.int32)
        self.mask: Array | None = None
        self.left: list[tuple[object, Array]] = []
        self.all_left = False
        """True once the last thread has left the innermost loop."""
        self.watch = watch
        self.first = int(blocks[0]) * threads
        """Number of the first thread in the launch."""
        self.stamps = np.zeros((self.n_threads, 4), np.int32)
        """For each thread −1 − its number in the launch, and how often it waited for its block, its warp and its group:
        `_Accesses` has such rows.
        """
        self.stamps[:, 0] = ~(self.number + self.first)
        self.groups = 1
        """The group of asynchronous copies that is open, and the last one that is finished."""
        self.finished = 0
        self._tables = np.zeros(0, np.uint8)
        self._global = _Space(self, memory.bytes, memory.base, memory.valid, None)
        own = np.full(len(blocks) * _aligned(shared_bytes), 0xCD, np.uint8)
        self._shared = _Space(self, own, 0, memory.valid, shared_bytes)

    def space(self, type_: Type) -> _Space:
        return self._shared if type_ == S32 else self._global

    def add_table(self, numbers: bytes) -> Array:
        at = -(-len(self._tables) // 64) * 64
        grown = np.zeros(at + len(numbers) + (-len(numbers)) % 64, np.uint8)
        grown[: len(self._tables)] = self._tables
        grown[at : at + len(numbers)] = np.frombuffer(numbers, np.uint8)
        self._tables = grown
        return np.array([_TABLES + at], np.int64)

    def tables(self) -> NDArray[np.uint8]:
        return self._tables

    # --- masks -------------------------------------------------------------------------------------------------------
    def all(self, value: Array) -> Array:
        """A register of all threads, also if it is the same in all."""
        return value if len(value) == self.n_threads else value.repeat(self.n_threads)

    def active(self) -> Array:
        return np.ones(self.n_threads, np.bool_) if self.mask is None else self.mask

    def any_active(self) -> bool:
        return self.mask is None or _any(self.mask)

    def restrict(self, outer: Array | None, on: Array | None) -> bool:
        """Set the mask to the threads of `outer` for which `on` holds and which have not left a loop. Return False if
        there is none.
        """
        self.restore(outer)
        if on is not None:
            if on.shape == (1,):
                return bool(on[0]) and self.any_active()
            if self.mask is not None or not _all(on):
                self.mask = on if self.mask is None else on & self.mask
        return self.any_active()

    def restore(self, outer: Array | None) -> None:
        self.mask = outer
        for _, left in self.left:
            if _any(left):
                self.mask = ~left if self.mask is None else self.mask & ~left

    def require_together(self, width: int) -> None:
        """Raise an error if only some of `width` neighbors (0: of a block) are here."""
        if self.mask is not None:
            parts = self.mask.reshape(-1, width or self.block_threads)
            if not (parts.all(axis=1) | ~parts.any(axis=1)).all():
                raise EmulationError(
                    "a barrier in a divergent branch" if not width else f"{width} threads are not together"
                )

    # --- synchronization ---------------------------------------------------------------------------------------------
    def synchronize(self, width: int) -> None:
        self.require_together(width)
        if self.watch is not None:
            smaller = 1 if not width else 2 if width >= WARP else 3
            self.stamps[... if self.mask is None else self.mask, smaller:] += 1

    def commit(self) -> None:
        self.groups += 1

    def wait(self, left: int) -> None:
        before, self.finished = self.finished, max(self.finished, self.groups - 1 - left)
        if self.watch is not None and self.finished > before:
            self.watch.finished(self, before)


class _Space:
    """A space of addresses: the card's global memory, or the shared memory of all blocks of a run."""

    def __init__(
        self, run: _Run, memory: NDArray[np.uint8], base: int, valid: NDArray[np.bool_], per_block: int | None
    ) -> None:
        self._memory, self._base, self._valid, self._per_block = memory, base, valid, per_block
        self._limit = len(memory) if per_block is None else per_block
        self._of_block = 0 if per_block is None else run.number // run.block_threads * _aligned(per_block)

    def _locate(self, m: _Run, address: Array, size: int, align: int) -> tuple[NDArray[np.uint8], Array, Array | None]:
        """Return the memory, the index of each thread's first byte (0 for those that are masked), and the mask."""
        at, shared = address.astype(np.int64, copy=False), self._per_block is not None
        if not shared and at[0] >= _TABLES and (at >= _TABLES).all():
            tables = m.tables()
            return tables, np.minimum(at - _TABLES, len(tables) - size), m.mask
        at = m.all(at) if shared else at - self._base
        mask = m.mask if len(at) == m.n_threads else None
        of_mask = at if mask is None else at[mask]
        bits, last = int(np.bitwise_or.reduce(of_mask)), int(of_mask.max(initial=0)) + size
        if bits % align:
            raise EmulationError(f"an access of {size} bytes at an address that is not a multiple of {align}")
        if bits < 0 or last > self._limit:
            raise EmulationError(f"an access outside the {'block' if shared else 'card'}'s {'shared ' * shared}memory")
        if shared:
            at = at + self._of_block
        elif not (_all(self._valid.take(of_mask)) and _all(self._valid.take(of_mask + (size - 1)))):
            raise EmulationError("an access outside allocated memory")
        return self._memory, at if mask is None else np.where(mask, at, 0), mask

    def read(self, m: _Run, address: Array, dtype: Any, align: int, n: int = 1) -> Sequence[Array]:
        """Return `n` numbers at an address."""
        size = n * dtype.itemsize
        memory, at, _ = self._locate(m, address, size, align)
        if m.watch is not None and memory is self._memory:
            m.watch.accessed(m, self._per_block is not None, m.all(at), m.mask, size, None)
        if align < size:
            pieces: Array = memory[at[:, None] + np.arange(size)]
            return list(np.ascontiguousarray(pieces.view(dtype).T))
        if n == 1:
            return [_view(memory, dtype).take(at // size)]
        return list(np.ascontiguousarray(_view(memory, dtype, n).take(at // size, axis=0).T))

    def write(
        self, m: _Run, address: Array, values: Sequence[Array], align: int, *, asynchronous: bool = False
    ) -> None:
        """Write numbers at an address."""
        n, dtype = len(values), values[0].dtype
        size = n * dtype.itemsize
        memory, at, mask = self._locate(m, m.all(address), size, align)
        data = np.stack([m.all(value) for value in values], axis=1)
        if mask is not None:
            at, data = at[mask], data[mask]
        raw = data.view(np.uint8)
        if m.watch is not None:
            whole = np.zeros(m.n_threads, np.int64)
            whole[slice(None) if mask is None else mask] = at
            m.watch.accessed(m, self._per_block is not None, whole, mask, size, raw, asynchronous=asynchronous)
        if align >= size:
            _view(memory, dtype, n)[at // size] = data
        else:
            memory[at[:, None] + np.arange(size)] = raw

    def cells(self, m: _Run, address: Array, dtype: Any) -> tuple[Array, Array]:
        """Return the memory in elements of a type, and the numbers of those at the addresses."""
        return _view(self._memory, dtype), (address - self._base) // dtype.itemsize


def _aligned(size: int) -> int:
    """Bytes from one block's shared memory to the next one's."""
    return -(-size // 16) * 16


class Watch:
    """Finds races: accesses of different threads to a byte, of which one writes, without a barrier or `sync` between
    them. Writing the value that is there already is no conflict: all threads of a group store a common result.
    """

    def __init__(self) -> None:
        self._seen: dict[bool, _Accesses] = {}
        self.found: list[str] = []
        self._memory: Memory | None = None

    def begin(self, memory: Memory) -> None:
        """Begin a launch; all earlier ones are done."""
        self._seen = {False: _Accesses(len(memory.bytes))}
        self._memory = memory

    def end(self) -> None:
        """Raise `EmulationError` if the launch had races."""
        if self.found:
            raise EmulationError(f"{len(self.found)} races: {', '.join(sorted(set(self.found)))}")

    def finished(self, m: _Run, before: int) -> None:
        """Record that copies of the groups after `before` have written now: other threads see that after a barrier or
        `sync` that follows the wait.
        """
        seen = self._seen.get(True)
        if seen is not None and seen.run is m and seen.pending is not None:
            at = np.flatnonzero((seen.pending > before) & (seen.pending <= m.finished))
            seen.writer[at] = m.stamps[~seen.writer[at, 0] - m.first]

    def accessed(
        self, m: _Run, shared: bool, at: Array, mask: Array | None, size: int, data: Array | None, *,
        asynchronous: bool = False,
    ) -> None:  # fmt: skip
        """Record an access: reads have no `data`."""
        memory = m.space(S32 if shared else I64)._memory
        if shared and (True not in self._seen or self._seen[True].run is not m):
            self._seen[True] = _Accesses(len(memory))
            self._seen[True].run = m
        seen, mine = self._seen[shared], m.stamps
        if mask is not None:
            at, mine = at[mask], mine[mask]
        if size > 1:
            at, mine = (at[:, None] + np.arange(size)).reshape(-1), mine.repeat(size, axis=0)
        if not asynchronous and seen.pending is not None and (seen.pending[at] > m.finished).any():
            self.found.append("a copy that is not finished")
        late = seen.late(m, seen.writer.take(at, axis=0), mine)
        if data is None:
            if _any(late):
                self.found.append("a read of what another thread wrote")
            seen.record_read(m, at, mine)
            return
        changes = memory[at] != data.reshape(-1)
        if _any(changes):
            if _any(late & changes):
                self.found.append("two writes")
            if any(_any(seen.late(m, reads.take(at, axis=0), mine) & changes) for reads in (seen.reader, seen.other)):
                self.found.append("a write of what another thread reads")
        seen.writer[at] = mine
        if asynchronous and seen.pending is None:
            seen.pending = np.zeros(len(memory), np.int32)
        if seen.pending is not None:
            seen.pending[at] = m.groups if asynchronous else 0


class _Accesses:
    """The last writer and reader of each byte: rows of `_Run.stamps` as they were then, or zeros. Also the last reader
    before that was not ordered before the last one.
    """

    def __init__(self, n: int) -> None:
        self.writer, self.reader, self.other = (np.zeros((n, 4), np.int32) for _ in range(3))
        self.pending: Array | None = None
        """Groups of asynchronous copies that write the bytes, if there were any."""
        self.run: _Run | None = None

    def late(self, m: _Run, before: Array, mine: Array) -> Array:
        """Return True for each access of `mine` that nothing orders after the one of `before`."""
        who, me = before[:, 0], mine[:, 0]
        apart = who ^ me
        ordered: Array = (who == 0) | (apart == 0)
        if not _all(ordered):
            block = m.block_threads
            together = apart < block if not block & (block - 1) else who // block == me // block
            for waits, near in ((1, together), (2, apart < WARP), (3, apart < 8)):
                ordered |= near & (mine[:, waits] > before[:, waits])
        return ~ordered

    def record_read(self, m: _Run, at: Array, mine: Array) -> None:
        """Record a read. Keep a second reader, which a write of the last one could race with: one of `mine`, or the
        last reader before where nothing orders it before them.
        """
        before = self.reader.take(at, axis=0)
        late = self.late(m, before, mine)
        self.reader[at] = mine
        last = self.reader[at, 0]
        beside = last != mine[:, 0]
        if _any(beside):
            self.other[at[beside]] = mine[beside]
        kept = late & (before[:, 0] != last)
        if _any(kept):
            self.other[at[kept]] = before[kept]


# --- arithmetic ------------------------------------------------------------------------------------------------------


def _unsigned(x: Array) -> Array:
    return np.ascontiguousarray(x).view(_UNSIGNED[x.dtype])


def _by_bits(function: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    """A function of the unsigned integers with the same bits."""
    return lambda x, y: function(_unsigned(x), _unsigned(y)).view(x.dtype)


_BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply,
    "fadd": np.add, "fsub": np.subtract, "fmul": np.multiply, "fdiv": np.divide,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "shl": np.left_shift, "ashr": np.right_shift,
    "lshr": _by_bits(np.right_shift), "udiv": _by_bits(np.floor_divide), "urem": _by_bits(np.remainder),
}  # fmt: skip
_COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal, "==": np.equal,
    "!=": lambda x, y: (x < y) | (x > y) if x.dtype.kind == "f" else np.not_equal(x, y),
}  # fmt: skip


def _leading_zeros(x: Array) -> Array:
    width = 8 * x.itemsize
    return np.array([width - int(one).bit_length() for one in _unsigned(x)], x.dtype)


def _trailing_zeros(x: Array) -> Array:
    width = 8 * x.itemsize
    return np.array([(int(one) & -int(one)).bit_length() - 1 if one else width for one in _unsigned(x)], x.dtype)


_FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "sqrt": np.sqrt, "abs": np.abs, "rint": np.rint, "floor": np.floor,
    "ctpop": lambda x: np.array([int(one).bit_count() for one in _unsigned(x)], x.dtype),
    "ctlz": _leading_zeros, "cttz": _trailing_zeros,
}  # fmt: skip


def _bytes(x: Array) -> NDArray[np.uint8]:
    """The four bytes of each word."""
    return np.ascontiguousarray(x).view(np.uint8).reshape(-1, 4)


def _view(memory: NDArray[np.uint8], dtype: Any, n: int = 0) -> Array:
    """The memory as numbers of a type, or as rows of `n` of them."""
    size = (n or 1) * dtype.itemsize
    numbers: Array = memory[: len(memory) // size * size].view(dtype)
    return numbers.reshape(-1, n) if n else numbers


def _any(x: Array) -> bool:
    """`x.any()`, in less time for few threads."""
    return bool(np.count_nonzero(x))


def _all(x: Array) -> bool:
    return int(np.count_nonzero(x)) == x.size


_FMA = """
define void @{name}({type}* %a, {type}* %b, {type}* %c, {type}* %out, i64 %n) {{
entry:
  %some = icmp sgt i64 %n, 0
  br i1 %some, label %loop, label %done
loop:
  %i = phi i64 [0, %entry], [%next, %loop]
  %pa = getelementptr {type}, {type}* %a, i64 %i
  %pb = getelementptr {type}, {type}* %b, i64 %i
  %pc = getelementptr {type}, {type}* %c, i64 %i
  %po = getelementptr {type}, {type}* %out, i64 %i
  %x = load {type}, {type}* %pa
  %y = load {type}, {type}* %pb
  %z = load {type}, {type}* %pc
  %r = call {type} @llvm.fma.{suffix}({type} %x, {type} %y, {type} %z)
  store {type} %r, {type}* %po
  %next = add i64 %i, 1
  %more = icmp slt i64 %next, %n
  br i1 %more, label %loop, label %done
done:
  ret void
}}
declare {type} @llvm.fma.{suffix}({type}, {type}, {type})
"""


@cache
def _native_fma(suffix: str) -> tuple[Any, Any]:
    """Compile the fused multiply-add of arrays, which numpy does not have. Return the function and its owner."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    name, kind = f"fma_{suffix}", "float" if suffix == "f32" else "double"
    text = _FMA.format(name=name, type=kind, suffix=suffix).replace(f"{kind}*", "ptr")
    module = llvm.parse_assembly(text)
    host = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3
    )
    engine = llvm.create_mcjit_compiler(module, host)
    engine.finalize_object()
    function = ctypes.PYFUNCTYPE(None, *[ctypes.c_void_p] * 4, ctypes.c_int64)(engine.get_function_address(name))
    return function, engine


class _FmaNumbers(threading.local):
    """Operands and results in memory whose address is known: numpy takes long to return that of an array."""

    def __init__(self) -> None:
        self.of_type: dict[Any, tuple[Array, list[int]]] = {}

    def get(self, dtype: Any, n: int) -> tuple[Array, list[int]]:
        """Return rows of at least n numbers, and their addresses."""
        found = self.of_type.get(dtype)
        if found is None or found[0].shape[1] < n:
            rows = np.empty((4, max(n, THREADS_AT_ONCE)), dtype)
            found = self.of_type[dtype] = rows, [row.ctypes.data for row in rows]
        return found


_fma_numbers = _FmaNumbers()


def _fma(a: Array, b: Array, c: Array) -> Array:
    n = max(len(a), len(b), len(c))
    rows, addresses = _fma_numbers.get(a.dtype, n)
    rows[0, :n], rows[1, :n], rows[2, :n] = a, b, c
    function, _ = _native_fma("f32" if a.dtype == np.float32 else "f64")
    function(*addresses, n)
    return rows[3, :n].copy()


@cache
def _fragments(k: int) -> tuple[Array, Array, Array]:
    """Return where a warp has the elements of a (16 × k), b (k × 8) and c (16 × 8): the number of the thread times its
    elements, plus the number of the element there (PTX ISA, "Matrix Fragments for mma.m16n8k32").
    """
    lane = np.arange(WARP)
    group, inside = lane // 4, lane % 4
    left, right, total = (np.zeros(shape, np.int64) for shape in ((16, k), (k, 8), (16, 8)))
    for i in range(k // 8):
        for e in range(4):
            left[group + 8 * (i % 2), 16 * (i // 2) + 4 * inside + e] = lane * (k // 2) + 4 * i + e
    for i in range(k // 16):
        for e in range(4):
            right[16 * i + 4 * inside + e, group] = lane * (k // 4) + 4 * i + e
    for i in range(4):
        total[group + 8 * (i // 2), 2 * inside + i % 2] = lane * 4 + i
    return left, right, total


def _mma(a: Sequence[Array], b: Sequence[Array], c: Sequence[Array]) -> list[Array]:
    """The matrix product of the warps' fragments. Floats are exact: the sums are less than 2²⁴."""
    left, right, total = _fragments(8 * len(a))
    of_warps = [np.stack(part, axis=1).reshape(len(a[0]) // WARP, -1) for part in (a, b, c)]
    x = of_warps[0].view(np.int8)[:, left].astype(np.float32)
    y = of_warps[1].view(np.int8)[:, right].astype(np.float32)
    z = of_warps[2][:, total]
    made = np.empty_like(of_warps[2])
    made[:, total] = (x @ y).astype(np.int32) + z
    return list(np.ascontiguousarray(made.reshape(-1, 4).T))


# --- images ----------------------------------------------------------------------------------------------------------


class EmulatedImages:
    """Images for a library that launches kernels in the emulation: symbols of kernels recorded in this process."""

    stored, identity = False, "emulated"

    def __init__(self) -> None:
        self._made: dict[str, tuple[Emulation, Image]] = {}

    def trace(self, kernel: Kernel, parameters: Mapping[str, Any], symbol: str, threads: int) -> Image:
        """Record a kernel, or return what was recorded for an earlier card."""
        if symbol not in self._made:
            stack: list[int] = []
            fields, trace = simt_trace(kernel, stack)
            self._made[symbol] = Emulation(trace, fields, dict(parameters)), Image(symbol.encode(), sum(stack))
        emulation, image = self._made[symbol]
        _recorded[image.code] = emulation
        return image

    def compile(self, image: Image) -> Image:
        return image


_recorded: dict[bytes, Emulation] = {}


def launch(
    image: bytes, memory: Memory, grid: tuple[int, int], threads: int, shared_bytes: int, arguments: Sequence[int],
    watch: Watch | None = None,
) -> None:  # fmt: skip
    """Launch an emulated image. Raises `EmulationError`."""
    try:
        _recorded[image].run(memory, grid, threads, shared_bytes, arguments, watch)
    except EmulationError as error:
        raise EmulationError(f"{image.decode()}: {error}") from None
