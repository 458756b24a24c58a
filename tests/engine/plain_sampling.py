"""llama.cpp's samplers over a whole vocabulary in plain Python floats, one token at a time: slow, but easy to check.

`-inf` is a logit like any other here: no candidate is hidden, so the counts of candidates are llama.cpp's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

from llamado.engine.sampling.chain import uniform
from llamado.engine.sampling.params import Sampling


class Words:
    """A vocabulary whose tokens are given texts; encodes greedily by the longest token."""

    def __init__(self, texts: Sequence[str], eos: int | None = None, eot: int | None = None) -> None:
        self.texts = list(texts)
        self.eos, self.eot = eos, eot

    def piece(self, token: int, *, special: bool = False) -> bytes:
        return b"" if token in (self.eos, self.eot) and not special else self.texts[token].encode()

    def decode(self, tokens: Iterable[int], *, special: bool = False) -> str:
        return "".join(self.piece(token, special=special).decode() for token in tokens)

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = True) -> list[int]:
        tokens = []
        while text:
            fits = [i for i, t in enumerate(self.texts) if t and text.startswith(t)]
            if not fits:
                text = text[1:]
                continue
            best = max(fits, key=lambda i: len(self.texts[i]))
            tokens.append(best)
            text = text[len(self.texts[best]) :]
        return tokens


def dry_penalties(tokens: Sequence[int], s: Sampling, words: Words | None) -> dict[int, float]:
    """Return DRY's penalty for each token after `tokens`, by comparing every suffix with every position."""
    window = list(tokens if s.dry_penalty_last_n < 0 else tokens[max(0, len(tokens) - s.dry_penalty_last_n) :])
    n = len(window)
    if s.dry_multiplier == 0 or s.dry_base < 1 or s.dry_penalty_last_n == 0 or n <= s.dry_allowed_length:
        return {}

    def tails(token: int) -> list[list[int]]:
        assert words is not None
        found: list[list[int]] = []
        for breaker in s.dry_sequence_breakers:
            breaker = breaker.encode()[:40].decode("utf-8", "ignore")
            word = words.decode([token], special=True)
            if not breaker:
                continue
            if breaker in word:
                found.append([])
                continue
            for i in range(1, len(breaker)):
                if word.endswith(breaker[:i]):
                    found.append(words.encode(breaker[i:])[:20])
        return found

    limit = n
    if words is not None:
        for place in range(n - 1, -1, -1):
            whole = [len(t) for t in tails(window[place]) if window[place + 1 : place + 1 + len(t)] == t]
            if whole:
                limit = n - 1 - place - max(whole)
                break
    if limit < s.dry_allowed_length:
        return {}
    longest: dict[int, int] = {}
    for place in range(n - 1):
        length = 0
        while length <= place and window[place - length] == window[n - 1 - length]:
            length += 1
        length = min(length, limit)
        if length >= s.dry_allowed_length:
            longest[window[place + 1]] = max(length, longest.get(window[place + 1], 0))
    most = int(88.7228391 / math.log(s.dry_base)) if s.dry_base > 1.000001 else 0
    out = {}
    for token, length in longest.items():
        if words is not None and [] in tails(token):
            continue
        exponent = length - s.dry_allowed_length
        out[token] = s.dry_multiplier * s.dry_base ** (min(exponent, most) if most > 0 else exponent)
    return out


