"""The driver API: types of its functions, errors, and everything a card does, over the stand-in library."""

from __future__ import annotations

import ctypes
import os
import threading
from ctypes import c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_ulonglong, c_void_p
from pathlib import Path

import numpy as np
import pytest

from cuda.add_kernel import add
from cuda.fake_libcuda import BROKEN, FakeCard, FakeLibrary
from llamado.devices.cuda import api
from llamado.devices.cuda.api import Api, CudaError, LaunchAttribute, LaunchConfig, NoDriver
from llamado.devices.cuda.driver import Card, Driver, Event, Function, Stream
from llamado.devices.cuda.nvml import Nvml
from llamado.devices.device import DeviceError, DeviceFull, DeviceLost

# --- the interface of the library ---

PROTOTYPES = {
    "cuDriverGetVersion": "int*",
    "cuGetErrorName": "CUresult, const char**",
    "cuGetErrorString": "CUresult, const char**",
    "cuInit": "unsigned int",
    "cuDeviceGetCount": "int*",
    "cuDeviceGet": "CUdevice*, int",
    "cuDeviceGetName": "char*, int, CUdevice",
    "cuDeviceGetUuid_v2": "CUuuid*, CUdevice",
    "cuDeviceGetPCIBusId": "char*, int, CUdevice",
    "cuDeviceTotalMem_v2": "size_t*, CUdevice",
    "cuDeviceGetAttribute": "int*, CUdevice_attribute, CUdevice",
    "cuDevicePrimaryCtxRetain": "CUcontext*, CUdevice",
    "cuDevicePrimaryCtxRelease_v2": "CUdevice",
    "cuCtxSetCurrent": "CUcontext",
    "cuMemGetInfo_v2": "size_t*, size_t*",
    "cuMemAlloc_v2": "CUdeviceptr*, size_t",
    "cuMemFree_v2": "CUdeviceptr",
    "cuMemHostAlloc": "void**, size_t, unsigned int",
    "cuMemFreeHost": "void*",
    "cuMemcpyHtoDAsync_v2": "CUdeviceptr, const void*, size_t, CUstream",
    "cuMemcpyDtoHAsync_v2": "void*, CUdeviceptr, size_t, CUstream",
    "cuMemcpyDtoDAsync_v2": "CUdeviceptr, CUdeviceptr, size_t, CUstream",
    "cuMemsetD8Async": "CUdeviceptr, unsigned char, size_t, CUstream",
    "cuStreamCreate": "CUstream*, unsigned int",
    "cuStreamDestroy_v2": "CUstream",
    "cuStreamSynchronize": "CUstream",
    "cuStreamWaitEvent": "CUstream, CUevent, unsigned int",
    "cuEventCreate": "CUevent*, unsigned int",
    "cuEventDestroy_v2": "CUevent",
    "cuEventRecord": "CUevent, CUstream",
    "cuEventQuery": "CUevent",
    "cuEventSynchronize": "CUevent",
    "cuEventElapsedTime": "float*, CUevent, CUevent",
    "cuModuleLoadDataEx": "CUmodule*, const void*, unsigned int, CUjit_option*, void**",
    "cuModuleUnload": "CUmodule",
    "cuModuleGetFunction": "CUfunction*, CUmodule, const char*",
    "cuFuncSetAttribute": "CUfunction, CUfunction_attribute, int",
    "cuFuncGetAttribute": "int*, CUfunction_attribute, CUfunction",
    "cuLaunchKernelEx": "const CUlaunchConfig*, CUfunction, void**, void**",
    "cuLinkCreate_v2": "unsigned int, CUjit_option*, void**, CUlinkState*",
    "cuLinkAddData_v2": "CUlinkState, CUjitInputType, void*, size_t, const char*, unsigned int, CUjit_option*, void**",
    "cuLinkComplete": "CUlinkState, void**, size_t*",
    "cuLinkDestroy": "CUlinkState",
    "cuStreamBeginCapture_v2": "CUstream, CUstreamCaptureMode",
    "cuStreamEndCapture": "CUstream, CUgraph*",
    "cuGraphInstantiateWithFlags": "CUgraphExec*, CUgraph, unsigned long long",
    "cuGraphLaunch": "CUgraphExec, CUstream",
    "cuGraphExecDestroy": "CUgraphExec",
    "cuGraphDestroy": "CUgraph",
}
"""Parameter types in cuda.h of CUDA 13.0."""

