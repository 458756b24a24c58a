"""One client of a worker, served by one thread from HELLO to the end."""

from __future__ import annotations

import logging
import ssl
import time

from llamado.errors import LlamadoError
from llamado.rpc import wire
from llamado.rpc.worker.activity import WorkDone
from llamado.rpc.worker.client import Client, WorkerState
from llamado.rpc.worker.connection import ClientConnection
from llamado.rpc.worker.handlers.buffers import BufferHandlers
from llamado.rpc.worker.handlers.devices import DeviceHandlers
from llamado.rpc.worker.handlers.graphs import GraphHandlers, WorkerStopping
from llamado.rpc.worker.handlers.greeting import GreetingHandlers
from llamado.rpc.worker.handlers.handler import Handlers
from llamado.rpc.worker.handlers.links import LinkHandlers
from llamado.rpc.worker.handlers.sums import SumHandlers
from llamado.rpc.worker.handlers.tensors import TensorHandlers
from llamado.rpc.worker.handlers.weights import WeightHandlers

log = logging.getLogger("llamado.rpc.worker.server")


class Session:
    """Serves one connection: greets the client and passes each request to its handler."""

    def __init__(self, connection: ClientConnection, worker: WorkerState) -> None:
        self.name = connection.name
        self._connection, self._worker = connection, worker
        self._client = client = Client(connection, worker)
        self.network = client.network
        self.buffers = BufferHandlers(client)
        weights = WeightHandlers(client, self.buffers)
        self._links = LinkHandlers(client, self.buffers)
        self.parts: tuple[Handlers, ...] = (
            GreetingHandlers(client),
            DeviceHandlers(client),
            weights,
            TensorHandlers(client, self.buffers, weights),
            self._links,
            SumHandlers(client, self.buffers),
            self.buffers,
            GraphHandlers(client, self.buffers),
        )
        """In the order in which they are released."""
        self._served = connection.began
        self._was_accepted = False

    # --- the connection -----------------------------------------------------------------------------------------------

    def serve(self, tls: ssl.SSLContext | None = None) -> None:
        """Serve requests until the client leaves or breaks a rule, then free all it had."""
        connection, client = self._connection, self._client
        outcome = "left"
        try:
            request = connection.greet(tls)
            client.identify()
            self._serve(request)
        except WorkerStopping:
            outcome = "ended with the worker"
        except LlamadoError as error:
            log.warning("%s: connection closed: %s", self.name, wire.printable(str(error)))
        except OSError as error:
            log.debug("%s: %s", self.name, error)
            outcome = "is gone"
        except MemoryError:
            log.warning("%s: connection closed: out of memory for its request", self.name)
        except Exception:
            log.exception("%s: connection closed by a bug of this program", self.name)
        finally:
            size, work = self.buffers.held_bytes, client.work
            self._interrupt()
            for part in self.parts:
                part.release()
            self.shut()
            connection.close()
            if size:
                log.info(
                    "%s: %s after %.0f s (graphs=%d tokens=%d), %.1f MB freed",
                    self.name, outcome, time.monotonic() - connection.began, work.graphs, work.tokens, size / 1e6,
                )  # fmt: skip

    def _serve(self, request: wire.Request | None) -> None:
        """Serve HELLO and all requests behind it."""
        connection, is_debugging = self._connection, self._worker.is_debugging
        handlers = {kind: handler for part in self.parts for kind, handler in part.handlers().items()}
        while request is not None:
            if is_debugging:
                log.info("%s %s", self.name, wire.describe(request))
            response = handlers[type(request)](request)
            if response is not None:
                connection.answer(request, response)
            request = connection.next_request()
            self._served = time.monotonic()
            if not self._was_accepted:
                self._note_greeting(request)

    def _note_greeting(self, request: wire.Request | None) -> None:
        """Record if the client goes on after the greeting: a ggml client of another version hangs up."""
        connection, greetings = self._connection, self._worker.greetings
        if request is None:
            if not (connection.has_partial_request or connection.is_shut):
                greetings.record_refused(connection.host, connection.protocol, connection.began)
            return
        self._was_accepted = True
        if wire.COMMANDS[type(request)] not in wire.OWN_COMMANDS:  # our clients accept any version
            greetings.record_accepted(connection.host, connection.protocol, self._served)

    # --- from other threads -------------------------------------------------------------------------------------------

    @property
    def work(self) -> WorkDone:
        """The work done for this client so far."""
        return self._client.work

    @property
    def held_bytes(self) -> int:
        """Bytes of the client's buffers."""
        return self.buffers.held_bytes

    @property
    def is_overdue(self) -> bool:
        """True if the client's greeting takes too long."""
        return self._connection.is_overdue

    @property
    def is_gone(self) -> bool:
        """True once the client has hung up."""
        return self._client.is_gone

    @property
    def idle_since(self) -> float | None:
        """Time of the last request. None if the client has buffers, or sends to a client that has: it may rest."""
        return None if self.buffers.regions or self._links.is_attached else self._served

    def fileno(self) -> int:
        """The connection's descriptor, −1 without one."""
        return self._connection.fileno()

    def hang_up(self) -> None:
        """Abandon the graph of a client that has hung up. To be called again until the session has ended."""
        self._client.is_gone = True
        for device in self._worker.devices:
            device.abandon(self._client)
        self._interrupt()

    def shut(self) -> None:
        """Shut the connection down."""
        self._connection.is_shut = True
        self._interrupt()
        self._connection.shut()

    def _interrupt(self) -> None:
        for part in self.parts:
            part.interrupt()
