"""Sums over two workers, for a client that splits matrices between them (llama.cpp's `-sm tensor`).

Rank 0 listens on a port that the client chooses, rank 1 connects. Each sends its 24 bytes of capabilities (zeros: plain
TCP), rank 1 first. Then both send their values of a tensor, rank 0 first, and add the received ones. From 32,768
elements on the values are sent as BF16, so the two sums differ in some bits: as in ggml's workers, which may be at the
other end.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
from numpy.typing import NDArray

from llamado.errors import LlamadoError
from llamado.rpc import wire
from llamado.rpc.endpoint import Endpoint
from llamado.rpc.transport import dial
from llamado.rpc.worker.links import REFUSAL_SECONDS, Dialer, LinkRefused

log = logging.getLogger("llamado.rpc.worker.server")

WORLD = 2
_SECONDS = 5.0
"""Seconds to wait for the other worker."""
_GREETING_SECONDS = 1.0
"""Seconds for the greeting of a connection, before the next one gets its turn."""
_PAUSE = 0.05
_LEAST_PORT = 1024
_BF16_FROM = 32768


class Comm:
    """The connection to the other rank."""

    def __init__(self, sock: socket.socket, rank: int) -> None:
        self._sock, self._rank = sock, rank

    def add(self, own: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the sum of this worker's f32[n] and the other's. Raises OSError."""
        halved = own.size >= _BF16_FROM
        mine = (bf16(own).data if halved else own.data).cast("B")
        theirs = bytearray(len(mine))
        if self._rank == 0:
            self._sock.sendall(mine)
            _receive(self._sock, theirs)
        else:
            _receive(self._sock, theirs)
            self._sock.sendall(mine)
        if halved:
            came = (np.frombuffer(theirs, "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
        else:
            came = np.frombuffer(theirs, np.float32)
        return np.add(own, came, dtype=np.float32)

    def shut(self) -> None:
        """Shut the connection down, from any thread. A waiting `add` returns."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self) -> None:
        """Close the connection; only while no thread adds."""
        self._sock.close()


def connect_ranks(
    request: wire.CommInit, here: str, client: str, dialer: Dialer, may_connect: Callable[[str], bool],
    is_gone: Callable[[], bool],
) -> Comm | None:  # fmt: skip
    """Connect to the other rank for a client. Returns None and logs a line if that fails.

    `here` is the address at which the client reached this worker. Rank 0 listens there, for hosts that `may_connect`
    accepts. `is_gone` returns True once the client is gone.
    """
    began = time.monotonic()
    host = wire.printable(request.host.decode("utf-8", "replace"))
    try:
        if request.world != WORLD or request.rank >= WORLD:
            raise LinkRefused(f"{request.world} workers cannot sum a tensor, only {WORLD}")
        if request.port not in range(_LEAST_PORT, 1 << 16):
            raise LinkRefused(f"port {request.port} is not one from {_LEAST_PORT} on")
        if request.rank == 0:
            if not dialer.allowed:
                raise LinkRefused("this worker has no links (--no-ring)")
            sock = _accept(here, request.port, may_connect, is_gone)
        else:
            with dialer.attempt(client):
                sock = _reach(Endpoint(host, request.port), dialer, is_gone)
    except (LlamadoError, OSError, ValueError) as error:
        log.warning(
            "cannot reach the peer worker: %s; falling back to summation on the client",
            wire.printable(str(error)),
        )
        time.sleep(max(0.0, began + REFUSAL_SECONDS - time.monotonic()))
        return None
    log.info("%s: tensor parallel, rank %d of %d", client, request.rank, request.world)
    return Comm(sock, request.rank)


def _accept(here: str, port: int, may_connect: Callable[[str], bool], is_gone: Callable[[], bool]) -> socket.socket:
    with _listening(here, port) as listener:
        ends = time.monotonic() + _SECONDS
        while time.monotonic() < ends and not is_gone():
            try:
                sock, (host, *_) = listener.accept()
            except TimeoutError:
                continue
            if not may_connect(host):
                sock.close()
                continue
            with suppress(OSError):  # an unknown client that sends no greeting must not block the other rank
                return _greet(sock, first=False, ends=min(ends, time.monotonic() + _GREETING_SECONDS))
    raise LinkRefused(f"no connection to port {port} within {_SECONDS:g} s")


@contextmanager
def _listening(here: str, port: int) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in here else socket.AF_INET
    listener = socket.create_server((here, port), family=family)
    listener.settimeout(_PAUSE)
    try:
        yield listener
    finally:
        listener.close()


def _reach(endpoint: Endpoint, dialer: Dialer, is_gone: Callable[[], bool]) -> socket.socket:
    """Connect to rank 0, which may not listen yet."""
    dialer.check(endpoint)
    ends = time.monotonic() + _SECONDS
    while True:
        try:
            sock = dial(endpoint, None, max(_PAUSE, ends - time.monotonic()))
            return _greet(sock, first=True, ends=time.monotonic() + _SECONDS)
        except (LlamadoError, OSError):
            if time.monotonic() + _PAUSE > ends or is_gone():
                raise
            time.sleep(_PAUSE)


def _greet(sock: socket.socket, *, first: bool, ends: float) -> socket.socket:
    try:
        sock.settimeout(_left(ends))
        if first:
            sock.sendall(bytes(wire.CAPS_BYTES))
        theirs = memoryview(bytearray(wire.CAPS_BYTES))
        while theirs:  # one deadline for all bytes: they could arrive one by one
            sock.settimeout(_left(ends))
            theirs = theirs[_received(sock, theirs) :]
        if not first:
            sock.sendall(bytes(wire.CAPS_BYTES))
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        sock.close()
        raise
    return sock


def _left(ends: float) -> float:
    return max(0.001, ends - time.monotonic())


def _receive(sock: socket.socket, target: bytearray) -> None:
    view = memoryview(target)
    while view:
        view = view[_received(sock, view) :]


def _received(sock: socket.socket, target: memoryview) -> int:
    """Receive one or more bytes and return their number. Raises OSError."""
    n = sock.recv_into(target)
    if not n:
        raise ConnectionResetError("the other worker is gone")
    return n


def bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the nearest BF16 of each value, ties to even. NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where((bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000), quiet, rounded).astype("<u2")
