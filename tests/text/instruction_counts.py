"""Work counted, not timed: calls of functions, which a busy machine does not make more of."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from llamado.text.tokenizer import merging


def calls(work: Callable[[], object]) -> int:
    """Return the number of calls of Python and C functions while `work` runs."""
    n = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal n
        n += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return n


def steps(work: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> int:
    """Count steps like `calls`. Quadratic merging counts as the square of a word's length."""
    short, squares = merging.merge_short, 0

    def counted(text: str, cost: merging.Cost) -> list[str]:
        nonlocal squares
        squares += len(text) ** 2
        return short(text, cost)

    with monkeypatch.context() as patch:
        patch.setattr(merging, "merge_short", counted)
        return calls(work) + squares
