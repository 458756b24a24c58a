"""The cache of compiled kernels: used, renewed where it is damaged, never in the way."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest
from doubling import KERNEL, STAGES, double
from imported_sources import PACKAGE, imported_beyond
from owners import needs_other_owners
from running import Case, jit_for, new, values, weight_bytes
from tiers import first_of

import llamado
from llamado.devices import kernel_cache
from llamado.devices.cpu import lowerings
from llamado.devices.cpu.device import CpuDevice
from llamado.devices.cpu.jit import KERNEL_SOURCES, Jit, JitError, LoadedKernel
from llamado.devices.cpu.lowerings import LOWERINGS, choose, host
from llamado.devices.cpu.lowerings.host import limited
from llamado.devices.cpu.top_rows import TopRows
from llamado.devices.kernel import Kernel, kernel
from llamado.devices.kernel_cache import source_hash
from llamado.devices.kernels.matmul import matmul_few
from llamado.devices.kernels.rows import rows_kernel
from llamado.devices.lowering import Lowering
from llamado.devices.numerics import numerics
from llamado.errors import LlamadoError
from llamado.ggml import graph as g
from llamado.gguf.types import TensorType as T

SHORTER = STAGES[:1] + STAGES[-1:]


def path_of(jit: Jit, kernel: Kernel, **parameters: Any) -> Path:
    """The file of a kernel in the cache."""
    return jit.cache.path(jit.cache.symbol(kernel, parameters))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the object of the kernel."""
    folder = tmp_path_factory.mktemp("compiled") / "kernels"
    double(Jit(folder=folder))
    return folder


def test_a_second_start_compiles_nothing(tmp_path: Path) -> None:
    first, second = Jit(folder=tmp_path), Jit(folder=tmp_path)
    double(first)
    double(first)
    assert first.compiled == 1 and len(list(tmp_path.iterdir())) == 1
    double(second)
    assert second.compiled == 0


def test_lowerings_and_parameters_do_not_share_objects(tmp_path: Path) -> None:
    a, b = (Jit(LOWERINGS[name], tmp_path) for name in ("portable", "avx2"))
    paths = {path_of(jit, KERNEL, stages=stages) for jit in (a, b) for stages in (STAGES, STAGES[:1])}
    assert len(paths) == 4


def test_another_system_has_its_own_kernel_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One home folder may serve several, whose threads wait for each other in other ways."""
    here = path_of(Jit(folder=tmp_path), KERNEL, stages=STAGES)
    monkeypatch.setattr(sys, "platform", "win32")
    assert path_of(Jit(folder=tmp_path), KERNEL, stages=STAGES) != here


@pytest.mark.slow
def test_kernel_cache_keys_include_imported_sources() -> None:
    """Without them, the cache would return a kernel from before its edit."""
    beyond = imported_beyond(KERNEL_SOURCES, "devices/cpu/llvm.py")
    undeciding = ("errors.py", "devices/__init__.py", "devices/cpu/__init__.py", "devices/kernel_cache.py")
    assert beyond <= {PACKAGE / name for name in undeciding}


@pytest.mark.parametrize(("source", "kept"), [("kernels/rows.py", False), ("compile/fusion.py", True)])
def test_an_edit_recompiles_dependent_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, kept: bool
) -> None:
    """Kernels are kept where only what chooses among them is edited; stored results of either are not trusted."""
    before, bits_before, path = Jit(folder=tmp_path), numerics(), "devices/" + source
    package = shutil.copytree(Path(llamado.__file__).parent, tmp_path / "llamado")
    monkeypatch.setattr(kernel_cache, "_PACKAGE", package)
    with (package / path).open("a") as file:
        file.write("# edited\n")
    source_hash.cache_clear()
    numerics.cache_clear()
    try:
        after, bits_after = Jit(folder=tmp_path), numerics()
    finally:
        source_hash.cache_clear()
        numerics.cache_clear()
    assert (after.cache._identity.digest() == before.cache._identity.digest()) is kept
    assert bits_after != bits_before


KERNEL_TEXT = """
@kernel("x")
def filled(c, a, work):
    with c.range(0, 8) as i:
        c.store(a.x + i * 4, c.f32({number}))
