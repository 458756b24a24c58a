"""Which drafted tokens go along: of several sources the one whose tokens are worth most, as many as pay."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.engine.drafts.ahead import Ahead
from llamado.engine.drafts.chances import Chances
from llamado.engine.drafts.contract import Draft, Drafter, DraftKind
from llamado.engine.drafts.cost import Cost, Windows
from llamado.engine.drafts.head import HeadKind
from llamado.engine.drafts.model import ANY, Ask, Guess, ModelDrafter, ModelKind
from llamado.engine.request import KindCounts

MOST = 64
"""Drafted tokens of one sequence in a batch, at most."""
WINDOW = 16
"""As many where several batches are on their way: what is behind them goes into the next one."""


class Followed:
    """What the sources know of one sequence."""

    __slots__ = ("ahead", "chances", "drafters", "guess", "said")

    def __init__(self, ahead: Ahead, guess: Guess, drafters: list[Drafter], chances: list[Chances]) -> None:
        self.said: list[int] = []
        self.ahead = ahead
        self.guess = guess
        self.drafters = drafters
        self.chances = chances

    def forget(self) -> None:
        """The sequence was rewritten."""
        self.said = []
        for drafter in self.drafters:
            drafter.forget()

    def trust(self) -> float:
        """How probably all that is ahead is right."""
        chance = 1.0
        for draft in self.ahead.drafts:
            chance = min(self.chances[draft.kind].all_right(draft.marks[draft.accepted :], chance), default=chance)
        return chance

    def end(self, said: list[int], n_prompt: int) -> None:
        """The answer is over."""
        for drafter in self.drafters:
            drafter.end(said, n_prompt)


class Wish(NamedTuple):
    """A sequence that has room for drafted tokens: `tokens[:length]`, and at most `most` behind those ahead.

    `place`: that of its next token among the random numbers of its request.
    """

    followed: Followed
    tokens: NDArray[np.int32]
    length: int
    most: int
    place: int


class Drafts:
    """The sources of an engine, and what was learnt of them; of the engine's thread alone.

    `most`, `least`: tokens of a draft at most, and at least (shorter ones are not evaluated).
    """

    def __init__(self, kinds: Sequence[DraftKind], *, most: int = MOST, least: int = 0) -> None:
        self.kinds = list(kinds)
        self.cost = Cost()
        self.windows = Windows()
        self._model = next((kind for kind in self.kinds if isinstance(kind, ModelKind)), None)
        self._seconds = 0.0  # that the model took since the last batch
        self._most, self._least = most, least
        self._chances = [Chances(kind.first_guess) for kind in self.kinds]
        self._counts = [[0, 0, 0] for _ in self.kinds]
        self.accepted_at = [0] * MOST
        """Drafted tokens that were right, by their place in the draft."""

    def follow(self, ahead: Ahead, guess: Guess) -> Followed:
        """A sequence begins, whose tokens on trust are `ahead`; `guess` draws as its request does."""
        drafters = [kind.drafter() for kind in self.kinds]
        return Followed(ahead, guess, drafters, [Chances(common) for common in self._chances])

    @property
    def takes_long(self) -> bool:
        """Whether a model is asked for drafts."""
        return self._model is not None

    @property
    def features_width(self) -> int:
        """Numbers of each token's hidden states that `show` is given; 0: nobody wants any."""
        return self._model.width if isinstance(self._model, HeadKind) and not self._model.lost else 0

    def show(self, followed: Followed, text: NDArray[np.int32], first: int, states: NDArray[np.float32]) -> None:
        """The sequence, which begins with `text`, was computed from token `first` on: the hidden states of these."""
        if isinstance(self._model, HeadKind):
            drafter = followed.drafters[self.kinds.index(self._model)]
            assert isinstance(drafter, ModelDrafter)
            self._model.show(drafter, text, first, states)

    def propose(
        self, wishes: Sequence[Wish], n_generating: int, *, overlaps: bool = False, waiting: bool = False
    ) -> list[Draft | None]:
        """For each sequence what is worth evaluating, while so many are being generated; it counts as on its way.

        `overlaps`: whether more can be sent behind it before it is known; `waiting`: whether there is nothing else to
        do until what is on its way is known.
        """
        if not wishes or not self.cost.drafts(n_generating):
            return [None] * len(wishes)
        least_gain = self.cost.least_gain(n_generating)
        found = [self._best(wish, least_gain) for wish in wishes]
        if self._model is not None and not self._model.lost:
            short = overlaps and not self._model.at_once
            most = min(self._most, self.windows.length) if short else self._most
            found = self._ask_model(self._model, wishes, found, n_generating, least_gain, most, waiting)
        for wish, (draft, _) in zip(wishes, found, strict=True):
            if draft is not None:
                wish.followed.ahead.add(draft)
                counts = self._counts[draft.kind]
                counts[0] += 1
                counts[1] += len(draft.tokens)
        return [draft for draft, _ in found]

    def _best(self, wish: Wish, least_gain: float) -> tuple[Draft | None, float]:
        """The best draft that costs nothing to make, and what it is worth."""
        followed = wish.followed
        said = followed.said
        said.extend(wish.tokens[len(said) : wish.length].tolist())
        ahead = followed.ahead.tokens
        trust = followed.trust()
        most = min(wish.most, self._most)
        best, most_worth = None, 0.0
        for i, drafter in enumerate(followed.drafters):
            proposal = drafter.propose(said, ahead, most)
            n, worth = _worth(followed.chances[i].all_right(proposal.marks, trust), least_gain)
            if n >= max(self._least, 1) and worth > most_worth:
                best, most_worth = Draft(i, proposal.tokens[:n], proposal.marks[:n]), worth
        return best, most_worth

    def _ask_model(
        self,
        model: ModelKind,
        wishes: Sequence[Wish],
        found: list[tuple[Draft | None, float]],
        n_generating: int,
        least: float,
        n: int,
        waiting: bool,
    ) -> list[tuple[Draft | None, float]]:
        """The same with drafts of the model, of at most `n` tokens, where they are probably worth more, and their time.

        `least`: the chance of being right above which a token is worth being evaluated.
        """
        number = self.kinds.index(model)
        least_next = least
        if not waiting:
            least_next = max(least, self.cost.least_gain(n_generating, model.seconds(len(wishes))))
        asks, which = [], []
        for i, (wish, (_, worth)) in enumerate(zip(wishes, found, strict=True)):
            followed, most = wish.followed, min(wish.most, self._most)
            drafter, chances, trust = followed.drafters[number], followed.chances[number], followed.trust()
            assert isinstance(drafter, ModelDrafter)
            expected = _worth(chances.all_right([ANY] * most, trust), least_next)[1]
            if expected <= worth and (worth or trust < 1.0 or not drafter.pass_over()):
                continue
            ahead, guess = followed.ahead.tokens, followed.guess
            most = min(most, n)
            asks.append(Ask(drafter, followed.said, ahead, most, guess, wish.place, least, least_next, trust))
            which.append(i)
        if not asks:
            return found
        began = time.perf_counter()
        proposals = model.propose(asks, [wishes[i].followed.chances[number].of for i in which])
        self._seconds += time.perf_counter() - began
        for i, (tokens, marks) in zip(which, proposals, strict=True):
            if len(tokens) >= max(self._least, 1):
                found[i] = Draft(number, tokens, marks), 0.0
        return found

    def note(
        self, n_generating: int, n_tokens: int, seconds: float, n_yielded: int, now: float, *, overlaps: bool = False
    ) -> None:
        """See Cost.note; `overlaps`: see `propose`."""
        self.cost.note(n_generating, n_tokens, seconds, n_yielded, now, self._seconds)
        self._seconds = 0.0
        if overlaps:
            self.windows.note(seconds)

    def learn(self, followed: Followed) -> None:
        """From what turned out of the tokens ahead of a sequence."""
        judged = followed.ahead.judged
        for draft, place, right in judged:
            followed.chances[draft.kind].note(draft.marks[place], right)
            if self.kinds[draft.kind] is self._model:
                followed.chances[draft.kind].note(ANY, right)
            if right:
                self._counts[draft.kind][2] += 1
                self.accepted_at[place] += 1
            if not right or place + 1 == len(draft.tokens):
                followed.drafters[draft.kind].learn(len(draft.tokens), place + right)
        judged.clear()

    @property
    def counts(self) -> tuple[KindCounts, ...]:
        """What became of the drafts of each kind so far."""
        return tuple(KindCounts(kind.name, *n) for kind, n in zip(self.kinds, self._counts, strict=True))


def _worth(chances: Iterable[float], least_gain: float) -> tuple[int, float]:
    """How many tokens of these chances are worth their time, and how much more than it they are worth, in tokens."""
    n, worth = 0, 0.0
    for chance in chances:
        if chance <= least_gain:
            break
        n += 1
        worth += chance - least_gain
    return n, worth
