"""The latency lab's links and workers."""

from __future__ import annotations

import socket
import time

import pytest

from llamado.cluster.lab import Lab, LabError
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
    lab = Lab(["127.0.0.1:9"], 1)
    try:
        foreign, own = lab.endpoints
        views = {str(link["endpoint"]): link for link in lab.view()}
        assert (views[foreign]["own"], views[own]["own"]) == (False, True) and views[foreign]["worker"] == "127.0.0.1:9"
        lab.set({own: LinkSettings(20.0, 5.0, 1e6)})
        set_now = {str(link["endpoint"]): link for link in lab.view()}[own]
        assert (set_now["latency_ms"], set_now["jitter_ms"], set_now["bandwidth"]) == (20.0, 5.0, 1e6)
        for wrong in ({"h:1": (0.0, 0.0, None)}, {own: (1e6, 0.0, None)}, {own: (0.0, 0.0, 5.0)}):
            with pytest.raises(LabError):
                lab.set(wrong)
        assert {str(link["endpoint"]): link for link in lab.view()}[own] == set_now, "nothing changed"
        with pytest.raises(LabError, match="not started here"):
            lab.kill(foreign)
        worker = str(views[own]["worker"])
        assert reachable(worker)
        lab.kill(own)
        assert not reachable(worker) and not lab.view()[1]["running"]
        lab.start(own)
        until = time.monotonic() + 30
        while not reachable(worker):
            assert time.monotonic() < until
            time.sleep(0.05)
        assert lab.view()[1]["running"]
    finally:
        lab.close()
    assert not reachable(worker), "nothing is left"


@pytest.mark.slow
def test_no_tap_reads_what_is_encrypted() -> None:
    with pytest.raises(LabError, match="encrypted"):
        Lab(["tls://127.0.0.1:9"], 0)
