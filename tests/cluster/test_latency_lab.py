"""Latency lab: links, and workers that are killed and restarted."""

from __future__ import annotations

import socket

import pytest
from waiting import until

from llamado.cluster.latency_lab import LabError, LatencyLab
from llamado.cluster.state import ClusterState, ServiceState
from llamado.cluster.taps import LinkSettings
from llamado.rpc.endpoint import Endpoint


def reachable(endpoint: str) -> bool:
    try:
        socket.create_connection(Endpoint.parse(endpoint).address, 1).close()
    except OSError:
        return False
    return True


@pytest.mark.slow
def test_links_change_and_own_workers_die_and_return() -> None:
    lab = LatencyLab(["127.0.0.1:9"], 1)
    try:
        foreign, own = lab.endpoints
        views = {link.endpoint: link for link in lab.view()}
        assert (views[foreign].own, views[own].own) == (False, True) and views[foreign].worker == "127.0.0.1:9"
        lab.set({own: LinkSettings(20.0, 5.0, 1e6)})
        set_now = {link.endpoint: link for link in lab.view()}[own]
        assert (set_now.latency_ms, set_now.jitter_ms, set_now.bandwidth) == (20.0, 5.0, 1e6)
        for wrong in ({"h:1": (0.0, 0.0, None)}, {own: (1e6, 0.0, None)}, {own: (0.0, 0.0, 5.0)}):
            with pytest.raises(LabError):
                lab.set(wrong)
        assert {link.endpoint: link for link in lab.view()}[own] == set_now, "nothing changed"
        with pytest.raises(LabError, match="not started here"):
            lab.kill(foreign)
        worker = views[own].worker
        assert reachable(worker)
        lab.kill(own)
        assert not reachable(worker) and not lab.view()[1].running
        lab.start(own)
        until(lambda: reachable(worker))
        assert lab.view()[1].running
    finally:
        lab.close()
    assert not reachable(worker), "close() ends the workers"


@pytest.mark.slow
def test_encrypted_links_are_refused() -> None:
    with pytest.raises(LabError, match="encrypted"):
        LatencyLab(["tls://127.0.0.1:9"], 0)


def test_worker_at_returns_only_workers_started_by_the_cluster() -> None:
    """Workers behind a tap are included; workers of other machines and other services are not."""
    services = [
        ServiceState("worker1", "worker", "127.0.0.1:1", log="1.log"),
        ServiceState("worker2", "worker", "10.0.0.2:2"),
        ServiceState("tap1", "tap", "127.0.0.1:3", log="3.log"),
        ServiceState("tap2", "tap", "127.0.0.1:4", log="4.log"),
        ServiceState("server", "server", "127.0.0.1:5", log="5.log"),
    ]
    state = ClusterState("c", "http://127.0.0.1:5", "logs", services=services)
    assert [state.worker_at(f"127.0.0.1:{port}") for port in (1, 3)] == [services[0]] * 2
    assert [state.worker_at(a) for a in ("10.0.0.2:2", "127.0.0.1:4", "127.0.0.1:5", "127.0.0.1:9")] == [None] * 4
