"""PLaMo's vocabularies (`tokenizer.ggml.model` plamo2): the tokens of a text with the greatest sum of scores, and bytes
for characters without a token.

A text is processed from its end. Scores are integers in ten-thousandths, so that sums are exact; of equal sums the one
that begins with the longer token wins (llama-vocab.cpp, b11434).
"""

from __future__ import annotations

from math import isfinite

from llamado.gguf.metadata import Metadata
from llamado.text.errors import TokenizerError
from llamado.text.tokenizer.vocabulary import KEY, Attribute, Vocabulary

_ONE = 10_000
_UNKNOWN = -1_000 * _ONE
"""The score of a character as bytes."""
_LEAST = -2_000 * _ONE
"""A token of this score or less is never chosen."""
_MARK = "\ufeff"


class ScoredPieces:
    """Plain text → ids for one vocabulary. All tokens take part except bytes, including control tokens."""

    def __init__(self, vocabulary: Vocabulary, metadata: Metadata) -> None:
        """Build the tables. Raises TokenizerError if a byte has no token."""
        self._vocabulary = vocabulary
        scores = vocabulary.scores(metadata).tolist()
        bytes_ = {vocabulary.text(token): token for token in vocabulary.with_attribute(Attribute.BYTE)}
        try:
            self._bytes = [bytes_[f"<0x{i:02X}>"] for i in range(256)]
        except KeyError as error:
            raise TokenizerError(f"the vocabulary has no token for the byte {error.args[0]} ({KEY}tokens)") from None
        self._pieces: dict[str, tuple[int, int]] = {}
        taken = frozenset(bytes_.values())
        for token, raw in enumerate(vocabulary.strings.raw_list()):
            if token not in taken:
                self._pieces[raw.decode("utf-8", "replace") or vocabulary.text(token)] = (_whole(scores[token]), token)
        self._pieces = {text: found for text, found in self._pieces.items() if found[0] > _LEAST}
        lengths: dict[str, set[int]] = {}
        for text in self._pieces:
            lengths.setdefault(text[:2], set()).add(len(text))
        self._lengths = {begin: sorted(found, reverse=True) for begin, found in lengths.items()}

    def encode(self, text: str) -> list[int]:
        """Return the ids of plain text; a leading byte order mark is left out."""
        text = text.removeprefix(_MARK)
        n, pieces, lengths = len(text), self._pieces, self._lengths
        best = [0] * (n + 1)  # the greatest sum of scores from a character to the end
        ways = [(0, -1)] * (n + 1)  # length of its first token, and the token; -1: bytes
        for at in range(n - 1, -1, -1):
            greatest, way = _UNKNOWN + best[at + 1], (1, -1)
            for begin in (text[at], text[at : at + 2]):
                for size in lengths.get(begin, ()):
                    found = pieces.get(text[at : at + size])
                    if found is None or n - at < size:
                        continue
                    total = found[0] + best[at + size]
                    if total > greatest or (total == greatest and size >= way[0]):
                        greatest, way = total, (size, found[1])
            best[at], ways[at] = greatest, way
        out: list[int] = []
        at = 0
        while at < n:
            size, token = ways[at]
            if token < 0:
                out += [self._bytes[byte] for byte in text[at].encode()]
            else:
                out.append(token)
            at += size
        return out

    def spelled(self, token: int) -> bytes:
        """Return the bytes of a token."""
        raw = self._vocabulary.strings.raw(token)
        return bytes([int(raw[3:5], 16)]) if self._vocabulary.has(token, Attribute.BYTE) else raw


def _whole(score: float) -> int:
    """Return a score in ten-thousandths, halves rounded away from zero."""
    if not isfinite(score):
        return _LEAST
    whole = int(abs(score) * _ONE + 0.5)
    return whole if score >= 0 else -whole
