"""Loading of machine code where little of the address space is left."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

FILL = """
import ctypes
from pathlib import Path

import llvmlite.binding as llvm

llvm.initialize_native_target()
llvm.initialize_native_asmprinter()
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_size_t
libc.mmap.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_size_t, ctypes.c_size_t]


def reserve(size):
    return libc.mmap(0, size, 0, 0x4022, -1, 0)  # MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE


def fill():
    '''Leave one page above 8 GiB that are in use, so that two sections of a page each lie more than 2 GiB apart.'''
    far = reserve(8 << 30)
    page = 0
    for size in (1 << 20, 1 << 16, 1 << 12):
        while (taken := reserve(size)) > far:
            page = taken
        libc.munmap(taken, size)
    assert page
    libc.munmap(page, 4096)

"""

PROGRAMS = {
    "the signal handler of mapped files": """
from llamado.devices.cpu import mapped

mapped._module()
fill()
mapped._install()
assert mapped._engine is not None
""",
    "a kernel with constants": """
import sys

import numpy as np

from llamado.devices.cpu.jit import Jit
from llamado.devices.kernel import Kernel
from llamado.devices.simd import F32, I64, F32x8


def trace(c, a, work):
    number = c.load(I64, c.table("numbers", bytes(range(64))) + a.x % 8 * 8)
    c.store(a.x, c.const(F32x8, [0.1 * i for i in range(8)]) * number.to(F32).splat(8))


jit, kernel = Jit(folder=Path(sys.argv[1])), Kernel("constants", ("x",), trace)
found = np.zeros(8, np.float32)
fields, counters = np.array([found.ctypes.data], np.int64), np.zeros(8, np.int64)
jit.cache.write(symbol := jit.cache.symbol(kernel, {}), jit.compile(kernel, symbol, {}))
fill()
jit.function(kernel)(fields.ctypes.data, 0, 1, counters.ctypes.data, 8)
number = int.from_bytes(bytes(range(64))[found.ctypes.data % 8 * 8 :][:8], "little")
assert found.tobytes() == ((np.arange(8) * 0.1).astype(np.float32) * np.float32(number)).tobytes()
""",
    "a kernel that calls the C library": """
import sys

import numpy as np

from llamado.devices.cpu.jit import Jit
from llamado.devices.kernel import Kernel
from llamado.devices.simd import I32


def trace(c, a, work):
    c.store(a.x, c.intrinsic("getpid", I32, []))


jit, kernel = Jit(folder=Path(sys.argv[1])), Kernel("process", ("x",), trace)
found = np.zeros(1, np.int32)
fields, counters = np.array([found.ctypes.data], np.int64), np.zeros(8, np.int64)
jit.cache.write(symbol := jit.cache.symbol(kernel, {}), jit.compile(kernel, symbol, {}))
fill()
jit.function(kernel)(fields.ctypes.data, 0, 1, counters.ctypes.data, 8)

assert found[0] == libc.getpid()
""",
    "a CPU that converts no halves": """
from llamado.devices.cpu import jit
from llamado.devices.cpu.lowerings.host import processor

cpu, features = processor()
fill()
jit.Jit(folder=Path("none"), host=(cpu, features | {"f16c": False}))._new_segment().engine.finalize_object()
""",
}


@pytest.mark.skipif(platform.system() != "Linux" or sys.maxsize < 2**32, reason="fills the address space as Linux does")
@pytest.mark.parametrize("name", PROGRAMS)
def test_code_is_loaded_where_only_small_gaps_are_left(name: str, tmp_path: Path) -> None:
    """LLVM ends the process if sections of one object lie too far apart."""
    program = FILL + PROGRAMS[name]
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
