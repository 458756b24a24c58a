"""Runs GPU kernels in numpy, for machines without a GPU.

The trace of a kernel is recorded as a tree of operations, once. A run executes it for all threads of some blocks in
lock-step: a register is an array with one element for each thread, a branch a mask. Every address is checked. With a
`Watch`, accesses are also checked for what lock-step would hide: memory that another thread wrote or read without a
barrier or `sync` in between, and asynchronous copies that were not waited for.
"""

from __future__ import annotations

import ctypes
import struct
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
        return self.emit(type_, lambda m: m.space(space).read(m, m.registers[ref], dtype, alignment))

    def load_words(self, address: Register, n: int) -> list[Register]:
        ref, space, outs = address.ref, address.type, [self.new() for _ in range(n)]

        def run(m: _Run) -> None:
            for i, out in enumerate(outs):
                at = m.registers[ref] + 4 * i
                m.registers[out] = m.space(space).read(m, at, np.dtype(np.int32), 4 if i else 4 * n)

        self.steps.append(run)
        return [Register(self, I32, out) for out in outs]

    def store(self, address: Register, value: Register, align: int = 0) -> None:
        ref, source, space = address.ref, value.ref, address.type
        alignment = align or value.type.bytes
        self.steps.append(lambda m: m.space(space).write(m, m.registers[ref], m.registers[source], alignment))

    def store_words(self, address: Register, words: Sequence[Register]) -> None:
        ref, sources, space = address.ref, [word.ref for word in words], address.type

        def run(m: _Run) -> None:
            for i, source in enumerate(sources):
                m.space(space).write(m, m.registers[ref] + 4 * i, m.registers[source], 4 if i else 4 * len(sources))

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
            dtype = np.dtype(np.int64)
            for half in (0, 8):
                value = m.space(I64).read(m, m.registers[source_ref] + half, dtype, 16 - half)
                m.space(S32).write(m, m.registers[to_ref] + half, value, 16 - half, asynchronous=True)

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
            first = m.number // width * width
            found: Array = m.all(m.registers[ref])[first + (m.registers[chosen] & (width - 1))]
            return found

        return self.emit(v.type, shuffled)

    def shuffle_xor(self, v: Register, mask: int, width: int = WARP) -> Register:
        ref = v.ref

        def shuffled(m: _Run) -> Array:
            m.require_together(width)
            found: Array = m.all(m.registers[ref])[m.number ^ mask]
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
            shared = m.space(S32)
            words = [
                m.all(shared.read(m, m.registers[ref] + 4 * i, np.dtype(np.int32), 4 if i else 16)) for i in range(4)
            ]
            rows = np.stack(words, axis=1).reshape(-1, WARP, 4)
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
                    if not m.any_active():
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


class Emulation:
    """A recorded kernel."""

    def __init__(self, trace: Trace, fields: Sequence[str], parameters: dict[str, Any]) -> None:
        self._code = EmulatedCode()
        self._arguments = [self._code.new() for _ in fields]
        given = arguments(fields, [Register(self._code, I64, number) for number in self._arguments])
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
        self.watch = watch
        self.first = int(blocks[0]) * threads
        """Number of the first thread in the launch."""
        self.epochs = {width: np.zeros(self.n_threads, np.int32) for width in (0, WARP, 8)}
        self.groups = 1
        """The group of asynchronous copies that is open, and the last one that is finished."""
        self.finished = 0
        self._tables = np.zeros(0, np.uint8)
        self._global = _Space(self, memory.bytes, memory.base, memory.valid, None)
        own = np.full(len(blocks) * _aligned(shared_bytes), 0xCD, np.uint8)
        self._shared = _Space(self, own, 0, None, shared_bytes)

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
        return np.broadcast_to(value, (self.n_threads,))

    def active(self) -> Array:
        return np.ones(self.n_threads, np.bool_) if self.mask is None else self.mask

    def any_active(self) -> bool:
        return self.mask is None or bool(self.mask.any())

    def restrict(self, outer: Array | None, on: Array | None) -> bool:
        """Set the mask to the threads of `outer` for which `on` holds and which have not left a loop. Return False if
        there is none.
        """
        self.restore(outer)
        if on is not None:
            if on.shape == (1,):
                return bool(on[0]) and self.any_active()
            if self.mask is not None or not on.all():
                self.mask = on if self.mask is None else on & self.mask
        return self.any_active()

    def restore(self, outer: Array | None) -> None:
        self.mask = outer
        for _, left in self.left:
            if left.any():
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
        on = self.active()
        for other, epochs in self.epochs.items():
            if width == 0 or (other and other <= width):
                epochs[on] += 1

    def commit(self) -> None:
        self.groups += 1

    def wait(self, left: int) -> None:
        before, self.finished = self.finished, max(self.finished, self.groups - 1 - left)
        if self.watch is not None and self.finished > before:
            self.watch.finished(self, before)


