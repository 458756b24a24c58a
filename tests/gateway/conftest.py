"""Fixtures of the gateway's tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from stand_ins import RunningGateway, StandIn
from waiting import until

from llamado.gateway.options import GatewayOptions, ReplicaOptions
from llamado.gateway.serve import make_gateway
from llamado.http.sockets import listen

ADMIN = "the-admin"


@pytest.fixture
def stand_in() -> Iterator[Callable[..., StandIn]]:
    """Make replicas."""
    made: list[StandIn] = []

    def make(name: str, **options: Any) -> StandIn:
        made.append(StandIn(name, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def start_gateway() -> Iterator[Callable[..., RunningGateway]]:
    """Run gateways in front of replicas under the replicas' names; wait until the replicas are ready."""
    running: list[tuple[RunningGateway, threading.Thread]] = []

    def start(
        *replicas: StandIn, backups: tuple[StandIn, ...] = (), ready: bool = True, weights: Any = None, **more: Any
    ) -> RunningGateway:
        given = tuple(
            ReplicaOptions(url=r.url, name=r.name, backup=r in backups, weight=(weights or {}).get(r.name, 1.0))
            for r in (*replicas, *backups)
        )
        # Busy machines may need long for /health; only tests of frozen replicas shorten this.
        times = {"health_interval": 0.02, "health_timeout": 30.0, "patience": 30.0}
        options = GatewayOptions(replicas=given, admin_key=ADMIN, **{**times, **more})
        server = make_gateway(options)
        sockets = listen(("127.0.0.1",), 0)
        thread = threading.Thread(target=server.run, args=(sockets,), daemon=True)
        thread.start()
        gateway = RunningGateway(f"http://127.0.0.1:{sockets[0].getsockname()[1]}", server, ADMIN)
        running.append((gateway, thread))
        if ready:
            until(lambda: all(r["models"] for r in gateway.states().values()))
        return gateway

    yield start
    for gateway, thread in running:
        gateway.http.close()
        gateway.server.should_exit = gateway.server.force_exit = True
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture
def start_two(
    stand_in: Callable[..., StandIn], start_gateway: Callable[..., RunningGateway]
) -> Callable[..., tuple[StandIn, StandIn, RunningGateway]]:
    """Start a gateway in front of two replicas, `a` and `b`."""

    def start(**options: Any) -> tuple[StandIn, StandIn, RunningGateway]:
        a, b = stand_in("a"), stand_in("b")
        return a, b, start_gateway(a, b, **options)

    return start
