"""Sampler state: DRY's window, penalties, Mirostat and adaptive-p, and chains that survive any values."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamado.engine.sampling.chain import Sampler, SamplerSetup, uniform
from llamado.engine.sampling.dry import Breakers, Dry
from llamado.engine.sampling.params import KNOWN_SAMPLERS, Sampling

from .plain_sampling import Plain, Words, dry_penalties

WORDS = Words(["a", "b", "ab", "\n", "a\n", "b:x", "x", "xy", "yz", ":", "", "é"])


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 11), max_size=30),
    answer=st.lists(st.integers(0, 11), max_size=40),
    alphabet=st.integers(1, 12),
    last_n=st.sampled_from([-1, 1, 2, 3, 5, 8, 13, 30, 64]),
    allowed=st.integers(0, 4),
    breakers=st.lists(st.sampled_from(["\n", ":", "xyz", "ab", "aba", "bx", "yzx", "éa", "", "b\n"]), max_size=4),
    base=st.sampled_from([1.0, 1.2, 1.75, 1e30]),
)
def test_dry_equals_a_comparison_of_all_suffixes(
    prompt: list[int],
    answer: list[int],
    alphabet: int,
    last_n: int,
    allowed: int,
    breakers: list[str],
    base: float,
) -> None:
    prompt, answer = [t % alphabet for t in prompt], [t % alphabet for t in answer]
    sampling = Sampling(
        dry_multiplier=0.7,
        dry_base=base,
        dry_allowed_length=allowed,
        dry_penalty_last_n=last_n,
        dry_sequence_breakers=tuple(breakers),
    )
    words = WORDS if breakers else None
    dry = Dry(sampling, Breakers(breakers, WORDS) if breakers else None)
    dry.start(prompt)
    sequence = list(prompt)
    for token in [*answer, 0]:
        tokens, lowered = dry.penalties()
        expected = dry_penalties(sequence, sampling, words)
        got = dict(zip(tokens.tolist(), lowered.tolist(), strict=True))
        assert got == pytest.approx(expected)
        dry.accept(token)
        sequence.append(token)


@pytest.mark.parametrize("n_tokens", [1, 2, 3])
def test_dry_counts_repetitions_in_the_prompt(n_tokens: int) -> None:
    """Repetitions inside repetitions."""
    rng = np.random.default_rng(n_tokens)
    sampling = Sampling(dry_multiplier=1.0, dry_base=2.0, dry_allowed_length=1, dry_penalty_last_n=-1)
    for i in range(200):
        prompt = rng.integers(0, n_tokens, 2 + i % 40).tolist()
        dry = Dry(sampling, None)
        dry.start(prompt)
        tokens, lowered = dry.penalties()
        got = dict(zip(tokens.tolist(), lowered.tolist(), strict=True))
        assert got == pytest.approx(dry_penalties(prompt, sampling, None))


@pytest.mark.parametrize("breakers", [["ab", "aba"], ["abx", "bxa", "xa"], ["a", "xb"]])
def test_dry_prefers_the_longest_breaker(breakers: list[str]) -> None:
    """The longest breaker that starts at a token counts, even if a shorter one is complete first."""
    rng = np.random.default_rng(len(breakers))
    sampling = Sampling(
        dry_multiplier=1.0,
        dry_base=2.0,
        dry_allowed_length=0,
        dry_penalty_last_n=-1,
        dry_sequence_breakers=tuple(breakers),
    )
    words = Words(["a", "b", "x"])
    for _ in range(10):
        sequence: list[int] = rng.integers(0, 3, 8).tolist()
        dry = Dry(sampling, Breakers(breakers, words))
        dry.start(sequence)
        for token in rng.integers(0, 3, 20).tolist():
            dry.accept(token)
            sequence.append(token)
            tokens, lowered = dry.penalties()
            got = dict(zip(tokens.tolist(), lowered.tolist(), strict=True))
            assert got == pytest.approx(dry_penalties(sequence, sampling, words))


@pytest.mark.parametrize("last_n", [16, 700, -1])
def test_dry_window_moves_with_a_long_answer(last_n: int) -> None:
    """The window moves on, and tokens it has left are forgotten."""
    rng = np.random.default_rng(1)
    sampling = Sampling(dry_multiplier=0.7, dry_allowed_length=1, dry_penalty_last_n=last_n)
    dry = Dry(sampling, Breakers(sampling.dry_sequence_breakers, WORDS))
    sequence = rng.integers(0, 3, 20).tolist()
    dry.start(sequence)
    for i in range(2500):
        token = int(rng.integers(0, 3)) if i % 200 else 3
        dry.accept(token)
        sequence.append(token)
        if i % 97 == 0:
            tokens, lowered = dry.penalties()
            got = dict(zip(tokens.tolist(), lowered.tolist(), strict=True))
            assert got == pytest.approx(dry_penalties(sequence, sampling, WORDS))


def test_breakers_are_truncated_as_in_llama_cpp() -> None:
    """Of a breaker, 40 bytes count in whole characters, and 20 tokens after its first."""
    words = Words(["q", "x", "é"])
    breakers = Breakers(["q" + "x" * 60, "x" + "é" * 30], words)
    assert breakers.tails(0) == {20: {(1,) * 20}}
    assert breakers.tails(1) == {19: {(2,) * 19}}
    assert not breakers.single and breakers.reach == 20


@pytest.mark.parametrize("last_n", [5, 100, -1])
def test_penalty_window_moves_with_a_long_answer(last_n: int) -> None:
    rng = np.random.default_rng(1)
    n_vocab = 30
    sampling = Sampling(
        repeat_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.05,
        repeat_last_n=last_n,
        samplers=("penalties",),
    )
    row = (rng.standard_normal(n_vocab) * 2).astype(np.float32)
    sampler = Sampler(sampling, SamplerSetup(n_vocab), seed=1)
    sequence = rng.integers(0, 10, 40).tolist()
    sampler.start(sequence)
    for i in range(1000):
        token = int(rng.integers(n_vocab))
        sampler.accept(token)
        sequence.append(token)
        if i % 50 == 0:
            expected = Plain(sampling, prompt=sequence).probabilities(row.tolist(), 0)
            _, got = sampler.candidates(n_vocab, sampler.sample(row, 0))
            assert [p for _, p in got] == pytest.approx([expected[t] for t, _ in got], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_reaches_its_target(version: int) -> None:
    rng = np.random.default_rng(0)
    n_vocab = 1500
    sampler = Sampler(Sampling(mirostat=version, mirostat_tau=3.0, temperature=1.0), SamplerSetup(n_vocab), seed=11)
    surprises = []
    for position in range(700):
        row = (-1.1 * np.log(np.arange(1, n_vocab + 1)) + rng.standard_normal(n_vocab) * 0.1).astype(np.float32)
        token = sampler.sample(row, position)
        surprises.append(-math.log2(sampler.candidates(1, token)[0]))
        sampler.accept(token)
    assert np.mean(surprises[200:]) == pytest.approx(3.0, abs=0.15)


@pytest.mark.parametrize("case", [{"mirostat": 1}, {"mirostat": 2}, {"xtc_probability": 0.5, "xtc_threshold": 0.01}])
def test_answers_depend_only_on_seed_and_logits(case: dict[str, Any]) -> None:
    """Sampling a token twice changes no state, and a token that was not accepted is forgotten."""
    rng = np.random.default_rng(4)
    rows = (rng.standard_normal((40, 400)) * 2).astype(np.float32)
    answers = []
    for again in (1, 3):
        sampler = Sampler(Sampling(**case), SamplerSetup(400), seed=5)
        sampler.start([1, 2, 3])
        answer = []
        for position, row in enumerate(rows):
            tokens = {sampler.sample(row, position) for _ in range(again)}
            assert len(tokens) == 1
            answer += tokens
            sampler.accept(answer[-1])
        answers.append(answer)
    assert answers[0] == answers[1]


def test_streams_of_random_numbers_are_independent() -> None:
    streams = np.array([[uniform(7, i, k) for i in range(3000)] for k in range(4)])
    assert streams.min() >= 0 and streams.max() < 1
    assert np.allclose(np.corrcoef(streams), np.eye(4), atol=0.06)
    assert np.allclose(streams.mean(axis=1), 0.5, atol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("probability", [0.0, 0.25, 1.0])
def test_xtc_applies_with_its_probability(probability: float) -> None:
    row = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    sampling = Sampling(samplers=("xtc",), xtc_probability=probability, xtc_threshold=0.1)
    sampler = Sampler(sampling, SamplerSetup(4), seed=5)
    counts = np.bincount([sampler.sample(row, i) for i in range(2500)], minlength=4) / 2500
    kept, cut = np.array([0.5, 0.3, 0.15, 0.05]), np.array([0, 0, 0.75, 0.25])
    assert np.allclose(counts, (1 - probability) * kept + probability * cut, atol=0.025)


@pytest.mark.slow
def test_each_xtc_of_a_chain_applies_independently() -> None:
    row = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    sampling = Sampling(samplers=("xtc", "xtc"), xtc_probability=0.5, xtc_threshold=0.15)
    sampler = Sampler(sampling, SamplerSetup(4), seed=5)
    sizes = [len(sampler.candidates(4, sampler.sample(row, i))[1]) for i in range(1500)]
    # None, one or both remove tokens.
    assert np.allclose(np.bincount(sizes, minlength=5)[[4, 2, 1]] / 1500, [0.25, 0.5, 0.25], atol=0.04)


@pytest.mark.parametrize(("min_keep", "left"), [(0, 2), (2, 2), (3, 4)])
def test_xtc_keeps_min_keep_tokens(min_keep: int, left: int) -> None:
    row = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    sampling = Sampling(samplers=("xtc",), xtc_probability=1.0, xtc_threshold=0.1, min_keep=min_keep)
    sampler = Sampler(sampling, SamplerSetup(4), seed=5)
    assert len(sampler.candidates(4, sampler.sample(row, 0))[1]) == left


def test_top_n_sigma_keeps_the_largest_of_tiny_logits() -> None:
    """Consecutive penalties can go below the smallest f32."""
    sampling = Sampling(
        samplers=("infill", "penalties", "penalties", "top_n_sigma"),
        top_n_sigma=1e-5,
        frequency_penalty=1e308,
        repeat_penalty=2.0,
        repeat_last_n=-1,
        temperature=-1.0,
        xtc_probability=-1.0,
    )
    words = Words(WORDS.texts[:3], eos=0)
    sampler = Sampler(sampling, SamplerSetup(3, [0], words), seed=1)
    sampler.start([2, 1, 1, 0, 0, 0, 0, 2])
    assert sampler.sample(np.array([30, 1, 1e4], np.float32), 0) in (0, 1, 2)


@pytest.mark.parametrize("chain", [("temperature",), ("temperature", "typ_p"), ("temperature", "top_p")])
@pytest.mark.parametrize("n_vocab", [2, 1100])
def test_extreme_dynamic_temperature(chain: tuple[str, ...], n_vocab: int) -> None:
    """The sum of the two exceeds f64, and if one candidate is certain, it is multiplied by 0."""
    sampling = Sampling(samplers=chain, temperature=1e308, dynatemp_range=1e308, typical_p=0.5, top_p=0.5)
    sampler = Sampler(sampling, SamplerSetup(n_vocab), seed=1)
    row = np.full(n_vocab, -math.inf, np.float32)
    row[1] = -3e38
    assert sampler.sample(row, 0) == 1


NUMBERS = [
    field.name
    for field in dataclasses.fields(Sampling)
    if field.type == "float" and field.name not in ("repeat_penalty", "adaptive_decay")
]
numbers = st.sampled_from([-1e308, -1.0, -1e-30, 0.0, 1e-300, 1e-31, 1e-5, 0.3, 1.0, 1.5, 40.0, 1e30, 1e308])
positive = st.sampled_from([1e-300, 1e-20, 0.5, 1.0, 2.0, 1e38, 1e308])
logits = st.sampled_from([-math.inf, -3e38, -100.0, -1.0, -1e-30, 0.0, 0.5, 1.0, 1.5, 30.0, 1e4, 3e38])


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_finite_values_give_a_valid_sample(data: st.DataObject) -> None:
    """For finite options, order and logits, a candidate with a valid probability is sampled; the row is unchanged."""
    names = data.draw(st.lists(st.sampled_from(NUMBERS), unique=True))
    fields: dict[str, Any] = {name: data.draw(numbers, name) for name in names}
    fields |= {
        "top_k": data.draw(st.sampled_from([-1, 0, 1, 3, 5000])),
        "min_keep": data.draw(st.sampled_from([0, 1, 4, 5000])),
        "mirostat": data.draw(st.sampled_from([0, 0, 0, 1, 2])),
        "repeat_penalty": data.draw(positive),
        "repeat_last_n": data.draw(st.sampled_from([-1, 0, 2, 64])),
        "dry_allowed_length": data.draw(st.integers(0, 3)),
        "dry_penalty_last_n": data.draw(st.sampled_from([-1, 0, 2, 64])),
        "samplers": tuple(data.draw(st.lists(st.sampled_from(KNOWN_SAMPLERS), max_size=12))),
        "logit_bias": data.draw(st.dictionaries(st.integers(0, 12), st.sampled_from([-math.inf, -1e308, 2.0, 1e308]))),
    }
    sampling = Sampling(**fields)
    sampling.validate()
    some = data.draw(st.lists(logits, min_size=1, max_size=12))
    n_vocab = data.draw(st.sampled_from([len(some), 1100]))
    row = np.resize(np.array(some, np.float32), n_vocab)
    before = row.copy()
    words = Words([WORDS.texts[i % len(WORDS.texts)] for i in range(n_vocab)], eos=0)
    sampler = Sampler(sampling, SamplerSetup(n_vocab, [0], words), seed=1)
    prompt = data.draw(st.lists(st.integers(0, min(n_vocab, 4) - 1), max_size=12))
    sampler.start(prompt)
    for position in range(3):
        token = sampler.sample(row, position)
        assert 0 <= token < n_vocab
        assert np.array_equal(row, before)
        own, top = sampler.candidates(n_vocab, token)
        assert 0 < own <= 1.0000001
        assert math.fsum(p for _, p in top) == pytest.approx(1.0, rel=1e-4)
        sampler.accept(token)
