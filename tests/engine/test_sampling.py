"""Each sampler against a plain full-vocabulary reference in float64."""

from __future__ import annotations

import math
import zlib
from typing import Any

import numpy as np
import pytest
from tiers import first_of

from llamado.engine.errors import ComputeFailed
from llamado.engine.request import InvalidRequest
from llamado.engine.sampling.candidates import log_softmax_top, top_k
from llamado.engine.sampling.chain import Sampler, SamplerSetup, uniform
from llamado.engine.sampling.params import Sampling, sampler_names

from .plain_sampling import Plain, Words

OFF: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}


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
    OFF | {"top_n_sigma": 1.0},
    OFF | {"top_n_sigma": 0.3, "top_k": 50},
    OFF | {"top_n_sigma": 2.0, "logit_bias": dict.fromkeys(range(0, 50, 3), -math.inf)},
    {"samplers": ("top_k", "top_n_sigma"), "top_n_sigma": 0.5, "top_k": 30},
    OFF | {"dynatemp_range": 0.6},
    {"dynatemp_range": 0.5, "dynatemp_exponent": 2.5},
    OFF | {"dynatemp_range": 0.5, "top_n_sigma": 1.0},
    OFF | {"dynatemp_range": 0.5, "top_n_sigma": 0.5, "top_k": 30},
    OFF | {"dynatemp_range": 0.5, "top_n_sigma": 0.5, "min_p": 0.9, "min_keep": 25},
    OFF | {"dynatemp_range": 0.5, "temperature": 0.2, "logit_bias": dict.fromkeys(range(20), -math.inf)},
    {"dynatemp_range": 0.7, "temperature": 0.0, "top_k": 10},
    OFF | {"xtc_probability": 1.0, "xtc_threshold": 0.01},
    OFF | {"xtc_probability": 1.0, "xtc_threshold": 0.02, "top_k": 20},
    OFF | {"xtc_probability": 1.0, "xtc_threshold": 0.0, "top_k": 20},
    OFF | {"xtc_probability": 1.0, "xtc_threshold": 0.001, "top_k": 20, "min_keep": 15},
    OFF | {"xtc_probability": 1.0, "xtc_threshold": 0.6},
    OFF | {"xtc_probability": 1.0, "xtc_threshold": 0.001, "temperature": 0.0},
    {"samplers": ("xtc", "temperature", "xtc", "top_k"), "xtc_probability": 0.7, "xtc_threshold": 0.01},
    {"samplers": ("temperature", "temperature", "top_p"), "temperature": 0.8, "top_p": 0.7},
    {"samplers": ("penalties", "top_k", "penalties"), "repeat_penalty": 1.4, "presence_penalty": 0.5},
    OFF | {"repeat_penalty": 1.3, "repeat_last_n": -1, "frequency_penalty": 0.1},
    OFF | {"dry_multiplier": 0.8},
    OFF | {"dry_multiplier": 1.2, "dry_base": 1.1, "dry_allowed_length": 0, "top_k": 30},
    OFF | {"dry_multiplier": 0.9, "dry_allowed_length": 1, "dry_penalty_last_n": -1},
    OFF | {"dry_multiplier": -0.9, "dry_allowed_length": 1, "dry_penalty_last_n": 9},
    {"samplers": ("top_k", "dry", "penalties", "dry"), "dry_multiplier": 2.0, "dry_allowed_length": 1, "top_k": 12},
    {"mirostat": 1},
    {"mirostat": 1, "mirostat_tau": 2.0, "temperature": 1.3, "top_k": 3, "repeat_penalty": 2.0},
    {"mirostat": 1, "temperature": 0.0},
    {"mirostat": 2},
    {"mirostat": 2, "mirostat_tau": 1.5, "temperature": 1.3, "dynatemp_range": 1.0},
    {"mirostat": 2, "mirostat_tau": -1.0},
    {"mirostat": 2, "temperature": 0.0},
    {"samplers": ("top_k", "adaptive_p", "temperature"), "adaptive_target": 0.3},
    {"samplers": ("adaptive_p",), "adaptive_target": 0.05},
    {"samplers": ("adaptive_p", "min_p"), "adaptive_target": -1.0},
    {"samplers": ("top_k", "adaptive_p"), "adaptive_target": 0.9, "adaptive_decay": 0.0},
    {"samplers": ("top_k", "infill"), "top_k": 30},
    {"samplers": ("infill", "temperature")},
    {"samplers": ("top_k", "infill", "temperature"), "top_k": 10, "logit_bias": {2: -math.inf}},
]


