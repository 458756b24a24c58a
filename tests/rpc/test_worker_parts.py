"""Parts of a worker without connections: budgets of clients, greetings, messages of joining, cached graphs."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import numpy as np
import pytest

from llamado.ggml.graph import Graph
from llamado.rpc import wire
from llamado.rpc.worker import budgets as budgets_module
from llamado.rpc.worker import graph_cache
from llamado.rpc.worker import greetings as greetings_module
from llamado.rpc.worker.budgets import Budgets
from llamado.rpc.worker.decode import DecodedGraph
from llamado.rpc.worker.graph_cache import GraphCache
from llamado.rpc.worker.greetings import Greetings
from llamado.rpc.worker.join import JoinError, _because, _is_any, _status, server_url


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(budgets_module.time, "monotonic", lambda: now[0])
    return now


def test_budgets_are_spent_and_regained(clock: list[float]) -> None:
    budgets = Budgets(10, 2.0)
    budgets.spend("a", 7)
    assert budgets.left("a") == 3 and budgets.left("b") == 10
    clock[0] += 1.25
    assert budgets.left("a") == 5  # a half of a unit cannot be spent
    budgets.spend("a", 7)
    assert budgets.left("a") == -1
    clock[0] += 100
    assert budgets.left("a") == 10
    budgets.spend("a", 1)
    assert budgets.left("a") == 9


def test_clients_with_a_full_budget_are_forgotten(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets_module, "_CLIENTS", 3)
    budgets = Budgets(10, 1.0)
    budgets.spend("none", 0)
    for name, units in (("a", 2), ("b", 9), ("c", 2)):
        budgets.spend(name, units)
    clock[0] += 3
    assert set(budgets._used) == {"a", "b", "c"}
    budgets.spend("d", 1)
    assert set(budgets._used) == {"b", "d"} and budgets.left("b") == 4 and budgets.left("d") == 9


def test_the_oldest_addresses_are_forgotten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(greetings_module, "_REMEMBERED", 2)
    monkeypatch.setattr(greetings_module, "_SAVE_INTERVAL", 0.0)
    file = tmp_path / "greetings"
    greetings = Greetings(wire.V7, file)
    for now, host in enumerate("abac"):
        greetings.record_accepted(host, wire.V8, float(now))
    assert [greetings.of(host) for host in "abc"] == [wire.V8, wire.V7, wire.V8]
    assert list(json.loads(file.read_text())) == ["b", "c"]  # by their first time
    file.write_text(json.dumps({"x": 8, "y": 8, "z": 7}))
    again = Greetings(wire.V7, file)
    assert [again.of(host) for host in "xyz"] == [wire.V7, wire.V8, wire.V7]


def test_a_refusal_long_after_the_last_use_changes_the_greeting() -> None:
    """Ten seconds before the first use and after the last one are still the same start of a program."""
    for opened, changes in ((89.9, True), (90.0, True), (90.1, False), (209.9, False), (210.0, True), (211.0, True)):
        greetings = Greetings(wire.V7)
        greetings.record_accepted("a", wire.V7, 100.0)
        greetings.record_accepted("a", wire.V7, 200.0)
        greetings.record_refused("a", wire.V8, opened)  # by another greeting
        assert greetings.of("a") is wire.V7
        greetings.record_refused("a", wire.V7, opened)
        assert greetings.of("a") is (wire.V8 if changes else wire.V7), opened
    greetings = Greetings(wire.V7)
    greetings.record_refused("a", wire.V7, 0.0)
    greetings.record_refused("a", wire.V8, 0.0)
    assert greetings.of("a") is wire.V7


def test_greetings_are_saved_rarely_and_only_if_they_changed(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "greetings"
    greetings = Greetings(wire.V7, file)
    greetings.record_accepted("a", wire.V7, 0.0)
    assert not file.exists()
    for now, host, saved in ((0.0, "a", "a"), (4.9, "b", "a"), (5.0, "b", "ab"), (9.9, "c", "ab"), (10.0, "c", "abc")):
        greetings.record_accepted(host, wire.V8, now)
        assert json.loads(file.read_text()) == dict.fromkeys(saved, 8), now
    greetings.record_accepted("a", wire.V7, 20.0)
    assert json.loads(file.read_text()) == {"b": 8, "c": 8}
    assert [path.name for path in file.parent.iterdir()] == ["greetings"]


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("10.0.0.1:8080", "http://10.0.0.1:8080"),
        ("https://a/b/", "https://a/b"),
        ("http://[::1]:80//", "http://[::1]:80"),
        ("ftp://a", None),
        ("http://", None),
        (":8080", None),
        ("a:b:c", None),
    ],
)
def test_addresses_of_servers(text: str, url: str | None) -> None:
    if url is not None:
        assert server_url(text) == url
        return
    with pytest.raises(JoinError, match="expected HOST:PORT"):
        server_url(text)


@pytest.mark.parametrize(
    ("host", "is_any"),
    [("", True), ("0.0.0.0", True), ("::", True), ("127.0.0.1", False), ("::1", False), ("name", False)],
)
def test_addresses_that_name_no_machine(host: str, is_any: bool) -> None:
    assert _is_any(host) is is_any


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b'{"error":{"message":"no room"}}', "503: no room"),
        (b'{"error":{"message":""}}', "503: "),
        (b'{"error":{}}', "answers 503; is it a server of llamado?"),
        (b'{"error":"x"}', "answers 503; is it a server of llamado?"),
        (b"<html>", "answers 503; is it a server of llamado?"),
    ],
)
def test_errors_of_servers(content: bytes, text: str) -> None:
    assert _status(httpx.Response(503, content=content)) == text
    assert _because("") == "" and _because("x") == " (x)"


class CacheRecorder:
    """A cache of graphs without tensors, with the graphs that it decoded and dropped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.decoded: list[bytes] = []
        self.dropped: list[bytes] = []
        connection = SimpleNamespace(protocol=wire.V8)
        self.cache = GraphCache(cast(Any, connection), {}, lambda graph: self.dropped.append(graph.payload))
        monkeypatch.setattr(graph_cache, "decode", self._decode)
        monkeypatch.setattr(wire, "read_graph", self.request)

    @staticmethod
    def request(payload: bytes, uid: int = 0, device: int = 0) -> wire.GraphCompute:
        return wire.GraphCompute(device, np.empty(0, np.uint64), np.empty(0), payload, uid)

    def _decode(self, request: wire.GraphCompute, regions: object) -> DecodedGraph:
        self.decoded.append(request.payload)
        return DecodedGraph(Graph(), request)

    def add(self, payload: bytes, uid: int = 0, device: int = 0) -> None:
        assert self.cache.add(self.request(payload, uid, device)).payload == payload

    def get(self, uid: int, device: int = 0) -> bytes:
        return self.cache.get(wire.GraphRecompute(device, uid)).payload


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> CacheRecorder:
    return CacheRecorder(monkeypatch)