HANDLES = {
    "CUcontext", "CUevent", "CUfunction", "CUgraph", "CUgraphExec", "CUlinkState", "CUmodule", "CUstream",
}  # fmt: skip
NUMBERS = {
    "CUdevice": c_int,
    "CUdeviceptr": c_uint64,
    "CUresult": c_int,
    "CUdevice_attribute": c_int,
    "CUfunction_attribute": c_int,
    "CUjitInputType": c_int,
    "CUstreamCaptureMode": c_int,
    "int": c_int,
    "size_t": c_size_t,
    "unsigned char": c_ubyte,
    "unsigned int": c_uint,
    "unsigned long long": c_ulonglong,
}


def ctypes_of(name: str) -> set[object]:
    """Return the types of ctypes that pass an argument of a type of C."""
    if name == "const char*":
        return {c_char_p, c_void_p}
    return {c_void_p} if name.endswith("*") or name in HANDLES else {NUMBERS[name]}


def test_signatures_are_those_of_the_header() -> None:
    assert api.SIGNATURES.keys() == PROTOTYPES.keys()
    for name, types in api.SIGNATURES.items():
        wanted = PROTOTYPES[name].split(", ")
        assert len(types) == len(wanted), name
        assert all(kind in ctypes_of(want) for kind, want in zip(types, wanted, strict=True)), name


def test_structures_have_the_layout_of_the_header() -> None:
    assert ctypes.sizeof(LaunchAttribute) == 72
    assert (LaunchAttribute.id.offset, LaunchAttribute.value.offset) == (0, 8)
    assert ctypes.sizeof(LaunchConfig) == 56
    offsets = {name: getattr(LaunchConfig, name).offset for name, _ in LaunchConfig._fields_}
    assert offsets == {
        "grid": 0, "block": 12, "shared_bytes": 24, "stream": 32, "attributes": 40, "n_attributes": 48,
    }  # fmt: skip


# --- no driver ---


def test_a_machine_without_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLAMADO_LIBCUDA", raising=False)
    monkeypatch.setattr(api, "_PLACES", ("libno-such-cuda.so.1",))
    with pytest.raises(NoDriver, match=r"no NVIDIA driver \(libno-such-cuda.*--gpus all.*LLAMADO_LIBCUDA"):
        Driver()


def test_the_library_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMADO_LIBCUDA", str(tmp_path / "missing.so"))
    with pytest.raises(NoDriver, match=r"LLAMADO_LIBCUDA names: .*missing\.so"):
        Driver()


def test_another_library_is_no_driver() -> None:
    with pytest.raises(NoDriver, match="no function cuDriverGetVersion"):
        Driver(ctypes.CDLL(None))


def test_an_old_driver() -> None:
    with pytest.raises(NoDriver, match=r"supports CUDA 11\.4, and 11\.8 is needed: update"):
        Driver(FakeLibrary(add, version=11040))
    assert Driver(FakeLibrary(add, version=11080)).version == 11080


def test_reasons_for_no_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = FakeLibrary(add, init_code=100)
    no_files = r"cuInit: CUDA_ERROR_NO_DEVICE \(100\): no device; there is no .*/nvidiactl and no .*/nvidia-uvm: load"
    with pytest.raises(NoDriver, match=no_files):
        Driver(closed, tmp_path)
    (tmp_path / "nvidiactl").touch()
    with pytest.raises(NoDriver, match=r"there is no [^ ]*/nvidia-uvm: load"):
        Driver(closed, tmp_path)
    for name in ("nvidia-uvm", "nvidia0"):
        (tmp_path / name).touch()
    with pytest.raises(NoDriver, match=r"no device$"):
        Driver(closed, tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: path.name != "nvidia0")
    with pytest.raises(NoDriver, match=r"may not open [^,]*/nvidia0: add the user"):
        Driver(closed, tmp_path)


def test_a_driver_may_find_no_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeLibrary, "_cuDeviceGetCount", lambda self, out: None)
    with pytest.raises(NoDriver, match=r"finds no card; there is no .*/nvidiactl"):
        Driver(FakeLibrary(add), tmp_path)


