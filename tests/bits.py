"""Bits of what tests compute: equal whichever lowering computed them, in one run and, through a file, elsewhere.

`pytest --bits FILE` compares with what is in FILE, and writes it where there is none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class Bits:
    """Digests of results by test, number of the result in its test, and what it was computed from."""

    def __init__(self) -> None:
        self.known: dict[str, str] = {}
        self.met = self.new = 0
        """Results that were computed before, and that were not."""
        self._test, self._number = "", 0

    def begin(self, test: str) -> None:
        """Results that come now are of this test, named without its lowering."""
        self._test, self._number = test, 0

    def note(self, inputs: Iterable[Array], outputs: Iterable[Array]) -> None:
        """Fails where results from the same numbers had other bits before."""
        key = f"{self._test} {self._number} {_digest(inputs)}"
        self._number += 1
        found = _digest(outputs)
        if key in self.known:
            self.met += 1
        else:
            self.new += 1
        before = self.known.setdefault(key, found)
        assert before == found, f"{key}: other bits than another lowering's or machine's"


def _digest(arrays: Iterable[Array]) -> str:
    """All that is not a number counts as the same: its sign is the processor's."""
    digest = hashlib.sha256()
    for array in arrays:
        if array.dtype.kind == "f":
            array = np.where(np.isnan(array), np.array(np.nan, array.dtype), array)
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:24]


BITS = Bits()


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Normally distributed numbers, the same on every machine: the last digits of numpy's depend on its compiler."""
    return np.round(rng.standard_normal(shape), 6)
