"""The random numbers of a seed never change, so that a stored seed reproduces its answer."""

from __future__ import annotations

import pytest

from llamado.engine.sampling.rng import uniform

_64 = (1 << 64) - 1


def mixed(z: int) -> int:
    """The output function of SplitMix64 (Steele, Lea, Flood 2014)."""
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _64
    return z ^ z >> 31


@pytest.mark.parametrize("seed", [0, 1, 42, 2**32 - 1, 2**63 + 12345, 2**64 - 1])
@pytest.mark.parametrize("stream", [0, 1, 7])
def test_number_at_a_position_equals_the_stepped_generator(seed: int, stream: int) -> None:
    golden = 0x9E3779B97F4A7C15
    state = mixed((seed + golden) & _64)
    if stream:
        state = mixed(state ^ (stream * golden & _64))
    for position in range(50):
        state = (state + golden) & _64
        assert uniform(seed, position, stream) == (mixed(state) >> 11) / 2**53


def test_known_random_numbers() -> None:
    assert mixed(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # the first output from state 0, as published
    assert [uniform(7, place) for place in range(2)] == [0.7215081806049702, 0.6497043364684557]
