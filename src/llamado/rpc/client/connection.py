"""The client's end of one connection to a worker: requests out in order, responses back as futures, loss detection.

Calls do not wait for responses. Small requests without a response are held until another request follows, so that a
step leaves as one packet. One thread reads the responses, another monitors the connection.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from llamado.devices.device import Bytes, DeviceError, DeviceLost, LoadProgress, WorkerLost
from llamado.rpc import wire
from llamado.rpc.client.heartbeat import Heartbeat, LivenessMonitor, Patience
from llamado.rpc.endpoint import Endpoint
from llamado.rpc.request_log import SentRequestLog, is_debugging
from llamado.rpc.transport import ConnectError, Piece, Transport, dial

log = logging.getLogger("llamado.rpc")

REPLY_TIMEOUT = 120.0
"""Most seconds until a response; a graph may take long."""
_HOLD = 64 << 10
"""Most bytes of requests that are held."""
_BULK_CHUNK = 4 << 20
"""Bytes of a weight between two calls of the progress callback."""
_READ = 64 << 10
_SLOWEST = 64 << 10
"""Bytes per second of the slowest link. A transfer that is slower, beyond the reply timeout, counts as lost."""
ALIVE_TIMEOUT = 2.0
"""Seconds without a sign of life after which a worker is lost."""

T = TypeVar("T")


class VersionMismatch(DeviceError):
    """The worker has another version of the protocol."""

    in_logs = "RPC connection failed"


class _PendingResponse(NamedTuple):
    """A pending response: its future, and the memory for tensor data."""

    future: Future[Any]
    target: Bytes | None


class WorkerConnection:
    """One connection, safe to use from any thread. Requests are sent in the order of the calls.

    `protocol` is the agreed version. `is_ours`: the worker is ours; `has_links`, `has_own_files`, `has_numerics`: its
    features (see `wire.HelloResponse`). `lost`: the reason why all calls fail from now on, None while the worker is up.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        tls: ssl.SSLContext | None = None,
        timeout: float = 5.0,
        greeting: float | None = None,
        reply_timeout: float = REPLY_TIMEOUT,
        alive_timeout: float = ALIVE_TIMEOUT,
    ) -> None:
        """Connect within `timeout` seconds and greet within `greeting` seconds (default: `timeout`).

        A worker without a sign of life for `alive_timeout` seconds is lost. Raises ConnectError or VersionMismatch.
        """
        patience = Patience.of(alive_timeout)
        self._beat: Heartbeat | None = None
        self._request_log = SentRequestLog(str(endpoint)) if is_debugging() else None
        self.endpoint = endpoint
        self.name = str(endpoint)
        """The worker's name in errors."""
        self.is_ours = self.has_links = self.has_own_files = self.has_numerics = False
        self.protocol = wire.LATEST
        self.lost: DeviceLost | None = None
        self._reply_timeout = reply_timeout
        self._tls, self._timeout = tls, timeout
        self._transport = Transport(dial(endpoint, tls, timeout))
        self.sending = threading.RLock()
        """Lock of the sending side; hold it to keep several calls together."""
        self._depth = 0
        self._held: list[Piece] = []
        self._held_bytes = 0
        self._state = threading.Lock()
        self._due: deque[_PendingResponse] = deque()
        self._reader = wire.ResponseReader()
        self._on_lost: list[Callable[[str], None]] = []
        self._closed = self._drains = self._greeted = False
        self._sent = self._awaited = time.monotonic()
        """Times of the last send, and since when the first pending response is awaited."""
        self._sending = 0
        """Bytes of the send in progress."""
        self._watch = LivenessMonitor(self, self._transport, None, patience)
        self._receiver = threading.Thread(target=self._receive, name=f"rpc {endpoint}", daemon=True)
        self._receiver.start()
        self._watch.start()
        try:
            self._greet(timeout if greeting is None else greeting)
            if self.is_ours:
                self._beat = Heartbeat(endpoint, tls, timeout, patience)
                self._watch.stop()
                self._watch = LivenessMonitor(self, self._transport, self._beat, patience)
                self._watch.start()
            self._greeted = True
        except BaseException:
            self.close()
            raise

    def _greet(self, timeout: float) -> None:
        try:
            response = cast(wire.HelloResponse, self.start_call(wire.Hello()).result(timeout))
        except TimeoutError:
            raise ConnectError(
                f"{self.endpoint} accepted the connection but does not greet within {timeout:g} s; ggml's worker "
                "serves one client at a time: is another one connected?"
            ) from None
        except DeviceLost as lost:
            hint = f"; if it wants TLS, it is tls://{self.endpoint}, and its --allow has to name this machine"
            if self.endpoint.tls:
                # TLS 1.3 refuses a certificate after the handshake, and a reset may overtake the alert with the reason.
                hint = "" if _CERTIFICATE in lost.why else f"; if it refused our certificate, {_CERTIFICATE}"
            raise ConnectError(f"{self.endpoint} is no RPC worker that can be used: {lost.why}{hint}") from None
        theirs = (response.major, response.minor, response.patch)
        protocol = wire.negotiate(theirs)
        if protocol is None:
            raise VersionMismatch(
                f"{self.endpoint} speaks RPC {'.'.join(map(str, theirs))}, this program {wire.SUPPORTED_VERSIONS}; "
                "use a llama.cpp that speaks one of these"
            )
        self.protocol = protocol
        if self._request_log is not None:
            self._request_log.protocol = protocol
        self.is_ours, self.has_links, self.has_own_files = response.is_ours, response.has_links, response.has_own_files
        if self.is_ours:
            # Sent even if it changes nothing: it shows the worker that this is not a ggml client.
            self.send(wire.write_request(wire.Upgrade(wire.LATEST.major)))
            self.protocol = wire.LATEST
        self.has_numerics = response.has_numerics

    # --- sending ------------------------------------------------------------------------------------------------------

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Hold requests inside the block and send them in one piece at its end. Do not wait for a future inside."""
        with self.sending:
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if not self._depth and self.lost is None:
                    self._flush()

    def hold(self, *pieces: Piece) -> None:
        """Queue bytes without a response. They leave with the next request, or once there are many."""
        with self.sending:
            self._check()
            self._held += pieces
            self._held_bytes += sum(map(len, pieces))
            if self._held_bytes > _HOLD:
                self._flush()

    def send(self, *pieces: Piece) -> None:
        """Send bytes without a response; inside `batch` at its end."""
        with self.sending:
            self._check()
            self._held += pieces
            self._held_bytes += sum(map(len, pieces))
            if not self._depth:
                self._flush()

    def send_bulk(self, head: bytes, data: Bytes, progress: LoadProgress | None = None) -> None:
        """Send a request and its bulk data, without a copy of the data."""
        with self.sending:
            self.send(head)
            self._flush()
            view = data.data
            for at in range(0, len(view), _BULK_CHUNK):
                chunk = view[at : at + _BULK_CHUNK]
                self._write([chunk])
                if progress is not None:
                    progress(len(chunk))

    def send_separately(self, request: wire.Request) -> None:
        """Send a request without a response on a new connection, past requests that this one waits for.

        Raises DeviceLost or ConnectError.
        """
        self._check()
        once = Heartbeat(self.endpoint, self._tls, self._timeout, Patience.of(ALIVE_TIMEOUT))
        try:
            once.send(request)
        finally:
            once.close()

    def start_call(self, request: wire.Request) -> Future[wire.Response]:
        """Send a request and return the future of its response."""
        return cast("Future[wire.Response]", self._start(request, None))

    def fetch(self, request: wire.GetTensor | wire.Offer | wire.Bind) -> Future[Bytes]:
        """Send a request for bytes of a tensor, or for a byte per weight."""
        return cast("Future[Bytes]", self._start(request, np.empty(request.size, np.uint8)))

    def call(self, request: wire.Request, kind: type[T], timeout: float | None = None) -> T:
        """Send a request and wait up to `timeout` seconds for its response, a `kind`. Raises TimeoutError."""
        return self.wait_for(self.start_call(request), kind, timeout)

    def wait_for(self, future: Future[wire.Response], kind: type[T], timeout: float | None = None) -> T:
        """Send held requests, then wait for a response. Raises TimeoutError."""
        self.flush()
        response = future.result(timeout)
        assert isinstance(response, kind)
        return response

    def _start(self, request: wire.Request, target: Bytes | None) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # a sent request cannot be canceled
        with self.sending:
            with self._state:
                self._check()
                if not self._due:
                    self._awaited = time.monotonic()
                self._due.append(_PendingResponse(future, target))
                self._reader.expect(wire.COMMANDS[type(request)], 0 if target is None else target.nbytes)
            self.send(wire.write_request(request))
        return future

    def flush(self) -> None:
        """Send held requests."""
        with self.sending:
            self._check()
            self._flush()

    def _flush(self) -> None:
        if self._held:
            pieces, self._held, self._held_bytes = self._held, [], 0
            self._write(pieces)

    def _write(self, pieces: list[Piece]) -> None:
        if self._request_log is not None:
            for piece in pieces:
                self._request_log.add(piece)
        self._sent = time.monotonic()
        self._sending = sum(map(len, pieces))
        try:
            self._transport.send(pieces)
        except OSError as error:
            self.lose(_reason(error))
            raise self._loss() from error
        finally:
            self._sent = time.monotonic()
            self._sending = 0

    def _check(self) -> None:
        if self.lost is not None:
            raise self._loss()

    # --- receiving ----------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        buffer = memoryview(bytearray(_READ))
        try:
            while True:
                message = self._reader.next()
                if message is not None:
                    self._complete(message[1])
                    continue
                n = self._transport.recv_into(buffer)
                if not n:
                    raise EOFError
                self._reader.feed(buffer[:n])
        except EOFError:
            self.lose("it closed the connection")
        except wire.WireError as error:
            self.lose(f"it does not keep to the protocol: {error}")
        except OSError as error:
            self.lose(_reason(error))
        except Exception as error:  # a bug in reading must not leave callers waiting
            log.exception("reading from %s", self.endpoint)
            self.lose(f"reading its answers failed: {error!r}")
        if self._drains:
            self._drain(buffer)

    def _drain(self, buffer: memoryview) -> None:
        """Read and discard until a lost ggml worker hangs up. It would die (SIGPIPE) if it wrote to a closed socket."""
        with suppress(OSError):
            while self._transport.recv_into(buffer):
                pass
        with self.sending:
            self._transport.close()

    def _complete(self, response: wire.Response) -> None:
        with self._state:
            if self.lost is not None:
                raise EOFError
            due = self._due[0]
        result: wire.Response | Bytes = response
        if isinstance(response, wire.TensorData):
            assert due.target is not None
            result, view = due.target, due.target.data
            at = self._reader.take(view)
            while at < response.size:
                n = self._transport.recv_into(view[at:])
                if not n:
                    raise EOFError
                self._reader.bypass(n)
                at += n
        with self._state:
            if self.lost is not None:  # the future has failed already
                raise EOFError
            self._due.popleft()
            self._awaited = time.monotonic()
        due.future.set_result(result)

    # --- the end ------------------------------------------------------------------------------------------------------

    def on_lost(self, callback: Callable[[str], None]) -> None:
        """Call `callback` once with the reason of a loss, from any thread; at once after a loss. It must not block."""
        with self._state:
            if self.lost is None:
                self._on_lost.append(callback)
                return
        callback(self.lost.why)

    def lose(self, why: str) -> None:
        """Declare the worker lost: all pending and later calls fail with DeviceLost."""
        with self._state:
            if self.lost is not None:
                return
            self.lost = WorkerLost(self.name, why)
            due, self._due = [*self._due], deque()
            callbacks = [] if self._closed else self._on_lost
            silent = threading.current_thread() is not self._receiver
            self._drains = silent and self._greeted and not (self.is_ours or self._closed)
        if self._drains:
            self._transport.finish()
        else:
            self._transport.shutdown()
        for one in due:
            one.future.set_exception(self._loss())
        for callback in callbacks:
            try:
                callback(why)
            except Exception:
                log.exception("telling that %s is lost", self.name)

    def _loss(self) -> DeviceLost:
        """Return a new exception for each caller."""
        assert self.lost is not None
        return WorkerLost(self.name, self.lost.why)

    def stalled_seconds(self) -> float:
        """Return seconds without progress: a response is overdue, or a send blocks, beyond a slow link's transfer time.

        Single bytes of a response are no progress: a worker could trickle them forever.
        """
        now = time.monotonic()
        if self._sending:
            return now - self._sent - self._sending / _SLOWEST
        with self._state:
            if not self._due:
                return 0.0
            target = self._due[0].target
            return now - max(self._awaited, self._sent) - (0 if target is None else target.nbytes / _SLOWEST)

    @property
    def round_trip(self) -> float | None:
        """Round trip of the latest heartbeat in seconds, None without heartbeats."""
        return None if self._beat is None else self._beat.round_trip

    @property
    def reply_timeout(self) -> float:
        """Most seconds until a response."""
        return self._reply_timeout

    @reply_timeout.setter
    def reply_timeout(self, seconds: float) -> None:
        self._reply_timeout = seconds

    def close(self) -> None:
        """Close the connection. Pending calls fail, and the worker frees the client's memory."""
        self._closed = True
        self._watch.stop()
        self.lose("the connection was closed")
        if self._drains:  # the receiver closes it
            return
        if threading.current_thread() is not self._receiver:
            self._receiver.join()
            with self.sending:
                self._transport.close()


_CERTIFICATE = "see --rpc-cert and --rpc-key"


def _reason(error: OSError) -> str:
    if isinstance(error, ConnectionResetError):
        return "it reset the connection"
    if isinstance(error, BrokenPipeError):
        return "it closed the connection"
    if isinstance(error, TimeoutError):
        return "the network does not answer"
    if isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or ""):
        return f"it refused our certificate, or that we have none ({error.reason}); {_CERTIFICATE}"
    return str(error.strerror or error)
