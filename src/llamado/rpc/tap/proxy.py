"""`llamado tap`: a proxy in front of a worker that decodes the traffic and delays graphs like a slow link.

It models a link, not a slow worker. A delayed message leaves `latency` after it arrived, and the messages behind it are
in transit at the same time: ten of them sent at once leave together after one latency. Only `bandwidth` makes one
message wait for the bytes of another. (A proxy that sleeps between reading and sending is equal for one message at a
time, but not for more.) Messages stay in order: one behind a delayed message waits behind it.

GRAPH_COMPUTE and GRAPH_RECOMPUTE are delayed, one delay for each stage of a token, and so is DELIVER, which carries a
tensor from one worker to the next. Responses are not. With `all` everything is delayed, both ways. A hop between
workers goes through the tap of the receiving one.

Threads, because they sleep more exactly than event loops, whose timers count milliseconds: 0.03 ms late at the median
on Linux, against 0.1 to 0.8 ms. Bytes that need not wait go from socket to socket in the reading thread.
"""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from llamado.errors import LlamadoError
from llamado.rpc import wire
from llamado.rpc.tap.framing import DELAYED, Message, RequestFramer, ResponseFramer, command_name, is_command
from llamado.rpc.tap.link import Link
from llamado.rpc.tap.tracing import RequestDecoder, Summary, Trace, response_fields

log = logging.getLogger("llamado.rpc.tap.proxy")

_READ_BYTES = 1 << 20
_READ_BYTES_LIMITED = 1 << 14  # with a bandwidth, so that one connection's bytes do not hold the link for long
_IN_FLIGHT_BYTES = 64 << 20
_IN_FLIGHT_BYTES_LIMITED = 4 << 20  # about the buffers of both ends of a real connection
_CONNECT_SECONDS = 10.0
_LINGER_SECONDS = 0.5
_PR_SET_TIMERSLACK = 29  # prctl(2)


class TapError(LlamadoError):
    """The tap cannot start: an invalid option, or a port in use."""


@dataclass(frozen=True)
class TapOptions:
    """Options of `llamado tap`. Port 0: any free one; `bandwidth` in bits per second, None: no limit."""

    listen_host: str = "127.0.0.1"
    listen_port: int = 60052
    target_host: str = "127.0.0.1"
    target_port: int = 50052
    latency_ms: float = 0.0
    jitter_ms: float = 0.0
    bandwidth: float | None = None
    all: bool = False
    trace: str | None = None


def parse_bandwidth(text: str) -> float:
    """Return bits per second from "1G", "100M", "64k" or plain digits. Raises TapError."""
    units = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
    number, unit = (text[:-1], units[text[-1].lower()]) if text[-1:].lower() in units else (text, 1.0)
    try:
        bits = float(number) * unit
    except ValueError:
        bits = 0.0
    if not 0 < bits < float("inf"):
        raise TapError(f"--bandwidth {text}: expected bits per second, as 1G, 100M or 64k")
    return bits


