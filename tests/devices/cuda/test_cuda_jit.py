"""The kernel compiler of a card: cached on disk, on several threads, bounded in memory."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from imported_sources import PACKAGE, imported_beyond
from running import Case, new, values

from cuda.add_kernel import add
from cuda.cards import fake_device, run
from cuda.fake_libcuda import BROKEN, FakeCard, FakeLibrary
from llamado.devices.cuda import jit as jit_file
from llamado.devices.cuda.api import CudaError
from llamado.devices.cuda.device import CudaDevice
from llamado.devices.cuda.driver import Card, Driver
from llamado.devices.cuda.jit import KERNEL_SOURCES, CudaJit, PtxImages, Variant
from llamado.devices.cuda.kernel import Image, kernel
from llamado.devices.cuda.lowerings.emulated import EmulatedImages
from llamado.devices.device import KernelQuota, NoKernelsLeft
from llamado.devices.kernel import Kernel
from llamado.ggml import graph as g


@kernel("y")
def filled(c: Any, a: Any, number: int) -> None:
    """Store a number in each thread's word."""
    c.store(a.y + c.thread().to(a.y.type) * 4, c.i32(number))


def variants(*numbers: int, threads: int = 32) -> list[Variant]:
    return [Variant(filled, {"number": number}, threads) for number in numbers]


class Texts:
    """Images that the stand-in library takes."""

    stored = True

    def __init__(self, identity: str = "a card") -> None:
        self.identity = identity
        self.traced: list[int] = []
        self.tracing: set[int] = set()
        self.compiling: set[int] = set()

    def trace(self, kernel: Kernel, parameters: Mapping[str, Any], symbol: str, threads: int) -> Image:
        self.traced.append(parameters["number"])
        self.tracing.add(threading.get_ident())
        return Image(symbol.encode(), 64 * parameters["number"])

    def compile(self, image: Image) -> Image:
        self.compiling.add(threading.get_ident())
        return image._replace(code=b"code of " + image.code)


def test_a_second_start_compiles_nothing(card: Card, tmp_path: Path) -> None:
    first, second = Texts(), Texts()
    expected = CudaJit(card, first, tmp_path).load(variants(1, 2, 1))
    assert first.traced == [1, 2] and len(list(tmp_path.iterdir())) == 2
    jit = CudaJit(card, second, tmp_path)
    found = jit.load(variants(1, 2, 1))
    assert not second.traced and jit.compiled == 0
    assert [one.stack_bytes for one in found] == [one.stack_bytes for one in expected] == [64, 128, 64]
    assert [one.function.symbol for one in found] == [one.function.symbol for one in expected]
    assert found[0] is found[2] is jit.load(variants(1))[0]


def test_cards_parameters_and_blocks_do_not_share_files(card: Card, tmp_path: Path) -> None:
    for identity in ("a card", "another driver"):
        CudaJit(card, Texts(identity), tmp_path).load(variants(1, 2) + variants(1, threads=64))
    assert len(list(tmp_path.iterdir())) == 6


def test_shared_memory_needs_no_other_code(card: Card, tmp_path: Path) -> None:
    images = Texts()
    wanted = [*variants(1), variants(1)[0]._replace(shared_bytes=4096)]
    one, other = CudaJit(card, images, tmp_path).load(wanted)
    assert (one.function.shared_bytes, other.function.shared_bytes) == (0, 4096) and images.traced == [1]


def test_a_damaged_file_is_compiled_again(card: Card, tmp_path: Path) -> None:
    CudaJit(card, Texts(), tmp_path).load(variants(1))
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    images = Texts()
    CudaJit(card, images, tmp_path).load(variants(1))
    assert images.traced == [1]


