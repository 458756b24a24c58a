"""Where sequences can go back to: what layers that do not keep all tokens have had after so many of them.

A window of the last tokens, or a state, is lost as a sequence goes on. What is known of it at some points (see
`Memory.read_tail`) lets a prompt that branches off there go on, instead of being read from the beginning. llama.cpp
calls these context checkpoints. Here it is decided where they are worth having, and which go when there are too many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from llamado.engine.forward.contract import Cells

NEAR = 16
"""Points closer together than this serve each other: so many tokens are quickly read again."""
_NEWEST = 3
"""Points at the end that are never thinned out: the last message's begin and end, and the answer's."""
_LOOK_BACK = 64
"""Tokens that steer the model among which the bounds of the last message are looked for."""


def points(prompt: NDArray[np.int32], control: NDArray[np.int32], every: int) -> list[int]:
    """Numbers of first tokens of a prompt at which another one may branch off, ascending.

    They are where the last message begins and ends, as the tokens tell that steer the model (`control`, ascending):
    templates write both anew once there is an answer. Where its end is not near, the prompt without its last token,
    which is what is left to read when it is asked again; and every so many tokens, if `every` is not 0.
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
    """Places of the last of these tokens."""
    if not control.size:
        return np.empty(0, np.int64)
    nearest = control[np.minimum(np.searchsorted(control, prompt), control.size - 1)]
    return np.flatnonzero(nearest == prompt)[-_LOOK_BACK:]


def thinned(points: Iterable[int], most: int) -> list[int]:
    """At most so many of these points, ascending: those go first that are quickest read again from the one before."""
    kept = sorted(set(points))
    while len(kept) > max(most, 1):
        drop(kept)
    return kept


def drop(kept: list[int]) -> int:
    """Take out the point of a list, ascending, that is missed least, and return it."""
    old = kept[: max(len(kept) - _NEWEST, 1)]
    gaps = np.diff(np.array([0, *old]))
    return kept.pop(int(np.argmin(gaps)))


class Snapshots:
    """Those of one sequence, `most` at most, in this machine's memory: `reserve` is asked for it, `release` gets it."""

    def __init__(
        self,
        most: int = 0,
        reserve: Callable[[int], bool] = lambda n: False,
        release: Callable[[int], None] = lambda n: None,
    ) -> None:
        self._most, self._reserve, self._release = most, reserve, release
        self.tails: dict[int, Cells] = {}
        """By numbers of tokens."""

    def lacks(self, n: int) -> bool:
        """Whether one of `n` tokens is wanted: there is none of about as many."""
        return self._most > 0 and not any(0 <= n - known < NEAR for known in self.tails)

    def make_room(self, size: int) -> bool:
        """Make room for one of `size` bytes, in place of others where need be; False where there is none."""
        while len(self.tails) >= self._most or not self._reserve(size):
            if not self.tails:
                return False
            kept = sorted(self.tails)
            self._release(self.tails.pop(drop(kept)).size)
        self._release(size)
        return True

    def put(self, n: int, tail: Cells) -> None:
        """Keep that of `n` tokens, for which there is room."""
        if self._reserve(tail.size):
            self.tails[n] = tail

    def cut(self, n: int) -> None:
        """Forget those of more than `n` tokens."""
        for known in [known for known in self.tails if known > n]:
            self._release(self.tails.pop(known).size)
