"""Cards through CUDA's driver API: memory, streams, events, kernels and graphs.

Every method may be called from any thread; it makes the card's context current first. Every return code is checked:
`DeviceFull` if memory runs out, `DeviceLost` if the card or its context is dead, `CudaError` for all else.
"""

from __future__ import annotations

import ctypes
import os
import threading
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import byref, c_float, c_int, c_size_t, c_ubyte, c_uint64, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.devices.cuda import api
from llamado.devices.cuda.api import Api, CudaError, LaunchAttribute, LaunchConfig, NoDriver
from llamado.devices.device import Bytes, DeviceError, DeviceFull, DeviceLost

_SCRATCH = 4 << 20
"""Bytes of device memory through which a copy between overlapping ranges goes."""
_DEFAULT_SHARED = 48 << 10
"""Shared memory of a block beyond which a function has to ask for it (CUDA C++ Programming Guide, 20.7.3)."""
_LOG_BYTES = 16 << 10

# CUdevice_attribute
_WARP_SIZE, _MULTIPROCESSORS, _CAPABILITY_MAJOR, _CAPABILITY_MINOR, _SHARED_OPTIN = 10, 16, 75, 76, 97
# CUfunction_attribute
_LOCAL_BYTES, _REGISTERS, _MAX_DYNAMIC_SHARED = 3, 4, 8
# CUjit_option and CUjitInputType
_ERROR_LOG, _ERROR_LOG_BYTES, _PTX = 5, 6, 1
_STREAM_NON_BLOCKING = 1
_EVENT_DISABLE_TIMING = 2
_HOST_PORTABLE = 1
_CAPTURE_THREAD_LOCAL = 1

_CHAINED_GRAPHS = 12030
"""First version whose graphs keep the programmatic dependency of a chained launch (CUDA 12.3)."""


class CardProperties(NamedTuple):
    """Constant properties of a card."""

    number: int
    name: str
    """Product name."""
    total_bytes: int
    capability: tuple[int, int]
    """Compute capability: (9, 0) for sm_90."""
    processors: int
    shared_bytes: int
    """Most shared memory that a block can have."""
    warp: int
    """Threads of a warp."""
    pci: str
    """PCI address: domain, bus, device and function."""
    uuid: str


class Driver:
    """The installed driver.

    `library`: stand-in for libcuda.so.1. `dev`: folder of the device files. Raises `NoDriver`.
    """

    def __init__(self, library: Any = None, dev: Path = Path("/dev")) -> None:
        self.api = Api(library)
        self.version = self.api.version
        if code := self.api.call("cuInit", 0):
            raise NoDriver(f"{self.api.describe('cuInit', code)}{_advice(dev)}")
        if not self.count():
            raise NoDriver(f"the NVIDIA driver finds no card{_advice(dev)}")

    def count(self) -> int:
        """Return the number of cards."""
        return int(self.api.out(c_int, "cuDeviceGetCount"))

    def properties(self, number: int) -> CardProperties:
        """Return the properties of a card without creating a context on it."""
        device = self._device(number)
        name, pci = ctypes.create_string_buffer(256), ctypes.create_string_buffer(32)
        self.api.check("cuDeviceGetName", name, len(name), device)
        self.api.check("cuDeviceGetPCIBusId", pci, len(pci), device)
        identity = (c_ubyte * 16)()
        self.api.check("cuDeviceGetUuid_v2", identity, device)

        def attribute(which: int) -> int:
            return int(self.api.out(c_int, "cuDeviceGetAttribute", which, device))

        return CardProperties(
            number=number,
            name=name.value.decode(errors="replace"),
            total_bytes=self.api.out(c_size_t, "cuDeviceTotalMem_v2", device),
            capability=(attribute(_CAPABILITY_MAJOR), attribute(_CAPABILITY_MINOR)),
            processors=attribute(_MULTIPROCESSORS),
            shared_bytes=attribute(_SHARED_OPTIN),
            warp=attribute(_WARP_SIZE),
            pci=pci.value.decode(errors="replace"),
            uuid=f"GPU-{uuid.UUID(bytes=bytes(identity))}",
        )

    def open(self, number: int, name: str = "") -> Card:
        """Create the context of a card. `name`: the device's name in errors (default: CUDA and the number)."""
        return Card(self.api, self._device(number), self.properties(number), name or f"CUDA{number}")

    def _device(self, number: int) -> int:
        count = self.count()
        if not 0 <= number < count:
            raise DeviceError(f"there is no card {number}: the driver finds {count}, numbered from 0")
        return int(self.api.out(c_int, "cuDeviceGet", number))


