"""FNV-1a in machine code against its definition."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamado.rpc.hashing import BASIS, LANES, PRIME, fnv1a, fnv1a_many


def plain(data: bytes, start: int = BASIS) -> int:
    for byte in data:
        start = ((start ^ byte) * PRIME) & 0xFFFFFFFFFFFFFFFF
    return start


def array(data: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(data, np.uint8)


def test_published_values() -> None:
    """From the test vectors of the FNV authors (draft-eastlake-fnv)."""
    for text, value in (
        (b"", 0xCBF29CE484222325),
        (b"a", 0xAF63DC4C8601EC8C),
        (b"foobar", 0x85944171F73967E8),
    ):
        assert fnv1a(array(text)) == value


@given(st.binary(max_size=100))
def test_equals_the_definition(data: bytes) -> None:
    assert fnv1a(array(data)) == plain(data)


@given(st.binary(max_size=60), st.integers(0, 60))
def test_a_hash_can_be_continued(data: bytes, cut: int) -> None:
    whole = array(data)
    assert fnv1a(whole[cut:], fnv1a(whole[:cut])) == plain(data)


@pytest.mark.slow
@given(st.lists(st.binary(max_size=50), max_size=3 * LANES))
def test_many_at_once(arrays: list[bytes]) -> None:
    assert fnv1a_many([array(a) for a in arrays]) == [plain(a) for a in arrays]


def test_several_threads() -> None:
    data = np.random.default_rng(0).integers(0, 256, (8, 100_000), np.uint8)
    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(fnv1a, data)] == fnv1a_many(list(data))


def test_arrays_with_gaps_are_rejected() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        fnv1a(np.zeros(10, np.uint8)[::2])