"""


@pytest.mark.parametrize("typed", [True, False])
def test_editing_a_third_party_kernel_recompiles_it(tmp_path: Path, typed: bool) -> None:
    """This includes a kernel that was typed into an interpreter and has no file."""
    x, counter = np.zeros(8, np.float32), np.zeros(8, np.int64)
    compiled = []
    for turn, number in enumerate((1.0, 2.0, 2.0)):
        text = KERNEL_TEXT.format(number=number)
        file = tmp_path / f"{turn}.py"
        if not typed:
            file.write_text(text)
        names: dict[str, Any] = {"kernel": kernel}
        exec(compile(text, "<stdin>" if typed else str(file), "exec"), names)
        jit = Jit(folder=tmp_path / "kernels")
        fields = np.array(names["filled"].pack({"x": x.ctypes.data}), np.int64)
        jit.function(names["filled"])(fields.ctypes.data, 0, 1, counter.ctypes.data, 8)
        assert x.tolist() == [number] * 8
        compiled.append(jit.compiled)
    assert compiled == [1, 1, 0]


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "old", "folder"])
def test_a_damaged_object_is_compiled_again(compiled: Path, tmp_path: Path, damage: str) -> None:
    shutil.copytree(compiled, tmp_path, dirs_exist_ok=True)
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


def test_a_folder_that_cannot_be_written_costs_only_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("not a folder")
    for folder, why in ((tmp_path / "file" / "kernels", "Not a directory"), (Path("/proc/nowhere"), "No such file")):
        caplog.clear()
        jit = Jit(folder=folder)
        double(jit)
        assert jit.compiled == 1
        [said] = caplog.messages
        assert said.startswith(f"compiled kernels cannot be kept in {folder} ({why}") and "$LLAMADO_CACHE" in said


def test_a_full_disk_leaves_no_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    jit = Jit(folder=tmp_path)
    double(jit)
    jit.function(rows_kernel(SHORTER), stages=SHORTER)
    assert not list(tmp_path.iterdir())
    [said] = caplog.messages  # once for all kernels
    assert "(No space left on device)" in said


@pytest.mark.slow
@needs_other_owners
@pytest.mark.parametrize(
    ("what", "owner", "mode", "reason"),
    [
        ("entry", 4711, 0o700, "it belongs to user 4711"),
        pytest.param("entry", 0, 0o720, "mode 720", marks=pytest.mark.full),
        ("entry", 0, 0o702, "mode 702"),
        pytest.param("folder", 4711, 0o700, "it belongs to user 4711", marks=pytest.mark.full),
        ("folder", 0, 0o720, "mode 720"),
        pytest.param("folder", 0, 0o702, "mode 702", marks=pytest.mark.full),
    ],
)
def test_objects_writable_by_others_are_not_loaded(
    compiled: Path, tmp_path: Path, what: str, owner: int, mode: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is compiled anew, and one warning says which and why."""
    folder = tmp_path / "kernels"
    shutil.copytree(compiled, folder)
    (entry,) = folder.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and not entry.stat().st_mode & 0o022
    path = {"entry": entry, "folder": folder}[what]
    os.chown(path, owner, owner)
    path.chmod(mode)
    jit = Jit(folder=folder)
    with caplog.at_level(logging.WARNING, "llamado.devices"):
        double(jit)
        jit.load(rows_kernel(SHORTER), stages=SHORTER)
    assert jit.compiled == 2
    (warning,) = caplog.messages
    assert f"compiled kernels in {path}: ignored" in warning and reason in warning
    if what == "entry":  # replaced by our own
        again = Jit(folder=folder)
        double(again)
        assert again.compiled == 0 and entry.stat().st_uid == 0
    else:
        assert len(list(folder.iterdir())) == 1