def _advice(dev: Path) -> str:
    """Return likely reasons why the driver finds no card."""
    modules = [dev / "nvidiactl", dev / "nvidia-uvm"]
    files = [path for path in (*modules, *sorted(dev.glob("nvidia[0-9]*"))) if path.exists()]
    missing = [str(path) for path in modules if path not in files]
    closed = [str(path) for path in files if not os.access(path, os.R_OK | os.W_OK)]
    found = []
    if missing and not (dev / "dxg").exists():  # WSL has this one instead
        found.append(
            f"there is no {' and no '.join(missing)}: load the kernel modules nvidia and nvidia-uvm (`nvidia-smi`, run "
            "as root, does it), or run the container with --gpus all"
        )
    if closed:
        found.append(f"this user may not open {', '.join(closed)}: add the user to the group that owns them")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        found.append(f"CUDA_VISIBLE_DEVICES is {visible!r}, which may hide all cards: unset it")
    return "".join(f"; {reason}" for reason in found)


class Card:
    """An open card: its primary context, and a stream in which its work runs in order.

    Methods with a `stream` use the card's own by default and return before the work is done.
    """

    def __init__(self, driver: Api, device: int, properties: CardProperties, name: str) -> None:
        self.name, self.properties, self.version = name, properties, driver.version
        self._api, self._device = driver, device
        self._state = threading.Lock()
        self._lost: DeviceLost | None = None
        self._closed = False
        self._loss_callbacks: list[Callable[[DeviceLost], None]] = []
        self._copying = threading.Lock()
        self._scratch = 0
        self._allocated: set[int] = set()
        """Addresses of memory that is not released yet."""
        context = c_void_p()
        if code := driver.call("cuDevicePrimaryCtxRetain", byref(context), device):
            raise self._failure("cuDevicePrimaryCtxRetain", code)
        self._context = context.value
        self.stream = Stream(self)

    @property
    def can_chain(self) -> bool:
        """True if a chained kernel may start before the previous one has ended (programmatic dependent launch)."""
        return self.properties.capability >= (9, 0) and self.version >= _CHAINED_GRAPHS

    # --- errors ---

    @property
    def lost(self) -> DeviceLost | None:
        """The failure that ended the card; None while it works."""
        return self._lost

    def on_lost(self, callback: Callable[[DeviceLost], None]) -> None:
        """Call `callback` once when the card is lost, or now if it is lost already, in any thread."""
        with self._state:
            lost = self._lost
            if lost is None:
                self._loss_callbacks.append(callback)
        if lost is not None:
            callback(lost)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver in this card's context."""
        if self._lost is not None:
            raise DeviceLost(self.name, self._lost.why)
        if self._closed:
            raise DeviceError(f"{self.name} is closed")
        if code := self._api.call("cuCtxSetCurrent", self._context):
            raise self._failure("cuCtxSetCurrent", code)
        if code := self._api.call(name, *arguments):
            raise self._failure(name, code)

    def out(self, kind: Any, name: str, *arguments: Any) -> Any:
        """Call a function whose first parameter points to a result of a ctypes type. Return the result."""
        value = kind()
        self.call(name, byref(value), *arguments)
        return value.value

    def release(self, name: str, *arguments: Any) -> None:
        """Call a function that releases something, unless it is gone already with a closed or lost card."""
        if not self._closed:
            with suppress(DeviceLost):
                self.call(name, *arguments)

    def _failure(self, name: str, code: int) -> DeviceError:
        """Return the exception for a CUresult, and mark the card as lost if it is."""
        message = self._api.describe(name, code)
        if code == api.OUT_OF_MEMORY:
            return DeviceFull(f"{self.name}: {message}")
        if code not in api.LOSSES:
            return CudaError(f"{self.name}: {message}", code)
        with self._state:
            callbacks, self._loss_callbacks = self._loss_callbacks, []
            if self._lost is None:
                self._lost = DeviceLost(self.name, message)
            lost = self._lost
        for callback in callbacks:
            callback(lost)
        return DeviceLost(self.name, lost.why)

    def close(self) -> None:
        """Release all memory and the context, which other cards of this process may share."""
        if self._closed:
            return
        self.stream.free()
        for address in [*self._allocated]:
            self.free(address)
        self._closed = True
        # it may fail if the card is lost: then there is nothing left to release
        self._api.call("cuDevicePrimaryCtxRelease_v2", self._device)

    # --- memory ---

    def memory(self) -> tuple[int, int]:
        """Return (free bytes, total bytes)."""
        free, total = c_size_t(), c_size_t()
        self.call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value, total.value

    def allocate(self, n: int) -> int:
        """Return the address of `n` > 0 new bytes of any content, aligned to 256. Raises `DeviceFull`."""
        try:
            address = int(self.out(c_uint64, "cuMemAlloc_v2", n))
        except DeviceFull:
            free, total = self.memory()
            raise DeviceFull(
                f"{self.name} has no room for {n / 1e6:,.0f} MB: {free / 1e6:,.0f} of its {total / 1e6:,.0f} MB are "
                "free; place fewer layers on it, use a shorter context, or end other programs that use it"
            ) from None
        self._allocated.add(address)
        return address

    def free(self, address: int) -> None:
        """Release allocated memory, once all work that was submitted is done."""
        self._allocated.discard(address)
        self.release("cuMemFree_v2", address)

    def pinned(self, n: int) -> PinnedMemory:
        """Return `n` > 0 bytes of host memory that the card reads and writes directly."""
        return PinnedMemory(self, n)

    def zero(self, address: int, n: int, stream: Stream | None = None) -> None:
        """Set `n` bytes to zero."""
        if n:
            self.call("cuMemsetD8Async", address, 0, n, (stream or self.stream).handle)

    def upload(self, address: int, data: NDArray[Any], stream: Stream | None = None) -> None:
        """Copy a contiguous array to the card. The array must not change until the stream has done it."""
        if data.nbytes:
            source = _contiguous(data).ctypes.data
            self.call("cuMemcpyHtoDAsync_v2", address, source, data.nbytes, (stream or self.stream).handle)

    def download(self, address: int, data: NDArray[Any], stream: Stream | None = None) -> None:
        """Fill a contiguous array from the card. It must be kept until the stream has done it, and be in pinned memory
        for this to return before.
        """
        if data.nbytes:
            target = _contiguous(data).ctypes.data
            self.call("cuMemcpyDtoHAsync_v2", target, address, data.nbytes, (stream or self.stream).handle)

    def copy(self, to: int, source: int, n: int) -> None:
        """Copy `n` bytes within the card's memory in its own stream; the ranges may overlap (memmove)."""
        if not n or to == source:
            return
        if abs(to - source) >= n:
            self._copy(to, source, n)
            return
        with self._copying:  # the scratch memory serves one copy at a time
            if not self._scratch:
                self._scratch = self.allocate(_SCRATCH)
            starts = range(0, n, _SCRATCH)
            for at in starts if to < source else reversed(starts):  # so that no source is overwritten before it is read
                size = min(_SCRATCH, n - at)
                self._copy(self._scratch, source + at, size)
                self._copy(to + at, self._scratch, size)

    def _copy(self, to: int, source: int, n: int) -> None:
        self.call("cuMemcpyDtoDAsync_v2", to, source, n, self.stream.handle)

    # --- kernels ---

    def link(self, ptx: bytes) -> bytes:
        """Compile PTX for this card and return the cubin, for a cache. Raises `CudaError` with the compiler's log."""
        log = _CompileLog()
        linker = c_void_p()
        self.call("cuLinkCreate_v2", *log.options, byref(linker))
        try:
            cubin, size = c_void_p(), c_size_t()
            with log:
                self.call("cuLinkAddData_v2", linker, _PTX, ptx, len(ptx) + 1, b"kernels", 0, None, None)
                self.call("cuLinkComplete", linker, byref(cubin), byref(size))
            return ctypes.string_at(cubin.value or 0, size.value)
        finally:
            self.release("cuLinkDestroy", linker)

    def load(self, image: bytes) -> Module:
        """Load PTX or a cubin. Raises `CudaError` with the compiler's log."""
        log = _CompileLog()
        with log:
            return Module(self, self.out(c_void_p, "cuModuleLoadDataEx", image, *log.options))

    def launch(
        self,
        function: Function,
        grid: tuple[int, int],
        arguments: Sequence[int],
        chained: bool = False,
        stream: Stream | None = None,
    ) -> None:
        """Run a kernel over a grid of blocks; its parameters are 64-bit integers.

        `chained`: it may start before the previous kernel of the stream has ended, and waits for it by itself before
        it reads that kernel's results.
        """
        n = len(arguments)
        values = (c_uint64 * n)(*arguments)
        first = ctypes.addressof(values)
        pointers = (c_void_p * n)(*range(first, first + 8 * n, 8))
        config = LaunchConfig(
            (*grid, 1), (function.threads, 1, 1), function.shared_bytes, (stream or self.stream).handle, None, 0
        )
        if chained and self.can_chain:
            attribute = LaunchAttribute(id=api.PROGRAMMATIC_STREAM_SERIALIZATION, value=1)
            config.attributes, config.n_attributes = ctypes.addressof(attribute), 1
        self.call("cuLaunchKernelEx", byref(config), function.handle, pointers, None)

    def capture(self, work: Callable[[Stream], None]) -> Graph:
        """Return the work that `work` submits to the stream it gets, as a graph; the work does not run.

        Raises `CudaError` if the driver refuses. Each kernel must have run once before: loading it is refused, too.
        """
        stream = Stream(self)
        try:
            self.call("cuStreamBeginCapture_v2", stream.handle, _CAPTURE_THREAD_LOCAL)
            captured = c_void_p()
            try:
                work(stream)
            except BaseException:
                with suppress(DeviceError):  # the capture failed already
                    self.call("cuStreamEndCapture", stream.handle, byref(captured))
                    self.release("cuGraphDestroy", captured)
                raise
            self.call("cuStreamEndCapture", stream.handle, byref(captured))
            try:
                return Graph(self, self.out(c_void_p, "cuGraphInstantiateWithFlags", captured, 0))
            finally:
                self.release("cuGraphDestroy", captured)
        finally:
            stream.free()


