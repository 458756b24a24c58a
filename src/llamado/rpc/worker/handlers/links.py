"""Links: tensors that come from one worker and go to the next, without the server in between."""

from __future__ import annotations

import logging

from llamado.rpc import wire
from llamado.rpc.worker.client import Client
from llamado.rpc.worker.handlers.buffers import BufferHandlers
from llamado.rpc.worker.handlers.handler import Handlers, handles
from llamado.rpc.worker.links import MAX_LINKS, Inlet, Outlet

log = logging.getLogger("llamado.rpc.worker.server")


class LinkHandlers(Handlers):
    """Handlers of a client's inlets and outlets, and of a connection that another worker sends to."""

    def __init__(self, client: Client, buffers: BufferHandlers) -> None:
        self._client, self._buffers = client, buffers
        self._inlets: dict[int, Inlet] = {}
        self._outlets: dict[int, Outlet] = {}
        self._n_links = 0
        self._attached_to: Inlet | None = None

    @property
    def is_attached(self) -> bool:
        """True if this connection belongs to an inlet of another client."""
        return self._attached_to is not None

    @handles(wire.OpenInlet)
    def open_inlet(self, _: wire.OpenInlet) -> wire.InletTicket:
        all_inlets = self._client.worker.inlets
        for number in [n for n, inlet in self._inlets.items() if inlet.is_closed]:
            all_inlets.pop(self._inlets.pop(number).ticket, None)
        if len(self._inlets) >= MAX_LINKS:
            raise wire.WireError(f"more than {MAX_LINKS} inlets")
        self._n_links += 1
        inlet = self._inlets[self._n_links] = Inlet(self._n_links)
        all_inlets[inlet.ticket] = inlet
        return wire.InletTicket(inlet.number, inlet.ticket)

    @handles(wire.CloseInlet)
    def close_inlet(self, request: wire.CloseInlet) -> None:
        inlet = self._client.worker.inlets.get(request.ticket)
        if inlet is not None:
            inlet.close()

    @handles(wire.ConnectNext)
    def connect_next(self, request: wire.ConnectNext) -> wire.Number:
        client = self._client
        for number in [n for n, outlet in self._outlets.items() if outlet.is_gone]:
            self._outlets.pop(number).close()
        if len(self._outlets) >= MAX_LINKS:
            raise wire.WireError(f"more than {MAX_LINKS} links")
        outlet = client.worker.dialer.connect(client.identity, request)
        if outlet is None:
            return wire.Number(0)
        self._n_links += 1
        self._outlets[self._n_links] = outlet
        log.info("%s: linked to %s", client.name, wire.printable(request.endpoint.decode("utf-8", "replace")))
        if client.is_gone or client.worker.is_stopping:  # `interrupt` may have missed this outlet
            outlet.shut()
        return wire.Number(self._n_links)

    @handles(wire.Attach)
    def attach(self, request: wire.Attach) -> None:
        """Lend the connection to another client's session until its inlet is closed."""
        client, connection = self._client, self._client.connection
        inlet = client.worker.inlets.get(request.ticket)
        if inlet is None or not inlet.attach(connection):
            connection.answer(request, wire.Number(0))
            raise wire.WireError("the ticket is unknown, or was used already")
        self._attached_to = inlet
        if client.is_gone or client.worker.is_stopping:
            inlet.close()
        try:
            if not inlet.is_closed:
                connection.answer(request, wire.Number(1))
        finally:
            inlet.wait()
        raise ConnectionAbortedError("nothing is taken from it any more")

    @handles(wire.Push)
    def push(self, request: wire.Push) -> None:
        """Send a tensor to the next worker. A broken link is not reported here but by the worker that awaits it."""
        client = self._client
        region, start = self._buffers.locate(request.tensor, 0, request.size)
        outlet = self._outlets.get(request.link)
        if outlet is None:
            return
        try:
            outlet.send(request.sequence, client.computed_s, region, start, request.size)
            client.work.sent += request.size
        except OSError as error:
            log.warning("%s: link %d broken: %s", client.name, request.link, error.strerror or error)
            self._outlets.pop(request.link).close()

    @handles(wire.Await)
    def wait(self, request: wire.Await) -> wire.AwaitResponse:
        client = self._client
        region, start = self._buffers.locate(request.tensor, 0, request.size)
        inlet = self._inlets.get(request.inlet)
        computed = None if inlet is None else inlet.take(request.sequence, region, start, request.size)
        if client.is_gone:
            raise ConnectionAbortedError("gone while it waited for another worker")
        if computed is None:
            return wire.AwaitResponse(0, 0)
        client.work.received += request.size
        return wire.AwaitResponse(1, computed)

    @handles(wire.Deliver)
    def deliver(self, _: wire.Deliver) -> None:
        raise wire.WireError("DELIVER by a connection that was not attached to an inlet")

    def interrupt(self) -> None:
        for outlet in [*self._outlets.values()]:
            outlet.shut()
        for inlet in [*self._inlets.values()]:
            inlet.close()
        if self._attached_to is not None:
            self._attached_to.close()

    def release(self) -> None:
        for inlet in self._inlets.values():
            self._client.worker.inlets.pop(inlet.ticket, None)
        while self._outlets:
            self._outlets.popitem()[1].close()
