from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from instruction_counts import calls, steps
from tiers import first_of

from llamado.gguf.errors import GgufError
from llamado.gguf.metadata import Metadata, StringArray
from llamado.gguf.reader import GGUFFile
from llamado.gguf.text_index import decode_all
from llamado.text.tokenizer.bpe import SPELLING, spell_bytes, unspell
from llamado.text.tokenizer.tokenizer import Tokenizer, TokenizerError, load_tokenizer

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def metadata(tokens: list[tuple[str | bytes, int]], **extra: Any) -> Metadata:
    values: dict[str, Any] = {
        "tokenizer.ggml.tokens": StringArray.of([text for text, _ in tokens]),
        "tokenizer.ggml.token_type": np.array([kind for _, kind in tokens], np.int32),
    }
    for key, value in extra.items():
        values[key.replace("__", ".") if "__" in key else f"tokenizer.ggml.{key}"] = value
    return Metadata(values)


def bpe(
    *special: tuple[str, int], merges: tuple[str, ...] = ("h e", "l l", "he ll", "Ġ w", "hell o"), **extra: Any
) -> Tokenizer:
    letters = sorted({c for m in merges for c in m if c != " "} | set("abcdefghijklmnopqrstuvwxyz ĠĊ1!") - {" "})
    tokens = [(c, NORMAL) for c in letters] + [(m.replace(" ", ""), NORMAL) for m in merges] + list(special)
    return load_tokenizer(
        metadata(tokens, **{"model": "gpt2", "pre": "gpt-2", "merges": StringArray.of(list(merges)), **extra})
    )


def spm(words: dict[str, float], *special: tuple[str, int], **extra: Any) -> Tokenizer:
    tokens: list[tuple[str | bytes, int]] = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]
    tokens += [(f"<0x{b:02X}>", BYTE) for b in range(256)]
    scores = [0.0] * len(tokens) + list(words.values()) + [0.0] * len(special)
    tokens += [(word, NORMAL) for word in words] + list(special)
    return load_tokenizer(metadata(tokens, **{"model": "llama", "scores": np.array(scores, np.float32), **extra}))


def spelled(tokenizer: Tokenizer, text: str, **flags: bool) -> list[str]:
    return [tokenizer.text(token) for token in tokenizer.encode(text, **flags)]


# --- byte pairs


def test_merges_by_rank() -> None:
    tokenizer = bpe()
    assert spelled(tokenizer, "hello w") == ["hello", "Ġw"]
    assert spelled(tokenizer, "hella") == ["hell", "a"]
    assert spelled(tokenizer, "ohe\n") == ["o", "he", "Ċ"]
    assert tokenizer.newline == tokenizer.encode("\n")[0]


def test_a_merge_that_makes_no_token_falls_apart_into_its_ascii_characters() -> None:
    tokenizer = bpe(merges=("a b",))
    tokens = [("a", NORMAL), ("b", NORMAL), ("Ġ", NORMAL)]
    lacking = load_tokenizer(metadata(tokens, model="gpt2", pre="gpt-2", merges=StringArray.of(["a b", "Ġ a"])))
    assert spelled(tokenizer, "ab") == ["ab"]
    assert spelled(lacking, "ab") == ["a", "b"]
    assert spelled(lacking, "b a") == ["b", "a"]  # "Ġa" is no token, and Ġ is two bytes, neither of which is one
    assert spelled(lacking, "xb") == ["b"]  # what has no token at all is dropped


def test_ignore_merges_takes_a_known_word_whole() -> None:
    merges = ("a b",)
    assert spelled(bpe(("abc", NORMAL), merges=merges), "abc") == ["ab", "c"]
    assert spelled(bpe(("abc", NORMAL), merges=merges, pre="llama-bpe", bos_token_id=0), "abc") == ["abc"]


def test_vocabulary_options_of_pre_tokenizers() -> None:
    ends = bpe(add_eos_token=True)
    assert ends.encode("hello", add_special=True) == [*ends.encode("hello"), ends.eos]
    assert bpe().bos == 11 and bpe(pre="glm4").bos is None and bpe(pre="glm4", bos_token_id=3).bos == 3
    assert bpe(pre="gemma4", add_bos_token=False).add_bos and not bpe(add_bos_token=False).add_bos
    for pre, whole in (("gemma4", True), ("sarvam-moe", False)):
        lines = bpe(("\n\n", NORMAL), pre=pre)
        assert (lines.encode("\n\n") == [lines.vocabulary.ids["\n\n"]]) is whole


