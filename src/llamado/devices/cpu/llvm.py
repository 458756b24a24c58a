"""LLVM as the compiler of kernels for the CPU, and as the loader of their code where `machine_code` has none."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import llvmlite.binding as llvm
from llvmlite import ir

from llamado.devices.cpu import f16_runtime
from llamado.devices.kernel import Kernel
from llamado.devices.lowering import Lowering
from llamado.devices.simd import I64, Code, Value, Work

SEGMENT_KERNELS = 64
"""Kernels that are unloaded together: a loader for each would take memory and time."""


class Target(NamedTuple):
    """A processor to compile for, in LLVM's words."""

    triple: str | None
    """None: this machine's."""
    cpu: str
    features: dict[str, bool]
    lacks_halves: bool
    """True if LLVM calls functions to convert halves."""


def initialize(triple: str | None = None) -> str:
    """Prepare LLVM for a target triple (default: this machine's), and return the triple."""
    if triple is None:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        llvm.initialize_native_asmparser()  # ARM's clock is read by inline assembly
    else:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
    return triple or str(llvm.get_process_triple())


class Compiler:
    """Compiles kernels for one target and lowering."""

    def __init__(self, target: Target, lowering: Lowering) -> None:
        self._target, self._lowering = target, lowering
        features = ",".join(f"{'+' if on else '-'}{name}" for name, on in sorted(target.features.items()))
        self._machine = llvm.Target.from_triple(initialize(target.triple)).create_target_machine(
            cpu=target.cpu, features=features, opt=3, reloc="pic", codemodel="small"
        )

    def module(self, kernel: Kernel, symbol: str, parameters: dict[str, Any]) -> Any:
        """Trace a kernel and return the optimized LLVM module."""
        module = ir.Module(kernel.name)
        i64 = ir.IntType(64)
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [i64] * 5), symbol)
        code = Code(module, function, self._lowering)
        fields, *work = (Value(code, I64, a) for a in function.args)
        arguments = SimpleNamespace(**{name: code.load(I64, fields + 8 * i) for i, name in enumerate(kernel.fields)})
        kernel.trace(code, arguments, Work(*work), **parameters)
        code.close()
        if self._target.lacks_halves:
            f16_runtime.add_to(module)
        parsed = llvm.parse_assembly(str(module))
        parsed.verify()
        tuning = llvm.create_pipeline_tuning_options(speed_level=3)
        # the vectors are written by hand; LLVM's own vectorizer and unroller would only bloat them
        tuning.loop_vectorization = tuning.slp_vectorization = tuning.loop_unrolling = tuning.loop_interleaving = False
        builder = llvm.create_pass_builder(self._machine, tuning)
        builder.getModulePassManager().run(parsed, builder)
        return parsed

    def object_file(self, module: Any) -> bytes:
        """Return the machine code of a module."""
        return bytes(self._machine.emit_object(module))

    def assembly(self, module: Any) -> str:
        """Return the machine code of a module as text, for reading."""
        return str(self._machine.emit_assembly(module))


class LoadedObjects:
    """Object files in memory, until this object is no longer referenced."""

    def __init__(self) -> None:
        target = llvm.Target.from_triple(initialize())
        machine = target.create_target_machine(opt=3, reloc="pic", codemodel="small")
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        self.count = 0

    def add(self, file: bytes, function: str) -> int:
        """Load an object file and return the address of one of its functions; 0 if it has no such function."""
        self.count += 1
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(file))
        self._engine.finalize_object()
        return int(self._engine.get_function_address(function))


def release_pages() -> None:
    """Release the pages of LLVM's code, most of which only starting and compiling need.

    They are unchanged pages of a file and are read again when needed.
    """
    folder = str(Path(llvm.__file__).resolve().parent)
    with suppress(OSError, AttributeError):  # not on Linux
        lines = Path("/proc/self/maps").read_text().splitlines()
        for begin, end in (line.split()[0].split("-") for line in lines if " r-xp " in line and folder in line):
            start, stop = int(begin, 16), int(end, 16)
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED)