class Lane:
    """One direction of a connection: sends bytes on in order, none before it is due.

    One thread calls `send`. Bytes that are due with none before them are sent at once; a thread of the lane's own waits
    for the others.
    """

    def __init__(self, target: socket.socket, link: Link) -> None:
        self._target = target
        self._link = link
        self._last = 0.0
        self._queue: deque[tuple[float, bytes]] = deque()
        self._bytes = 0
        self._broken: OSError | None = None
        self._ended = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def _limit(self) -> int:
        """Return the most bytes in flight."""
        return _IN_FLIGHT_BYTES if self._link.bandwidth is None else _IN_FLIGHT_BYTES_LIMITED

    def due(self, n: int, arrived: float, *, delayed: bool) -> float:
        """Return the time at which the next `n` bytes are due, never before earlier bytes."""
        self._last = max(self._last, self._link.due(n, arrived, delayed=delayed))
        return self._last

    def send(self, data: memoryview | bytearray, due: float) -> None:
        """Send bytes on when they are due. Raises OSError if the target is gone."""
        if not self._queue and due <= time.perf_counter():
            # Only this thread adds to the queue, so it is empty.
            if self._broken:
                raise self._broken
            self._target.sendall(data)
            return
        with self._changed:
            while self._bytes >= self._limit() and not self._broken:
                self._changed.wait()
            if self._broken:
                raise self._broken
            self._queue.append((due, bytes(data)))
            self._bytes += len(data)
            if self._thread is None:
                self._thread = threading.Thread(target=self._deliver, name="tap-lane", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def finish(self) -> None:
        """Wait until all bytes are sent, or cannot be."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
            while self._queue and not self._broken:
                self._changed.wait()

    def abandon(self) -> None:
        """Discard the bytes in flight."""
        with self._changed:
            self._broken = self._broken or OSError("the tap was closed")
            self._changed.notify_all()

    def _deliver(self) -> None:
        _sleep_exactly()
        while True:
            with self._changed:
                while not self._queue:
                    if self._ended:
                        return
                    self._changed.wait()
                due, data = self._queue[0]
            if (left := due - time.perf_counter()) > 0:
                time.sleep(left)
            if self._broken:
                return
            try:
                self._target.sendall(data)
            except OSError as error:
                with self._changed:
                    self._broken = error
                    self._changed.notify_all()
                return
            with self._changed:
                # Not before: `send` must not pass these bytes.
                self._queue.popleft()
                self._bytes -= len(data)
                self._changed.notify_all()


def _sleep_exactly() -> None:
    """Disable timer slack: by default the kernel ends a sleep up to 50 µs late to save wake-ups."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


class TapConnection:
    """A client, its worker, and the two directions between them."""

    def __init__(self, tap: Tap, number: int, client: socket.socket, worker: socket.socket) -> None:
        self.number = number
        self.requests_read = RequestDecoder()
        self._tap = tap
        self._client, self._worker = client, worker
        awaiting: deque[Message] = deque()
        self._requests, self._responses = RequestFramer(awaiting), ResponseFramer(awaiting)
        self._to_worker, self._to_client = Lane(worker, tap.towards), Lane(client, tap.back)
        self._requests_ended = threading.Event()

    def run(self) -> None:
        """Run until both sides have closed and all bytes in flight are sent."""
        back = threading.Thread(target=self._carry_responses, name=f"tap-{self.number}-back", daemon=True)
        back.start()
        self._carry_requests()
        back.join()
        self._client.close()
        self._worker.close()
        for message in (self._requests.unfinished, self._responses.unfinished):
            if message is not None:
                size = message.size if message.has_head else "?"
                name = f"{'the response to ' if message.request else ''}{command_name(message.command)}"
                self._tap.note(self, f"closed in the middle of {name}: {message.seen} of {size} bytes")

    def cut(self) -> None:
        """Cut both directions now and discard the bytes in flight."""
        self._to_worker.abandon()
        self._to_client.abandon()
        _shut(self._client, socket.SHUT_RDWR)
        _shut(self._worker, socket.SHUT_RDWR)

    def _carry_requests(self) -> None:
        try:
            for data, now in _reads(self._client, self._tap.towards):
                self._pass_requests(data, now)
        except OSError:
            pass  # one side is gone, which the other direction detects, too
        held = self._requests.unfinished
        if held is not None and self._is_held(held):
            try:
                self._send_delayed(held, held.kept, time.perf_counter())
            except OSError:
                pass
        self._to_worker.finish()
        _shut(self._worker, socket.SHUT_WR)
        self._requests_ended.set()

    def _is_held(self, message: Message) -> bool:
        """Return True if a request is sent on as a whole: delayed ones, unless they are too large."""
        return self._tap.delays(message.command) and (message.is_kept_whole or not message.has_head)

    def _pass_requests(self, data: memoryview, now: float) -> None:
        at = start = 0  # `start`: first byte that is sent on undelayed
        passed: list[Message] = []
        while at < len(data):
            message, n = self._requests.take(data[at:], now)
            before, at = at, at + n
            if message.completed_head and not is_command(message.command):
                what = f"{command_name(message.command)} of {message.size} bytes"
                self._tap.note(self, f"{what} is not in the protocol: passed on unchanged")
            if not self._tap.delays(message.command):
                if message.is_complete:
                    passed.append(message)
                continue
            self._send_on(data[start:before], now, passed)
            start = at
            if not message.has_head or (message.is_kept_whole and not message.is_complete):
                continue
            if message.is_kept_whole:
                self._send_delayed(message, message.kept, now)
            else:
                part = data[before:at]
                # The head may be from an earlier read; it was held until the size was known.
                self._send_delayed(
                    message, message.kept[: message.seen - n] + part if message.completed_head else part, now
                )
        self._send_on(data[start:], now, passed)

    def _send_on(self, data: memoryview, now: float, passed: list[Message]) -> None:
        """Send bytes on undelayed. `passed`: the messages that end in them."""
        if data:
            due = self._to_worker.due(len(data), now, delayed=self._tap.options.all)
            for message in passed:
                message.due = due
                # Before it is sent, so that the trace has no response before its request.
                self._tap.passed(self, message)
            passed.clear()
            self._to_worker.send(data, due)

    def _send_delayed(self, message: Message, data: memoryview | bytearray, now: float) -> None:
        message.due = self._to_worker.due(len(data), now, delayed=True)
        if message.is_complete:
            self._tap.passed(self, message)
        self._to_worker.send(data, message.due)

    def _carry_responses(self) -> None:
        reads = _reads(self._worker, self._tap.back)
        while True:
            try:
                data, now = next(reads)
            except (OSError, StopIteration):
                worker_ended = True
                break
            due = self._to_client.due(len(data), now, delayed=self._tap.options.all)
            self._note_responses(data, now, due)
            try:
                self._to_client.send(data, due)
            except OSError:
                worker_ended = False
                break
        self._to_client.finish()
        _shut(self._client, socket.SHUT_WR)
        if worker_ended and not self._requests_ended.wait(_LINGER_SECONDS):
            # Closing at once would reset the connection, and the client could lose unread bytes.
            self.cut()

    def _note_responses(self, data: memoryview, now: float, due: float) -> None:
        at = 0
        while at < len(data) and not self._responses.lost:
            taken = self._responses.take(data[at:], now)
            if taken is None:
                self._tap.note(self, "a response to no known request: responses are passed on without decoding")
                return
            message, n = taken
            at += n
            if message.is_complete:
                message.due = due
                self._tap.passed(self, message)


def _reads(source: socket.socket, link: Link) -> Iterator[tuple[memoryview, float]]:
    """Yield received bytes and their time until the end. The memory is reused for the next ones. Raises OSError."""
    memory = memoryview(bytearray(_READ_BYTES))
    while n := source.recv_into(memory, _READ_BYTES if link.bandwidth is None else _READ_BYTES_LIMITED):
        yield memory[:n], time.perf_counter()


def _shut(side: socket.socket, how: int) -> None:
    try:
        side.shutdown(how)
    except OSError:
        pass  # closed, or never connected


class Tap:
    """A listening tap, to be started and closed. Raises TapError for a port in use, TraceError for the trace's file."""

    def __init__(self, options: TapOptions) -> None:
        for name in ("latency_ms", "jitter_ms"):
            if not 0 <= getattr(options, name) < 1e7:
                raise TapError(f"--{name.replace('_', '-')} {getattr(options, name)}: expected 0 or more milliseconds")
        self.options = options
        self.towards, self.back = (
            Link(1e-3 * options.latency_ms, 1e-3 * options.jitter_ms, options.bandwidth) for _ in range(2)
        )
        self.summary = Summary()
        self._listener = _listen(options.listen_host, options.listen_port)
        try:
            self._trace = Trace(options.trace) if options.trace else None
        except BaseException:
            self._listener.close()
            raise
        # Decoding and writing the trace takes longer than passing messages on.
        self._lines: queue.Queue[tuple[TapConnection, Message | str, float] | None] = queue.Queue(10_000)
        self._writer = threading.Thread(target=self._write_trace, name="tap-trace", daemon=True)
        self._acceptor = threading.Thread(target=self._accept, name="tap-accept", daemon=True)
        self._lock = threading.Lock()
        self._connections: dict[TapConnection, threading.Thread] = {}
        self._closing = False

    def change(self, latency_ms: float, jitter_ms: float, bandwidth: float | None) -> None:
        """Change the link for bytes received from now on, see TapOptions."""
        for link in (self.towards, self.back):
            link.latency, link.jitter, link.bandwidth = 1e-3 * latency_ms, 1e-3 * jitter_ms, bandwidth

    @property
    def port(self) -> int:
        """The port for clients."""
        port: int = self._listener.getsockname()[1]
        return port

    def start(self) -> Self:
        """Start to accept clients."""
        if self._trace is not None:
            self._writer.start()
        self._acceptor.start()
        return self

    def close(self) -> None:
        """Cut all connections and discard the bytes in flight."""
        with self._lock:
            self._closing = True
            running = list(self._connections.items())
        if self._acceptor.ident is not None:
            self._acceptor.join()
        self._listener.close()
        for connection, _ in running:
            connection.cut()
        for _, thread in running:
            thread.join(5.0)
        if self._trace is not None:
            if self._writer.ident is not None:
                self._lines.put(None)
                self._writer.join()
            self._trace.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def delays(self, command: int | None) -> bool:
        """Return True if messages of a command are delayed as a whole. With `all`, bytes are delayed as they arrive."""
        return command in DELAYED and not self.options.all

    def passed(self, connection: TapConnection, message: Message) -> None:
        """Count and trace a message that is sent on now, or when it is due."""
        self.summary.add(message)
        if self._trace is not None:
            self._lines.put((connection, message, message.ended))

    def note(self, connection: TapConnection, text: str) -> None:
        """Log a note about a connection, and write it to the trace."""
        log.info("connection %d: %s", connection.number, text)
        if self._trace is not None:
            self._lines.put((connection, text, time.perf_counter()))

    def _accept(self) -> None:
        # Waking up now and then is how a thread that accepts can be ended on every system.
        self._listener.settimeout(0.1)
        while not self._closing:
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                log.warning("cannot accept a connection: %s", error.strerror or error)
                time.sleep(0.1)
                continue
            client.settimeout(None)
            threading.Thread(target=self._serve, args=(client,), name="tap-connection", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        target = self.options.target_host, self.options.target_port
        number = self.summary.opened()
        try:
            worker = socket.create_connection(target, timeout=_CONNECT_SECONDS)
            worker.settimeout(None)
            for side in (client, worker):
                side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            reason = error.strerror or str(error)
            log.warning("connection %d refused: no worker at %s:%d (%s)", number, *target, reason)
            client.close()
            return
        connection = TapConnection(self, number, client, worker)
        with self._lock:
            self._connections[connection] = threading.current_thread()
            if self._closing:
                connection.cut()
        log.debug("connection %d opened", number)
        try:
            connection.run()
        finally:
            with self._lock:
                del self._connections[connection]
        log.debug("connection %d closed", number)

    def _write_trace(self) -> None:
        assert self._trace is not None
        failed = False
        while (line := self._lines.get()) is not None:
            connection, what, at = line
            if failed:
                continue
            try:
                self._trace.write(at, connection.number, **_fields(connection, what))
            except OSError as error:
                failed = True
                log.error("--trace %s: %s; the trace ends here", self.options.trace, error.strerror or error)


def _fields(connection: TapConnection, what: Message | str) -> dict[str, Any]:
    """Return a line of the trace: direction, command, size, delay and fields."""
    if isinstance(what, str):
        return {"note": what}
    fields = {
        "direction": "request" if what.request is None else "response",
        "command": command_name(what.command),
        "bytes": min(what.size, 2**64 - 1),
        "delay_ms": round(1e3 * (what.due - what.ended), 3),
    }
    if what.request is None:
        return fields | connection.requests_read.describe(what)
    if what.command == wire.Command.HELLO:
        connection.requests_read.greeted(what)
    return fields | {"after_ms": round(1e3 * (what.due - what.request.ended), 3)} | response_fields(what)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family)
    except OSError as error:
        raise TapError(f"--listen-host {host}: {error.strerror or error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except (OSError, OverflowError) as error:
        listener.close()
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise TapError(
            f"cannot listen on {host}:{port}: {reason}; choose another with --listen-port (0: any free one)"
        ) from None
    return listener


def run_tap(options: TapOptions) -> int:
    """Run the command until SIGINT or SIGTERM, then print the summary. Raises TapError or TraceError."""
    from llamado.terminal.console import Console

    # The thread that describes a graph must not delay one that sends a message on.
    sys.setswitchinterval(0.0005)
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    with Tap(options) as tap:
        log.info("listening on %s:%d, %s", options.listen_host, tap.port, _link_text(options))
        ended.wait()
    # A table in a pipe or a file keeps its full width.
    Console(width=None if sys.stdout.isatty() else 120).print(tap.summary.table())
    return 0


def _link_text(options: TapOptions) -> str:
    does = f"passing on to {options.target_host}:{options.target_port}"
    if options.latency_ms or options.jitter_ms:
        jitter = f" and up to {options.jitter_ms:g} ms more" if options.jitter_ms else ""
        does += f", {'everything' if options.all else 'graphs'} {options.latency_ms:g} ms late{jitter}"
    if options.bandwidth is not None:
        does += f", {1e-6 * options.bandwidth:g} Mbit/s each way"
    return does
