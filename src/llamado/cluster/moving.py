"""Services that come back at another address: who sends them requests, or divides a model among them, is told."""

from __future__ import annotations

import logging

import httpx

from llamado.cluster.services import ADMIN_KEY, CLUSTER_TOKEN, Service, ServiceRole
from llamado.errors import LlamadoError
from llamado.outgoing import open_async_client
from llamado.rpc.worker.join import TOKEN_HEADER

log = logging.getLogger("llamado.up")

_TIMEOUT = httpx.Timeout(10.0, read=600.0)
"""Seconds: a server answers once the weights are where they belong."""


async def tell_address(service: Service, before: str | None, now: str) -> bool:
    """A gateway is told of a replica (its URL), a server of a worker (`host:port`), that it is somewhere else `now`;
    whether it took it in.

    `before`: the one that it knew of, None if there was none.
    """
    tell = _tell_gateway if service.role is ServiceRole.GATEWAY else _tell_server
    try:
        async with open_async_client(base_url=service.url, timeout=_TIMEOUT, verify=service.trust()) as http:
            await tell(http, service, before, now)
    except (httpx.HTTPError, LlamadoError) as error:
        log.info("%s is not told of %s: %s", service.name, now, error)
        return False
    return True


async def _tell_gateway(http: httpx.AsyncClient, service: Service, before: str | None, now: str) -> None:
    key = {"Authorization": f"Bearer {service.environment[ADMIN_KEY]}"}
    if before is not None:
        _check_gone(await http.delete("/gateway/replicas", params={"replica": before}, headers=key))
    (await http.post("/gateway/replicas", json={"url": now}, headers=key)).raise_for_status()


async def _tell_server(http: httpx.AsyncClient, service: Service, before: str | None, now: str) -> None:
    token = {TOKEN_HEADER: service.environment[CLUSTER_TOKEN]}
    if before is not None:  # first, or the new one would be divided a model with one that is gone
        _check_gone(await http.post("/cluster/drain", json={"endpoint": before}, headers=token))
    (await http.post("/cluster/join", json={"endpoint": now}, headers=token)).raise_for_status()


def _check_gone(answer: httpx.Response) -> None:
    """One that is not known any more is gone, too. Raises httpx.HTTPStatusError."""
    if answer.status_code != httpx.codes.NOT_FOUND:
        answer.raise_for_status()
