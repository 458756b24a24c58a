"""The choice of drafts: of several sources the most valuable draft, and as many of its tokens as are worth
their time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.engine.drafts.acceptance import AcceptanceRates
from llamado.engine.drafts.contract import Draft, Drafter, DraftKind
from llamado.engine.drafts.cost import Cost, DraftWindow
from llamado.engine.drafts.head import HeadKind
from llamado.engine.drafts.model import ANY, DraftQuery, ModelDrafter, ModelKind, TokenSampler
from llamado.engine.drafts.pending_draft import PendingDraft
from llamado.engine.media.spans import text_tokens
from llamado.engine.request import KindCounts

log = logging.getLogger(__name__)

MOST = 64
"""Most draft tokens of one sequence in a batch."""
WINDOW = 16
"""Most draft tokens with several batches in flight: later tokens go into the next batch."""


class DraftState:
    """Draft state of one sequence: each source's drafter and acceptance rates.

    `history` is its text. Models do not draft for a sequence with `media`, which they cannot see.
    """

    __slots__ = ("ahead", "chances", "drafters", "guess", "history", "media", "n_seen")

    def __init__(
        self,
        ahead: PendingDraft,
        guess: TokenSampler,
        drafters: list[Drafter],
        chances: list[AcceptanceRates],
        media: bool = False,
    ) -> None:
        self.media = media
        self.history: list[int] = []
        self.n_seen = 0
        self.ahead = ahead
        self.guess = guess
        self.drafters = drafters
        self.chances = chances

    def forget(self) -> None:
        """Reset after the sequence was rewritten."""
        self.history, self.n_seen = [], 0
        for drafter in self.drafters:
            drafter.forget()

    def confidence(self) -> float:
        """Return the probability that all draft tokens in flight are accepted."""
        chance = 1.0
        for draft in self.ahead.drafts:
            chance = min(self.chances[draft.kind].all_accepted(draft.marks[draft.accepted :], chance), default=chance)
        return chance

    def end(self, history: list[int], n_prompt: int) -> None:
        """End the answer."""
        for drafter in self.drafters:
            drafter.end(history, n_prompt)


class DraftRequest(NamedTuple):
    """A sequence with room for draft tokens: its tokens are `tokens[:length]`, and at most `most` may follow those in
    flight.

    `place`: index of its next token in the request's random numbers.
    """

    draft_state: DraftState
    tokens: NDArray[np.int32]
    length: int
    most: int
    place: int


class DraftManager:
    """The draft sources of an engine, and what was learned of them. Only the engine's thread uses it.

    `most`, `least`: most tokens of a draft, and least (shorter drafts are not evaluated).
    """

    def __init__(self, kinds: Sequence[DraftKind], *, most: int = MOST, least: int = 0) -> None:
        self.kinds = list(kinds)
        self.cost = Cost()
        self.windows = DraftWindow()
        self._model = next((kind for kind in self.kinds if isinstance(kind, ModelKind)), None)
        self._seconds = 0.0  # seconds that the model took since the last batch
        self._most, self._least = most, least
        self._logged = False
        self._chances = [AcceptanceRates(kind.first_guess) for kind in self.kinds]
        self._counts = [[0, 0, 0] for _ in self.kinds]
        self.accepted_at = [0] * MOST
        """Accepted draft tokens by position in their draft."""

    def follow(self, ahead: PendingDraft, guess: TokenSampler, *, media: bool = False) -> DraftState:
        """Begin a sequence with draft tokens `ahead`; `guess` samples like its request. `media`: it has pictures or
        sounds.
        """
        if media and self._model is not None and not self._logged:
            self._logged = True
            log.debug("%s does not draft for prompts with media", self._model.name)
        drafters = [kind.drafter() for kind in self.kinds]
        return DraftState(ahead, guess, drafters, [AcceptanceRates(common) for common in self._chances], media)

    @property
    def takes_long(self) -> bool:
        """True if a model drafts."""
        return self._model is not None

    @property
    def features_width(self) -> int:
        """Width of the hidden states that `add_states` takes; 0: none are needed."""
        return self._model.width if isinstance(self._model, HeadKind) and not self._model.lost else 0

    def add_states(
        self, draft_state: DraftState, text: NDArray[np.int32], first: int, states: NDArray[np.float32]
    ) -> None:
        """Pass hidden states to the draft head: those of the tokens from `first` on of the sequence that begins with
        `text`.
        """
        if isinstance(self._model, HeadKind):
            drafter = draft_state.drafters[self.kinds.index(self._model)]
            assert isinstance(drafter, ModelDrafter)
            self._model.add_states(drafter, text, first, states)

    def propose(
        self, requests: Sequence[DraftRequest], n_generating: int, *, overlaps: bool = False, waiting: bool = False
    ) -> list[Draft | None]:
        """Return for each sequence the draft worth evaluating, with `n_generating` sequences. It counts as in flight.

        `overlaps`: more tokens can be sent before its result is known. `waiting`: there is no other work until the
        results in flight arrive.
        """
        if not requests or not self.cost.drafts(n_generating):
            return [None] * len(requests)
        least_gain = self.cost.least_gain(n_generating)
        found = [self._best(request, least_gain) for request in requests]
        if self._model is not None and not self._model.lost:
            short = overlaps and not self._model.at_once
            most = min(self._most, self.windows.length) if short else self._most
            found = self._query_model(self._model, requests, found, n_generating, least_gain, most, waiting)
        for request, (draft, _) in zip(requests, found, strict=True):
            if draft is not None:
                request.draft_state.ahead.add(draft)
                counts = self._counts[draft.kind]
                counts[0] += 1
                counts[1] += len(draft.tokens)
        return [draft for draft, _ in found]

    def _best(self, request: DraftRequest, least_gain: float) -> tuple[Draft | None, float]:
        """Return the best draft among those that cost nothing to make, and its value."""
        draft_state = request.draft_state
        history = draft_state.history
        history.extend(text_tokens(request.tokens[draft_state.n_seen : request.length].tolist()))
        draft_state.n_seen = request.length
        ahead = draft_state.ahead.tokens
        confidence = draft_state.confidence()
        most = min(request.most, self._most)
        best, most_worth = None, 0.0
        for i, drafter in enumerate(draft_state.drafters):
            proposal = drafter.propose(history, ahead, most)
            n, worth = _worth(draft_state.chances[i].all_accepted(proposal.marks, confidence), least_gain)
            if n >= max(self._least, 1) and worth > most_worth:
                best, most_worth = Draft(i, proposal.tokens[:n], proposal.marks[:n]), worth
        return best, most_worth

    def _query_model(
        self,
        model: ModelKind,
        requests: Sequence[DraftRequest],
        found: list[tuple[Draft | None, float]],
        n_generating: int,
        least: float,
        n: int,
        waiting: bool,
    ) -> list[tuple[Draft | None, float]]:
        """Replace drafts by those of the model, of at most `n` tokens, if these are probably worth more, including
        their time.

        `least`: the acceptance probability above which a token is worth evaluating.
        """
        number = self.kinds.index(model)
        least_next = least
        if not waiting:
            least_next = max(least, self.cost.least_gain(n_generating, model.seconds(len(requests))))
        queries, which = [], []
        for i, (request, (_, worth)) in enumerate(zip(requests, found, strict=True)):
            draft_state, most = request.draft_state, min(request.most, self._most)
            if draft_state.media:
                continue
            drafter, chances = draft_state.drafters[number], draft_state.chances[number]
            confidence = draft_state.confidence()
            assert isinstance(drafter, ModelDrafter)
            expected = _worth(chances.all_accepted([ANY] * most, confidence), least_next)[1]
            if expected <= worth and (worth or confidence < 1.0 or not drafter.pass_over()):
                continue
            ahead, guess = draft_state.ahead.tokens, draft_state.guess
            most = min(most, n)
            queries.append(
                DraftQuery(
                    drafter, draft_state.history, ahead, most, guess, request.place, least, least_next, confidence
                )
            )
            which.append(i)
        if not queries:
            return found
        began = time.perf_counter()
        proposals = model.propose(queries, [requests[i].draft_state.chances[number].of for i in which])
        self._seconds += time.perf_counter() - began
        for i, (tokens, marks) in zip(which, proposals, strict=True):
            if len(tokens) >= max(self._least, 1):
                found[i] = Draft(number, tokens, marks), 0.0
        return found

    def note(
        self, n_generating: int, n_tokens: int, seconds: float, n_yielded: int, now: float, *, overlaps: bool = False
    ) -> None:
        """Record a batch, like Cost.note; `overlaps`: see `propose`."""
        self.cost.note(n_generating, n_tokens, seconds, n_yielded, now, self._seconds)
        self._seconds = 0.0
        if overlaps:
            self.windows.note(seconds)

    def learn(self, draft_state: DraftState) -> None:
        """Learn from the results of a sequence's draft tokens."""
        judged = draft_state.ahead.judged
        for draft, place, right in judged:
            draft_state.chances[draft.kind].note(draft.marks[place], right)
            if self.kinds[draft.kind] is self._model:
                draft_state.chances[draft.kind].note(ANY, right)
            if right:
                self._counts[draft.kind][2] += 1
                self.accepted_at[place] += 1
        judged.clear()

    @property
    def counts(self) -> tuple[KindCounts, ...]:
        """Counts of drafts, draft tokens and accepted tokens of each source."""
        return tuple(KindCounts(kind.name, *n) for kind, n in zip(self.kinds, self._counts, strict=True))


def _worth(chances: Iterable[float], least_gain: float) -> tuple[int, float]:
    """Return the number of tokens with these probabilities that are worth their time, and their value beyond it, in
    tokens.
    """
    n, worth = 0, 0.0
    for chance in chances:
        if chance <= least_gain:
            break
        n += 1
        worth += chance - least_gain
    return n, worth
