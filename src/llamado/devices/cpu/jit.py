"""The kernel compiler: traces a kernel, compiles it with LLVM for this CPU, and caches the object on disk.

A cached object depends on the operating system, the CPU, the lowering and LLVM's version; see `KernelCache`. The least
recently used kernels in memory are dropped beyond `SEGMENTS`.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import re
import sys
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from llamado.devices.cpu.lowerings import choose
from llamado.devices.cpu.lowerings.host import processor
from llamado.devices.device import KernelQuota
from llamado.devices.kernel import Kernel
from llamado.devices.kernel_cache import SHARED_SOURCES, KernelCache
from llamado.devices.lowering import Lowering
from llamado.errors import LlamadoError

SEGMENT_KERNELS = 64
"""Kernels that are loaded and unloaded together: making room for one at a time costs more than recompiling some of
them.
"""
SEGMENTS = 32


_CONSTANTS = re.compile(r"^\t\.section\t\.rodata.*$", re.M)
"""Directives of ELF assembly that begin a section of constants."""
_FRAMES = re.compile(r"^\t\.cfi_.*\n", re.M)
"""Directives about stack frames, which only debuggers and exceptions use."""
_CALLS = re.compile(r"^\t(call|jmp)q?\t(\w+)@PLT\b", re.M)
"""Instructions of x86-64 that call a function of the C library."""
_ESCAPED = '"\\\n\t'
"""Characters of assembly that a string of LLVM's language holds as numbers."""


class JitError(LlamadoError):
    """A kernel could not be compiled or loaded."""


KERNEL_SOURCES = (*SHARED_SOURCES, *(f"devices/cpu/{name}" for name in ("jit.py", "lowerings", "kernels")))
"""Files and folders of the package that all kernels import, and which decide what a kernel compiles to."""


