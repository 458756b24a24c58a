"""From one row of logits to one token: llama.cpp's sampler chain.

The semantics of each sampler are those of llama.cpp's `src/llama-sampler.cpp`, in its default order: logit bias,
penalties, top-k, typical, top-p, min-p, temperature, and a draw from what is left. Two things differ on purpose:

- ties are broken by the lower token id, so that a result never depends on how a sort happened to run;
- the random number of a token is a pure function of the request's seed and the token's position in its sequence, so
  neither neighbours in the batch, nor a restart in the middle of an answer, nor a discarded draft can shift it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from llamado.engine.constraint import Matcher
from llamado.engine.errors import ComputeFailed
from llamado.engine.request import Sampling

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]

TopK = Callable[[F32, int], tuple[I32, F32]]
"""`(row of logits, k)` → ids and logits of the k largest, descending, equal logits by lower id."""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E37_79B9_7F4A_7C15


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58_476D_1CE4_E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D0_49BB_1331_11EB) & _MASK
    return z ^ (z >> 31)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing but its arguments (splitmix64 read at index `position`)."""
    key = _mix((seed + _GOLDEN) & _MASK)
    return (_mix((key + (position + 1) * _GOLDEN) & _MASK) >> 11) * 2.0**-53


def top_k_numpy(logits: F32, k: int) -> tuple[I32, F32]:
    """TopK in numpy: about 0.15 ms for k = 40 of 262,144."""
    n = logits.size
    k = min(k, n)
    ids: NDArray[np.intp] | None = None
    # Any k values of the row bound the k-th largest from below, so the k-th largest of a sample lets most of the row
    # be dropped by one comparison.
    stride = n // max(8 * k, 2048)
    if stride >= 4:
        sample = np.sort(logits[::stride])
        bound = sample[-k]
        ids = np.flatnonzero(logits >= bound)
        if ids.size < k:  # NaN among the logits
            ids = None
    values = logits if ids is None else logits[ids]
    if values.size > k:
        kth = np.partition(values, values.size - k)[values.size - k]
        above = np.flatnonzero(values > kth)
        level = np.flatnonzero(values == kth)[: k - above.size]
        chosen = np.sort(np.concatenate((above, level)))
        values = values[chosen]
        ids = chosen if ids is None else ids[chosen]
    elif ids is None:
        ids = np.arange(n)
    # Ids ascend here, so a stable sort breaks ties by lower id.
    order = np.argsort(-values, kind="stable")
    return ids[order].astype(np.int32), values[order]


def log_softmax_top(logits: F32, n: int, token: int, top_k: TopK) -> tuple[float, list[tuple[int, float]]]:
    """Log-probability of `token` and the `n` most likely `(id, log-probability)` over all logits of a row."""
    high = float(logits.max())
    log_total = high + math.log(float(np.exp(logits - np.float32(high)).sum(dtype=np.float64)))
    ids, values = top_k(logits, n)
    top = [(int(i), float(v) - log_total) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]
    return float(logits[token]) - log_total, top


# How many candidates are few enough to be kept sorted.
_FEW = 1024


def _head(key: F32, weights: F32, target: float, *, beyond: bool, min_count: int) -> NDArray[np.intp]:
    """Positions, ascending, of the shortest head of `key` in ascending order whose weights reach `target`.

    `beyond`: the sum must exceed the target. Equal keys count by lower position. `key` is 0 or more. Only the bucket
    in which the target falls is sorted: sorting a whole vocabulary takes ten times as long.
    """
    n_buckets = 4096
    # Weights fall like exp(-key) or lie around an entropy of at most ln(n): 32 covers all mass that matters, and the
    # last bucket takes the rest.
    bucket = np.minimum(key * np.float32(n_buckets / 32), np.float32(n_buckets - 1)).astype(np.intp)
    mass = np.cumsum(np.bincount(bucket, weights, n_buckets))
    count = np.cumsum(np.bincount(bucket, minlength=n_buckets))
    last = max(int(mass.searchsorted(target, side="right" if beyond else "left")), int(count.searchsorted(min_count)))
    if last >= n_buckets:
        return np.arange(key.size)
    inside = np.flatnonzero(bucket == last)
    inside = inside[np.argsort(key[inside], kind="stable")]
    before, n_before = (float(mass[last - 1]), int(count[last - 1])) if last else (0.0, 0)
    running = before + np.cumsum(weights[inside], dtype=np.float64)
    n = int(running.searchsorted(target, side="right" if beyond else "left")) + 1
    keep = bucket < last
    keep[inside[: max(n, min_count - n_before)]] = True
    return np.flatnonzero(keep)


