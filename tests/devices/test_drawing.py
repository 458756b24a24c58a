"""Tokens drawn by machine code: those that the sampler chain in numpy draws, in every lowering."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.cpu.top_rows import TopRows
from llamado.devices.drawing import Cut, Drawing
from llamado.engine.errors import ComputeFailed
from llamado.engine.sampling.chain import Sampler, SamplerSetup
from llamado.engine.sampling.params import Sampling

CASES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 1.0, "min_p": 0.0, "top_p": 1.0},
    {"temperature": 5.0, "top_k": 1000},
    {"temperature": 1e-20},
    {"top_k": 1},
    {"top_p": 0.0, "min_keep": 3, "temperature": 2.0},
    {"min_p": 1.0, "min_keep": 5, "temperature": 3.0},
    {"samplers": ("top_k", "temperature", "min_p", "top_p"), "temperature": 1.7},
    {"samplers": ("top_k", "temperature", "top_p", "temperature"), "temperature": 0.6, "top_p": 0.7},
    {"repeat_penalty": 1.3, "logit_bias": {3: 4.0, 5: -math.inf}, "temperature": 1.5},
]


def rows_of(n: int, random: np.random.Generator) -> list[np.ndarray[Any, Any]]:
    """Rows as models give them, flat ones, ties, far apart, masked, and nothing but -inf."""
    normal = random.standard_normal(n).astype(np.float32)
    few = np.full(n, -np.inf, np.float32)
    few[[3, n // 2]] = 1.5
    return [
        normal * 3, normal * np.float32(0.01), random.integers(0, 4, n).astype(np.float32), normal * np.float32(1e36),
        normal * 300, few, np.full(n, -np.inf, np.float32), np.full(n, -1e38, np.float32),
    ]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_are_those_of_the_chain(cpu: CpuDevice, case: dict[str, Any]) -> None:
    n_vocab = 1500
    random = np.random.default_rng(len(str(case)))
    find = TopRows(cpu.jit)
    rows = rows_of(n_vocab, random)
    sampling = Sampling(**case)
    drawing = [Sampler(sampling, SamplerSetup(n_vocab), seed=seed, weights=False) for seed in range(len(rows))]
    plain = [Sampler(sampling, SamplerSetup(n_vocab), seed=seed) for seed in range(len(rows))]
    undrawn = [Sampler(sampling, SamplerSetup(n_vocab), seed=seed, weights=False) for seed in range(len(rows))]
    for sampler in (*drawing, *plain, *undrawn):
        sampler.start([1, 2, 3])
    for position in range(60):
        wanted = [sampler.prepare(row, position) for sampler, row in zip(drawing, rows, strict=True)]
        asked = [one for one in wanted if one is not None]
        found = find(*zip(*asked, strict=True))  # type: ignore[arg-type]
        assert len(asked) == len(rows) and all(isinstance(one, int) for one in found)
        tokens = [s.sample(row, position, one) for s, row, one in zip(drawing, rows, found, strict=True)]
        assert tokens == [sampler.sample(row, position) for sampler, row in zip(plain, rows, strict=True)]
        assert tokens == [s.sample(row, position) for s, row in zip(undrawn, rows, strict=True)], "of numpy's largest"
        for sampler, token in zip((*drawing, *plain, *undrawn), tokens * 3, strict=True):
            sampler.accept(token)


def test_ties_and_neighboring_values(cpu: CpuDevice) -> None:
    """On either side of where one token's share ends, a few units of the last place away, another one is drawn."""
    find = TopRows(cpu.jit)
    row = np.sort(np.random.default_rng(5).standard_normal(40).astype(np.float32) * 4)[::-1].copy()
    row[0] = row[1] + np.float32(1e-3)
    weights = [math.exp(float(v) - float(row[0])) for v in row]
    total = math.fsum(weights)
    for i in range(39):
        border = math.fsum(weights[: i + 1]) / total
        near = 1e-14 if i < 30 else 1e-15
        if weights[i + 1] / total < 4 * near:
            break
        for u, place in ((border - near, i), (border + near, i + 1)):
            assert find([row], [40], [Drawing(np.empty((0, 3)), u)]) == [place]
    else:
        i = 39
    assert i > 15


def test_sampling_on_the_device_draws_only_if_needed(cpu: CpuDevice) -> None:
    find = TopRows(cpu.jit)
    rows = [np.arange(100, dtype=np.float32), -np.arange(100, dtype=np.float32), np.full(100, np.nan, np.float32)]
    half = Drawing(np.array([[Cut.TEMPERATURE, 100.0, 0.0], [Cut.TOP_P, 0.4, 2.0]]), 0.999999)
    first, second, third = find([rows[0], *rows[1:]], [4, 5, 6], [half, None, half])
    assert first == 98 and third is None
    assert isinstance(second, tuple) and second[0].tolist() == [0, 1, 2, 3, 4]


def test_unsupported_samplers_are_not_offloaded() -> None:
    row = np.random.default_rng(3).standard_normal(200).astype(np.float32)
    others: list[dict[str, Any]] = [
        {"top_k": 0}, {"typical_p": 0.5}, {"xtc_probability": 0.5}, {"dynatemp_range": 0.3}, {"mirostat": 2},
        {"temperature": 1e-31}, {"samplers": ("top_k", "top_k", "temperature")}, {"top_n_sigma": 1.0},
    ]  # fmt: skip
    for case in others:
        wanted = Sampler(Sampling(**case), SamplerSetup(200), seed=1, weights=False).prepare(row, 0)
        assert wanted is None or wanted.drawing is None, case
    wanted = Sampler(Sampling(), SamplerSetup(200), seed=1).prepare(row, 0)
    assert wanted is not None and wanted.drawing is None, "who is asked for weights has to know them"


def test_rows_with_nan(cpu: CpuDevice) -> None:
    row = np.zeros(200, np.float32)
    row[7] = np.nan
    with pytest.raises(ComputeFailed):
        Sampler(Sampling(), SamplerSetup(200, top_rows=TopRows(cpu.jit)), seed=1, weights=False).sample(row, 0)
