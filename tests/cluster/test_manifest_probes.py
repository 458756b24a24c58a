"""Probes of the Kubernetes manifests, simulated with a fake kubelet: restarts and readiness."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
import yaml
from doctor_stand_ins import listening
from fakes import FakeEngine

from llamado.cluster.deploy.deployment import Deployment
from llamado.cluster.deploy.targets import files_for
from llamado.engine.request import Fault

MINUTE = 60


class Kubelet:
    """A simulated kubelet (kubernetes.io, "Configure Liveness, Readiness and Startup Probes").

    Other probes run only after the startup probe has succeeded. Each acts after `failureThreshold` failures in a row.
    """

    def __init__(self, container: dict[str, Any], ask: Callable[[str], bool]) -> None:
        self._probes = {kind: container[f"{kind}Probe"] for kind in ("startup", "liveness", "readiness")}
        self._ask = ask
        self._failures = dict.fromkeys(self._probes, 0)
        self._started = self.ready = False
        self.restarts = self._now = 0

    def run(self, seconds: int) -> None:
        """Advance the simulated time."""
        for _ in range(seconds):
            self._now += 1
            for kind in ("liveness", "readiness") if self._started else ("startup",):
                if self._now % self._probes[kind]["periodSeconds"] == 0:
                    self._probe(kind)

    def _probe(self, kind: str) -> None:
        well = self._ask(self._probes[kind]["httpGet"]["path"])
        self._failures[kind] = 0 if well else self._failures[kind] + 1
        out = self._failures[kind] >= self._probes[kind]["failureThreshold"]
        if kind == "readiness":
            self.ready = well or (self.ready and not out)
        elif kind == "startup" and well:
            self._started = True
        elif out:
            self.restarts += 1
            self._failures = dict.fromkeys(self._probes, 0)
            self._started = self.ready = False


def container() -> dict[str, Any]:
    manifests = yaml.safe_load_all(files_for("kubernetes", Deployment(serve=("-m", "m"), workers=1))["llamado.yaml"])
    (deployment,) = [one for one in manifests if one["kind"] == "Deployment"]
    (found,) = deployment["spec"]["template"]["spec"]["containers"]
    return dict(found)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.mark.slow
def test_slow_loading_and_a_lost_worker_cause_no_restart(engine: FakeEngine) -> None:
    with listening(engine=engine) as (url, state), httpx.Client(base_url=url, timeout=60) as client:
        kubelet = Kubelet(container(), lambda path: client.get(path).status_code == 200)
        loaded, state.served = state.served, None
        kubelet.run(25 * MINUTE)
        assert not kubelet.ready and not kubelet.restarts, "loading may take long"
        state.served = loaded
        kubelet.run(10)
        assert kubelet.ready

        engine.fault = Fault("RPC0", "it closed the connection", 1.0)
        kubelet.run(5 * MINUTE)
        assert not kubelet.ready and not kubelet.restarts, "a restart would not bring the worker back"
        engine.fault = None
        kubelet.run(10)
        assert kubelet.ready and not kubelet.restarts


@pytest.mark.slow
def test_an_engine_that_hangs_is_restarted(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(engine=engine, hang_timeout=600.0) as (url, _), httpx.Client(base_url=url, timeout=60) as client:
        kubelet = Kubelet(container(), lambda path: client.get(path).status_code == 200)
        kubelet.run(MINUTE)
        assert kubelet.ready
        monkeypatch.setattr(engine, "stalled", lambda: 599.0)
        kubelet.run(5 * MINUTE)
        assert not kubelet.restarts, "a long step is no fault"
        monkeypatch.setattr(engine, "stalled", lambda: 601.0)
        kubelet.run(2 * MINUTE)
        assert kubelet.restarts == 1


def test_an_ended_process_is_restarted() -> None:
    kubelet = Kubelet(container(), lambda path: False)
    kubelet.run(35 * MINUTE)
    assert kubelet.restarts == 1 and not kubelet.ready
