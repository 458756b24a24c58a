"""Replicas with malformed descriptions of themselves."""

from __future__ import annotations

import asyncio
import importlib
import json
import pkgutil
import re
import re._parser as sre  # type: ignore[import-not-found]
from contextlib import suppress
from typing import Any

import pytest
from odd_json import HTML, TOO_DEEP, bent

from llamado import gateway, http
from llamado.client.health import Phase, State
from llamado.gateway import replica
from llamado.gateway.options import GatewayOptions, ReplicaOptions
from llamado.gateway.replica import Replica
from llamado.http.upstream import UpstreamLost, UpstreamRefused

BODIES: dict[str, Any] = {
    "/v1/models": {"data": [{"id": "m", "aliases": ["a"]}]},
    "/props": {"total_slots": 4, "build_info": "b1"},
    "/slots": [{"is_processing": True}],
}
METRICS = "llamacpp:requests_processing 3\n"


@pytest.mark.parametrize("path", [*BODIES, "/metrics"])
def test_monitoring_survives_malformed_responses(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {path: json.dumps(body).encode() for path, body in BODIES.items()} | {"/metrics": METRICS.encode()}

    async def get(pool: object, path: str, **_: object) -> tuple[int, bytes]:
        return 200, answers[path]

    async def look() -> None:
        one = Replica(ReplicaOptions(name="r", url="http://127.0.0.1:9"), GatewayOptions(), lambda: None)
        odd = [json.dumps(body).encode() for body in bent(BODIES.get(path))]
        if path == "/metrics":
            answers["/slots"] = b"[]"
            odd = [METRICS.replace("3", text).encode() for text in ("1e999", "9" * 400, "1.1.1", "1e", "-1", "NaN")]
        for body in (HTML, TOO_DEEP, b"", b"\xff", *odd):
            answers[path] = body
            for ask in (one._describe, one._count):
                with suppress(UpstreamLost, TimeoutError, ValueError):  # as `_query` does
                    await ask()
            json.dumps(one.admin_status)
            assert 0 <= one.others <= 1e9 and one.load >= 0

    monkeypatch.setattr(replica, "get", get)
    asyncio.run(look())


@pytest.mark.parametrize(("error", "keeps"), [(TimeoutError(), True), (UpstreamRefused("gone"), False)])
def test_a_frozen_replica_keeps_its_cache(error: Exception, keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not run any more has lost it."""

    async def get(*_: object, **__: object) -> None:
        raise error

    async def look() -> None:
        one = Replica(ReplicaOptions(name="r", url="http://127.0.0.1:9"), GatewayOptions(), lambda: None)
        one._set_state(State(Phase.READY, "ready"))
        before = one.number
        one._set_state(await one._health())
        assert not one.ready and (one.number == before) == keeps

    monkeypatch.setattr(replica, "get", get)
    asyncio.run(look())


def test_patterns_do_not_backtrack_exponentially() -> None:
    """Nested unbounded repetitions that can backtrack take exponential time on text that does not match."""
    names = [
        f"{package.__name__}.{one.name}"
        for package in (http, gateway)
        for one in pkgutil.iter_modules(package.__path__)
    ]
    for module in map(importlib.import_module, names):
        for name, pattern in vars(module).items():
            if isinstance(pattern, re.Pattern):
                assert not repeats_repetitions(sre.parse(pattern.pattern)), f"{module.__name__}.{name}"


def repeats_repetitions(parts: Any, inside: bool = False) -> bool:
    """Return True if an unbounded repetition is inside another one, and both can backtrack."""
    for kind, given in parts:
        if kind in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            endless = given[1] is sre.MAXREPEAT
            if (endless and inside) or repeats_repetitions(given[2], inside or endless):
                return True
        elif (kind is sre.SUBPATTERN and repeats_repetitions(given[-1], inside)) or (
            kind is sre.BRANCH and any(repeats_repetitions(branch, inside) for branch in given[1])
        ):
            return True
    return False
