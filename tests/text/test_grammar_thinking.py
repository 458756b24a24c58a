from __future__ import annotations

import pytest
from guided import Vocabulary, bytes_tokenizer, pieces_tokenizer

from llamado.text.grammar.compiler import Constraint
from llamado.text.grammar.source import ConstraintError, GrammarError, Trigger


@pytest.fixture(scope="module")
def bpe() -> Vocabulary:
    """With tags that are tokens."""
    return Vocabulary(bytes_tokenizer())


@pytest.fixture(scope="module")
def spm() -> Vocabulary:
    """With tags that are text."""
    return Vocabulary(pieces_tokenizer())


def thinking(
    vocabulary: Vocabulary, inner: Constraint | None, *, open: bool = False, budget: int = -1, message: str = ""
) -> Constraint:
    return vocabulary.compiler.with_reasoning(
        inner, start="<think>", end="</think>", open=open, budget=budget, message=message
    )


def forced(vocabulary: Vocabulary, matcher: object, most: int = 50) -> str:
    """Accept the forced tokens one by one, and return them."""
    out: list[int] = []
    while len(out) < most:
        allowed = vocabulary.allowed(matcher)  # type: ignore[arg-type]
        if len(allowed) != 1 or allowed[0] in vocabulary.tokenizer.eog:
            break
        matcher.accept(allowed[0])  # type: ignore[attr-defined]
        out.append(allowed[0])
    return vocabulary.tokenizer.join(out).decode()


@pytest.mark.parametrize("open", [False, True])
@pytest.mark.parametrize("make", [bytes_tokenizer, pieces_tokenizer])
def test_thoughts_are_free_and_the_answer_is_not(make: object, open: bool) -> None:
    vocabulary = Vocabulary(make())  # type: ignore[operator]
    inner = vocabulary.constraint("json_schema", '{"type": "boolean"}')
    matcher = thinking(vocabulary, inner, open=open).start()
    if not open:
        matcher.accept(vocabulary.compiler.vocabulary.spell("<think>")[0])
        forced(vocabulary, matcher)
    everything = set(vocabulary.allowed(matcher))
    assert not everything & vocabulary.tokenizer.eog  # an answer must follow
    assert vocabulary.tokenizer.n_vocab - len(everything) <= 12
    assert vocabulary.feed(matcher, "is it { true ? </thin x</think>")
    assert not vocabulary.feed(matcher, "x")
    assert vocabulary.feed(matcher, "true")
    assert set(vocabulary.allowed(matcher)) == vocabulary.tokenizer.eog


@pytest.mark.parametrize("make", [bytes_tokenizer, pieces_tokenizer])
def test_an_answer_without_thoughts(make: object) -> None:
    vocabulary = Vocabulary(make())  # type: ignore[operator]
    inner = vocabulary.constraint("json_schema", '{"type": "boolean"}')
    matcher = thinking(vocabulary, inner).start()
    assert not vocabulary.feed(matcher, "x")
    assert vocabulary.feed(matcher, "t")
    assert not vocabulary.feed(matcher, "<think>")  # thoughts come first or not at all
    assert vocabulary.feed(matcher, "rue") and vocabulary.may_end(matcher)


def test_budget_and_message(bpe: Vocabulary) -> None:
    inner = bpe.constraint("json_schema", '{"const": 1}')
    matcher = thinking(bpe, inner, open=True, budget=3, message=" Enough.\n").start()
    assert bpe.feed(matcher, "xyz")
    assert forced(bpe, matcher, len(bpe.spell(" Enough.\n</think>"))) == " Enough.\n</think>"
    assert bpe.feed(matcher, "1") and bpe.may_end(matcher)


@pytest.mark.parametrize("open", [False, True])
def test_budget_of_nothing_closes_at_once(bpe: Vocabulary, open: bool) -> None:
    inner = bpe.constraint("json_schema", '{"const": 1}')
    matcher = thinking(bpe, inner, open=open, budget=0).start()
    if not open:
        assert bpe.feed(matcher, "<think>")
    assert bpe.allowed(matcher) == bpe.spell("</think>")


def test_closing_before_the_budget_ends(bpe: Vocabulary) -> None:
    matcher = thinking(bpe, None, open=True, budget=5).start()
    for token in bpe.spell("a</think>bcdefghijk"):
        assert token in bpe.allowed(matcher)
        matcher.accept(token)
    assert matcher.mask() is None


