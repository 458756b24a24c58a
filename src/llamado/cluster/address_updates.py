"""Address updates: inform gateways and servers after a replica or worker restarts at another address."""

from __future__ import annotations

import logging

import httpx

from llamado.cluster.services import ADMIN_KEY, CLUSTER_TOKEN, Service, ServiceRole
from llamado.errors import LlamadoError
from llamado.outgoing import open_async_client
from llamado.rpc.worker.join import TOKEN_HEADER

log = logging.getLogger("llamado.up")

_TIMEOUT = httpx.Timeout(10.0, read=600.0)
"""Seconds. A server responds only after it has moved the weights."""


async def send_address(service: Service, before: str | None, now: str) -> bool:
    """Replace an address: of a replica (URL) at a gateway, or of a worker (`host:port`) at a server.

    `before`: the previous address, None if there was none. Return True if the service accepted the new one.
    """
    update = _update_gateway if service.role is ServiceRole.GATEWAY else _update_server
    try:
        async with open_async_client(base_url=service.url, timeout=_TIMEOUT, verify=service.tls_verification()) as http:
            await update(http, service, before, now)
    except (httpx.HTTPError, LlamadoError) as error:
        log.info("%s: did not accept the new address %s: %s", service.name, now, error)
        return False
    return True


async def _update_gateway(http: httpx.AsyncClient, service: Service, before: str | None, now: str) -> None:
    key = {"Authorization": f"Bearer {service.environment[ADMIN_KEY]}"}
    if before is not None:
        _check_gone(await http.delete("/gateway/replicas", params={"replica": before}, headers=key))
    (await http.post("/gateway/replicas", json={"url": now}, headers=key)).raise_for_status()


async def _update_server(http: httpx.AsyncClient, service: Service, before: str | None, now: str) -> None:
    token = {TOKEN_HEADER: service.environment[CLUSTER_TOKEN]}
    if before is not None:  # first: otherwise the server would split the model with a worker that is gone
        _check_gone(await http.post("/cluster/drain", json={"endpoint": before}, headers=token))
    (await http.post("/cluster/join", json={"endpoint": now}, headers=token)).raise_for_status()


def _check_gone(answer: httpx.Response) -> None:
    """Raise httpx.HTTPStatusError if the old address was not removed. An unknown address (404) counts as removed."""
    if answer.status_code != httpx.codes.NOT_FOUND:
        answer.raise_for_status()