@pytest.mark.parametrize("value", ["", "-1", "5"])
def test_cards_may_be_hidden(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    with pytest.raises(NoDriver, match=f"CUDA_VISIBLE_DEVICES is {value!r}"):
        Driver(FakeLibrary(add), tmp_path)


# --- cards ---


def test_properties_need_no_context() -> None:
    library = FakeLibrary(add, [FakeCard(), FakeCard(name="Second", capability=(8, 6), total_bytes=1 << 24)])
    driver = Driver(library)
    assert driver.count() == 2
    found = driver.properties(1)
    assert found[:4] == (1, "Second", 1 << 24, (8, 6))
    assert (found.processors, found.shared_bytes, found.warp) == (8, 227 << 10, 32)
    assert (found.pci, found.uuid) == ("0000:02:00.0", "GPU-00010203-0405-0607-0809-0a0b0c0d0e01")
    assert not library.calls["cuDevicePrimaryCtxRetain"]
    for number in (-1, 2):
        with pytest.raises(DeviceError, match=f"no card {number}: the driver finds 2"):
            driver.open(number)


def read(card: Card, address: int, n: int) -> list[int]:
    """Return 64-bit integers of a card, once they are there."""
    data = np.empty(n, np.uint64)
    card.download(address, data)
    card.stream.synchronize()
    return data.tolist()


def test_memory_is_counted_and_full_cards_refuse(card: Card) -> None:
    free, total = card.memory()
    assert free == total == card.properties.total_bytes
    address = card.allocate(1 << 20)
    assert address % 256 == 0 and card.memory() == (total - (1 << 20), total)
    with pytest.raises(DeviceFull, match=r"CUDA0 has no room for 67 MB: 66 of its 67 MB are free; place fewer"):
        card.allocate(1 << 26)
    card.free(address)
    assert card.memory() == (total, total)
    with pytest.raises(CudaError, match="INVALID_VALUE"):
        card.free(address)


def test_copies(card: Card) -> None:
    a, b = card.allocate(80), card.allocate(80)
    numbers = np.arange(10, dtype=np.uint64)
    card.upload(a, numbers)
    card.zero(b, 80)
    card.zero(a + 8, 0)
    card.copy(b + 16, a, 64)
    assert read(card, b, 10) == [0, 0, *range(8)]
    with pytest.raises(CudaError, match="INVALID_VALUE"):
        card.copy(b + 24, a, 64)
    with pytest.raises(CudaError, match="INVALID_VALUE"):
        card.zero(numbers.ctypes.data, 8)  # a host address
    with pytest.raises(ValueError):
        card.upload(a, numbers[::2])


@pytest.mark.parametrize("shift", [-72, 8, 5 << 20])
def test_copies_may_overlap(card: Card, shift: int) -> None:
    """Overlapping copies take three steps and give the bytes of memmove."""
    n = 9 << 20
    memory = card.allocate(15 << 20)
    numbers = np.arange(n // 8, dtype=np.uint64)
    card.upload(memory + 80, numbers)
    card.copy(memory + 80 + shift, memory + 80, n)
    found = np.empty_like(numbers)
    card.download(memory + 80 + shift, found)
    assert (found == numbers).all()


def test_overlapping_copies_share_their_scratch_memory(library: FakeLibrary) -> None:
    driver = Driver(library)
    card, other = driver.open(0), driver.open(0)
    memory = other.allocate(100)
    free, _ = other.memory()
    for _ in range(2):
        card.copy(memory + 8, memory, 80)
        assert free - other.memory()[0] == 4 << 20
    card.close()
    assert other.memory()[0] == free


def test_errors_of_the_library_have_its_words(card: Card) -> None:
    with pytest.raises(
        CudaError, match=r"^CUDA0: cuMemFree_v2: CUDA_ERROR_INVALID_VALUE \(1\): invalid value$"
    ) as caught:
        card.free(12345)
    assert caught.value.code == 1
    assert (
        Api(FakeLibrary(add)).describe("cuInit", 803).startswith("cuInit: error (803); the driver's library and kernel")
    )


def test_pinned_memory_is_copied_later(card: Card, library: FakeLibrary) -> None:
    address, memory = card.allocate(64), card.pinned(64)
    memory.bytes[:] = 1
    card.upload(address, memory.bytes)
    memory.bytes[:] = 2
    done = Event(card)
    done.record()
    assert not done.query()
    done.synchronize()
    assert done.query()
    assert read(card, address, 1) == [0x0202020202020202]  # the copy ran after the change
    memory.free()
    memory.free()
    library.most_pinned = 1 << 20
    with pytest.raises(DeviceFull, match="CUDA0 cannot pin 8 MB"):
        card.pinned(8_000_000)


def test_streams_wait_for_events(card: Card, kernel: Function) -> None:
    address, result = card.allocate(32), card.pinned(32)
    card.zero(address, 32)
    card.launch(kernel, (1, 1), (address, 5))
    other, computed, copied = Stream(card), Event(card), Event(card)
    computed.record()
    other.wait(computed)
    card.download(address, result.bytes, other)
    copied.record(other)
    copied.synchronize()
    assert result.bytes.view(np.uint64).tolist() == [5] * 4
    for made in (other, computed, copied):
        made.free()


def test_events_measure_time(card: Card, kernel: Function) -> None:
    start, end = Event(card, timed=True), Event(card, timed=True)
    assert end.query()  # it was never recorded
    start.record()
    address = card.allocate(32)
    card.launch(kernel, (1, 1), (address, 5))
    card.launch(kernel, (1, 1), (address, 5))
    end.record()
    with pytest.raises(CudaError, match="NOT_READY"):
        end.seconds_since(start)
    end.synchronize()
    assert end.seconds_since(start) == pytest.approx(0.002)


# --- kernels ---


def test_kernels(card: Card, library: FakeLibrary) -> None:
    address = card.allocate(8 * 24)
    card.zero(address, 8 * 24)
    module = card.load(b"image\0with zeros")
    function = module.function("add", 4, 100 << 10)
    assert (function.symbol, function.threads, function.registers, function.local_bytes) == ("add", 4, 32, 0)
    card.launch(function, (3, 2), (address, 7))
    card.launch(function, (2, 1), (address, -2), chained=True)
    assert read(card, address, 24) == [5] * 8 + [7] * 16
    first, second = library.launches
    assert first[1:] == ("add", (3, 2), 4, 100 << 10, (address, 7), False)
    assert second[2:] == ((2, 1), 4, 100 << 10, (address, 2**64 - 2), True)
    module.unload()
    with pytest.raises(CudaError, match="INVALID_HANDLE"):
        card.launch(function, (1, 1), (address, 1))


@pytest.mark.parametrize(("card_", "version"), [(FakeCard(capability=(8, 9)), 13000), (FakeCard(), 12020)])
def test_kernels_are_chained_only_if_the_card_can(card_: FakeCard, version: int) -> None:
    library = FakeLibrary(add, [card_], version=version)
    card = Driver(library).open(0)
    address = card.allocate(32)
    card.launch(card.load(b"kernels").function("add", 4), (1, 1), (address, 7), chained=True)
    card.stream.synchronize()
    assert not card.can_chain and not library.launches[0].chained


def test_bad_kernels(card: Card) -> None:
    with pytest.raises(CudaError, match=r"INVALID_PTX.*; ptxas application ptx input, line 1; fatal"):
        card.load(BROKEN)
    with pytest.raises(CudaError, match=r"INVALID_PTX.*; ptxas application ptx input, line 1; fatal"):
        card.link(BROKEN)
    module = card.load(b"kernels")
    with pytest.raises(CudaError, match="cuModuleGetFunction: CUDA_ERROR_NOT_FOUND"):
        module.function("", 32)
    with pytest.raises(CudaError, match="cuFuncSetAttribute"):
        module.function("add", 32, 300 << 10)
    for threads, grid in ((2048, (1, 1)), (4, (0, 1)), (4, (1, 70000))):
        with pytest.raises(CudaError, match="cuLaunchKernelEx: CUDA_ERROR_INVALID_VALUE"):
            card.launch(module.function("add", threads), grid, (0, 0))


def test_cubins_come_from_the_linker(card: Card, library: FakeLibrary) -> None:
    assert card.link(b"kernels\0of a card") == b"kernels\0of a card"
    assert library.calls["cuLinkDestroy"] == 1


def test_every_thread_gets_the_context() -> None:
    driver = Driver(FakeLibrary(add, [FakeCard(), FakeCard()]))
    cards = [driver.open(0), driver.open(1, "second")]
    addresses = [card.allocate(32) for card in cards]
    failures = []

    def work(card: Card, address: int) -> None:
        try:
            card.launch(card.load(b"kernels").function("add", 4), (1, 1), (address, 1))
            card.stream.synchronize()
        except DeviceError as error:
            failures.append(error)

    for card, address in zip(cards, addresses, strict=True):
        card.zero(address, 32)
        thread = threading.Thread(target=work, args=(card, address))
        thread.start()
        thread.join()
        work(card, address)
    assert not failures
    assert [read(card, address, 4) for card, address in zip(cards, addresses, strict=True)] == [[2] * 4] * 2
    with pytest.raises(CudaError, match=r"^second: cuMemFree_v2"):
        cards[1].free(addresses[0])


# --- losses ---


def test_a_kernel_that_fails_loses_the_card(card: Card, kernel: Function) -> None:
    address = card.allocate(32)
    lost: list[DeviceLost] = []
    card.on_lost(lost.append)
    card.launch(kernel, (2, 1), (address, 1))  # twice the memory
    assert card.lost is None
    with pytest.raises(
        DeviceLost, match=r"CUDA0 is lost: cuStreamSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS \(700\)"
    ) as caught:
        card.stream.synchronize()
    assert caught.value.device == "CUDA0"
    assert lost == [card.lost]
    card.on_lost(lost.append)
    assert len(lost) == 2
    with pytest.raises(DeviceLost, match="ILLEGAL_ADDRESS"):
        card.allocate(1)
    card.free(address)  # gone with the card
    card.close()


def test_losses_are_reported_once(card: Card) -> None:
    """Several threads may get the error at once, after `call` has checked the card."""
    lost: list[DeviceLost] = []
    card.on_lost(lost.append)
    first, second = card._failure("cuStreamSynchronize", 700), card._failure("cuMemAlloc_v2", 719)
    assert lost == [card.lost]
    assert str(first) == str(second) == str(card.lost)


def test_a_card_that_falls_off_the_bus_can_be_opened_again(library: FakeLibrary) -> None:
    driver = Driver(library)
    card = driver.open(0)
    library.lose(0, after=2)
    card.allocate(10)
    card.allocate(10)
    with pytest.raises(DeviceLost, match=r"cuMemAlloc_v2: CUDA_ERROR_UNKNOWN \(999\)"):
        card.allocate(10)
    card.close()
    with pytest.raises(DeviceLost, match=r"cuDevicePrimaryCtxRetain: CUDA_ERROR_DEVICE_UNAVAILABLE \(46\)"):
        driver.open(0)
    library.repair(0)
    card = driver.open(0)
    assert card.memory()[0] == card.properties.total_bytes
    card.close()


INCONSISTENT = (226, 700, 702, 714, 715, 716, 717, 718, 719, 721, 911)
"""Errors that leave "the process in an inconsistent state" (cuda.h)."""


@pytest.mark.parametrize("code", [*INCONSISTENT, 4, 46, 100, 101, 214, 220, 709, 710, 806, 810, 999])
def test_errors_of_a_dead_context_lose_the_card(library: FakeLibrary, code: int) -> None:
    card = Driver(library).open(0)
    library.fail(0, code)
    with pytest.raises(DeviceLost, match=rf"\({code}\)"):
        card.memory()


def test_other_errors_keep_the_card(card: Card) -> None:
    with pytest.raises(CudaError):
        card.free(1)
    assert card.lost is None and card.memory()


def test_a_closed_card_refuses(library: FakeLibrary) -> None:
    card = Driver(library).open(0)
    address, event = card.allocate(10), Event(card)
    card.close()
    card.close()
    with pytest.raises(DeviceError, match="CUDA0 is closed"):
        card.memory()
    card.free(address)
    event.free()
    assert library.calls["cuDevicePrimaryCtxRelease_v2"] == 1


# --- the management library ---


class FakeNvml:
    """Half the time of card 0000:01:00.0 is used."""

    def __init__(self, code: int = 0) -> None:
        def returning(*fill: int) -> ctypes._FuncPointer:
            def function(*arguments: int) -> int:
                if not code:
                    (c_uint * len(fill)).from_address(arguments[-1])[:] = fill
                return code

            return function

        self.nvmlInit_v2 = ctypes.CFUNCTYPE(c_int)(lambda: 0)
        self.nvmlDeviceGetHandleByPciBusId_v2 = ctypes.CFUNCTYPE(c_int, c_char_p, c_void_p)(
            lambda pci, out: code or 2 * (pci != b"0000:01:00.0")
        )
        pointers = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p)
        self.nvmlDeviceGetUtilizationRates = pointers(returning(50, 10))


def test_utilization_of_cards() -> None:
    nvml = Nvml.open(FakeNvml())
    assert nvml is not None
    assert nvml.utilization("0000:01:00.0") == 0.5
    assert nvml.utilization("0000:02:00.0") is None
    lost = Nvml.open(FakeNvml(15))
    assert lost is not None and lost.utilization("0000:01:00.0") is None
    assert Nvml.open(object()) is None
