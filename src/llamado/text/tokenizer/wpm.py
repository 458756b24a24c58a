"""WordPiece (`tokenizer.ggml.model` bert): words of a normalized text, each cut greedily into the longest known tokens.

In a GGUF file, tokens that begin a word start with ▁ and the others do not. The normalizer is BERT's as implemented in
llama.cpp: one character at a time, reduced to the first of its canonical decomposition.
"""

from __future__ import annotations

import unicodedata

from llamado.gguf.metadata import Metadata
from llamado.text.tokenizer.unicode_classes import MARK, PUNCTUATION, SPACE, reduce
from llamado.text.tokenizer.vocabulary import KEY, Vocabulary, all_ids

_ASCII_SPACE = "\t\n\v\f\r "
_ASCII_MARKS = frozenset("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")  # punctuation and symbols: each is a word
_CONTROL = ("Cc", "Cf", "Co", "Cs")
_LATE_CONTROL = range(0x13439, 0x13440)  # of Unicode 15, supported by Python since 3.12
# Each ideograph is a word. As in Hugging Face's tokenizers, with its gap after U+2B81F.
_IDEOGRAPHS = (
    range(0x4E00, 0xA000),
    range(0x3400, 0x4DC0),
    range(0x20000, 0x2A6E0),
    range(0x2A700, 0x2B740),
    range(0x2B740, 0x2B820),
    range(0x2B920, 0x2CEB0),
    range(0xF900, 0xFB00),
    range(0x2F800, 0x2FA20),
)


class WordPieces:
    """Plain text → ids for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary, metadata: Metadata) -> None:
        self._ids = all_ids(vocabulary.strings)
        self._unknown = vocabulary.special.unk
        self._longest = max(map(len, self._ids))
        self._lowercase = metadata.bool_(KEY + "normalizer.lowercase", True)
        self._strip_accents = metadata.bool_(KEY + "normalizer.strip_accents", self._lowercase)

    def encode(self, text: str) -> list[int]:
        """Return the ids of plain text; a word that cannot be spelled is one unknown token."""
        out: list[int] = []
        for word in self._words(text):
            pieces = self._word("▁" + word)
            if pieces:
                out += pieces
            elif self._unknown is not None:
                out.append(self._unknown)
        return out

    def _word(self, word: str) -> list[int]:
        out = []
        start = 0
        while start < len(word):
            for stop in range(min(len(word), start + self._longest), start, -1):
                token = self._ids.get(word[start:stop])
                if token is not None:
                    out.append(token)
                    start = stop
                    break
            else:
                return []
        return out

    def _words(self, text: str) -> list[str]:
        if self._strip_accents and not text.isascii():
            text = "".join(c if c.isascii() else unicodedata.normalize("NFD", c)[0] for c in text)
        words: list[str] = []
        word = ""
        for c, kind in zip(text, reduce(text), strict=True):
            if kind in _ASCII_SPACE or kind == SPACE:
                if word:
                    words.append(word)
                word = ""
                continue
            if c == "\ufffd" or _is_control(c) or (self._strip_accents and kind == MARK):
                continue
            if self._lowercase:
                c = c.lower()[0]
            if kind in _ASCII_MARKS or kind == PUNCTUATION or any(ord(c) in block for block in _IDEOGRAPHS):
                if word:
                    words.append(word)
                words.append(c)
                word = ""
            else:
                word += c
        if word:
            words.append(word)
        return words


def _is_control(c: str) -> bool:
    return unicodedata.category(c) in _CONTROL or ord(c) in _LATE_CONTROL
