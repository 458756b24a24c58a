"""llguidance by its C functions: the same masks as by its Python package, and other threads run meanwhile."""

from __future__ import annotations

import ctypes
import random
import threading
import time
from typing import Any, cast

import numpy as np
import pytest
from guided import bits, bytes_tokenizer
from llguidance import LLMatcher, LLTokenizer

from llamado.text.grammar import guidance
from llamado.text.grammar.guidance import LIMITS, GuidedMatcher, GuidedTokenizer
from llamado.text.grammar.json_schema.schema import schema_grammar
from llamado.text.grammar.source import GrammarError
from llamado.text.grammar.vocabulary import GuidedVocabulary

SCHEMA = '{"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}, "b": {"enum": [true, 12]}}}'


class _Wrapper:
    """A vocabulary as llguidance's Python package wants it."""

    is_tokenizer_wrapper = True
    special_token_ids: tuple[int, ...] = ()
    bos_token_id = None

    def __init__(self, vocabulary: GuidedVocabulary) -> None:
        self.tokens = vocabulary.pieces()
        self.eos_token_id = min(vocabulary.tokenizer.eog)
        self.__call__ = vocabulary.spell_bytes


@pytest.fixture(scope="module")
def vocabulary() -> GuidedVocabulary:
    return GuidedVocabulary(bytes_tokenizer())


@pytest.mark.parametrize("seed", range(12))
def test_masks_are_those_of_the_package(vocabulary: GuidedVocabulary, seed: int) -> None:
    tokenizer, rng = vocabulary.tokenizer, random.Random(seed)
    ends = sorted(tokenizer.eog)
    package = LLTokenizer(cast(Any, _Wrapper(vocabulary)), n_vocab=tokenizer.n_vocab, eos_token=ends, slices=[])
    grammar = schema_grammar(SCHEMA)
    theirs, ours = LLMatcher(package, grammar, log_level=0), GuidedMatcher.of(vocabulary.guided, grammar, LIMITS)
    mask = np.zeros(vocabulary.words, np.uint32)
    for _ in range(60):
        expected = np.frombuffer(theirs.compute_bitmask(), np.uint32)
        ours = ours.copy()
        ours.mask(mask)
        assert mask.tobytes() == expected.tobytes() and not ours.error
        token = rng.choice(bits(mask, tokenizer.n_vocab))
        assert theirs.consume_token(token) and ours.accept(token)
        if token in tokenizer.eog:
            break


def test_tokens_are_accepted_together_or_not_at_all(vocabulary: GuidedVocabulary) -> None:
    spell = vocabulary.spell_bytes
    matcher = GuidedMatcher.of(vocabulary.guided, schema_grammar(SCHEMA), LIMITS)
    before, after = np.zeros((2, vocabulary.words), np.uint32)
    matcher.mask(before)
    assert not matcher.accept_all(spell(b'{"a": 1'))
    matcher.mask(after)
    assert not matcher.error and before.tobytes() == after.tobytes()
    assert matcher.accept_all(spell(b'{"b": 12}'))
    end = min(vocabulary.tokenizer.eog)
    assert all(matcher.accept(end) for _ in range(3))  # an answer that has ended may be ended again
    assert not matcher.accept(spell(b"x")[0]) and matcher.error


def test_grammar_errors_give_the_reason(vocabulary: GuidedVocabulary) -> None:
    assert "nothing" in GuidedMatcher.of(vocabulary.guided, "start: nothing", LIMITS).error
    with pytest.raises(GrammarError, match="code 0"):
        GuidedMatcher.of(vocabulary.guided, 'start: "a\0b"', LIMITS)
    with pytest.raises(GrammarError, match="out of range"):
        GuidedTokenizer([b"a", b"b"], [7], [])


def test_another_layout_of_the_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guidance, "_has_expected_layout", lambda init: False)
    with pytest.raises(GrammarError, match="this version of llguidance is not supported"):
        guidance._library.__wrapped__()


def test_defaults_tell_a_layout() -> None:
    def init() -> Any:
        made = guidance._ConstraintInit()
        guidance._library().short.llg_constraint_init_set_defaults(ctypes.byref(made), 1)
        return made

    assert guidance._has_expected_layout(init())
    longer = init()
    longer.behind[3] = 1
    assert not guidance._has_expected_layout(longer)
    for place, name, value in (
        ("", "tokenizer", 2),
        ("limits", "max_grammar_size", 257),
        ("limits", "max_items_in_row", 0),
        ("limits", "verbose_errors", False),
        ("limits", "precompute_large_lexemes", False),
    ):
        other = init()
        setattr(getattr(other, place) if place else other, name, value)
        assert not guidance._has_expected_layout(other)


@pytest.mark.slow
def test_other_threads_run_while_a_vocabulary_is_read() -> None:
    rng = random.Random(0)
    pieces = [bytes(rng.choices(b"abcdefghij klmnop", k=rng.randrange(2, 12))) for _ in range(60_000)]
    pieces.append(b"\xff<end>")
    done = threading.Event()
    beats = 0

    def build() -> None:
        GuidedTokenizer(pieces, [len(pieces) - 1], [r"[a-z ]+"])
        done.set()

    threading.Thread(target=build).start()
    while not done.is_set():
        time.sleep(0.001)
        beats += 1
    assert beats > 10  # with the interpreter's lock held there would be two or three
