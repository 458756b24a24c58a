"""Each sampler against a plain full-vocabulary reference in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from llamado.engine.errors import ComputeFailed
from llamado.engine.request import InvalidRequest, Sampling, sampler_names
from llamado.engine.sampling import Sampler, log_softmax_top, top_k_numpy, uniform

OFF: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}


def reference(row: np.ndarray, s: Sampling, recent: list[int], eog: set[int] | None = None) -> dict[int, float]:
    """Probabilities after the chain, `{id: p}` of the tokens left; every step as llama.cpp documents it."""
    logits = {i: float(x) for i, x in enumerate(row)}
    bias = dict(s.logit_bias) | (dict.fromkeys(eog or set(), -math.inf) if s.ignore_eos else {})
    for token, value in bias.items():
        logits[token] += value
    order = sorted(logits, key=lambda i: (-logits[i], i))

    def softmax() -> dict[int, float]:
        high = logits[order[0]]
        e = {i: math.exp(logits[i] - high) for i in order}
        total = math.fsum(e.values())
        return {i: x / total for i, x in e.items()}

    for name in s.samplers:
        if name == "penalties":
            window = recent[-s.repeat_last_n :] if s.repeat_last_n else []
            for token in set(window) & set(order):
                x = logits[token]
                x = x * s.repeat_penalty if x <= 0 else x / s.repeat_penalty
                logits[token] = x - window.count(token) * s.frequency_penalty - s.presence_penalty
            order.sort(key=lambda i: (-logits[i], i))
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
            order = sorted(near, key=lambda i: (-logits[i], i))
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
            order = order[: max(n, s.min_keep)]
        elif name == "temperature":
            if s.temperature <= 0:
                order = order[:1]
            else:
                for i in order:
                    logits[i] /= s.temperature
    return softmax()


CASES: list[dict[str, Any]] = [
    {},
    OFF,
    OFF | {"temperature": 0.7},
    OFF | {"temperature": 0.0},
    OFF | {"top_k": 1},
    OFF | {"top_k": 5},
    OFF | {"top_k": 100000},
    OFF | {"top_p": 0.5},
    OFF | {"top_p": 0.9},
    OFF | {"top_p": 0.0},
    OFF | {"top_p": 0.3, "min_keep": 7},
    OFF | {"min_p": 0.05},
    OFF | {"min_p": 0.9, "min_keep": 5},
    OFF | {"min_p": 1.0},
    OFF | {"typical_p": 0.3},
    OFF | {"typical_p": 0.9},
    OFF | {"typical_p": 0.2, "min_keep": 9},
    OFF | {"typical_p": 0.9, "top_k": 20},
    OFF | {"top_p": 0.9, "top_k": 20, "min_p": 0.02},
    OFF | {"repeat_penalty": 1.3, "top_k": 30},
    OFF | {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    OFF | {"repeat_penalty": 0.8, "repeat_last_n": 3, "top_k": 10},
    OFF | {"repeat_penalty": 1.3, "repeat_last_n": 0},
    {"repeat_penalty": 1.1, "presence_penalty": 0.2, "temperature": 1.4},
    {"repeat_penalty": 1.5, "temperature": 0.0},
    {"temperature": 0.0, "typical_p": 0.2},
    {"logit_bias": {3: -math.inf, 7: 5.0, 11: -2.0}},
    {"logit_bias": {3: 100.0}, "temperature": 0.0},
    {"ignore_eos": True, "top_k": 4, "min_p": 0.0, "top_p": 1.0},
    {"samplers": ("temperature", "top_k", "penalties"), "repeat_penalty": 2.0, "temperature": 0.5, "top_k": 8},
    {"samplers": ("top_k", "penalties", "temperature"), "repeat_penalty": 9.0, "temperature": 0.0, "top_k": 8},
    {"samplers": ("min_p", "top_p", "top_k")},
    {"samplers": ("top_p", "typ_p", "penalties"), "typical_p": 0.8, "repeat_penalty": 1.2, "top_p": 0.99},
    {"samplers": ()},
]


@pytest.mark.parametrize("n_vocab", [50, 5000])
@pytest.mark.parametrize("spread", [0.05, 1.0, 4.0])
@pytest.mark.parametrize("case", CASES, ids=lambda c: ",".join(f"{k}={v}" for k, v in c.items()) or "default")
def test_chain_equals_reference(case: dict[str, Any], spread: float, n_vocab: int) -> None:
    rng = np.random.default_rng(abs(hash((n_vocab, spread))) % 2**32)
    row = (rng.standard_normal(n_vocab) * spread).astype(np.float32)
    recent = [int(i) for i in np.argsort(-row)[rng.integers(0, 12, 40)]]
    sampling = Sampling(**case)
    eog = {int(row.argmax()), 2}
    sampler = Sampler(sampling, seed=1, n_vocab=n_vocab, eog=eog)
    sampler.start(recent[:30])
    for token in recent[30:]:
        sampler.accept(token)
    before = row.copy()
    token = sampler.sample(row, 17)
    assert np.array_equal(row, before), "the row must come back as it was"

    expected = reference(row, sampling, recent, eog)
    own, got = sampler.candidates(n_vocab, token)
    assert token in expected
    # float32 against float64 may move a token or two of a flat distribution across the border of a filter.
    differing = set(dict(got)) ^ {i for i, p in expected.items() if p > 0}
    assert len(differing) <= (2 if n_vocab > 1000 else 0)
    if not differing:
        for i, p in got:
            assert p == pytest.approx(expected[i], rel=2e-4)
        assert own == pytest.approx(expected[token], rel=2e-4)
        assert [p for _, p in got] == sorted((p for _, p in got), reverse=True)
    read_only = row.copy()
    read_only.flags.writeable = False
    assert sampler.sample(read_only, 17) == token


def test_draws_follow_the_probabilities() -> None:
    row = np.log(np.array([0.5, 0.25, 0.15, 0.1, 1e-9], np.float32))
    for case in (OFF, OFF | {"top_k": 4}):
        sampler = Sampler(Sampling(**case), seed=5, n_vocab=5)
        counts = np.bincount([sampler.sample(row, i) for i in range(8000)], minlength=5)
        assert np.allclose(counts / 8000, [0.5, 0.25, 0.15, 0.1, 0], atol=0.02)


def test_random_numbers_depend_on_seed_and_position_only() -> None:
    row = np.random.default_rng(3).standard_normal(1000).astype(np.float32)
    first = Sampler(Sampling(), seed=9, n_vocab=1000)
    tokens = [first.sample(row, i) for i in range(50)]
    second = Sampler(Sampling(), seed=9, n_vocab=1000)
    assert [second.sample(row, i) for i in reversed(range(50))] == tokens[::-1]
    other = Sampler(Sampling(), seed=10, n_vocab=1000)
    assert [other.sample(row, i) for i in range(50)] != tokens
    values = np.array([uniform(seed, i) for seed in range(50) for i in range(50)])
    assert values.min() >= 0 and values.max() < 1 and abs(values.mean() - 0.5) < 0.02
    assert len(set(values.tolist())) == values.size


@pytest.mark.parametrize("n", [1, 10, 4096, 262144])
@pytest.mark.parametrize("k", [1, 40, 300])
def test_top_k(n: int, k: int) -> None:
    rng = np.random.default_rng(n + k)
    for row in (
        rng.standard_normal(n).astype(np.float32),
        rng.integers(0, 5, n).astype(np.float32),
        np.zeros(n, np.float32),
        np.where(rng.random(n) < 0.99, -np.inf, 1.0).astype(np.float32),
        np.arange(n, dtype=np.float32),
    ):
        ids, logits = top_k_numpy(row, k)
        expected = np.argsort(-row, kind="stable")[:k]
        assert np.array_equal(ids, expected)
        assert np.array_equal(logits, row[expected])
        assert ids.dtype == np.int32 and logits.dtype == np.float32


def test_log_softmax_top() -> None:
    row = np.random.default_rng(0).standard_normal(3000).astype(np.float32)
    exact = row.astype(np.float64) - math.log(math.fsum(math.exp(x) for x in row))
    own, top = log_softmax_top(row, 5, 123, top_k_numpy)
    assert own == pytest.approx(exact[123], abs=1e-5)
    assert [i for i, _ in top] == np.argsort(-exact)[:5].tolist()
    assert [p for _, p in top] == pytest.approx(np.sort(exact)[::-1][:5].tolist(), abs=1e-5)


def test_everything_banned_still_gives_a_token() -> None:
    sampler = Sampler(Sampling(logit_bias=dict.fromkeys(range(9), -math.inf)), seed=1, n_vocab=9)
    assert 0 <= sampler.sample(np.zeros(9, np.float32), 0) < 9


def test_nan_is_an_error_and_not_a_token() -> None:
    row = np.zeros(9, np.float32)
    row[4] = math.nan
    for case in ({}, {"temperature": 0.0}, OFF):
        with pytest.raises(ComputeFailed):
            Sampler(Sampling(**case), seed=1, n_vocab=9).sample(row, 0)


def test_sampler_names() -> None:
    assert sampler_names("edskypmxt") == Sampling().samplers
    assert sampler_names(["top-k", "TOPP", "temp", "min_p", "nucleus"]) == (
        "top_k", "top_p", "temperature", "min_p", "top_p",
    )  # fmt: skip
    with pytest.raises(InvalidRequest, match="mirostat"):
        sampler_names(["mirostat"])


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": math.nan},
        {"repeat_penalty": 0.0},
        {"repeat_penalty": 1e-310},
        {"min_keep": -1},
        {"logit_bias": {1: math.inf}},
        {"samplers": ("greedy",)},
        {"mirostat": 3},
        {"mirostat_tau": math.inf},
        {"xtc_probability": math.nan},
        {"dry_multiplier": math.inf},
        {"dry_allowed_length": -1},
        {"dry_penalty_last_n": -2},
        {"repeat_last_n": -2},
        {"dry_sequence_breakers": ("x",) * 257},
        {"adaptive_decay": 1.0},
        {"samplers": ("top_k",) * 65},
    ],
)
def test_bad_values_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        Sampling(**bad).validate()
