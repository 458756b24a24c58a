"""Writes rules of normalization as SentencePiece's files have them: a double array of a trie, then the replacements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray


def charsmap(rules: Mapping[str, str]) -> NDArray[np.int8]:
    """The bytes of `tokenizer.ggml.precompiled_charsmap`, int8 as in files."""
    strings, places = bytearray(), {}
    for sequence, replacement in rules.items():
        places[sequence.encode()] = len(strings)
        strings += replacement.encode() + b"\0"
    trie: dict[int, Any] = {}
    for sequence in places:
        node = trie
        for byte in sequence:
            node = node.setdefault(byte, {})
        node[0] = places[sequence]
    units = np.zeros(1 << 16, np.uint32)
    taken = {0}
    starts: set[int] = set()  # of two nodes that began at one place, each would have the other's bytes

    def put(at: int, node: dict[int, Any]) -> None:
        """Place the children of the unit `at`: each lies at the unit's offset XOR its byte."""
        free = (base for base in range(1, len(units)) if at ^ base not in starts)
        offset = next(base for base in free if not any((at ^ base ^ byte) in taken for byte in node))
        units[at] |= offset << 10
        start = at ^ offset
        starts.add(start)
        taken.update(start ^ byte for byte in node)
        for byte, child in node.items():
            if byte == 0:
                units[at] |= 1 << 8
                units[start] = child | 1 << 31
            else:
                units[start ^ byte] = byte
        for byte, child in node.items():
            if byte:
                put(start ^ byte, child)

    put(0, trie)
    used = units[: (max(taken) | 255) + 1].tobytes()
    return np.frombuffer(len(used).to_bytes(4, "little") + used + bytes(strings), np.int8)
