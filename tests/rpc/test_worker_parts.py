"""Parts of a worker without connections: budgets of clients, remembered greetings, and messages of joining."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from llamado.rpc import wire
from llamado.rpc.worker import budgets as budgets_module
from llamado.rpc.worker import greetings as greetings_module
from llamado.rpc.worker.budgets import Budgets
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
