"""A head that drafts from the target's hidden states: multi-token prediction and EAGLE-3.

It reads each token of a sequence together with the target's hidden state one token before, and continues with hidden
states of its own. Tokens that it read with its own states are read again once the target's are available. If they never
are, because the target restored those tokens from a cache instead of computing them, the head's own memory of the
sequence begins behind them: its drafts are worse for some time, and answers do not change.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamado.devices.device import DeviceError
from llamado.engine.drafts.contract import Proposal
from llamado.engine.drafts.model import ChanceOf, DraftQuery, ModelDrafter, ModelKind, mark_of
from llamado.engine.forward.contract import Forward, ForwardError
from llamado.models.heads.head import Head
from llamado.models.memory import Span

log = logging.getLogger(__name__)

States = NDArray[np.float32]
_KEPT = 256
"""Hidden states of a sequence that wait to be read, approximately; they are large."""


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix in tokens."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


class HeadDrafter(ModelDrafter):
    """The tokens that a head has read of one sequence: first with the target's hidden states, then with its own."""

    def __init__(self, kind: HeadKind) -> None:
        super().__init__(kind)
        self._head = kind
        self.base = kind.first
        self.n_sure = 0
        """Tokens that were read with the target's states."""
        self.own: States | None = None
        """Its own state at the last token that it read."""
        self.states: list[States] = []
        """The target's states, of tokens from `at` on."""
        self.at = 0

    def forget(self) -> None:
        super().forget()
        self.states, self.own = [], None

    def reset(self) -> None:
        super().reset()
        self.base, self.n_sure, self.own = self._head.first, 0, None

    def take_over(self, other: ModelDrafter, history: Sequence[int]) -> None:
        """Take over tokens and hidden states of another drafter; those that this sequence does not share are replaced
        before they are used.
        """
        assert isinstance(other, HeadDrafter)
        super().take_over(other, history)
        self.n_sure = other.n_sure
        newer, at = self.states, self.at
        self.states, self.at = other.states, other.at
        if newer:
            self.add_states(at, newer)

    def add_states(self, first: int, states: Sequence[States]) -> None:
        """Add the target's hidden states of tokens from `first` on."""
        known = first - self.at
        if 0 <= known <= len(self.states):
            self.states[known:] = states
        else:
            self.states, self.at = [*states], first

    def trim(self, n: int) -> None:
        """Drop states that the first `n` tokens were read with."""
        gone = min(max(n - 1 - self.at, 0), len(self.states))
        del self.states[:gone]
        self.at += gone

    @property
    def end_of_states(self) -> int:
        """The first token whose target state is unknown."""
        return self.at + len(self.states)

    def pending(self, history: Sequence[int], ahead: Sequence[int]) -> list[int]:
        """Return the tokens to read before the next draft; empty if the target's state of one is unknown."""
        same = self._same(history, ahead)
        last = len(history) + len(ahead) - 1 - self.base
        if ahead:  # after draft tokens only its own can follow: the target's states of others are not known yet
            return [ahead[-1]] if self.own is not None and same == len(self.read) == last else []
        kept = self.base + self._go_back(min(self.n_sure, same, max(last, 0)))
        start = self._first_known_state(len(history))
        if start > len(history) - 1:
            return []
        if start > kept + 1 or start < kept == self.base:
            self._go_back(0)
            self.base = kept = start
        return [*history[kept:]]

    def _same(self, history: Sequence[int], ahead: Sequence[int]) -> int:
        """Return how many tokens that it read match the sequence, including the draft tokens."""
        n = self._agreed
        same = n + _common(self.read[n:], [*history[self.base + n :], *ahead])
        self._agreed = min(same, max(len(history) - self.base, 0))
        return same

    def _go_back(self, n: int) -> int:
        """Go back to the first `n` tokens that it read, or further if necessary."""
        assert self.handle is not None
        n = self._kind.go_back(self.handle, n)
        del self.read[n:]
        self.n_sure, self._agreed, self.own = n, min(self._agreed, n), None
        return n

    def _first_known_state(self, n: int) -> int:
        """The first token of a text of `n` tokens from which on the state before each token is known."""
        if n - 2 >= self.end_of_states:
            return n
        return self.at + 1 if self.at or self._head.first else 0

    def given(self, n: int) -> tuple[States, bool]:
        """Return the states to read the next `n` tokens with, and True if they are the target's."""
        first = self.base + len(self.read)
        if first - 1 >= self.end_of_states and self.own is not None:
            return self.own[None], False
        rows = np.zeros((n, self._head.width), np.float32)
        for i, at in enumerate(range(first - 1, first - 1 + n)):
            if self.at <= at < self.end_of_states:
                rows[i] = self.states[at - self.at]
        return rows, True


