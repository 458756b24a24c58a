"""One client of a worker: its commands, its memory, its graphs. One thread serves it from HELLO to the end."""

from __future__ import annotations

import logging
import math
import socket
import ssl
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llamado.devices.device import Device, DeviceError, KernelQuota, NoKernelsLeft
from llamado.errors import LlamadoError
from llamado.gguf.types import TensorType
from llamado.rpc.describe import describe, name_of, printable
from llamado.rpc.wire import (
    COMMANDS,
    FIRST,
    LINKED,
    LLAMADO,
    NUMERICS_BYTES,
    OWN_COMMANDS,
    OWN_FILES,
    TELLS_NUMERICS,
    Allocated,
    AllocBuffer,
    Attach,
    Await,
    Awaited,
    Bind,
    BufferClear,
    BufferGetBase,
    CloseInlet,
    CommAllReduce,
    Command,
    CommFree,
    CommInit,
    ConnectNext,
    CopyTensor,
    Deliver,
    DeviceCount,
    DeviceMemory,
    FreeBuffer,
    GetAlignment,
    GetAllocSize,
    GetDeviceMemory,
    GetMaxSize,
    GetNumerics,
    GetTensor,
    GetTensor2D,
    GraphCompute,
    GraphRecompute,
    Hello,
    HelloResponse,
    InitTensor,
    InletTicket,
    MemsetTensor,
    Number,
    Numerics,
    Offer,
    OpenInlet,
    Push,
    Request,
    RequestReader,
    Response,
    SetTensor,
    SetTensor2D,
    SetTensorHash,
    TensorData,
    Upgrade,
    WireError,
    WireTensor,
    write_response,
)
from llamado.rpc.worker.activity import WorkDone
from llamado.rpc.worker.budgets import Budgets
from llamado.rpc.worker.comm import Comm, meet
from llamado.rpc.worker.decode import Decoded, tensor_bytes
from llamado.rpc.worker.graphs import ClientGraphs
from llamado.rpc.worker.greetings import Greetings
from llamado.rpc.worker.identity import identity
from llamado.rpc.worker.links import MAX_LINKS, Dialling, Inlet, Outlet, fill, receive
from llamado.rpc.worker.memory import Lender, Region
from llamado.rpc.worker.own_files import OwnFiles, PlacedWeight
from llamado.rpc.worker.tensor_cache import TensorCache, Wanted

log = logging.getLogger("llamado.rpc.worker.server")

ALIGNMENT = 64
"""A cache line; ggml's CPU asks for 32."""
MAX_SIZE = (1 << 64) - 1
"""ggml's CPU sets no limit to a buffer's size either (SIZE_MAX)."""
MAX_REGIONS = 4096
"""Regions of one client; a system maps some 65,000 for a process."""
KERNELS_A_TURN = 16
"""Kernels made before others get their turn: about a second's work at most."""
_RECEIVE = 1 << 18
_MAX_MESSAGE = 16 << 20
"""A graph of as many nodes as are accepted, and as many tensors that are none."""
_HELLO_SECONDS = 10.0
_TELL_SECONDS = 5.0
"""From one line about what a client holds to the next: memory is taken in many pieces."""
_SIDE_BY_SIDE = 4
"""Cache entries that are checked at a time."""
_ASKED = 1 << 14
"""Uploads that may be announced by their hashes before they come."""
_PIECES_AT_ONCE = 1 << 20
"""Bytes of pieces of a tensor that are gathered before they are passed on."""
_SMALL = 1 << 14
"""Data up to this size is sent in one piece with what stands before it."""


class Stopping(LlamadoError):
    """The worker is about to end."""


@dataclass
class Shared:
    """What all clients of a worker share."""

    lenders: Sequence[Lender]
    cache: TensorCache | None = None
    debug: bool = False
    kernels: Budgets = field(default_factory=Budgets)
    dialling: Dialling = field(default_factory=Dialling)
    greetings: Greetings = field(default_factory=lambda: Greetings(FIRST))
    inlets: dict[bytes, Inlet] = field(default_factory=dict)
    """Of all clients, by ticket."""
    files: OwnFiles | None = None
    may_enter: Callable[[str], bool] = lambda host: True
    """Whether an address is one that may connect."""
    stopping: bool = False