def test_bytes_are_spelled_as_gpt2_does() -> None:
    """Visible characters of Latin-1 are themselves, the 68 others U+0100 to U+0143 in order."""
    odd = [*range(0x21), *range(0x7F, 0xA1), 0xAD]
    assert [SPELLING[byte] for byte in odd] == [chr(0x100 + i) for i in range(68)]
    assert all(SPELLING[byte] == chr(byte) for byte in range(256) if byte not in odd)
    assert spell_bytes(" \nA!é") == "ĠĊA!Ã©"
    assert unspell("ĠĊA!Ã©") == " \nA!é".encode()
    assert unspell("a｜") == b"a[UNK_BYTE_0xefbd9ca\xef\xbd\x9c]"


def test_missing_merges_are_an_error() -> None:
    with pytest.raises(TokenizerError, match="merges"):
        load_tokenizer(metadata([("a", NORMAL)], model="gpt2", pre="gpt-2"))


# --- SentencePiece


def test_highest_score_first_and_space_in_front() -> None:
    tokenizer = spm({"▁": -9, "a": -9, "b": -9, "c": -9, "ab": -2, "bc": -1, "▁a": -3, "▁ab": -4})
    assert spelled(tokenizer, "abc") == ["▁a", "bc"]
    assert spelled(tokenizer, "ab ab") == ["▁ab", "▁ab"]
    assert spelled(tokenizer, "ab", add_special=True) == ["<s>", "▁ab"]
    plain = spm({"▁": -9, "a": -9, "b": -9, "ab": -2}, add_space_prefix=False, add_bos_token=False)
    assert spelled(plain, "ab", add_special=True) == ["ab"]


def test_of_equal_scores_the_leftmost() -> None:
    tokenizer = spm({"a": -1, "aa": -1}, add_space_prefix=False)
    assert spelled(tokenizer, "aaa") == ["aa", "a"]


def test_unknown_characters_become_bytes() -> None:
    tokenizer = spm({"▁": -1, "a": -1}, add_space_prefix=False)
    assert spelled(tokenizer, "aé\n") == ["a", "<0xC3>", "<0xA9>", "<0x0A>"]
    assert tokenizer.join(tokenizer.encode("aé\n ▁")) == "aé\n  ".encode()


def test_without_byte_tokens_the_unknown_token() -> None:
    tokens = [("<unk>", UNKNOWN), ("a", NORMAL), ("\n", NORMAL)]
    tokenizer = load_tokenizer(metadata(tokens, model="llama", add_space_prefix=False, add_bos_token=False))
    assert spelled(tokenizer, "aé\n") == ["a", "<unk>", "<unk>", "\n"]


def test_cuts_never_change_the_outcome() -> None:
    """Pieces between characters that no token has side by side, merged apart, are the text merged as one."""
    from llamado.text.tokenizer.merging import merge

    tokenizer = spm(
        dict.fromkeys("▁abc", -9) | {"ab": -2, "▁a": -1, "bc": -2, "cc": -3, "▁▁": -1, "abc": -4},
        add_space_prefix=False,
    )
    model: Any = tokenizer._model

    @given(st.text("abc é", max_size=70))
    def check(text: str) -> None:
        symbols = merge(text.replace(" ", "▁"), model._cost)
        whole = [
            i
            for s in symbols
            for i in ([tokenizer.vocabulary.ids[s]] if s in tokenizer.vocabulary.ids else model._bytes(s))
        ]
        assert tokenizer.encode(text) == whole

    check()


# --- word pieces


def test_word_pieces() -> None:
    words = ["▁un", "known", "▁a", "b", "▁,", "▁漢", "▁e"]
    tokens = [
        ("[PAD]", CONTROL),
        ("[UNK]", CONTROL),
        ("[CLS]", CONTROL),
        ("[SEP]", CONTROL),
        *((w, NORMAL) for w in words),
    ]
    ids = {"bos_token_id": 2, "seperator_token_id": 3, "unknown_token_id": 1, "padding_token_id": 0}
    tokenizer = load_tokenizer(metadata(tokens, model="bert", **ids))
    assert spelled(tokenizer, "UNKNOWN ab,漢ÉX\u200d") == ["▁un", "known", "▁a", "b", "▁,", "▁漢", "[UNK]"]
    assert spelled(tokenizer, "é", add_special=True) == ["[CLS]", "▁e", "[SEP]"]
    assert tokenizer.decode(tokenizer.encode("a , un", add_special=True)) == " a, un"
    cased = load_tokenizer(metadata(tokens, model="bert", **ids, **{"normalizer.lowercase": False}))
    assert spelled(cased, "a A é") == ["▁a", "[UNK]", "[UNK]"]