class HeadKind(ModelKind):
    """Drafts of a head, whose forward pass is `forward`."""

    def __init__(
        self,
        forward: Forward,
        n_vocab: int,
        head: Head,
        *,
        name: str,
        least: float = 0.0,
        ends: frozenset[int],
    ) -> None:
        super().__init__(forward, n_vocab, name=name, least=least, ends=ends)
        self.width, self._own_width = head.hidden_widths[0], head.hidden_widths[-1]
        self.first, self._tokens = head.first, head.tokens

    def _new_drafter(self) -> HeadDrafter:
        return HeadDrafter(self)

    def add_states(self, drafter: ModelDrafter, text: NDArray[np.int32], first: int, states: States) -> None:
        """Add the target's hidden states of the tokens from `first` on of a sequence that begins with `text`."""
        assert isinstance(drafter, HeadDrafter)
        if self.lost or (drafter.handle is None and drafter not in self._drafters):
            return
        if drafter.handle is None and not drafter.states:
            self._take_over(drafter, text.tolist())
        drafter.add_states(first, [*states])
        if len(drafter.states) <= _KEPT:
            return
        history = text[: drafter.end_of_states].tolist()
        try:
            if drafter.base + drafter.n_sure < len(history) and self._make_room(drafter, history, 0):
                self._read_all(drafter, drafter.pending(history, ()))
        except (DeviceError, ForwardError) as error:
            log.warning("draft head: disabled: %s", error)
            self.lost = True
        drafter.trim(drafter.end_of_states)

    def _add(
        self,
        query: DraftQuery,
        row: NDArray[np.float32],
        proposal: Proposal,
        confidence: list[float],
        number: int,
        chance: ChanceOf,
    ) -> int | None:
        """Draw one more token of a draft; None if none follows it. `confidence[number]`: probability that all tokens
        before it are accepted.
        """
        tokens, marks = proposal
        token, probability = self._choose(query, row, len(query.ahead) + len(tokens))
        mark = mark_of(probability)
        confidence[number] *= chance(mark)
        if confidence[number] <= query.least or probability < self._least:
            return None
        tokens.append(token)
        marks.append(mark)
        return None if len(tokens) >= query.most or token in self._ends else token

    def _read_all(self, drafter: ModelDrafter, tokens: list[int]) -> None:
        """Read tokens of a sequence whose target states are known."""
        for at in range(0, len(tokens), self._forward.max_batch):
            self._read([drafter], [tokens[at : at + self._forward.max_batch]], outputs=False)

    def _read(
        self, drafters: Sequence[ModelDrafter], pieces: Sequence[list[int]], *, outputs: bool
    ) -> NDArray[np.float32]:
        """Evaluate pieces, in separate batches for drafters with the target's states and those with their own."""
        found = np.empty((len(pieces) if outputs else 0, self._n_vocab), np.float32)
        groups: dict[bool, list[tuple[int, HeadDrafter, list[int], States]]] = {}
        for i, (drafter, tokens) in enumerate(zip(drafters, pieces, strict=True)):
            assert isinstance(drafter, HeadDrafter)
            given, sure = drafter.given(len(tokens))
            groups.setdefault(sure, []).append((i, drafter, tokens, given))
        for sure, group in groups.items():
            rows, own = self._read_group([(d, tokens, given) for _, d, tokens, given in group], outputs=outputs)
            for k, (i, drafter, tokens, _) in enumerate(group):
                assert drafter.handle is not None
                drafter.handle.used += len(tokens)
                drafter.read += tokens
                drafter.own = own[k] if outputs else None
                if sure and drafter.n_sure == len(drafter.read) - len(tokens):
                    drafter.n_sure = len(drafter.read)
                    drafter.trim(drafter.base + drafter.n_sure)
                if outputs:
                    found[i] = rows[k]
        return found

    def _read_group(
        self, group: Sequence[tuple[HeadDrafter, list[int], States]], *, outputs: bool
    ) -> tuple[NDArray[np.float32], States]:
        """Return the logits of all tokens after the last token of each piece, and the states there, if requested."""
        spans, ends, n = [], [], 0
        for drafter, tokens, _ in group:
            assert drafter.handle is not None
            spans.append(Span(drafter.handle, drafter.handle.used, len(tokens)))
            n += len(tokens)
            ends.append(n - 1)
        batch = np.array([token for _, tokens, _ in group for token in tokens], np.int32)
        given = np.concatenate([rows for _, _, rows in group])
        own = np.empty((len(group) if outputs else 0, self._own_width), np.float32)
        wanted = np.array(ends if outputs else [], np.int32)
        return self._start(batch, spans, wanted, given=given, features=own if outputs else None), own

    def _start(
        self, tokens: NDArray[np.int32], spans: Sequence[Span], outputs: NDArray[np.int32], **options: Any
    ) -> NDArray[np.float32]:
        """Run a batch; return rows of logits for all the target's tokens. `options`: see Forward.start."""
        rows = self._forward.start(tokens, spans, outputs, **options).result()
        if self._tokens is None or not len(outputs):
            return rows[:, : self._n_vocab]
        whole = np.full((len(rows), self._n_vocab), -np.inf, np.float32)
        whole[:, self._tokens] = rows
        return whole
