"""Links between workers: an outlet to the next worker, and an inlet from the one before.

A client gets a ticket from the next worker and passes it to the one before, which connects with it; other connections
are rejected. Deliveries wait in the connection until the client's session receives them into their tensor. So no memory
is held for them, and TCP slows the sender down.
"""

from __future__ import annotations

import ipaddress
import logging
import secrets
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from llamado.errors import LlamadoError
from llamado.rpc import wire
from llamado.rpc.endpoint import Endpoint
from llamado.rpc.transport import Transport, dial
from llamado.rpc.worker.budgets import Budgets
from llamado.rpc.worker.connection import ClientConnection
from llamado.rpc.worker.identity import address
from llamado.rpc.worker.memory import Region

log = logging.getLogger("llamado.rpc.worker.server")

MAX_LINKS = 64
"""Most inlets, and most outlets, of one client."""
DIAL_SECONDS = 2.0
"""Seconds to connect, and seconds to greet."""
REFUSAL_SECONDS = 1.0
"""Least seconds until a refusal, whatever the reason, so that its timing does not reveal open ports."""
_DIALS_AT_ONCE = 4
_FAILURES, _FAILURES_A_SECOND = 20, 0.2
"""Budget of failed connections of one client, which limits port scans."""
_HUNG_UP = getattr(select, "POLLRDHUP", 0)


class LinkRefused(LlamadoError):
    """No link to the next worker: it is not ours, rejects the ticket, or must not be connected to."""


Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass
class Dialer:
    """Connections to other workers that clients ask for: only if `allowed`, and only within `networks` if given.

    `tls`: context for workers at tls://, None without a certificate.
    """

    allowed: bool = True
    networks: Sequence[Network] = ()
    tls: ssl.SSLContext | None = None
    failures: Budgets = field(default_factory=lambda: Budgets(_FAILURES, _FAILURES_A_SECOND))
    _turns: threading.BoundedSemaphore = field(default_factory=lambda: threading.BoundedSemaphore(_DIALS_AT_ONCE))

    def connect(self, client: str, request: wire.ConnectNext) -> Outlet | None:
        """Return an outlet to the worker of a request. Returns None and logs a line if there is none."""
        began = time.monotonic()
        where = wire.printable(request.endpoint.decode("utf-8", "replace"))
        try:
            with self.attempt(client):
                return self._reach(Endpoint.parse(request.endpoint.decode()), request.ticket)
        except (LlamadoError, OSError, ValueError) as error:
            log.warning("cannot reach worker %s: %s; falling back to the client", where, wire.printable(str(error)))
            time.sleep(max(0.0, began + REFUSAL_SECONDS - time.monotonic()))
            return None

    @contextmanager
    def attempt(self, client: str) -> Iterator[None]:
        """Allow one connection for a client inside the block, and count a failure. Raises LinkRefused."""
        if not self.allowed:
            raise LinkRefused("this worker has no links (--no-ring)")
        if self.failures.left(client) < 1:
            raise LinkRefused("too many attempts of this client have failed")
        if not self._turns.acquire(timeout=DIAL_SECONDS):
            raise LinkRefused("too many others connect at the same time")
        try:
            yield
        except (LlamadoError, wire.WireError, OSError, ValueError):
            self.failures.spend(client, 1)
            raise
        finally:
            self._turns.release()

    def check(self, endpoint: Endpoint) -> None:
        """Raise LinkRefused if this worker must not connect to an endpoint."""
        if self.networks:
            found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
            hosts = {address(str(entry[4][0])) for entry in found}
            if not all(host is not None and any(host in network for network in self.networks) for host in hosts):
                raise LinkRefused("it is not in a network of --allow")

    def _reach(self, endpoint: Endpoint, ticket: bytes) -> Outlet:
        self.check(endpoint)
        if endpoint.tls and self.tls is None:
            raise LinkRefused("it needs TLS, and this worker has no --tls-cert and --tls-key")
        sock = dial(endpoint, self.tls if endpoint.tls else None, DIAL_SECONDS)
        try:
            ends = time.monotonic() + DIAL_SECONDS
            hello = _call(sock, wire.Hello(), ends)
            if not (isinstance(hello, wire.HelloResponse) and hello.is_ours):
                raise LinkRefused("it is not a llamado worker")
            if _call(sock, wire.Attach(ticket), ends) != wire.Number(1):
                raise LinkRefused("it rejected the ticket: it is not the worker that the client means")
            return Outlet(sock)
        except BaseException:
            sock.close()
            raise