# --- special tokens


def test_control_tokens_only_when_asked_user_defined_always() -> None:
    tokenizer = bpe(("<|x|>", CONTROL), ("<u>", USER))
    assert spelled(tokenizer, "a<|x|>b<u>c") == ["a", "<|x|>", "b", "<u>", "c"]
    assert "<|x|>" not in spelled(tokenizer, "a<|x|>b<u>c", parse_special=False)
    assert "<u>" in spelled(tokenizer, "a<|x|>b<u>c", parse_special=False)


def test_longest_token_takes_its_place_first() -> None:
    tokenizer = bpe(("ab", CONTROL), ("bcd", CONTROL), ("bc", CONTROL))
    assert spelled(tokenizer, "abcd") == ["a", "bcd"]  # though "ab" begins further left
    assert spelled(tokenizer, "abc") == ["ab", "c"]  # of equal size, the lower id
    assert spelled(tokenizer, "abcdabab") == ["a", "bcd", "ab", "ab"]


def test_longer_size_is_in_bytes() -> None:
    tokenizer = bpe(("éé", CONTROL), ("aé", CONTROL), ("xaé", CONTROL))
    assert [tokenizer.text(t) for t in tokenizer.encode("aéé")] == ["a", "éé"]


def test_runs_of_one_character() -> None:
    tokenizer = bpe(*[("a" * n, USER) for n in (2, 3, 5)])
    assert spelled(tokenizer, "a" * 12) == ["aaaaa", "aaaaa", "aa"]
    assert spelled(tokenizer, "a" * 9) == ["aaaaa", "aaa", "a"]


def test_space_belongs_to_tokens_of_some_models() -> None:
    tokens = [
        ("<unk>", UNKNOWN),
        ("<s>", CONTROL),
        ("</s>", CONTROL),
        ("<|end|>", CONTROL),
        ("a", NORMAL),
        ("▁", NORMAL),
    ]
    phi = load_tokenizer(metadata(tokens, model="llama", add_space_prefix=False, general__name="Phi-3 mini"))
    assert spelled(phi, "a <|end|> \n a") == ["a", "▁", "<|end|>", "a"]
    assert spelled(phi, "<s> a") == ["<s>", "▁", "a"]
    mask = [("<mask>", CONTROL), ("a", NORMAL), ("Ġ", NORMAL)]
    jina = load_tokenizer(metadata(mask, model="gpt2", pre="jina-v2-de", merges=StringArray.of(["x y"])))
    assert spelled(jina, "a  <mask> a") == ["a", "<mask>", "Ġ", "a"]


def test_special_ids_and_end_of_generation() -> None:
    tokenizer = bpe(
        ("<|im_end|>", NORMAL), ("<|fim_prefix|>", CONTROL), ("<|fim_pad|>", CONTROL), ("<X>", CONTROL), eos_token_id=0
    )
    ids = tokenizer.vocabulary.ids
    assert tokenizer.eot == ids["<|im_end|>"]
    assert ids["<|im_end|>"] in tokenizer.control  # whatever the file says
    assert tokenizer.fim_pre == ids["<|fim_prefix|>"]
    assert tokenizer.fim_suf is None
    assert tokenizer.eog == {0, ids["<|im_end|>"], ids["<|fim_pad|>"]}
    harmony = bpe(("<|return|>", CONTROL), ("<|call|>", CONTROL), ("<|end|>", CONTROL), ("<|channel|>", CONTROL))
    assert harmony.vocabulary.ids["<|end|>"] not in harmony.eog
    assert harmony.piece(harmony.vocabulary.ids["<|channel|>"]) == b"<|channel|>"


def test_ids_out_of_range_are_ignored() -> None:
    tokenizer = bpe(bos_token_id=9999, eos_token_id=3)
    assert tokenizer.bos == 11  # what llama.cpp falls back to for this kind
    assert tokenizer.eos == 3
    assert load_tokenizer(metadata([("a", NORMAL)], model="gpt2", merges=StringArray.of(["a b"]))).bos is None


# --- ids → text


