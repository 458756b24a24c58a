"""A worker's end of one connection: the greeting, requests in order, tensor data in and out."""

from __future__ import annotations

import socket
import ssl
import time
from typing import TypeVar

from llamado.rpc import wire
from llamado.rpc.worker.memory import Region

GREETING_SECONDS = 10.0
"""Time for TLS, and for HELLO: a silent connection must not hold a thread."""
_MAX_MESSAGE = 16 << 20
"""A graph of as many nodes as a worker accepts, and as many other tensors."""
_RECEIVE_BYTES = 256 << 10
_CHUNK_BYTES = 1 << 20
"""Tensor data received at a time for memory that this process cannot reach."""
_SMALL_BYTES = 16 << 10
"""Data up to this size is sent in one piece with its header."""

R = TypeVar("R")


class ClientConnection:
    """One connection. `host` is the client's address, `name` its name in logs. `sock` is replaced by TLS."""

    def __init__(self, sock: socket.socket, host: str, name: str, protocol: wire.Protocol) -> None:
        self.host, self.name = host, name
        self.sock = sock
        self.began = time.monotonic()
        self.is_shut = False
        self._reader = wire.RequestReader(_MAX_MESSAGE, protocol)
        self._buffer = memoryview(b"")
        self._read_ahead: wire.Request | None = None
        self._greeted = False

    @property
    def protocol(self) -> wire.Protocol:
        """The protocol of the greeting, or of UPGRADE."""
        return self._reader.protocol

    @property
    def is_overdue(self) -> bool:
        """True if the greeting takes too long: each step of TLS may arrive in time, byte by byte."""
        return not self._greeted and time.monotonic() > self.began + 2 * GREETING_SECONDS

    @property
    def has_partial_request(self) -> bool:
        """True if a part of a request has arrived."""
        return self._reader.held > 0

    @property
    def local_address(self) -> str:
        """The address at which the client reached this worker."""
        address: str = self.sock.getsockname()[0]
        return address

    def fileno(self) -> int:
        """The socket's descriptor, −1 once it is closed."""
        return self.sock.fileno()

    # --- requests -----------------------------------------------------------------------------------------------------

    def greet(self, tls: ssl.SSLContext | None) -> wire.Request:
        """Set up TLS and return the first request, HELLO. Raises WireError if either takes too long."""
        deadline = time.monotonic() + GREETING_SECONDS
        try:
            if tls is not None:
                self.sock.settimeout(GREETING_SECONDS)
                try:
                    # The handshake comes second, so that `shut` can interrupt it: closing alone ends no poll.
                    self.sock = tls.wrap_socket(self.sock, server_side=True, do_handshake_on_connect=False)
                    self.sock.do_handshake()
                except ssl.SSLError as error:
                    raise wire.WireError(f"no TLS: {_tls_reason(error)}") from None
            buffer = memoryview(bytearray(64))
            while (request := self._reader.next()) is None:
                self.sock.settimeout(max(0.001, deadline - time.monotonic()))
                n = self.sock.recv_into(buffer)
                if not n:
                    raise ConnectionResetError("gone before HELLO")
                self._reader.feed(buffer[:n])
        except TimeoutError:
            raise wire.WireError(f"no HELLO within {GREETING_SECONDS:g} s") from None
        self.sock.settimeout(None)
        self._greeted = True
        self._buffer = memoryview(bytearray(_RECEIVE_BYTES))
        return request

    def next_request(self) -> wire.Request | None:
        """Wait for the next request. Returns None once the client has hung up."""
        request = self._read_ahead
        if request is not None:
            self._read_ahead = None
            return request
        reader, buffer = self._reader, self._buffer
        while (request := reader.next()) is None:
            try:
                n = self.sock.recv_into(buffer)
            except ConnectionResetError:
                return None
            if not n:
                return None
            reader.feed(buffer[:n])
        return request

    def following(self, kind: type[R]) -> R | None:
        """Return the next request if it has arrived already and is a `kind`. Another one stays for `next_request`."""
        request = self._reader.next()
        if isinstance(request, kind):
            return request
        self._read_ahead = request
        return None

    def answer(self, request: wire.Request, response: wire.Response) -> None:
        """Send the response to a request."""
        self.sock.sendall(wire.write_response(wire.COMMANDS[type(request)], response))

    # --- tensor data --------------------------------------------------------------------------------------------------

    def fill(self, target: memoryview) -> None:
        """Receive bulk data of the last request into memory of this process."""
        sock, reader = self.sock, self._reader
        done = reader.take(target)
        while done < len(target):
            n = sock.recv_into(target[done:])
            if not n:
                raise ConnectionResetError("gone in the middle of a tensor")
            reader.bypass(n)
            done += n

    def receive(self, region: Region, start: int, size: int) -> None:
        """Receive `size` bytes of bulk data into a region from byte `start` on."""
        if region.memory is not None:
            self.fill(region.memory[start : start + size])
            return
        chunk = memoryview(bytearray(min(size, _CHUNK_BYTES)))
        while size:
            part = chunk[: min(size, len(chunk))]
            self.fill(part)
            region.write(start, part)
            start += len(part)
            size -= len(part)

    def skip(self) -> None:
        """Receive and discard the bulk data of the last request."""
        reader = self._reader
        reader.drop()
        while reader.bulk:
            self.fill(self._buffer[: min(reader.bulk, len(self._buffer))])

    def send(self, head: bytes, data: memoryview) -> None:
        """Send a header and the data behind it, without a copy of large data if the socket allows it."""
        sock = self.sock
        if len(data) <= _SMALL_BYTES:
            sock.sendall(head + data)
        elif isinstance(sock, ssl.SSLSocket) or not hasattr(sock, "sendmsg"):
            sock.sendall(head + data[:_SMALL_BYTES])
            sock.sendall(data[_SMALL_BYTES:])
        else:
            sent = sock.sendmsg((head, data)) - len(head)
            if sent < 0:
                sock.sendall(head[sent:])
                sent = 0
            if sent < len(data):
                sock.sendall(data[sent:])

    # --- the end ------------------------------------------------------------------------------------------------------

    def shut(self) -> None:
        """Shut both directions down, from any thread."""
        self.is_shut = True
        try:
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)  # with TLS, too: the socket below
        except OSError:
            pass

    def close(self) -> None:
        """Close the socket; only from the thread that serves it."""
        self.sock.close()


def _tls_reason(error: ssl.SSLError) -> str:
    reason = error.reason or ""
    if "NO_CERTIFICATE" in reason or "PEER_DID_NOT_RETURN" in reason:
        return "the client shows no certificate"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the client's certificate is not trusted ({error.verify_message})"
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL", "RECORD_LAYER_FAILURE"):
        return "the client does not speak TLS"
    return reason.lower().replace("_", " ") or str(error)
