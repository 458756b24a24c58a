"""Strings are found as a dict of all of them finds them."""

from __future__ import annotations

import random

import pytest

from llamado.gguf import text_index
from llamado.gguf.metadata import StringArray
from llamado.gguf.text_index import TextIndex

LETTERS = "ab▁ é\0中😀"


def texts(n: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(LETTERS, k=rng.randrange(7))) for _ in range(n)]


@pytest.mark.parametrize("n", [0, 1, 2, 3, 1000, 40_000])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("kept", [3, 1 << 16])
def test_list_of_stored_models(n: int, last: bool, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_index, "KEPT", kept)
    every = texts(n, n)
    expected: dict[str, int] = {}
    for i, text in enumerate(every):
        if text and (last or text not in expected):
            expected[text] = i
    index = TextIndex(StringArray.of(every), last=last)
    looked_for = every if n <= 1000 else random.Random(n).sample(every, 4000)
    for text in ["", *looked_for, *texts(1000, -1)] * 2:
        assert index.find(text) == expected.get(text, -1)
        assert (text in index) is (text in expected)
    with pytest.raises(KeyError):
        index["nowhere"]


def test_texts_of_one_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_index, "hash", len, raising=False)
    every = ["ab", "ba", "a", "ab", "cd"]
    index = TextIndex(StringArray.of(every), last=True)
    assert [index.find(text) for text in (*every, "dc", "b")] == [3, 1, 2, 3, 4, -1, -1]


def test_invalid_utf8_and_names() -> None:
    index = TextIndex(StringArray.of([b"\xff", b"\xc3", "é", ""]), last=True, names={"[EMPTY_3]": 3})
    assert index["\udcff"] == 0 and index["\udcc3"] == 1 and index["é"] == 2
    assert index["[EMPTY_3]"] == 3 and "\ufffd" not in index and "\ud800" not in index