def test_pieces() -> None:
    tokenizer = spm({"▁a": -1}, ("<|x|>", CONTROL), ("▁u", USER), ("gone", UNUSED), ("", NORMAL))
    ids = tokenizer.vocabulary.ids
    assert tokenizer.piece(ids["▁a"]) == b" a"
    assert tokenizer.piece(ids["<0xE2>"]) == b"\xe2"
    assert tokenizer.piece(ids["<|x|>"]) == b""
    assert tokenizer.piece(ids["<|x|>"], special=True) == b"<|x|>"
    assert tokenizer.piece(ids["<unk>"]) == b""
    assert tokenizer.piece(ids["▁u"]) == "▁u".encode()  # as it is written
    assert tokenizer.piece(ids["gone"], special=True) == b""
    empty = tokenizer.n_vocab - 1
    assert tokenizer.text(empty) == f"[EMPTY_{empty}]"
    for wrong in (-1, tokenizer.n_vocab):
        with pytest.raises(IndexError, match="not in the vocabulary"):
            tokenizer.piece(wrong)


def test_tokens_are_found_by_their_pieces() -> None:
    words = {"▁a▁b": -1.0, "\n": -2.0, "\n\n": -3.0}
    tokenizer = spm(words, ("<image>", CONTROL), ("<image>", CONTROL), ("▁", USER))
    assert tokenizer.text(tokenizer.find("\n") or 0) == "<0x0A>"  # the first of two
    assert tokenizer.text(tokenizer.find("\n\n") or 0) == "\n\n"
    assert tokenizer.text(tokenizer.find(" a b") or 0) == "▁a▁b"
    assert tokenizer.find("<image>") == tokenizer.n_vocab - 3
    assert tokenizer.find("▁") == tokenizer.n_vocab - 1  # only normal tokens spell spaces
    assert tokenizer.find("a") == 3 + ord("a")
    assert tokenizer.find("</image>") is None and tokenizer.find("ab") is None
    pairs = bpe(("ĊĊ", NORMAL), ("<x>", CONTROL))
    assert [pairs.find(text) for text in ("\n\n", "<x>")] == [pairs.n_vocab - 2, pairs.n_vocab - 1]
    assert pairs.find("Ċ") is None and pairs.text(pairs.find(" w") or 0) == "Ġw"


def test_decode_takes_off_what_encode_put_on() -> None:
    tokenizer = spm({"▁": -9, "a": -9, "▁a": -1})
    ids = tokenizer.encode("a a", add_special=True)
    assert (
        tokenizer.decode(ids, remove_special=True) == " a a"
    )  # llama_detokenize keeps the space after a removed token
    assert tokenizer.decode(ids[1:]) == "a a"
    assert tokenizer.decode(ids, special=True) == "<s> a a"
    assert tokenizer.join(ids) == b"<s> a a"


def test_decode_cleans_spaces_where_the_vocabulary_wants_it() -> None:
    text = "a , b ! i 'm you 're x ' y 't"
    letters = [(c, NORMAL) for c in sorted({*text, "Ġ"} - {" "})]
    cleaned = load_tokenizer(metadata(letters, model="gpt2", pre="gpt-2", merges=StringArray.of(["q q"])))
    assert cleaned.decode(cleaned.encode(text)) == "a, b! i'm you're x'y 't"
    kept = load_tokenizer(metadata(letters, model="gpt2", pre="qwen2", merges=StringArray.of(["q q"])))
    assert kept.decode(kept.encode(text)) == text


# --- damaged and hostile input


def test_lone_surrogates_count_as_replacement_characters() -> None:
    tokenizer = spm({"a": -1}, add_space_prefix=False)
    assert tokenizer.encode("a\ud800") == tokenizer.encode("a\ufffd")
    assert tokenizer.encode("\ud83d\ude00") == tokenizer.encode("😀")


def test_tokens_that_are_not_utf8() -> None:
    tokens: list[tuple[str | bytes, int]] = [(b"\xff\xfe", NORMAL), ("a", NORMAL), (b"\xe2", USER)]
    tokenizer = load_tokenizer(metadata(tokens, model="llama", add_space_prefix=False))
    assert tokenizer.piece(0) == b"\xff\xfe"
    assert tokenizer.encode("a") == [1]