def _contiguous(data: NDArray[Any]) -> NDArray[Any]:
    if not data.flags.c_contiguous:
        raise ValueError("an array that is not contiguous")
    return data


class _CompileLog:
    """Log of the driver's compiler. As a context manager it adds the log to a `CudaError`."""

    def __init__(self) -> None:
        self._text = ctypes.create_string_buffer(_LOG_BYTES)
        self._keys = (c_int * 2)(_ERROR_LOG, _ERROR_LOG_BYTES)
        self._values = (c_void_p * 2)(ctypes.addressof(self._text), _LOG_BYTES)
        self.options = (2, self._keys, self._values)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        text = self._text.value.decode(errors="replace").strip()
        if isinstance(error, CudaError) and text:
            raise CudaError(f"{error}; {text}", error.code) from error


class PinnedMemory:
    """Host memory that stays in RAM, for copies that run while the CPU goes on."""

    def __init__(self, card: Card, n: int) -> None:
        self._card = card
        try:
            self._address = int(card.out(c_void_p, "cuMemHostAlloc", n, _HOST_PORTABLE))
        except DeviceFull:
            raise DeviceFull(f"{card.name} cannot pin {n / 1e6:,.0f} MB of this machine's RAM") from None
        self.bytes: Bytes = np.ctypeslib.as_array((c_ubyte * n).from_address(self._address))

    def free(self) -> None:
        """Release the memory; arrays of it must not be used afterwards."""
        if self._address:
            self.bytes = np.empty(0, np.uint8)
            self._card.release("cuMemFreeHost", self._address)
            self._address = 0


