"""Context checkpoints: states of layers that do not keep all tokens, at points that sequences can go back to.

A window of the last tokens, or a recurrent state, is lost as a sequence continues. Its copy at some points (see
`Memory.read_tail`) lets a prompt that branches off there continue from it, instead of being read from the beginning.
llama.cpp calls these context checkpoints. This module chooses the points, and which ones are dropped if there are too
many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from llamado.engine.forward.contract import Cells

NEAR = 16
"""Points closer together than this replace each other: so many tokens are quickly read again."""
_NEWEST = 3
"""Points at the end that are never thinned out: the begin and end of the last message, and the end of the answer."""
_LOOK_BACK = 64
"""Control tokens that are searched for the bounds of the last message."""


def points(prompt: NDArray[np.int32], control: NDArray[np.int32], every: int) -> list[int]:
    """Return the token counts of a prompt at which another prompt may branch off, ascending.

    They are the begin and the end of the last message, found by the model's control tokens (`control`, ascending):
    templates write both differently once there is an answer. If no end is near, the last point is the prompt without
    its last token, which is the part to compute if the prompt is sent again. Further points follow every `every`
    tokens, unless `every` is 0.
    """
    n = prompt.size
    found = set(range(every, n, every) if every else ())
    steering = _places(prompt, control)
    ending = steering[steering >= n - NEAR]
    end = int(ending[0]) if ending.size else n - 1
    found.add(end)
    before = steering[steering < end]
    if before.size:
        found.add(int(before[-1]))
    return sorted(point for point in found if 0 < point < n)


def _places(prompt: NDArray[np.int32], control: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return the positions of the last of these tokens."""
    if not control.size:
        return np.empty(0, np.int64)
    nearest = control[np.minimum(np.searchsorted(control, prompt), control.size - 1)]
    return np.flatnonzero(nearest == prompt)[-_LOOK_BACK:]


def thin_out(points: Iterable[int], most: int) -> list[int]:
    """Return at most `most` of these points, ascending; those that are quickest to recompute from the one before are
    dropped.
    """
    kept = sorted(set(points))
    while len(kept) > max(most, 1):
        drop(kept)
    return kept


def drop(kept: list[int]) -> int:
    """Remove the least useful point of an ascending list, and return it."""
    old = kept[: max(len(kept) - _NEWEST, 1)]
    gaps = np.diff(np.array([0, *old]))
    return kept.pop(int(np.argmin(gaps)))


class Snapshots:
    """The checkpoints of one sequence, at most `most`. Their memory is reserved with `reserve` and returned with
    `release`.
    """

    def __init__(
        self,
        most: int = 0,
        reserve: Callable[[int], bool] = lambda n: False,
        release: Callable[[int], None] = lambda n: None,
    ) -> None:
        self._most, self._reserve, self._release = most, reserve, release
        self.tails: dict[int, Cells] = {}
        """Tails by number of tokens."""

    def lacks(self, n: int) -> bool:
        """Return True if a checkpoint at `n` tokens is useful: there is none nearby."""
        return self._most > 0 and not any(0 <= n - known < NEAR for known in self.tails)

    def make_room(self, size: int) -> bool:
        """Make room for a checkpoint of `size` bytes, dropping others if necessary. Return False if that is
        impossible.
        """
        while len(self.tails) >= self._most or not self._reserve(size):
            if not self.tails:
                return False
            kept = sorted(self.tails)
            self._release(self.tails.pop(drop(kept)).size)
        self._release(size)
        return True

    def put(self, n: int, tail: Cells) -> None:
        """Store the checkpoint of `n` tokens, if there is room."""
        if self._reserve(tail.size):
            self.tails[n] = tail

    def cut(self, n: int) -> None:
        """Drop the checkpoints of more than `n` tokens."""
        for known in [known for known in self.tails if known > n]:
            self._release(self.tails.pop(known).size)
