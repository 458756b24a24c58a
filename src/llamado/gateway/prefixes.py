"""Index of prompt prefixes: which replica has cached which prefix, by chained hashes.

A prompt is split into blocks, and each block's hash includes those before it: equal hashes mean equal prefixes. In a
conversation, blocks end where messages end, so that the next turn finds the last one's prefix.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any

import orjson

BLOCK = 512
"""Most bytes of a block."""
LEAST_KNOWN = 256
"""Shorter prefixes, in bytes, are ignored: most conversations begin alike."""
MOST_BLOCKS = 1024
"""Blocks of a prompt that are hashed: half a megabyte of text."""
MOST_ENTRIES = 1 << 16
"""Prefixes in the index; the least recently used are forgotten first."""
MOST_HOLDERS = 8
"""Replicas remembered for one prefix."""

Chain = list[tuple[bytes, int]]
"""Hash and length in bytes of each prefix, the shortest first."""


def chain_of(body: Any) -> Chain:
    """Return the prefixes of the prompt in a request body of any API; [] if it has no prompt."""
    return _chain(_parts(body)) if isinstance(body, dict) else []


def _parts(body: Mapping[str, Any]) -> Iterable[bytes]:
    messages = body.get("messages", body.get("input"))
    prompt = body.get("prompt", body.get("input_prefix"))
    if isinstance(messages, list):
        # Chat templates put these before the first message.
        yield orjson.dumps([body.get(name) for name in ("model", "tools", "system", "instructions")])
        yield from map(orjson.dumps, messages)
    elif isinstance(messages, str):
        yield orjson.dumps([body.get("model"), body.get("instructions")])
        yield messages.encode("utf-8", "replace")
    elif isinstance(prompt, str):
        yield prompt.encode("utf-8", "replace")
    elif isinstance(prompt, list):
        yield orjson.dumps(prompt)[:-1]  # without the closing bracket


def _chain(parts: Iterable[bytes]) -> Chain:
    chain: Chain = []
    hash, length = b"", 0
    for part in parts:
        for at in range(0, len(part), BLOCK):
            if len(chain) >= MOST_BLOCKS:
                return chain
            block = part[at : at + BLOCK]
            hash = blake2b(hash + block, digest_size=16).digest()
            length += len(block)
            chain.append((hash, length))
    return chain


class Prefixes:
    """Prefixes and their holders. A holder is a number; a replica gets a new one whenever it has lost its cache."""

    def __init__(self, most: int = MOST_ENTRIES) -> None:
        self._most = most
        self._holders: OrderedDict[bytes, list[int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def cached_bytes(self, chain: Chain) -> dict[int, int]:
        """Return the bytes of a prompt that each holder has cached."""
        found: dict[int, int] = {}
        for hash, length in chain:
            holders = self._holders.get(hash)
            if holders is None:
                break
            if length >= LEAST_KNOWN:
                for holder in holders:
                    found[holder] = length
        return found

    def add(self, chain: Chain, holder: int) -> None:
        """Record that a prompt was sent to a holder."""
        for hash, _ in reversed(chain):  # so that the end of a prompt is forgotten before its beginning
            holders = self._holders.setdefault(hash, [])
            if holder not in holders:
                holders.append(holder)
                del holders[:-MOST_HOLDERS]
            self._holders.move_to_end(hash)
        while len(self._holders) > self._most:
            self._holders.popitem(last=False)