@needs_other_owners
def test_a_prepared_folder_in_a_shared_directory_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`$LLAMADO_CACHE` is a shared directory such as /tmp, in which `kernels` belongs to another user."""
    tmp_path.chmod(0o1777)
    (tmp_path / "kernels").mkdir()
    os.chown(tmp_path / "kernels", 4711, 4711)
    monkeypatch.setenv("LLAMADO_CACHE", str(tmp_path))
    jit = Jit()
    double(jit)
    assert jit.compiled == 1 and not list((tmp_path / "kernels").iterdir())
    (tmp_path / "kernels").rmdir()
    double(Jit())
    assert stat.S_IMODE((tmp_path / "kernels").stat().st_mode) == 0o700
    again = Jit()
    double(again)
    assert again.compiled == 0


@pytest.mark.slow
def test_links_and_objects_of_other_kernels_are_not_loaded(tmp_path: Path) -> None:
    jit = Jit(folder=tmp_path / "kernels")
    double(jit)
    (entry,) = (tmp_path / "kernels").iterdir()
    moved = entry.rename(tmp_path / "elsewhere.o")
    entry.symlink_to(moved)
    again = Jit(folder=tmp_path / "kernels")
    double(again)
    assert again.compiled == 1
    again.load(rows_kernel(SHORTER), stages=SHORTER)
    other = path_of(again, rows_kernel(SHORTER), stages=SHORTER)
    other.replace(entry)
    third = Jit(folder=tmp_path / "kernels")
    double(third)
    assert third.compiled == 1


def chains(n: int) -> list[tuple[tuple[str, ...], ...]]:
    """Different short kernels."""
    words = ("RELU", "NEG", "ABS")
    kinds = itertools.product(words, repeat=5)
    return [(("row",), *(("unary", kind) for kind in chain), ("store",)) for chain in itertools.islice(kinds, n)]


@pytest.mark.slow
def test_least_recently_used_files_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamado.devices.kernel_cache._LOOK_AFTER", 1)
    jit = Jit(folder=tmp_path)
    now = time.time()
    paths = []
    for age, stages in enumerate(chains(8)):
        jit.load(rows_kernel(stages), stages=stages)
        paths.append(path_of(jit, rows_kernel(stages), stages=stages))
        os.utime(paths[-1], (now - (9 - age) * 90_000,) * 2)
    assert all(path.exists() for path in paths)
    Jit(folder=tmp_path).load(rows_kernel(chains(1)[0]), stages=chains(1)[0])  # the oldest is used again
    size = sum(path.stat().st_size for path in paths)
    monkeypatch.setattr("llamado.devices.kernel_cache.DISK_BYTES", size)
    double(jit)  # one more
    kept = [path.exists() for path in paths]
    assert kept[0] and kept == [True, *sorted(kept[1:])] and 3 <= kept.count(False) <= 5
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= size * 3 // 4


@pytest.mark.slow
def test_least_recently_used_kernels_are_unloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that hold them go on; what is needed again is loaded again."""
    monkeypatch.setattr("llamado.devices.cpu.jit.MAX_KERNELS", 5)
    jit = Jit(folder=tmp_path)
    double(jit)
    held = jit.load(KERNEL, stages=STAGES)
    function = jit.function(KERNEL, stages=STAGES)
    loaded = []
    for stages in chains(9):
        loaded.append(weakref.ref(jit.load(rows_kernel(stages), stages=stages).code))
        jit.load(rows_kernel(chains(1)[0]), stages=chains(1)[0])  # it stays in use
    gc.collect()
    assert [code() is None for code in loaded] == [False] + [True] * 4 + [False] * 4
    compiled = jit.compiled
    double(jit)
    assert jit.load(KERNEL, stages=STAGES).code is not held.code and jit.compiled == compiled
    gone = weakref.ref(held.code)
    del held
    gc.collect()
    assert gone() is not None  # the function's
    del function
    gc.collect()
    assert gone() is None


@pytest.mark.slow
def test_a_program_keeps_its_kernels_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("llamado.devices.cpu.jit.MAX_KERNELS", 2)
    device = CpuDevice(2, jit=Jit(folder=tmp_path))
    x = new(64, 5)
    case = Case({"y": g.relu(g.scale(g.rms_norm(x, 1e-5), 2.0))}, {x: values(64, 5)})
    first = case.run(device)["y"].tobytes()
    compiled = device.jit.compiled
    for stages in chains(6):
        device.jit.load(rows_kernel(stages), stages=stages)
    gc.collect()
    assert device.jit.compiled == compiled + 6
    for _ in range(3):
        device.submit(case.graph)
    assert case.run(device)["y"].tobytes() == first
    device.close()


