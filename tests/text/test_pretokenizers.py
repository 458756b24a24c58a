from __future__ import annotations

import sys
import time
import unicodedata
from pathlib import Path

import peer_words
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamado.gguf.reader import GGUFFile
from llamado.text.errors import TokenizerError
from llamado.text.tokenizer.pretokenizers import PRE_TOKENIZERS, pre_tokenizer
from llamado.text.tokenizer.tokenizer import load_tokenizer
from llamado.text.tokenizer.unicode_classes import (
    LETTER,
    MARK,
    NUMBER,
    OTHER,
    PUNCTUATION,
    SPACE,
    SYMBOL,
    WHITESPACE,
    reduce,
)

# What the real llama.cpp (b11434) cuts texts into; `peer_words.py` asks it, and the interop test does so again.
WORDS = peer_words.read()
RULES = sorted({rule: name for name, rule in PRE_TOKENIZERS.items()}.values())
"""One name of each rule."""
CUTS = {(text, name): cut for text, cuts in WORDS.items() for cut, names in cuts.items() for name in names.split()}


@pytest.mark.parametrize("name", sorted({name or "default" for name in PRE_TOKENIZERS}))
def test_words(name: str) -> None:
    rule = pre_tokenizer(name)
    expected = {text: cut for (text, known), cut in CUTS.items() if known == name}
    assert len(expected) >= len(WORDS) - 1
    assert {text: peer_words.BORDER.join(rule.words(text)) for text in expected} == expected


@pytest.mark.parametrize("name", sorted({name or "default" for name in PRE_TOKENIZERS}))
def test_properties_tied_to_a_pre_tokenizer_name(name: str, tmp_path: Path) -> None:
    """The expected properties are those that llama.cpp has for the same file."""
    with GGUFFile.open(peer_words.flag_file(tmp_path, name)) as file:
        tokenizer = load_tokenizer(file.metadata)
    holds = {
        "add_bos": tokenizer.add_bos,
        "add_sep": tokenizer.add_sep,
        "has_bos": tokenizer.bos is not None,
        "clean_spaces": tokenizer.decode(tokenizer.encode(peer_words.SPACED)) != peer_words.SPACED,
        "ignore_merges": len(tokenizer.encode(peer_words.UNMERGED)) == 1,
    }
    assert [flag for flag, holding in holds.items() if holding] == peer_words.read_flags()[name]


@pytest.mark.slow
@given(st.text(st.sampled_from(" \n\r\t'stIMGZ129aAé漢٣\u0301!.$|_-<>\u00a0\u3000\u0378😀") | st.characters()))
def test_every_rule_keeps_every_character(text: str) -> None:
    for name in RULES:
        words = pre_tokenizer(name).words(text)
        assert "".join(words) == text, name
        assert all(words), name


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
    with pytest.raises(TokenizerError, match=r"'nonsense'.*supported:.*llama-bpe"):
        pre_tokenizer("nonsense")


@pytest.mark.slow
def test_no_rule_takes_the_square_of_the_length() -> None:
    texts = [" " * 20_000 + "x", "\n \t" * 7_000 + "1", "1" * 20_000, "Aa" * 10_000, "\u0301" * 20_000, "'" * 20_000]
    for name in RULES:
        for text in texts:
            start = time.process_time()
            pre_tokenizer(name).words(text)
            assert time.process_time() - start < 1, (
                name,
                text[:5],
            )  # the square takes three seconds and more


@pytest.mark.slow
def test_classes_are_those_of_unicode_15_1() -> None:
    by_letter = {"L": LETTER, "N": NUMBER, "P": PUNCTUATION, "M": MARK, "S": SYMBOL}
    # From plane 2 on, classes change in few places.
    assigned = [*range(0x80, 0xD800), *range(0xE000, 0x20000), *range(0xE0000, 0xE0200)]
    every = "".join(map(chr, [*assigned, *range(0x20000, 0x110000, 61)]))
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
