"""DRY, "don't repeat yourself": a penalty for tokens that would extend a repetition.

Semantics of llama.cpp's `llama_sampler_dry`: if the last tokens occurred before, the token that followed them then is
penalized by `multiplier * base ** (length - allowed_length)`, where `length` is the length of the repetition so far. No
repetition extends across a sequence breaker.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from llamado.engine.sampling.candidates import HUGE, Candidates, Ids
from llamado.engine.sampling.params import Sampling
from llamado.engine.sampling.samplers import SamplerVocabulary

# llama.cpp's limits: bytes of a breaker, and tokens after its first one
MAX_BREAKER_BYTES = 40
MAX_TAIL = 20

# ln of the largest float32: limits the exponent of the penalty
_LOG_HUGE = 88.7228391

Tail = tuple[int, ...]


class Breakers:
    """Tokens that begin a sequence breaker, and the tokens that complete it.

    A token may contain a breaker anywhere in its text, or its text may end with the beginning of a breaker. Tokens are
    examined when they first occur: most of a vocabulary never does.
    """

    def __init__(self, breakers: Iterable[str], vocabulary: SamplerVocabulary) -> None:
        cut = {text.encode()[:MAX_BREAKER_BYTES].decode("utf-8", "ignore") for text in breakers}
        self._breakers = sorted(cut - {""})
        self._begun: dict[str, list[str]] = {}
        for text in self._breakers:
            for i in range(1, len(text)):
                self._begun.setdefault(text[:i], []).append(text)
        self._longest = max(map(len, self._breakers), default=0)
        self._vocabulary = vocabulary
        self._encoded: dict[str, Tail] = {}
        self._tails: dict[int, dict[int, set[Tail]]] = {}
        self.single: set[int] = set()
        """Tokens seen so far that contain a whole breaker."""
        self.reach = 0
        """Length of the longest tail seen so far."""

    def tails(self, token: int) -> dict[int, set[Tail]]:
        """Return the token sequences that complete a breaker after this token, by length."""
        found = self._tails.get(token)
        if found is None:
            found = self._tails[token] = self._find(token)
            if 0 in found:
                self.single.add(token)
            self.reach = max(self.reach, *found, 0)
        return found

    def _find(self, token: int) -> dict[int, set[Tail]]:
        word = self._vocabulary.decode([token], special=True)
        tails: dict[int, set[Tail]] = {}
        if any(text in word for text in self._breakers):
            tails[0] = {()}
        for i in range(max(0, len(word) - self._longest + 1), len(word)):
            for text in self._begun.get(word[i:], ()):
                if text not in word:
                    tail = self._encode(text[len(word) - i :])
                    tails.setdefault(len(tail), set()).add(tail)
        return tails

    def _encode(self, rest: str) -> Tail:
        tail = self._encoded.get(rest)
        if tail is None:
            tokens = self._vocabulary.encode(rest, add_special=False, parse_special=False)
            tail = self._encoded[rest] = tuple(tokens[:MAX_TAIL])
        return tail


class Dry:
    """The look-back window of one sequence, including the prompt. As a step it lowers logits.

    For each earlier position of the last token it stores the length of the match between the tokens up to there and the
    last tokens. Another token updates the matches at the positions of that token with one comparison of the window.
    """

    def __init__(self, sampling: Sampling, breakers: Breakers | None) -> None:
        self._multiplier = sampling.dry_multiplier
        self._base = sampling.dry_base
        self._allowed = sampling.dry_allowed_length
        self._last_n = sampling.dry_penalty_last_n
        log_base = math.log(self._base)
        self._max_exponent = int(_LOG_HUGE / log_base) if self._base > 1.000001 else 0
        self._breakers = breakers
        self._n = 0
        self._tokens = np.empty(0, np.int32)
        self._runs = np.zeros(1, np.int32)  # of position i at [i + 1]: length of the match that ends there
        self._places = np.empty(0, np.int64)  # positions with a match, ascending
        self._scratch = np.empty((2, 0), np.int64)
        # the last token at which a breaker begins, and the end of that breaker (the longest, if several)
        self._broken_at = self._broken_to = -1

    @property
    def _from(self) -> int:
        """Start of the window."""
        return 0 if self._last_n < 0 else max(0, self._n - self._last_n)

    def start(self, tokens: Sequence[int]) -> None:
        """Begin a sequence with these tokens."""
        window = tokens if self._last_n < 0 else tokens[-self._last_n :]
        n = self._n = len(window)
        self._tokens = np.zeros(n + 256, np.int32)
        self._tokens[:n] = window
        self._runs = np.zeros(n + 257, np.int32)
        self._places = np.empty(0, np.int64)
        self._broken_at = self._broken_to = -1
        if not n:
            return
        self._places = np.flatnonzero(self._tokens[: n - 1] == self._tokens[n - 1])
        self._runs[self._places + 1] = _common_ends(list(window), self._places)
        if self._breakers is not None:
            self._look_for_breaker(list(window), self._breakers)

    def _look_for_breaker(self, window: list[int], breakers: Breakers) -> None:
        heads = [token for token in set(window) if breakers.tails(token)]
        for place in np.flatnonzero(np.isin(self._tokens[: self._n], heads))[::-1].tolist():
            tails = breakers.tails(window[place])
            for length in sorted(tails, reverse=True):
                if tuple(window[place + 1 : place + 1 + length]) in tails[length]:
                    self._broken_at, self._broken_to = place, place + length
                    return

    def accept(self, token: int) -> None:
        """Record the next token."""
        if self._last_n > 0 and self._n >= 2 * self._last_n + 256:
            self._forget(self._n - self._last_n)
        n, runs = self._n, self._runs
        if n == self._tokens.size:
            self._tokens = np.concatenate((self._tokens, np.zeros(n + 256, np.int32)))
            runs = self._runs = np.concatenate((runs, np.zeros(n + 256, np.int32)))
        self._tokens[n] = token
        self._n = n + 1
        begin = self._from
        places = np.flatnonzero(self._tokens[begin:n] == token)
        places += begin
        grown = runs[places] + 1
        runs[self._places + 1] = 0
        runs[places + 1] = grown
        self._places = places
        if self._breakers is not None:
            self._note_breaker(n, self._breakers)

    def _note_breaker(self, last: int, breakers: Breakers) -> None:
        """Update the breaker position if the token at `last`, the newest, completes a breaker."""
        token = int(self._tokens[last])
        tails = breakers.tails(token)
        if 0 in tails:
            self._broken_at = self._broken_to = last
            return
        reach = min(breakers.reach, last)
        if not reach:
            return
        recent: list[int] = self._tokens[last - reach : last + 1].tolist()
        for length in range(1, reach + 1):
            if last - length < self._broken_at:
                return
            tails = breakers.tails(recent[-1 - length])
            if length in tails and tuple(recent[-length:]) in tails[length]:
                self._broken_at, self._broken_to = last - length, last
                return

    def _forget(self, n: int) -> None:
        """Drop the n oldest tokens, which are outside all future windows."""
        self._n -= n
        self._tokens[: self._n] = self._tokens[n : n + self._n]
        runs = self._runs[self._places + 1]
        self._runs[self._places + 1] = 0
        stay = self._places >= n
        self._places = self._places[stay] - n
        self._runs[self._places + 1] = runs[stay]
        self._broken_at = max(-1, self._broken_at - n)
        self._broken_to -= n

    def _longest(self, tokens: Ids, lengths: Ids) -> tuple[Ids, Ids]:
        """Return each token once, with its greatest length."""
        most = int(tokens.max())
        if self._scratch.shape[1] <= most:
            self._scratch = np.empty((2, most + 1), np.int64)
        greatest, place = self._scratch
        greatest[tokens] = 0
        np.maximum.at(greatest, tokens, lengths)
        # of equal tokens the last one stores its position; sorting would take ten times as long
        places = np.arange(tokens.size)
        place[tokens] = places
        once = tokens[place[tokens] == places]
        return once, greatest[once]

    def penalties(self) -> tuple[Ids, np.ndarray[tuple[int, ...], np.dtype[np.float64]]]:
        """Return the tokens that would extend a repetition, each once, and the reduction of their logits."""
        none = np.empty(0, np.int64), np.empty(0)
        n, begin, allowed = self._n, self._from, self._allowed
        if n - begin <= allowed:
            return none
        limit = n - 1 - self._broken_to if self._broken_at >= begin else n - begin
        if limit < allowed:
            return none
        places = self._places if allowed > 0 else np.arange(begin, n - 1)
        lengths = np.minimum(self._runs[places + 1], np.minimum(places - begin + 1, limit))
        if allowed > 0:
            long = lengths >= allowed
            places, lengths = places[long], lengths[long]
        if not places.size:
            return none
        tokens, lengths = self._longest(self._tokens[places + 1], lengths)
        if self._breakers is not None and self._breakers.single:
            free = [int(token) not in self._breakers.single for token in tokens]
            tokens, lengths = tokens[free], lengths[free]
        exponents = lengths - allowed
        if self._max_exponent > 0:
            exponents = np.minimum(exponents, self._max_exponent)
        lowered = self._multiplier * np.power(self._base, exponents.astype(np.float64))
        return tokens.astype(np.int64), np.clip(lowered, -HUGE, HUGE)

    def __call__(self, candidates: Candidates, position: int) -> None:
        tokens, lowered = self.penalties()
        if tokens.size:
            candidates.change(tokens, lambda own, which: own - lowered[which])


def _common_ends(tokens: list[int], places: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> list[int]:
    """For each position (ascending, each with the last token) return the length of the match with the end of the
    tokens.

    Runs the Z-algorithm backwards from the end: every token is compared a constant number of times.
    """
    n = len(tokens)
    back = tokens[::-1]
    found = dict.fromkeys((n - 1 - places).tolist(), 0)
    left = right = 0
    for k in sorted(found):
        length = min(right - k, found.get(k - left, 0)) if k < right else 0
        while k + length < n and back[length] == back[k + length]:
            length += 1
        found[k] = length
        if k + length > right:
            left, right = k, k + length
    return [found[n - 1 - place] for place in places.tolist()]
