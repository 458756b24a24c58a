"""SentencePiece's vocabularies (`tokenizer.ggml.model` llama): neighbours merge into the token of highest score.

This is the greedy algorithm of SentencePiece's BPE models, over the whole text at once: nothing cuts it into words. But
two neighbouring characters that no token has side by side can never come together, so the text may be cut between them
without any effect on the outcome. Such cuts give short pieces, mostly words, that repeat and are remembered.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property, lru_cache
from itertools import pairwise
from math import inf

import numpy as np
from numpy.typing import NDArray

from llamado.gguf.metadata import Metadata
from llamado.text.tokenizer.merging import merge
from llamado.text.tokenizer.unbroken import UNBROKEN, parts_of
from llamado.text.tokenizer.vocabulary import Vocabulary

SPACE = "▁"  # how a vocabulary of this kind spells a space
CACHED_PIECES = 1 << 15
LONGEST_CACHED = 64  # characters

_HASH_BITS = 22


class ScoredPairs:
    """Plain text → ids for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary, metadata: Metadata) -> None:
        self._vocabulary = vocabulary
        self._ids = vocabulary.ids
        costs: list[float] = (-vocabulary.scores(metadata)).tolist()
        costs.append(inf)  # of token -1, "no such token"
        self._costs = costs
        self._cached = lru_cache(CACHED_PIECES)(self._piece)

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; spaces are spelled ▁."""
        text = "".join(part.replace(" ", SPACE) for part in parts_of(text))
        out: list[int] = []
        cached = self._cached
        for piece in self._pieces(text):
            out += cached(piece) if len(piece) <= LONGEST_CACHED else self._piece(piece)
        return out

    def _pieces(self, text: str) -> Iterable[str]:
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

    def _piece(self, piece: str) -> tuple[int, ...]:
        ids = self._ids
        out: list[int] = []
        for symbol in merge(piece, self._cost):
            token = ids.get(symbol)
            if token is not None:
                out.append(token)
            else:
                out += self._bytes(symbol)
        return tuple(out)

    def _cost(self, left: str, right: str) -> float:
        return self._costs[self._ids.get(left + right, -1)]

    def _bytes(self, symbol: str) -> list[int]:
        """A character without a token: its bytes' tokens, or the unknown token where the vocabulary lacks those."""
        out = []
        for byte in symbol.encode():
            token = self._ids.get(f"<0x{byte:02X}>", self._ids.get(chr(byte)) if byte < 0x80 else None)
            if token is None:
                token = self._vocabulary.special.unk
            if token is not None:
                out.append(token)
        return out


def _pair_hash(points: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Hash of each pair of neighbouring code points (multiplicative, by odd constants of 32 bits)."""
    mixed = points[:-1] * np.uint32(0x9E3779B1) ^ points[1:] * np.uint32(0x85EBCA6B)
    return mixed >> np.uint32(32 - _HASH_BITS)
