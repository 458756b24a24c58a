"""The kernel compiler: traces a kernel, compiles it with LLVM for this CPU, and caches the object on disk.

The name of a cached object is a hash of the kernel sources (for a kernel defined elsewhere also its file), the
operating system, the CPU, the lowering, LLVM's version and the kernel's parameters. So an edited kernel is compiled
anew, and one cache folder serves many machines. Files are written atomically. A file that cannot be read, or that
another user may have written, is compiled again. The least recently used kernels are dropped: on disk beyond
`DISK_BYTES`, in memory beyond `SEGMENTS`.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import math
import mmap
import os
import platform
import struct
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any, NamedTuple

from llamado.devices.cpu.lowerings import choose
from llamado.devices.cpu.lowerings.host import processor
from llamado.devices.cpu.lowerings.lowering import Lowering
from llamado.devices.device import KernelQuota
from llamado.devices.owned import foreign
from llamado.errors import LlamadoError

log = logging.getLogger("llamado.devices")

Trace = Callable[..., None]

DISK_BYTES = 256 << 20
"""Most bytes of compiled kernels on disk; one model on one machine has about two million."""
SEGMENT_KERNELS = 64
"""Kernels that are loaded and unloaded together: making room for one at a time costs more than recompiling some of
them.
"""
SEGMENTS = 32
_LOOK_AFTER = 64
"""Kernels written between checks of the folder's size."""
_DAY = 24 * 3600.0


class JitError(LlamadoError):
    """A kernel could not be compiled or loaded."""


@dataclass(frozen=True)
class Kernel:
    """A kernel's name, its argument fields (8 bytes each) and the function that emits its code.

    The machine function is `void kernel(fields*, thread, threads, counters*, step)`; see `Work`.
    """

    name: str
    fields: tuple[str, ...]
    trace: Trace

    def pack(self, values: Mapping[str, Any], address: Callable[[Any], int] = int) -> list[int]:
        """Return argument values in field order as 64-bit integers: floats by the bits of their f32, places by
        `address`.
        """
        if len(values) != len(self.fields):
            raise ValueError(f"{self.name}: fields {sorted(set(self.fields) ^ values.keys())} missing or unknown")
        packed: list[int] = []
        for field in self.fields:
            value = values[field]
            kind = type(value)
            if kind is not int:
                value = _FLOAT.unpack(_f32(value))[0] if kind is float else address(value)
            packed.append(value)
        return packed


_F32, _FLOAT = struct.Struct("<f"), struct.Struct("<i")


def _f32(value: float) -> bytes:
    try:
        return _F32.pack(value)
    except OverflowError:  # finite, but too large for f32
        return _F32.pack(math.copysign(math.inf, value))


def kernel(*fields: str) -> Callable[[Trace], Kernel]:
    """Make a kernel of `trace(code, arguments, work, **parameters)`."""

    def wrap(trace: Trace) -> Kernel:
        return Kernel(trace.__name__, fields, trace)

    return wrap


_PACKAGE = Path(__file__).parents[2]
_CPU_FOLDER = "devices/cpu"
KERNEL_SOURCES = (
    *(f"{_CPU_FOLDER}/{name}" for name in ("jit.py", "simd.py", "lowerings", "kernels")),
    *("devices/drawing.py", "ggml/ops.py", "gguf/codebooks.py", "gguf/types.py"),
)
"""Files and folders of the package that all kernels import, and which decide what a kernel compiles to."""


@cache
def _source_hash(*sources: str) -> bytes:
    """Hash these files, and all files in these folders, of the package."""
    digest = hashlib.sha256()
    for source in sources:
        path = _PACKAGE / source
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    return digest.digest()


@cache
def _own_source(trace: Trace) -> bytes:
    """Return the source of a kernel defined elsewhere: its file, or its code if it was typed interactively. Return
    nothing for kernels in `KERNEL_SOURCES`.
    """
    assert isinstance(trace, FunctionType)
    path = Path(trace.__code__.co_filename)
    if any(path.is_relative_to(_PACKAGE / source) for source in KERNEL_SOURCES):
        return b""
    try:
        return path.read_bytes()
    except OSError:
        return _code_text(trace.__code__).encode()


def _code_text(code: CodeType) -> str:
    """A function's instructions, names and constants; the same in every process."""
    constants = [_code_text(one) if isinstance(one, CodeType) else repr(one) for one in code.co_consts]
    return repr((code.co_code, code.co_names, constants))


