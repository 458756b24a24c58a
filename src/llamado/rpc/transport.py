"""A socket to a worker, TCP or TLS: one thread sends while another receives."""

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
"""Pieces per sendmsg(2), which takes 1,024 (IOV_MAX)."""
_SECURE_CHUNK = 1 << 16
"""Bytes encrypted at a time: a few TLS records of 16 KiB, so that the receiving thread gets its turn."""


class ConnectError(DeviceError):
    """A worker cannot be reached: the port is closed, it does not respond, or TLS was refused."""

    in_logs = "RPC connection failed"


def dial(endpoint: Endpoint, tls: ssl.SSLContext | None, timeout: float) -> socket.socket:
    """Return a connected socket with a timeout. Raises ConnectError."""
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
    """Send small messages at once, and probe a silent connection after a second.

    No TCP_USER_TIMEOUT: it would also close the connection to a worker that computes for long while its input is full.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class LineState(NamedTuple):
    """TCP state of a connection.

    `overdue`: a probe or retransmission is not acknowledged. `silence`: seconds since the last acknowledgement.
    """

    overdue: bool
    silence: float


# struct tcp_info of linux/tcp.h up to tcpi_last_ack_recv.
_TCP_INFO = struct.Struct("=8B13I")


class Transport:
    """A connected socket. One thread sends, another receives, any may shut it down."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._secure = sock if isinstance(sock, ssl.SSLSocket) else None
        # OpenSSL has one state for both directions: one thread uses it at a time, and none waits inside.
        self._turn = threading.Lock()
        sock.settimeout(None if self._secure is None else 0.0)

    def send(self, pieces: Sequence[Piece]) -> None:
        """Send all pieces. Raises OSError."""
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
        """Wait for bytes and return their number, 0 at the end. Raises OSError."""
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
        """Return the TCP state of the connection, None on systems other than Linux."""
        if sys.platform != "linux":
            return None
        try:
            info = _TCP_INFO.unpack(self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
        except OSError:
            return None
        retransmits, probes, unacknowledged = info[2], info[3], info[12]
        return LineState(probes > 0 or (unacknowledged > 0 and retransmits > 0), info[20] / 1000)

    def finish(self) -> None:
        """Shut sending down. A waiting `send` returns, a waiting `recv_into` goes on."""
        try:
            socket.socket.shutdown(self._sock, socket.SHUT_WR)
        except OSError:
            pass

    def shutdown(self) -> None:
        """Shut both directions down. A waiting `send` or `recv_into` returns."""
        try:
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)  # with TLS, too: the socket below
        except OSError:
            pass

    def close(self) -> None:
        """Close the socket; only when no thread uses it."""
        self._sock.close()


def _wait(sock: socket.socket, event: int) -> None:
    poll = select.poll()
    poll.register(sock, event)
    poll.poll()
