"""Parameters of tests that only the full run (tests/full.sh) needs all of."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest


def chosen(values: Iterable[Any], always: Collection[Any], id: Callable[[Any], str] | None = None) -> list[Any]:
    """Return parameters: those in `always` run in each run, the others in the full one."""
    return [
        pytest.param(value, marks=() if value in always else pytest.mark.full, id=id(value) if id else None)
        for value in values
    ]


def first_of(values: Iterable[Any], n: int = 1) -> list[Any]:
    """Return parameters: the first `n` run in each run, the others in the full one."""
    return [pytest.param(value, marks=() if i < n else pytest.mark.full) for i, value in enumerate(values)]
