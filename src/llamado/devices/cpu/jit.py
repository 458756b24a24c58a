"""Kernels as machine code for this CPU: loaded from memory or from the cache on disk, or compiled by LLVM.

Cached code depends on the operating system, the CPU, the lowering and LLVM's version; see `KernelCache`. The least
recently used kernels in memory are dropped beyond `MAX_KERNELS`. LLVM is imported by the first kernel that has to be
compiled, and on systems whose code only LLVM can load.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from llamado.devices.cpu import machine_code
from llamado.devices.cpu.lowerings import choose
from llamado.devices.cpu.lowerings.host import processor
from llamado.devices.cpu.machine_code import ExecutableMemory, MachineCode, MachineCodeError
from llamado.devices.device import KernelQuota
from llamado.devices.kernel import Kernel
from llamado.devices.kernel_cache import SHARED_SOURCES, KernelCache
from llamado.devices.lowering import Lowering
from llamado.errors import LlamadoError

if TYPE_CHECKING:
    from llamado.devices.cpu.llvm import Compiler, LoadedObjects

MAX_KERNELS = 2048
"""Most kernels in memory."""

KERNEL_SOURCES = (
    *SHARED_SOURCES,
    *(f"devices/cpu/{name}" for name in ("f16_runtime.py", "llvm.py", "machine_code.py", "lowerings", "kernels")),
)
"""Files and folders of the package that all kernels import, and which decide what a kernel compiles to."""


class JitError(LlamadoError):
    """A kernel could not be compiled or loaded."""


class LoadedKernel(NamedTuple):
    """A callable kernel."""

    address: int
    code: object
    """Keeps the code in memory as long as it is referenced."""


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
        try:
            self.cpu, features = host or processor()
            self.lowering = lowering or choose(features)
        except ValueError as error:
            raise JitError(str(error)) from error
        self._triple, self._features = triple, self.lowering.features(features)
        self._lacks_halves = platform.machine() in ("x86_64", "AMD64") and not features.get("f16c")
        self.compiled = 0
        self.quota: KernelQuota | None = None
        """Charged before a kernel is made, or loaded from disk."""
        used = ",".join(f"{'+' if on else '-'}{name}" for name, on in sorted(self._features.items()))
        # the system is part of the identity because threads wait with calls of the OS
        system = triple or f"{sys.platform} {platform.machine()}"
        self.cache = KernelCache(KERNEL_SOURCES, [system, self.cpu, used, self.lowering.name], folder)
        self._loaded: OrderedDict[tuple[str, tuple[tuple[str, Any], ...]], LoadedKernel] = OrderedDict()
        """The kernel used last is at the end."""
        self._objects: LoadedObjects | None = None

    def load(self, kernel: Kernel, **parameters: Any) -> LoadedKernel:
        """Return a kernel with these parameters: from memory, from disk, or compiled now. Raises NoKernelsLeft."""
        key = (kernel.name, tuple(sorted(parameters.items())))
        found = self._loaded.get(key)
        if found is not None:
            self._loaded.move_to_end(key)
            return found
        if self.quota is not None:
            self.quota.take()
        symbol = self.cache.symbol(kernel, parameters)
        code = self.cache.read(symbol)
        if code is None:
            code = self.compile(kernel, symbol, parameters)
            self.cache.write(symbol, code)
        found = self._loaded[key] = self._load(code, symbol)
        if len(self._loaded) > MAX_KERNELS:
            self._loaded.popitem(last=False)
        return found

    def release_compiler_pages(self) -> None:
        """Release the pages of the compiler's code, if it was needed; they are read again when it is needed again."""
        if "_compiler" in self.__dict__:
            from llamado.devices.cpu.llvm import release_pages

            release_pages()

    def function(self, kernel: Kernel, **parameters: Any) -> Callable[[int, int, int, int, int], None]:
        """Return the kernel as a function for Python, which releases the GIL. Arguments: address of the fields, thread,
        threads, address of the counters, bytes between counters.
        """
        loaded = self.load(kernel, **parameters)
        function: Any = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)(loaded.address)
        function.code = loaded.code
        return function  # type: ignore[no-any-return]

    @cached_property
    def _compiler(self) -> Compiler:
        from llamado.devices.cpu.llvm import Compiler, Target

        return Compiler(Target(self._triple, self.cpu, self._features, self._lacks_halves), self.lowering)

    def compile(self, kernel: Kernel, symbol: str, parameters: dict[str, Any]) -> bytes:
        """Trace and compile a kernel to the code that the cache keeps."""
        self.compiled += 1
        try:
            file = self._compiler.object_file(self._compiler.module(kernel, symbol, parameters))
            return machine_code.link(file).write() if machine_code.SUPPORTED else file
        except (RuntimeError, MachineCodeError) as error:
            raise JitError(f"kernel {kernel.name} {parameters} did not compile for {self.cpu}: {error}") from error

    def assembly(self, kernel: Kernel, **parameters: Any) -> str:
        """Return the machine code of a kernel as text, for reading."""
        return self._compiler.assembly(self._compiler.module(kernel, kernel.name, parameters))

    def _load(self, code: bytes, symbol: str) -> LoadedKernel:
        if machine_code.SUPPORTED:
            try:
                memory = ExecutableMemory(MachineCode.read(code))
            except MachineCodeError as error:
                raise JitError(f"compiled kernel {symbol} cannot be loaded: {error}") from error
            return LoadedKernel(memory.address(symbol), memory)
        from llamado.devices.cpu.llvm import SEGMENT_KERNELS, LoadedObjects

        if self._objects is None or self._objects.count >= SEGMENT_KERNELS:
            self._objects = LoadedObjects()
        address = self._objects.add(code, symbol)
        if not address:
            raise JitError(f"compiled kernel {symbol} cannot be loaded; delete {self.cache.folder} and start again")
        return LoadedKernel(address, self._objects)
