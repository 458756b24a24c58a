"""PTX for NVIDIA's driver, through LLVM's NVPTX target.

PTX is a text that the driver compiles for its card. All that is NVIDIA's own is in this file: intrinsics, address
spaces, the few instructions that LLVM does not offer, and the launch bounds.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

from llvmlite import ir

from llamado.devices import control_flow
from llamado.devices.cuda.simt import I1, S32, WARP, Number, Register, SimtCode, Trace, Variable, arguments
from llamado.devices.simd import F32, I32, I64, Type
from llamado.errors import LlamadoError

TRIPLE = "nvptx64-nvidia-cuda"

_TYPES: dict[str, Any] = {
    **{f"i{bits}": ir.IntType(bits) for bits in (1, 8, 16, 32, 64)},
    "f16": ir.HalfType(),
    "f32": ir.FloatType(),
    "f64": ir.DoubleType(),
    "s32": ir.IntType(32),
}
_GLOBAL, _SHARED = 1, 3
"""Address spaces of LLVM's NVPTX target."""

_ASYNCHRONOUS, _CHAINED = 80, 90
"""Least capability of asynchronous copies and large matrix products, and of chained launches."""

_NAMES = {"and": "and_", "or": "or_"}
"""Operations whose method of llvmlite's builder has another name."""


class PtxError(LlamadoError):
    """A kernel's PTX is not what it must be."""


