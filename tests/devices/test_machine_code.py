"""Linking and loading of machine code."""

from __future__ import annotations

import ctypes
import errno
import gc
import io
import os
import platform
import re
import struct
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from test_jit import double

from llamado.devices.cpu import llvm, machine_code
from llamado.devices.cpu.jit import Jit, JitError
from llamado.devices.cpu.kernels import control
from llamado.devices.cpu.lowerings import host
from llamado.devices.cpu.machine_code import ExecutableMemory, MachineCode, MachineCodeError, link
from llamado.devices.kernel import Kernel
from llamado.devices.simd import F32, I32, I64, Code, F32x8, Work

LINKED = pytest.mark.skipif(not machine_code.SUPPORTED, reason="LLVM loads the code of this machine")


def constants(c: Code, a: SimpleNamespace, work: Work) -> None:
    """Read two tables of constants at a position that is known at run time, and call a function of the C library."""
    number = c.load(I64, c.table("numbers", bytes(range(64))) + a.i * 8)
    values = c.const(F32x8, [0.1 * i for i in range(8)]) * number.to(F32).splat(8)
    c.store(a.to, values + c.intrinsic("getpid", I32, []).to(F32).splat(8))


CONSTANTS = Kernel("constants", ("i", "to"), constants)


def run(jit: Jit, i: int) -> np.ndarray:
    found, counters = np.zeros(8, np.float32), np.zeros(8, np.int64)
    fields = np.array([i, found.ctypes.data], np.int64)
    jit.function(CONSTANTS)(fields.ctypes.data, 0, 1, counters.ctypes.data, 8)
    return found


def expected(i: int) -> np.ndarray:
    (number,) = struct.unpack_from("<q", bytes(range(64)), 8 * i)
    return (np.arange(8) * 0.1).astype(np.float32) * np.float32(number) + np.float32(os.getpid())


@pytest.mark.parametrize("linked", [pytest.param(True, marks=LINKED), False])
def test_code_reaches_its_constants_and_the_c_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linked: bool
) -> None:
    monkeypatch.setattr(machine_code, "SUPPORTED", linked)
    jit = Jit(folder=tmp_path)
    for i in (0, 3, 7):
        assert run(jit, i).tobytes() == expected(i).tobytes()
    again = Jit(folder=tmp_path)
    assert run(again, 5).tobytes() == expected(5).tobytes() and again.compiled == 0


@LINKED
def test_linked_code_survives_being_stored(tmp_path: Path) -> None:
    jit = Jit(folder=tmp_path)
    for kernel in (CONSTANTS, control.dispatch):
        code = MachineCode.read(jit.compile(kernel, kernel.name, {}))
        assert [*code.functions] == [kernel.name] and MachineCode.read(code.write()) == code
        assert all(offset % 8 == 0 and offset + 8 <= len(code.data) for offset in code.imports.values())
    assert set(MachineCode.read(jit.compile(CONSTANTS, "constants", {})).imports) == {"getpid"}


def object_file(folder: Path) -> tuple[bytearray, range]:
    """Return an object file, and the places of its section headers."""
    jit = Jit(folder=folder)
    file = bytearray(jit._compiler.object_file(jit._compiler.module(CONSTANTS, "constants", {})))
    table, (entry, count) = struct.unpack_from("<Q", file, 40)[0], struct.unpack_from("<2H", file, 58)
    return file, range(table, table + entry * count, entry)


@LINKED
def test_writable_data_is_refused(tmp_path: Path) -> None:
    """All of the code is made executable, so nothing may be written to it."""
    file, headers = object_file(tmp_path)
    assert link(bytes(file))
    refused = 0
    for at in headers:
        changed = file.copy()
        changed[at + 8] |= 1  # SHF_WRITE
        try:
            link(bytes(changed))  # a section that is not loaded
        except MachineCodeError as error:
            assert re.fullmatch(r"section \.(text|rodata)\S* is not code or constants", str(error))
            refused += 1
    assert refused >= 2


@LINKED
def test_unknown_relocations_are_refused(tmp_path: Path) -> None:
    """Code linked by guessing would read or call something else."""
    file, headers = object_file(tmp_path)
    refused = 0
    for at in headers:
        kind, offset, size = *struct.unpack_from("<I", file, at + 4), *struct.unpack_from("<2Q", file, at + 24)
        for relocation in range(offset, offset + size, 24) if kind == 4 else ():
            changed = file.copy()
            struct.pack_into("<I", changed, relocation + 8, 10)  # R_X86_64_32: an address of four bytes
            try:
                link(bytes(changed))  # a frame's, which is not loaded
            except MachineCodeError as error:
                assert re.fullmatch(r"relocation 10 to (getpid|numbers|\.LC.*|a section) is not supported", str(error))
                refused += 1
    assert refused >= 3 and link(bytes(file))


@LINKED
def test_code_that_cannot_be_loaded_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MachineCodeError, match="C library has no function not_a_function"):
        ExecutableMemory(MachineCode(bytes(64), {}, {"not_a_function": 8}))

    def refuse(*_: object) -> int:
        ctypes.set_errno(errno.EACCES)
        return -1

    monkeypatch.setattr(machine_code, "_libc", lambda: SimpleNamespace(mprotect=refuse))
    with pytest.raises(JitError, match=r"cannot be loaded: the system refuses executable memory \(Permission denied\)"):
        double(Jit(folder=tmp_path))


