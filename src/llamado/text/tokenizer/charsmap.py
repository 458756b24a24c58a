"""SentencePiece's normalization of text before it is tokenized (`tokenizer.ggml.precompiled_charsmap`).

A rule replaces a sequence of characters, possibly by nothing; of several rules that begin at one place the longest
applies. In the file they are a trie over UTF-8 in an XOR-compressed double array (Kanda, "Space- and time-efficient
string dictionaries", 2018), followed by the replacements, each ended by a zero byte. Files have 200,000 of them; a text
needs few, which are looked up as it arrives.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise

import numpy as np

from llamado.gguf.metadata import Metadata
from llamado.text.errors import TokenizerError
from llamado.text.tokenizer.parts import PART_LENGTH
from llamado.text.tokenizer.vocabulary import KEY

_NAME = KEY + "precompiled_charsmap"
_LONGEST = 64  # most characters of a rule; in files none has more than 18
_CACHED = 1 << 16


class Normalizer:
    """Applies a file's rules; without any, text is unchanged. `kept`: tokens whose beginnings no rule changes."""

    def __init__(self, metadata: Metadata, kept: Iterable[str]) -> None:
        """Read the rules. Raises TokenizerError."""
        self._units, self._replacements = _read(metadata)
        self._kept = {token[:n] for token in kept for n in range(1, len(token) + 1)}
        self._single_rules = lru_cache(_CACHED)(self._has_rule)
        self._pair_rules = lru_cache(_CACHED)(self._may_start_with)
        self._pattern = lru_cache(256)(re.compile)

    def __call__(self, text: str) -> str:
        places = self._places(text) if self._units else ""
        if not places:
            return text
        out: list[str] = []
        done, search = 0, self._pattern(places).search
        for start in range(0, len(text), PART_LENGTH):
            stop = start + PART_LENGTH + 1  # the last of them with the one behind it
            while (match := search(text, max(done, start), stop)) is not None:
                at = match.start()
                replacement, n = self._at(text, at)
                out += text[done:at], replacement
                done = at + n
        out.append(text[done:])
        return "".join(out)

    def _places(self, text: str) -> str:
        """Return a pattern of the characters of a text at which rules may begin."""
        parts = [text[at : at + PART_LENGTH + 1] for at in range(0, len(text), PART_LENGTH)]
        alone = {c for part in parts for c in set(part) if self._single_rules(c)}
        pairs = {pair for part in parts for pair in set(pairwise(part)) if pair[0] not in alone}
        found = ["[" + re.escape("".join(sorted(alone))) + "]"] if alone else []
        found += [f"{re.escape(c)}(?={re.escape(d)})" for c, d in sorted(pairs) if self._pair_rules(c, d)]
        return "|".join(found)

    def _has_rule(self, c: str) -> bool:
        """Return True if there is a rule for a character, or it begins a kept token."""
        return c in self._kept or self._at(c, 0) != (c, 1)

    def _may_start_with(self, c: str, d: str) -> bool:
        """Return True if a rule may begin with two characters."""
        place = _offset(self._units[0])
        for byte in (c + d).encode():
            place ^= byte
            if not self._leads(place, byte):
                return False
            place ^= _offset(self._units[place])
        return True

    def _at(self, text: str, at: int) -> tuple[str, int]:
        """Return the replacement of the characters from `at` on, and how many of them it replaces."""
        n = 0
        while at + n < len(text) and text[at : at + n + 1] in self._kept:
            n += 1
        if n:
            return text[at : at + n], n
        found = text[at], 1
        place = _offset(self._units[0])
        for n in range(min(_LONGEST, len(text) - at)):
            for byte in text[at + n].encode():
                place ^= byte
                if not byte or not self._leads(place, byte):
                    return found
                unit = self._units[place]
                place ^= _offset(unit)
            if unit & 256 and place < len(self._units):
                start = self._units[place] & 0x7FFFFFFF
                stop = self._replacements.find(b"\0", start)
                if stop >= 0:
                    found = self._replacements[start:stop].decode("utf-8", "replace"), n + 1
        return found

    def _leads(self, place: int, byte: int) -> bool:
        """Return True if a byte leads to a unit."""
        return place < len(self._units) and self._units[place] & 0x800000FF == byte


def _offset(unit: int) -> int:
    """Return the offset to the units after this one: bits 10 to 30, or with bit 9 set, the same in units of 256.

    Bits 0 to 7 are the byte that leads to it, bit 8 is set if a rule ends there, and bit 31 marks units with values.
    """
    return unit >> 10 << ((unit & 512) >> 6)


def _read(metadata: Metadata) -> tuple[list[int], bytes]:
    """Return the units of the trie, and the replacements. Raises TokenizerError."""
    values = metadata.array(_NAME, None)
    if values is None or not len(values):
        return [], b""
    blob = values.astype(np.uint8).tobytes()
    size = int.from_bytes(blob[:4], "little")
    if len(blob) < 4 or size + 4 >= len(blob) or size % 4 or not size:
        raise TokenizerError(f"{_NAME} is damaged: it has {len(blob)} bytes and declares a trie of {size}")
    return np.frombuffer(blob, "<u4", size // 4, 4).tolist(), blob[4 + size :]
