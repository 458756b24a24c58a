from __future__ import annotations

import threading
from typing import Any

import pytest
from guided import Vocabulary, bytes_tokenizer, pieces_tokenizer

from llamado.patterns import MAX_LENGTH
from llamado.text.grammar import lazy
from llamado.text.grammar.lazy import ANSWER_SECONDS, FREE_SECONDS, TOKEN_SECONDS
from llamado.text.grammar.source import ConstraintError, GrammarError, Trigger
from llamado.text.grammar.triggers import MAX_SIZE, MAX_TRIGGERS

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


def test_pattern_at_the_very_beginning(bpe: Vocabulary) -> None:
    matcher = bpe.constraint("gbnf", 'root ::= "{" "}"', Trigger("pattern", r"\{")).start()
    matcher.accept(bpe.spell("{")[0])
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
    bad = (Trigger("pattern", "("), Trigger("pattern", "a" * (MAX_LENGTH + 1)), Trigger("word", ""))
    for trigger in bad:
        with pytest.raises(GrammarError):
            bpe.constraint("gbnf", CALL, trigger)
    with pytest.raises(GrammarError, match="too many"):
        bpe.constraint("gbnf", CALL, *[Trigger("word", str(i)) for i in range(MAX_TRIGGERS + 1)])


@pytest.mark.parametrize(
    "pattern",
    ["a{1000000}", "((a{100}){100}){100}", "a{999999999999999999999}", "(?:(?:ab){99,}){99,}", r"(?:\pL\pN){100}"],
)
def test_patterns_that_are_too_large_are_refused(bpe: Vocabulary, pattern: str) -> None:
    with pytest.raises(GrammarError, match=r"too large|too often|repetition"):
        bpe.constraint("gbnf", CALL, Trigger("pattern", pattern))


def test_the_patterns_of_a_request_are_bounded_together(bpe: Vocabulary) -> None:
    many = [Trigger("pattern", "(?:ab){400}" + "x" * i) for i in range(20)]
    assert bpe.constraint("gbnf", CALL, *many[:10])
    with pytest.raises(GrammarError, match=f"too large together.*{MAX_SIZE}"):
        bpe.constraint("gbnf", CALL, *many)


@pytest.mark.parametrize("pattern", ["(?R)", "(a)(?1)", "(?>a)", "(?=a)", "(?<!a)", r"(a)\1", "(?#)", "a\\", "a)("])
def test_patterns_beyond_linear_time_are_rejected(bpe: Vocabulary, pattern: str) -> None:
    with pytest.raises(GrammarError, match="cannot be used"):
        bpe.constraint("gbnf", CALL, Trigger("pattern", pattern))


def test_nested_repeats_take_linear_time(bpe: Vocabulary) -> None:
    matcher = bpe.constraint("gbnf", CALL, Trigger("pattern", r"(\w*\w*\w*\w*\w*\w*)*\d")).start()
    assert accepted(matcher, bpe.spell("ab") * 90) == 90


class Clock:
    """Computing time that goes on by a step whenever it is asked for."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def accepted(matcher: Any, tokens: list[int]) -> int:
    """Return the number of tokens accepted before the triggers take too long."""
    for n, token in enumerate(tokens):
        try:
            matcher.accept(token)
        except ConstraintError as error:
            assert "use fewer or simpler patterns" in str(error)
            return n
    return len(tokens)


def test_all_triggers_share_the_time_of_a_token(bpe: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pattern alone stays within it."""
    step = TOKEN_SECONDS / 10
    for count, n in ((4, 3), (40, 0)):
        monkeypatch.setattr(lazy, "_seconds", Clock(step))
        matcher = bpe.constraint("gbnf", CALL, *[Trigger("pattern", f"never{i}") for i in range(count)]).start()
        assert accepted(matcher, bpe.spell("xyz")) == n
    monkeypatch.setattr(lazy, "_seconds", Clock(step))
    matcher = bpe.constraint("gbnf", CALL, *[Trigger("word", "x") for _ in range(40)]).start()
    assert accepted(matcher, bpe.spell("yx")) == 1


def test_the_time_of_an_answer_is_limited(bpe: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    constraint = bpe.constraint("gbnf", CALL, Trigger("pattern", "never"))
    tokens = bpe.spell("x") * 2000
    calls = 3  # of the clock, between the first and the last of a token
    monkeypatch.setattr(lazy, "_seconds", Clock(FREE_SECONDS / calls / 2))
    assert accepted(constraint.start(), tokens) == len(tokens)
    seconds = 2 * FREE_SECONDS  # of which half is free
    monkeypatch.setattr(lazy, "_seconds", Clock(seconds / calls))
    n = accepted(constraint.start(), tokens)
    assert 0.9 < n * (seconds - FREE_SECONDS) / ANSWER_SECONDS < 1.1