class Stream:
    """A queue of work that runs in order."""

    def __init__(self, card: Card) -> None:
        self._card = card
        self.handle = card.out(c_void_p, "cuStreamCreate", _STREAM_NON_BLOCKING)

    def wait(self, event: Event) -> None:
        """Let later work wait for an event of any stream."""
        self._card.call("cuStreamWaitEvent", self.handle, event.handle, 0)

    def synchronize(self) -> None:
        """Wait until all work is done."""
        self._card.call("cuStreamSynchronize", self.handle)

    def free(self) -> None:
        """Release the stream; its work still runs to the end."""
        self._card.release("cuStreamDestroy_v2", self.handle)


class Event:
    """A point in a stream. An event that was not recorded counts as reached."""

    def __init__(self, card: Card, timed: bool = False) -> None:
        self._card = card
        self.handle = card.out(c_void_p, "cuEventCreate", 0 if timed else _EVENT_DISABLE_TIMING)

    def record(self, stream: Stream | None = None) -> None:
        """Move the event to the end of a stream, by default the card's own."""
        self._card.call("cuEventRecord", self.handle, (stream or self._card.stream).handle)

    def query(self) -> bool:
        """Return True if the work before the event is done."""
        try:
            self._card.call("cuEventQuery", self.handle)
        except CudaError as error:
            if error.code == api.NOT_READY:
                return False
            raise
        return True

    def synchronize(self) -> None:
        """Wait until the work before the event is done."""
        self._card.call("cuEventSynchronize", self.handle)

    def seconds_since(self, start: Event) -> float:
        """Return the seconds between two `timed` events that are reached."""
        return float(self._card.out(c_float, "cuEventElapsedTime", start.handle, self.handle)) / 1e3

    def free(self) -> None:
        """Release the event."""
        self._card.release("cuEventDestroy_v2", self.handle)


