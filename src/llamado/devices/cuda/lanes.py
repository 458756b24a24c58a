"""The SIMD language on a GPU: kernels of the CPU device run with the same source and the same bits.

A vector is spread over a group of `GROUP` neighboring threads: of n lanes, each thread has n / 8 in registers of its
own, in order. A scalar is computed by all eight. So every thread of a group takes the same branches, and a group does
what a thread of the CPU does: items of work are divided among groups.

Small integers are packed, four bytes or two halves to a register. Vectors of two or four lanes are repeated, so that
thread i has lane i % n.

Lanes exchange data through memory, too: a group waits for its threads between stores and loads that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from llamado.devices.cuda.simt import I1, S32, Register, SimtCode, Trace, Variable
from llamado.devices.kernel import Kernel
from llamado.devices.lowering import Lowering
from llamado.devices.simd import I32, I64, Code, Number, Type, Value, Var, Work

GROUP = 8
"""Threads of a group."""

HIDDEN = ("stack", "stack_step")
"""Fields after those of the kernel: memory for `Code.scratch`, and its bytes for each group."""

_ALIGN = {"i1": 1, "i8": 1, "i16": 2, "i32": 2, "i64": 8, "f16": 2, "f32": 4, "f64": 8}
"""Alignment that loads and stores may rely on. Words of quantized blocks are aligned to 2 bytes only."""


def _count(type_: Type) -> int:
    """Lanes of a vector that each thread has."""
    return max(1, type_.lanes // GROUP)


def _per_word(type_: Type) -> int:
    """Lanes in a register: 4 or 2 if small integers are packed, else 1."""
    each = {"i8": 4, "i16": 2}.get(type_.elem, 1)
    return each if type_.lanes >= GROUP and _count(type_) % each == 0 else 1


def _source(lane: int, type_: Type) -> tuple[int, int]:
    """The thread that has a lane, and the lane's number among those of the thread."""
    return (lane, 0) if type_.lanes < GROUP else (lane // _count(type_), lane % _count(type_))


class LaneValue(Value):
    """A value of the SIMD language; `ir` has the registers of each thread."""

    __slots__ = ()
    code: LaneCode
    ir: tuple[Register, ...]

    def _other(self, other: Value | Number) -> tuple[Register, ...]:
        value = other if isinstance(other, Value) else self.code.const(self.type, other)
        registers: tuple[Register, ...] = value.ir
        return registers

    def _binary(self, other: Value | Number, integer: str, floating: str | None = None) -> Value:
        name = {"and_": "and", "or_": "or"}.get(integer, integer) if not self.type.is_float else (floating or "")
        code, each = self.code, _per_word(self.type)
        if self.type == S32 and isinstance(other, Value):
            other = other.to(S32)
        if each > 1 and name in ("shl", "lshr") and isinstance(other, int):
            width = 32 // each
            kept = (((1 << width) - 1) >> other << other) if name == "shl" else ((1 << width) - 1) >> other
            mask = _signed(sum(kept << (width * k) for k in range(each)))
            return code.value(self.type, [((w << other) if name == "shl" else (w >> other)) & mask for w in self.ir])
        if each > 1 and name in ("add", "sub"):
            pairs = zip(self.ir, self._other(other), strict=True)
            return code.value(self.type, [_within_cells(name, a, b, 32 // each) for a, b in pairs])
        if each > 1 and name not in ("and", "or", "xor"):
            right = other if isinstance(other, Value) else code.const(self.type, other)
            pairs = zip(code.unpacked(self), code.unpacked(right), strict=True)
            return code.packed(self.type, [code.simt.binary(name, a, b) for a, b in pairs])
        pairs = zip(self.ir, self._other(other), strict=True)
        return code.value(self.type, [code.simt.binary(name, a, b) for a, b in pairs])

    def __neg__(self) -> Value:
        return self.code.packed(self.type, [-register for register in self.code.unpacked(self)])

    def _compare(self, op: str, other: Value | Number) -> Value:
        code = self.code
        right = other if isinstance(other, Value) else code.const(self.type, other)
        if op in ("==", "!=") and _per_word(self.type) == 4:
            different = [_differing_bytes(a, b) for a, b in zip(self.ir, right.ir, strict=True)]
            return ByteMask(code, [word if op == "!=" else word ^ -1 for word in different])
        pairs = zip(code.unpacked(self), code.unpacked(right), strict=True)
        return code.value(Type("i1", self.type.lanes), [code.simt.compare(op, a, b) for a, b in pairs])

    def bits(self, type_: Type) -> Value:
        return self.code.reinterpret(self, type_)

    def to(self, type_: Type) -> Value:
        if type_ == self.type:
            return self
        elem = Type(type_.elem)
        return self.code.packed(type_, [register.to(elem) for register in self.code.unpacked(self)])

    def zext(self, type_: Type) -> Value:
        elem = Type(type_.elem)
        return self.code.packed(type_, [register.zext(elem) for register in self.code.unpacked(self)])

    def splat(self, lanes: int) -> Value:
        type_ = Type(self.type.elem, lanes)
        return self.code.packed(type_, list(self.ir) * _count(type_))

    def place(self) -> tuple[int, int]:
        return id(self), 0

    def lane(self, index: int) -> Value:
        thread, number = _source(index, self.type)
        register = self.code.unpacked(self)[number]
        return self.code.value(Type(self.type.elem), [self.code.simt.shuffle(register, thread, GROUP)])


class ByteMask(LaneValue):
    """The result of a comparison of packed bytes: words whose bytes are 0 or 255, which `select` takes. `ir` is empty:
    everything else gets its lanes from `LaneCode.unpacked`.
    """

    __slots__ = ("words",)

    def __init__(self, code: LaneCode, words: Sequence[Register]) -> None:
        super().__init__(code, Type("i1", 4 * GROUP * len(words)), ())
        self.words = tuple(words)

    def bit_registers(self) -> tuple[Register, ...]:
        """A register of one bit for each byte."""
        return tuple((word & _signed(1 << (8 * k))).differs(0) for word in self.words for k in range(4))


def _differing_bytes(a: Register, b: Register) -> Register:
    """A word with 255 in the bytes that differ, and 0 in the others."""
    both = a ^ b
    tops = ((both & 0x7F7F7F7F) + 0x7F7F7F7F) | both
    return ((tops >> 7) & 0x01010101) * 0xFF


def _within_cells(name: str, a: Register, b: Register, width: int) -> Register:
    """The sum or difference of the cells of `width` bits of two words: carries stop below each highest bit."""
    tops = _signed(sum(1 << (at + width - 1) for at in range(0, 32, width)))
    if name == "add":
        return ((a & ~tops) + (b & ~tops)) ^ ((a ^ b) & tops)
    return ((a | tops) - (b & ~tops)) ^ ((a ^ b ^ -1) & tops)


def _signed(word: int) -> int:
    """The signed integer with the bits of an unsigned word."""
    return word - (1 << 32) if word >> 31 else word


class LaneVar(Var):
    """A variable that loops may change."""

    __slots__ = ("_variables",)

    def __init__(self, code: LaneCode, initial: Value) -> None:
        self.code, self.type = code, initial.type
        self._variables: list[Variable] = [code.simt.var(register) for register in initial.ir]

    @property
    def value(self) -> Value:
        code: Any = self.code
        made: Value = code.value(self.type, [variable.value for variable in self._variables])
        return made

    @value.setter
    def value(self, new: Value) -> None:
        for variable, register in zip(self._variables, new.ir, strict=True):
            variable.value = register


class LaneCode(Code):
    """A kernel of the SIMD language under construction, for groups of threads."""

    def __init__(self, simt: SimtCode, lowering: Lowering, stack: Register, stack_step: Register) -> None:
        self.simt, self.lowering = simt, lowering
        self.stack_bytes = 0
        """Bytes of `scratch` that each group needs."""
        thread = simt.thread()
        self.lane_number = thread & (GROUP - 1)
        groups = simt.threads().to(I64) // GROUP
        own = simt.block().to(I64) * groups + (thread // GROUP).to(I64)
        self._stack = stack + own * stack_step
        self.work = Work(
            *(self.value(I64, [register]) for register in (own, simt.blocks().to(I64) * groups, stack, stack))
        )
        self._stored = self._loaded = False
        self._apart = False
        """True in code whose threads exchange no data through memory."""

    # --- registers ---------------------------------------------------------------------------------------------------
    def value(self, type_: Type, registers: Sequence[Register]) -> Value:
        return LaneValue(self, type_, tuple(registers))

    def unpacked(self, value: Value) -> list[Register]:
        """One register for each lane of this thread."""
        if isinstance(value, ByteMask):
            return list(value.bit_registers())
        each, elem = _per_word(value.type), Type(value.type.elem)
        if each == 1:
            return list(value.ir)
        width = 32 // each
        return [(word >> (width * k)).to(elem) if k else word.to(elem) for word in value.ir for k in range(each)]

    def packed(self, type_: Type, registers: Sequence[Register]) -> Value:
        """The opposite of `unpacked`."""
        each = _per_word(type_)
        if each == 1:
            return self.value(type_, registers)
        width, words = 32 // each, []
        for first in range(0, len(registers), each):
            word = registers[first].zext(I32)
            for k in range(1, each):
                word = word | (registers[first + k].zext(I32) << (width * k))
            words.append(word)
        return self.value(type_, words)

    def reinterpret(self, value: Value, type_: Type) -> Value:
        """Bits of a value as another type of the same size."""
        here = value.type
        if here == type_:
            return value
        if here.elem == "i1":
            return self._bitmap(value, type_)
        if min(here.lanes, type_.lanes) < GROUP and here.lanes != type_.lanes:
            return self._regroup(value, type_)
        if here.lanes == type_.lanes:
            elem = Type(type_.elem)
            return self.packed(type_, [register.bits(elem) for register in self.unpacked(value)])
        return self._of_words(type_, self._words(value))

    def _bitmap(self, value: Value, type_: Type) -> Value:
        """The bits of all lanes as one integer."""
        count = _count(value.type)
        word, first = self.simt.i64(0), (self.lane_number * count).to(I64)
        for k, register in enumerate(self.unpacked(value)):
            word = word | (register.zext(I64) << (first + k))
        for distance in (4, 2, 1):
            word = word | self.simt.shuffle_xor(word, distance, GROUP)
        return self.value(type_, [word.to(Type(type_.elem))])

    def _words(self, value: Value) -> list[Register]:
        """This thread's part of a vector as 32-bit words."""
        if value.type.elem in ("i64", "f64"):
            return [half for r in value.ir for half in (r.bits(I64).to(I32), (r.bits(I64) >> 32).to(I32))]
        if _per_word(value.type) > 1 or Type(value.type.elem).bytes == 4:
            return [register.bits(I32) for register in value.ir]
        small = value.type._replace(elem=f"i{8 * Type(value.type.elem).bytes}")
        return list(self.packed(small, [r.bits(Type(small.elem)) for r in value.ir]).ir)

    def _of_words(self, type_: Type, words: Sequence[Register]) -> Value:
        elem = Type(type_.elem)
        if elem.bytes == 8:
            pairs = zip(words[::2], words[1::2], strict=True)
            return self.value(type_, [(low.zext(I64) | (high.zext(I64) << 32)).bits(elem) for low, high in pairs])
        if elem.bytes == 4 or _per_word(type_) > 1:
            return self.value(type_, [word.bits(elem if elem.bytes == 4 else I32) for word in words])
        small = type_._replace(elem=f"i{8 * elem.bytes}")
        return self.value(type_, [r.bits(elem) for r in self.unpacked(self.value(small, words))])

    def _regroup(self, value: Value, type_: Type) -> Value:
        """`reinterpret` where one of the types has less lanes than there are threads: byte by byte."""
        here = value.type
        size, byte = Type(type_.elem).bytes, Type("i8")
        wide = Type(here.elem).bytes
        integer = Type(f"i{8 * wide}")
        source = Type("i8", here.lanes * wide)
        mine = [
            (r.bits(integer) >> (8 * k)).to(byte) if wide > 1 else r.bits(byte)
            for r in self.unpacked(value) for k in range(wide)
        ]  # fmt: skip

        def owner(number: int) -> tuple[int, int]:
            lane, inside = divmod(number, wide)
            thread, at = _source(lane, here)
            return thread, at * wide + inside

        registers = []
        for number in range(_count(type_)):
            parts = []
            for k in range(size):
                lanes = [number + thread * _count(type_) if type_.lanes >= GROUP else thread % type_.lanes
                         for thread in range(GROUP)]  # fmt: skip
                parts.append(self._pick(mine, [owner(lane * size + k) for lane in lanes]))
            whole = parts[0].zext(Type(f"i{8 * size}"))
            for k, part in enumerate(parts[1:], 1):
                whole = whole | (part.zext(whole.type) << (8 * k))
            registers.append(whole.bits(Type(type_.elem)))
        assert source.bytes == type_.bytes
        return self.packed(type_, registers)

    def _pick(self, registers: Sequence[Register], owners: Sequence[tuple[int, int]]) -> Register:
        """In each thread the register (by its number) of another thread. `owners`: (thread, number) for each."""
        made: Register | None = None
        for number in sorted({number for _, number in owners}):
            threads = [thread for thread, of in owners if of == number]
            sources = [thread if of == number else i for i, (thread, of) in enumerate(owners)]
            moved = registers[number]
            if sources != list(range(GROUP)):
                same = len(set(threads)) == 1 and len(threads) == GROUP
                moved = self.simt.shuffle(moved, threads[0] if same else self._by_lane(I32, sources), GROUP)
            if made is None:
                made = moved
            else:
                here = self._by_lane(I1, [int(of == number) for _, of in owners])
                made = self.simt.select(here, moved, made)
        assert made is not None
        return made

    def _by_lane(self, type_: Type, numbers: Sequence[Number]) -> Register:
        """A number for each thread of the group."""
        if len(set(numbers)) == 1:
            return self.simt.const(type_, numbers[0])
        if type_.elem == "i1":
            bits = sum(1 << i for i, number in enumerate(numbers) if number)
            return ((self.simt.i32(bits) >> self.lane_number) & 1).differs(0)
        if not type_.is_float and all(0 <= number < 16 for number in numbers):
            bits = _signed(sum(int(number) << (4 * i) for i, number in enumerate(numbers)))
            return ((self.simt.i32(bits) >> (self.lane_number << 2)) & 15).to(type_)
        return self._choose([self.simt.const(type_, number) for number in numbers])

    def _choose(self, registers: Sequence[Register]) -> Register:
        """Thread i's own of eight registers."""
        row = list(registers)
        for bit in range(3):
            odd = (self.lane_number & (1 << bit)).differs(0)
            row = [self.simt.select(odd, row[i + 1], row[i]) for i in range(0, len(row), 2)]
        return row[0]

    # --- values ------------------------------------------------------------------------------------------------------
    def const(self, type_: Type, number: Number | Sequence[Number]) -> Value:
        if type_.lanes == 1 or not isinstance(number, Sequence):
            one = number[0] if isinstance(number, Sequence) else number
            each = _per_word(type_)
            if each > 1:
                width = 32 // each
                cell = int(one) & ((1 << width) - 1)
                word = self.simt.i32(_signed(sum(cell << (width * k) for k in range(each))))
                return self.value(type_, [word] * (_count(type_) // each))
            return self.value(type_, [self.simt.const(Type(type_.elem), one)] * _count(type_))
        elem, count = Type(type_.elem), _count(type_)
        lanes = [[number[(i * count + k) % type_.lanes] for i in range(GROUP)] for k in range(count)]
        return self.packed(type_, [self._by_lane(elem, of_threads) for of_threads in lanes])

    def opaque(self, value: Value) -> Value:
        return value

    def var(self, initial: Value) -> Var:
        return LaneVar(self, initial)

    def scratch(self, n_bytes: int) -> Value:
        at = self.stack_bytes
        self.stack_bytes += -(-n_bytes // 64) * 64
        return self.value(I64, [self._stack + at])

    # --- memory ------------------------------------------------------------------------------------------------------
    def _own(self, type_: Type, address: Value) -> Register:
        """The address of this thread's first lane."""
        first: Register = address.ir[0]
        if type_.lanes == 1:
            return first
        step = _count(type_) * Type(type_.elem).bytes
        number = self.lane_number if type_.lanes >= GROUP else self.lane_number & (type_.lanes - 1)
        return first + (number * step).to(first.type)

    def _word(self, address: Register) -> Register:
        """The 32-bit word at an address that is aligned to 2 bytes."""
        return self.simt.load(I32, address, _ALIGN["i32"])

    def load(self, type_: Type, address: Value, align: int = 0) -> Value:
        if self._stored:
            self._wait()
        self._loaded = True
        elem, at, count = Type(type_.elem), self._own(type_, address), _count(type_)
        if elem.bytes == 4 and count in (2, 4) and align >= 4 * count:
            return self.value(type_, [word.bits(elem) for word in self.simt.load_words(at, count)])
        step = min(align or _ALIGN[elem.elem], elem.bytes)
        return self.packed(type_, [self.simt.load(elem, at + k * elem.bytes, step) for k in range(count)])

    def store(self, address: Value, value: Value, align: int = 0) -> None:
        if self._loaded:
            self._wait()
        self._stored = True
        elem, at = Type(value.type.elem), self._own(value.type, address)
        for k, register in enumerate(self.unpacked(value)):
            self.simt.store(at + k * elem.bytes, register, min(align or _ALIGN[elem.elem], elem.bytes))

    def _wait(self) -> None:
        if not self._apart:
            self.simt.sync(GROUP)
        self._stored = self._loaded = False

    def _unknown(self) -> None:
        """Code before or after here, in loops also the code below, may have loaded and stored."""
        self._stored = self._loaded = True

    def gather(self, elem: Type, addresses: Sequence[Value], align: int = 0) -> Value:
        if self._stored:
            self._wait()
        self._loaded = True
        type_ = Type(elem.elem, len(addresses))
        loaded = [
            self.simt.load(elem, register, min(align or _ALIGN[elem.elem], elem.bytes))
            for register in self._own_scalars(addresses)
        ]
        return self.packed(type_, loaded)

    def vector(self, scalars: Sequence[Value]) -> Value:
        return self.packed(Type(scalars[0].type.elem, len(scalars)), self._own_scalars(scalars))

    def _own_scalars(self, scalars: Sequence[Value]) -> list[Register]:
        """This thread's own of scalars that are the lanes of a vector."""
        n = len(scalars)
        count = max(1, n // GROUP)
        if n == 1:
            return [scalars[0].ir[0]]
        return [self._choose([scalars[(i * count + k) % n].ir[0] for i in range(GROUP)]) for k in range(count)]

    def table(self, name: str, numbers: bytes) -> Value:
        return self.value(I64, [self.simt.table(name, numbers)])

    def prefetch(self, address: Value, *, near: bool) -> None:
        """Nothing: other warps work while one waits for memory."""

    def fence(self) -> None:
        """Nothing: there are no prefetches to keep in place."""

    # --- functions ---------------------------------------------------------------------------------------------------
    def call(self, emit: Callable[..., None], *arguments: Any, **keywords: Any) -> None:
        """Emit the function here: each thread has its registers."""
        emit(self, *arguments, **keywords)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        return self.value(a.type, [self.simt.fma(*three) for three in zip(a.ir, b.ir, c.ir, strict=True)])

    def _unary(self, name: str, a: Value) -> Value:
        name = "abs" if name == "fabs" else name
        return self.value(a.type, [self.simt.function(name, register) for register in a.ir])

    def select(self, condition: Value, yes: Value, no: Value) -> Value:
        if condition.type.lanes == 1:
            (on,) = condition.ir
            return self.value(yes.type, [self.simt.select(on, a, b) for a, b in zip(yes.ir, no.ir, strict=True)])
        if isinstance(condition, ByteMask) and _per_word(yes.type) == 4:
            words = zip(condition.words, yes.ir, no.ir, strict=True)
            return self.value(yes.type, [(a & mask) | (b & (mask ^ -1)) for mask, a, b in words])
        three = zip(self.unpacked(condition), self.unpacked(yes), self.unpacked(no), strict=True)
        return self.packed(yes.type, [self.simt.select(*one) for one in three])

    def _count_bits(self, name: str, a: Value) -> Value:
        return self.value(I64, [self.simt.function(name, register) for register in a.ir])

    def count_ones(self, a: Value) -> Value:
        return self._count_bits("ctpop", a)

    def lowest_one(self, a: Value) -> Value:
        return self._count_bits("cttz", a)

    def highest_one(self, a: Value) -> Value:
        return 63 - self._count_bits("ctlz", a)

    def shuffle(self, a: Value, b: Value | None, lanes: Sequence[int]) -> Value:
        type_ = Type(a.type.elem, len(lanes))
        digits = {tuple(lane - first for lane in lanes[first : first + 4]) for first in range(0, len(lanes), 4)}
        if b is None and a.type == type_ == Type("i8", 4 * GROUP) and len(digits) == 1:
            (one,) = digits
            if all(0 <= digit < 4 for digit in one):  # bytes of the thread's own word
                (word,) = a.ir
                selector = sum(digit << (4 * k) for k, digit in enumerate(one))
                return self.value(type_, [self.simt.permute(word, word, selector)])
        registers = self.unpacked(a)
        if b is not None:
            registers = registers + self.unpacked(b)
        here = _count(a.type)

        def owner(lane: int) -> tuple[int, int]:
            second, inside = divmod(lane, a.type.lanes)
            thread, number = _source(inside, a.type)
            return thread, number + here * second

        made = []
        for k in range(_count(type_)):
            wanted = [lanes[(i * _count(type_) + k) % len(lanes)] for i in range(GROUP)]
            made.append(self._pick(registers, [owner(lane) for lane in wanted]))
        return self.packed(type_, made)

    def sum_lanes(self, v: Value) -> Value:
        (total,) = v.ir
        for distance in (4, 2, 1):
            total = total + self.simt.shuffle_xor(total, distance, GROUP)
        return self.value(Type(v.type.elem), [total])

    # --- control -----------------------------------------------------------------------------------------------------
    @contextmanager
    def range(self, start: Value | int, stop: Value | int, step: int | Value = 1) -> Iterator[Value]:
        first, last = (one.ir[0] if isinstance(one, Value) else self.simt.i64(one) for one in (start, stop))
        with self.simt.range(first, last, step.ir[0] if isinstance(step, Value) else step) as i:
            self._unknown()
            yield self.value(i.type, [i])
        self._unknown()

    @contextmanager
    def loop(self) -> Iterator[Any]:
        with self.simt.loop() as loop:
            self._unknown()
            yield loop
        self._unknown()

    def leave(self, loop: Any, condition: Value) -> None:
        self.simt.leave(loop, condition.ir[0])

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        with self.simt.when(condition.ir[0]):
            yield
        self._unknown()

    @contextmanager
    def singles(self, start: Value | int, stop: Value | int) -> Iterator[Value]:
        with self.apart(start, stop, self.lane_number, self.simt.i32(GROUP)) as i:
            yield i

    @contextmanager
    def apart(self, start: Value | int, stop: Value | int, thread: Register, threads: Register) -> Iterator[Value]:
        """A loop that is divided among so many threads, of which this is one."""
        first, last = (one.ir[0] if isinstance(one, Value) else self.simt.i64(one) for one in (start, stop))
        with self.no_exchange(), self.simt.range(first + thread.to(I64), last, threads.to(I64)) as i:
            yield self.value(I64, [i])

    @contextmanager
    def no_exchange(self) -> Iterator[None]:
        """Code in which no thread loads what another one stores: threads do not wait for each other."""
        if self._stored or self._loaded:
            self._wait()
        before, self._apart = self._apart, True
        yield
        self._apart = before
        self._unknown()

    @contextmanager
    def shares(self, work: Work, n: Value, share: Value) -> Iterator[Value]:
        """Divide n items among the groups of the launch; `share` is for threads that are preempted."""
        with self.range(work.thread, n, work.threads) as item:
            yield item


class GroupLowering(Lowering):
    """Integer dot products of a group of threads: four bytes in an instruction."""

    def dot(
        self, c: Code, sums: list[Value], weights: Iterable[Value], x: Sequence[Sequence[Value]], peak: int
    ) -> None:
        code = _lane_code(c)
        for w, addresses in zip(weights, x, strict=True):
            for j, address in enumerate(addresses):
                (operand,) = c.load(I32, address).ir
                pairs = zip(w.ir, sums[j].ir, strict=True)
                made = [code.simt.dot4(word, operand, total, signed=False) for word, total in pairs]
                sums[j] = code.value(sums[j].type, made)

    def dot_pairs(self, c: Code, pairs: Sequence[Value], x: Sequence[Sequence[Value]], j: int) -> Value:
        code = _lane_code(c)
        totals: list[Register] = []
        for pair, addresses in zip(pairs, x, strict=True):
            (operand,) = c.load(I32, addresses[j]).ir
            products = [_low(w) * _low(operand) + w.sar(16) * operand.sar(16) for w in pair.ir]
            totals = [t + p for t, p in zip(totals, products, strict=True)] if totals else products
        return code.value(I32._replace(lanes=GROUP * len(totals)), totals)

    def lookup(self, c: Code, table: Sequence[int], numbers: Value) -> Value:
        code = _lane_code(c)
        simt = code.simt
        quarters = [
            simt.i32(_signed(sum((v & 0xFF) << (8 * k) for k, v in enumerate(table[4 * q : 4 * q + 4]))))
            for q in range(4)
        ]
        made = []
        for word in numbers.ir:
            digits = word & 0x07070707
            digits = digits | (digits >> 4)  # two digits in the first byte, and two in the third
            selector = simt.permute(digits, digits, 0x0020)
            upper = ((word >> 3) & 0x01010101) * 0xFF
            low, high = (simt.permute(quarters[q], quarters[q + 1], selector) for q in (0, 2))
            made.append((low & (upper ^ -1)) | (high & upper))
        return code.value(numbers.type, made)


def _low(word: Register) -> Register:
    """The signed lower half of a word."""
    return (word << 16).sar(16)


def _lane_code(c: Code) -> LaneCode:
    assert isinstance(c, LaneCode)
    return c


GROUPS = GroupLowering("groups", columns=4, units=True)


def trace_of(kernel: Kernel, done: Callable[[LaneCode], None] | None = None) -> tuple[tuple[str, ...], Trace]:
    """Return the fields and the SIMT trace of a kernel of the SIMD language. `done` gets its code at the end."""

    def trace(simt: SimtCode, given: SimpleNamespace, **parameters: Any) -> None:
        code = LaneCode(simt, GROUPS, given.stack, given.stack_step)
        own = SimpleNamespace(**{name: code.value(I64, [getattr(given, name)]) for name in kernel.fields})
        kernel.trace(code, own, code.work, **parameters)
        if done is not None:
            done(code)

    return (*kernel.fields, *HIDDEN), trace
