"""RWKV's vocabulary of bytes (`tokenizer.ggml.model` rwkv): at each place of a text the longest matching token.

Tokens are spelled like Python's bytes: `\\n`, `\\xff`, a backslash before a literal character.
"""

from __future__ import annotations

import re

from llamado.text.tokenizer.vocabulary import Vocabulary

_ESCAPE = re.compile(rb"\\(?:x([0-9a-f]{2})|(.))", re.DOTALL)
_LETTERS = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}


class LongestBytes:
    """Plain text → ids for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._spelled = [unescape(raw) for raw in vocabulary.strings.raw_list()]
        self._ids = {token: i for i, token in enumerate(self._spelled)}
        self._unknown = vocabulary.special.unk
        lengths: dict[bytes, set[int]] = {}
        for token in self._ids:
            lengths.setdefault(token[:2], set()).add(len(token))
        self._lengths = {begin: sorted(found, reverse=True) for begin, found in lengths.items() if begin}

    def encode(self, text: str) -> list[int]:
        """Return the ids of plain text; a byte that no token begins with is the unknown token, if there is one."""
        data, ids, at, out = text.encode(), self._ids, 0, []
        while at < len(data):
            for n in (*self._lengths.get(data[at : at + 2], ()), 1):
                token = ids.get(data[at : at + n])
                if token is not None:
                    out.append(token)
                    at += n
                    break
            else:
                if self._unknown is not None:
                    out.append(self._unknown)
                at += 1
        return out

    def spelled(self, token: int) -> bytes:
        """Return the bytes of a token."""
        return self._spelled[token]


def unescape(raw: bytes) -> bytes:
    """Return the bytes of an escaped spelling."""
    if b"\\" not in raw:
        return raw
    return _ESCAPE.sub(lambda m: bytes([int(m[1], 16)]) if m[1] else _LETTERS.get(m[2], m[2]), raw)
