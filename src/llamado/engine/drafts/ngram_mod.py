"""llama.cpp's `ngram-mod`: one table for all sequences, from the hash of `n` tokens to the token that followed last."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llamado.engine.drafts.contract import NO_PROPOSAL, Drafter, DraftKind, Proposal

_ENTRIES = 4 << 20
_FULL = 0.25  # share of used entries at which the table is emptied: beyond it too many keys collide
_LOW, _ROUNDS = 0.25, 5  # the table is also emptied if less than this share was right this many times in a row
_FACTOR = 6364136223846793005
_EVERY = 32  # tokens after which new ones are added
_MASK = (1 << 64) - 1


class _Table:
    def __init__(self, n: int) -> None:
        self._n = n
        self.empty()

    def empty(self) -> None:
        self._entries = np.full(_ENTRIES, -1, np.int32)
        self._used = 0
        self.epoch = getattr(self, "epoch", -1) + 1

    def _place(self, tokens: Sequence[int]) -> int:
        key = 0
        for token in tokens:
            key = (key * _FACTOR + token) & _MASK
        return key % _ENTRIES

    def get(self, tokens: Sequence[int]) -> int:
        """Return the token that followed these; -1 if unknown."""
        return int(self._entries[self._place(tokens)])

    def add(self, text: Sequence[int]) -> None:
        """Add all n-grams of a text that are followed by a token."""
        n = self._n
        if len(text) <= n:
            return
        tokens = np.asarray(text, np.int64).astype(np.uint64)
        keys = np.zeros(len(text) - n, np.uint64)
        with np.errstate(over="ignore"):
            for i in range(n):
                keys = keys * np.uint64(_FACTOR) + tokens[i : i + len(keys)]
        places = (keys % np.uint64(_ENTRIES)).astype(np.int64)
        self._used += int(np.count_nonzero(self._entries[np.unique(places)] < 0))
        self._entries[places] = np.asarray(text[n:], np.int32)
        if self._used > _FULL * _ENTRIES:
            self.empty()


class _ModDrafter(Drafter):
    def __init__(self, kind: NgramMod) -> None:
        self._kind = kind
        self.forget()

    def forget(self) -> None:
        self._added, self._epoch = 0, -1

    def propose(self, history: Sequence[int], ahead: Sequence[int], most: int) -> Proposal:
        kind, table, n = self._kind, self._kind.table, self._kind.n
        if self._epoch != table.epoch:
            self._added, self._epoch = 0, table.epoch
        if self._added + _EVERY < len(history):
            table.add(history[self._added :])
            self._added, self._epoch = max(0, len(history) - n), table.epoch
        if len(history) < n:
            return NO_PROPOSAL
        text = [*history[len(history) - n :], *ahead][-n:]
        for _ in range(kind.most):
            token = table.get(text[-n:])
            if token < 0:
                break
            text.append(token)
        tokens = text[n:]
        if len(tokens) < kind.least:
            return NO_PROPOSAL
        return Proposal(tokens[:most], [0] * min(len(tokens), most))

    def learn(self, drafted: int, accepted: int) -> None:
        self._kind.learn(drafted, accepted)


class NgramMod(DraftKind):
    """`n`: tokens of a key; drafts have between `least` and `most` tokens."""

    name = "ngram-mod"

    def __init__(self, n: int = 24, least: int = 48, most: int = 64) -> None:
        self.n, self.least, self.most = n, least, most
        self.table = _Table(n)
        self._low = 0

    def learn(self, drafted: int, accepted: int) -> None:
        """Count a proposal of any sequence; empty the table after several bad ones."""
        self._low = self._low + 1 if accepted < _LOW * drafted else 0
        if self._low >= _ROUNDS:
            self.table.empty()
            self._low = 0

    def drafter(self) -> Drafter:
        return _ModDrafter(self)