@pytest.mark.slow
def test_users_of_kernels_keep_them_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The threads of a device, and the selection of the first elements of rows."""
    monkeypatch.setattr("llamado.devices.cpu.jit.MAX_KERNELS", 1)
    jit, loaded = Jit(folder=tmp_path), []
    load = jit.load

    def recorded(kernel: Kernel, **parameters: Any) -> LoadedKernel:
        found = load(kernel, **parameters)
        loaded.append((kernel.name, weakref.ref(found.code)))
        return found

    monkeypatch.setattr(jit, "load", recorded)
    device, top = CpuDevice(2, jit=jit), TopRows(jit)
    load(KERNEL, stages=STAGES)  # the others are dropped
    gc.collect()
    assert len(loaded) >= 5 and [name for name, code in loaded if code() is None] == []
    places, values = top([np.array([1, 3, 2], np.float32)], [2])[0]  # type: ignore[misc]
    assert (places.tolist(), values.tolist()) == ([1, 2], [3, 2])
    device.close()


SCRIPT = """
import sys
from pathlib import Path
sys.path[:0] = {tests!r}
from doubling import double
from llamado.devices.cpu.jit import Jit
jit = Jit()
double(jit)
print(jit.compiled)
"""


def start(cache: Path) -> subprocess.Popen[str]:
    script = SCRIPT.format(tests=[str(Path(__file__).parent)])
    env = {**os.environ, "LLAMADO_CACHE": str(cache)}
    return subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_processes_that_start_at_once_share_the_cache(tmp_path: Path) -> None:
    running = [start(tmp_path) for _ in range(2)]
    for process in running:
        assert process.communicate(timeout=60)[0] and process.returncode == 0
    (path,) = (tmp_path / "kernels").iterdir()
    jit = Jit(folder=path.parent)
    double(jit)
    assert jit.compiled == 0


def test_the_lowering_can_be_forced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMADO_SIMD", "portable")
    jit = Jit(folder=tmp_path)
    double(jit)
    assert jit.lowering.name == "portable" and jit.compiled == 1
    monkeypatch.setenv("LLAMADO_SIMD", "mmx")
    with pytest.raises(JitError, match="LLAMADO_SIMD=mmx: not on this processor; one of portable") as caught:
        Jit(folder=tmp_path)
    assert isinstance(caught.value, LlamadoError)


@pytest.mark.parametrize("lowering", LOWERINGS.values(), ids=list(LOWERINGS))
def test_the_lowering_follows_the_cpus_instructions(lowering: Lowering, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowerings, "tiles_permitted", lambda: True)  # whatever processor this is
    features = dict.fromkeys(lowering.needs, True)
    assert choose(features).needs == lowering.needs
    for missing in lowering.needs:
        assert missing not in choose(features | {missing: False}).needs
        monkeypatch.setenv("LLAMADO_SIMD", lowering.name)
        with pytest.raises(ValueError, match="not on this processor"):
            choose(features | {missing: False})
        monkeypatch.delenv("LLAMADO_SIMD")


AVX512 = "zmm|%[xy]mm(1[6-9]|2[0-9]|3[01])|%k[1-7]|vpternlog"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "has", "lacks"),
    [
        ("avx2", "vpmaddubsw", f"vpdpbusd|{AVX512}"),
        ("avx-vnni", "vpdpbusd", f"vpmaddubsw|{AVX512}"),
        ("vnni-256", "vpdpbusd", "vpmaddubsw|zmm"),
        ("vnni", "zmm", "vpmaddubsw"),
    ],
    ids=["avx2", "avx-vnni", "vnni-256", "vnni"],
)
def test_a_lowering_uses_no_further_instructions(name: str, has: str, lacks: str) -> None:
    rows = LOWERINGS[name].panel_rows
    text = jit_for(name).assembly(matmul_few, weights="Q8_0", columns=4, near=False, panel_rows=rows)
    assert has in text and not re.search(lacks, text)


NEWEST = dict.fromkeys((*LOWERINGS["amx"].needs, "avx512f", "avx10.1", "avxvnni", "avx2", "fma", "f16c"), True)
"""Features of a processor that has all of x86's lowerings."""


