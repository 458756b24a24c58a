"""A link between two workers: tensors go straight from one to the other when the server requests it."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import NamedTuple

from llamado.devices.device import Arrival, LinkLost
from llamado.errors import LlamadoError
from llamado.ggml.tensor import Tensor
from llamado.rpc import wire
from llamado.rpc.client.connection import WorkerConnection

log = logging.getLogger("llamado.rpc")

_BROKEN = "the link is broken; tensors go through this machine for some minutes"


class End(NamedTuple):
    """The worker at one end of a link."""

    connection: WorkerConnection
    name: str
    locate: Callable[[Tensor], wire.WireTensor]
    """Returns a bound tensor as it is on the wire."""


class RemoteLink:
    """A `TensorLink` from worker `source` to worker `target`.

    `number`: the link on the source; `inlet`: its inlet on the target.
    """

    def __init__(self, source: End, target: End, number: int, inlet: wire.InletTicket) -> None:
        self._source, self._target = source, target
        self._number, self._inlet = number, inlet
        self._sequence = itertools.count(1)
        self.lost: LinkLost | None = None

    @classmethod
    def open(cls, source: End, target: End) -> RemoteLink | None:
        """Make one worker connect to the other. Returns None and logs a line if it cannot."""
        inlet = target.connection.call(wire.OpenInlet(), wire.InletTicket)
        where = str(target.connection.endpoint).encode()
        number = source.connection.call(wire.ConnectNext(inlet.ticket, where), wire.Number).value
        if number:
            log.info("%s: passes its results straight to %s", source.name, target.name)
            return cls(source, target, number, inlet)
        target.connection.send(wire.write_request(wire.CloseInlet(inlet.ticket)))
        log.warning(
            "%s: cannot reach %s at %s (its log has the reason); passing its results on from here",
            source.name, target.name, target.connection.endpoint,
        )  # fmt: skip
        return None

    def send(self, source: Tensor, size: int) -> int:
        connection = self._source.connection
        with connection.sending:
            sequence = next(self._sequence)
            connection.send(wire.write_request(wire.Push(self._source.locate(source), self._number, size, sequence)))
        return sequence

    def receive(self, number: int, target: Tensor, size: int) -> Future[Arrival]:
        connection, arrival = self._target.connection, Future[Arrival]()
        with connection.sending:
            answer = connection.start_call(wire.Await(self._target.locate(target), self._inlet.number, size, number))
        answer.add_done_callback(lambda answer: self._arrived(answer, arrival))
        return arrival

    def _arrived(self, answer: Future[wire.Response], arrival: Future[Arrival]) -> None:
        error = answer.exception()
        if error is not None:
            arrival.set_exception(error)
            return
        awaited = answer.result()
        assert isinstance(awaited, wire.AwaitResponse)
        if awaited.came:
            arrival.set_result(Arrival(1e-6 * awaited.computed))
            return
        if self.lost is None:
            self.lost = LinkLost(f"{self._source.name} → {self._target.name}", _BROKEN)
        arrival.set_exception(self.lost)

    def close(self) -> None:
        if self.lost is None:
            self.lost = LinkLost(f"{self._source.name} → {self._target.name}", "it was closed")
        with suppress(LlamadoError):
            self._target.connection.send_separately(wire.CloseInlet(self._inlet.ticket))
