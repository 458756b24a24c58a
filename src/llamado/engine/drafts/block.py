"""A head that drafts a block of tokens at once: DFlash.

It reads the target's hidden states as other heads do. A draft takes one more forward pass: of the last token,
and of mask tokens behind it, of which nothing is kept.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.engine.drafts.contract import Proposal
from llamado.engine.drafts.head import HeadKind
from llamado.engine.drafts.model import Ask, ChanceOf, mark_of
from llamado.engine.forward.contract import Forward
from llamado.models.heads.dflash import DFlashHead
from llamado.models.memory import Span


class _Places(NamedTuple):
    """Which of those that ask it is for, and its places."""

    number: int
    ask: Ask
    n: int


class BlockKind(HeadKind):
    """Drafts of a DFlash head, whose forward pass is `forward`; see ModelKind."""

    at_once = True

    def __init__(
        self,
        forward: Forward,
        n_vocab: int,
        head: DFlashHead,
        *,
        name: str,
        least: float = 0.0,
        ends: frozenset[int],
    ) -> None:
        super().__init__(forward, n_vocab, head, name=name, least=least, ends=ends)
        self._n_block, self._mask = head.n_block, head.mask

    def _propose(self, asks: Sequence[Ask], chance: Sequence[ChanceOf]) -> list[Proposal]:
        found = [Proposal([], []) for _ in asks]
        blocks = []
        for i, ask in enumerate(asks):
            n = min(self._n_block, ask.most + 1, self._forward.max_batch)
            if ask.ahead or n < 2 or not self._make_room(ask.drafter, ask.said, self._n_block):
                continue  # of tokens ahead there are no hidden states yet
            tokens = ask.drafter.pending(ask.said, ())
            if tokens and max(ask.said[-1], *tokens) < self._forward.n_vocab:
                self._read_all(ask.drafter, tokens)
                blocks.append(_Places(i, ask, n))
        while blocks:
            n_together = max(self._forward.max_batch // self._n_block, 1)
            self._draft(blocks[:n_together], found, chance)
            del blocks[:n_together]
        return found

    def _draft(self, blocks: Sequence[_Places], found: list[Proposal], chance: Sequence[ChanceOf]) -> None:
        began = time.perf_counter()
        spans: list[Span] = []
        tokens: list[int] = []
        wanted: list[int] = []
        for _, ask, n in blocks:
            handle = ask.drafter.handle
            assert handle is not None
            spans.append(Span(handle, handle.used, n))
            wanted += range(len(tokens) + 1, len(tokens) + n)
            tokens += [ask.said[-1], *[self._mask] * (n - 1)]
        rows = self._start(np.array(tokens, np.int32), spans, np.array(wanted, np.int32))
        at = 0
        for i, ask, n in blocks:
            self._choose_all(ask, rows[at : at + n - 1], found[i], chance[i])
            at += n - 1
        seconds = (time.perf_counter() - began) / max(n for _, _, n in blocks)
        self._seconds = 0.9 * self._seconds + 0.1 * seconds if self._seconds else seconds

    def _choose_all(self, ask: Ask, rows: NDArray[np.float32], proposal: Proposal, chance: ChanceOf) -> None:
        """Draws the tokens of a block, as long as they are worth it."""
        trust, (tokens, marks) = ask.trust, proposal
        for row in rows:
            token, probability = self._choose(ask, row, len(tokens))
            mark = mark_of(probability)
            trust *= chance(mark)
            if trust <= ask.least or probability < self._least:
                break
            tokens.append(token)
            marks.append(mark)
            if token in self._ends:
                break
