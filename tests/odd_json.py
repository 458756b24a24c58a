"""JSON that no reader expects: bodies of which each value in turn is another one, or missing."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

_DEEP: list[Any] = []
for _ in range(200):
    _DEEP = [_DEEP]
ODD: tuple[Any, ...] = (
    None, True, -1, 1e308, "x\x1b[31m[/bold]\ud800", [None], {"a": 1},
    0, 2.5, 10**18, "", "9" * 5000, [], {}, [[]], _DEEP,
)  # fmt: skip
FEW = ODD[:7]
HTML = b"<!DOCTYPE html><html><body>404</body></html>"
TOO_DEEP = b"[" * 100_000


def bent(body: Any, values: Sequence[Any] = ODD) -> Iterator[Any]:
    """Copies of a body: with each value replaced by each of `values`, and with each key left out."""
    yield from values
    for path in _paths(body):
        for value in (*values, ...):
            whole = copy.deepcopy(body)
            place = whole
            for key in path[:-1]:
                place = place[key]
            if value is ...:
                del place[path[-1]]
            else:
                place[path[-1]] = value
            yield whole


def _paths(body: Any) -> Iterator[tuple[Any, ...]]:
    items = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    for key, value in items:
        yield (key,)
        yield from ((key, *rest) for rest in _paths(value))