def test_strings_are_told_apart_whatever_bytes_they_hold() -> None:
    every = [chr(c) * n for c in range(128) for n in (1, 2)] + ["", "é"]
    assert decode_all(StringArray.of(every)) == every
    assert decode_all(StringArray.of(["a", "", "b\x00c"])) == ["a", "", "b\x00c"]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"model": "plamo-9"}, "'plamo-9'"),
        ({"token_type": np.array([1], np.int32)}, "token_type has 1 entries for 2"),
        ({"pre": "no-such"}, "'no-such'"),
    ],
)
def test_broken_vocabularies_are_named(broken: dict[str, Any], message: str) -> None:
    values = {"model": "gpt2", "pre": "gpt-2", "merges": StringArray.of(["a b"]), **broken}
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(metadata([("a", NORMAL), ("b", NORMAL)], **values))


def test_a_file_without_vocabulary() -> None:
    with pytest.raises(TokenizerError, match="empty"):
        load_tokenizer(metadata([], model="llama"))
    with pytest.raises(GgufError, match=r"tokenizer\.ggml\.model"):
        load_tokenizer(Metadata({}))


# --- the real vocabularies (ids from llama.cpp b11434's /tokenize)

REAL = {
    "smollm2": [
        ("Hello world 123", [19556, 905, 216, 33, 34, 35]),
        ("<|im_start|>x<|im_end|>", [1, 104, 2]),
        (" na\u00efve 日本語", [15486, 46494, 17097, 241, 115, 40993, 179, 120, 248]),
    ],
    "gemma3": [
        ("Hello world!", [9259, 1902, 236888]),
        ("<start_of_turn>x\n\n\n  1", [105, 236781, 109, 138, 236770]),
        (" na\u00efve 日本語 😀", [120362, 33375, 238582, 163543]),
    ],
}


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def real(request: pytest.FixtureRequest) -> tuple[str, Metadata]:
    path: Path = request.getfixturevalue(f"{request.param}_path")
    with GGUFFile.open(path) as file:
        return request.param, file.metadata


@pytest.mark.slow
def test_real_vocabularies(real: tuple[str, Metadata]) -> None:
    name, data = real
    tokenizer = load_tokenizer(data)
    for text, ids in REAL[name]:
        assert tokenizer.encode(text) == ids
        assert tokenizer.join(ids).decode() == text
    if name == "gemma3":
        assert (tokenizer.bos, tokenizer.eos, tokenizer.add_bos) == (2, 1, True)
        assert tokenizer.encode("a", add_special=True)[0] == 2
        assert 106 in tokenizer.eog
    else:
        assert (tokenizer.bos, tokenizer.eos, tokenizer.add_bos) == (1, 2, False)
        assert tokenizer.eog == {0, 2, 4}


@pytest.mark.slow
def test_loading_does_nothing_for_each_token(real: tuple[str, Metadata]) -> None:
    """A vocabulary of 262,144 tokens is opened by few calls that go through all of it, and so in a moment."""
    n_vocab = load_tokenizer(real[1]).n_vocab
    assert calls(lambda: load_tokenizer(real[1])) < n_vocab // 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "unit", first_of([" ", "é", "a", "\n", "<", "<unused1>", "1", "ab", "a ", "\t\n", "_x", "漢"], 2)
)
def test_long_hostile_texts_take_steps_in_proportion(
    real: tuple[str, Metadata], unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(real[1])
    text = unit * 4000
    assert tokenizer.join(tokenizer.encode(text)).decode() == text
    few, many = (steps(lambda: tokenizer.encode(unit * n), monkeypatch) for n in (1000, 4000))  # noqa: B023
    # A text of few words finds all but the first remembered; one of a single word is walked through.
    assert many < 6 * max(few, 1000 * 64), "four times the text takes more than in proportion"


@pytest.mark.slow
def test_any_text_comes_back(real: tuple[str, Metadata]) -> None:
    name, data = real
    tokenizer = load_tokenizer(data)
    known = {byte for byte in range(256) if name == "gemma3" or SPELLING[byte] in tokenizer.vocabulary.ids}

    # SmolLM2's vocabulary lacks some bytes, and what it lacks is dropped.
    @given(st.text(st.characters(exclude_categories=["Cs"]).filter(lambda c: known.issuperset(c.encode()))))
    def check(text: str) -> None:
        for parse_special in (True, False):
            ids = tokenizer.encode(text, parse_special=parse_special)
            # SentencePiece writes a space as ▁ and cannot tell the two apart when it comes back.
            expected = text.replace("▁", " ") if name == "gemma3" else text
            assert tokenizer.join(ids).decode() == expected

    check()