def test_kernels_of_llvms_loader_are_unloaded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_code, "SUPPORTED", False)
    monkeypatch.setattr(llvm, "SEGMENT_KERNELS", 2)
    monkeypatch.setattr("llamado.devices.cpu.jit.MAX_KERNELS", 2)
    jit = Jit(folder=tmp_path)
    kernels = [control.dispatch, control.join, control.work, control.launch]
    loaded = [weakref.ref(jit.load(kernel).code) for kernel in kernels]
    gc.collect()
    assert loaded[0]() is None and loaded[1]() is None and loaded[2]() is loaded[3]() is not None
    double(jit)


WARM = """
import sys
from pathlib import Path

import numpy as np
from running import Case, new, values

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.cpu.mapped import watch
from llamado.ggml import graph as g

device = CpuDevice(2)
x, memory = new(64, 5), np.zeros(8, np.uint8)
watch(Path("model.gguf"), memory, "")
Case({"y": g.relu(g.rms_norm(x, 1e-5))}, {x: values(64, 5)}).run(device)
print(device.jit.compiled > 0, "llvmlite.binding" in sys.modules)
"""


@LINKED
def test_a_warm_start_loads_no_llvm(tmp_path: Path) -> None:
    tests = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    program = f"import sys; sys.path[:0] = {tests!r}\n{WARM}"
    environment = {**os.environ, "LLAMADO_CACHE": str(tmp_path)}
    for printed in ("True True", "False False"):
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert (done.stdout.strip(), done.stderr) == (printed, "")


CPUINFO = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 207
model name\t: Intel(R) Xeon(R) Processor
stepping\t: 2
microcode\t: 0x1
cpu MHz\t\t: 2100.000
flags\t\t: fpu avx2 avx512f

processor\t: 1
flags\t\t: of another
"""


@LINKED
def test_llvms_answer_about_a_processor_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another processor has an entry of its own; a change of the clock speed makes no other processor."""
    asked: list[str] = []
    monkeypatch.setattr(host, "_of_llvm", lambda: (asked.append("") or f"cpu{len(asked)}", {"avx2": True}))
    monkeypatch.setenv("LLAMADO_CACHE", str(tmp_path))
    monkeypatch.delenv("LLAMADO_CPU", raising=False)

    def name(text: str) -> str:
        host._kept.cache_clear()
        monkeypatch.setattr(host, "open", lambda *_: io.BytesIO(text.encode()), raising=False)
        found, features = host.processor()
        assert features == {"avx2": True}
        return found

    same = [CPUINFO, CPUINFO.replace("2100", "800"), CPUINFO.replace("of another", "")]
    assert [name(text) for text in same] == ["cpu1"] * 3
    changes = {"Genuine": "Other", ": 6": ": 7", "207": "143", "Xeon(R)": "Core", "stepping\t: 2": "stepping\t: 3"}
    changes["avx512f"] = ""
    others = [name(CPUINFO.replace(old, new, 1)) for old, new in changes.items()]
    assert others == [f"cpu{2 + i}" for i in range(len(changes))]
    assert name(CPUINFO) == "cpu1"
    for file in (tmp_path / "processors").iterdir():
        file.write_bytes(file.read_bytes()[:-1] + b"!")  # damaged
    assert name(CPUINFO) == f"cpu{2 + len(changes)}"
    assert name(CPUINFO.replace("stepping", "step")) == f"cpu{3 + len(changes)}"  # an unknown form is not kept
    assert name(CPUINFO.replace("stepping", "step")) == f"cpu{4 + len(changes)}"


FILL = """
import ctypes
from pathlib import Path

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

mapped._load({"slots": 0, "before": 0})
fill()
mapped._install()
assert mapped._handler is not None
""",
    "a kernel with constants that calls the C library": """
import sys

from test_machine_code import CONSTANTS, Jit, expected, run

jit = Jit(folder=Path(sys.argv[1]))
jit.cache.write(symbol := jit.cache.symbol(CONSTANTS, {}), jit.compile(CONSTANTS, symbol, {}))
fill()
assert run(jit, 3).tobytes() == expected(3).tobytes()
""",
    "a kernel that converts halves on a CPU that does not": """
import sys

import numpy as np

from llamado.devices.cpu.jit import Jit
from llamado.devices.cpu.lowerings import LOWERINGS
from llamado.devices.cpu.lowerings.host import processor
from llamado.devices.kernel import Kernel
from llamado.devices.simd import F16


def trace(c, a, work):
    c.store(a.x, c.load_f16(a.x).to(F16))


cpu, features = processor()
first = ("sse", "sse2", "cx8", "fxsr", "mmx", "cmov", "64bit", "x87")
features = dict.fromkeys((name for name in features if name not in first), False)
jit = Jit(LOWERINGS["portable"], Path(sys.argv[1]), ("x86-64", features))
kernel = Kernel("halves", ("x",), trace)
jit.cache.write(symbol := jit.cache.symbol(kernel, {}), jit.compile(kernel, symbol, {}))
fill()
x = np.array([1.5], np.float16)
fields, counters = np.array([x.ctypes.data], np.int64), np.zeros(8, np.int64)
jit.function(kernel)(fields.ctypes.data, 0, 1, counters.ctypes.data, 8)
assert x[0] == 1.5
""",
}


@pytest.mark.skipif(platform.system() != "Linux" or sys.maxsize < 2**32, reason="fills the address space as Linux does")
@pytest.mark.parametrize("name", PROGRAMS)
def test_code_is_loaded_where_only_small_gaps_are_left(name: str, tmp_path: Path) -> None:
    """LLVM ends the process if sections of one object lie too far apart."""
    tests = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    program = f"import sys; sys.path[:0] = {tests!r}\n" + FILL + PROGRAMS[name]
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
