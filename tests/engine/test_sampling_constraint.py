"""Constraints apply before every sampler, however the mask is applied."""

from __future__ import annotations

import math
import zlib
from typing import Any

import numpy as np
import pytest
from tiers import first_of

from llamado.engine.errors import ConstraintFailed
from llamado.engine.sampling import chain as sampling_module
from llamado.engine.sampling.chain import Sampler, SamplerSetup
from llamado.engine.sampling.params import Sampling

from .plain_sampling import Plain, Words

OFF: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}

CASES: list[dict[str, Any]] = [
    {},
    OFF,
    {"temperature": 0.0},
    {"temperature": 0.0, "repeat_penalty": 1.5, "logit_bias": {4: 50.0, 5: 50.0, 9: 49.0}},
    {"top_k": 3, "top_p": 1.0, "min_p": 0.0},
    OFF | {"top_k": 40, "dynatemp_range": 0.5},
    OFF | {"top_p": 0.9, "min_keep": 6},
    OFF | {"typical_p": 0.8},
    OFF | {"min_p": 0.1, "min_keep": 3},
    OFF | {"top_n_sigma": 1.0, "dynatemp_range": 0.5},
    OFF | {"xtc_probability": 1.0, "xtc_threshold": 0.01},
    {"repeat_penalty": 1.3, "presence_penalty": 0.3, "dry_multiplier": 0.8, "dry_allowed_length": 1},
    {"samplers": ("temperature", "top_k", "penalties", "dry"), "repeat_penalty": 2.0, "dry_multiplier": 0.8},
    {"mirostat": 1},
    {"mirostat": 2, "mirostat_tau": 3.0},
    {"samplers": ("top_k", "adaptive_p"), "adaptive_target": 0.3},
    {"ignore_eos": True, "top_k": 5},
]