class Function(NamedTuple):
    """A kernel of a loaded module, and the size of its blocks."""

    handle: int
    symbol: str
    threads: int
    shared_bytes: int
    """Dynamic shared memory of a block."""
    registers: int
    """Registers of a thread."""
    local_bytes: int
    """Memory of a thread for spilled registers and local arrays."""


class Module:
    """Machine code on a card."""

    def __init__(self, card: Card, handle: int) -> None:
        self._card, self._handle = card, handle

    def function(self, symbol: str, threads: int, shared_bytes: int = 0) -> Function:
        """Return the kernel of a symbol for blocks of `threads` with `shared_bytes` of dynamic shared memory."""
        call, out = self._card.call, self._card.out
        handle = out(c_void_p, "cuModuleGetFunction", self._handle, symbol.encode())
        if shared_bytes > _DEFAULT_SHARED:
            call("cuFuncSetAttribute", handle, _MAX_DYNAMIC_SHARED, shared_bytes)
        registers, local_bytes = (
            out(c_int, "cuFuncGetAttribute", which, handle) for which in (_REGISTERS, _LOCAL_BYTES)
        )
        return Function(handle, symbol, threads, shared_bytes, registers, local_bytes)

    def unload(self) -> None:
        """Release the code; its functions, and graphs with them, must not run any more."""
        self._card.release("cuModuleUnload", self._handle)


class Graph:
    """Captured work that one call submits again."""

    def __init__(self, card: Card, handle: int) -> None:
        self._card, self._handle = card, handle

    def launch(self, stream: Stream | None = None) -> None:
        """Submit the work to a stream, by default the card's own."""
        self._card.call("cuGraphLaunch", self._handle, (stream or self._card.stream).handle)

    def free(self) -> None:
        """Release the graph, once it has run if it was submitted."""
        self._card.release("cuGraphExecDestroy", self._handle)