class NvptxCode(SimtCode):
    """Writes LLVM IR for NVPTX.

    `capability` of the card: 75 for compute capability 7.5. Cards before 8.0 copy without asynchronous copies and
    multiply matrices in smaller pieces; those before 9.0 launch one kernel after the other.
    """

    def __init__(self, module: Any, function: Any, capability: int) -> None:
        self.module, self.function_ir, self._capability = module, function, capability
        function.calling_convention = "ptx_kernel"
        self._entry = function.append_basic_block("entry")
        self.llvm = ir.IRBuilder(function.append_basic_block("body"))
        self._shared = ir.GlobalVariable(module, ir.ArrayType(_TYPES["i8"], 0), "shared_memory", addrspace=_SHARED)
        self._shared.align, self._shared.linkage = 16, "external"

    def close(self) -> None:
        """End the kernel."""
        self.llvm.ret_void()
        ir.IRBuilder(self._entry).branch(self.function_ir.blocks[1])

    def _intrinsic(self, name: str, result: Any, values: Sequence[Any]) -> Any:
        given = [value.ref if isinstance(value, Register) else value for value in values]
        function = self.module.globals.get(name)
        if function is None:
            function = ir.Function(self.module, ir.FunctionType(result, [v.type for v in given]), name)
        return self.llvm.call(function, given)

    def _register(self, name: str, type_: Type, values: Sequence[Any]) -> Register:
        return Register(self, type_, self._intrinsic(name, _TYPES[type_.elem], values))

    def _instruction(self, text: str, constraints: str = "~{memory}", values: Sequence[Register] = ()) -> None:
        kind = ir.FunctionType(ir.VoidType(), [_TYPES[value.type.elem] for value in values])
        self.llvm.asm(kind, text, constraints, [value.ref for value in values], True)

    def _word(self, number: int) -> Any:
        return ir.Constant(_TYPES["i32"], number)

    # --- values ------------------------------------------------------------------------------------------------------
    def const(self, type_: Type, number: Number) -> Register:
        if type_ == F32:
            number = struct.unpack("<f", struct.pack("<f", number))[0]
        return Register(self, type_, ir.Constant(_TYPES[type_.elem], number))

    def binary(self, name: str, a: Register, b: Register) -> Register:
        return Register(self, a.type, getattr(self.llvm, _NAMES.get(name, name))(a.ref, b.ref))

    def negate(self, a: Register) -> Register:
        return Register(self, a.type, self.llvm.fneg(a.ref) if a.type.is_float else self.llvm.neg(a.ref))

    def compare(self, op: str, a: Register, b: Register) -> Register:
        compare = self.llvm.fcmp_ordered if a.type.is_float else self.llvm.icmp_signed
        return Register(self, I1, compare(op, a.ref, b.ref))

    def select(self, condition: Register, yes: Register, no: Register) -> Register:
        return Register(self, yes.type, self.llvm.select(condition.ref, yes.ref, no.ref))

    def convert(self, v: Register, type_: Type, *, unsigned: bool = False) -> Register:
        here, builder, to = v.type, self.llvm, _TYPES[type_.elem]
        if here == type_ or {here, type_} == {S32, I32}:
            return Register(self, type_, v.ref)
        if here.is_float and type_.is_float:
            made = (builder.fpext if type_.bytes > here.bytes else builder.fptrunc)(v.ref, to)
        elif here.is_float:
            made = builder.fptosi(v.ref, to)
        elif type_.is_float:
            made = builder.sitofp(v.ref, to)
        elif _bits(type_) > _bits(here):
            made = (builder.zext if unsigned else builder.sext)(v.ref, to)
        else:
            made = builder.trunc(v.ref, to)
        return Register(self, type_, made)

    def bitcast(self, v: Register, type_: Type) -> Register:
        return Register(self, type_, self.llvm.bitcast(v.ref, _TYPES[type_.elem]))

    def fma(self, a: Register, b: Register, c: Register) -> Register:
        return self._register(f"llvm.fma.{a.type.elem}", a.type, [a, b, c])

    def function(self, name: str, a: Register) -> Register:
        intrinsic = f"llvm.{'fabs' if name == 'abs' else name}.{a.type.elem}"
        counts_zeros = name in ("cttz", "ctlz")
        return self._register(intrinsic, a.type, [a, *([ir.Constant(_TYPES["i1"], 0)] if counts_zeros else [])])

    def permute(self, a: Register, b: Register, selector: Register | int) -> Register:
        return self._register(
            "llvm.nvvm.prmt", I32, [a, b, selector if isinstance(selector, Register) else self._word(selector)]
        )

    def funnel(self, low: Register, high: Register, bits: Register) -> Register:
        return self._register("llvm.fshr.i32", I32, [high, low, bits])

    def dot4(self, a: Register, b: Register, total: Register, *, signed: bool) -> Register:
        return self._register(f"llvm.nvvm.idp4a.{'s' if signed else 'u'}.s", I32, [a, b, total])

    # --- memory ------------------------------------------------------------------------------------------------------
    def _pointer(self, address: Register) -> Any:
        space = _SHARED if address.type == S32 else _GLOBAL
        return self.llvm.inttoptr(address.ref, ir.PointerType(addrspace=space))

    def load(self, type_: Type, address: Register, align: int = 0) -> Register:
        loaded = self.llvm.load(self._pointer(address), align=align or type_.bytes, typ=_TYPES[type_.elem])
        return Register(self, type_, loaded)

    def load_words(self, address: Register, n: int) -> list[Register]:
        words = self.llvm.load(self._pointer(address), align=4 * n, typ=ir.VectorType(_TYPES["i32"], n))
        return [self._opaque(self.llvm.extract_element(words, self._word(i))) for i in range(n)]

    def _opaque(self, word: Any) -> Register:
        """Hide the origin of a word: LLVM would join branches that use different words of a vector by a variable index,
        for which the vector has to lie in memory.
        """
        kind = ir.FunctionType(_TYPES["i32"], [_TYPES["i32"]])
        return Register(self, I32, self.llvm.asm(kind, "mov.b32 $0, $1;", "=r,r", [word], False))

    def store(self, address: Register, value: Register, align: int = 0) -> None:
        self.llvm.store(value.ref, self._pointer(address), align=align or value.type.bytes)

    def store_words(self, address: Register, words: Sequence[Register]) -> None:
        vector = ir.Constant(ir.VectorType(_TYPES["i32"], len(words)), ir.Undefined)
        for i, word in enumerate(words):
            vector = self.llvm.insert_element(vector, word.ref, self._word(i))
        self.llvm.store(vector, self._pointer(address), align=4 * len(words))

    def atomic_add(self, address: Register, amount: Register) -> Register:
        return Register(self, amount.type, self.llvm.atomic_rmw("add", self._pointer(address), amount.ref, "monotonic"))

    def shared(self) -> Register:
        return Register(self, S32, self.llvm.ptrtoint(self._shared, _TYPES["i32"]))

    def table(self, name: str, numbers: bytes) -> Register:
        found = self.module.globals.get(name)
        if found is None:
            kind = ir.ArrayType(_TYPES["i8"], len(numbers))
            found = ir.GlobalVariable(self.module, kind, name, addrspace=_GLOBAL)
            found.initializer = ir.Constant(kind, bytearray(numbers))
            found.global_constant, found.linkage, found.align = True, "internal", 64
        return Register(self, I64, self.llvm.ptrtoint(found, _TYPES["i64"]))

    def copy16(self, to: Register, source: Register) -> None:
        if self._capability < _ASYNCHRONOUS:
            words = ir.VectorType(_TYPES["i32"], 4)
            self.llvm.store(self.llvm.load(self._pointer(source), align=16, typ=words), self._pointer(to), align=16)
            return
        # LLVM 20 has an intrinsic, but no pattern for it with short pointers
        self._instruction("cp.async.cg.shared.global [$0], [$1], 16;", "r,l,~{memory}", [to, source])

    def prefetch(self, address: Register) -> None:
        self._instruction("prefetch.global.L2 [$0];", "l", [address])

    def commit(self) -> None:
        if self._capability >= _ASYNCHRONOUS:
            self._intrinsic("llvm.nvvm.cp.async.commit.group", ir.VoidType(), [])

    def wait(self, left: int) -> None:
        if self._capability >= _ASYNCHRONOUS:
            self._intrinsic("llvm.nvvm.cp.async.wait.group", ir.VoidType(), [self._word(left)])

    # --- threads -----------------------------------------------------------------------------------------------------
    def thread(self) -> Register:
        return self._register("llvm.nvvm.read.ptx.sreg.tid.x", I32, [])

    def threads(self) -> Register:
        return self._register("llvm.nvvm.read.ptx.sreg.ntid.x", I32, [])

    def block(self, axis: str = "x") -> Register:
        return self._register(f"llvm.nvvm.read.ptx.sreg.ctaid.{axis}", I32, [])

    def blocks(self, axis: str = "x") -> Register:
        return self._register(f"llvm.nvvm.read.ptx.sreg.nctaid.{axis}", I32, [])

    def barrier(self) -> None:
        self._intrinsic("llvm.nvvm.barrier0", ir.VoidType(), [])

    def _members(self, width: int) -> Any:
        """The warp's threads that take part: bits of the `width` neighbors of this one."""
        if width == WARP:
            return self._word(-1)
        first = self.thread() & (WARP - width)
        return (self.i32((1 << width) - 1) << first).ref

    def sync(self, width: int = WARP) -> None:
        self._intrinsic("llvm.nvvm.bar.warp.sync", ir.VoidType(), [self._members(width)])

    def _shuffle(self, how: str, v: Register, lane: Register, width: int) -> Register:
        if v.type.bytes == 8:
            wide = v.bits(I64)
            low, high = (self._shuffle(how, half.to(I32), lane, width) for half in (wide, wide >> 32))
            return (low.zext(I64) | (high.zext(I64) << 32)).bits(v.type)
        word = v.bits(I32) if v.type.bytes == 4 else v.bits(Type(f"i{_bits(v.type)}")).zext(I32)
        clamp = self._word((WARP - width) << 8 | (WARP - 1))
        found = self._register(f"llvm.nvvm.shfl.sync.{how}.i32", I32, [self._members(width), word, lane, clamp])
        return found.bits(v.type) if v.type.bytes == 4 else found.to(Type(f"i{_bits(v.type)}")).bits(v.type)

    def shuffle(self, v: Register, lane: Register | int, width: int = WARP) -> Register:
        return self._shuffle("idx", v, lane if isinstance(lane, Register) else self.i32(lane), width)

    def shuffle_xor(self, v: Register, mask: int, width: int = WARP) -> Register:
        return self._shuffle("bfly", v, self.i32(mask), width)

    def let_next_begin(self) -> None:
        if self._capability >= _CHAINED:
            self._instruction("griddepcontrol.launch_dependents;")

    def wait_for_last(self) -> None:
        if self._capability >= _CHAINED:
            self._instruction("griddepcontrol.wait;")

    def mma(self, a: Sequence[Register], b: Sequence[Register], c: Sequence[Register]) -> list[Register]:
        if self._capability < _ASYNCHRONOUS:  # eight rows and 16 numbers at a time, with the same fragments
            halves = [c[0:2], c[2:4]]
            for k, columns in enumerate(b):
                halves = [self._small_mma(a[2 * k + i], columns, half) for i, half in enumerate(halves)]
            return [*halves[0], *halves[1]]
        k = 32 if len(a) == 4 else 16
        four = ir.LiteralStructType([_TYPES["i32"]] * 4)
        made = self._intrinsic(f"llvm.nvvm.mma.m16n8k{k}.row.col.s8", four, [*a, *b, *c])
        return [Register(self, I32, self.llvm.extract_value(made, i)) for i in range(4)]

    def _small_mma(self, a: Register, b: Register, c: Sequence[Register]) -> list[Register]:
        two = ir.LiteralStructType([_TYPES["i32"]] * 2)
        made = self._intrinsic("llvm.nvvm.mma.m8n8k16.row.col.s8", two, [a, b, *c])
        return [Register(self, I32, self.llvm.extract_value(made, i)) for i in range(2)]

    def load_matrices(self, address: Register) -> list[Register]:
        four = ir.LiteralStructType([_TYPES["i32"]] * 4)
        made = self._intrinsic("llvm.nvvm.ldmatrix.sync.aligned.m8n8.x4.b16.p3", four, [self._pointer(address)])
        return [Register(self, I32, self.llvm.extract_value(made, i)) for i in range(4)]

    # --- control -----------------------------------------------------------------------------------------------------
    def var(self, initial: Register) -> Variable:
        slot = ir.IRBuilder(self._entry).alloca(_TYPES[initial.type.elem])
        return _Slot(self, slot, initial)

    @contextmanager
    def range(self, start: Register | int, stop: Register | int, step: int | Register = 1) -> Iterator[Register]:
        kind = next((v.type for v in (start, stop) if isinstance(v, Register)), I32)
        first = start if isinstance(start, Register) else self.const(kind, start)
        last = stop if isinstance(stop, Register) else self.const(kind, stop)
        counter = self.var(first)
        with control_flow.repeated_while(self.llvm, lambda: (counter.value < last).ref):
            i = counter.value
            yield i
            counter.value = i + step

    def loop(self) -> AbstractContextManager[Any]:
        return control_flow.repeated(self.llvm)

    def leave(self, loop: Any, condition: Register) -> None:
        control_flow.leave(self.llvm, loop, condition.ref)

    def when(self, condition: Register) -> AbstractContextManager[None]:
        return control_flow.run_if(self.llvm, condition.ref)


