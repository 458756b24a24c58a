"""A stand-in for libcuda.so.1: the functions that the CUDA device calls, over memory in numpy arrays.

It is called through the ctypes interface, and as strict as the real driver: handles, contexts of threads, addresses
and sizes are checked, new memory has arbitrary content, and submitted work runs as late as allowed, when something
waits for it. So a missing wait reads wrong bytes.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_char_p, c_float, c_int, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from llamado.devices.cuda.api import LaunchAttribute, LaunchConfig

NAMES = {
    1: "INVALID_VALUE",
    2: "OUT_OF_MEMORY",
    3: "NOT_INITIALIZED",
    46: "DEVICE_UNAVAILABLE",
    100: "NO_DEVICE",
    101: "INVALID_DEVICE",
    201: "INVALID_CONTEXT",
    214: "ECC_UNCORRECTABLE",
    218: "INVALID_PTX",
    400: "INVALID_HANDLE",
    500: "NOT_FOUND",
    600: "NOT_READY",
    700: "ILLEGAL_ADDRESS",
    719: "LAUNCH_FAILED",
    801: "NOT_SUPPORTED",
    900: "STREAM_CAPTURE_UNSUPPORTED",
    901: "STREAM_CAPTURE_INVALIDATED",
    908: "STREAM_CAPTURE_WRONG_THREAD",
    999: "UNKNOWN",
}
BROKEN = b"broken"
"""Images that begin so do not compile."""

_ALIGNMENT = 256
_GAP = 256
"""Least number of invalid bytes between two allocations."""
_PAGE = 4096

_UNSAFE = frozenset(
    {
        "cuEventQuery",
        "cuEventSynchronize",
        "cuMemAlloc_v2",
        "cuMemFreeHost",
        "cuMemFree_v2",
        "cuMemHostAlloc",
        "cuModuleLoadDataEx",
        "cuModuleUnload",
        "cuStreamSynchronize",
    }
)
"""Functions that a thread may not call while it captures (cuThreadExchangeStreamCaptureMode in cuda.h)."""

T = TypeVar("T")


class Code(Exception):
    """A CUresult other than success."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class BadAddress(Exception):
    """A kernel accesses bytes that are not allocated."""


