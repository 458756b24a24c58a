"""Pipeline order: batches reach each device in order, whichever path their activations take."""

from __future__ import annotations

import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from waiting import GUARD

from llamado.devices.device import Arrival
from llamado.devices.split.partition import GraphPart
from llamado.engine.forward.pipeline import Pipeline

BYTES = np.zeros(4, np.uint8)


class Recorder:
    """A device that records calls, and completes reads when the test does."""

    local = links = False

    def __init__(self) -> None:
        self.submitted: list[Any] = []
        self.reads: list[Future[Any]] = []

    def write(self, tensor: Any, data: Any, offset: int = 0) -> None: ...

    def submit(self, graph: Any) -> None:
        self.submitted.append(graph)

    def read(self, tensor: Any, offset: int, size: int) -> Future[Any]:
        self.reads.append(Future())
        return self.reads[-1]


class Wire:
    """A link whose transfers complete at once."""

    lost = None

    def send(self, source: Any, size: int) -> int:
        return 1

    def receive(self, number: int, target: Any, size: int) -> Future[Arrival]:
        future: Future[Arrival] = Future()
        future.set_result(Arrival(0.0))
        return future


def parts() -> list[GraphPart]:
    """Return the graph parts of two devices; the first produces the input of the second."""
    x = SimpleNamespace(nbytes=4)
    first: Any = SimpleNamespace(inputs={}, outputs={"x": x})
    second: Any = SimpleNamespace(inputs={}, outputs={"logits": x})
    return [GraphPart(0, first, {}, {"x": x}), GraphPart(1, second, {"x": x}, {})]  # type: ignore[dict-item]


def test_direct_transfer_does_not_overtake_a_relayed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second batch may need the cells that the first one leaves on the device."""
    first, second = Recorder(), Recorder()
    pipeline = Pipeline([first, second], "logits", 1)  # type: ignore[list-item]
    carried, straight = parts(), parts()
    pipeline.set_up(carried, [0, 1])
    batch: Any = SimpleNamespace(outputs=[0], n_tokens=1)
    futures = [pipeline.start(carried, [], batch)]
    while not first.reads:
        time.sleep(0.001)
    monkeypatch.setattr(pipeline.ring, "link", lambda *_: Wire())
    futures.append(pipeline.start(straight, [], batch))
    while len(first.submitted) < 2:
        time.sleep(0.001)
    time.sleep(0.02)
    assert second.submitted == []
    first.reads[0].set_result(BYTES)
    while len(second.reads) < 2:
        time.sleep(0.001)
    assert [graph is part[1].graph for graph, part in zip(second.submitted, (carried, straight), strict=True)] == [
        True,
        True,
    ]
    for read in second.reads:
        read.set_result(BYTES)
    assert [future.result(GUARD).shape for future in futures] == [(1, 1)] * 2
    pipeline.close()
