"""A socket to a worker: TCP or TLS, opened with the options that RPC wants, read and written by two threads at once."""

from __future__ import annotations

import select
import socket
import ssl
import struct
import sys
import threading
from collections.abc import Sequence
from typing import NamedTuple

from llamado.devices.device import DeviceError
from llamado.rpc.endpoint import Endpoint

Piece = bytes | memoryview

_MOST_PIECES = 512
"""Pieces given to one sendmsg(2), which takes 1,024 (IOV_MAX)."""
_SECURE_CHUNK = 1 << 16
"""Bytes encrypted at a time: a few TLS records of 16 KiB, so that reading gets its turn."""


class ConnectError(DeviceError):
    """A worker cannot be reached: nobody listens there, it does not answer, or TLS was refused."""

    in_logs = "RPC connection failed"


def dial(endpoint: Endpoint, tls: ssl.SSLContext | None, timeout: float) -> socket.socket:
    """A connected socket that gives up after `timeout` seconds; raises ConnectError."""
    try:
        sock = socket.create_connection((endpoint.host, endpoint.port), timeout)
    except TimeoutError as error:
        raise ConnectError(f"{endpoint} does not answer within {timeout:g} s; is the address right?") from error
    except OSError as error:
        raise ConnectError(f"cannot connect to {endpoint}: {error.strerror or error}; is a worker running?") from error
    except UnicodeError as error:
        raise ConnectError(f"cannot connect to {endpoint}: DNS has no such names") from error
    try:
        _set_options(sock)
        if tls is not None:
            sock = tls.wrap_socket(sock, server_hostname=endpoint.host)
    except (OSError, ValueError) as error:
        sock.close()
        raise ConnectError(f"no TLS with {endpoint}: {_reason(error)}") from error
    return sock


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({error.verify_message}); name its authority with --rpc-ca"
    if isinstance(error, TimeoutError):
        return "it did not answer in time; does it speak TLS?"
    return str(error)


def _set_options(sock: socket.socket) -> None:
    """Small messages go out at once, and a silent line is asked after a second whether it is still there.

    No TCP_USER_TIMEOUT: it would also end the connection to a worker that computes for long while its input is full.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class LineState(NamedTuple):
    """What the kernel knows of a connection: whether something it sent is overdue, seconds since it heard anything."""

    overdue: bool
    silence: float


# struct tcp_info of linux/tcp.h up to tcpi_last_ack_recv.
_TCP_INFO = struct.Struct("=8B13I")


class Transport:
    """Bytes to and from a connected socket. One thread sends, another receives, any may shut it down."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._secure = sock if isinstance(sock, ssl.SSLSocket) else None
        # OpenSSL's state is one for both directions: one thread in it at a time, none of them waiting inside.
        self._turn = threading.Lock()
        sock.settimeout(None if self._secure is None else 0.0)

    def send(self, pieces: Sequence[Piece]) -> None:
        """Sends everything; raises OSError."""
        if self._secure is not None:
            data = memoryview(pieces[0] if len(pieces) == 1 else b"".join(pieces))
            while data:
                data = data[self._encrypt(self._secure, data[:_SECURE_CHUNK]) :]
            return
        at = 0
        while at < len(pieces):
            group = [memoryview(p) for p in pieces[at : at + _MOST_PIECES]]
            at += len(group)
            sent = self._sock.sendmsg(group)
            for piece in group:
                if sent < len(piece):
                    self._sock.sendall(piece[sent:])
                sent = max(0, sent - len(piece))

    def _encrypt(self, sock: ssl.SSLSocket, data: memoryview) -> int:
        while True:
            try:
                with self._turn:
                    return sock.send(data)
            except ssl.SSLWantWriteError:
                _wait(sock, select.POLLOUT)
            except ssl.SSLWantReadError:
                _wait(sock, select.POLLIN)

    def recv_into(self, target: memoryview) -> int:
        """Waits for bytes and gives how many came, 0 at the end; raises OSError."""
        sock = self._secure
        if sock is None:
            return self._sock.recv_into(target)
        while True:
            try:
                with self._turn:
                    return sock.recv_into(target)
            except ssl.SSLWantReadError:
                _wait(sock, select.POLLIN)
            except ssl.SSLWantWriteError:
                _wait(sock, select.POLLOUT)
            except ssl.SSLEOFError:
                return 0

    def state(self) -> LineState | None:
        """How the line is, where the system tells (Linux)."""
        if sys.platform != "linux":
            return None
        try:
            info = _TCP_INFO.unpack(self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
        except OSError:
            return None
        retransmits, probes, unacknowledged = info[2], info[3], info[12]
        return LineState(probes > 0 or (unacknowledged > 0 and retransmits > 0), info[20] / 1000)

    def finish(self) -> None:
        """Ends sending: a thread that waits in `send` comes back, one in `recv_into` goes on."""
        try:
            socket.socket.shutdown(self._sock, socket.SHUT_WR)
        except OSError:
            pass

    def shutdown(self) -> None:
        """Ends both directions; a thread that waits in `send` or `recv_into` comes back."""
        try:
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)  # TLS or not: the socket below
        except OSError:
            pass

    def close(self) -> None:
        """Gives the descriptor back; only when no thread is inside."""
        self._sock.close()


def _wait(sock: socket.socket, event: int) -> None:
    poll = select.poll()
    poll.register(sock, event)
    poll.poll()
