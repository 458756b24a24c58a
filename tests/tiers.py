"""Tests of a run's tier: tests and parameters that its `-m` leaves out are not made at all."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import pytest

LONGEST = (
    "devices/test_matmul.py", "server/test_lifecycle.py", "devices/test_attention.py", "router/test_router.py",
    "devices/cuda/test_attention.py", "gateway/test_gateway.py", "models/test_golden_logits.py", "cluster/test_up.py",
    "models/test_missing_tensors.py", "server/test_http_wire.py", "quantize/test_types.py",
    "cluster/test_doctor_servers.py", "devices/cuda/test_cuda_engine.py", "rpc/test_membership.py",
    "engine/test_disk_cache.py", "server/test_server_operations.py", "cluster/test_deploy.py",
)  # fmt: skip
"""Files that take longest, with or without kernels in the cache. They are first: the last to end would run alone
otherwise. Those that compute and those that wait for processes alternate.
"""

_left_out: set[str] = set()
"""Marks that no test of this run has."""


def leave_out(expression: str) -> None:
    """Leave out tests as pytest's `-m` does. Only terms joined by "and" count."""
    terms = re.split(r"\s+and\s+", expression.strip())
    _left_out.clear()
    _left_out.update(match[1] for term in terms if (match := re.fullmatch(r"not (\w+)", term)))


def is_left_out(path: Path) -> bool:
    """Return True if the marks of all tests in the file (`pytestmark`) are left out."""
    if not _left_out or not path.name.startswith("test_"):
        return False
    found = re.search(r"^pytestmark = (?:pytest\.mark.*|\[[^]]*\])$", path.read_text(), re.M)
    return found is not None and not _left_out.isdisjoint(re.findall(r"pytest\.mark\.(\w+)", found[0]))


def sort(items: list[pytest.Item]) -> None:
    """Put the longest files first, and all others in one order, wherever the collection began."""
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (places.get(item.path, len(LONGEST)), item.path))


def chosen(values: Iterable[Any], always: Collection[Any], id: Callable[[Any], str] | None = None) -> list[Any]:
    """Return parameters: those in `always` run in each run, the others in the full one."""
    return _tiers((value, value in always, id(value) if id else None) for value in values)


def first_of(values: Iterable[Any], n: int = 1, ids: Iterable[str] = ()) -> list[Any]:
    """Return parameters: the first `n` run in each run, the others in the full one."""
    named = itertools.zip_longest(values, ids)
    return _tiers((value, i < n, id) for i, (value, id) in enumerate(named))


def _tiers(parameters: Iterable[tuple[Any, bool, str | None]]) -> list[Any]:
    return [
        pytest.param(value, marks=() if always else pytest.mark.full, id=id)
        for value, always, id in parameters
        if always or "full" not in _left_out
    ]