def _call(sock: socket.socket, request: wire.Request, ends: float) -> wire.Response:
    reader = wire.ResponseReader()
    reader.expect(wire.COMMANDS[type(request)])
    sock.sendall(wire.write_request(request))
    while (found := reader.next()) is None:
        sock.settimeout(max(0.001, ends - time.monotonic()))
        data = sock.recv(256)
        if not data:
            raise LinkRefused("it closed the connection")
        reader.feed(data)
    return found[1]


class Outlet:
    """The connection to the next worker."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._transport = Transport(sock)

    @property
    def is_gone(self) -> bool:
        """True if the other worker has hung up."""
        poll = select.poll()
        poll.register(self._sock, _HUNG_UP)
        return bool(poll.poll(0))

    def send(self, sequence: int, computed: float, region: Region, start: int, size: int) -> None:
        """Send bytes of a region, with the seconds computed for them. Raises OSError."""
        head = wire.write_request(wire.Deliver(sequence, round(1e6 * computed), size))
        for piece in region.read(start, size):
            self._transport.send([head, piece] if head else [piece])
            head = b""
        if head:
            self._transport.send([head])

    def shut(self) -> None:
        """Shut the connection down, from any thread. A waiting `send` returns."""
        self._transport.shutdown()

    def close(self) -> None:
        """Close the connection; only while no thread sends."""
        self._transport.shutdown()
        self._transport.close()


class Inlet:
    """The way into one client's memory for one connection with the `ticket`, once."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.ticket = secrets.token_bytes(wire.TICKET_BYTES)
        self._closed = threading.Event()
        self._using = threading.Lock()
        self._connection: ClientConnection | None = None

    @property
    def is_closed(self) -> bool:
        """True once the inlet is closed."""
        return self._closed.is_set()

    def attach(self, connection: ClientConnection) -> bool:
        """Use a connection as the sender's. Returns False if the inlet has one already, or is closed."""
        with self._using:
            if self._connection is not None or self.is_closed:
                return False
            self._connection = connection
            return True

    def wait(self) -> None:
        """Wait until the inlet is closed and its connection not used any more."""
        self._closed.wait()
        with self._using:
            self._connection = None

    def close(self) -> None:
        """Close the inlet, from any thread. A waiting `take` returns None."""
        self._closed.set()
        connection = self._connection
        if connection is not None:
            connection.shut()

    def take(self, sequence: int, region: Region, start: int, size: int) -> int | None:
        """Wait for the delivery of this number and receive it into a region. Earlier ones are dropped.

        Returns the microseconds computed for it, None if it does not come: then the inlet is closed.
        """
        with self._using:
            if self._connection is not None and not self.is_closed:
                try:
                    request = self._next(self._connection, sequence)
                    if (request.sequence, request.size) != (sequence, size):
                        came = f"{request.size} bytes of number {request.sequence}"
                        raise wire.WireError(f"{came} came by an inlet, not {size} of {sequence}")
                    self._connection.receive(region, start, size)
                    return request.computed
                except LlamadoError as error:
                    log.warning("link from another worker closed: %s", error)
                except OSError as error:
                    log.debug("an inlet is closed: %s", error)
        self.close()
        return None

    def _next(self, connection: ClientConnection, sequence: int) -> wire.Deliver:
        """Return the first delivery that is not before a number."""
        while True:
            request = connection.next_request()
            if request is None:
                raise ConnectionResetError("nothing comes any more")
            if not isinstance(request, wire.Deliver):
                name = wire.COMMANDS[type(request)].name
                raise wire.WireError(f"{name} by a connection that carries DELIVER alone")
            if request.sequence >= sequence:
                return request
            connection.skip()