class _Space:
    """A space of addresses: the card's global memory, or the shared memory of all blocks of a run."""

    def __init__(
        self, run: _Run, memory: NDArray[np.uint8], base: int, valid: NDArray[np.bool_] | None, per_block: int | None
    ) -> None:
        self._run, self._memory, self._base, self._valid, self._per_block = run, memory, base, valid, per_block

    def _locate(self, m: _Run, address: Array, size: int, align: int) -> tuple[NDArray[np.uint8], Array, Array | None]:
        """Return the memory, the index of each thread's first byte (0 for those that are masked), and the mask."""
        at = address.astype(np.int64)
        if self._per_block is None and at[0] >= _TABLES and (at >= _TABLES).all():
            tables = m.tables()
            return tables, np.minimum(at - _TABLES, len(tables) - size), m.mask
        if at.shape == (1,) and self._per_block is not None:
            at = np.broadcast_to(at, (m.n_threads,))
        mask = m.mask if at.shape != (1,) else None
        of_mask = at if mask is None else at[mask]
        if (of_mask % align).any():
            raise EmulationError(f"an access of {size} bytes at an address that is not a multiple of {align}")
        if self._per_block is not None:
            if (of_mask < 0).any() or (of_mask + size > self._per_block).any():
                raise EmulationError("an access outside the block's shared memory")
            at = at + m.number // m.block_threads * _aligned(self._per_block)
        else:
            at, of_mask = at - self._base, of_mask - self._base
            limit = len(self._memory)
            if (of_mask < 0).any() or (of_mask + size > limit).any():
                raise EmulationError("an access outside the card's memory")
            if self._valid is not None and not (self._valid[of_mask].all() and self._valid[of_mask + size - 1].all()):
                raise EmulationError("an access outside allocated memory")
        return self._memory, at if mask is None else np.where(mask, at, 0), mask

    def read(self, m: _Run, address: Array, dtype: Any, align: int) -> Array:
        memory, at, _ = self._locate(m, address, dtype.itemsize, align)
        if m.watch is not None:
            m.watch.accessed(m, self._per_block is not None, m.all(at), m.mask, dtype.itemsize, None)
        if align >= dtype.itemsize:
            found: Array = _view(memory, dtype)[at // dtype.itemsize]
            return found
        pieces: Array = np.ascontiguousarray(memory[at[:, None] + np.arange(dtype.itemsize)]).view(dtype)
        return pieces.reshape(-1)

    def write(self, m: _Run, address: Array, value: Array, align: int, *, asynchronous: bool = False) -> None:
        memory, at, mask = self._locate(m, m.all(address), value.dtype.itemsize, align)
        value = m.all(value)
        if mask is not None:
            at, value = at[mask], value[mask]
        data = np.ascontiguousarray(value)
        if m.watch is not None:
            raw = data.view(np.uint8).reshape(-1, data.itemsize)
            whole = np.zeros(m.n_threads, np.int64)
            whole[slice(None) if mask is None else mask] = at
            m.watch.accessed(m, self._per_block is not None, whole, mask, data.itemsize, raw, asynchronous=asynchronous)
        if align >= data.itemsize:
            _view(memory, data.dtype)[at // data.itemsize] = data
        else:
            memory[at[:, None] + np.arange(data.itemsize)] = data.view(np.uint8).reshape(-1, data.itemsize)

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
        if seen is not None and seen.run is m:
            at = np.flatnonzero((seen.pending > before) & (seen.pending <= m.finished))
            for width, epochs in m.epochs.items():
                seen.written[width][at] = epochs[seen.writer[at] - m.first]

    def accessed(
        self, m: _Run, shared: bool, at: Array, mask: Array | None, size: int, data: Array | None, *,
        asynchronous: bool = False,
    ) -> None:  # fmt: skip
        """Record an access: reads have no `data`."""
        memory = m.space(S32 if shared else I64)._memory
        if shared and (True not in self._seen or self._seen[True].run is not m):
            self._seen[True] = _Accesses(len(memory))
            self._seen[True].run = m
        seen = self._seen[shared]
        threads = m.number if mask is None else np.flatnonzero(mask)
        at = at[threads]
        if len(at) and int(at.max()) + size > len(seen.writer):
            return  # constant tables
        for k in range(size):
            here = at + k
            if not asynchronous and (seen.pending[here] > m.finished).any():
                self.found.append("a copy that is not finished")
            if (seen.late(m, seen.writer, seen.written, threads, here)).any():
                changes = True if data is None else (memory[here] != data[:, k])
                if (seen.late(m, seen.writer, seen.written, threads, here) & changes).any():
                    self.found.append("a read of what another thread wrote" if data is None else "two writes")
            if data is not None:
                changes = memory[here] != data[:, k]
                if any((seen.late(m, *reads, threads, here) & changes).any() for reads in seen.reads()):
                    self.found.append("a write of what another thread reads")
        for k in range(size):
            here = at + k
            if data is None:
                seen.record_read(m, threads, here)
            else:
                seen.record(m, seen.writer, seen.written, threads, here)
                seen.pending[here] = m.groups if asynchronous else 0


class _Accesses:
    """The last reader and writer of each byte, and the epochs they were in; also the last reader before that was not
    ordered before the last one.
    """

    def __init__(self, n: int) -> None:
        self.writer, self.reader = np.full(n, -1, np.int32), np.full(n, -1, np.int32)
        self.written = {width: np.zeros(n, np.int32) for width in (0, WARP, 8)}
        self.read = {width: np.zeros(n, np.int32) for width in (0, WARP, 8)}
        self.other, self.other_read = np.full(n, -1, np.int32), {width: np.zeros(n, np.int32) for width in (0, WARP, 8)}
        self.pending = np.zeros(n, np.int32)
        self.run: _Run | None = None

    def late(self, m: _Run, who: Array, when: dict[int, Array], threads: Array, at: Array) -> Array:
        """Accesses of `threads` at `at` that nothing orders after those of `who`."""
        other, mine = who[at], threads + m.first
        ordered: Array = (other < 0) | (other == mine)
        for width, epochs in m.epochs.items():
            together = other // (width or m.block_threads) == mine // (width or m.block_threads)
            ordered |= together & (epochs[threads] > when[width][at])
        return ~ordered

    def reads(self) -> list[tuple[Array, dict[int, Array]]]:
        """Readers with the epochs they were in."""
        return [(self.reader, self.read), (self.other, self.other_read)]

    def record_read(self, m: _Run, threads: Array, at: Array) -> None:
        """Record a read. Keep a second reader, which a write of the last one could race with: one of `threads`, or the
        last reader before where nothing orders it before them.
        """
        kept = at[self.late(m, self.reader, self.read, threads, at)]
        before, when_before = self.reader[kept], {width: when[kept] for width, when in self.read.items()}
        self.record(m, self.reader, self.read, threads, at)
        beside = self.reader[at] != threads + m.first
        self.record(m, self.other, self.other_read, threads[beside], at[beside])
        other = before != self.reader[kept]
        self.other[kept[other]] = before[other]
        for width, when in self.other_read.items():
            when[kept[other]] = when_before[width][other]

    def record(self, m: _Run, who: Array, when: dict[int, Array], threads: Array, at: Array) -> None:
        who[at] = threads + m.first
        for width, epochs in m.epochs.items():
            when[width][at] = epochs[threads]


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


def _view(memory: NDArray[np.uint8], dtype: Any) -> Array:
    return memory[: len(memory) // dtype.itemsize * dtype.itemsize].view(dtype)


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
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 4, ctypes.c_int64)(engine.get_function_address(name))
    return function, engine


def _fma(a: Array, b: Array, c: Array) -> Array:
    x, y, z = (np.ascontiguousarray(v) for v in np.broadcast_arrays(a, b, c))
    out = np.empty_like(x)
    function, _ = _native_fma("f32" if x.dtype == np.float32 else "f64")
    function(x.ctypes.data, y.ctypes.data, z.ctypes.data, out.ctypes.data, x.size)
    return out


def _mma(a: Sequence[Array], b: Sequence[Array], c: Sequence[Array]) -> list[Array]:
    """The matrix product of the warps' fragments (PTX ISA, "Matrix Fragments for mma.m16n8k32")."""
    k, lane = 8 * len(a), np.arange(WARP)
    group, inside, n_warps = lane // 4, lane % 4, len(a[0]) // WARP
    left, right, total = (np.zeros((n_warps, *shape), np.int64) for shape in ((16, k), (k, 8), (16, 8)))
    for i, word in enumerate(a):
        cells = _bytes(word).view(np.int8).reshape(n_warps, WARP, 4)
        for e in range(4):
            left[:, group + 8 * (i % 2), 16 * (i // 2) + 4 * inside + e] = cells[:, :, e]
    for i, word in enumerate(b):
        cells = _bytes(word).view(np.int8).reshape(n_warps, WARP, 4)
        for e in range(4):
            right[:, 16 * i + 4 * inside + e, group] = cells[:, :, e]
    for i, number in enumerate(c):
        total[:, group + 8 * (i // 2), 2 * inside + i % 2] = number.reshape(n_warps, WARP)
    made = (left @ right + total).astype(np.int32)
    return [np.ascontiguousarray(made[:, group + 8 * (i // 2), 2 * inside + i % 2]).reshape(-1) for i in range(4)]


# --- images ----------------------------------------------------------------------------------------------------------


class EmulatedImages:
    """Images for a library that launches kernels in the emulation: symbols of kernels recorded in this process."""

    stored, identity = False, "emulated"

    def trace(self, kernel: Kernel, parameters: Mapping[str, Any], symbol: str, threads: int) -> Image:
        stack: list[int] = []
        fields, trace = simt_trace(kernel, stack)
        _recorded[symbol.encode()] = Emulation(trace, fields, dict(parameters))
        return Image(symbol.encode(), sum(stack))

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
