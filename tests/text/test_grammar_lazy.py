from __future__ import annotations

import threading

import pytest
from guided import Vocabulary, bytes_tokenizer, pieces_tokenizer

from llamado.text import constraint_lazy
from llamado.text.constraint_lazy import MAX_PATTERN, MAX_TRIGGERS
from llamado.text.grammar import ConstraintError, GrammarError, Trigger

CALL = 'root ::= "<tool_call>" [0-9]+ "</tool_call>"'


@pytest.fixture(scope="module")
def bpe() -> Vocabulary:
    return Vocabulary(bytes_tokenizer())


@pytest.fixture(scope="module")
def spm() -> Vocabulary:
    return Vocabulary(pieces_tokenizer())


def test_everything_is_allowed_until_the_word(bpe: Vocabulary) -> None:
    matcher = bpe.constraint("gbnf", CALL, Trigger("word", "<tool_call>")).start()
    assert matcher.mask() is None
    for token in bpe.spell("I shall call. <think>"):
        matcher.accept(token)
        assert matcher.mask() is None
    matcher.accept(bpe.spell("<tool_call>")[0])
    assert {bpe.tokenizer.piece(token) for token in bpe.allowed(matcher)} == {b"%d" % i for i in range(10)} | {b"12"}
    assert bpe.feed(matcher, "12</tool_call>")
    assert set(bpe.allowed(matcher)) == bpe.tokenizer.eog


def test_an_answer_may_end_without_the_word(bpe: Vocabulary) -> None:
    matcher = bpe.constraint("gbnf", CALL, Trigger("word", "<tool_call>")).start()
    for token in [*bpe.spell("No."), min(bpe.tokenizer.eog)]:
        matcher.accept(token)
        assert matcher.mask() is None


@pytest.mark.parametrize("letters", [True, False])
def test_a_word_of_several_tokens(spm: Vocabulary, letters: bool) -> None:
    matcher = spm.constraint("gbnf", 'root ::= "think>" ("x" | "y") "ab"', Trigger("word", "think>")).start()
    tokens = spm.spell("a the</think>")
    if letters:
        tokens = [token for char in "a the</think>" for token in spm.spell(char)]
    assert spm.tokenizer.join(tokens) == b"a the</think>"
    for token in tokens:
        assert matcher.mask() is None
        matcher.accept(token)
    assert {spm.tokenizer.piece(token) for token in spm.allowed(matcher)} == {b"x", b"y"}


def test_a_token_that_goes_on_behind_the_word(spm: Vocabulary) -> None:
    """The piece ">x" ends the word and begins what the grammar wants next."""
    constraint = spm.constraint("gbnf", 'root ::= "think>" ("x" | "y") "ab"', Trigger("word", "think>"))
    matcher = constraint.start()
    going_on = next(t for t in range(spm.tokenizer.n_vocab) if spm.tokenizer.piece(t) == b">x")
    for token in [*spm.spell("</think"), going_on]:
        matcher.accept(token)
    assert {spm.tokenizer.piece(token) for token in spm.allowed(matcher)} == {b"ab", b"a"}


def test_a_match_that_the_grammar_excludes_is_text(spm: Vocabulary) -> None:
    matcher = spm.constraint("gbnf", 'root ::= "think>y"', Trigger("word", "think>")).start()
    going_on = next(t for t in range(spm.tokenizer.n_vocab) if spm.tokenizer.piece(t) == b">x")
    for token in [*spm.spell("think"), going_on]:
        matcher.accept(token)
    assert matcher.mask() is None
    for token in spm.spell("think>"):
        matcher.accept(token)
    assert matcher.mask() is not None