def test_ready_graphs_are_limited_in_number_and_bytes(recorder: CacheRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_cache, "_READY", 3)
    monkeypatch.setattr(graph_cache, "_READY_BYTES", 10)
    for payload in (b"aa", b"bb", b"cc"):
        recorder.add(payload)
    assert recorder.dropped == []
    recorder.add(b"dd")
    assert recorder.dropped == [b"aa"]
    recorder.add(b"bb")  # used last now
    recorder.add(b"eeeeeee")
    assert recorder.dropped == [b"aa", b"cc", b"dd"]
    recorder.add(b"f")
    assert recorder.dropped == [b"aa", b"cc", b"dd"]  # three graphs of ten bytes
    recorder.add(b"a larger graph")
    assert recorder.dropped == [b"aa", b"cc", b"dd", b"bb", b"eeeeeee", b"f"]
    assert recorder.decoded == [b"aa", b"bb", b"cc", b"dd", b"eeeeeee", b"f", b"a larger graph"]
    recorder.cache.clear()
    assert recorder.dropped == [b"aa", b"cc", b"dd", b"bb", b"eeeeeee", b"f", b"a larger graph"]


def test_dropped_graphs_run_again_by_their_names(recorder: CacheRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_cache, "_READY", 1)
    recorder.add(b"aa", 1)
    recorder.add(b"aa", 2)
    recorder.add(b"bb", 1, device=1)
    recorder.add(b"cc")
    assert recorder.dropped == [b"aa", b"bb"] and recorder.decoded == [b"aa", b"bb", b"cc"]
    assert [recorder.get(2), recorder.get(1), recorder.get(1, device=1)] == [b"aa", b"aa", b"bb"]
    assert recorder.decoded == [b"aa", b"bb", b"cc", b"aa", b"bb"]
    for uid, device in ((0, 0), (3, 0), (2, 1), (1, 2)):
        with pytest.raises(wire.WireError, match=f"without a graph {uid}: none was sent"):
            recorder.get(uid, device)


def test_graphs_that_may_run_again_are_limited_in_bytes(
    recorder: CacheRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = [bytes([i]) * 9 for i in range(3)]
    monkeypatch.setattr(graph_cache, "_READY", 2)
    monkeypatch.setattr(graph_cache, "_PACKED_BYTES", 2 * len(zlib.compress(graphs[0], 1)))
    recorder.add(graphs[0], 1)
    recorder.add(graphs[1], 1, device=1)
    recorder.add(b"x")
    recorder.add(b"y")
    recorder.get(1)  # ready again, so its compressed bytes do not count
    recorder.add(graphs[2], 2)
    recorder.get(1)
    recorder.add(b"x")
    assert recorder.dropped == [graphs[0], graphs[1], b"x", b"y", graphs[2]]
    with pytest.raises(wire.WireError, match="graphs that may be run again take more than"):
        recorder.add(b"y")
