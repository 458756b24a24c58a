"""PLaMo's vocabularies: the greatest sum of scores, bytes, ties, texts of tokens."""

from __future__ import annotations

import numpy as np
import pytest

from llamado.gguf.metadata import Metadata, StringArray
from llamado.text.errors import TokenizerError
from llamado.text.tokenizer.tokenizer import Tokenizer, load_tokenizer

NORMAL, UNKNOWN, CONTROL, UNUSED, BYTE = 1, 2, 3, 5, 6
KEY = "tokenizer.ggml."
WORDS = {"a": -4.0, "b": -4.0, "ab": -7.0, "bc": -3.0, "c": -4.5, "abc": -7.0, "▁x": -5.0, " ": -2.0, "never": -2000.0}
SPECIAL = ("<|plamo:unk|>", "<|plamo:bos|>", "<|plamo:eos|>")


def plamo(words: dict[str, float] = WORDS, n_bytes: int = 256) -> Tokenizer:
    tokens = [*SPECIAL, *(f"<0x{i:02X}>" for i in range(n_bytes)), *words]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * n_bytes, *[NORMAL] * len(words)]
    values = {
        "model": "plamo2",
        "tokens": StringArray.of(tokens),
        "token_type": np.array(kinds, np.int32),
        "scores": np.array([0.0] * (3 + n_bytes) + [*words.values()], np.float32),
    }
    return load_tokenizer(Metadata({KEY + name: value for name, value in values.items()}))


def spelled(text: str, tokenizer: Tokenizer | None = None, **flags: bool) -> list[str]:
    tokenizer = tokenizer or plamo()
    return [tokenizer.text(token) for token in tokenizer.encode(text, **flags)]


def test_the_greatest_sum_wins_and_of_equal_ones_the_longer_token() -> None:
    assert spelled("ab") == ["ab"]  # -7 against -8
    assert spelled("abc") == ["abc"]  # -7, as a and bc have
    assert spelled("abb") == ["ab", "b"]
    assert spelled("bcab") == ["bc", "ab"]


def test_characters_without_a_token_are_bytes() -> None:
    assert spelled("aé漢") == ["a", "<0xC3>", "<0xA9>", "<0xE6>", "<0xBC>", "<0xA2>"]
    assert spelled("😀") == ["<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]
    assert spelled("never")[0] == "<0x6E>"  # a token of so small a score is never chosen


def test_a_mark_in_front_is_left_out() -> None:
    assert spelled("\ufeffab") == ["ab"] and spelled("a\ufeff")[0:2] == ["a", "<0xEF>"]
    assert spelled("") == []


def test_control_tokens_are_pieces_too() -> None:
    assert spelled("a<|plamo:eos|>", parse_special=False) == ["a", "<|plamo:eos|>"]


def test_texts() -> None:
    tokenizer = plamo()
    assert tokenizer.decode(tokenizer.encode("ab é▁x")) == "ab é▁x"  # ▁ is no space here
    assert tokenizer.bos == 1 and tokenizer.eos == 2 and not tokenizer.add_bos


def test_a_byte_without_a_token_is_a_fault() -> None:
    with pytest.raises(TokenizerError, match="0xFF"):
        plamo(n_bytes=255)
