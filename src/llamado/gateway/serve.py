"""Running a gateway until a signal arrives."""

from __future__ import annotations

import logging
import socket
from dataclasses import replace
from types import FrameType

from llamado.gateway.app import Gateway
from llamado.gateway.limits import KeyLimits
from llamado.gateway.options import GatewayOptions
from llamado.http.access import Access, busy_app
from llamado.http.bodies import MAX_MEDIA_BODY
from llamado.http.connections import RESERVED_FILES, ConnectionLimits, configure, raise_file_limit
from llamado.http.monitoring.counter import RequestCounter
from llamado.http.running import announce
from llamado.http.signals import GracefulServer
from llamado.http.sockets import address_of
from llamado.processes import memory

log = logging.getLogger("llamado.gateway")


class GatewayServer(GracefulServer):
    """uvicorn server that closes the replicas before it exits; a second signal ends everything at once."""

    gateway: Gateway | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.force_exit or self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.gateway is not None:
            self.gateway.ending = True
        await super().shutdown(sockets)
        if self.gateway is not None:
            await self.gateway.close()


def make_gateway(options: GatewayOptions) -> GatewayServer:
    """Return a server that is ready to run. Raises GatewayError."""
    application: list[RequestCounter] = []
    limits = KeyLimits(options.keys, options.quota_file)

    def make() -> RequestCounter:
        gateway = server.gateway = Gateway(options, limits)
        keys = [*options.access.api_keys, *(key.key.encode() for key in options.keys)]
        if keys and options.admin_key:
            keys.append(options.admin_key.encode())
        server.access = Access(gateway, replace(options.access, api_keys=tuple(keys)), max_body=lambda: MAX_MEDIA_BODY)
        server.access.on_drain = gateway.streams.close
        application.append(RequestCounter(server.access, gateway.traffic, gateway.routes.endpoint))
        return application[0]

    # Each request needs a second connection, to its replica.
    connections = ConnectionLimits((raise_file_limit() - RESERVED_FILES) // 2, options.timeout)
    refuse = busy_app(lambda: application[0], "", lambda *refused: application[0].refused(*refused))
    settings = configure(make, connections, refuse, key=options.ssl_key, certificate=options.ssl_cert, proxied=False)
    server = GatewayServer(settings)
    return server


def serve_gateway(options: GatewayOptions, sockets: list[socket.socket]) -> int:
    """Serve until a signal arrives; return the exit code. Raises GatewayError."""
    memory.map_large_blocks()
    server = make_gateway(options)
    memory.freeze()
    for sock in sockets:
        log.info("gateway listening on %s", address_of(sock, tls=bool(options.ssl_cert)))
    for replica in options.replicas:
        log.info("  %s%s %s", "backup " if replica.backup else "", replica.name, replica.url)
    with announce("gateway", [address_of(sock, tls=bool(options.ssl_cert)) for sock in sockets]):
        server.run(sockets=sockets)
    return 0
