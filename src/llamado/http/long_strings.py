"""Long strings of JSON bodies, taken out before the body is parsed.

orjson holds the interpreter's lock for the whole body, 2.6 ms per MiB: a picture of 24 MiB would stop the event loop
for 80 ms. Its base64 text needs no parser, only a copy, which is made without the lock. Other texts are decoded piece
by piece, and the event loop runs in between.
"""

from __future__ import annotations

import codecs
import ctypes
import re
import secrets
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

LONG = 64 * 1024
"""Bytes of a string that is taken out."""
_PIECE = 1 << 20
"""Bytes searched at once, so that temporary arrays stay small, or decoded at once."""
_MOST_QUOTES = 200_000
"""Most quotation marks of a body that is searched. Others have no long strings, or are attacks."""
_MOST_ESCAPES = 2_000_000
_QUOTE, _BACKSLASH = b'"\\'
_COLON_BEHIND = re.compile(rb"[ \t\r\n]*+:")

Bytes = NDArray[np.uint8]


def _escapes() -> Bytes:
    table = np.zeros(256, np.uint8)
    table[list(b'nrt/"')] = list(b'\n\r\t/"')
    return table


_ESCAPES = _escapes()
"""Characters by the byte behind a backslash, 0 for others. Clients wrap base64 in lines, or escape its slashes."""

_new_string = ctypes.pythonapi.PyUnicode_New
_new_string.restype, _new_string.argtypes = ctypes.py_object, [ctypes.c_ssize_t, ctypes.c_uint32]
_bytes_of = ctypes.pythonapi.PyUnicode_AsUTF8
_bytes_of.restype, _bytes_of.argtypes = ctypes.c_void_p, [ctypes.py_object]


@dataclass(frozen=True, slots=True)
class LongStrings:
    """The strings that were taken out of a body, by the unique text that stands for each."""

    texts: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    """Characters that each of them has in the body."""

    def restore(self, value: Any) -> Any:
        """Put the strings back into a parsed value."""
        left = len(self.texts)
        if isinstance(value, str):
            return self.texts.get(value, value)
        todo = [value]
        while todo and left:
            inside = todo.pop()
            if not isinstance(inside, (dict, list)):
                continue
            for key, one in inside.items() if isinstance(inside, dict) else enumerate(inside):
                if isinstance(one, (dict, list)):
                    todo.append(one)
                elif isinstance(one, str) and one in self.texts:
                    inside[key] = self.texts[one]
                    left -= 1
        return value

    def shift(self, body: str, at: int) -> int:
        """Return how many characters were taken out of the line of `body` that has character `at`, before it."""
        begin = body.rfind("\n", 0, at) + 1
        return sum(size - len(name) for name, size in self.sizes.items() if body.find(name, begin, at) >= 0)


NO_STRINGS = LongStrings()


def take_long_strings(body: bytes) -> tuple[bytes, LongStrings]:
    """Replace the long strings of a JSON body that need no parser; return the shorter body, and the strings.

    A body that is no JSON stays wrong, at the same character: up to that one, quotation marks delimit strings.
    """
    found = LongStrings()
    seen = np.frombuffer(body, np.uint8)
    parts: list[bytes] = []
    token, done = secrets.token_hex(16), 0
    for begin, end in _long_strings(body, seen):
        text = None if _is_key(body, end) else _text(seen[begin:end])
        if text is None:
            continue
        name = f"{token}-{len(found.texts):08}"  # all of one length: none is the beginning of another
        found.texts[name] = text
        found.sizes[name] = _count_characters(seen[begin:end])
        parts += [body[done:begin], name.encode()]
        done = end
    return (b"".join([*parts, body[done:]]), found) if parts else (body, NO_STRINGS)


def _long_strings(body: bytes, seen: Bytes) -> list[tuple[int, int]]:
    """Return where the contents of long strings begin and end."""
    pieces: list[NDArray[np.int64]] = []
    n = 0
    for at in range(0, len(seen), _PIECE):
        pieces.append(np.flatnonzero(seen[at : at + _PIECE] == _QUOTE) + at)
        n += len(pieces[-1])
        if n > _MOST_QUOTES:
            return []
    quotes = np.concatenate(pieces)
    if n < 2 or np.diff(quotes).max() <= LONG:
        return []
    behind = seen[quotes - 1] == _BACKSLASH  # of a quotation mark at the very beginning: the last byte, which is "}"
    escaped = [at for at in quotes[behind].tolist() if _is_escaped(body, at)]
    quotes = quotes[~np.isin(quotes, escaped)]
    begins, ends = quotes[: len(quotes) // 2 * 2 : 2] + 1, quotes[1::2]
    long = ends - begins > LONG
    return list(zip(begins[long].tolist(), ends[long].tolist(), strict=True))


def _is_escaped(body: bytes, at: int) -> bool:
    """Return True if an odd number of backslashes is before `at`."""
    n = 64
    while True:
        piece = body[max(0, at - n) : at]
        bare = piece.rstrip(b"\\")
        if bare or n >= at:
            return (len(piece) - len(bare)) % 2 == 1
        n *= 4


def _is_key(body: bytes, end: int) -> bool:
    """Return True if a colon follows the quotation mark at `end`."""
    return _COLON_BEHIND.match(body, end + 1) is not None


def _text(written: Bytes) -> str | None:
    """Return the string that is written so in JSON, or None if orjson has to parse it."""
    text = _unescaped(written)
    if text is None:
        return None
    if text.max() < 0x80:
        return _ascii(text)
    pieces = (text[at : at + _PIECE].tobytes() for at in range(0, text.size, _PIECE))
    try:
        return "".join(codecs.iterdecode(pieces, "utf-8"))
    except UnicodeDecodeError:
        return None


def _count_characters(text: Bytes) -> int:
    """Return the number of characters of UTF-8 bytes."""
    return int(np.count_nonzero(text & 0xC0 != 0x80))


def _unescaped(text: Bytes) -> Bytes | None:
    """Return the bytes that a string stands for, or None if orjson has to parse it."""
    if text.min() < 0x20:
        return None
    at = np.flatnonzero(text == _BACKSLASH)
    if not at.size:
        return text
    if at.size > _MOST_ESCAPES or at[-1] + 1 == text.size:
        return None
    meant = _ESCAPES[text[at + 1]]
    if not meant.all():
        return None
    text = text.copy()
    text[at + 1] = meant
    kept = np.ones(text.size, np.bool_)
    kept[at] = False
    return text[kept]


def _ascii(text: Bytes) -> str:
    """Return ASCII characters as a string.

    `str` would hold the interpreter's lock while the memory of the string gets its pages; memmove does not hold it.
    """
    made: str = _new_string(text.size, 0x7F)
    ctypes.memmove(_bytes_of(made), text.ctypes.data, text.size)
    return made
