"""A worker for tests of the client: keeps bytes as it is told, notes what it was asked, and fails as a test wants."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np

from llamado.rpc.endpoint import Endpoint
from llamado.rpc.hashing import fnv1a
from llamado.rpc.wire import (
    COMMANDS,
    LATEST,
    LLAMADO,
    Allocated,
    AllocBuffer,
    BufferClear,
    BufferGetBase,
    Command,
    CopyTensor,
    DeviceCount,
    DeviceMemory,
    FreeBuffer,
    GetAlignment,
    GetAllocSize,
    GetDeviceMemory,
    GetMaxSize,
    GetTensor,
    Hello,
    HelloResponse,
    Number,
    Request,
    RequestReader,
    Response,
    SetTensor,
    SetTensorHash,
    TensorData,
    Upgrade,
    WireError,
    WireTensor,
    spoken,
    write_response,
)


class Hang(Exception):
    """The worker reads and says nothing any more on this connection."""


class ScriptedWorker:
    """Serves many connections, each on a thread of its own.

    `asked` are the requests of all connections but greetings and counts, with SET_TENSOR's data beside them in `data`.
    `before(request, connection)` is called with each request and may raise, EOFError to close the connection, Hang to
    freeze it, or give bytes to send instead of the answer. Memory begins at address 4096 for the first buffer and is
    full of 0xEE.
    """

    def __init__(
        self,
        *,
        own: bool = False,
        version: tuple[int, int, int] = LATEST.version,
        devices: int = 1,
        alignment: int = 32,
        max_size: int = 1 << 40,
        memory: int = 1 << 30,
        copies: bool = True,
        before: Callable[[Request, int], bytes | None] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.own, self.version, self.devices = own, version, devices
        self.alignment, self.max_size, self.memory, self.copies = alignment, max_size, memory, copies
        self.before = before
        self.tls = tls
        self.asked: list[Request] = []
        self.data: list[bytes] = []
        self.cache: dict[int, bytes] = {}
        self.buffers: dict[int, tuple[int, bytearray]] = {}
        self.connections = 0
        self._next = 4096
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._released = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        host, port = self._listener.getsockname()[:2]
        self.endpoint = Endpoint(host, port, tls is not None)

    def __enter__(self) -> ScriptedWorker:
        self._start(self._accept)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._released.set()
        for sock in (self._listener, *self._sockets):
            try:
                socket.socket.shutdown(sock, socket.SHUT_RDWR)
            except OSError:
                pass
        for thread in self._threads:
            thread.join(60)
        for sock in (self._listener, *self._sockets):
            sock.close()

    def of(self, kind: type) -> list[Any]:
        """The requests of one kind."""
        return [r for r in self.asked if isinstance(r, kind)]

    def _start(self, target: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sock = self._listener.accept()[0]
            except OSError:
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets.append(sock)
            self.connections += 1
            self._start(self._serve, sock, self.connections)

    def _serve(self, sock: socket.socket, number: int) -> None:
        reader = RequestReader(protocol=spoken(self.version) or LATEST)
        try:
            if self.tls is not None:
                sock = self.tls.wrap_socket(sock, server_side=True)
                self._sockets.append(sock)
            while True:
                request = reader.next()
                if request is None:
                    data = sock.recv(65536)
                    if not data:
                        return
                    reader.feed(data)
                    continue
                bulk = bytearray(reader.bulk)
                view = memoryview(bulk)
                while view:
                    taken = reader.take(view)
                    if not taken:
                        reader.feed(sock.recv(65536))
                    view = view[taken:]
                if not isinstance(request, Hello | Upgrade | DeviceCount):
                    self.asked.append(request)
                    self.data.append(bytes(bulk))
                said = None if self.before is None else self.before(request, number)
                if said is not None:
                    sock.sendall(said)
                    continue
                response = self._answer(request, bytes(bulk))
                if response is not None:
                    sock.sendall(response)
        except Hang:
            self._released.wait()
        except (EOFError, OSError, WireError):
            pass
        finally:
            try:
                socket.socket.shutdown(sock, socket.SHUT_RDWR)
            except OSError:
                pass

    def _place(self, tensor: WireTensor, n: int, offset: int = 0) -> tuple[bytearray, int]:
        base, memory = self.buffers[tensor.buffer]
        at = tensor.data - base + offset
        assert at >= 0 and at + n <= len(memory), (tensor, n, offset)
        return memory, at

    def _answer(self, request: Request, bulk: bytes) -> bytes | None:
        command = COMMANDS[type(request)]

        def say(response: Response) -> bytes:
            return write_response(command, response)

        match request:
            case Hello():
                return say(HelloResponse(*self.version, LLAMADO if self.own else 0))
            case Upgrade():
                return None
            case DeviceCount():
                return say(Number(self.devices))
            case GetAlignment():
                return say(Number(self.alignment))
            case GetMaxSize():
                return say(Number(self.max_size))
            case GetDeviceMemory():
                return say(DeviceMemory(self.memory - sum(len(m) for _, m in self.buffers.values()), self.memory))
            case GetAllocSize(_, tensor):
                return say(Number(tensor.ne[0] * tensor.ne[1] * 4 + 100))
            case AllocBuffer(_, size):
                if size > self.memory - sum(len(m) for _, m in self.buffers.values()):
                    return say(Allocated(0, 0))
                ptr, base = len(self.asked), self._next
                self._next += size + 4096 - size % 4096
                self.buffers[ptr] = base, bytearray(b"\xee" * size)
                return say(Allocated(ptr, size))
            case BufferGetBase(ptr):
                return say(Number(self.buffers[ptr][0]))
            case FreeBuffer(ptr):
                del self.buffers[ptr]
            case BufferClear(ptr, value):
                base, memory = self.buffers[ptr]
                self.buffers[ptr] = base, bytearray([value]) * len(memory)
            case SetTensor(tensor, cache_flag, offset, size):
                memory, at = self._place(tensor, size, offset)
                memory[at : at + size] = bulk
                if cache_flag:
                    self.cache[fnv1a(np.frombuffer(bulk, np.uint8))] = bulk
            case SetTensorHash(tensor, offset, value):
                if value not in self.cache:
                    return say(Number(0))
                bulk = self.cache[value]
                memory, at = self._place(tensor, len(bulk), offset)
                memory[at : at + len(bulk)] = bulk
                return say(Number(1))
            case GetTensor(tensor, offset, size):
                memory, at = self._place(tensor, size, offset)
                return say(TensorData(size)) + memory[at : at + size]
            case CopyTensor(src, dst):
                n = src.ne[0]
                if not self.copies:
                    return say(Number(0))
                (source, a), (target, b) = self._place(src, n), self._place(dst, n)
                if source is target and not self.own:
                    assert abs(a - b) >= n, "a worker of ggml copies forwards, whatever overlaps"
                target[b : b + n] = source[a : a + n]
                return say(Number(1))
            case _:
                assert command in (Command.GRAPH_COMPUTE, Command.GRAPH_RECOMPUTE, Command.INIT_TENSOR), command
        return None
