"""The SIMD language of the kernels: Python that emits LLVM IR.

A kernel is a Python function that runs once, when it is compiled. Its values (`Value`) stand for registers: arithmetic
on them appends instructions, an ordinary Python loop unrolls, and `Code.range` emits a loop. Vectors are 256 bits wide
(`F32x8`, `I32x8`, `I16x16`, `I8x32`). `LoweringInterface` has the operations that instruction sets do differently, and
`lowerings` implement it; everything else is plain LLVM vector arithmetic and runs anywhere.

No instruction carries a fast-math flag, and nothing is contracted or reordered: float operations run in the order
written here. Therefore results are equal to the bit on every lowering.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

from llvmlite import ir

from llamado.devices import control_flow


class Type(NamedTuple):
    """Element kind ("i8" … "f64", "i1") and number of lanes; one lane is a scalar."""

    elem: str
    lanes: int = 1

    @property
    def is_float(self) -> bool:
        return self.elem[0] == "f"

    @property
    def bytes(self) -> int:
        return max(1, int(self.elem[1:]) // 8) * self.lanes

    @property
    def llvm(self) -> Any:
        return _llvm_type(self)


@cache
def _llvm_type(type_: Type) -> Any:
    elem = _ELEMENTS[type_.elem]
    return elem if type_.lanes == 1 else ir.VectorType(elem, type_.lanes)


_ELEMENTS: dict[str, Any] = {
    **{f"i{bits}": ir.IntType(bits) for bits in (1, 8, 16, 32, 64)},
    "f16": ir.HalfType(),
    "f32": ir.FloatType(),
    "f64": ir.DoubleType(),
}
_POINTER = ir.PointerType()

I8, I16, I32, I64 = Type("i8"), Type("i16"), Type("i32"), Type("i64")
F16, F32, F64 = Type("f16"), Type("f32"), Type("f64")
I8x8, I8x32 = Type("i8", 8), Type("i8", 32)
I16x8, I16x16, I16x32 = Type("i16", 8), Type("i16", 16), Type("i16", 32)
I32x4, I32x8 = Type("i32", 4), Type("i32", 8)
F16x8, F32x8 = Type("f16", 8), Type("f32", 8)

Number = int | float


GROUP = 8
"""Threads of a group: they synchronize (control.py) and steal work within the group first."""

_Number = TypeVar("_Number", int, "Value")
_Arguments = ParamSpec("_Arguments")


def groups_of(threads: _Number) -> _Number:
    """Return the number of groups for so many threads."""
    return (threads + (GROUP - 1)) // GROUP


class Work(NamedTuple):
    """A kernel's view of its threads: its own number, the number of threads, and the address of their counters.

    Counters are i64, zero when the operation starts: one per thread, `step` bytes apart, followed by one per group of
    threads. The memory beside a counter belongs to other operations of the same thread.
    """

    thread: Value
    threads: Value
    counters: Value
    step: Value


class Value:
    """A register: the result of an instruction. Operators work lane by lane; integers are signed unless a name says
    otherwise.
    """

    __slots__ = ("code", "ir", "type")

    def __init__(self, code: Code, type_: Type, ir_value: Any) -> None:
        self.code, self.type, self.ir = code, type_, ir_value

    def _other(self, other: Value | Number) -> Any:
        return other.ir if isinstance(other, Value) else self.code.const(self.type, other).ir

    def _binary(self, other: Value | Number, integer: str, floating: str | None = None) -> Value:
        name = (floating or "") if self.type.is_float else integer
        return Value(self.code, self.type, getattr(self.code.llvm, name)(self.ir, self._other(other)))

    def __add__(self, other: Value | Number) -> Value:
        return self._binary(other, "add", "fadd")

    def __sub__(self, other: Value | Number) -> Value:
        return self._binary(other, "sub", "fsub")

    def __mul__(self, other: Value | Number) -> Value:
        return self._binary(other, "mul", "fmul")

    def __radd__(self, other: Number) -> Value:
        return self + other

    def __rmul__(self, other: Number) -> Value:
        return self * other

    def __rsub__(self, other: Number) -> Value:
        return self.code.const(self.type, other) - self

    def __truediv__(self, other: Value | Number) -> Value:
        return self._binary(other, "", "fdiv")

    def __floordiv__(self, other: Value | Number) -> Value:
        """Unsigned division of integers: addresses and counts."""
        return self._binary(other, "udiv")

    def __mod__(self, other: Value | Number) -> Value:
        """Unsigned remainder of integers."""
        return self._binary(other, "urem")

    def __and__(self, other: Value | Number) -> Value:
        return self._binary(other, "and_")

    def __or__(self, other: Value | Number) -> Value:
        return self._binary(other, "or_")

    def __xor__(self, other: Value | Number) -> Value:
        return self._binary(other, "xor")

    def __lshift__(self, other: Value | Number) -> Value:
        return self._binary(other, "shl")

    def __rshift__(self, other: Value | Number) -> Value:
        """Logical shift right; `sar` is the arithmetic one."""
        return self._binary(other, "lshr")

    def sar(self, other: Value | Number) -> Value:
        """Arithmetic shift right."""
        return self._binary(other, "ashr")

    def __neg__(self) -> Value:
        builder = self.code.llvm
        return Value(self.code, self.type, builder.fneg(self.ir) if self.type.is_float else builder.neg(self.ir))

    def _compare(self, op: str, other: Value | Number) -> Value:
        builder = self.code.llvm
        compare = builder.fcmp_ordered if self.type.is_float else builder.icmp_signed
        return Value(self.code, Type("i1", self.type.lanes), compare(op, self.ir, self._other(other)))

    def __lt__(self, other: Value | Number) -> Value:
        return self._compare("<", other)

    def __le__(self, other: Value | Number) -> Value:
        return self._compare("<=", other)

    def __gt__(self, other: Value | Number) -> Value:
        return self._compare(">", other)

    def __ge__(self, other: Value | Number) -> Value:
        return self._compare(">=", other)

    def equals(self, other: Value | Number) -> Value:
        """Lane-wise equality as i1 (Python's `==` compares objects)."""
        return self._compare("==", other)

    def differs(self, other: Value | Number) -> Value:
        """Lane-wise inequality as i1."""
        return self._compare("!=", other)

    # --- conversions ---------------------------------------------------------------------------------------------
    def bits(self, type_: Type) -> Value:
        """Reinterpret the bits as another type of the same size."""
        return self if type_ == self.type else Value(self.code, type_, self.code.llvm.bitcast(self.ir, type_.llvm))

    def as_lanes(self, elem: str) -> Value:
        """Reinterpret the bits as lanes of another element kind."""
        return self.bits(Type(elem, self.type.bytes // Type(elem).bytes))

    def cast(self, elem: str) -> Value:
        """Convert to another element kind, with the same number of lanes."""
        return self.to(self.type._replace(elem=elem))

    def to(self, type_: Type) -> Value:
        """Convert lane by lane: signed integer ↔ integer, integer ↔ float, float ↔ float (floats truncate to
        integers).
        """
        builder, here = self.code.llvm, self.type
        if type_ == here:
            return self
        if here.is_float and type_.is_float:
            made = (builder.fpext if type_.bytes > here.bytes else builder.fptrunc)(self.ir, type_.llvm)
        elif here.is_float:
            made = builder.fptosi(self.ir, type_.llvm)
        elif type_.is_float:
            made = builder.sitofp(self.ir, type_.llvm)
        else:
            wider = int(type_.elem[1:]) > int(here.elem[1:])
            made = (builder.sext if wider else builder.trunc)(self.ir, type_.llvm)
        return Value(self.code, type_, made)

    def zext(self, type_: Type) -> Value:
        """Zero-extend integers lane by lane."""
        return Value(self.code, type_, self.code.llvm.zext(self.ir, type_.llvm))

    def splat(self, lanes: int) -> Value:
        """A vector of `lanes` copies of this scalar."""
        type_ = Type(self.type.elem, lanes)
        builder, constant = self.code.llvm, self.code.llvm_constant
        empty = constant(type_, None)
        one = builder.insert_element(empty, self.ir, constant(I32, 0))
        return Value(self.code, type_, builder.shuffle_vector(one, empty, constant(I32, [0] * lanes)))

    def place(self) -> tuple[int, int]:
        """If this is a sum with constants, return (identity of the base value, constant offset)."""
        value, offset = self.ir, 0
        while isinstance(value, ir.Instruction) and value.opname == "add":
            left, right = value.operands
            if not isinstance(right, ir.Constant):
                break
            value, offset = left, offset + right.constant
        return id(value), offset

    def lane(self, index: int) -> Value:
        """One lane as a scalar."""
        element = self.code.llvm.extract_element(self.ir, self.code.llvm_constant(I32, index))
        return Value(self.code, Type(self.type.elem), element)


class Var:
    """A variable that loops may change (LLVM turns it into a register)."""

    __slots__ = ("_slot", "code", "type")

    def __init__(self, code: Code, initial: Value) -> None:
        self.code, self.type = code, initial.type
        self._slot = code.stack(initial.type.llvm)
        self.value = initial

    @property
    def value(self) -> Value:
        return Value(self.code, self.type, self.code.llvm.load(self._slot, typ=self.type.llvm))

    @value.setter
    def value(self, new: Value) -> None:
        self.code.llvm.store(new.ir, self._slot)


class Turn(NamedTuple):
    """An iteration of `Code.several`."""

    at: Value
    """Its index, which is valid even if it is none of the loop's: then the guard keeps its body from running."""
    guard: AbstractContextManager[None]


def _without_values(argument: Any, values: list[Value]) -> Any:
    """Append the values in an argument to `values`, and return the argument with their types in their places."""
    if isinstance(argument, Value):
        values.append(argument)
        return argument.type
    if isinstance(argument, tuple):
        return (type(argument), *(_without_values(one, values) for one in argument))
    return argument


def _with_values(argument: Any, values: Iterator[Value]) -> Any:
    """Return an argument with the next of `values` in the places of its own."""
    if isinstance(argument, Value):
        return next(values)
    if isinstance(argument, tuple):
        made = [_with_values(one, values) for one in argument]
        return type(argument)(*made) if hasattr(argument, "_fields") else tuple(made)
    return argument


class LoweringInterface(Protocol):
    """Operations that instruction sets implement differently: integer dot products, and the sizes that fit their
    registers.
    """

    @property
    def columns(self) -> int:
        """The widest group of columns that matmul kernels keep in registers."""

    @property
    def few(self) -> int:
        """Most columns for which rows of weights pass directly through registers."""

    @property
    def full_u8(self) -> bool:
        """True if unsigned weights may use all eight bits; otherwise such weights stay signed."""

    @property
    def signed(self) -> bool:
        """True if products take signed weights at no cost."""

    @property
    def run(self) -> int:
        """Bytes of a column of activations that are adjacent in a group of columns."""

    def arrange(self, c: Code, groups: Sequence[Value], columns: int) -> list[Value]:
        """Arrange an even number of groups of weights as `dot` takes them for that many columns."""

    def hold(self, c: Code, sums: Sequence[Value]) -> list[Value]:
        """Convert integer sums (I32x8, one for each column) to the layout that `dot` adds to."""

    def release(self, c: Code, held: Sequence[Value]) -> list[Value]:
        """Convert the result of `hold` back to one vector for each column."""

    def dot(
        self, c: Code, sums: list[Value], weights: Iterable[Value], x: Sequence[Sequence[Value]], peak: int
    ) -> None:
        """sums[j] (I32x8, held) += Σ_g groups of four of weights[g] (arranged) · x[g][j] (address of 4 signed bytes).

        Weights are unsigned bytes ≤ `peak`. They are signed if `peak` is greater than 127 without `full_u8`, and if
        products take `signed` ones.
        """

    def dot_scaled(
        self,
        c: Code,
        sums: list[Value],
        weights: Iterable[Value],
        x: Sequence[Sequence[Value]],
        scale: Value,
        peak: int,
    ) -> None:
        """sums[j] += scale · (the dot product of `dot`), `scale` as made by `scale`."""

    def dot_pairs(self, c: Code, pairs: Sequence[Value], x: Sequence[Sequence[Value]], j: int) -> Value:
        """Σ_p the sums of neighboring products of pairs[p] (I16x16) with the two i16 at x[p][j], as I32x8."""

    def scale(self, c: Code, value: Value) -> Value:
        """Prepare an I32x8 of small integers (−128 … 127) as the scale of `dot_scaled`."""

    def lookup(self, c: Code, table: Sequence[int], numbers: Value) -> Value:
        """table[number] for each byte of `numbers` (0 … 15)."""


class Code:
    """A kernel under construction: instructions are appended at the current position."""

    def __init__(self, module: Any, function: Any, lowering: LoweringInterface) -> None:
        self.module, self.function, self.lowering = module, function, lowering
        self._functions: dict[Any, Any] = {}
        """Functions of the module that `call` has made."""
        self._constants: dict[tuple[Type, str], Any] = {}
        self._entry = function.append_basic_block("entry")
        self.llvm = ir.IRBuilder(function.append_basic_block("body"))

    def close(self) -> None:
        """End the function (void)."""
        self.llvm.ret_void()
        ir.IRBuilder(self._entry).branch(self.function.blocks[1])

    def stack(self, llvm_type: Any, align: int = 0) -> Any:
        """Allocate a stack slot that lives as long as the call."""
        slot = ir.IRBuilder(self._entry).alloca(llvm_type)
        if align:
            slot.align = align
        return slot

    def scratch(self, n_bytes: int) -> Value:
        """Allocate `n_bytes` of stack memory, aligned to 64, and return the address."""
        slot = self.stack(ir.ArrayType(_ELEMENTS["i8"], n_bytes), 64)
        return Value(self, I64, self.llvm.ptrtoint(slot, _ELEMENTS["i64"]))

    # --- values --------------------------------------------------------------------------------------------------
    def llvm_constant(self, type_: Type, numbers: Number | Sequence[Number] | None) -> Any:
        """Return LLVM's constant of a number, of a vector of numbers or, with None, of anything.

        Kernels have the same constants thousands of times, and each takes longer to make than an instruction.
        """
        key = type_, repr(numbers)  # 0.0 equals -0.0
        found = self._constants.get(key)
        if found is None:
            kind, value = type_.llvm, numbers
            if isinstance(numbers, Sequence):  # it may have one element
                kind = ir.VectorType(_ELEMENTS[type_.elem], len(numbers))
                value = [self.llvm_constant(Type(type_.elem), number) for number in numbers]
            found = self._constants[key] = ir.Constant(kind, ir.Undefined if value is None else value)
        return found

    def const(self, type_: Type, number: Number | Sequence[Number]) -> Value:
        """A constant; one number is repeated in all lanes."""
        if type_.lanes > 1:
            number = list(number) if isinstance(number, Sequence) else [number] * type_.lanes
        return Value(self, type_, self.llvm_constant(type_, number))

    def i64(self, number: int) -> Value:
        return self.const(I64, number)

    def f32(self, number: float) -> Value:
        return self.const(F32, number)

    def opaque(self, value: Value) -> Value:
        """Hide the origin of a scalar from LLVM, so that it stays in a register."""
        kind = ir.FunctionType(value.type.llvm, [value.type.llvm])
        return Value(self, value.type, self.llvm.asm(kind, "", "=r,0", [value.ir], side_effect=False))

    def var(self, initial: Value) -> Var:
        return Var(self, initial)

    # --- memory --------------------------------------------------------------------------------------------------
    def pointer(self, address: Value) -> Any:
        """Convert an address to a pointer, as intrinsics take it."""
        return self.llvm.inttoptr(address.ir, _POINTER)

    def load(self, type_: Type, address: Value, align: int = 0) -> Value:
        """Load from any address. `align`: alignment that processors which need some may rely on (0: the element's)."""
        return Value(self, type_, self.llvm.load(self.pointer(address), align=1, typ=type_.llvm))

    def store(self, address: Value, value: Value, align: int = 0) -> None:
        """Store to any address. `align`: see `load`."""
        self.llvm.store(value.ir, self.pointer(address), align=1)

    def load_f16(self, address: Value) -> Value:
        """Load a half at `address` as f32."""
        return self.load(F16, address).to(F32)

    def splat_load(self, type_: Type, address: Value) -> Value:
        """Load the element at `address` into all lanes of a vector."""
        return self.load(Type(type_.elem), address).splat(type_.lanes)

    def gather(self, elem: Type, addresses: Sequence[Value], align: int = 0) -> Value:
        """Load one element from each address into a vector. `align`: see `load`."""
        return self.vector([self.load(elem, address) for address in addresses])

    def vector(self, scalars: Sequence[Value]) -> Value:
        """Combine scalars to a vector."""
        type_ = Type(scalars[0].type.elem, len(scalars))
        vector = self.llvm_constant(type_, None)
        for i, scalar in enumerate(scalars):
            vector = self.llvm.insert_element(vector, scalar.ir, self.llvm_constant(I32, i))
        return Value(self, type_, vector)

    def table(self, name: str, numbers: bytes) -> Value:
        """Return the address of constant bytes beside the kernel's code, aligned to 64, one copy per name."""
        known = self.module.globals.get(name)
        if known is None:
            type_ = ir.ArrayType(_ELEMENTS["i8"], len(numbers))
            known = ir.GlobalVariable(self.module, type_, name)
            known.initializer = ir.Constant(type_, bytearray(numbers))
            known.global_constant, known.linkage, known.align = True, "private", 64
        return Value(self, I64, known.ptrtoint(_ELEMENTS["i64"]))

    def prefetch(self, address: Value, *, near: bool) -> None:
        """Prefetch the cache line at `address` into L1 (near) or L2."""
        numbers = [self.llvm_constant(I32, number) for number in (0, 3 if near else 2, 1)]
        self.intrinsic("llvm.prefetch.p0", None, [self.pointer(address), *numbers])

    def fence(self) -> None:
        """Compiler barrier: LLVM moves no loads, stores and prefetches across it. The processor still may."""
        kind = ir.FunctionType(ir.VoidType(), [])
        self.llvm.asm(kind, "", "~{memory}", [], side_effect=True)

    def atomic_add(self, address: Value, amount: int) -> Value:
        """Add to the i64 at `address`, sequentially consistent; return the value before."""
        old = self.llvm.atomic_rmw("add", self.pointer(address), self.llvm_constant(I64, amount), "seq_cst")
        return Value(self, I64, old)

    def atomic_load(self, address: Value) -> Value:
        """Load the i64 at `address`, sequentially consistent."""
        return Value(self, I64, self.llvm.load_atomic(self.pointer(address), "seq_cst", 8, typ=_ELEMENTS["i64"]))

    def atomic_store(self, address: Value, value: Value) -> None:
        """Store an i64, sequentially consistent."""
        self.llvm.atomic_rmw("xchg", self.pointer(address), value.ir, "seq_cst")

    # --- functions -----------------------------------------------------------------------------------------------
    def intrinsic(self, name: str, result: Type | None, arguments: Sequence[Any]) -> Value:
        """Call an LLVM intrinsic or a C function by name."""
        values = [a.ir if isinstance(a, Value) else a for a in arguments]
        returns = ir.VoidType() if result is None else result.llvm
        function = self.module.globals.get(name)
        if function is None:
            function = ir.Function(self.module, ir.FunctionType(returns, [v.type for v in values]), name)
        return Value(self, result or I64, self.llvm.call(function, values))

    def clock(self) -> Value:
        """Read a counter that grows with time, the same for all threads: cycles, or the machine's equivalent."""
        if platform.machine() in ("aarch64", "arm64"):  # its cycle counter is reserved for the OS
            kind = ir.FunctionType(_ELEMENTS["i64"], [])
            return Value(self, I64, self.llvm.asm(kind, "mrs $0, cntvct_el0", "=r", [], True))
        return self.intrinsic("llvm.readcyclecounter", I64, [])

    def call_address(self, address: Value, arguments: Sequence[Value]) -> None:
        """Call the function at `address`: i64 arguments, no result."""
        kind = ir.FunctionType(ir.VoidType(), [a.type.llvm for a in arguments])
        self.llvm.call(self.llvm.inttoptr(address.ir, ir.PointerType(kind)), [a.ir for a in arguments])

    def call(
        self,
        emit: Callable[Concatenate[Code, _Arguments], None],
        *arguments: _Arguments.args,
        **keywords: _Arguments.kwargs,
    ) -> None:
        """Run `emit(code, *arguments, **keywords)` in a function of its own, which it calls here.

        LLVM's time grows faster than the length of a function, so long kernels compile sooner in parts. Values among
        the arguments, also those in tuples, are passed at run time. The rest is constant and must be hashable; calls
        with equal constants share the function.
        """
        values: list[Value] = []
        key = (emit, _without_values(arguments, values), _without_values(tuple(keywords.items()), values))
        function = self._functions.get(key)
        if function is None:
            kind = ir.FunctionType(ir.VoidType(), [value.type.llvm for value in values])
            function = ir.Function(self.module, kind, f"{emit.__name__}.{len(self._functions)}")
            function.linkage = "internal"
            function.attributes.add("noinline")
            self._functions[key] = function
            code = Code(self.module, function, self.lowering)
            code._functions, code._constants = self._functions, self._constants
            own = (Value(code, value.type, passed) for value, passed in zip(values, function.args, strict=True))
            emit(code, *_with_values(arguments, own), **dict(_with_values(tuple(keywords.items()), own)))
            code.close()
        self.llvm.call(function, [value.ir for value in values])

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a·b + c with one rounding."""
        suffix = a.type.elem if a.type.lanes == 1 else f"v{a.type.lanes}{a.type.elem}"
        return self.intrinsic(f"llvm.fma.{suffix}", a.type, [a, b, c])

    def _unary(self, name: str, a: Value) -> Value:
        suffix = a.type.elem if a.type.lanes == 1 else f"v{a.type.lanes}{a.type.elem}"
        return self.intrinsic(f"llvm.{name}.{suffix}", a.type, [a])

    def sqrt(self, a: Value) -> Value:
        return self._unary("sqrt", a)

    def abs(self, a: Value) -> Value:
        return self._unary("fabs", a)

    def round(self, a: Value) -> Value:
        """Round to the nearest integer, ties to even."""
        return self._unary("rint", a)

    def floor(self, a: Value) -> Value:
        return self._unary("floor", a)

    def max(self, a: Value, b: Value | Number) -> Value:
        """The greater lane; b if a is NaN."""
        other = b if isinstance(b, Value) else self.const(a.type, b)
        return self.select(a > other, a, other)

    def min(self, a: Value, b: Value | Number) -> Value:
        """The smaller lane; b if a is NaN."""
        other = b if isinstance(b, Value) else self.const(a.type, b)
        return self.select(a < other, a, other)

    def select(self, condition: Value, yes: Value, no: Value) -> Value:
        return Value(self, yes.type, self.llvm.select(condition.ir, yes.ir, no.ir))

    def count_ones(self, a: Value) -> Value:
        """Count the set bits of an i64."""
        return self.intrinsic("llvm.ctpop.i64", I64, [a])

    def lowest_one(self, a: Value) -> Value:
        """The number of the lowest set bit of an i64; 64 if none is set."""
        return self.intrinsic("llvm.cttz.i64", I64, [a, self.const(Type("i1"), 0)])

    def highest_one(self, a: Value) -> Value:
        """The number of the highest set bit of an i64; −1 if none is set."""
        return 63 - self.intrinsic("llvm.ctlz.i64", I64, [a, self.const(Type("i1"), 0)])

    # --- shuffles ------------------------------------------------------------------------------------------------
    def shuffle(self, a: Value, b: Value | None, lanes: Sequence[int]) -> Value:
        """Select lanes of a (0 … n−1) and b (n … 2n−1)."""
        other = self.llvm_constant(a.type, None) if b is None else b.ir
        mask = self.llvm_constant(I32, list(lanes))
        return Value(self, Type(a.type.elem, len(lanes)), self.llvm.shuffle_vector(a.ir, other, mask))

    def concat(self, a: Value, b: Value) -> Value:
        """Concatenate the lanes of a and b."""
        return self.shuffle(a, b, range(2 * a.type.lanes))

    def transpose8(self, rows: Sequence[Value]) -> list[Value]:
        """Transpose an 8 × 8 matrix of 4-byte cells held in eight vectors; or two such matrices in vectors of 16 lanes,
        or in sixteen vectors.
        """
        if len(rows) == 16:
            rows = [self.concat(rows[r], rows[r + 8]) for r in range(8)]
        low, high = (0, 8, 1, 9, 4, 12, 5, 13), (2, 10, 3, 11, 6, 14, 7, 15)
        pairs = [self._halves(rows[r], rows[r + 1], m) for r in (0, 2, 4, 6) for m in (low, high)]
        low2, high2 = (0, 1, 8, 9, 4, 5, 12, 13), (2, 3, 10, 11, 6, 7, 14, 15)
        quads = [self._halves(pairs[q], pairs[q + 2], m) for q in (0, 1, 4, 5) for m in (low2, high2)]
        front, back = (0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)
        return [self._halves(quads[i], quads[i + 4], m) for m in (front, back) for i in range(4)]

    def transpose16(self, rows: Sequence[Value]) -> list[Value]:
        """Transpose a 16 × 16 matrix of 4-byte cells: within quarters of registers first, then the quarters."""

        def quarters(a: Value, b: Value, lanes: Sequence[int]) -> Value:
            return self.shuffle(a, b, [i % 4 + 4 * q + 16 * (i // 4) for q in range(4) for i in lanes])

        pairs = [quarters(rows[r], rows[r + 1], m) for r in range(0, 16, 2) for m in ((0, 4, 1, 5), (2, 6, 3, 7))]
        fours = [
            [quarters(pairs[r + p], pairs[r + p + 2], m) for p in (0, 1) for m in ((0, 1, 4, 5), (2, 3, 6, 7))]
            for r in range(0, 16, 4)
        ]

        def half(a: Value, b: Value, odd: int) -> Value:
            """Quarters 0 and 2, or 1 and 3, of a and b."""
            first = 4 * odd
            return self.shuffle(a, b, [q + first + i for q in (0, 8, 16, 24) for i in range(4)])

        columns: list[list[Value]] = [[], [], [], []]
        for four in zip(*fours, strict=True):
            for odd in (0, 1):
                low, high = half(four[0], four[1], odd), half(four[2], four[3], odd)
                columns[odd].append(half(low, high, 0))
                columns[odd + 2].append(half(low, high, 1))
        return [column for quarter in columns for column in quarter]

    def _halves(self, a: Value, b: Value, lanes: Sequence[int]) -> Value:
        """Shuffle two vectors of eight lanes; for vectors of 16 lanes, do the same in either half."""
        n = a.type.lanes
        return self.shuffle(a, b, [i % 8 + 8 * half + i // 8 * n for half in range(n // 8) for i in lanes])

    def transpose8x4(self, rows: Sequence[Value]) -> list[Value]:
        """Transpose eight or sixteen rows of four 4-byte cells (I32x4) to four vectors, lane = row."""
        both = [self.concat(rows[r], rows[r + 4]) for r in range(4)]
        if len(rows) == 16:
            upper = [self.concat(rows[r], rows[r + 4]) for r in range(8, 12)]
            both = [self.concat(*halves) for halves in zip(both, upper, strict=True)]
        low, high = (0, 8, 1, 9, 4, 12, 5, 13), (2, 10, 3, 11, 6, 14, 7, 15)
        pairs = [self._halves(both[r], both[r + 1], m) for r in (0, 2) for m in (low, high)]
        low2, high2 = (0, 1, 8, 9, 4, 5, 12, 13), (2, 3, 10, 11, 6, 7, 14, 15)
        return [self._halves(pairs[i], pairs[i + 2], m) for i in (0, 1) for m in (low2, high2)]

    def sum_lanes8(self, vectors: Sequence[Value]) -> Value:
        """Reduce eight F32x8 to one whose lane i is the sum of vector i's lanes, added in one fixed tree. For vectors
        of 16 lanes, lanes 8 + i are the sums of the second halves.
        """
        fours = [
            self._summed(a, b, (0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15))
            for a, b in zip(vectors[:4], vectors[4:], strict=True)
        ]
        twos = [
            self._summed(a, b, (0, 1, 8, 9, 4, 5, 12, 13), (2, 3, 10, 11, 6, 7, 14, 15))
            for a, b in (fours[:2], fours[2:])
        ]
        return self._summed(twos[0], twos[1], (0, 2, 8, 10, 4, 6, 12, 14), (1, 3, 9, 11, 5, 7, 13, 15))

    def _summed(self, a: Value, b: Value, first: Sequence[int], second: Sequence[int]) -> Value:
        """Add lanes of two vectors in pairs."""
        return self._halves(a, b, first) + self._halves(a, b, second)

    def sum_lanes(self, v: Value) -> Value:
        """Sum eight lanes in the same tree as `sum_lanes8`."""
        half = self.shuffle(v, None, (0, 1, 2, 3)) + self.shuffle(v, None, (4, 5, 6, 7))
        pair = self.shuffle(half, None, (0, 1)) + self.shuffle(half, None, (2, 3))
        return pair.lane(0) + pair.lane(1)

    def max_lanes(self, v: Value) -> Value:
        """The greatest of eight or 16 lanes."""
        if v.type.lanes == 16:
            v = self.max(self.shuffle(v, None, range(8)), self.shuffle(v, None, range(8, 16)))
        half = self.max(self.shuffle(v, None, (0, 1, 2, 3)), self.shuffle(v, None, (4, 5, 6, 7)))
        pair = self.max(self.shuffle(half, None, (0, 1)), self.shuffle(half, None, (2, 3)))
        return self.max(pair.lane(0), pair.lane(1))

    # --- control -------------------------------------------------------------------------------------------------
    @contextmanager
    def range(self, start: Value | int, stop: Value | int, step: int = 1) -> Iterator[Value]:
        """Emit a loop: `with code.range(0, n) as i:`."""
        first = start if isinstance(start, Value) else self.i64(start)
        last = stop if isinstance(stop, Value) else self.i64(stop)
        counter = self.var(first)
        with control_flow.repeated_while(self.llvm, lambda: (counter.value < last).ir):
            i = counter.value
            yield i
            counter.value = i + step

    def loop(self) -> AbstractContextManager[Any]:
        """Emit an endless loop; `code.leave(loop, condition)` inside it ends it."""
        return control_flow.repeated(self.llvm)

    def leave(self, loop: Any, condition: Value) -> None:
        """Leave `loop` if the condition holds."""
        control_flow.leave(self.llvm, loop, condition.ir)

    def when(self, condition: Value) -> AbstractContextManager[None]:
        """Run the body if the (scalar) condition holds."""
        return control_flow.run_if(self.llvm, condition.ir)

    # --- teams -------------------------------------------------------------------------------------------------------
    # A device may have many threads for one item of work: a team. It runs the same code in all of its parts, except for
    # the loops below, which it divides. Here the team is one thread.
    fused = True
    """True if loops run in order, so that a loop may add up numbers while it stores them."""

    def each(self, start: Value | int, stop: Value | int, step: int = 1) -> AbstractContextManager[Value]:
        """A loop whose iterations are independent of each other. What they store is visible after `join`."""
        return self.range(start, stop, step)

    @contextmanager
    def several(self, start: Value | int, stop: Value | int, step: int) -> Iterator[list[Turn]]:
        """A loop like `each` that runs some iterations together. Load the numbers of all turns first, then run each
        `Turn.guard` and store. Each lane has memory of its own: no other one loads what it stores in this loop.
        """
        with self.range(start, stop, step) as i:
            yield [Turn(i, nullcontext())]

    def singles(self, start: Value | int, stop: Value | int) -> AbstractContextManager[Value]:
        """A loop like `each` that computes with scalars alone."""
        return self.range(start, stop)

    def in_order(
        self, start: Value, stop: Value, step: int, load: Callable[[Value], Value], use: Callable[[Value], None]
    ) -> None:
        """Use what `load` returns for each index, in order. Nothing is stored meanwhile."""
        with self.range(start, stop, step) as i:
            use(load(i))

    def join(self) -> None:
        """Wait for the whole team, and see what it stored."""

    def once(self, compute: Callable[[], Value]) -> Value:
        """Compute a scalar once for the whole team."""
        return compute()

    def greatest(self, eight: Value, one: Value) -> Value:
        """The greatest of eight lanes and another number, in the whole team. The sign of zero is undefined."""
        return self.max(self.max_lanes(eight), one)

    def announce(self, address: Value, n_bytes: Value) -> None:
        """Announce that the team will load bytes at an address, after it has waited for others."""

    def team_scratch(self, scratch: Value, step: Value, work: Work) -> Value:
        """Return the address of the team's own scratch memory, of `step` bytes; `scratch`: memory for all teams."""
        return scratch + work.thread * step

    @contextmanager
    def shares(self, work: Work, n: Value, share: Value) -> Iterator[Value]:
        """Divide n items among the threads; yields each item.

        Every thread has a contiguous range of its own and takes `share` items of it at a time, in order, which suits
        the memory system. A thread that is done helps its group, and then other groups, so that a preempted thread does
        not hold up the rest. With many threads, looking at the counters of all others would take longer than a small
        operation: so one word per group marks a group that is done.
        """
        own_group, groups = work.thread // GROUP, groups_of(work.threads)
        with self.range(0, groups) as turn:
            group = (own_group + turn) % groups
            through = work.counters + (work.threads + group) * work.step
            with self.when(self.atomic_load(through).equals(0)):
                begin = group * GROUP
                size = self.min(work.threads - begin, GROUP)
                with self.range(0, size) as k:
                    owner = begin + (work.thread + k) % size
                    last = n * (owner + 1) // work.threads
                    counter = work.counters + owner * work.step
                    offset = n * owner // work.threads
                    with self.loop() as loop:
                        # read before adding: an add to a finished counter would take its cache line from the others
                        self.leave(loop, offset + self.atomic_load(counter) >= last)
                        first = offset + self.atomic_add_value(counter, share)
                        self.leave(loop, first >= last)
                        with self.range(first, self.min(first + share, last)) as item:
                            yield item
                with self.when(self.atomic_load(through).equals(0)):
                    self.atomic_store(through, self.i64(1))

    def atomic_add_value(self, address: Value, amount: Value) -> Value:
        """`atomic_add` of an amount known only at run time."""
        return Value(self, I64, self.llvm.atomic_rmw("add", self.pointer(address), amount.ir, "seq_cst"))
