"""The greeting of a connection."""

from __future__ import annotations

from llamado.rpc import wire
from llamado.rpc.worker.client import Client
from llamado.rpc.worker.handlers.handler import Handlers, handles


class GreetingHandlers(Handlers):
    """Handlers of HELLO and UPGRADE."""

    def __init__(self, client: Client) -> None:
        self._client = client

    @handles(wire.Hello)
    def hello(self, _: wire.Hello) -> wire.HelloResponse:
        worker = self._client.worker
        links, own_files = wire.LINKS * worker.dialer.allowed, wire.OWN_FILES * (worker.files is not None)
        features = wire.LLAMADO | wire.NUMERICS | links | own_files
        return wire.HelloResponse(*self._client.connection.protocol.version, features)

    @handles(wire.Upgrade)
    def upgrade(self, _: wire.Upgrade) -> None:
        """Do nothing: the reader of the connection has changed the protocol already."""
