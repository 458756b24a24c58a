"""The samplers of a chain. Penalties and DRY, which keep tokens, have files of their own.

The semantics are those of llama.cpp's `src/llama-sampler.cpp`, with ties broken by the lower id. A candidate of logit
-inf has probability 0 and adds nothing to any sum (llama.cpp's typical sampling and Mirostat get NaN from it).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llamado.engine.sampling.candidates import HUGE, Candidates, shortest_head
from llamado.engine.sampling.candidates import top_k as largest
from llamado.engine.sampling.rng import uniform

Floats = NDArray[np.floating[Any]]

Step = Callable[[Candidates, int], None]
"""One sampler: `(candidates, position of the token in its sequence)`."""


class SamplerVocabulary(Protocol):
    """The part of a tokenizer that DRY and infill use."""

    @property
    def eos(self) -> int | None: ...

    @property
    def eot(self) -> int | None: ...

    def piece(self, token: int, *, special: bool = False) -> bytes: ...

    def decode(self, tokens: Iterable[int], *, special: bool = False) -> str: ...

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = True) -> list[int]: ...


def top_k(k: int) -> Step:
    """Keep the k largest."""
    return lambda candidates, _: candidates.keep_top(k)


def top_p(p: float, min_keep: int) -> Step:
    """Keep the fewest of the largest that together reach the probability p."""

    def step(candidates: Candidates, _: int) -> None:
        logits = candidates.logits
        if candidates.few:
            if logits[0] == -math.inf:
                return
            mass = np.exp(logits - logits[0]).cumsum()
            candidates.cut(max(int(mass.searchsorted(p * mass[-1])) + 1, min_keep))
            return
        high = logits.max()
        if high == -math.inf:
            return
        behind = high - logits
        weights = np.exp(-behind)
        target = p * float(weights.sum(dtype=np.float64))
        top, _values = largest(logits.astype(np.float32, copy=False), max(256, min_keep))
        n = max(int(weights[top].cumsum(dtype=np.float64).searchsorted(target)) + 1, min_keep)
        if n <= top.size:
            candidates.keep_top(n)
        else:
            head = shortest_head(behind, weights, target, beyond=False, min_count=min_keep)
            candidates.keep(head, min_keep=min_keep)

    return step


def min_p(p: float, min_keep: int) -> Step:
    """Keep those at least p times as probable as the largest."""
    least, log_p = max(min_keep, 1), math.log(p)

    def step(candidates: Candidates, _: int) -> None:
        logits = candidates.logits
        high = logits[0] if candidates.few else logits.max()
        floor = np.float32(high + log_p)
        if candidates.few:
            candidates.cut(max(int(np.count_nonzero(logits >= floor)), least))
            return
        places = np.flatnonzero(logits >= floor)
        if places.size < least:
            candidates.keep_top(least)
        else:
            candidates.keep(places, min_keep=least)

    return step


def _entropy(logits: Floats, high: np.floating[Any]) -> tuple[Floats, Floats, float, float]:
    """Return the weights of logits, their logarithms, the sum of the weights, and the entropy of the distribution in
    nats.
    """
    logp = logits - high
    weights = np.exp(logp)
    total = float(weights.sum(dtype=np.float64))
    # sum p·(ln total − logp): tokens of probability 0, whose logp may be -inf, add nothing
    known = float(np.sum(weights * logp, where=weights > 0, dtype=np.float64)) / total
    return weights, logp, total, math.log(total) - known


def typical(p: float, min_keep: int) -> Step:
    """Keep those whose surprise is nearest the entropy, until together they exceed the probability p."""

    def step(candidates: Candidates, _: int) -> None:
        logits = candidates.logits.astype(np.float32, copy=False)
        high = logits.max()
        if high == -math.inf:
            return
        weights, logp, total, entropy = _entropy(logits, high)
        distance = np.abs(np.float32(math.log(total) - entropy) - logp)
        head = shortest_head(distance, weights, max(p, 0.0) * total, beyond=True, min_count=min_keep)
        candidates.keep(head, min_keep=min_keep)

    return step


def top_n_sigma(n: float) -> Step:
    """Mask logits further than n standard deviations below the largest."""

    def step(candidates: Candidates, _: int) -> None:
        logits = candidates.logits
        if candidates.size <= 1:
            return
        low = logits[-1] if candidates.few else logits.min()
        finite = logits if low > -math.inf else logits[logits > -math.inf]
        if not finite.size:
            return
        apart = finite - finite.mean()
        sigma = math.sqrt(float(np.square(apart, out=apart).mean()))
        if not math.isfinite(sigma):
            return
        high = float(finite[0] if candidates.few else finite.max())
        floor = max(high - n * sigma, min(high, -HUGE))  # repeated penalties can lead below -HUGE
        places = np.flatnonzero(logits >= floor)
        if places.size < logits.size:
            candidates.keep(places, hide=True)

    return step


def xtc(probability: float, threshold: float, min_keep: int, seed: int, stream: int) -> Step:
    """With some probability, drop all candidates that reach the threshold except the least probable of them."""

    def step(candidates: Candidates, position: int) -> None:
        logits = candidates.logits
        if candidates.size < 2 or uniform(seed, position, stream) > probability:
            return
        high = logits[0] if candidates.few else logits.max()
        if high == -math.inf:
            return
        weights = np.exp(logits - high)
        enough = threshold * float(weights.sum(dtype=np.float64))
        n = int(np.count_nonzero((weights >= enough) & (logits > -math.inf))) - 1
        if n > 0 and candidates.size - n >= min_keep:
            candidates.drop_top(n)

    return step


LEAST_DIVISOR = 1e-30
"""Smallest temperature that logits are divided by."""


def _scale(candidates: Candidates, temperature: float) -> None:
    logits = candidates.logits
    if temperature <= 0:
        best = int(logits.argmax())
        candidates.keep(np.array([best]), hide=True)
    elif temperature < LEAST_DIVISOR:
        # only the largest logit is in reach; dividing would overflow
        candidates.keep(np.flatnonzero(logits == logits.max()), hide=True)
    else:
        candidates.logits = scaled = logits / logits.dtype.type(min(temperature, HUGE))
        if temperature < 1 and (scaled[0] if candidates.few else scaled.max()) > HUGE:
            np.minimum(scaled, HUGE, out=scaled)


def temperature(value: float) -> Step:
    """Divide by the temperature; at 0 or below, mask all but the largest."""
    return lambda candidates, _: _scale(candidates, value)


def dynamic_temperature(middle: float, reach: float, exponent: float) -> Step:
    """Divide by a temperature within `middle ± reach`: the higher the entropy, the higher the temperature."""
    low, high = (min(max(value, -HUGE), HUGE) for value in (max(0.0, middle - reach), middle + reach))

    def step(candidates: Candidates, _: int) -> None:
        if candidates.size <= 1:
            return
        logits = candidates.logits
        top = logits.max()
        if top == -math.inf:
            return
        entropy = _entropy(logits, top)[-1]
        evenness = max(entropy, 0.0) / math.log(candidates.size)
        try:
            share = evenness**exponent
        except (OverflowError, ZeroDivisionError):
            share = HUGE
        _scale(candidates, min(max(low + (high - low) * share, -HUGE), HUGE))

    return step


# most tokens of a vocabulary that infill compares
_MOST_TEXTS = 2048


class Infill:
    """Infill sampler: prefer to end, and merge tokens with a common beginning, for text that fills a gap.

    `eog`: ids that end an answer.
    """

    def __init__(self, vocabulary: SamplerVocabulary, eog: Iterable[int]) -> None:
        self._vocabulary = vocabulary
        self._eog = np.array(sorted(eog), np.int64)
        end = vocabulary.eot if vocabulary.eot is not None else vocabulary.eos
        self._end = end

    def __call__(self, candidates: Candidates, position: int) -> None:
        n = candidates.size
        high = candidates.logits.max()
        if high == -math.inf:
            return
        total = float(np.exp(candidates.logits - high).sum(dtype=np.float64))
        if not candidates.few:
            # the limits are 1/5 and 1/(number of texts + 1), so the least probable tokens are irrelevant
            candidates.keep_top(_MOST_TEXTS)
        ids = candidates.ids
        assert ids is not None
        probs = np.exp(candidates.logits - high) / total
        ends = np.isin(ids, self._eog)
        p_end = float(probs[ends].sum())
        if 3 * p_end * n > 1 - p_end:
            candidates.keep(np.flatnonzero(ends))
            return
        merged = self._merge(ids, probs)
        kept = np.flatnonzero((merged >= 0.2) | ends)
        n_text = kept.size - int(np.count_nonzero(ends))
        if not n_text:
            if self._end is not None and candidates.allows(self._end):
                candidates.ids, candidates.logits, candidates.hidden = np.array([self._end]), np.array([1.0]), 0
            return
        share = merged[kept] / merged[kept].sum()
        candidates.keep(kept[(share >= 1 / (n_text + 1)) | ends[kept]])

    def _merge(self, ids: NDArray[np.integer[Any]], probs: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
        """Return probabilities in which tokens whose text is a prefix of another's are merged into the more probable
        one.
        """
        pieces = [self._vocabulary.piece(token) for token in ids.tolist()]
        known = set(pieces) - {b""}
        begun: dict[bytes, list[int]] = {}  # piece → positions of the pieces that begin with it
        for place, piece in enumerate(pieces):
            for length in range(1, len(piece) + 1):
                if piece[:length] in known:
                    begun.setdefault(piece[:length], []).append(place)
        merged: list[float] = probs.tolist()
        alive = [p > 0 for p in merged]
        for first, piece in enumerate(pieces):
            for second in begun.get(piece, ()):
                if not alive[first]:
                    break
                if first == second or not alive[second]:
                    continue
                to, out = (second, first) if merged[second] > merged[first] else (first, second)
                merged[to] += merged[out]
                merged[out], alive[out] = 0.0, False
        return np.array(merged)