def test_kernels_are_compiled_on_several_threads(card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM is used in one thread only."""
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    together = threading.Barrier(3)

    class TextsTogether(Texts):
        def compile(self, image: Image) -> Image:
            together.wait(60)
            return super().compile(image)

    images = TextsTogether()
    CudaJit(card, images, tmp_path).load(variants(1, 2, 3))
    assert images.tracing == {threading.get_ident()} and len(images.compiling) == 3


def test_a_kernel_that_does_not_compile_is_named(card: Card, tmp_path: Path) -> None:
    class TextsWithAnError(Texts):
        def compile(self, image: Image) -> Image:
            if image.stack_bytes == 128:
                raise CudaError("CUDA0: cuLinkComplete: INVALID_PTX", 218)
            return super().compile(image)

    with pytest.raises(CudaError, match=r"kernel filled \{'number': 2\} did not compile: CUDA0: cuLinkComplete"):
        CudaJit(card, TextsWithAnError(), tmp_path).load(variants(1, 2))
    assert CudaJit(card, Texts(), tmp_path).load(variants(2))[0].stack_bytes == 128


def test_long_compiling_is_logged_once(
    card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "llamado.devices"):
        monkeypatch.setattr(jit_file, "_QUIET_S", float("inf"))
        CudaJit(card, Texts(), tmp_path).load(variants(*range(9)))
        assert not caplog.messages
        monkeypatch.setattr(jit_file, "_QUIET_S", 0.0)
        CudaJit(card, Texts(), tmp_path).load(variants(*range(9)))  # from disk
        assert not caplog.messages
        CudaJit(card, Texts(), tmp_path).load(variants(*range(20)))
    (message,) = caplog.messages
    assert re.match(r"CUDA0: compiling kernels \(done=\d+, of=20\); later starts read them from ", message)
    assert message.endswith(str(tmp_path))


def test_what_a_quota_allows_is_made(card: Card, tmp_path: Path) -> None:
    images = Texts()
    jit = CudaJit(card, images, tmp_path)
    jit.load(variants(1))
    jit.quota = KernelQuota(2)
    with pytest.raises(NoKernelsLeft):
        jit.load(variants(1, 2, 3, 4))
    assert images.traced == [1, 2, 3]
    jit.quota = KernelQuota(1)
    jit.load(variants(1, 2, 3, 4, 2))
    assert images.traced == [1, 2, 3, 4] and jit.quota.left == 0


def test_least_recently_used_kernels_are_unloaded(
    card: Card, library: FakeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit_file, "KERNELS", 8)
    images = Texts()
    jit = CudaJit(card, images, tmp_path)
    used = jit.load(variants(0, 1))
    for number in range(2, 8):
        jit.load(variants(number))
    jit.unload(lambda: used)
    assert not library.calls["cuModuleUnload"]
    jit.load(variants(2))
    jit.load(variants(8))
    jit.unload(lambda: used)
    assert library.calls["cuModuleUnload"] == 3  # of 9, six stay: the used ones, 2, 8 and the newest others
    loads = library.calls["cuModuleLoadDataEx"]
    assert jit.load(variants(0, 1)) == used
    jit.load(variants(2, 6, 7, 8))
    assert library.calls["cuModuleLoadDataEx"] == loads
    jit.load(variants(3, 4, 5))
    assert library.calls["cuModuleLoadDataEx"] == loads + 3 and images.traced == list(range(9))


def test_programs_keep_their_kernels_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit_file, "KERNELS", 1)
    device = fake_device()
    x = new(64, 5)
    data = {x: values(64, 5)}
    kept = Case({"y": g.relu(g.scale(g.rms_norm(x, 1e-5), 2.0))}, data)
    first = kept.run(device)["y"].tobytes()
    others = [Case({"y": one(x)}, data) for one in (g.sqr, g.silu, g.gelu, g.sigmoid)]
    for other in others:
        other.run(device)
    assert kept.run(device)["y"].tobytes() == first
    device.drop_graphs([other.graph for other in others])
    Case({"y": g.softplus(x)}, data).run(device)
    assert len(device.jit._loaded) == 2
    assert kept.run(device)["y"].tobytes() == first
    device.close()


def test_a_closed_device_leaves_nothing_to_others_of_its_card() -> None:
    """Devices of one process share the card's context."""
    library = FakeLibrary(run)
    one = CudaDevice(Driver(library).open(0), EmulatedImages())
    before = one.memory()
    other = CudaDevice(Driver(library).open(0), EmulatedImages())
    x = new(64, 5)
    weights = [(new(256, name="w"), np.zeros(1024, np.uint8))]
    other.load(weights)
    Case({"y": g.relu(x)}, {x: values(64, 5)}).run(other)
    assert one.memory() < before and library.calls["cuModuleUnload"] == 0
    other.close()
    assert one.memory() == before
    assert library.calls["cuModuleUnload"] == library.calls["cuModuleLoadDataEx"] > 0
    one.close()


def test_ptx_is_compiled_by_the_driver_and_stored(tmp_path: Path) -> None:
    library = FakeLibrary(add, [FakeCard(capability=(8, 9))])
    card = Driver(library).open(0)
    CudaJit(card, PtxImages(card), tmp_path).load(variants(1, 2))
    assert library.calls["cuLinkComplete"] == 2
    jit = CudaJit(card, PtxImages(card), tmp_path)
    assert jit.load(variants(2))[0].stack_bytes == 0
    assert library.calls["cuLinkComplete"] == 2 and jit.compiled == 0


def test_errors_of_the_drivers_compiler_have_its_log(card: Card, tmp_path: Path) -> None:
    class Broken(PtxImages):
        def trace(self, kernel: Kernel, parameters: Mapping[str, Any], symbol: str, threads: int) -> Image:
            return Image(BROKEN, 0)

    with pytest.raises(CudaError, match=r"kernel filled .*Unexpected token"):
        CudaJit(card, Broken(card), tmp_path).load(variants(1))


@pytest.mark.slow
def test_kernel_cache_keys_include_imported_sources() -> None:
    """Without them, the cache would return a kernel from before its edit."""
    allowed = {"errors.py", "devices/__init__.py", "devices/compile/program.py"}  # exceptions, and a base class
    assert imported_beyond(KERNEL_SOURCES, "devices/cuda/jit.py") <= {PACKAGE / name for name in allowed}
