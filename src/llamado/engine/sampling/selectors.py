"""The last step of a chain: choose one of the remaining candidates.

`choose` returns the position among the candidates and the weights it was drawn by. `accept` is called with the chosen
token, `forced` if there was no choice. A chooser's state depends only on the accepted tokens.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llamado.engine.sampling.candidates import HUGE, Candidates, top_k

Weights = NDArray[np.floating[Any]]


class Chooser(Protocol):
    """Chooses a token; `u` is a random number in [0, 1)."""

    def choose(self, candidates: Candidates, u: float) -> tuple[int, Weights]: ...

    def forced(self, token: int) -> None: ...

    def accept(self, token: int) -> None: ...


def _draw(weights: Weights, u: float) -> int:
    mass = weights.cumsum(dtype=np.float64)
    return int(mass.searchsorted(u * mass[-1], side="right"))


def _weights(candidates: Candidates) -> Weights:
    logits = candidates.logits
    high = logits[0] if candidates.few else logits.max()
    weights: Weights = np.exp(logits - high)
    return weights


class Draw:
    """Draws by probability."""

    def choose(self, candidates: Candidates, u: float) -> tuple[int, Weights]:
        weights = _weights(candidates)
        return _draw(weights, u), weights

    def forced(self, token: int) -> None:
        pass

    def accept(self, token: int) -> None:
        pass


class Mirostat:
    """Mirostat 1 and 2 (Basu et al. 2021): cuts so that the tokens' average surprise, in bits, approaches `tau`."""

    def __init__(self, version: int, tau: float, eta: float, n_vocab: int) -> None:
        self._version = version
        self._tau, self._eta = tau, eta
        self._n_vocab = n_vocab
        self._mu = 2 * tau
        self._pending: tuple[int, float] | None = None  # a token and its surprise

    def choose(self, candidates: Candidates, u: float) -> tuple[int, Weights]:
        if self._version == 1:
            self._cut_by_rank(candidates)
        else:
            self._cut_by_surprise(candidates)
        weights = _weights(candidates)
        place = _draw(weights, u)
        surprise = -math.log2(float(weights[place]) / float(weights.sum(dtype=np.float64)))
        self._pending = candidates.id_at(place), surprise
        return place, weights

    def forced(self, token: int) -> None:
        self._pending = token, 0.0

    def accept(self, token: int) -> None:
        if self._pending is not None and self._pending[0] == token:
            mu = self._mu - self._eta * (self._pending[1] - self._tau)
            self._mu = min(max(mu, -HUGE), HUGE)
        self._pending = None

    def _cut_by_rank(self, candidates: Candidates) -> None:
        """Version 1: keep as many as Zipf's law, fitted to the 100 most probable, predicts."""
        few = candidates.logits
        if not candidates.few:
            _, few = top_k(candidates.logits.astype(np.float32, copy=False), 100)
        few = few[:100].astype(np.float64)
        few = few[few > -math.inf]
        ranks = np.arange(1, few.size)
        t = np.log((ranks + 1) / ranks)
        squares = float((t * t).sum())
        exponent = float((t * -np.diff(few)).sum()) / squares if squares else math.nan
        candidates.keep_top(max(1, min(self._rank(exponent), candidates.logits.size)))

    def _rank(self, exponent: float) -> int:
        excess = exponent - 1
        try:
            k = (excess * 2.0**self._mu / (1 - self._n_vocab**-excess)) ** (1 / exponent)
        except (OverflowError, ZeroDivisionError):
            # an even distribution, or one that falls exactly like 1/rank
            return 1
        return int(min(k, float(self._n_vocab))) if k > 1 else 1

    def _cut_by_surprise(self, candidates: Candidates) -> None:
        """Version 2: keep all whose surprise is at most mu, at least one."""
        logits = candidates.logits
        high = float(logits[0] if candidates.few else logits.max())
        total = float(np.exp(logits - logits.dtype.type(high)).sum(dtype=np.float64))
        floor = high + math.log(total) - self._mu * math.log(2)
        if candidates.few:
            candidates.cut(max(1, int(np.count_nonzero(logits >= floor))))
            return
        places = np.flatnonzero(logits >= floor)
        if places.size:
            candidates.keep(places)
        else:
            candidates.keep_top(1)


class AdaptiveP:
    """adaptive-p: prefers tokens near a probability, so that the chosen tokens' average approaches `target`."""

    # shape of the preference: quadratic near the aim, linear far from it
    WIDTH, PEAK, SHARPNESS = 0.3, 5.0, 10.0

    def __init__(self, target: float, decay: float) -> None:
        self._target = target
        decay = self._decay = min(max(decay, 0.0), 0.99)
        # the averages begin as if all earlier tokens had been on target
        self._sum, self._count = target / (1 - decay), 1 / (1 - decay)
        self._pending: tuple[int, float] | None = None  # a token and its probability

    def choose(self, candidates: Candidates, u: float) -> tuple[int, Weights]:
        weights = _weights(candidates)
        if self._target < 0:
            return _draw(weights, u), weights
        probs = weights / float(weights.sum(dtype=np.float64))
        target = min(self._target, 1.0)
        aim = min(max(2 * target - self._sum / self._count, 0.0), 1.0)
        far = np.abs(probs - aim) / self.WIDTH
        preferred = self.PEAK - self.SHARPNESS * far * far / (1 + far)
        preferred[candidates.logits == -math.inf] = -math.inf
        weights = np.exp(preferred - preferred.max())
        place = _draw(weights, u)
        self._pending = candidates.id_at(place), float(probs[place])
        return place, weights

    def forced(self, token: int) -> None:
        self._pending = token, 1.0

    def accept(self, token: int) -> None:
        if self._target >= 0 and self._pending is not None and self._pending[0] == token:
            self._sum = self._pending[1] + self._decay * self._sum
            self._count = 1 + self._decay * self._count
        self._pending = None
