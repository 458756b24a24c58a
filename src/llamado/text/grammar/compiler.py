"""Compile grammars, schemas and thinking budgets to masks over a model's tokens, with llguidance.

A `GrammarCompiler` belongs to one vocabulary. It compiles to a `Constraint`: `start()` returns the state of one answer,
and the state's `mask()` returns the tokens that are allowed next.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llamado.text.grammar.deep_stack import with_deep_stack
from llamado.text.grammar.guidance import LIMITS, GuidedMatcher
from llamado.text.grammar.lazy import LazyConstraint
from llamado.text.grammar.matcher import GrammarConstraint
from llamado.text.grammar.source import GrammarError, GrammarSource, Trigger
from llamado.text.grammar.thinking import ThinkingConstraint, Thoughts
from llamado.text.grammar.triggers import Triggers
from llamado.text.grammar.vocabulary import GuidedVocabulary
from llamado.text.tokenizer.tokenizer import Tokenizer

__all__ = ["Constraint", "GrammarCompiler", "Matcher"]

Mask = NDArray[np.uint32]

MAX_TEXT = 1 << 19  # characters of a grammar
_CACHED = 6  # compiled grammars kept: each may grow to 14 MB while it is used, until LIMITS stop it
_CACHED_TEXT = 1 << 20  # and the characters of all their texts


class Matcher(Protocol):
    """The state of one answer."""

    def mask(self) -> Mask | None:
        """Return the tokens that are allowed next: bit `i % 32` of word `i // 32` is token i; None: all are allowed.

        The array is valid until the next call. Raises ConstraintError.
        """
        ...

    def accept(self, token: int) -> None:
        """Advance by the answer's next token. Raises ConstraintError for a token that the mask excludes."""
        ...


class Constraint(Protocol):
    """A limit on answers; one may serve many requests at the same time."""

    def start(self) -> Matcher:
        """Return the state at the beginning of an answer."""
        ...

    def end_reasoning(self) -> bool:
        """End the thoughts of all answers that are thinking; False if there are none. May be called from any thread."""
        ...


class GrammarCompiler:
    """Compiles grammars for one model's vocabulary; cheap to create, safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.vocabulary = GuidedVocabulary(tokenizer)
        self._lock = threading.Lock()
        self._cache: OrderedDict[GrammarSource, GrammarConstraint | str] = OrderedDict()

    def compile(
        self, source: GrammarSource, *, triggers: Sequence[Trigger] = (), generation_prompt: str = ""
    ) -> Constraint:
        """Return a constraint for a grammar.

        With `triggers` the grammar is lazy: everything is allowed until one of them was generated. Otherwise
        `generation_prompt`, the end of the prompt that the grammar covers, counts as generated. Raises GrammarError.
        """
        grammar = self._compiled(source)
        if triggers:
            return LazyConstraint(grammar, Triggers(triggers, self.vocabulary), self.vocabulary)
        if generation_prompt:
            return grammar.after(self.vocabulary.spell(generation_prompt), generation_prompt)
        return grammar

    def with_reasoning(
        self, inner: Constraint | None, *, start: str, end: str, open: bool, budget: int = -1, message: str = ""
    ) -> Constraint:
        """Return `inner` for the text after thoughts, with thoughts between the tags `start` and `end` before it.

        `open`: the prompt has opened the thoughts. After `budget` tokens of thought (-1: no limit), or when
        `end_reasoning()` is called, `message` and `end` are forced. Raises GrammarError.
        """
        thoughts = Thoughts(vocabulary=self.vocabulary, start=start, end=end, open=open, budget=budget, message=message)
        return ThinkingConstraint(thoughts, inner)

    def _compiled(self, source: GrammarSource) -> GrammarConstraint:
        with self._lock:
            found = self._cache.get(source)
            if found is not None:
                self._cache.move_to_end(source)
        if found is None:
            try:
                found = self._build(source)
            except GrammarError as error:
                found = str(error)
            with self._lock:
                self._cache[source] = found
                while len(self._cache) > _CACHED or sum(len(key.text) for key in self._cache) > _CACHED_TEXT:
                    self._cache.popitem(last=False)
        if isinstance(found, str):
            raise GrammarError(found)
        return found

    def _build(self, source: GrammarSource) -> GrammarConstraint:
        if len(source.text) > MAX_TEXT:
            raise GrammarError(
                f"a grammar of {len(source.text)} characters is too long; at most {MAX_TEXT} are allowed"
            )
        vocabulary = self.vocabulary
        guided = vocabulary.guided
        try:
            text = _guided_grammar(source, vocabulary)
        except RecursionError:
            raise GrammarError("the grammar cannot be used: it is nested too deep") from None

        def build() -> GrammarConstraint | str:
            matcher = GuidedMatcher.of(guided, text, LIMITS)
            return matcher.error or GrammarConstraint(matcher, vocabulary.words)

        built = with_deep_stack(build)
        if not isinstance(built, str):
            return built
        raise _rejected(source.kind, built)


# The first grammar imports the languages: importing them earlier would take a twentieth of a server's start.


def _guided_grammar(source: GrammarSource, vocabulary: GuidedVocabulary) -> str:
    """Return a grammar in llguidance's language. Raises GrammarError or RecursionError."""
    from llamado.text.grammar.gbnf_lark import gbnf_grammar
    from llamado.text.grammar.json_schema.schema import schema_grammar
    from llamado.text.grammar.lark import lark_grammar, regex_grammar

    match source.kind:
        case "json_schema":
            return schema_grammar(source.text)
        case "gbnf":
            return gbnf_grammar(source.text, vocabulary)
        case "regex":
            return regex_grammar(source.text)
        case "lark":
            return lark_grammar(source.text, vocabulary)


def _rejected(kind: str, message: str) -> GrammarError:
    """Return the error for a grammar that llguidance rejects with `message`."""
    from llamado.text.grammar.gbnf import FAILED
    from llamado.text.grammar.json_schema.schema import schema_error
    from llamado.text.grammar.lark import lark_error

    if kind == "json_schema" or "failed to compile JSON schema" in message:
        return schema_error(message)
    return GrammarError(f"{FAILED if kind == 'gbnf' else 'the grammar cannot be used'}: {lark_error(message)}")
