"""Index of a string array by text, without one Python object for each of a vocabulary's 250,000 strings."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from llamado.gguf.metadata import StringArray

KEPT = 1 << 17
"""Look-ups that are cached: about 15 MB."""
_CHUNK = 1 << 14  # strings decoded at a time while the index is built


class TextIndex:
    """Map texts to the indices of strings. Bytes that are not UTF-8 are lone surrogates; the empty text is never found.

    Strings are sorted by the lowest bits of their texts' hashes; a look-up compares the texts of one bucket.
    """

    find: Callable[[str], int]
    """Return the index of the string equal to this text, or -1."""

    def __init__(self, strings: StringArray, *, last: bool, names: Mapping[str, int] | None = None) -> None:
        """If strings are equal, the `last` one counts, or else the first; `names` take precedence over all."""
        self._strings = strings
        self._names = names or {}
        hashes = _hashes(strings)
        self._bits = (1 << max(len(hashes) - 1, 1).bit_length()) - 1
        places = hashes & self._bits
        if last:
            order = len(places) - 1 - np.argsort(places[::-1], kind="stable")
        else:
            order = np.argsort(places, kind="stable")
        starts = np.zeros(self._bits + 2, np.int32)
        np.cumsum(np.bincount(places, minlength=self._bits + 1), out=starts[1:])
        # Python's own arrays: reading one number from numpy's takes four times as long.
        self._hashes = array("q", hashes[order].tobytes())
        self._numbers = array("i", order.astype(np.int32).tobytes())
        self._starts = array("i", starts.tobytes())
        self.find = _LookupCache(self._look_up).__getitem__

    def __contains__(self, text: str) -> bool:
        return self.find(text) >= 0

    def __getitem__(self, text: str) -> int:
        number = self.find(text)
        if number < 0:
            raise KeyError(text)
        return number

    def _look_up(self, text: str) -> int:
        found = self._names.get(text)
        if found is not None or not text:
            return -1 if found is None else found
        code = hash(text)
        place = code & self._bits
        for i in range(self._starts[place], self._starts[place + 1]):
            if self._hashes[i] == code:
                number = self._numbers[i]
                if self._strings.raw(number).decode("utf-8", "surrogateescape") == text:
                    return number
        return -1


class _LookupCache(dict[str, int]):
    """Cache of a function of texts; cleared when it is full."""

    def __init__(self, look: Callable[[str], int]) -> None:
        super().__init__()
        self._look_up = look

    def __missing__(self, text: str) -> int:
        found = self._look_up(text)
        if len(self) >= KEPT:
            self.clear()
        self[text] = found
        return found


def _hashes(strings: StringArray) -> NDArray[np.int64]:
    """Return Python's hash of each string's text."""
    hashes = np.empty(len(strings), np.int64)
    for at in range(0, len(strings), _CHUNK):
        texts = decode_all(StringArray(strings.buffer, strings.offsets[at : at + _CHUNK + 1]))
        hashes[at : at + len(texts)] = np.fromiter(map(hash, texts), np.int64, len(texts))
    return hashes


def decode_all(strings: StringArray) -> list[str]:
    """Decode all strings at once: join them with a byte that none contains and split again, in half the time."""
    if not len(strings):
        return []
    offsets = strings.offsets
    buffer = np.frombuffer(strings.buffer, np.uint8)[int(offsets[0]) : int(offsets[-1])]
    unused = np.flatnonzero(np.bincount(buffer, minlength=0x80)[:0x80] == 0)
    if not len(unused):
        return [raw.decode("utf-8", "surrogateescape") for raw in strings.raw_list()]
    separator = int(unused[0])
    joined = np.insert(buffer, offsets[1:-1] - offsets[0], separator).tobytes()
    return joined.decode("utf-8", "surrogateescape").split(chr(separator))
