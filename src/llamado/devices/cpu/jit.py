"""Kernels to machine code: traces a kernel, compiles it with LLVM for this very CPU, keeps the object on disk.

The name of a cached object is a hash of the kernels' own sources (for a kernel from elsewhere its file's, too), the
operating system, the CPU, the lowering, LLVM's version and the kernel's parameters, so an edited kernel is compiled
anew and one cache folder serves many machines. Files are written whole or not at all; one that cannot be read, or that
somebody else may have written, is compiled again. What was not used for longest goes: on disk beyond `DISK_BYTES`, in
memory beyond `SEGMENTS`.
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
"""Most bytes of compiled kernels on disk; those of one model on one machine have about two million."""
SEGMENT_KERNELS = 64
"""Kernels that are loaded and let go together: making room for one at a time costs more than compiling some of them."""
SEGMENTS = 32
_LOOK_AFTER = 64
"""Kernels written before the folder is looked through for what is too much."""
_DAY = 24 * 3600.0


class JitError(LlamadoError):
    """A kernel could not be compiled or loaded."""


@dataclass(frozen=True)
class Kernel:
    """A kernel's name, its argument fields (each 8 bytes) and the function that writes its code.

    The machine function is `void kernel(fields*, thread, threads, counters*, step)`; see `Work`.
    """

    name: str
    fields: tuple[str, ...]
    trace: Trace

    def pack(self, values: Mapping[str, Any], address: Callable[[Any], int] = int) -> list[int]:
        """Argument values in field order as 64-bit integers: floats by the bits of their f32, places by `address`."""
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
    except OverflowError:  # finite, but not as f32
        return _F32.pack(math.copysign(math.inf, value))


def kernel(*fields: str) -> Callable[[Trace], Kernel]:
    """Makes a kernel of `trace(code, arguments, work, **parameters)`."""

    def wrap(trace: Trace) -> Kernel:
        return Kernel(trace.__name__, fields, trace)

    return wrap


_PACKAGE = Path(__file__).parents[2]
_HERE = "devices/cpu"
KERNEL_SOURCES = (
    *(f"{_HERE}/{name}" for name in ("jit.py", "simd.py", "lowerings", "kernels")),
    *("devices/drawing.py", "ggml/ops.py", "gguf/codebooks.py", "gguf/types.py"),
)
"""Files and folders of the package that decide what a kernel compiles to: all that kernels import."""


@cache
def _source_hash(*sources: str) -> bytes:
    """Hash of these files and of all in these folders of the package."""
    digest = hashlib.sha256()
    for source in sources:
        path = _PACKAGE / source
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    return digest.digest()


@cache
def _own_source(trace: Trace) -> bytes:
    """What decides what a kernel from elsewhere compiles to: its file, or its code where it was typed in; of those
    among `KERNEL_SOURCES` nothing.
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
    """Where compiled kernels are kept: `$LLAMADO_CACHE/kernels`, by default under the user's cache folder."""
    root = os.environ.get("LLAMADO_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "llamado") / "kernels"


class CodeSegment:
    """Machine code of some kernels, in memory for as long as somebody holds this."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.kernels: list[Any] = []  # their keys


class Loaded(NamedTuple):
    """A kernel that can be called: its code is at `address` for as long as its segment is held."""

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

        `triple`: LLVM's name of a machine of another kind, for which code can be read (`assembly`) and not run.
        """
        import llvmlite
        import llvmlite.binding as llvm

        if triple is None:
            llvm.initialize_native_target()
            llvm.initialize_native_asmprinter()
            llvm.initialize_native_asmparser()  # ARM's clock is read by an instruction that has no other name
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
        """Is asked before a kernel is made, or loaded from disk."""
        # threads of one system wait for each other by what another system does not have
        identity = [llvmlite.__version__, sys.platform, self._triple, self.cpu, self._features, self.lowering.name]
        self.numerics = f"{llvmlite.__version__} {_source_hash(*KERNEL_SOURCES, _HERE).hex()[:32]}"
        """What the bits of results depend on: what compiles the kernels, their sources, and what chooses among them.
        Processors and lowerings give the same ones.
        """
        self._identity = hashlib.sha256(_source_hash(*KERNEL_SOURCES) + "\0".join(identity).encode())
        self._loaded: dict[tuple[str, tuple[tuple[str, Any], ...]], Loaded] = {}
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

    def load(self, kernel: Kernel, **parameters: Any) -> Loaded:
        """A kernel made with these parameters: from memory, from disk, or compiled now. Raises NoKernelsLeft."""
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

    def rest(self) -> None:
        """Lets go of the pages of the compiler's code, most of which only starting and compiling need.

        They are the file's and unchanged: whatever runs again is read again.
        """
        folder = str(Path(self._llvm.__file__).resolve().parent)
        with suppress(OSError, AttributeError):  # of other systems
            lines = Path("/proc/self/maps").read_text().splitlines()
            for begin, end in (line.split()[0].split("-") for line in lines if " r-xp " in line and folder in line):
                start, stop = int(begin, 16), int(end, 16)
                ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED)

    def function(self, kernel: Kernel, **parameters: Any) -> Callable[[int, int, int, int, int], None]:
        """The kernel as a function that Python calls (without the GIL): fields address, thread, threads,
        counters address, bytes between counters.
        """
        loaded = self.load(kernel, **parameters)
        function: Any = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)(loaded.address)
        function.segment = loaded.segment
        return function  # type: ignore[no-any-return]

    def module(self, kernel: Kernel, symbol: str, parameters: dict[str, Any]) -> Any:
        """Traces a kernel; gives the optimised LLVM module."""
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
        # the vectors are written by hand; LLVM's own vectoriser and unroller would only bloat them
        tuning.loop_vectorization = tuning.slp_vectorization = tuning.loop_unrolling = tuning.loop_interleaving = False
        builder = self._llvm.create_pass_builder(self._machine, tuning)
        builder.getModulePassManager().run(parsed, builder)
        return parsed

    def compile(self, kernel: Kernel, symbol: str, parameters: dict[str, Any]) -> bytes:
        """Traces and compiles a kernel to an object file."""
        self.compiled += 1
        try:
            return bytes(self._machine.emit_object(self.module(kernel, symbol, parameters)))
        except RuntimeError as error:
            raise JitError(f"kernel {kernel.name} {parameters} did not compile for {self.cpu}: {error}") from error

    def assembly(self, kernel: Kernel, **parameters: Any) -> str:
        """The machine code of a kernel as text, for reading."""
        return str(self._machine.emit_assembly(self.module(kernel, kernel.name, parameters)))

    def _load(self, code: bytes, symbol: str) -> Loaded:
        segment = self._open
        if segment is None or len(segment.kernels) >= SEGMENT_KERNELS:
            segment = self._open = self._new_segment()
        segment.engine.add_object_file(self._llvm.ObjectFileRef.from_data(code))
        segment.engine.finalize_object()
        address = int(segment.engine.get_function_address(symbol))
        if not address:
            raise JitError(f"compiled kernel {symbol} cannot be loaded; delete {self.folder} and start again")
        self._segments.move_to_end(id(segment))
        return Loaded(address, segment)

    def _new_segment(self) -> CodeSegment:
        """An empty one; of too many the one not used for longest is let go, and is gone when no program holds it."""
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
        """Whether only this user can have put anything into the folder, which is made where there is none."""
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
                "compiled kernels in %s are not used and compiled anew: %s; delete it, or choose another folder with "
                "$LLAMADO_CACHE", path, reason,
            )  # fmt: skip

    def _warn_not_kept(self, error: OSError) -> None:
        """It costs only the next start its time, which is said once."""
        if not self._warned:
            self._warned = True
            log.warning(
                "compiled kernels cannot be kept in %s (%s): every start compiles them anew; name a folder that can be "
                "written with $LLAMADO_CACHE", self.folder, error.strerror,
            )  # fmt: skip

    def _read(self, path: Path) -> bytes | None:
        """A cached object; None where there is none, its check sum fails, or others may have written it."""
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
        """Keeps an object, where the folder can be written."""
        if not self._usable():
            return
        try:
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                try:
                    file.write(_MAGIC + hashlib.sha256(code).digest() + code)
                    file.flush()
                    os.replace(file.name, path)
                except OSError:  # a full disk: leave nothing behind
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
    """Deletes what was used longest ago until three quarters of the bound are left, where there is more than that."""
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
