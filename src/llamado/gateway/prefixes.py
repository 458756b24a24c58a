"""Which replica has which beginnings of prompts in its cache, by a chain of hashes over them.

A prompt is cut into blocks, and each block's hash takes in those before it: equal hashes are equal beginnings. A
conversation's blocks end where its messages end, too, so that its next turn finds the last one's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any

import orjson

BLOCK = 512
"""Bytes of a block at most."""
LEAST_KNOWN = 256
"""Bytes of a prompt below which it does not matter who knows them: all conversations begin alike."""
MOST_BLOCKS = 1024
"""Blocks of one prompt that are looked at: half a megabyte of text."""
MOST_ENTRIES = 1 << 16
"""Beginnings that are remembered; those not met for the longest time are forgotten first."""
MOST_HOLDERS = 8
"""Replicas remembered for one beginning."""

Chain = list[tuple[bytes, int]]
"""Hash and length in bytes of each beginning, the shortest first."""


def chain_of(body: Any) -> Chain:
    """The beginnings of what a body of any of the APIs asks; none where there is no prompt in it."""
    return _chain(_parts(body)) if isinstance(body, dict) else []


def _parts(body: Mapping[str, Any]) -> Iterable[bytes]:
    messages = body.get("messages", body.get("input"))
    prompt = body.get("prompt", body.get("input_prefix"))
    if isinstance(messages, list):
        # What templates put before the first message.
        yield orjson.dumps([body.get(name) for name in ("model", "tools", "system", "instructions")])
        yield from map(orjson.dumps, messages)
    elif isinstance(messages, str):
        yield orjson.dumps([body.get("model"), body.get("instructions")])
        yield messages.encode("utf-8", "replace")
    elif isinstance(prompt, str):
        yield prompt.encode("utf-8", "replace")
    elif isinstance(prompt, list):
        yield orjson.dumps(prompt)[:-1]  # without the bracket that ends it


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
    """Beginnings and who has them. A holder is a number: a replica gets another one whenever it lost its cache."""

    def __init__(self, most: int = MOST_ENTRIES) -> None:
        self._most = most
        self._holders: OrderedDict[bytes, list[int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def known(self, chain: Chain) -> dict[int, int]:
        """How many bytes of a prompt each holder has."""
        found: dict[int, int] = {}
        for hash, length in chain:
            holders = self._holders.get(hash)
            if holders is None:
                break
            if length >= LEAST_KNOWN:
                for holder in holders:
                    found[holder] = length
        return found

    def note(self, chain: Chain, holder: int) -> None:
        """A prompt was sent to a holder."""
        for hash, _ in reversed(chain):  # so that of one prompt the end is forgotten first
            holders = self._holders.setdefault(hash, [])
            if holder not in holders:
                holders.append(holder)
                del holders[:-MOST_HOLDERS]
            self._holders.move_to_end(hash)
        while len(self._holders) > self._most:
            self._holders.popitem(last=False)
