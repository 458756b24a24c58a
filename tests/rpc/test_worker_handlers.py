"""Dispatch of requests to handlers."""

from __future__ import annotations

import socket

from llamado.rpc import wire
from llamado.rpc.worker.client import WorkerState
from llamado.rpc.worker.connection import ClientConnection
from llamado.rpc.worker.session import Session


def test_every_request_has_one_handler() -> None:
    with socket.socket() as sock:
        session = Session(ClientConnection(sock, "127.0.0.1", "client", wire.LATEST), WorkerState([]))
        kinds = [kind for part in session.parts for kind in part.handlers()]
    assert len(kinds) == len(wire.COMMANDS) and set(kinds) == set(wire.COMMANDS)