class Plain:
    """The sampler chain of one request: `probabilities` of the next token, then `accept`."""

    def __init__(
        self,
        s: Sampling,
        *,
        seed: int = 0,
        eog: Iterable[int] = (),
        words: Words | None = None,
        prompt: Sequence[int] = (),
    ) -> None:
        self.s, self.seed, self.eog, self.words = s, seed, set(eog), words
        self.tokens = list(prompt)
        self.mu = 2 * s.mirostat_tau
        decay = min(max(s.adaptive_decay, 0.0), 0.99)
        self.decay = decay
        self.sum, self.count = s.adaptive_target / (1 - decay), 1 / (1 - decay)
        self.before: dict[int, float] = {}  # probabilities before adaptive-p changed them

    def accept(self, token: int, probs: dict[int, float]) -> None:
        self.tokens.append(token)
        if self.s.mirostat:
            self.mu -= self.s.mirostat_eta * (-math.log2(probs[token]) - self.s.mirostat_tau)
        elif "adaptive_p" in self.s.samplers and self.s.adaptive_target >= 0:
            self.sum = self.before[token] + self.decay * self.sum
            self.count = 1 + self.decay * self.count

    def probabilities(self, row: Sequence[float], position: int, allowed: set[int] | None = None) -> dict[int, float]:
        s = self.s
        logits = {i: float(x) if allowed is None or i in allowed else -math.inf for i, x in enumerate(row)}
        for token, value in (dict(s.logit_bias) | (dict.fromkeys(self.eog, -math.inf) if s.ignore_eos else {})).items():
            logits[token] += value
        order = sorted(logits, key=lambda i: (-logits[i], i))

        def softmax() -> dict[int, float]:
            high = max(logits[i] for i in order)
            e = {i: math.exp(logits[i] - high) for i in order}
            total = math.fsum(e.values())
            return {i: x / total for i, x in e.items()}

        def resort() -> None:
            order.sort(key=lambda i: (-logits[i], i))

        def scale(temperature: float) -> None:
            for i in order[0 if temperature > 0 else 1 :]:
                logits[i] = logits[i] / temperature if temperature > 0 else -math.inf

        n_xtc = 0
        for name in ("temperature",) if s.mirostat else s.samplers:
            if name == "penalties" and s.repeat_last_n:
                window = self.tokens if s.repeat_last_n < 0 else self.tokens[-s.repeat_last_n :]
                for token in set(window) & set(order):
                    x = logits[token]
                    x = x * s.repeat_penalty if x <= 0 else x / s.repeat_penalty
                    logits[token] = x - window.count(token) * s.frequency_penalty - s.presence_penalty
                resort()
            elif name == "dry":
                for token, penalty in dry_penalties(self.tokens, s, self.words).items():
                    if token in order:
                        logits[token] -= penalty
                resort()
            elif name == "top_n_sigma" and s.top_n_sigma > 0 and len(order) > 1:
                finite = [logits[i] for i in order if logits[i] > -math.inf]
                mean = math.fsum(finite) / len(finite)
                sigma = math.sqrt(math.fsum((x - mean) ** 2 for x in finite) / len(finite))
                floor = max(finite) - s.top_n_sigma * sigma
                for i in order:
                    if logits[i] < floor:
                        logits[i] = -math.inf
                resort()
            elif name == "top_k" and s.top_k > 0:
                order = order[: s.top_k]
            elif name == "typ_p" and s.typical_p < 1:
                p = softmax()
                entropy = -math.fsum(x * math.log(x) for x in p.values() if x > 0)
                shifted = {i: abs(-math.log(p[i]) - entropy) if p[i] > 0 else math.inf for i in order}
                near = sorted(order, key=lambda i: shifted[i])
                total = 0.0
                for n, i in enumerate(near):
                    total += p[i]
                    if total > s.typical_p and (s.min_keep == 0 or n >= s.min_keep - 1):
                        near = near[: n + 1]
                        break
                order = near
                resort()
            elif name == "top_p" and s.top_p < 1:
                p = softmax()
                total = 0.0
                for n, i in enumerate(order):
                    total += p[i]
                    if total >= s.top_p and n + 1 >= s.min_keep:
                        order = order[: n + 1]
                        break
            elif name == "min_p" and s.min_p > 0:
                floor = logits[order[0]] + math.log(s.min_p)
                n = sum(logits[i] >= floor for i in order)
                order = order[: max(n, s.min_keep, 1)]
            elif name == "xtc" and s.xtc_probability > 0 and s.xtc_threshold <= 0.5:
                n_xtc += 1
                if len(order) < 2 or uniform(self.seed, position, n_xtc) > s.xtc_probability:
                    continue
                p = softmax()
                last = max((n for n, i in enumerate(order) if p[i] >= s.xtc_threshold and p[i] > 0), default=0)
                if last > 0 and len(order) - last >= s.min_keep:
                    order = order[last:]
            elif name == "temperature":
                if s.dynatemp_range > 0 and not s.mirostat:
                    if len(order) < 2:
                        continue
                    low, high = max(0.0, s.temperature - s.dynatemp_range), s.temperature + s.dynatemp_range
                    entropy = -math.fsum(x * math.log(x) for x in softmax().values() if x > 0)
                    scale(low + (high - low) * (max(entropy, 0.0) / math.log(len(order))) ** s.dynatemp_exponent)
                else:
                    scale(s.temperature)
            elif name == "infill":
                order = self.infill(order, softmax())
        p = softmax()
        if s.mirostat == 1:
            few = [logits[i] for i in order[:100] if logits[i] > -math.inf]
            t = [math.log((i + 2) / (i + 1)) for i in range(len(few) - 1)]
            k = 1.0
            if t:
                b = [x - y for x, y in itertools.pairwise(few)]
                exponent = math.fsum(x * y for x, y in zip(t, b, strict=True)) / math.fsum(x * x for x in t)
                excess = exponent - 1
                k = (excess * 2**self.mu / (1 - len(row) ** -excess)) ** (1 / exponent)
            order = order[: max(1, int(k))]
        elif s.mirostat == 2:
            order = [i for i in order if p[i] > 0 and -math.log2(p[i]) <= self.mu] or order[:1]
        elif "adaptive_p" in s.samplers and s.adaptive_target >= 0:
            self.before = p
            aim = min(max(2 * min(s.adaptive_target, 1.0) - self.sum / self.count, 0.0), 1.0)
            for i in order:
                far = abs(p[i] - aim) / 0.3
                if logits[i] > -math.inf:
                    logits[i] = 5 - 10 * far * far / (1 + far)
        return {i: x for i, x in softmax().items() if x > 0}

    def infill(self, order: list[int], p: dict[int, float]) -> list[int]:
        assert self.words is not None
        p_end = math.fsum(p[i] for i in order if i in self.eog)
        if 3 * p_end * len(order) > 1 - p_end:
            return [i for i in order if i in self.eog]
        pieces = {i: self.words.piece(i) for i in order}
        for first in order:
            for second in order:
                if not p[first]:
                    break
                if first == second or not p[second]:
                    continue
                if pieces[first] and pieces[second].startswith(pieces[first]):
                    to, out = (second, first) if p[second] > p[first] else (first, second)
                    p[to] += p[out]
                    p[out] = 0.0
        order = [i for i in order if p[i] >= 0.2 or i in self.eog]
        n_text = sum(i not in self.eog for i in order)
        if not n_text:
            end = self.words.eot if self.words.eot is not None else self.words.eos
            assert end is not None
            return [end]
        total = math.fsum(p[i] for i in order)
        return [i for i in order if p[i] / total >= 1 / (n_text + 1) or i in self.eog]
