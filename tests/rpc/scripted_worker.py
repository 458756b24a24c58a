"""A scripted worker for tests of the client: stores bytes, records requests, and fails as a test requires."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np

from llamado.rpc import wire
from llamado.rpc.endpoint import Endpoint
from llamado.rpc.hashing import fnv1a


class Hang(Exception):
    """The worker keeps the connection open and does not respond any more."""


class ScriptedWorker:
    """Serves many connections, each on its own thread.

    `asked` has the requests of all connections except greetings and counts, `data` the data of each SET_TENSOR.
    `before(request, connection)` is called with each request. It may raise EOFError to close the connection or Hang to
    freeze it, or return bytes to send instead of the response. The first buffer is at address 4096; memory is full of
    0xEE.
    """

    def __init__(
        self,
        *,
        own: bool = False,
        version: tuple[int, int, int] = wire.LATEST.version,
        devices: int = 1,
        alignment: int = 32,
        max_size: int = 1 << 40,
        memory: int = 1 << 30,
        copies: bool = True,
        before: Callable[[wire.Request, int], bytes | None] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.own, self.version, self.devices = own, version, devices
        self.alignment, self.max_size, self.memory, self.copies = alignment, max_size, memory, copies
        self.before = before
        self.tls = tls
        self.asked: list[wire.Request] = []
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
        """Return the requests of one kind."""
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
        reader = wire.RequestReader(protocol=wire.negotiate(self.version) or wire.LATEST)
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
                if not isinstance(request, wire.Hello | wire.Upgrade | wire.DeviceCount):
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
        except (EOFError, OSError, wire.WireError):
            pass
        finally:
            try:
                socket.socket.shutdown(sock, socket.SHUT_RDWR)
            except OSError:
                pass

    def _place(self, tensor: wire.WireTensor, n: int, offset: int = 0) -> tuple[bytearray, int]:
        base, memory = self.buffers[tensor.buffer]
        at = tensor.data - base + offset
        assert at >= 0 and at + n <= len(memory), (tensor, n, offset)
        return memory, at

    def _answer(self, request: wire.Request, bulk: bytes) -> bytes | None:
        command = wire.COMMANDS[type(request)]

        def say(response: wire.Response) -> bytes:
            return wire.write_response(command, response)

        match request:
            case wire.Hello():
                return say(wire.HelloResponse(*self.version, wire.LLAMADO if self.own else 0))
            case wire.Upgrade():
                return None
            case wire.DeviceCount():
                return say(wire.Number(self.devices))
            case wire.GetAlignment():
                return say(wire.Number(self.alignment))
            case wire.GetMaxSize():
                return say(wire.Number(self.max_size))
            case wire.GetDeviceMemory():
                return say(wire.DeviceMemory(self.memory - sum(len(m) for _, m in self.buffers.values()), self.memory))
            case wire.GetAllocSize(_, tensor):
                return say(wire.Number(tensor.ne[0] * tensor.ne[1] * 4 + 100))
            case wire.AllocBuffer(_, size):
                if size > self.memory - sum(len(m) for _, m in self.buffers.values()):
                    return say(wire.AllocResponse(0, 0))
                ptr, base = len(self.asked), self._next
                self._next += size + 4096 - size % 4096
                self.buffers[ptr] = base, bytearray(b"\xee" * size)
                return say(wire.AllocResponse(ptr, size))
            case wire.BufferGetBase(ptr):
                return say(wire.Number(self.buffers[ptr][0]))
            case wire.FreeBuffer(ptr):
                del self.buffers[ptr]
            case wire.BufferClear(ptr, value):
                base, memory = self.buffers[ptr]
                self.buffers[ptr] = base, bytearray([value]) * len(memory)
            case wire.SetTensor(tensor, cache_flag, offset, size):
                memory, at = self._place(tensor, size, offset)
                memory[at : at + size] = bulk
                if cache_flag:
                    self.cache[fnv1a(np.frombuffer(bulk, np.uint8))] = bulk
            case wire.SetTensorHash(tensor, offset, value):
                if value not in self.cache:
                    return say(wire.Number(0))
                bulk = self.cache[value]
                memory, at = self._place(tensor, len(bulk), offset)
                memory[at : at + len(bulk)] = bulk
                return say(wire.Number(1))
            case wire.GetTensor(tensor, offset, size):
                memory, at = self._place(tensor, size, offset)
                return say(wire.TensorData(size)) + memory[at : at + size]
            case wire.CopyTensor(src, dst):
                n = src.ne[0]
                if not self.copies:
                    return say(wire.Number(0))
                (source, a), (target, b) = self._place(src, n), self._place(dst, n)
                if source is target and not self.own:
                    assert abs(a - b) >= n, "a worker of ggml copies forwards, whatever overlaps"
                target[b : b + n] = source[a : a + n]
                return say(wire.Number(1))
            case _:
                assert command in (
                    wire.Command.GRAPH_COMPUTE,
                    wire.Command.GRAPH_RECOMPUTE,
                    wire.Command.INIT_TENSOR,
                ), command
        return None