@pytest.mark.parametrize(
    ("level", "lowering", "has_avx512"),
    [("avx2", "avx2", False), ("avx-vnni", "avx-vnni", False), ("avx512", "vnni", True)],
)
def test_a_processor_can_be_limited(
    level: str, lowering: str, has_avx512: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden features choose no lowering, ask for no tile permission, and code has none of their instructions."""
    monkeypatch.setattr(host, "_cpuinfo", lambda: "")
    monkeypatch.setattr(host, "_of_llvm", lambda: ("sapphirerapids", NEWEST))
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    permissions: list[bool] = []
    monkeypatch.setattr(lowerings, "tiles_permitted", lambda: permissions.append(True) or True)

    def jit(lowering: Lowering | None = None) -> Jit:
        return Jit(lowering, tmp_path, triple="x86_64-unknown-linux-gnu")

    monkeypatch.delenv("LLAMADO_CPU", raising=False)
    unlimited = jit()
    assert unlimited.lowering.name == "amx" and permissions == [True]
    monkeypatch.setenv("LLAMADO_CPU", level)
    limited = jit()
    assert limited.lowering.name == lowering and permissions == [True]
    assert path_of(limited, KERNEL) != path_of(unlimited, KERNEL)
    portable = jit(LOWERINGS["portable"])  # compiled for every feature that the processor shows
    stages = (("row",), ("unary", "SILU"), ("store",))
    assert bool(re.search(AVX512, portable.assembly(rows_kernel(stages), stages=stages))) is has_avx512


def test_an_unknown_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMADO_CPU", "mmx")
    with pytest.raises(JitError, match="LLAMADO_CPU=mmx: unknown; one of avx2, avx-vnni, avx512, neon"):
        Jit(folder=tmp_path)


def test_an_arm_processor_can_be_limited() -> None:
    features = limited(dict.fromkeys(("neon", "dotprod", "i8mm", "sve2", "lse"), True), "neon")
    assert choose(features).name == "neon" and [name for name, on in features.items() if not on] == ["i8mm", "sve2"]


@pytest.mark.slow
@pytest.mark.parametrize("weights", first_of(["Q4_1", "Q4_K", "Q6_K"]))
def test_cache_lines_are_prefetched_in_small_groups(weights: str) -> None:
    """All at once, most would wait for a place, and what is to be multiplied behind them."""
    code = jit_for("vnni-256").assembly(matmul_few, weights=weights, columns=1, near=False, panel_rows=8)
    runs = re.findall(r"(?:\tprefetch\S+\s+\S+\n)+", code)
    block = {"Q4_K": 144, "Q6_K": 210, "Q4_1": 20}[weights]
    assert sum(run.count("prefetch") for run in runs) >= 8 * block // 64 and max(run.count("\n") for run in runs) <= 3


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


@pytest.mark.slow
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


@pytest.mark.full
def test_an_old_cpu_gives_the_same_bits(old_cpu: CpuDevice, best: CpuDevice) -> None:
    w, x = new(256, 24, type=T.Q4_0), new(256, 5)
    q, k = new(32, 5, 2), new(32, 40, 2, type=T.F16)
    data = {w: weight_bytes(T.Q4_0, 256, 24), x: values(256, 5), q: values(32, 5, 2), k: values(32, 40, 2)}
    outputs = {"product": g.mul_mat(w, g.rms_norm(x, 1e-5)), "attention": g.flash_attn_ext(q, k, k, None, 0.2)}
    case = Case(outputs, data)
    old, new_ = case.run(old_cpu), case.run(best)
    assert all(old[name].tobytes() == new_[name].tobytes() for name in outputs)


def test_fields_must_be_complete(tmp_path: Path) -> None:
    with pytest.raises((ValueError, KeyError)):
        KERNEL.pack({"n": 1}, int)


def test_compiler_memory_is_released_and_reloaded(tmp_path: Path) -> None:
    def resident() -> int:
        """KiB of LLVM's code in RAM."""
        found, counts = 0, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
                counts = " r-xp " in line and "llvmlite" in line
            elif counts and line.startswith("Rss:"):
                found += int(line.split()[1])
        return found

    if platform.system() != "Linux":
        pytest.skip("pages are counted as Linux shows them")
    jit = Jit(folder=tmp_path)
    double(jit)
    before = resident()
    jit.release_compiler_pages()
    assert resident() < before / 4
    again = Jit(folder=tmp_path / "again")
    double(again)
    assert again.compiled == jit.compiled > 0