class Sampler:
    """The sampler chain of one request.

    Candidates are either *wide* (`_sorted` false: float32 logits in order of id, `_ids` None while none is cut) or
    *few* (float64 logits in descending order).
    """

    def __init__(
        self,
        sampling: Sampling,
        *,
        seed: int,
        n_vocab: int,
        eog: Iterable[int] = (),
        top_k: TopK = top_k_numpy,
        matcher: Matcher | None = None,
    ) -> None:
        self._sampling = s = sampling
        self._seed = seed
        self._top_k = top_k
        self._matcher = matcher
        bias = {token: value for token, value in s.logit_bias.items() if 0 <= token < n_vocab}
        if s.ignore_eos:
            bias |= {token: -math.inf for token in eog if 0 <= token < n_vocab}
        self._bias_ids = np.array(list(bias), np.int64)
        self._bias = np.array(list(bias.values()), np.float32)
        self._min_keep = s.min_keep

        penalties = s.repeat_last_n > 0 and (
            s.repeat_penalty != 1.0 or s.frequency_penalty != 0.0 or s.presence_penalty != 0.0
        )
        self._penalties = penalties and "penalties" in s.samplers
        self._recent: list[int] = []
        self._counts: dict[int, int] = {}
        self._log_min_p = math.log(s.min_p) if s.min_p > 0 else -math.inf

        steps: dict[str, tuple[bool, Callable[[], None]]] = {
            "penalties": (penalties, self._apply_penalties),
            "top_k": (s.top_k > 0, self._apply_top_k),
            "typ_p": (s.typical_p < 1.0, self._apply_typical),
            "top_p": (s.top_p < 1.0, self._apply_top_p),
            "min_p": (s.min_p > 0.0, self._apply_min_p),
            "temperature": (s.temperature != 1.0, self._apply_temperature),
        }
        chain = [name for name in s.samplers if name in steps and steps[name][0]]
        self._steps = [steps[name][1] for name in chain]
        # Every filter but typical keeps the largest logit, so a greedy chain is one arg-max, unless penalties come
        # after a filter and choose anew among what it left.
        late = "penalties" in chain and chain.index("penalties") > 0
        self._greedy = s.temperature <= 0 and "temperature" in chain and "typ_p" not in chain and not late

        self._ids: NDArray[np.integer] | None = None
        self._logits: NDArray[np.floating] = np.empty(0)
        self._sorted = False
        self._patched: list[tuple[NDArray[np.integer], F32]] = []
        self._weights: NDArray[np.floating] | None = None

    def start(self, tokens: Sequence[int]) -> None:
        """Begin a sequence: the last `repeat_last_n` of these tokens count for the penalties, prompt included."""
        self._recent = []
        self._counts = {}
        if self._penalties:
            for token in tokens[-self._sampling.repeat_last_n :]:
                self.accept(token)

    def accept(self, token: int) -> None:
        """Take note of the sequence's next token."""
        if not self._penalties:
            return
        counts = self._counts
        counts[token] = counts.get(token, 0) + 1
        self._recent.append(token)
        last_n = self._sampling.repeat_last_n
        if len(self._recent) > last_n:
            old = self._recent[-last_n - 1]
            counts[old] -= 1
            if not counts[old]:
                del counts[old]
            if len(self._recent) > 2 * last_n + 256:
                del self._recent[:-last_n]

    def sample(self, row: F32, position: int) -> int:
        """Choose the token at `position` of the sequence from its logits `[n_vocab]`.

        The row is changed while this runs and is as before when it returns; a read-only row is copied. Raises
        ComputeFailed where the logits hold NaN.
        """
        if math.isnan(row.max()):
            raise ComputeFailed("the model gave logits that are not numbers; its file may be damaged")
        self._logits = whole = row if row.flags.writeable else row.copy()
        self._ids = None
        self._sorted = False
        self._weights = None
        try:
            if self._bias_ids.size:
                self._patch(self._bias_ids, whole[self._bias_ids] + self._bias)
            if self._greedy:
                if self._penalties:
                    self._apply_penalties()
                self._apply_temperature()
            else:
                for step in self._steps:
                    step()
            return self._draw(position)
        finally:
            while self._patched:
                ids, saved = self._patched.pop()
                whole[ids] = saved

    def candidates(self, n: int, token: int) -> tuple[float, list[tuple[int, float]]]:
        """Probability of `token` and the up to `n` most likely `(id, probability)` after the last `sample`'s chain.

        Tokens the chain cut off have probability 0 and are left out.
        """
        weights = self._weights
        if weights is None:
            return 1.0, [(token, 1.0)][:n]
        total = float(weights.sum(dtype=np.float64))
        at = token if self._ids is None else int(np.flatnonzero(self._ids == token)[0])
        places: NDArray[np.integer]
        top: NDArray[np.floating]
        if self._sorted:
            places, top = np.arange(min(n, weights.size)), weights[:n]
        else:
            places, top = self._top_k(weights.astype(np.float32, copy=False), n)
        ids = places if self._ids is None else self._ids[places]
        pairs = zip(ids.tolist(), top.tolist(), strict=True)
        return float(weights[at]) / total, [(i, p / total) for i, p in pairs if p > 0]

    # -- samplers ----------------------------------------------------------------------------------------------------

    def _patch(self, ids: NDArray[np.integer], values: F32) -> None:
        """Change some logits of the row in place: copying a large vocabulary would cost more than sampling it."""
        self._patched.append((ids, self._logits[ids]))
        self._logits[ids] = values

    def _keep(self, places: NDArray[np.integer]) -> None:
        """Cut wide candidates to these places, ascending; few of them get sorted."""
        ids = places if self._ids is None else self._ids[places]
        logits = self._logits[places]
        if ids.size <= _FEW:
            order = np.argsort(-logits, kind="stable")
            self._ids, self._logits, self._sorted = ids[order], logits[order].astype(np.float64), True
        else:
            self._ids, self._logits = ids, logits

    def _keep_top(self, k: int) -> None:
        """Cut wide candidates to the k largest."""
        places, logits = self._top_k(self._logits, k)
        self._ids = places if self._ids is None else self._ids[places]
        self._logits, self._sorted = logits.astype(np.float64), True

    def _cut(self, n: int) -> None:
        """Cut few candidates to the n largest."""
        assert self._ids is not None
        self._ids = self._ids[:n]
        self._logits = self._logits[:n]

    def _apply_penalties(self) -> None:
        s = self._sampling
        if not self._counts:
            return
        tokens = np.fromiter(self._counts.keys(), np.int64, len(self._counts))
        counts = np.fromiter(self._counts.values(), np.float32, len(self._counts))
        lowered = counts * np.float32(s.frequency_penalty) + np.float32(s.presence_penalty)
        repeat = np.float32(s.repeat_penalty)
        if self._ids is None:
            own = self._logits[tokens]
            self._patch(tokens, np.where(own <= 0, own * repeat, own / repeat) - lowered)
            return
        # A filter came before: only what it left is penalised, and sorted anew.
        _, among, which = np.intersect1d(self._ids, tokens, assume_unique=True, return_indices=True)
        logits = self._logits.astype(np.float32)
        own = logits[among]
        logits[among] = np.where(own <= 0, own * repeat, own / repeat) - lowered[which]
        by_id = np.argsort(self._ids)
        self._ids, self._logits, self._sorted = self._ids[by_id], logits[by_id], False
        self._keep(np.arange(by_id.size))

    def _apply_top_k(self) -> None:
        k = self._sampling.top_k
        if not self._sorted:
            self._keep_top(k)
        elif self._logits.size > k:
            self._cut(k)

    def _apply_typical(self) -> None:
        logits = self._logits.astype(np.float32, copy=False)
        logp = logits - logits.max()
        weights = np.exp(logp)
        total = float(weights.sum(dtype=np.float64))
        # sum p·(ln total − logp): the tokens of probability 0 add nothing, where logp may be -inf
        entropy = math.log(total) - float(np.sum(weights * logp, where=weights > 0, dtype=np.float64)) / total
        distance = np.abs(np.float32(math.log(total) - entropy) - logp)
        target = self._sampling.typical_p * total
        kept = _head(distance, weights, target, beyond=True, min_count=self._min_keep)
        if self._sorted:
            self._ids, self._logits = self._ids[kept] if self._ids is not None else None, self._logits[kept]
        else:
            self._keep(kept)

    def _apply_top_p(self) -> None:
        p, min_keep = self._sampling.top_p, self._min_keep
        if self._sorted and self._logits[0] == -math.inf:
            return
        if self._sorted:
            mass = np.exp(self._logits - self._logits[0]).cumsum()
            n = max(int(mass.searchsorted(p * mass[-1])) + 1, min_keep)
            if n < mass.size:
                self._cut(n)
            return
        behind = self._logits.max() - self._logits
        weights = np.exp(-behind)
        target = p * float(weights.sum(dtype=np.float64))
        top, _ = self._top_k(self._logits, max(256, min_keep))
        n = max(int(weights[top].cumsum(dtype=np.float64).searchsorted(target)) + 1, min_keep)
        if n <= top.size:
            self._keep_top(n)
        else:
            self._keep(_head(behind, weights, target, beyond=False, min_count=min_keep))

    def _apply_min_p(self) -> None:
        min_keep = max(self._min_keep, 1)
        high = self._logits[0] if self._sorted else self._logits.max()
        floor = np.float32(high + self._log_min_p)
        if self._sorted:
            n = max(int(np.count_nonzero(self._logits >= floor)), min_keep)
            if n < self._logits.size:
                self._cut(n)
            return
        places = np.flatnonzero(self._logits >= floor)
        if places.size < min_keep:
            self._keep_top(min_keep)
        else:
            self._keep(places)

    def _apply_temperature(self) -> None:
        temperature = self._sampling.temperature
        if temperature > 0:
            self._logits = self._logits / self._logits.dtype.type(temperature)
            return
        best = int(self._logits.argmax())
        self._ids = np.array([best]) if self._ids is None else self._ids[best : best + 1]
        self._logits, self._sorted = np.array([self._logits[best]], np.float64), True

    def _draw(self, position: int) -> int:
        logits, ids = self._logits, self._ids
        high = logits[0] if self._sorted else logits.max()
        if logits.size == 1 or high == -math.inf:
            return 0 if ids is None else int(ids[0])
        self._weights = weights = np.exp(logits - high)
        mass = weights.cumsum(dtype=np.float64)
        place = int(mass.searchsorted(uniform(self._seed, position) * mass[-1]))
        return place if ids is None else int(ids[place])