def test_each_thought_has_its_budget(bpe: Vocabulary) -> None:
    matcher = thinking(bpe, None, open=True, budget=2).start()
    for token in bpe.spell("a</think>text<think>cd"):
        matcher.accept(token)
    assert bpe.allowed(matcher) == bpe.spell("</think>")


def test_no_cut_inside_a_character(bpe: Vocabulary) -> None:
    smile = bpe.spell("😀")
    assert len(smile) > 2
    constraint = thinking(bpe, None, open=True, budget=2)
    matcher = constraint.start()
    for token in smile:
        assert matcher.mask() is None
        matcher.accept(token)
    assert bpe.allowed(matcher) == bpe.spell("</think>")
    matcher = constraint.start()
    matcher.accept(smile[0])
    assert constraint.end_reasoning()
    for token in smile[1:]:
        assert matcher.mask() is None
        matcher.accept(token)
    assert bpe.allowed(matcher) == bpe.spell("</think>")


def test_ending_the_thoughts_from_outside(bpe: Vocabulary) -> None:
    constraint = thinking(bpe, bpe.constraint("json_schema", '{"const": 1}'), message="!")
    assert not constraint.end_reasoning()
    matcher = constraint.start()
    assert not constraint.end_reasoning()  # it does not think yet
    assert bpe.feed(matcher, "<think>ab")
    assert constraint.end_reasoning()
    assert forced(bpe, matcher, 2) == "!</think>"
    assert not constraint.end_reasoning()
    assert bpe.feed(matcher, "1") and bpe.may_end(matcher)
    assert not bpe.constraint("json_schema", "true").end_reasoning()


def test_tags_of_several_tokens_are_forced(spm: Vocabulary) -> None:
    matcher = thinking(spm, spm.constraint("json_schema", '{"const": 1}'), budget=1, message="the ").start()
    assert spm.allowed(matcher) == sorted({spm.spell("<think>")[0], *_bytes(spm, b"1")})
    matcher.accept(spm.spell("<think>")[0])
    assert forced(spm, matcher) == "think>"
    assert spm.feed(matcher, "x")
    assert forced(spm, matcher, 4).startswith("the </")


def _bytes(vocabulary: Vocabulary, data: bytes) -> list[int]:
    return [t for t in range(vocabulary.tokenizer.n_vocab) if vocabulary.tokenizer.piece(t) == data]


def test_no_answer_inside_the_token_that_closes(spm: Vocabulary) -> None:
    """The piece ">x" would close the thoughts and begin an answer that was never checked; ">\\n\\n" is harmless."""
    inner = spm.constraint("json_schema", '{"const": 1}')
    (going_on,), (blank,) = _bytes(spm, b">x"), _bytes(spm, b">\n\n")
    matcher = thinking(spm, inner, open=True).start()
    assert spm.feed(matcher, "a</think")
    assert going_on not in spm.allowed(matcher)
    assert blank in spm.allowed(matcher)
    matcher.accept(blank)
    assert spm.feed(matcher, "1") and spm.may_end(matcher)


def test_with_a_lazy_grammar(bpe: Vocabulary) -> None:
    call = bpe.constraint("gbnf", 'root ::= "<tool_call>" "1" "<think>"', Trigger("word", "<tool_call>"))
    matcher = thinking(bpe, call, budget=20).start()
    for token in bpe.spell("hm<think>not <tool_call> yet"):
        matcher.accept(token)
        assert matcher.mask() is None
    for token in bpe.spell("</think>now <tool_call>"):
        matcher.accept(token)
    assert bpe.allowed(matcher) == bpe.spell("1")
    assert bpe.feed(matcher, "1<think>") and bpe.may_end(matcher)


def test_wrong_tokens_and_tags(bpe: Vocabulary) -> None:
    matcher = thinking(bpe, None, open=True, budget=0).start()
    with pytest.raises(ConstraintError, match="the forced token"):
        matcher.accept(0)
    with pytest.raises(GrammarError, match="must not be empty"):
        bpe.compiler.with_reasoning(None, start="", end="", open=True)
    grammar = bpe.constraint("gbnf", 'root ::= "a"').start()
    with pytest.raises(ConstraintError, match="does not fit the grammar"):
        grammar.accept(bpe.spell("b")[0])
