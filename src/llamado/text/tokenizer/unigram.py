"""SentencePiece's Unigram vocabularies (`tokenizer.ggml.model` t5): the most probable tokens of a text.

A token's score is the logarithm of its probability; Viterbi's algorithm (arXiv 1804.10959) finds the tokens with the
greatest sum. Input is normalized by the rules in the file (`charsmap.py`), and spaces become ▁.
"""

from __future__ import annotations

from functools import lru_cache
from math import inf

import numpy as np

from llamado.gguf.metadata import Metadata
from llamado.text.tokenizer.charsmap import Normalizer
from llamado.text.tokenizer.pieces import Pieces
from llamado.text.tokenizer.spm import CACHED_PIECES, LONGEST_CACHED, SPACE
from llamado.text.tokenizer.vocabulary import KEY, Attribute, Vocabulary, all_ids

_MATCHED = Attribute.NORMAL | Attribute.USER_DEFINED | Attribute.UNUSED
_PENALTY = 10.0  # how much less likely an unknown character is than the least likely token


class Unigram:
    """Plain text → ids for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary, metadata: Metadata, *, add_space_prefix: bool) -> None:
        self._ids = all_ids(vocabulary.strings)
        self._unknown = vocabulary.special.unk
        scores = vocabulary.scores(metadata).astype(np.float64)
        normal = scores[(vocabulary.attributes & np.uint8(Attribute.NORMAL)) > 0]
        self._unknown_score = float(normal.min()) - _PENALTY if normal.size else -_PENALTY
        scores[(vocabulary.attributes & np.uint8(Attribute.USER_DEFINED)) > 0] = 0.0
        scores[(vocabulary.attributes & np.uint8(_MATCHED)) == 0] = -inf
        self._scores: list[float] = scores.tolist()
        self._longest = max(map(len, self._ids))
        user_defined = [vocabulary.text(token) for token in vocabulary.with_attribute(Attribute.USER_DEFINED)]
        self._normalize = Normalizer(metadata, user_defined)
        self._merge_spaces = metadata.bool_(KEY + "remove_extra_whitespaces", False)
        self._add_space_prefix = add_space_prefix
        self._pieces = Pieces(vocabulary)
        self._cached = lru_cache(CACHED_PIECES)(self._piece)

    def encode(self, text: str) -> list[int]:
        """Return the ids of plain text; characters without a token are unknown, and neighbors among them are
        one token.
        """
        out: list[int] = []
        for piece in self._pieces.of(self._spelled(self._normalize(text))):
            found = self._cached(piece) if len(piece) <= LONGEST_CACHED else self._piece(piece)
            if out and found and out[-1] == found[0] == self._unknown:
                found = found[1:]
            out += found
        return out

    def _spelled(self, text: str) -> str:
        """Write spaces as ▁: with merging one before each word, else one for each space, and one before the
        first word.
        """
        if self._merge_spaces:
            return "".join(SPACE + word for word in text.split(" ") if word)
        words = text.lstrip(" ")
        front = SPACE if words and self._add_space_prefix else ""
        return SPACE * (len(text) - len(words)) + front + words.replace(" ", SPACE)

    def _piece(self, piece: str) -> tuple[int, ...]:
        n, ids, scores, unknown = len(piece), self._ids, self._scores, self._unknown
        best = [-inf] * (n + 1)
        best[0] = 0.0
        # The token that ends at a character on the best way to it, -1 for an unknown one, and where it begins.
        ways = [(-1, 0)] * (n + 1)
        for start in range(n):
            so_far = best[start]
            known = False
            for stop in range(start + 1, min(n, start + self._longest) + 1):
                token = ids.get(piece[start:stop])
                if token is None or scores[token] == -inf:
                    continue
                known = known or stop == start + 1
                if so_far + scores[token] > best[stop]:
                    best[stop], ways[stop] = so_far + scores[token], (token, start)
            if not known and so_far + self._unknown_score > best[start + 1]:
                best[start + 1], ways[start + 1] = so_far + self._unknown_score, (-1, start)
        out: list[int] = []
        at = n
        while at:
            last, start = ways[at]
            token = unknown if last < 0 else last
            if token is not None and not (out and out[-1] == token == unknown):
                out.append(token)
            at = start
        return tuple(reversed(out))
