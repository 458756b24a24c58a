"""Draft heads with a fixed number of tokens: DFlash drafts a block at once, chained heads one token each.

They read the target's hidden states like other heads. Their memory of draft tokens is discarded.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from llamado.engine.drafts.contract import Proposal
from llamado.engine.drafts.head import HeadDrafter, HeadKind, States
from llamado.engine.drafts.model import ChanceOf, DraftQuery
from llamado.engine.forward.contract import Forward
from llamado.models.heads.dflash import DFlashHead
from llamado.models.heads.next_token import NextTokenHead
from llamado.models.memory import Span


class _Places(NamedTuple):
    """The positions of one block: number of its query, the query, and the number of positions."""

    number: int
    query: DraftQuery
    n: int


class BlockKind(HeadKind):
    """Drafts of a DFlash head, whose forward pass is `forward`."""

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

    def _propose(self, queries: Sequence[DraftQuery], chance: Sequence[ChanceOf]) -> list[Proposal]:
        found = [Proposal([], []) for _ in queries]
        blocks = []
        for i, query in enumerate(queries):
            n = min(self._n_block, query.most + 1, self._forward.max_batch)
            if query.ahead or n < 2 or not self._make_room(query.drafter, query.history, self._n_block):
                continue  # draft tokens in flight have no hidden states yet
            tokens = query.drafter.pending(query.history, ())
            if tokens and max(query.history[-1], *tokens) < self._forward.n_vocab:
                self._read_all(query.drafter, tokens)
                blocks.append(_Places(i, query, n))
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
        for _, query, n in blocks:
            handle = query.drafter.handle
            assert handle is not None
            spans.append(Span(handle, handle.used, n))
            wanted += range(len(tokens) + 1, len(tokens) + n)
            tokens += [query.history[-1], *[self._mask] * (n - 1)]
        rows = self._start(np.array(tokens, np.int32), spans, np.array(wanted, np.int32))
        at = 0
        for i, query, n in blocks:
            confidence = [query.confidence]
            for row in rows[at : at + n - 1]:
                if self._add(query, row, found[i], confidence, 0, chance[i]) is None:
                    break
            at += n - 1
        seconds = (time.perf_counter() - began) / max(n for _, _, n in blocks)
        self._seconds = 0.9 * self._seconds + 0.1 * seconds if self._seconds else seconds


class ChainKind(HeadKind):
    """Drafts of `head`'s chained stages, whose forward pass is `forward`; see ModelKind.

    All stages read the target's hidden states. A later stage also reads the tokens drafted before it, each with the
    state that the stage before it computed there.
    """

    def __init__(
        self,
        forward: Forward,
        n_vocab: int,
        head: NextTokenHead,
        *,
        name: str,
        least: float = 0.0,
        ends: frozenset[int],
    ) -> None:
        super().__init__(forward, n_vocab, head, name=name, least=least, ends=ends)
        self._n_stages = head.n_stages

    def _propose(self, queries: Sequence[DraftQuery], chance: Sequence[ChanceOf]) -> list[Proposal]:
        found = [Proposal([], []) for _ in queries]
        confidence = [query.confidence for query in queries]
        ready: dict[int, int] = {}  # the last token of each
        for i, query in enumerate(queries):
            if query.ahead or not self._make_room(query.drafter, query.history, self._n_stages):
                continue  # draft tokens in flight have no hidden states yet
            tokens = query.drafter.pending(query.history, ())
            if tokens and max(tokens) < self._forward.n_vocab:
                self._read_all(query.drafter, tokens[:-1])
                ready[i] = tokens[-1]
        states: dict[int, list[States]] = {i: [] for i in ready}
        for stage in range(self._n_stages):
            which = list(ready)[: self._forward.max_batch // self._n_stages or 1]
            if not which:
                break
            began = time.perf_counter()
            if stage == 0:
                rows = self._read([queries[i].drafter for i in which], [[ready[i]] for i in which], outputs=True)
                for i in which:
                    drafter = queries[i].drafter
                    assert isinstance(drafter, HeadDrafter) and drafter.own is not None
                    states[i].append(drafter.own)
            else:
                rows = self._run_stage([(queries[i], found[i].tokens, states[i]) for i in which], stage)
            ready = {
                i: token
                for i, row in zip(which, rows, strict=True)
                if (token := self._add(queries[i], row, found[i], confidence, i, chance[i])) is not None
            }
            seconds = time.perf_counter() - began
            self._seconds = 0.9 * self._seconds + 0.1 * seconds if self._seconds else seconds
        return found

    def _run_stage(self, those: Sequence[tuple[DraftQuery, list[int], list[States]]], stage: int) -> States:
        """Run the next stage on the drafted tokens and return the logits after the last token of each. Nothing
        is kept.
        """
        spans, wanted, n = [], [], 0
        for query, tokens, _ in those:
            handle = query.drafter.handle
            assert handle is not None
            spans.append(Span(handle, handle.used, len(tokens)))
            n += len(tokens)
            wanted.append(n - 1)
        batch = np.array([token for _, tokens, _ in those for token in tokens], np.int32)
        given = np.concatenate([np.array(states) for _, _, states in those])
        own = np.empty((len(those), self._own_width), np.float32)
        rows = self._start(batch, spans, np.array(wanted, np.int32), given=given, features=own, stage=stage)
        for (_, _, states), state in zip(those, own, strict=True):
            states.append(state)
        return rows
