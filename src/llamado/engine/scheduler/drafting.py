"""Several tokens per round trip: tokens that probably come next are evaluated along with the last one.

What a sequence said before it often says again (prompt-lookup decoding, Saxena 2023; llama.cpp's ngram-simple). Each
drafted token is kept only if it is the one that would have been chosen anyway, so answers are the same bytes, only
sooner. How many are worth their time follows from how often they were right lately, and from what one more token in a
batch was seen to cost: next to nothing while a batch mostly waits for networks.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

MOST = 16
"""Drafted tokens of one sequence in a batch, at most."""
_ORDERS = (3, 2, 1)  # tokens that must have been there before, in this order
_FIRST_GUESS = 0.5  # how often drafts are right before anything is known
_LEAST_GAIN = 0.02  # a drafted token must be right at least so often, whatever it costs
_MEMORY = 0.96  # of what batches cost, per batch
_TRIAL_BATCHES, _TRIAL_SECONDS = 8, 0.2  # that are counted together, at least
_PAUSE = 1.0
_TRIALS = 8  # windows after which the other way is tried again
_DOUBT = 1.2
_TRY_AGAIN = 32  # times until what seemed worse is tried again


class Drafter:
    """What one sequence said so far, and how well that foretold it."""

    def __init__(self) -> None:
        self._seen: list[dict[tuple[int, ...], int]] = [{} for _ in _ORDERS]
        self._known = 0  # tokens that are in `_seen`
        self._right = [_FIRST_GUESS for _ in _ORDERS]
        self._order = 0

    def propose(self, tokens: NDArray[np.int32], length: int, most: int, least_gain: float) -> list[int]:
        """Tokens that may follow `tokens[:length]`: at most `most`, each right with a chance above `least_gain`."""
        said: list[int] = tokens[:length].tolist()
        for end in range(self._known + 1, length):  # what ends here is followed by something
            for order, seen in zip(_ORDERS, self._seen, strict=True):
                if end >= order:
                    seen[tuple(said[end - order : end])] = end
        self._known = max(self._known, length - 1)
        for i, (order, seen) in enumerate(zip(_ORDERS, self._seen, strict=True)):
            at = seen.get(tuple(said[length - order : length])) if length > order else None
            if at is None:
                continue
            self._order = i
            chance = min(self._right[i], 0.99)
            n = int(math.log(max(least_gain, _LEAST_GAIN)) / math.log(chance)) if least_gain < chance else 0
            for k in range(min(n, most)):
                said.append(said[at + k])  # past the end it repeats what it drafted
            return said[length:]
        return []

    def forget(self) -> None:
        """The sequence was rewritten: what was said is at other places now."""
        self._seen = [{} for _ in _ORDERS]
        self._known = 0

    def learn(self, drafted: int, accepted: int) -> None:
        """Of the last draft, so many tokens were right before the first wrong one."""
        right = self._right
        for i in range(len(right)):
            # What two tokens foretell, three do as well; what three cannot, two cannot either.
            if i <= self._order and accepted:
                right[i] = 1.0 - (1.0 - right[i]) * 0.85 ** min(accepted, 4)
            if i >= self._order and accepted < drafted:
                right[i] = max(0.85 * right[i], 0.05)


class Cost:
    """What batches take: a + b × tokens seconds, fitted to the last ones, and what they yield.

    Whether drafting pays at all is seen by doing without it now and then: where devices are busy anyway, large batches
    only keep them from overlapping. All of it is learnt for each size of the company: what a token costs when one
    sequence is generated says nothing of twenty.
    """

    def __init__(self) -> None:
        self._companies: dict[int, tuple[_Fit, _Trial]] = {}

    def _company(self, n_generating: int) -> tuple[_Fit, _Trial]:
        return self._companies.setdefault(n_generating.bit_length(), (_Fit(), _Trial()))

    def note(self, n_generating: int, n_tokens: int, seconds: float, n_yielded: int, now: float) -> None:
        """A batch of `n_tokens` took `seconds` and gave `n_yielded` tokens, while so many sequences were generated."""
        fit, trial = self._company(n_generating)
        fit.note(float(n_tokens), seconds, n_yielded)
        trial.note(n_yielded, now)

    def least_gain(self, n_generating: int) -> float:
        """The chance of being right above which one more token in a batch is worth its time."""
        fit, trial = self._company(n_generating)
        return fit.least_gain() if trial.drafting else 1.0


class _Trial:
    """Tokens per second with drafts and without, measured in turns; mostly what is better is done."""

    def __init__(self) -> None:
        self.drafting = True
        self._rates: dict[bool, float] = {}
        self._skip = 0  # batches that were on their way when the way of doing it changed
        self._began = self._last = 0.0
        self._n = self._batches = self._windows = 0

    def note(self, n_yielded: int, now: float) -> None:
        pause, self._last = now - self._last, now
        if self._skip or pause > _PAUSE:  # another request began meanwhile, or a prompt was read
            self._skip = max(self._skip - 1, 0)
            self._began, self._n, self._batches = now, 0, 0
            return
        self._n += n_yielded
        self._batches += 1
        if self._batches < _TRIAL_BATCHES or now - self._began < _TRIAL_SECONDS:
            return
        rate = self._n / (now - self._began)
        self._rates[self.drafting] = 0.5 * (self._rates.get(self.drafting, rate) + rate)
        self._began, self._n, self._batches = now, 0, 0
        self._windows += 1
        # How many drafts are right is up to the text, which changes: they get the benefit of the doubt.
        with_, without = _DOUBT * self._rates.get(True, 0.0), self._rates.get(False)
        worse = without is None or (without > with_ if self.drafting else with_ > without)
        if worse or not self._windows % _TRIALS:
            self.drafting = not self.drafting
            self._skip = _TRIAL_BATCHES // 2


class _Fit:
    """Sums for a least-squares line through (tokens, seconds), older ones fading."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = self._yielded = 0.0
        self._asked = 0

    def note(self, x: float, seconds: float, n_yielded: int) -> None:
        self._n = _MEMORY * self._n + 1.0
        self._x = _MEMORY * self._x + x
        self._y = _MEMORY * self._y + seconds
        self._xx = _MEMORY * self._xx + x * x
        self._xy = _MEMORY * self._xy + x * seconds
        self._yielded = _MEMORY * self._yielded + n_yielded

    def least_gain(self) -> float:
        self._asked += 1
        if self._n < 2 or not self._y or not self._asked % _TRY_AGAIN:
            return _FIRST_GUESS / 4
        spread = self._xx - self._x * self._x / self._n
        slope = (self._xy - self._x * self._y / self._n) / spread if spread > 0.5 else 0.0
        mean = self._y / self._n
        per_token = min(max(slope, 0.01 * mean / max(self._x / self._n, 1.0)), mean)
        # The time of a token, in tokens that batches yield in that time.
        return per_token * self._yielded / self._y
