from __future__ import annotations

import sys
import time
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamado.text.errors import TokenizerError
from llamado.text.pretokenizers import PRE_TOKENIZERS, pre_tokenizer
from llamado.text.unicode_classes import LETTER, MARK, NUMBER, OTHER, PUNCTUATION, SPACE, SYMBOL, WHITESPACE, reduce

# What llama.cpp b11434 makes of these (seen through vocabularies whose tokens show the borders).
EXPECTED = [
    ("gpt-2", "I'm 12  monkeys\n\n  x!?", ["I", "'m", " 12", " ", " monkeys", "\n\n ", " x", "!?"]),
    ("smollm", "I'm 12  3\n", ["I", "'m", " ", "1", "2", "  ", "3", "\n"]),
    ("llama-bpe", "IT'S 12345 a\n\n b!\n", ["IT", "'S", " ", "123", "45", " a", "\n\n", " b", "!\n"]),
    ("qwen2", "IT'S 123 ab", ["IT", "'S", " ", "1", "2", "3", " ab"]),
    ("default", "a$1234 b", ["a", "$", "123", "4", " b"]),
    ("tekken", "HTMLPage aB", ["HTMLPage", " a", "B"]),
    ("gpt-4o", "it'sHere/\n1234", ["it's", "Here", "/\n", "123", "4"]),
    ("deepseek-v3", "ab漢字12345,c", ["ab", "漢字", "123", "45", ",c"]),
    ("superbpe", "a1234567b", ["a", "1", "234", "567", "b"]),
    ("tiny_aya", "abc1234567", ["abc", "1", "234", "567"]),
    ("gemma4", "a b\n\nc", ["a b", "\n\n", "c"]),
    ("bloom", "Hi there, you", ["Hi", " there", ",", " you"]),
]


@pytest.mark.parametrize(("name", "text", "words"), EXPECTED)
def test_words(name: str, text: str, words: list[str]) -> None:
    assert pre_tokenizer(name).words(text) == words


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_every_rule_keeps_every_character(name: str) -> None:
    rule = pre_tokenizer(name)

    @given(st.text(st.sampled_from(" \n\r\t'stIMGZ129aAé漢٣\u0301!.$|_-<>\u00a0\u3000\u0378😀") | st.characters()))
    def check(text: str) -> None:
        words = rule.words(text)
        assert "".join(words) == text
        assert all(words)

    check()


@given(st.text(" \n\t'sre1٣aé!\u00a0"))
def test_digits_alone_then_gpt2_is_the_smollm_rule(text: str) -> None:
    """The one pattern does what the two of llama.cpp do, the second seeing nothing beyond its piece."""
    pieces: list[str] = []
    for c in text:
        if c in "1٣" or not pieces or pieces[-1] in "1٣":
            pieces.append(c)
        else:
            pieces[-1] += c
    gpt2 = pre_tokenizer("gpt-2")
    assert pre_tokenizer("smollm").words(text) == [word for piece in pieces for word in gpt2.words(piece)]


def test_unknown_rule_is_named() -> None:
    with pytest.raises(TokenizerError, match=r"'nonsense'.*known:.*llama-bpe"):
        pre_tokenizer("nonsense")


def test_no_rule_takes_the_square_of_the_length() -> None:
    texts = [" " * 40_000 + "x", "\n \t" * 13_000 + "1", "1" * 40_000, "Aa" * 20_000, "\u0301" * 40_000, "'" * 40_000]
    for name, rule in PRE_TOKENIZERS.items():
        for text in texts:
            start = time.process_time()
            rule.words(text)
            assert time.process_time() - start < 2, (name, text[:5])  # the square: 40,000² steps, ten seconds and more


def test_classes_are_those_of_unicode_15_1() -> None:
    by_letter = {"L": LETTER, "N": NUMBER, "P": PUNCTUATION, "M": MARK, "S": SYMBOL}
    every = "".join(map(chr, [*range(0x80, 0xD800), *range(0xE000, 0x110000)]))
    reduced = reduce(every)
    assert len(reduced) == len(every)
    version = tuple(map(int, unicodedata.unidata_version.split(".")))
    differing = 0
    for character, found in zip(every, reduced, strict=True):
        category = unicodedata.category(character)
        expected = SPACE if ord(character) in WHITESPACE else by_letter.get(category[0], OTHER)
        if expected != found:
            assert "Cn" in (category, "Cn" if found == OTHER else ""), hex(ord(character))  # not in one of the editions
            differing += 1
    if version[:2] == (15, 1):
        assert differing == 0
    else:
        assert differing < 12_000


def test_reducing_keeps_ascii_and_takes_anything() -> None:
    ascii_ = "".join(map(chr, range(128)))
    assert reduce(ascii_) is ascii_
    assert reduce(ascii_ + "é") == ascii_ + LETTER
    assert reduce("\ud800x") == OTHER + "x"
    assert reduce("") == ""
    assert sys.maxunicode == 0x10FFFF