class _Slot:
    """A variable: LLVM turns its stack slot into a register."""

    def __init__(self, code: NvptxCode, slot: Any, initial: Register) -> None:
        self._code, self._slot, self.type = code, slot, initial.type
        self.value = initial

    @property
    def value(self) -> Register:
        return Register(self._code, self.type, self._code.llvm.load(self._slot, typ=_TYPES[self.type.elem]))

    @value.setter
    def value(self, new: Register) -> None:
        self._code.llvm.store(new.ref, self._slot)


def _bits(type_: Type) -> int:
    return int(type_.elem[1:])


@dataclass(frozen=True)
class Architecture:
    """A kind of card. `capability`: 75 for compute capability 7.5. `ptx`: version of the PTX language, 80 for 8.0."""

    capability: int
    ptx: int = 78


def architecture(capability: int) -> Architecture:
    """Return the architecture for a card's compute capability, with the lowest version of PTX that has it."""
    newest = {75: 70, 80: 70, 86: 71, 87: 74, 89: 78, 90: 78, 100: 86, 103: 86, 120: 87, 121: 88}
    known = max((c for c in newest if c <= capability), default=75)
    return Architecture(known, max(70, newest[known]))


@cache
def _machine(architecture: Architecture) -> Any:
    import llvmlite.binding as llvm

    _short_pointers()
    arch = f"sm_{architecture.capability}"
    return llvm.Target.from_triple(TRIPLE).create_target_machine(cpu=arch, features=f"+ptx{architecture.ptx}", opt=3)


