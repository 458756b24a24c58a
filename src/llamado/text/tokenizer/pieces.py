"""Cuts texts where no token can lie over the cut, without any effect on how they are tokenized.

Two neighbouring characters that no token has side by side can never come together. Such cuts give short pieces, mostly
words, that repeat and are remembered.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from llamado.text.tokenizer.unbroken import UNBROKEN
from llamado.text.tokenizer.vocabulary import Vocabulary

_HASH_BITS = 22


class Pieces:
    """Cuts texts for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def of(self, text: str) -> Iterable[str]:
        """Cut where two neighbours never stand side by side in a token."""
        if len(text) < 2:
            return [text] if text else []
        points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        cuts = np.flatnonzero(~self._neighbours[_pair_hash(points)]) + 1
        ends = [0]
        for at in range(0, len(cuts), UNBROKEN):
            ends += cuts[at : at + UNBROKEN].tolist()
        ends.append(len(text))
        return (text[a:b] for a, b in pairwise(ends))

    @cached_property
    def _neighbours(self) -> NDArray[np.bool_]:
        """Whether some token may have two characters side by side, by their hash (a false yes costs a cut, no more)."""
        strings = self._vocabulary.strings
        text = strings.buffer.decode("utf-8", "replace")
        points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        seen = np.zeros(1 << _HASH_BITS, np.bool_)
        seen[_pair_hash(points)] = True  # pairs over the border of two tokens included: a few needless yeses
        return seen


def _pair_hash(points: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Hash of each pair of neighbouring code points (multiplicative, by odd constants of 32 bits)."""
    mixed = points[:-1] * np.uint32(0x9E3779B1) ^ points[1:] * np.uint32(0x85EBCA6B)
    return mixed >> np.uint32(32 - _HASH_BITS)
