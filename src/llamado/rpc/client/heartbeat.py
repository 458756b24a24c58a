"""Detection of workers that are gone without closing the connection: frozen, crashed machine, unplugged cable.

Our workers serve a second connection while they compute, which carries heartbeats. ggml's workers serve one connection
at a time; for them the kernel's TCP state shows if data is acknowledged.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from typing import NamedTuple, Protocol

from llamado.rpc import wire
from llamado.rpc.endpoint import Endpoint
from llamado.rpc.transport import ConnectError, Transport, dial

_ATTEMPTS = 3
"""Connections tried for a heartbeat: a crowded worker may close one before its first request."""
_LONGEST_INTERVAL = 1.0


class Patience(NamedTuple):
    """Time limits of a silent worker, in seconds."""

    interval: float
    """Between two heartbeats."""
    answer: float
    """For a heartbeat's response. Together with the interval, a frozen worker is detected in time."""
    silence: float
    """Without an acknowledgement after which a connection is dead, if one was `overdue` for that long.

    The kernel probes an idle connection after 1 s of silence (see transport.py), so its death is detected in time, too.
    """
    overdue: float

    @classmethod
    def of(cls, seconds: float) -> Patience:
        """Return limits that detect a lost worker within `seconds`; a ggml worker in 2 s at the earliest."""
        interval = min(0.2 * seconds, _LONGEST_INTERVAL)
        return cls(interval, seconds - 1.5 * interval, 0.8 * seconds, 0.25 * seconds)


class Heartbeat:
    """Heartbeats on a connection of their own, which is reopened if the worker gave its place to another client."""

    def __init__(self, endpoint: Endpoint, tls: ssl.SSLContext | None, timeout: float, patience: Patience) -> None:
        """Raises ConnectError."""
        self._endpoint, self._tls, self._patience = endpoint, tls, patience
        self._ended = False
        self.round_trip: float | None = None
        """Round trip of the latest heartbeat in seconds."""
        self._connect(timeout)

    def _connect(self, timeout: float) -> None:
        for left in range(_ATTEMPTS)[::-1]:
            self._sock = dial(self._endpoint, self._tls, timeout)
            self._reader = wire.ResponseReader()
            self._sock.settimeout(timeout)
            try:
                if self._ended:
                    raise ConnectionAbortedError("the heartbeat was stopped")
                # UPGRADE shows the worker that this is not a ggml client.
                self._call(wire.Hello(), wire.Upgrade(wire.LATEST.major), wire.DeviceCount())
                break
            except (OSError, wire.WireError) as error:
                self._sock.close()
                if not left or self._ended or not isinstance(error, ConnectionResetError):
                    raise ConnectError(f"{self._endpoint} does not answer a second connection: {error}") from error
        self._sock.settimeout(self._patience.answer)

    def send(self, request: wire.Request) -> None:
        """Send a request without a response and wait until the worker has done it. Raises ConnectError."""
        try:
            self._sock.sendall(wire.write_request(request))
            self._call(wire.DeviceCount())
        except (OSError, wire.WireError) as error:
            raise ConnectError(f"{self._endpoint} does not answer a second connection: {error}") from error

    def beat(self) -> str | None:
        """Send a heartbeat. Returns None if it is answered, else the fault."""
        began = time.perf_counter()
        try:
            self._call(wire.DeviceCount())
            self.round_trip = time.perf_counter() - began
        except TimeoutError:
            return f"it gives no sign of life for {self._patience.answer:.2g} s"
        except (OSError, wire.WireError) as error:
            why = str(getattr(error, "strerror", None) or error)
            self._sock.close()
            try:
                self._connect(self._patience.answer)
            except ConnectError:
                return why
        return None

    def _call(self, *requests: wire.Hello | wire.Upgrade | wire.DeviceCount) -> None:
        for command in (wire.COMMANDS[type(request)] for request in requests):
            if wire.has_response(command):
                self._reader.expect(command)
        self._sock.sendall(b"".join(map(wire.write_request, requests)))
        while self._reader.n_expected:
            if self._reader.next() is None:
                data = self._sock.recv(4096)
                if not data:
                    raise ConnectionResetError("it closed the connection")
                self._reader.feed(data)

    def interrupt(self) -> None:
        """Make a `beat` in another thread return."""
        self._ended = True
        try:
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self) -> None:
        self._sock.close()


class MonitoredConnection(Protocol):
    """A connection that can be monitored."""

    endpoint: Endpoint

    @property
    def lost(self) -> Exception | None:
        """Reason of the loss, None while the worker is up."""

    @property
    def reply_timeout(self) -> float:
        """Most seconds until a response."""

    def stalled_seconds(self) -> float:
        """Return seconds without progress."""

    def lose(self, why: str) -> None:
        """Declare the worker lost."""


class LivenessMonitor:
    """A thread that monitors one connection and declares it lost."""

    def __init__(
        self, connection: MonitoredConnection, transport: Transport, heartbeat: Heartbeat | None, patience: Patience
    ) -> None:
        self._connection, self._transport, self._heartbeat = connection, transport, heartbeat
        self._patience = patience
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"rpc watch {connection.endpoint}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; may be called from it."""
        self._stop.set()
        if self._heartbeat is not None:
            self._heartbeat.interrupt()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        connection, heartbeat, patience = self._connection, self._heartbeat, self._patience
        overdue_since: float | None = None
        pause = patience.interval / 2 if heartbeat is None else patience.interval
        while not self._stop.wait(pause) and connection.lost is None:
            why = None
            if heartbeat is not None:
                why = heartbeat.beat()
            else:
                line = self._transport.state()
                now = time.monotonic()
                if line is None or not line.overdue:
                    overdue_since = None
                elif overdue_since is None:
                    overdue_since = now
                elif now - overdue_since >= patience.overdue and line.silence >= patience.silence:
                    why = f"nothing was heard from it for {line.silence:.1f} s"
            if why is None and connection.stalled_seconds() > connection.reply_timeout:
                why = f"it has not answered for {connection.reply_timeout:g} s"
            if why is not None and not self._stop.is_set():
                connection.lose(why)
        if heartbeat is not None:
            heartbeat.close()
