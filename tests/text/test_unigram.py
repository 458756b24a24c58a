"""Unigram vocabularies: the likeliest tokens, spaces, unknown characters, and the rules that text is normalized by."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from charsmaps import charsmap

from llamado.gguf.metadata import Metadata, StringArray
from llamado.text.errors import TokenizerError
from llamado.text.tokenizer.parts import PART_LENGTH
from llamado.text.tokenizer.tokenizer import Tokenizer, load_tokenizer

NORMAL, UNKNOWN, CONTROL, USER, UNUSED = 1, 2, 3, 4, 5
KEY = "tokenizer.ggml."
WORDS = {"▁": -3.0, "a": -4.0, "b": -4.0, "c": -4.0, "ab": -5.0, "bc": -3.5, "abc": -8.5, "▁a": -4.0, "é": -6.0}


def unigram(words: dict[str, float], *special: tuple[str, int], **extra: Any) -> Tokenizer:
    tokens = [("<pad>", CONTROL), ("</s>", CONTROL), ("<unk>", UNKNOWN), *((w, NORMAL) for w in words), *special]
    scores = [0.0, 0.0, 0.0, *words.values(), *(-1.0 for _ in special)]
    values = {
        "model": "t5",
        "tokens": StringArray.of([text for text, _ in tokens]),
        "token_type": np.array([kind for _, kind in tokens], np.int32),
        "scores": np.array(scores, np.float32),
        **extra,
    }
    return load_tokenizer(Metadata({KEY + name: value for name, value in values.items()}))


def spelled(tokenizer: Tokenizer, text: str, **flags: bool) -> list[str]:
    return [tokenizer.text(token) for token in tokenizer.encode(text, **flags)]


def test_the_greatest_sum_wins() -> None:
    tokenizer = unigram(WORDS)
    assert spelled(tokenizer, "abc") == ["a", "bc"]  # -7.5, where abc has -8.5 and ab, c -9
    assert spelled(tokenizer, "abab", add_special=True) == ["ab", "ab", "</s>"]


def test_of_equal_sums_the_first_token_that_is_shorter_wins() -> None:
    """A way replaces another only if its sum is greater, as in llama.cpp."""
    tokenizer = unigram({"a": -4.0, "b": -9.0, "c": -4.0, "ab": -5.0, "bc": -5.0})
    assert spelled(tokenizer, "abc") == ["a", "bc"]


def test_spaces() -> None:
    assert spelled(unigram(WORDS), " a  b ") == ["▁a", "▁", "▁", "b", "▁"]
    prefixed = unigram(WORDS, add_space_prefix=True)
    assert spelled(prefixed, "a b") == ["▁a", "▁", "b"]
    assert spelled(prefixed, "  a") == ["▁", "▁", "▁a"]
    assert spelled(prefixed, "") == [] and spelled(prefixed, " ") == ["▁"]
    merged = unigram(WORDS, add_space_prefix=True, remove_extra_whitespaces=True)
    assert spelled(merged, "  a   b  ") == ["▁a", "▁", "b"]
    assert merged.decode(merged.encode("a b")) == "a b"


def test_neighbours_that_are_unknown_are_one_token() -> None:
    assert spelled(unigram(WORDS), "axyza") == ["a", "<unk>", "a"]
    assert spelled(unigram(WORDS), "x y") == ["<unk>", "▁", "<unk>"]
    beside = unigram({**WORDS, "xyz": -3.0})  # nothing cuts x from y
    assert spelled(beside, "axya") == ["a", "<unk>", "a"]


def test_special_tokens() -> None:
    tokenizer = unigram(WORDS, ("<m>", USER), ("<x>", UNUSED))
    assert spelled(tokenizer, "a<m>b</s>") == ["a", "<m>", "b", "</s>"]
    assert spelled(tokenizer, "a<x>") == ["a", "<x>"]
    assert "</s>" not in spelled(tokenizer, "a</s>", parse_special=False)


def test_rules() -> None:
    rules = {"\t": " ", "e\u0301": "é", "ﬁ": "ab", "\u200b": "", "A": "a", "AA": "c"}
    tokenizer = unigram(WORDS, precompiled_charsmap=charsmap(rules))
    assert spelled(tokenizer, "a\te\u0301") == ["a", "▁", "é"]
    assert spelled(tokenizer, "ﬁ\u200b\u200bAbAAA") == ["ab", "a", "bc", "a"]


def test_rules_hold_wherever_they_stand() -> None:
    tokenizer = unigram(WORDS, precompiled_charsmap=charsmap({"e\u0301": "é", "ﬁ": ""}))
    for n in (PART_LENGTH - 2, PART_LENGTH - 1, PART_LENGTH, 2 * PART_LENGTH - 1):
        assert spelled(tokenizer, "a" * n + "e\u0301ﬁb") == ["a"] * n + ["é", "b"]


def test_rules_leave_the_beginnings_of_users_tokens_alone() -> None:
    rules = {"<": "a"}
    assert spelled(unigram(WORDS, precompiled_charsmap=charsmap(rules)), "<b") == ["ab"]
    assert spelled(unigram(WORDS, ("<m>", USER), precompiled_charsmap=charsmap(rules)), "<b") == ["<unk>", "b"]


@pytest.mark.parametrize("cut", [1, 6, 300])
def test_damaged_rules_are_named(cut: int) -> None:
    data = charsmap({"\t": " "})
    with pytest.raises(TokenizerError, match="precompiled_charsmap"):
        unigram(WORDS, precompiled_charsmap=data[:cut])


def test_a_trie_of_anything_ends() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        units = rng.integers(-128, 128, 4096).astype(np.int8)
        head = np.frombuffer((4096).to_bytes(4, "little"), np.int8)
        data = np.concatenate([head, units, np.frombuffer(b"a\0", np.int8)])
        assert unigram(WORDS, precompiled_charsmap=data).encode("".join(map(chr, range(300))) * 20)