class FakeMemory:
    """Memory of one card. The byte at a device address is `bytes[address - base]`; allocated bytes are `valid`."""

    def __init__(self, base: int, total: int) -> None:
        self.base, self.total, self.used = base, total, 0
        arena = total + total // 4 + (1 << 20)  # an address space is not fragmented
        self.bytes: NDArray[np.uint8] = np.zeros(arena, np.uint8)
        self.valid: NDArray[np.bool_] = np.zeros(arena, np.bool_)
        self._spans: dict[int, int] = {}
        """Sizes of the allocations by their starts, in order."""

    def allocate(self, n: int) -> int:
        """Return the address of `n` bytes of arbitrary content."""
        if n <= 0:
            raise Code(1)
        if self.used + n > self.total:
            raise Code(2)
        start = _GAP
        for at, size in self._spans.items():
            if at - _GAP >= start + n:
                break
            start = -(-(at + size + _GAP) // _ALIGNMENT) * _ALIGNMENT
        if start + n + _GAP > self.bytes.size:
            raise Code(2)
        self._spans[start] = n
        self._spans = dict(sorted(self._spans.items()))
        self.bytes[start : start + n] = 0xCB
        self.valid[start : start + n] = True
        self.used += n
        return self.base + start

    def free(self, address: int) -> None:
        """Release an allocation."""
        start = address - self.base
        n = self._spans.pop(start, None)
        if n is None:
            raise Code(1)
        self.valid[start : start + n] = False
        self.used -= n

    def view(self, address: int, size: int) -> NDArray[np.uint8]:
        """Return allocated bytes, to read and write. Raises `BadAddress`."""
        start = address - self.base
        if start < 0 or start + size > self.bytes.size or not self.valid[start : start + size].all():
            raise BadAddress(f"{size} bytes at {address:#x} are not all allocated")
        return self.bytes[start : start + size]

    def span(self, address: int, size: int) -> NDArray[np.uint8]:
        """Return the bytes of a copy."""
        if not size:
            raise Code(1)
        try:
            return self.view(address, size)
        except BadAddress:
            raise Code(1) from None


Run = Callable[[bytes, str, FakeMemory, tuple[int, int], int, int, tuple[int, ...]], None]
"""Runs a kernel: called with image, symbol, memory, grid, threads of a block, shared bytes and arguments (unsigned)."""


class FakeLaunch(NamedTuple):
    """A kernel that ran."""

    card: int
    symbol: str
    grid: tuple[int, int]
    threads: int
    shared_bytes: int
    arguments: tuple[int, ...]
    chained: bool


@dataclass
class FakeCard:
    """A card, and its state."""

    total_bytes: int = 1 << 26
    capability: tuple[int, int] = (9, 0)
    processors: int = 8
    shared_bytes: int = 227 << 10
    name: str = "Fake Card"
    number: int = field(default=0, init=False)
    users: int = field(default=0, init=False)
    failed: int = field(default=0, init=False)
    calls_left: int | None = field(default=None, init=False)
    streams: list[FakeStream] = field(default_factory=list, init=False)
    _memory: FakeMemory | None = field(default=None, init=False)

    @property
    def memory(self) -> FakeMemory:
        """Memory of the card, at addresses that neither the host nor another card uses."""
        if self._memory is None:
            self._memory = FakeMemory((0x00CA_F000 + self.number) << 32 | 0xB000_0000, self.total_bytes)
        return self._memory

    def finish(self) -> None:
        """Run all submitted work."""
        for stream in self.streams:
            stream.run()

    def reset(self) -> None:
        """Drop everything of the context."""
        self.failed, self._memory = 0, None
        self.streams.clear()


@dataclass(eq=False)
class FakeStream:
    """Work that runs in order once something waits for it."""

    card: FakeCard
    queue: deque[Callable[[], None]] = field(default_factory=deque)
    submitted: int = 0
    done: int = 0
    capture: list[Callable[[], None]] | None = None
    thread: int = 0
    invalidated: bool = False

    def submit(self, work: Callable[[], None]) -> None:
        if self.capture is not None:
            self.capture.append(work)
            return
        self.queue.append(work)
        self.submitted += 1

    def run(self, until: int | None = None) -> None:
        """Run work up to a number of items."""
        while self.queue and (until is None or self.done < until):
            self.done += 1
            self.queue.popleft()()


@dataclass(eq=False)
class _Event:
    card: FakeCard
    timed: bool
    stream: FakeStream | None = None
    at: int = 0

    def reached(self) -> bool:
        return self.stream is None or self.stream.done >= self.at

    def wait(self) -> None:
        if self.stream is not None:
            self.stream.run(self.at)


@dataclass(eq=False)
class _Module:
    card: FakeCard
    image: bytes
    loaded: bool = True


@dataclass(eq=False)
class _Function:
    module: _Module
    symbol: str
    most_shared: int = 48 << 10
    loaded: bool = False


@dataclass(eq=False)
class _Graph:
    card: FakeCard
    work: list[Callable[[], None]]


@dataclass(eq=False)
class _ExecutableGraph(_Graph):
    """A graph that can be launched."""


@dataclass(eq=False)
class _Linker:
    card: FakeCard
    options: Sequence[Any]
    cubin: Any = None


class _Entry:
    """A function of the library, which checks its arguments as ctypes does."""

    argtypes: Sequence[Any] = ()
    restype: Any = None

    def __init__(self, library: FakeLibrary, name: str, function: Callable[..., None]) -> None:
        self._library, self._name, self._function = library, name, function

    def __call__(self, *arguments: Any) -> int:
        if len(arguments) != len(self.argtypes):
            raise TypeError(f"{self._name} takes {len(self.argtypes)} arguments, not {len(arguments)}")
        for i, (kind, argument) in enumerate(zip(self.argtypes, arguments, strict=True), 1):
            try:
                kind.from_param(argument)
            except TypeError as error:
                raise ctypes.ArgumentError(f"argument {i} of {self._name}: {error}") from None
        return self._library.enter(self._name, self._function, arguments)


class FakeLibrary:
    """The library. `cards`: what the machine has. `captures`: False if stream capture is refused.

    `init_code`: result of cuInit. Attributes for tests: `calls` counts calls by function, `launches` has the last
    kernels that ran, `failure` is the exception of a kernel that failed; `most_pinned` limits pinned bytes.
    """

    def __init__(
        self,
        run: Run,
        cards: Sequence[FakeCard] = (),
        *,
        version: int = 13000,
        captures: bool = True,
        init_code: int = 0,
    ) -> None:
        self._run, self._version, self._captures, self._init_code = run, version, captures, init_code
        self.cards = list(cards) or [FakeCard()]
        for number, card in enumerate(self.cards):
            card.number = number
        self.calls: Counter[str] = Counter()
        self.launches: deque[FakeLaunch] = deque(maxlen=10_000)
        self.failure: BaseException | None = None
        self.most_pinned = 1 << 30
        self._visible: list[FakeCard] = []
        self._initialized = False
        self._lock = threading.RLock()
        self._thread = threading.local()
        self._handles: dict[int, object] = {}
        self._pinned: dict[int, Any] = {}
        self._texts: dict[tuple[str, int], c_char_p] = {}

    def lose(self, number: int, after: int = 0) -> None:
        """Let a card fall off the bus after some more calls; `repair` brings it back, for new contexts."""
        self.cards[number].calls_left = after

    def repair(self, number: int) -> None:
        """Let a lost card work again once it is closed and opened."""
        self.cards[number].calls_left = None

    def fail(self, number: int, code: int) -> None:
        """Let every further call for a card return a code."""
        self.cards[number].failed = code

    @property
    def pinned_bytes(self) -> int:
        """Host memory that is pinned."""
        return sum(block.n for block in self._pinned.values())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let other threads wait with their next call until the end of the block."""
        with self._lock:
            yield

    def __getattr__(self, name: str) -> _Entry:
        function = getattr(type(self), f"_{name}", None) if name.startswith("cu") else None
        if function is None:
            raise AttributeError(name)
        entry = _Entry(self, name, function.__get__(self))
        self.__dict__[name] = entry  # a library gives the same function each time
        return entry

    def enter(self, name: str, function: Callable[..., None], arguments: Sequence[Any]) -> int:
        """Run a function and return its CUresult."""
        with self._lock:
            self.calls[name] += 1
            try:
                if not self._initialized and name not in (
                    "cuInit", "cuDriverGetVersion", "cuGetErrorName", "cuGetErrorString"
                ):  # fmt: skip
                    raise Code(3)
                card: FakeCard | None = getattr(self._thread, "card", None)
                if card is not None and card.calls_left is not None and name != "cuCtxSetCurrent":
                    card.calls_left -= 1
                if name in _UNSAFE:
                    self._refuse_while_capturing()
                function(*arguments)
            except Code as error:
                return error.code
            return 0

    # --- helpers ---

    def _new(self, made: object) -> int:
        handle = 0x5EED_0000_0000 + 16 * (len(self._handles) + 1)
        self._handles[handle] = made
        return handle

    def _get(self, kind: type[T], handle: Any) -> T:
        """Return the object of a handle, which must be of the thread's card."""
        found = self._handles.get(_address(handle))
        if type(found) is not kind:
            raise Code(400)
        card = self._card()
        if getattr(found, "card", card) is not card:
            raise Code(400)
        return found

    def _drop(self, kind: type[T], handle: Any) -> T:
        found = self._get(kind, handle)
        self._handles[_address(handle)] = None  # handles are not used again
        return found

    def _card(self) -> FakeCard:
        """Return the card of the calling thread's context, which must be alive."""
        card: FakeCard | None = getattr(self._thread, "card", None)
        if card is None or not card.users:
            raise Code(201)
        if card.calls_left is not None and card.calls_left < 0:
            raise Code(999)
        if card.failed:
            raise Code(card.failed)
        return card

    def _device(self, number: int) -> FakeCard:
        if not 0 <= number < len(self._visible):
            raise Code(101)
        return self._visible[number]

    def _capturing(self) -> list[FakeStream]:
        """Return the streams that this thread captures."""
        thread = threading.get_ident()
        return [s for c in self.cards for s in c.streams if s.capture is not None and s.thread == thread]

    def _refuse_while_capturing(self) -> None:
        for stream in self._capturing():
            stream.invalidated = True
            raise Code(900)

    def _host(self, address: int, n: int) -> tuple[NDArray[np.uint8], bool]:
        """Return host bytes, and True if they are pinned."""
        if not address:
            raise Code(1)
        for card in self.cards:
            if card._memory is not None and 0 <= address - card.memory.base < card.memory.bytes.size:
                raise Code(1)  # a device address
        for start, block in self._pinned.items():
            if start <= address < start + block.n:
                if address + n > start + block.n:
                    raise Code(1)
                return np.frombuffer((ctypes.c_ubyte * n).from_address(address), np.uint8), True
        return np.frombuffer((ctypes.c_ubyte * n).from_address(address), np.uint8), False

    # --- errors and cards ---

    def _cuDriverGetVersion(self, out: Any) -> None:
        _store(out, c_int, self._version)

    def _cuInit(self, flags: int) -> None:
        if flags:
            raise Code(1)
        chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
        self._visible = list(self.cards)
        if chosen is not None:
            numbers = [int(text) for text in chosen.split(",") if text.strip().isdigit()]
            self._visible = [self.cards[number] for number in numbers if number < len(self.cards)]
        if self._init_code or not self._visible:
            raise Code(self._init_code or 100)
        self._initialized = True

    def _cuGetErrorName(self, code: int, out: Any) -> None:
        self._store_text("name", code, f"CUDA_ERROR_{NAMES[code]}" if code in NAMES else "", out)

    def _cuGetErrorString(self, code: int, out: Any) -> None:
        text = NAMES[code].lower().replace("_", " ") if code in NAMES else ""
        if code in (700, 719) and self.failure is not None:
            text += f": {type(self.failure).__name__}: {self.failure}"
        self._store_text("string", code, text, out)

    def _store_text(self, kind: str, code: int, text: str, out: Any) -> None:
        if not text:
            raise Code(1)
        self._texts[kind, code] = c_char_p(text.encode())
        _store(out, c_void_p, ctypes.cast(self._texts[kind, code], c_void_p).value)

    def _cuDeviceGetCount(self, out: Any) -> None:
        _store(out, c_int, len(self._visible))

    def _cuDeviceGet(self, out: Any, number: int) -> None:
        self._device(number)
        _store(out, c_int, number)

    def _cuDeviceGetName(self, text: Any, size: int, device: int) -> None:
        name = self._device(device).name.encode()[: size - 1] + b"\0"
        ctypes.memmove(_address(text), name, len(name))

    def _cuDeviceGetPCIBusId(self, text: Any, size: int, device: int) -> None:
        ctypes.memmove(_address(text), f"0000:{self._device(device).number + 1:02X}:00.0".encode() + b"\0", 13)

    def _cuDeviceGetUuid_v2(self, out: Any, device: int) -> None:
        ctypes.memmove(_address(out), bytes([*range(15), self._device(device).number]), 16)

    def _cuDeviceTotalMem_v2(self, out: Any, device: int) -> None:
        _store(out, c_size_t, self._device(device).total_bytes)

    def _cuDeviceGetAttribute(self, out: Any, attribute: int, device: int) -> None:
        card = self._device(device)
        values = {10: 32, 16: card.processors, 75: card.capability[0], 76: card.capability[1]}
        _store(out, c_int, (values | {97: card.shared_bytes})[attribute])

    def _cuDevicePrimaryCtxRetain(self, out: Any, device: int) -> None:
        card = self._device(device)
        if card.calls_left is not None and card.calls_left < 0:
            raise Code(46)
        card.users += 1
        _store(out, c_void_p, self._new(card))

    def _cuDevicePrimaryCtxRelease_v2(self, device: int) -> None:
        card = self._device(device)
        if not card.users:
            raise Code(201)
        card.users -= 1
        if not card.users:
            card.reset()
            for handle, made in self._handles.items():
                if made is card or getattr(made, "card", None) is card:
                    self._handles[handle] = None

    def _cuCtxSetCurrent(self, context: Any) -> None:
        card = self._handles.get(_address(context))
        if not isinstance(card, FakeCard):
            raise Code(201)
        self._thread.card = card

    # --- memory ---

    def _cuMemGetInfo_v2(self, free: Any, total: Any) -> None:
        memory = self._card().memory
        _store(free, c_size_t, memory.total - memory.used)
        _store(total, c_size_t, memory.total)

    def _cuMemAlloc_v2(self, out: Any, n: int) -> None:
        _store(out, c_uint64, self._card().memory.allocate(n))

    def _cuMemFree_v2(self, address: int) -> None:
        card = self._card()
        card.finish()
        card.memory.free(address)

    def _cuMemHostAlloc(self, out: Any, n: int, flags: int) -> None:
        self._card()
        if n <= 0:
            raise Code(1)
        if n + self.pinned_bytes > self.most_pinned:
            raise Code(2)
        block = _PinnedBlock(n)
        self._pinned[block.address] = block
        _store(out, c_void_p, block.address)

    def _cuMemFreeHost(self, address: Any) -> None:
        self._card().finish()
        if self._pinned.pop(_address(address), None) is None:
            raise Code(1)

    def _cuMemcpyHtoDAsync_v2(self, to: int, source: Any, n: int, stream: Any) -> None:
        card, queue = self._card(), self._get(FakeStream, stream)
        target, (data, pinned) = card.memory.span(to, n), self._host(_address(source), n)
        if not pinned:
            self._refuse_while_capturing()
            data = data.copy()  # the driver stages it
        queue.submit(lambda: np.copyto(target, data))

    def _cuMemcpyDtoHAsync_v2(self, to: Any, source: int, n: int, stream: Any) -> None:
        card, queue = self._card(), self._get(FakeStream, stream)
        data, (target, pinned) = card.memory.span(source, n), self._host(_address(to), n)
        if not pinned:
            self._refuse_while_capturing()
        queue.submit(lambda: np.copyto(target, data))
        if not pinned:
            queue.run()

    def _cuMemcpyDtoDAsync_v2(self, to: int, source: int, n: int, stream: Any) -> None:
        memory, queue = self._card().memory, self._get(FakeStream, stream)
        target, data = memory.span(to, n), memory.span(source, n)
        if abs(to - source) < n:  # the result of the real one is undefined
            queue.submit(lambda: target.fill(0xEE))
        else:
            queue.submit(lambda: np.copyto(target, data))

    def _cuMemsetD8Async(self, to: int, value: int, n: int, stream: Any) -> None:
        target, queue = self._card().memory.span(to, n), self._get(FakeStream, stream)
        queue.submit(lambda: target.fill(value))

    # --- streams and events ---

    def _cuStreamCreate(self, out: Any, flags: int) -> None:
        stream = FakeStream(self._card())
        stream.card.streams.append(stream)
        _store(out, c_void_p, self._new(stream))

    def _cuStreamDestroy_v2(self, stream: Any) -> None:
        if self._get(FakeStream, stream).capture is not None:
            raise Code(900)
        found = self._drop(FakeStream, stream)
        found.run()
        found.card.streams.remove(found)

    def _cuStreamSynchronize(self, stream: Any) -> None:
        self._get(FakeStream, stream).run()

    def _cuStreamWaitEvent(self, stream: Any, event: Any, flags: int) -> None:
        found = self._get(_Event, event)
        other, at = found.stream, found.at
        if other is not None:
            self._get(FakeStream, stream).submit(lambda: other.run(at))

    def _cuEventCreate(self, out: Any, flags: int) -> None:
        _store(out, c_void_p, self._new(_Event(self._card(), timed=not flags & 2)))

    def _cuEventDestroy_v2(self, event: Any) -> None:
        self._drop(_Event, event)

    def _cuEventRecord(self, event: Any, stream: Any) -> None:
        found, queue = self._get(_Event, event), self._get(FakeStream, stream)
        if queue.capture is not None:
            queue.invalidated = True
            raise Code(900)
        found.stream, found.at = queue, queue.submitted

    def _cuEventQuery(self, event: Any) -> None:
        """Run one item of work each time, so that a caller that polls comes to the end."""
        found = self._get(_Event, event)
        if found.reached() or found.stream is None:
            return
        found.stream.run(found.stream.done + 1)
        raise Code(600)

    def _cuEventSynchronize(self, event: Any) -> None:
        self._get(_Event, event).wait()

    def _cuEventElapsedTime(self, out: Any, start: Any, end: Any) -> None:
        """Store a millisecond for each item of work between two events of a stream."""
        first, last = self._get(_Event, start), self._get(_Event, end)
        if not (first.timed and last.timed and first.stream and last.stream):
            raise Code(400)
        if not (first.reached() and last.reached()):
            raise Code(600)
        _store(out, c_float, float(last.at - first.at))

    # --- kernels ---

    def _cuModuleLoadDataEx(self, out: Any, image: bytes, n: int, options: Any, values: Any) -> None:
        card = self._card()
        self._compile(image, list(zip(list(options), list(values), strict=True))[:n])
        _store(out, c_void_p, self._new(_Module(card, image)))

    def _compile(self, image: bytes, options: Sequence[tuple[int, int]]) -> None:
        given = dict(options)
        if image.startswith(BROKEN):
            log = b"ptxas application ptx input, line 1; fatal   : Unexpected token"[: given.get(6, 1) - 1] + b"\0"
            if 5 in given:
                ctypes.memmove(given[5], log, len(log))
            raise Code(218)

    def _cuModuleUnload(self, module: Any) -> None:
        self._card().finish()
        self._drop(_Module, module).loaded = False

    def _cuModuleGetFunction(self, out: Any, module: Any, symbol: bytes) -> None:
        found = self._get(_Module, module)
        if not symbol:
            raise Code(500)
        _store(out, c_void_p, self._new(_Function(found, symbol.decode())))

    def _function(self, handle: Any) -> _Function:
        found = self._get(_Function, handle)
        if found.module.card is not self._card() or not found.module.loaded:
            raise Code(400)
        return found

    def _cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> None:
        found = self._function(function)
        if attribute != 8 or not 0 <= value <= found.module.card.shared_bytes:
            raise Code(1)
        found.most_shared = max(found.most_shared, value)

    def _cuFuncGetAttribute(self, out: Any, attribute: int, function: Any) -> None:
        self._function(function)
        _store(out, c_int, {3: 0, 4: 32}[attribute])

    def _cuLaunchKernelEx(self, config: Any, function: Any, pointers: Any, extra: Any) -> None:
        found = self._function(function)
        card = found.module.card
        shape = LaunchConfig.from_address(_address(config))
        queue = self._get(FakeStream, shape.stream)
        attributes = [
            LaunchAttribute.from_address(shape.attributes + i * ctypes.sizeof(LaunchAttribute))
            for i in range(shape.n_attributes)
        ]
        if any(a.id != 6 for a in attributes) or not all(
            1 <= n <= most for n, most in zip(shape.grid, (2**31 - 1, 65535, 65535), strict=True)
        ):
            raise Code(1)
        chained = any(a.value for a in attributes)
        if chained and card.capability < (9, 0):
            raise Code(801)
        threads = int(np.prod(shape.block))
        if not 1 <= threads <= 1024 or shape.grid[2] != 1 or shape.shared_bytes > found.most_shared or extra:
            raise Code(1)
        if queue.capture is not None and not found.loaded:  # its first launch loads it
            queue.invalidated = True
            raise Code(900)
        found.loaded = True
        arguments = tuple(c_uint64.from_address(pointer).value for pointer in pointers)
        launch = FakeLaunch(
            card.number, found.symbol, (shape.grid[0], shape.grid[1]), threads, shape.shared_bytes, arguments, chained
        )
        queue.submit(lambda: self._execute(card, found, launch))

    def _execute(self, card: FakeCard, function: _Function, launch: FakeLaunch) -> None:
        self.launches.append(launch)
        try:
            self._run(
                function.module.image, launch.symbol, card.memory, launch.grid, launch.threads, launch.shared_bytes,
                launch.arguments,
            )  # fmt: skip
        except Exception as error:
            self.failure = error
            card.failed = 700 if isinstance(error, BadAddress) else 719
            raise Code(card.failed) from error

    def _cuLinkCreate_v2(self, n: int, options: Any, values: Any, out: Any) -> None:
        given = list(zip(list(options), list(values), strict=True))[:n]
        _store(out, c_void_p, self._new(_Linker(self._card(), given)))

    def _cuLinkAddData_v2(
        self, linker: Any, kind: int, data: bytes, size: int, name: bytes, n: int, options: Any, values: Any
    ) -> None:
        found = self._get(_Linker, linker)
        if kind != 1 or size != len(data) + 1:
            raise Code(1)
        self._compile(data, found.options)
        found.cubin = ctypes.create_string_buffer(data, len(data))

    def _cuLinkComplete(self, linker: Any, out: Any, size: Any) -> None:
        """The cubin has the bytes of the source, so that kernels run the same way from both."""
        found = self._get(_Linker, linker)
        if found.cubin is None:
            raise Code(1)
        _store(out, c_void_p, ctypes.addressof(found.cubin))
        _store(size, c_size_t, len(found.cubin))

    def _cuLinkDestroy(self, linker: Any) -> None:
        self._drop(_Linker, linker)

    # --- graphs ---

    def _cuStreamBeginCapture_v2(self, stream: Any, mode: int) -> None:
        found = self._get(FakeStream, stream)
        if not self._captures:
            raise Code(801)
        if found.capture is not None or mode != 1:
            raise Code(1)
        found.capture, found.thread, found.invalidated = [], threading.get_ident(), False

    def _cuStreamEndCapture(self, stream: Any, out: Any) -> None:
        found = self._get(FakeStream, stream)
        _store(out, c_void_p, 0)
        if found.capture is None:
            raise Code(1)
        if found.thread != threading.get_ident():
            raise Code(908)
        work, found.capture = found.capture, None
        if found.invalidated:
            raise Code(901)
        _store(out, c_void_p, self._new(_Graph(found.card, work)))

    def _cuGraphInstantiateWithFlags(self, out: Any, graph: Any, flags: int) -> None:
        found = self._get(_Graph, graph)
        _store(out, c_void_p, self._new(_ExecutableGraph(found.card, list(found.work))))

    def _cuGraphLaunch(self, graph: Any, stream: Any) -> None:
        found, queue = self._get(_ExecutableGraph, graph), self._get(FakeStream, stream)
        for work in found.work:
            queue.submit(work)

    def _cuGraphExecDestroy(self, graph: Any) -> None:
        self._drop(_ExecutableGraph, graph)

    def _cuGraphDestroy(self, graph: Any) -> None:
        self._drop(_Graph, graph)


class _PinnedBlock:
    """Page-aligned host memory."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._buffer = ctypes.create_string_buffer(n + _PAGE)
        self.address = -(-ctypes.addressof(self._buffer) // _PAGE) * _PAGE


def _address(pointer: Any) -> int:
    """Return the address that an argument of a pointer type has."""
    if pointer is None or isinstance(pointer, int):
        return pointer or 0
    if isinstance(pointer, c_void_p):
        return pointer.value or 0
    return ctypes.addressof(getattr(pointer, "_obj", pointer))  # byref has its object in _obj


def _store(out: Any, kind: Any, value: Any) -> None:
    """Fill an out-parameter."""
    address = _address(out)
    if not address:
        raise Code(1)
    kind.from_address(address).value = value