@pytest.mark.parametrize("shape", first_of([(50, 1.0), (1300, 3.0), (50, 4.0), (1300, 0.05)], 2))
@pytest.mark.parametrize("case", CASES, ids=lambda c: ",".join(f"{k}={v}" for k, v in c.items())[:60] or "default")
def test_chain_equals_reference(case: dict[str, Any], shape: tuple[int, float]) -> None:
    n_vocab, spread = shape
    rng = np.random.default_rng(zlib.crc32(f"{case}{spread}{n_vocab}".encode()))
    row = (rng.standard_normal(n_vocab) * spread).astype(np.float32)
    likely = np.argsort(-row)
    prompt = [int(i) for i in likely[rng.integers(0, 6, 30)]]
    sampling = Sampling(**case)
    eog = {int(likely[0]), 2}
    words = Words(["ab"[i % 2] * (i % 5) + "xyz\n"[i % 4] for i in range(n_vocab)], eos=2)
    plain = Plain(sampling, seed=1, eog=eog, words=words, prompt=prompt)
    sampler = Sampler(sampling, SamplerSetup(n_vocab, eog, words), seed=1)
    sampler.start(prompt)
    before = row.copy()
    for position in range(30, 33 if n_vocab < 1000 else 31):
        expected = plain.probabilities(row.tolist(), position)
        token = sampler.sample(row, position)
        assert np.array_equal(row, before), "the row must be unchanged"
        own, got = sampler.candidates(n_vocab, token)
        assert token in expected
        # float32 rounding may move one or two tokens of a flat distribution across the border of a filter.
        differing = set(dict(got)) ^ {i for i, p in expected.items() if p > 1e-37}
        assert len({i for i in differing if expected.get(i, 1) > 1e-30}) <= (2 if n_vocab > 1000 else 0)
        if not differing:
            for i, p in got:
                assert p == pytest.approx(expected[i], rel=3e-4, abs=1e-30)
            assert own == pytest.approx(expected[token], rel=3e-4)
            assert [p for _, p in got] == sorted((p for _, p in got), reverse=True)
        sampler.accept(token)
        plain.accept(token, expected)
        row = np.roll(row, 1)
        before = row.copy()
    if not sampling.mirostat and "adaptive_p" not in sampling.samplers:
        read_only = row.copy()
        read_only.flags.writeable = False
        assert sampler.sample(read_only, 17) == sampler.sample(row, 17)


@pytest.mark.slow
def test_samples_follow_the_probabilities() -> None:
    row = np.log(np.array([0.5, 0.25, 0.15, 0.1, 1e-9], np.float32))
    for case in (OFF, OFF | {"top_k": 4}):
        sampler = Sampler(Sampling(**case), SamplerSetup(5), seed=5)
        counts = np.bincount([sampler.sample(row, i) for i in range(4000)], minlength=5)
        assert np.allclose(counts / 4000, [0.5, 0.25, 0.15, 0.1, 0], atol=0.02)


def test_random_numbers_depend_on_seed_and_position_only() -> None:
    row = np.random.default_rng(3).standard_normal(1000).astype(np.float32)
    first = Sampler(Sampling(), SamplerSetup(1000), seed=9)
    tokens = [first.sample(row, i) for i in range(50)]
    second = Sampler(Sampling(), SamplerSetup(1000), seed=9)
    assert [second.sample(row, i) for i in reversed(range(50))] == tokens[::-1]
    other = Sampler(Sampling(), SamplerSetup(1000), seed=10)
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
        ids, logits = top_k(row, k)
        expected = np.argsort(-row, kind="stable")[:k]
        assert np.array_equal(ids, expected)
        assert np.array_equal(logits, row[expected])
        assert ids.dtype == np.int32 and logits.dtype == np.float32


def test_log_softmax_top() -> None:
    row = np.random.default_rng(0).standard_normal(3000).astype(np.float32)
    exact = row.astype(np.float64) - math.log(math.fsum(math.exp(x) for x in row))
    own, top = log_softmax_top(row, 5, 123)
    assert own == pytest.approx(exact[123], abs=1e-5)
    assert [i for i, _ in top] == np.argsort(-exact)[:5].tolist()
    assert [p for _, p in top] == pytest.approx(np.sort(exact)[::-1][:5].tolist(), abs=1e-5)


def test_banning_every_token_still_gives_a_token() -> None:
    sampler = Sampler(Sampling(logit_bias=dict.fromkeys(range(9), -math.inf)), SamplerSetup(9), seed=1)
    assert 0 <= sampler.sample(np.zeros(9, np.float32), 0) < 9


def test_nan_logits_raise_an_error() -> None:
    row = np.zeros(9, np.float32)
    row[4] = math.nan
    for case in ({}, {"temperature": 0.0}, OFF):
        with pytest.raises(ComputeFailed):
            Sampler(Sampling(**case), SamplerSetup(9), seed=1).sample(row, 0)


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
def test_invalid_values_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        Sampling(**bad).validate()