class CodeSegment:
    """Machine code of some kernels, in memory as long as this object is referenced."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.kernels: list[Any] = []  # their keys


class LoadedKernel(NamedTuple):
    """A callable kernel. The code at `address` is valid as long as `segment` is referenced."""

    address: int
    segment: CodeSegment


class Jit:
    """Compiles and loads kernels for one lowering."""

    def __init__(
        self,
        lowering: Lowering | None = None,
        folder: Path | None = None,
        host: tuple[str, dict[str, bool]] | None = None,
        triple: str | None = None,
    ) -> None:
        """`host`: name and features of the CPU to compile for, as LLVM spells them (default: this machine's).

        `triple`: LLVM's target triple of another platform, whose code can be read (`assembly`) but not run.
        """
        import llvmlite.binding as llvm

        if triple is None:
            llvm.initialize_native_target()
            llvm.initialize_native_asmprinter()
            llvm.initialize_native_asmparser()  # ARM's clock is read by inline assembly
        else:
            llvm.initialize_all_targets()
            llvm.initialize_all_asmprinters()
        self._llvm, self._triple = llvm, triple or llvm.get_process_triple()
        try:
            cpu, features = host or processor()
            self.lowering = lowering or choose(features)
        except ValueError as error:
            raise JitError(str(error)) from error
        self.cpu: str = cpu
        used = self.lowering.features(features)
        self._features = ",".join(f"{'+' if on else '-'}{name}" for name, on in sorted(used.items()))
        self.compiled = 0
        self.quota: KernelQuota | None = None
        """Charged before a kernel is made, or loaded from disk."""
        # the system is part of the identity because threads wait with calls of the OS
        machine = [sys.platform, self._triple, self.cpu, self._features, self.lowering.name]
        self.cache = KernelCache(KERNEL_SOURCES, machine, folder)
        self._loaded: dict[tuple[str, tuple[tuple[str, Any], ...]], LoadedKernel] = {}
        self._segments: OrderedDict[int, CodeSegment] = OrderedDict()  # the one used last at the end
        self._open: CodeSegment | None = None
        self._machine = self._new_machine()
        self._f16_runtime = b""
        """Object file with the functions that LLVM calls to convert halves, for a CPU without instructions for it."""
        if platform.machine() in ("x86_64", "AMD64") and not features.get("f16c"):
            from llamado.devices.cpu import f16_runtime

            self._f16_runtime = self._emit(self._llvm.parse_assembly(str(f16_runtime.module())))

    def _new_machine(self) -> Any:
        target = self._llvm.Target.from_triple(self._triple)
        return target.create_target_machine(
            cpu=self.cpu, features=self._features, opt=3, reloc="pic", codemodel="small"
        )

    def load(self, kernel: Kernel, **parameters: Any) -> LoadedKernel:
        """Return a kernel with these parameters: from memory, from disk, or compiled now. Raises NoKernelsLeft."""
        key = (kernel.name, tuple(sorted(parameters.items())))
        found = self._loaded.get(key)
        if found is None:
            if self.quota is not None:
                self.quota.take()
            symbol = self.cache.symbol(kernel, parameters)
            code = self.cache.read(symbol)
            if code is None:
                code = self.compile(kernel, symbol, parameters)
                self.cache.write(symbol, code)
            found = self._loaded[key] = self._load(code, symbol)
            found.segment.kernels.append(key)
        else:
            self._segments.move_to_end(id(found.segment))
        return found

    def release_compiler_pages(self) -> None:
        """Release the pages of the compiler's code, most of which only starting and compiling need.

        They are unchanged pages of a file and are read again when needed.
        """
        folder = str(Path(self._llvm.__file__).resolve().parent)
        with suppress(OSError, AttributeError):  # not on Linux
            lines = Path("/proc/self/maps").read_text().splitlines()
            for begin, end in (line.split()[0].split("-") for line in lines if " r-xp " in line and folder in line):
                start, stop = int(begin, 16), int(end, 16)
                ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED)

    def function(self, kernel: Kernel, **parameters: Any) -> Callable[[int, int, int, int, int], None]:
        """Return the kernel as a function for Python, which releases the GIL. Arguments: address of the fields, thread,
        threads, address of the counters, bytes between counters.
        """
        loaded = self.load(kernel, **parameters)
        function: Any = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)(loaded.address)
        function.segment = loaded.segment
        return function  # type: ignore[no-any-return]

    def module(self, kernel: Kernel, symbol: str, parameters: dict[str, Any]) -> Any:
        """Trace a kernel and return the optimized LLVM module."""
        from llvmlite import ir

        from llamado.devices.simd import I64, Code, Value, Work

        module = ir.Module(kernel.name)
        i64 = ir.IntType(64)
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [i64] * 5), symbol)
        code = Code(module, function, self.lowering)
        fields, *work = (Value(code, I64, a) for a in function.args)
        arguments = SimpleNamespace(**{name: code.load(I64, fields + 8 * i) for i, name in enumerate(kernel.fields)})
        kernel.trace(code, arguments, Work(*work), **parameters)
        code.close()
        parsed = self._llvm.parse_assembly(str(module))
        parsed.verify()
        tuning = self._llvm.create_pipeline_tuning_options(speed_level=3)
        # the vectors are written by hand; LLVM's own vectorizer and unroller would only bloat them
        tuning.loop_vectorization = tuning.slp_vectorization = tuning.loop_unrolling = tuning.loop_interleaving = False
        builder = self._llvm.create_pass_builder(self._machine, tuning)
        builder.getModulePassManager().run(parsed, builder)
        return parsed

    def compile(self, kernel: Kernel, symbol: str, parameters: dict[str, Any]) -> bytes:
        """Trace and compile a kernel to an object file."""
        self.compiled += 1
        try:
            return self._emit(self.module(kernel, symbol, parameters))
        except RuntimeError as error:
            raise JitError(f"kernel {kernel.name} {parameters} did not compile for {self.cpu}: {error}") from error

    def _emit(self, module: Any) -> bytes:
        """Return the object file of a module, for Linux on x86-64 with all that is loaded in one section.

        Sections refer to each other by distances of 31 bits. LLVM's loader may put those of one object farther apart,
        and then ends the process: where large buffers and mapped files leave only small gaps near the sections before.
        It would also add a section with addresses of the C library's functions; they stand in the instructions instead.
        """
        if not re.match(r"x86_64-.*linux", self._triple):
            return bytes(self._machine.emit_object(module))
        text = _CONSTANTS.sub(".text", _FRAMES.sub("", str(self._machine.emit_assembly(module))))
        text = _CALLS.sub(r"\tmovabsq\t$\2, %r11\n\t\1q\t*%r11", text)
        escaped = "".join(f"\\{byte:02X}" if chr(byte) in _ESCAPED else chr(byte) for byte in text.encode())
        whole = self._llvm.parse_assembly(f'target triple = "{self._triple}"\nmodule asm "{escaped}"\n')
        return bytes(self._machine.emit_object(whole))

    def assembly(self, kernel: Kernel, **parameters: Any) -> str:
        """Return the machine code of a kernel as text, for reading."""
        return str(self._machine.emit_assembly(self.module(kernel, kernel.name, parameters)))

    def _load(self, code: bytes, symbol: str) -> LoadedKernel:
        segment = self._open
        if segment is None or len(segment.kernels) >= SEGMENT_KERNELS:
            segment = self._open = self._new_segment()
        segment.engine.add_object_file(self._llvm.ObjectFileRef.from_data(code))
        segment.engine.finalize_object()
        address = int(segment.engine.get_function_address(symbol))
        if not address:
            raise JitError(f"compiled kernel {symbol} cannot be loaded; delete {self.cache.folder} and start again")
        self._segments.move_to_end(id(segment))
        return LoadedKernel(address, segment)

    def _new_segment(self) -> CodeSegment:
        """Add an empty segment. If there are too many, drop the least recently used one, which lives on while a program
        holds it.
        """
        segment = CodeSegment(self._llvm.create_mcjit_compiler(self._llvm.parse_assembly(""), self._new_machine()))
        if self._f16_runtime:
            segment.engine.add_object_file(self._llvm.ObjectFileRef.from_data(self._f16_runtime))
        self._segments[id(segment)] = segment
        if len(self._segments) > SEGMENTS:
            _, oldest = self._segments.popitem(last=False)
            for key in oldest.kernels:
                del self._loaded[key]
        return segment