def cache_folder() -> Path:
    """Return the folder of compiled kernels: `$LLAMADO_CACHE/kernels`, by default under the user's cache folder."""
    root = os.environ.get("LLAMADO_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "llamado") / "kernels"


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
        import llvmlite
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
        self.folder = folder or cache_folder()
        self.compiled = 0
        self.quota: KernelQuota | None = None
        """Charged before a kernel is made, or loaded from disk."""
        # the system is part of the identity because threads wait with calls of the OS
        identity = [llvmlite.__version__, sys.platform, self._triple, self.cpu, self._features, self.lowering.name]
        self.numerics = f"{llvmlite.__version__} {_source_hash(*KERNEL_SOURCES, _CPU_FOLDER).hex()[:32]}"
        """Fingerprint of what the bits of results depend on: the compiler, the kernel sources, and the sources that
        choose among kernels. Processors and lowerings do not change the bits.
        """
        self._identity = hashlib.sha256(_source_hash(*KERNEL_SOURCES) + "\0".join(identity).encode())
        self._loaded: dict[tuple[str, tuple[tuple[str, Any], ...]], LoadedKernel] = {}
        self._segments: OrderedDict[int, CodeSegment] = OrderedDict()  # the one used last at the end
        self._open: CodeSegment | None = None
        self._folder_is_ours: bool | None = None
        self._warned = False
        self._written = 0
        self._machine = self._new_machine()
        self._first = ""
        if platform.machine() in ("x86_64", "AMD64") and not features.get("f16c"):
            from llamado.devices.cpu import f16_runtime

            self._first = str(f16_runtime.module())

    def _new_machine(self) -> Any:
        target = self._llvm.Target.from_triple(self._triple)
        return target.create_target_machine(
            cpu=self.cpu, features=self._features, opt=3, reloc="pic", codemodel="small"
        )

    def _path(self, kernel: Kernel, parameters: dict[str, Any]) -> Path:
        digest = self._identity.copy()
        digest.update(_own_source(kernel.trace))
        digest.update(repr((kernel.name, kernel.fields, sorted(parameters.items()))).encode())
        return self.folder / f"{kernel.name}-{digest.hexdigest()[:32]}.o"

    def load(self, kernel: Kernel, **parameters: Any) -> LoadedKernel:
        """Return a kernel with these parameters: from memory, from disk, or compiled now. Raises NoKernelsLeft."""
        key = (kernel.name, tuple(sorted(parameters.items())))
        found = self._loaded.get(key)
        if found is None:
            if self.quota is not None:
                self.quota.take()
            path = self._path(kernel, parameters)
            symbol = f"{kernel.name}_{path.stem[-32:]}"
            code = self._read(path)
            if code is None or symbol.encode() not in code:
                code = self.compile(kernel, symbol, parameters)
                self._write(path, code)
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

        from llamado.devices.cpu.simd import I64, Code, Value, Work

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
            return bytes(self._machine.emit_object(self.module(kernel, symbol, parameters)))
        except RuntimeError as error:
            raise JitError(f"kernel {kernel.name} {parameters} did not compile for {self.cpu}: {error}") from error

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
            raise JitError(f"compiled kernel {symbol} cannot be loaded; delete {self.folder} and start again")
        self._segments.move_to_end(id(segment))
        return LoadedKernel(address, segment)

    def _new_segment(self) -> CodeSegment:
        """Add an empty segment. If there are too many, drop the least recently used one, which lives on while a program
        holds it.
        """
        segment = CodeSegment(
            self._llvm.create_mcjit_compiler(self._llvm.parse_assembly(self._first), self._new_machine())
        )
        self._segments[id(segment)] = segment
        if len(self._segments) > SEGMENTS:
            _, oldest = self._segments.popitem(last=False)
            for key in oldest.kernels:
                del self._loaded[key]
        return segment

    # --- on disk ----------------------------------------------------------------------------------------------------
    def _usable(self) -> bool:
        """Return True if only this user can have written to the folder. Creates it if it does not exist."""
        if self._folder_is_ours is None:
            try:
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                reason = foreign(self.folder.stat())
            except OSError as error:
                self._folder_is_ours = False
                self._warn_not_kept(error)
            else:
                self._folder_is_ours = reason is None
                if reason is not None:
                    self._warn(self.folder, reason)
        return self._folder_is_ours

    def _warn(self, path: Path, reason: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "compiled kernels in %s: ignored and compiled anew, because %s; delete it, or set another folder with "
                "$LLAMADO_CACHE", path, reason,
            )  # fmt: skip

    def _warn_not_kept(self, error: OSError) -> None:
        """Warn once that every start has to compile the kernels again."""
        if not self._warned:
            self._warned = True
            log.warning(
                "compiled kernels cannot be kept in %s (%s): every start compiles them anew; name a folder that can be "
                "written with $LLAMADO_CACHE", self.folder, error.strerror,
            )  # fmt: skip

    def _read(self, path: Path) -> bytes | None:
        """Return a cached object; None if it does not exist, its checksum is wrong, or another user may have written
        it.
        """
        if not self._usable():
            return None
        try:
            with open(path, "rb", opener=lambda name, flags: os.open(name, flags | _NO_LINKS)) as file:
                status = os.fstat(file.fileno())
                if (reason := foreign(status)) is not None:
                    self._warn(path, reason)
                    return None
                data = file.read()
            if time.time() - status.st_mtime > _DAY:
                os.utime(path)  # it is in use
        except OSError:
            return None
        code = data[len(_MAGIC) + 32 :]
        return code if data[: len(_MAGIC) + 32] == _MAGIC + hashlib.sha256(code).digest() else None

    def _write(self, path: Path, code: bytes) -> None:
        """Store an object in the cache, if the folder is writable."""
        if not self._usable():
            return
        try:
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                try:
                    file.write(_MAGIC + hashlib.sha256(code).digest() + code)
                    file.flush()
                    os.replace(file.name, path)
                except OSError:  # a full disk: leave no partial file behind
                    os.unlink(file.name)
                    raise
            if self._written % _LOOK_AFTER == 0:
                _prune(self.folder)
            self._written += 1
        except OSError as error:
            self._warn_not_kept(error)


_MAGIC = b"llamado kernel 1"
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0)


def _prune(folder: Path) -> None:
    """Delete the least recently used objects down to three quarters of the limit, if the folder exceeds it."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            if entry.is_file(follow_symlinks=False):
                found.append((status.st_mtime, status.st_size, entry.path))
    size = sum(bytes_ for _, bytes_, _ in found)
    if size <= DISK_BYTES:
        return
    for _, bytes_, path in sorted(found):
        if size <= DISK_BYTES * 3 // 4:
            break
        os.unlink(path)
        size -= bytes_