def test_pattern_feeds_the_first_group_that_took_part(bpe: Vocabulary) -> None:
    pattern = Trigger("pattern", r"(?:ok|fine)[\s\S]*?(?:(é\{)|(\[))")
    constraint = bpe.constraint("gbnf", 'root ::= "é{" "1"+ "}" | "[" "2"', pattern)
    matcher = constraint.start()
    for token in bpe.spell("[é{ fine\n é"):
        matcher.accept(token)
        assert matcher.mask() is None
    matcher.accept(bpe.spell("{")[0])
    assert [bpe.tokenizer.piece(token) for token in bpe.allowed(matcher)] == [b"1"]
    matcher = constraint.start()
    for token in bpe.spell("ok ["):
        matcher.accept(token)
    assert [bpe.tokenizer.piece(token) for token in bpe.allowed(matcher)] == [b"2"]


def test_pattern_over_the_whole_text(bpe: Vocabulary) -> None:
    matcher = bpe.constraint("gbnf", 'root ::= "{" "}"', Trigger("pattern", r"^\s*(\{)$")).start()
    for token in bpe.spell("x {"):
        matcher.accept(token)
    assert matcher.mask() is None
    matcher = bpe.constraint("gbnf", 'root ::= "{" "}"', Trigger("pattern", r"^\s*(\{)$")).start()
    for token in bpe.spell(" {"):
        matcher.accept(token)
    assert matcher.mask() is not None


def test_tokens_as_triggers(bpe: Vocabulary) -> None:
    token = bpe.tokenizer.vocabulary.ids["<tool_call>"]
    for trigger in (Trigger("token", "<tool_call>", token), Trigger("token", "<tool_call>")):
        matcher = bpe.constraint("gbnf", CALL, trigger).start()
        for letter in bpe.compiler.vocabulary.spell_bytes(b"<tool_call>"):
            matcher.accept(letter)
        assert matcher.mask() is None  # only the token itself counts
        matcher.accept(token)
        assert matcher.mask() is not None
    with pytest.raises(GrammarError, match="not one token"):
        bpe.constraint("gbnf", CALL, Trigger("token", "two words"))


def test_one_constraint_serves_many_answers(bpe: Vocabulary) -> None:
    constraint = bpe.constraint("gbnf", CALL, Trigger("word", "<tool_call>"))
    results: list[bool] = []

    def answer(n: int) -> None:
        for i in range(30):
            matcher = constraint.start()
            results.append(bpe.feed(matcher, f"text<tool_call>{i * n}</tool_call>") and bpe.may_end(matcher))

    threads = [threading.Thread(target=answer, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 120


def test_long_text_before_the_word_is_not_kept(bpe: Vocabulary) -> None:
    matcher = bpe.constraint("gbnf", CALL, Trigger("word", "<tool_call>")).start()
    for token in bpe.spell("la ") * 3000:
        matcher.accept(token)
    assert len(matcher._text) < 50  # type: ignore[attr-defined]


def test_hostile_triggers(bpe: Vocabulary) -> None:
    bad = (Trigger("pattern", "("), Trigger("pattern", "a" * (MAX_PATTERN + 1)), Trigger("word", ""))
    for trigger in bad:
        with pytest.raises(GrammarError):
            bpe.constraint("gbnf", CALL, trigger)
    with pytest.raises(GrammarError, match="too many"):
        bpe.constraint("gbnf", CALL, *[Trigger("word", str(i)) for i in range(MAX_TRIGGERS + 1)])
    matcher = bpe.constraint("gbnf", CALL, Trigger("pattern", r"(\w*\w*\w*\w*\w*\w*)*\d")).start()
    with pytest.raises(ConstraintError, match="use a simpler pattern"):
        for token in bpe.spell("ab") * 90:
            matcher.accept(token)


def test_triggers_that_would_be_written_out_a_million_times_are_refused() -> None:
    for pattern in ("a{1000000}", "((a{100}){100}){100}", "a{999999999999999999999}"):
        with pytest.raises(GrammarError, match="repeats"):
            constraint_lazy._compiled(pattern)
    assert constraint_lazy._compiled("[0-9]{4}-[0-9]{2}").match("2024-06")