@cache
def _short_pointers() -> None:
    """Make addresses of shared memory 32 bits wide, as the hardware takes them."""
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    llvm.set_option("llamado", "--nvptx-short-ptr")


def ptx(
    trace: Trace, fields: Sequence[str], parameters: dict[str, Any], symbol: str, threads: int,
    architecture: Architecture, blocks: int = 1,
) -> str:  # fmt: skip
    """Return the PTX of a kernel for blocks of `threads`, of which a processor must have room for `blocks`.

    Raises `PtxError` if it spills registers to memory before the driver has seen it, or has float operations that the
    driver's compiler could contract.
    """
    import llvmlite.binding as llvm

    machine = _machine(architecture)
    module = ir.Module(symbol)
    kind = ir.FunctionType(ir.VoidType(), [_TYPES["i64"]] * len(fields))
    code = NvptxCode(module, ir.Function(module, kind, symbol), architecture.capability)
    given: SimpleNamespace = arguments(fields, [Register(code, I64, a) for a in code.function_ir.args])
    trace(code, given, **parameters)
    code.close()
    lines = [line for line in str(module).splitlines() if not line.startswith("target ")]
    header = [f'target triple = "{TRIPLE}"', f'target datalayout = "{machine.target_data}"']
    parsed = llvm.parse_assembly("\n".join([*header, *lines]))
    parsed.verify()
    tuning = llvm.create_pipeline_tuning_options(speed_level=3)
    tuning.loop_vectorization = tuning.slp_vectorization = tuning.loop_unrolling = tuning.loop_interleaving = False
    builder = llvm.create_pass_builder(machine, tuning)
    builder.getModulePassManager().run(parsed, builder)
    text = str(machine.emit_assembly(parsed))
    _check(text, symbol)
    return text.replace("\n)\n{", f"\n)\n.maxntid {threads}, 1, 1\n.minnctapersm {blocks}\n{{", 1)


_LOOSE = frozenset(f"{op}.{kind}" for op in ("mul", "add", "sub", "mad", "fma") for kind in ("f32", "f64", "f16"))
"""Float operations without a rounding mode, which the driver's compiler may contract."""


def _check(text: str, symbol: str) -> None:
    if ".local" in text:
        raise PtxError(f"{symbol}: values lie in local memory, which would be slow")
    for line in text.splitlines():
        word = line.split(maxsplit=1)[0] if line.strip() else ""
        if word in _LOOSE or ".ftz" in word or ".approx" in word:
            raise PtxError(f"{symbol}: {line.strip()} may not round as IEEE 754 demands")
