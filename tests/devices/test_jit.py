"""The cache of compiled kernels: used, renewed where it is damaged, never in the way."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
import pytest
from running import Case, new, values, weight_bytes

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.cpu.jit import Jit, JitError
from llamado.devices.cpu.kernels.rows import rows_kernel
from llamado.devices.cpu.lowering import LOWERINGS
from llamado.errors import LlamadoError
from llamado.ggml import graph as g
from llamado.gguf.types import TensorType as T

STAGES = (("row",), ("scale",), ("unary", "RELU"), ("store",))
KERNEL = rows_kernel(STAGES)


def double(jit: Jit) -> None:
    """Runs the kernel: relu(2x + 1)."""
    x = np.array([-3, -0.5, 0, 1, 2, 3, 4, 5, 6, 7], np.float32)
    y, counter, scratch = np.zeros_like(x), np.zeros(8, np.int64), np.zeros(64, np.uint8)
    values: dict[str, int | float] = dict.fromkeys(KERNEL.fields, 0)
    values |= {"n": x.size, "n1": 1, "n2": 1, "n3": 1, "share": 1, "scratch": scratch.ctypes.data}
    values |= {"s0_x": x.ctypes.data, "s1_factor": 2.0, "s1_bias": 1.0, "s3_x": y.ctypes.data}
    fields = np.array(KERNEL.pack(values, int), np.int64)
    jit.function(KERNEL, stages=STAGES)(fields.ctypes.data, 0, 1, counter.ctypes.data)
    assert y.tolist() == np.maximum(2 * x + 1, 0).tolist()


def test_a_second_start_compiles_nothing(tmp_path: Path) -> None:
    first, second = Jit(folder=tmp_path), Jit(folder=tmp_path)
    double(first)
    double(first)
    assert first.compiled == 1 and len(list(tmp_path.iterdir())) == 1
    double(second)
    assert second.compiled == 0


def test_lowerings_and_parameters_do_not_share_objects(tmp_path: Path) -> None:
    a, b = (Jit(LOWERINGS[name], tmp_path) for name in ("portable", "avx2"))
    paths = {jit._path(KERNEL, {"stages": stages}) for jit in (a, b) for stages in (STAGES, STAGES[:1])}
    assert len(paths) == 4


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "old", "folder"])
def test_a_damaged_object_is_compiled_again(tmp_path: Path, damage: str) -> None:
    double(Jit(folder=tmp_path))
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[len(data) // 2] ^= 0x40
    path.write_bytes({"cut": data[:-9], "empty": b"", "old": b"another format" + data}.get(damage, bytes(data)))
    if damage == "folder":
        path.unlink()
        path.mkdir()
    jit = Jit(folder=tmp_path)
    double(jit)
    assert jit.compiled == 1
    if damage != "folder":
        again = Jit(folder=tmp_path)
        double(again)
        assert again.compiled == 0


def test_a_folder_that_cannot_be_written_costs_only_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    for folder in (tmp_path / "file" / "kernels", Path("/proc/nowhere")):
        jit = Jit(folder=folder)
        double(jit)
        assert jit.compiled == 1


def test_a_full_disk_leaves_no_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    double(Jit(folder=tmp_path))
    assert not list(tmp_path.iterdir())


SCRIPT = """
import sys
from pathlib import Path
sys.path[:0] = {tests!r}
from test_jit import double
from llamado.devices.cpu.jit import Jit
jit = Jit()
double(jit)
print(jit.lowering.name, jit.compiled)
"""


def start(cache: Path, **environment: str) -> subprocess.Popen[str]:
    script = SCRIPT.format(tests=[str(Path(__file__).parent), str(Path(__file__).parents[1])])
    env = {**os.environ, "LLAMADO_CACHE": str(cache), **environment}
    return subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, text=True)


def test_processes_that_start_at_once_share_the_cache(tmp_path: Path) -> None:
    running = [start(tmp_path) for _ in range(4)]
    for process in running:
        assert process.communicate(timeout=60)[0] and process.returncode == 0
    (path,) = (tmp_path / "kernels").iterdir()
    jit = Jit(folder=path.parent)
    double(jit)
    assert jit.compiled == 0


def test_the_lowering_can_be_forced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = start(tmp_path, LLAMADO_SIMD="portable")
    assert process.communicate(timeout=60)[0] == "portable 1\n"
    monkeypatch.setenv("LLAMADO_SIMD", "mmx")
    with pytest.raises(JitError, match="portable, avx2, vnni") as caught:
        Jit(folder=tmp_path)
    assert isinstance(caught.value, LlamadoError)


@pytest.fixture(scope="module")
def old_cpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CpuDevice]:
    """The first x86-64: no AVX, no fused multiply-add, no half floats."""
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("not an x86 machine")
    kept = ("sse", "sse2", "cx8", "fxsr", "mmx", "cmov", "64bit", "x87")
    features = dict.fromkeys((name for name in llvm.get_host_cpu_features() if name not in kept), False)
    device = CpuDevice(2, jit=Jit(folder=tmp_path_factory.mktemp("old"), host=("x86-64", features)))
    assert device.jit.lowering.name == "portable"
    yield device
    device.close()


def test_half_floats_without_their_instructions(old_cpu: CpuDevice) -> None:
    halves = np.arange(65536, dtype=np.uint16)
    x = new(65536, type=T.F16)
    found = Case({"y": g.cast(x, T.F32)}, {x: halves.view(np.uint8)}).run(old_cpu)["y"].reshape(-1)
    assert np.array_equal(found, halves.view(np.float16).astype(np.float32), equal_nan=True)
    middles = (found[:31743] + found[1:31744]) / 2  # ties
    numbers = np.random.default_rng(0).integers(0, 1 << 32, 100000, np.uint64).astype(np.uint32).view(np.float32)
    numbers = np.concatenate([numbers, middles, -middles, found[~np.isnan(found)]])
    x = new(numbers.size)
    found = Case({"y": g.cast(x, T.F16)}, {x: numbers.view(np.uint8)}).run(old_cpu)["y"].reshape(-1)
    with np.errstate(over="ignore"):
        right = numbers.astype(np.float16)
    assert np.array_equal(found.astype(np.float16), right, equal_nan=True)


def test_an_old_cpu_gives_the_same_bits(old_cpu: CpuDevice, best: CpuDevice) -> None:
    w, x = new(256, 24, type=T.Q4_K), new(256, 5)
    q, k = new(32, 5, 2), new(32, 40, 2, type=T.F16)
    data = {w: weight_bytes(T.Q4_K, 256, 24), x: values(256, 5), q: values(32, 5, 2), k: values(32, 40, 2)}
    outputs = {"product": g.mul_mat(w, g.rms_norm(x, 1e-5)), "attention": g.flash_attn_ext(q, k, k, None, 0.2)}
    case = Case(outputs, data)
    old, new_ = case.run(old_cpu), case.run(best)
    assert all(old[name].tobytes() == new_[name].tobytes() for name in outputs)


def test_fields_must_be_complete(tmp_path: Path) -> None:
    with pytest.raises((ValueError, KeyError)):
        KERNEL.pack({"n": 1}, int)