class Session:
    """Serves one connection."""

    def __init__(self, sock: socket.socket, host: str, peer: str, shared: Shared) -> None:
        """`host` is the client's address, `peer` how messages call it."""
        self.host, self.peer = host, peer
        self.client = identity(host)
        self.network = self.client
        self._sock, self._shared = sock, shared
        self.protocol = shared.greetings.of(host)
        """What it is greeted with, and speaks, if it goes on."""
        self._reader = RequestReader(_MAX_MESSAGE, self.protocol)
        self._regions: dict[int, Region] = {}
        self._graphs = ClientGraphs(self.protocol, self._regions, self._forget)
        self._asked: dict[tuple[int, int], int] = {}  # hashes that were not in the cache, by place
        self._put_back: Request | None = None
        self._inlets: dict[int, Inlet] = {}
        self._outlets: dict[int, Outlet] = {}
        self._comms: dict[int, Comm] = {}
        self._n_links = 0
        self._feeds: Inlet | None = None  # another client's, which this connection belongs to
        self.work = WorkDone()
        """What this client had done so far."""
        self._told = (0, -math.inf)  # bytes that the log has it hold, and when that was said
        self._computed = 0.0  # seconds of the graph that ran last
        self._began = self._served = time.monotonic()
        self._greeted = self._understood = self._gone = self._shut = False
        self._handlers: dict[type, Callable[[Any], None]] = {
            Hello: self._hello,
            Upgrade: self._upgrade,
            DeviceCount: lambda _: self._answer(Command.DEVICE_COUNT, Number(len(shared.lenders))),
            AllocBuffer: self._alloc,
            GetAlignment: self._alignment,
            GetMaxSize: self._max_size,
            GetDeviceMemory: self._memory,
            GetNumerics: self._numerics,
            GraphRecompute: self._recompute,
            BufferGetBase: self._base,
            FreeBuffer: self._free,
            BufferClear: self._clear,
            SetTensor: self._set,
            SetTensor2D: self._set_pieces,
            SetTensorHash: self._set_hash,
            GetTensor: self._get,
            GetTensor2D: self._get_pieces,
            CopyTensor: self._copy,
            InitTensor: self._init,
            MemsetTensor: self._memset,
            GetAllocSize: self._alloc_size,
            GraphCompute: self._compute,
            OpenInlet: self._open_inlet,
            ConnectNext: self._connect_next,
            Attach: self._attach,
            Push: self._push,
            Await: self._await,
            Deliver: self._deliver,
            CloseInlet: self._close_inlet,
            CommInit: self._comm_init,
            CommAllReduce: self._comm_add,
            CommFree: self._comm_free,
            Offer: self._offer,
            Bind: self._bind,
        }

    # --- the connection ---------------------------------------------------------------------------------------------
    def serve(self, tls: ssl.SSLContext | None = None) -> None:
        """Runs until the client leaves or breaks a rule; then everything it had is free again."""
        began, left = self._began, "left"
        try:
            self._greet(tls)
            self._loop()
        except Stopping:
            left = "is let go"
        except LlamadoError as error:
            log.warning("%s: connection closed: %s", self.peer, printable(str(error)))
        except OSError as error:
            log.debug("%s: %s", self.peer, error)
            left = "is gone"
        except MemoryError:
            log.warning("%s: connection closed: out of memory for its request", self.peer)
        except Exception:
            log.exception("%s: connection closed by a bug of this program", self.peer)
        finally:
            size, work = self.held, self.work
            self._release()
            self.shut()
            self._sock.close()
            if size:
                log.info(
                    "%s: %s after %.0f s (graphs=%d tokens=%d), %.1f MB freed",
                    self.peer, left, time.monotonic() - began, work.graphs, work.tokens, size / 1e6,
                )  # fmt: skip

    @property
    def held(self) -> int:
        """Bytes that the client has; from any thread."""
        return sum(region.size for region in [*self._regions.values()])

    @property
    def overdue(self) -> bool:
        """Whether it had its time to say HELLO, and has not: TLS may be shaken byte by byte, each in time."""
        return not self._greeted and time.monotonic() > self._began + 2 * _HELLO_SECONDS

    @property
    def idle_since(self) -> float | None:
        """When it last asked for something; None for a client that has memory here, or feeds one that has: those may
        rest for days.
        """
        return None if self._regions or self._feeds is not None else self._served

    @property
    def gone(self) -> bool:
        """Whether the client has hung up: nobody waits for what is still computed."""
        return self._gone

    def fileno(self) -> int:
        """The connection's, −1 where there is none (any more)."""
        return self._sock.fileno()

    def hang_up(self) -> None:
        """The client has hung up: its graph is left undone; from any thread, again and again until it is through."""
        self._gone = True
        for lender in self._shared.lenders:
            lender.abandon(self)
        self._end_links()

    def _end_links(self) -> None:
        """Whoever waits for another worker here comes back."""
        for outlet in [*self._outlets.values()]:
            outlet.shut()
        for inlet in [*self._inlets.values()]:
            inlet.end()
        for comm in [*self._comms.values()]:
            comm.shut()
        if self._feeds is not None:
            self._feeds.end()

    def shut(self) -> None:
        """Ends both directions, from any thread."""
        self._shut = True
        self._end_links()
        try:
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)  # TLS or not: the socket below
        except OSError:
            pass

    def _greet(self, tls: ssl.SSLContext | None) -> None:
        """TLS and HELLO, within a time: a silent connection must not hold a thread."""
        ends = time.monotonic() + _HELLO_SECONDS
        sock = self._sock
        try:
            if tls is not None:
                sock.settimeout(_HELLO_SECONDS)
                try:
                    # Not shaken yet, so that it can be shut: closing alone says nothing while `Worker` polls it.
                    sock = self._sock = tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
                    sock.do_handshake()
                except ssl.SSLError as error:
                    raise WireError(f"no TLS: {_tls_reason(error)}") from None
            buffer = memoryview(bytearray(64))
            while (request := self._reader.next()) is None:
                sock.settimeout(max(0.001, ends - time.monotonic()))
                n = sock.recv_into(buffer)
                if not n:
                    raise ConnectionResetError("gone before HELLO")
                self._reader.feed(buffer[:n])
        except TimeoutError:
            raise WireError(f"no HELLO within {_HELLO_SECONDS:g} s") from None
        sock.settimeout(None)
        self.client = identity(self.host, sock)
        self._greeted = True
        self._handle(request)

    def _loop(self) -> None:
        reader, debug = self._reader, self._shared.debug
        handlers = self._handlers
        buffer = memoryview(bytearray(_RECEIVE))
        while True:
            request = reader.next()
            if request is None:
                n = self._hear(buffer)
                if not n:
                    return
                reader.feed(buffer[:n])
                continue
            self._served = time.monotonic()
            if not self._understood:
                self._understood = True
                if COMMANDS[type(request)] not in OWN_COMMANDS:  # our clients take any version
                    self._shared.greetings.understood(self.host, self.protocol, self._served)
            while request is not None:
                if debug:
                    self._handle(request)
                else:
                    handlers[type(request)](request)
                request, self._put_back = self._put_back, None

    def _hear(self, buffer: memoryview) -> int:
        """Bytes that came; whoever hangs up after the greeting wanted to be greeted in another version."""
        try:
            n = self._sock.recv_into(buffer)
        except ConnectionResetError:
            n = 0
        if not (n or self._understood or self._reader.held or self._shut):
            self._shared.greetings.refused(self.host, self.protocol, self._began)
        return n

    def _handle(self, request: Request) -> None:
        if self._shared.debug:
            log.info("%s %s", self.peer, describe(request))
        self._handlers[type(request)](request)

    def _answer(self, command: Command, response: Response) -> None:
        self._sock.sendall(write_response(command, response))

    # --- what a request speaks of -----------------------------------------------------------------------------------
    def _lender(self, device: int) -> Lender:
        lenders = self._shared.lenders
        if device >= len(lenders):
            raise WireError(f"device {device} of {len(lenders)}")
        return lenders[device]

    def _region(self, ptr: int) -> Region:
        region = self._regions.get(ptr)
        if region is None:
            raise WireError(f"buffer {ptr:#x} is not one of this connection's")
        return region

    def _place(self, tensor: WireTensor, offset: int, size: int) -> tuple[Region, int]:
        """Where `size` bytes at `offset` of a tensor are."""
        region = self._regions.get(tensor.buffer)
        if region is None:
            region = self._region(tensor.buffer)
        start = tensor.data - region.base + offset
        if start < 0 or start + size > region.size:
            raise WireError(
                f"{size} bytes at {offset} of tensor {name_of(tensor)} lie outside its buffer of {region.size} bytes"
            )
        return region, start

    # --- the worker and its devices ---------------------------------------------------------------------------------
    def _hello(self, _: Hello) -> None:
        shared = self._shared
        own = LLAMADO | TELLS_NUMERICS | LINKED * shared.dialling.allowed | OWN_FILES * (shared.files is not None)
        self._answer(Command.HELLO, HelloResponse(*self.protocol.version, own))

    def _upgrade(self, _: Upgrade) -> None:
        self.protocol = self._graphs.protocol = self._reader.protocol

    def _alignment(self, request: GetAlignment) -> None:
        self._lender(request.device)
        self._answer(Command.GET_ALIGNMENT, Number(ALIGNMENT))

    def _max_size(self, request: GetMaxSize) -> None:
        self._lender(request.device)
        self._answer(Command.GET_MAX_SIZE, Number(MAX_SIZE))

    def _memory(self, request: GetDeviceMemory) -> None:
        self._answer(Command.GET_DEVICE_MEMORY, DeviceMemory(*self._lender(request.device).memory()))

    def _numerics(self, request: GetNumerics) -> None:
        words = (self._lender(request.device).device.numerics or "").encode()
        self._answer(Command.GET_NUMERICS, Numerics(words if len(words) <= NUMERICS_BYTES else b""))

    # --- memory -----------------------------------------------------------------------------------------------------
    def _alloc(self, request: AllocBuffer) -> None:
        lender = self._lender(request.device)
        region = lender.lend(request.size) if len(self._regions) < MAX_REGIONS else None
        if region is None:
            free = lender.memory()[0]
            # Operators look for the first words, as in a server's log.
            log.warning(
                "tensor allocation failed: %s: no room for %.1f MB (%.1f MB are free)",
                self.peer, request.size / 1e6, free / 1e6,
            )  # fmt: skip
            self._answer(Command.ALLOC_BUFFER, Allocated(0, 0))
            return
        if not self._regions and not self.work.graphs:
            log.info("%s: connected (RPC %d.%d.%d)", self.peer, *self.protocol.version)
        self._regions[region.ptr] = region
        self._answer(Command.ALLOC_BUFFER, Allocated(region.ptr, region.size))

    def _base(self, request: BufferGetBase) -> None:
        self._answer(Command.BUFFER_GET_BASE, Number(self._region(request.ptr).base))

    def _free(self, request: FreeBuffer) -> None:
        region = self._region(request.ptr)
        self._graphs.free(request.ptr)
        del self._regions[request.ptr]
        region.free()

    def _release(self) -> None:
        self._end_links()
        for inlet in self._inlets.values():
            self._shared.inlets.pop(inlet.ticket, None)
        while self._outlets:
            self._outlets.popitem()[1].close()
        while self._comms:
            self._comms.popitem()[1].close()
        while self._regions:
            self._regions.popitem()[1].free()
        self._graphs.clear()

    def _forget(self, graph: Decoded) -> None:
        """Tells the device that a graph does not come again as it is."""
        self._shared.lenders[graph.request.device].forget([graph.graph])

    def _clear(self, request: BufferClear) -> None:
        region = self._region(request.ptr)
        region.fill(0, region.size, request.value)

    # --- tensors ----------------------------------------------------------------------------------------------------
    def _set(self, request: SetTensor) -> None:
        size = request.size
        region, start = self._place(request.tensor, request.offset, size)
        receive(self._sock, self._reader, region, start, size)
        self.work.received += size
        cache = self._shared.cache
        if request.cache_flag and cache is not None and region.memory is not None:
            cache.keep(self.client, region, start, size, self._asked.pop((region.ptr, start), None))

    def _set_hash(self, request: SetTensorHash) -> None:
        """Several in a row are looked up together: their hashes are checked side by side."""
        requests = [request]
        while len(requests) < _SIDE_BY_SIDE:
            following = self._reader.next()
            if not isinstance(following, SetTensorHash):
                self._put_back = following
                break
            requests.append(following)
        wanted = []
        for asked in requests:
            size = tensor_bytes(asked.tensor)
            if asked.offset > size:
                raise WireError(f"byte {asked.offset} of tensor {name_of(asked.tensor)} of {size}")
            region, start = self._place(asked.tensor, asked.offset, size - asked.offset)
            wanted.append(Wanted(asked.hash, region, start, size - asked.offset))
        cache = self._shared.cache
        found = [False] * len(wanted) if cache is None else cache.load(self.client, wanted)
        for want, hit in zip(wanted, found, strict=True):
            if not hit and cache is not None and len(self._asked) < _ASKED:
                self._asked[want.region.ptr, want.offset] = want.hash
        self._sock.sendall(b"".join(write_response(Command.SET_TENSOR_HASH, Number(int(hit))) for hit in found))

    def _get(self, request: GetTensor) -> None:
        size = request.size
        region, start = self._place(request.tensor, request.offset, size)
        self.work.sent += size
        head = write_response(Command.GET_TENSOR, TensorData(size))
        for piece in region.read(start, size):
            self._send(head, piece)
            head = b""

    def _pieces(self, request: SetTensor2D | GetTensor2D) -> tuple[Region, int]:
        """Where the pieces of a tensor begin, all of which are inside it."""
        span = (request.rows - 1) * request.stride + request.row
        size = tensor_bytes(request.tensor)
        if not request.size or request.offset + span > size:
            raise WireError(
                f"{request.rows} times {request.row} bytes, {request.stride} apart from {request.offset} on, are not "
                f"inside tensor {name_of(request.tensor)} of {size} bytes"
            )
        return self._place(request.tensor, request.offset, span)

    def _set_pieces(self, request: SetTensor2D) -> None:
        region, start = self._pieces(request)
        row, rows = request.row, max(1, _PIECES_AT_ONCE // request.row)
        buffer = memoryview(bytearray(row * min(rows, request.rows)))
        for first in range(0, request.rows, rows):
            n = min(rows, request.rows - first)
            fill(self._sock, self._reader, buffer[: n * row])
            region.write_pieces(start + first * request.stride, request.stride, buffer[: n * row], row)
        self.work.received += request.size

    def _get_pieces(self, request: GetTensor2D) -> None:
        region, start = self._pieces(request)
        row, rows = request.row, max(1, _PIECES_AT_ONCE // request.row)
        self.work.sent += request.size
        head = write_response(Command.GET_TENSOR_2D, TensorData(request.size))
        for first in range(0, request.rows, rows):
            n = min(rows, request.rows - first)
            self._send(head, region.read_pieces(start + first * request.stride, request.stride, n, row))
            head = b""

    def _send(self, head: bytes, data: memoryview) -> None:
        if len(data) <= _SMALL:
            self._sock.sendall(head + data)
        elif isinstance(self._sock, ssl.SSLSocket) or not hasattr(self._sock, "sendmsg"):
            self._sock.sendall(head + data[:_SMALL])
            self._sock.sendall(data[_SMALL:])
        else:
            sent = self._sock.sendmsg((head, data)) - len(head)
            if sent < 0:
                self._sock.sendall(head[sent:])
                sent = 0
            if sent < len(data):
                self._sock.sendall(data[sent:])

    def _copy(self, request: CopyTensor) -> None:
        size = tensor_bytes(request.src)
        source, start = self._place(request.src, 0, size)
        target, offset = self._place(request.dst, 0, size)
        target.copy(offset, source, start, size)
        self._answer(Command.COPY_TENSOR, Number(1))

    def _init(self, request: InitTensor) -> None:
        """Nothing lies behind a tensor's last byte here; the place is checked all the same."""
        self._place(request.tensor, 0, tensor_bytes(request.tensor))

    def _memset(self, request: MemsetTensor) -> None:
        size = tensor_bytes(request.tensor)
        if request.offset + request.size > size:
            raise WireError(
                f"{request.size} bytes at {request.offset} of tensor {name_of(request.tensor)} of {size} bytes"
            )
        region, start = self._place(request.tensor, request.offset, request.size)
        region.fill(start, request.size, request.value)

    def _alloc_size(self, request: GetAllocSize) -> None:
        self._lender(request.device)
        self._answer(Command.GET_ALLOC_SIZE, Number(tensor_bytes(request.tensor)))

    # --- graphs -----------------------------------------------------------------------------------------------------
    def _compute(self, request: GraphCompute) -> None:
        lender = self._lender(request.device)
        self._run(lender, self._graphs.take(request))

    def _recompute(self, request: GraphRecompute) -> None:
        lender = self._lender(request.device)
        self._run(lender, self._graphs.again(request))

    def _run(self, lender: Lender, graph: Decoded) -> None:
        """Computes a graph when it is this client's turn; compiling many kernels takes several."""
        if graph.empty:
            return
        made = 0
        done = False
        while not done and not self._gone:
            with lender.turn(self):
                if self._shared.stopping:
                    raise Stopping("the worker is about to end")
                if self._gone:
                    break
                kernels = self._prepare(lender.device, graph, self._shared.kernels.most - made)
                if kernels is None:
                    began = time.monotonic()
                    lender.device.submit(graph.graph)
                    self._computed = time.monotonic() - began
                    done = True
                else:
                    made += kernels
            if not done:
                self._wait_for_kernels()
        if self._gone:
            raise ConnectionAbortedError("gone while its graph was computed")
        if self._told[1] < self._served - _TELL_SECONDS and self._told[0] != (held := self.held):
            self._told = held, self._served
            log.info("%s: holds %.1f MB", self.peer, held / 1e6)
        self.work.graphs += 1
        self.work.tokens += graph.n_tokens

    def _prepare(self, device: Device, graph: Decoded, most: int) -> int | None:
        """Compiles a graph as far as one turn goes; None when that was all of it, otherwise how many kernels were made.

        `most`: kernels that this graph may still have made; NoKernelsLeft where that is not enough.
        """
        allowance = min(KERNELS_A_TURN, most, self._shared.kernels.left(self.client))
        quota = KernelQuota(allowance)
        try:
            device.prepare(graph.graph, quota)
        except NoKernelsLeft:
            if most > allowance:
                return allowance
            raise
        except (ArithmeticError, ValueError, LookupError, TypeError, AssertionError, struct.error) as error:
            log.debug("%s", error, exc_info=True)
            raise DeviceError(f"the graph has parameters that make no sense: {error!r}") from error
        finally:
            self._shared.kernels.spend(self.client, allowance - quota.left)
        return None

    def _wait_for_kernels(self) -> None:
        """Until this client may have enough kernels made for another turn to be worth it."""
        kernels = self._shared.kernels
        enough = min(KERNELS_A_TURN, kernels.most)
        while kernels.left(self.client) < enough and not (self._gone or self._shared.stopping):
            time.sleep(0.1)

    # --- other workers ----------------------------------------------------------------------------------------------
    def _open_inlet(self, _: OpenInlet) -> None:
        for number in [n for n, inlet in self._inlets.items() if inlet.over]:
            self._shared.inlets.pop(self._inlets.pop(number).ticket, None)
        if len(self._inlets) >= MAX_LINKS:
            raise WireError(f"more than {MAX_LINKS} inlets")
        self._n_links += 1
        inlet = self._inlets[self._n_links] = Inlet(self._n_links)
        self._shared.inlets[inlet.ticket] = inlet
        self._answer(Command.OPEN_INLET, InletTicket(inlet.number, inlet.ticket))

    def _close_inlet(self, request: CloseInlet) -> None:
        inlet = self._shared.inlets.get(request.ticket)
        if inlet is not None:
            inlet.end()

    def _connect_next(self, request: ConnectNext) -> None:
        for number in [n for n, outlet in self._outlets.items() if outlet.gone]:
            self._outlets.pop(number).close()
        if len(self._outlets) >= MAX_LINKS:
            raise WireError(f"more than {MAX_LINKS} links")
        outlet = self._shared.dialling.connect(self.client, request)
        number = 0
        if outlet is not None:
            self._n_links += 1
            number = self._n_links
            self._outlets[number] = outlet
            log.info("%s: linked to %s", self.peer, printable(request.endpoint.decode("utf-8", "replace")))
            if self._gone or self._shared.stopping:  # whoever ended the links did not see this one
                outlet.shut()
        self._answer(Command.CONNECT_NEXT, Number(number))

    def _attach(self, request: Attach) -> None:
        """The connection is another session's from here on, and this thread waits until that is over."""
        inlet = self._shared.inlets.get(request.ticket)
        if inlet is None or not inlet.attach(self._sock, self._reader):
            self._answer(Command.ATTACH, Number(0))
            raise WireError("a ticket that nobody here gave")
        self._feeds = inlet
        if self._gone or self._shared.stopping:
            inlet.end()
        try:
            if not inlet.over:
                self._answer(Command.ATTACH, Number(1))
        finally:
            inlet.wait()
        raise ConnectionAbortedError("nothing is taken from it any more")

    def _push(self, request: Push) -> None:
        """Where the link is broken nothing is said: who waits at its other end says so."""
        region, start = self._place(request.tensor, 0, request.size)
        outlet = self._outlets.get(request.link)
        if outlet is None:
            return
        try:
            outlet.send(request.sequence, self._computed, region, start, request.size)
            self.work.sent += request.size
        except OSError as error:
            log.warning("%s: link %d broken: %s", self.peer, request.link, error.strerror or error)
            self._outlets.pop(request.link).close()

    def _await(self, request: Await) -> None:
        region, start = self._place(request.tensor, 0, request.size)
        inlet = self._inlets.get(request.inlet)
        computed = None if inlet is None else inlet.take(request.sequence, region, start, request.size)
        if self._gone:
            raise ConnectionAbortedError("gone while it waited for another worker")
        self.work.received += 0 if computed is None else request.size
        self._answer(Command.AWAIT, Awaited(int(computed is not None), computed or 0))

    def _comm_init(self, request: CommInit) -> None:
        self._lender(request.device)
        if request.device not in self._comms:
            here, shared = self._sock.getsockname()[0], self._shared
            comm = meet(request, here, self.client, shared.dialling, shared.may_enter, lambda: self._gone or self._shut)
            if comm is not None:
                self._comms[request.device] = comm
                if self._gone or self._shut:  # whoever ended the links did not see this one
                    comm.shut()
        self._answer(Command.COMM_INIT, Number(int(request.device in self._comms)))

    def _comm_add(self, request: CommAllReduce) -> None:
        """What the tensor holds is read once all before it is computed: this thread has waited for that."""
        comm = self._comms.get(request.device)
        if comm is None:
            raise WireError(f"COMM_ALLREDUCE of device {request.device} without COMM_INIT")
        tensor = request.tensor
        size = tensor_bytes(tensor)
        if tensor.type != TensorType.F32 or size != 4 * math.prod(tensor.ne):
            raise WireError(f"COMM_ALLREDUCE of {name_of(tensor)}: only F32 without gaps is added up")
        region, start = self._place(tensor, 0, size)
        if size:
            own = np.frombuffer(b"".join(region.read(start, size)), np.float32)
            region.write(start, comm.add(own).data.cast("B"))

    def _comm_free(self, request: CommFree) -> None:
        comm = self._comms.pop(request.device, None)
        if comm is not None:
            comm.shut()
            comm.close()

    def _offer(self, request: Offer) -> None:
        """2 where a weight can be mapped, if it lies in its page as it does in the file; 1 where it is copied."""
        files, found = self._shared.files, bytes(request.size)
        if files is not None:
            mapped = all(lender.device.local for lender in self._shared.lenders)
            found = bytes(has * (2 if mapped else 1) for has in files.offer(request.weights))
        self._send(write_response(Command.OFFER, TensorData(request.size)), memoryview(found))

    def _bind(self, request: Bind) -> None:
        files, done = self._shared.files, [False] * request.size
        if files is not None:
            placed = []
            for want in request.weights:
                place = raw_tensor(want.buffer, want.data, want.size, want.name)
                placed.append(PlacedWeight(*self._place(place, 0, want.size), want.size, want.sha256, want.name))
            done = files.bind(placed, lambda: self._gone or self._shut)
            n = sum(want.size for want, there in zip(request.weights, done, strict=True) if there)
            if n:
                log.info("%s: read %d weights (%.1f MB) from this machine's own disk", self.peer, sum(done), n / 1e6)
        self._send(write_response(Command.BIND, TensorData(request.size)), memoryview(bytes(done)))

    def _deliver(self, request: Deliver) -> None:
        raise WireError("DELIVER by a connection that was not attached to an inlet")


def raw_tensor(buffer: int, data: int, size: int, name: bytes) -> WireTensor:
    """`size` bytes of a buffer as a tensor."""
    return WireTensor(1, int(TensorType.I8), buffer, (size, 1, 1, 1), (1, size, size, size), data, name=name)


def _tls_reason(error: ssl.SSLError) -> str:
    reason = error.reason or ""
    if "NO_CERTIFICATE" in reason or "PEER_DID_NOT_RETURN" in reason:
        return "the client shows no certificate"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the client's certificate is not trusted ({error.verify_message})"
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL", "RECORD_LAYER_FAILURE"):
        return "the client does not speak TLS"
    return reason.lower().replace("_", " ") or str(error)
