"""Dispatch of requests to handlers."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
from waiting import GUARD

from llamado.rpc import wire
from llamado.rpc.worker.client import Client, WorkerState
from llamado.rpc.worker.connection import ClientConnection
from llamado.rpc.worker.handlers.buffers import BufferHandlers
from llamado.rpc.worker.handlers.links import LinkHandlers
from llamado.rpc.worker.handlers.weights import WeightHandlers
from llamado.rpc.worker.links import Inlet
from llamado.rpc.worker.session import Session


def test_every_request_has_one_handler() -> None:
    with socket.socket() as sock:
        session = Session(ClientConnection(sock, "127.0.0.1", "client", wire.LATEST), WorkerState([]))
        kinds = [kind for part in session.parts for kind in part.handlers()]
    assert len(kinds) == len(wire.COMMANDS) and set(kinds) == set(wire.COMMANDS)


@pytest.mark.parametrize("ends", ["client", "worker"])
def test_connections_that_attach_while_they_end_do_not_wait(ends: str) -> None:
    """`interrupt` may have missed their inlet, so the handler closes it."""
    with socket.socket() as sock:
        client = Client(ClientConnection(sock, "127.0.0.1", "client", wire.LATEST), WorkerState([]))
        inlet = Inlet(1)
        client.worker.inlets[inlet.ticket] = inlet
        client.is_gone, client.worker.is_stopping = ends == "client", ends == "worker"
        guard = threading.Timer(GUARD, inlet.close)
        guard.start()
        with pytest.raises(ConnectionAbortedError):
            LinkHandlers(client, BufferHandlers(client)).attach(wire.Attach(inlet.ticket))
        assert guard.is_alive()
        guard.cancel()


@pytest.mark.parametrize(("is_local", "found"), [((True,), 2), ((False,), 1), ((True, False), 1)])
def test_only_workers_without_cards_offer_to_map_weights(is_local: tuple[bool, ...], found: int) -> None:
    sent: list[bytes] = []
    files = SimpleNamespace(offer=lambda weights: [weight.name == b"a" for weight in weights])
    devices = [SimpleNamespace(device=SimpleNamespace(local=local)) for local in is_local]
    client = SimpleNamespace(
        worker=SimpleNamespace(files=files, devices=devices),
        connection=SimpleNamespace(send=lambda head, data: sent.append(bytes(data))),
    )
    offer = wire.Offer((wire.OfferedWeight(b"a", 1), wire.OfferedWeight(b"b", 1)))
    handlers = WeightHandlers(cast(Any, client), cast(Any, None))
    handlers.offer(offer)
    client.worker.files = None
    handlers.offer(offer)
    assert sent == [bytes([found, 0]), bytes(2)]
