"""Cut texts where no token can span the cut, which does not change their tokens.

Two neighboring characters that are not adjacent in any token can never be in the same token. Such cuts give short
pieces, mostly words, that repeat and are cached.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from llamado.text.tokenizer.parts import PART_LENGTH
from llamado.text.tokenizer.vocabulary import Vocabulary

_HASH_BITS = 22


class Pieces:
    """Cuts texts for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def of(self, text: str) -> Iterable[str]:
        """Cut between neighbors that are not adjacent in any token."""
        if len(text) < 2:
            return [text] if text else []
        points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        cuts = np.flatnonzero(~self._neighbors[_pair_hash(points)]) + 1
        ends = [0]
        for at in range(0, len(cuts), PART_LENGTH):
            ends += cuts[at : at + PART_LENGTH].tolist()
        ends.append(len(text))
        return (text[a:b] for a, b in pairwise(ends))

    @cached_property
    def _neighbors(self) -> NDArray[np.bool_]:
        """True for hashes of pairs of characters that may be adjacent in a token (a false positive only costs a
        cut).
        """
        strings = self._vocabulary.strings
        text = strings.buffer.decode("utf-8", "replace")
        points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        seen = np.zeros(1 << _HASH_BITS, np.bool_)
        seen[_pair_hash(points)] = True  # includes pairs across the border of two tokens: a few false positives
        return seen


def _pair_hash(points: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Hash each pair of neighboring code points (multiplicative, with odd constants of 32 bits)."""
    mixed = points[:-1] * np.uint32(0x9E3779B1) ^ points[1:] * np.uint32(0x85EBCA6B)
    return mixed >> np.uint32(32 - _HASH_BITS)
