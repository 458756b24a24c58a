"""llama.cpp's repeat, frequency and presence penalties for tokens that occurred before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from llamado.engine.sampling.candidates import HUGE, Candidates, Ids
from llamado.engine.sampling.params import Sampling


class Penalties:
    """Counts of the last tokens of one sequence, including the prompt. As a step it lowers those tokens' logits."""

    def __init__(self, sampling: Sampling) -> None:
        self._repeat = sampling.repeat_penalty
        self._frequency = sampling.frequency_penalty
        self._presence = sampling.presence_penalty
        self._extreme = abs(self._frequency) + abs(self._presence) > 1e20
        self._last_n = sampling.repeat_last_n
        self._recent: list[int] = []  # the window at its end, sometimes more; empty if the window is unlimited
        self._places: dict[int, int] = {}
        self._n = 0
        self._tokens = np.empty(0, np.int64)
        self._counts = np.empty(0, np.float64)
        self._n_left = 0  # number of counts that are 0 because their tokens left the window

    def start(self, tokens: Sequence[int]) -> None:
        """Begin a sequence with these tokens."""
        recent = list(tokens if self._last_n < 0 else tokens[-self._last_n :])
        self._recent = [] if self._last_n < 0 else recent
        self._index(Counter(recent))

    def accept(self, token: int) -> None:
        """Record the next token."""
        self._add(token)
        if self._last_n < 0:
            return
        recent = self._recent
        recent.append(token)
        if len(recent) > self._last_n:
            gone = self._places[recent[-self._last_n - 1]]
            self._counts[gone] -= 1
            if not self._counts[gone]:
                self._n_left += 1
            if len(recent) > 2 * self._last_n + 256:
                del recent[: -self._last_n]
                self._index(Counter(recent))

    def __call__(self, candidates: Candidates, position: int) -> None:
        tokens: Ids = self._tokens[: self._n]
        counts = self._counts[: self._n]
        if self._n_left:
            present = counts > 0
            tokens, counts = tokens[present], counts[present]
        if not tokens.size:
            return
        repeat, lowered = self._repeat, counts * self._frequency + self._presence
        if self._extreme:
            lowered = np.clip(lowered, -HUGE, HUGE)
        candidates.change(tokens, lambda own, which: np.where(own <= 0, own * repeat, own / repeat) - lowered[which])

    def _add(self, token: int) -> None:
        place = self._places.get(token)
        if place is None:
            place = self._places[token] = self._n
            if place == self._tokens.size:
                self._tokens = np.concatenate((self._tokens, np.zeros(place + 64, np.int64)))
                self._counts = np.concatenate((self._counts, np.zeros(place + 64)))
            self._tokens[place] = token
            self._counts[place] = 0
            self._n_left += 1
            self._n += 1
        if not self._counts[place]:
            self._n_left -= 1
        self._counts[place] += 1

    def _index(self, counts: Counter[int]) -> None:
        self._places = {token: place for place, token in enumerate(counts)}
        self._n = len(counts)
        self._n_left = 0
        self._tokens = np.array([*counts, *[0] * 64], np.int64)
        self._counts = np.array([*counts.values(), *[0] * 64], np.float64)
