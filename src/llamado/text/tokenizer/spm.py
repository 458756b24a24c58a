"""SentencePiece's vocabularies (`tokenizer.ggml.model` llama): neighbors merge into the token of highest score.

This is the greedy algorithm of SentencePiece's BPE models over the whole text: it is not cut into words, except where
that cannot change the result (`pieces.py`).
"""

from __future__ import annotations

from array import array
from functools import lru_cache
from math import inf

from llamado.gguf.metadata import Metadata
from llamado.text.tokenizer.merging import Cost, merge
from llamado.text.tokenizer.parts import parts_of
from llamado.text.tokenizer.pieces import Pieces
from llamado.text.tokenizer.vocabulary import Vocabulary

SPACE = "▁"  # a space in vocabularies of this kind
CACHED_PIECES = 1 << 15
LONGEST_CACHED = 64  # characters


class ScoredPairs:
    """Plain text → ids for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary, metadata: Metadata) -> None:
        self._vocabulary = vocabulary
        self._find = find = vocabulary.ids.find
        costs = array("f", (-vocabulary.scores(metadata)).tobytes())
        costs.append(inf)  # of token -1, "no such token"
        self._cost: Cost = lambda left, right: costs[find(left + right)]
        self._pieces = Pieces(vocabulary)
        self._cached = lru_cache(CACHED_PIECES)(self._piece)

    def encode(self, text: str) -> list[int]:
        """Return the ids of plain text; spaces are spelled ▁."""
        text = "".join(part.replace(" ", SPACE) for part in parts_of(text))
        out: list[int] = []
        cached = self._cached
        for piece in self._pieces.of(text):
            out += cached(piece) if len(piece) <= LONGEST_CACHED else self._piece(piece)
        return out

    def _piece(self, piece: str) -> tuple[int, ...]:
        out: list[int] = []
        for symbol in merge(piece, self._cost):
            token = self._find(symbol)
            if token >= 0:
                out.append(token)
            else:
                out += self._bytes(symbol)
        return tuple(out)

    def _bytes(self, symbol: str) -> list[int]:
        """Return the tokens of a character without one: those of its bytes, or the unknown token if the vocabulary
        lacks them.
        """
        out = []
        for byte in symbol.encode():
            token = self._find(f"<0x{byte:02X}>")
            if token < 0 and byte < 0x80:
                token = self._find(chr(byte))
            if token >= 0:
                out.append(token)
            elif self._vocabulary.special.unk is not None:
                out.append(self._vocabulary.special.unk)
        return out