class FakeMatcher:
    """Allows the given sets of tokens, one after another."""

    def __init__(self, steps: list[set[int] | None], n_bits: int) -> None:
        self.steps, self.n_bits = steps, n_bits
        self.accepted: list[int] = []
        self.n_masks = 0

    def mask(self) -> np.ndarray | None:
        self.n_masks += 1
        allowed = self.steps[len(self.accepted)]
        if allowed is None:
            return None
        bits = np.zeros(-(-self.n_bits // 32) * 32, np.uint8)
        bits[list(allowed)] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def accept(self, token: int) -> None:
        allowed = self.steps[len(self.accepted)]
        assert allowed is None or token in allowed
        self.accepted.append(token)


def allowed_sets(rng: np.random.Generator, row: np.ndarray) -> list[set[int] | None]:
    """A few tokens, many, all, those below the most likely and some of these, exactly one."""
    n = row.size
    likely = np.argsort(-row).tolist()
    return [
        set(rng.choice(n, 3, replace=False).tolist()),
        set(np.flatnonzero(rng.random(n) < 0.9).tolist()),
        None,
        set(likely[n // 3 :]),
        {likely[1], likely[3]} | set(likely[n // 4 :]),
        {int(rng.integers(n))},
        set(range(n)) - set(likely[:2]),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("n_vocab", first_of([3001, 50]))
@pytest.mark.parametrize("case", CASES, ids=lambda c: ",".join(f"{k}={v}" for k, v in c.items())[:60] or "default")
def test_masked_chain_equals_reference(case: dict[str, Any], n_vocab: int) -> None:
    rng = np.random.default_rng(zlib.crc32(f"{case}{n_vocab}".encode()))
    row = (rng.standard_normal(n_vocab) * 3).astype(np.float32)
    before = row.copy()
    prompt = [int(i) for i in np.argsort(-row)[rng.integers(0, 6, 30)]]
    eog = {int(row.argmax()), 2}
    sampling = Sampling(**case)
    words = Words(["abc\n"[i % 4] for i in range(n_vocab)])
    steps = allowed_sets(rng, row)
    matcher = FakeMatcher(steps, n_vocab)
    sampler = Sampler(sampling, SamplerSetup(n_vocab, eog, words), seed=3, matcher=matcher)
    sampler.start(prompt)
    plain = Plain(sampling, seed=3, eog=eog, words=words, prompt=prompt)
    for position, allowed in enumerate(steps):
        expected = plain.probabilities(row.tolist(), position, allowed)
        token = sampler.sample(row, position)
        assert np.array_equal(row, before)
        assert allowed is None or token in allowed
        own, got = sampler.candidates(n_vocab, token)
        differing = {i for i in set(dict(got)) ^ set(expected) if expected.get(i, 1) > 1e-30}
        assert len(differing) <= (1 if n_vocab > 1000 else 0)
        if not differing:
            assert [p for _, p in got] == pytest.approx([expected[i] for i, _ in got], rel=3e-4, abs=1e-30)
            assert own == pytest.approx(expected[token], rel=3e-4)
        plain.accept(token, expected)
        sampler.accept(token)
    assert len(matcher.accepted) == len(steps) == matcher.n_masks


@pytest.mark.parametrize("case", CASES, ids=lambda c: ",".join(f"{k}={v}" for k, v in c.items())[:60] or "default")
def test_ways_of_applying_a_mask_are_equivalent(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of tokens, the most likely tokens alone, and the whole row give the same candidates and token."""
    rng = np.random.default_rng(7)
    n_vocab = 2500
    row = (rng.standard_normal(n_vocab) * 3).astype(np.float32)
    steps = [allowed for allowed in allowed_sets(rng, row) for _ in range(2)]
    answers = []
    for few_words, only_top in ((10**6, True), (0, True), (0, False)):
        monkeypatch.setattr(sampling_module, "_FEW_WORDS", few_words)
        sampler = Sampler(Sampling(**case), SamplerSetup(n_vocab, [2]), seed=3, matcher=FakeMatcher(steps, n_vocab))
        if not only_top:
            sampler._k_next = 0
        sampler.start([1, 2, 3, 1, 2])
        answer = []
        for position in range(len(steps)):
            token = sampler.sample(row, position)
            answer.append((token, sampler.candidates(50, token)[1]))
            sampler.accept(token)
        answers.append(answer)
    for other in answers[1:]:
        for (token, probs), (token2, probs2) in zip(answers[0], other, strict=True):
            assert token == token2
            assert [i for i, _ in probs] == [i for i, _ in probs2]
            assert [p for _, p in probs] == pytest.approx([p for _, p in probs2], rel=1e-5)


@pytest.mark.parametrize("n_bits", [2464, 2500, 4096])
@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.0])
def test_masks_of_another_length_than_the_row(temperature: float, n_bits: int) -> None:
    """Tokens beyond the mask are forbidden; bits beyond the row are ignored."""
    n_vocab = 2500
    row = np.zeros(n_vocab, np.float32)
    row[2490:] = 9.0
    row[77] = 5.0
    allowed = set(range(0, 2464, 7)) | set(range(2500, n_bits)) if n_bits != 2500 else set(range(0, 2464, 7))
    for top_k in (0, 40):
        matcher = FakeMatcher([allowed] * 20, n_bits)
        case = {"temperature": temperature, "top_k": top_k}
        sampler = Sampler(Sampling(**(OFF | case)), SamplerSetup(n_vocab), seed=1, matcher=matcher)
        for position in range(20):
            token = sampler.sample(row, position)
            assert token in allowed and token < 2464
            sampler.accept(token)
        if not temperature:
            assert set(matcher.accepted) == {77}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("allowed", [{5, 9}, {9}, set(range(5, 2900, 2))])
def test_bans_yield_to_the_constraint(allowed: set[int], temperature: float) -> None:
    """If a request bans every token that its constraint allows, the constraint wins."""
    bias = dict.fromkeys(allowed, -math.inf)
    matcher = FakeMatcher([allowed], 3000)
    sampler = Sampler(Sampling(temperature=temperature, logit_bias=bias), SamplerSetup(3000), seed=1, matcher=matcher)
    assert sampler.sample(np.zeros(3000, np.float32), 0) in allowed


def test_mask_is_requested_once_in_advance() -> None:
    matcher = FakeMatcher([{3, 4}, {1}, None], 50)
    sampler = Sampler(Sampling(), SamplerSetup(50), seed=1, matcher=matcher)
    sampler.start([1, 2, 3])
    row = np.zeros(50, np.float32)
    sampler.query_constraint()
    sampler.query_constraint()
    first = sampler.sample(row, 3)
    assert sampler.sample(row, 3) == first in {3, 4}
    assert matcher.n_masks == 1 and matcher.accepted == []
    sampler.accept(first)
    assert sampler.sample(row, 4) == 1 and matcher.n_masks == 2
    assert sampler.candidates(5, 1) == (1.0, [(1, 1.0)])
    sampler.accept(1)
    assert matcher.accepted == [first, 1]


def test_mask_without_tokens_raises_an_error() -> None:
    sampler = Sampler(Sampling(), SamplerSetup(50), seed=1, matcher=FakeMatcher([set()], 50))
    with pytest.raises(ConstraintFailed):
        sampler.sample(np.zeros(50, np.float32), 0)


def test_infill_ends_only_where_allowed() -> None:
    row = np.zeros(60, np.float32)  # no text is likely enough, so the answer ends
    words = Words([chr(97 + i % 26) + str(i) for i in range(60)], eos=7)
    sampling = Sampling(samplers=("infill",))
    assert Sampler(sampling, SamplerSetup(60, [7], words), seed=1).sample(row, 0) == 7
    matcher = FakeMatcher([set(range(20, 50))], 60)
    sampler = Sampler(sampling, SamplerSetup(60, [7], words), seed=1, matcher=matcher)
    assert 20 <= sampler.sample(row, 0) < 50
