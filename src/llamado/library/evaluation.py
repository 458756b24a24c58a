"""Token-by-token evaluation: the sequence that `Llama.eval` extends, its logits, and tokens sampled from them.

The engine keeps the sequence's cells like those of any prompt, so each step computes new tokens only. If another
request took the slot, the next step computes the cells again, to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamado.engine.sampling.chain import Sampler, SamplerSetup
from llamado.engine.sampling.params import Sampling
from llamado.engine.sampling.rng import seed_key
from llamado.engine.scheduler.output import EngineVocabulary
from llamado.library.errors import LibraryError
from llamado.library.grammar import LlamaGrammar
from llamado.library.hooks import Logits, TokenArray
from llamado.text.grammar.compiler import Matcher

Evaluate = Callable[[Sequence[int], dict[str, Any]], None]
"""Evaluate a prompt on the engine; the dictionary holds fields of its Request."""


class Evaluation:
    """A sequence and its logits."""

    def __init__(self, n_ctx: int, n_vocab: int, evaluate: Evaluate, *, logits_all: bool) -> None:
        self._evaluate = evaluate
        self._n_vocab, self._logits_all = n_vocab, logits_all
        self.input_ids: TokenArray = np.zeros(n_ctx, np.intc)
        self.n_tokens = 0
        """Length of the sequence in tokens; assign a smaller number to truncate it."""
        self._rows: NDArray[np.float32] = np.zeros((n_ctx if logits_all else 0, n_vocab), np.float32)
        self._last: tuple[int, Logits] | None = None
        """The logits of the next token, and the number of tokens before it."""
        self._grammar: tuple[LlamaGrammar, int, int, Matcher] | None = None
        """A grammar, the position where its text begins, the position of the matcher, and the matcher."""

    @property
    def scores(self) -> NDArray[np.float32]:
        """Logits by position: of all tokens with `logits_all`, else of the last one; other rows are 0."""
        if self._logits_all:
            return self._rows
        rows = np.zeros((self.n_tokens, self._n_vocab), np.float32)
        if self.n_tokens:
            rows[-1] = self.row()
        return rows

    def begin(self, tokens: Sequence[int]) -> None:
        """Set the sequence without computing anything."""
        self.n_tokens = min(len(tokens), self.input_ids.size)
        self.input_ids[: self.n_tokens] = tokens[: self.n_tokens]
        self._last = None

    def note(self, token: int) -> None:
        """Append a token without computing anything."""
        if self.n_tokens < self.input_ids.size:
            self.input_ids[self.n_tokens] = token
            self.n_tokens += 1

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens and evaluate them. Raises LlamadoError."""
        if not len(tokens):
            return
        first = self.n_tokens
        prompt = [*self.input_ids[:first].tolist(), *tokens]
        self._compute(prompt, first)
        self.input_ids[first : len(prompt)] = tokens
        self.n_tokens = len(prompt)

    def row(self, place: int | None = None) -> Logits:
        """Return the logits after the sequence, or after the token at a position. Raises LibraryError."""
        n = self.n_tokens if place is None else place + 1
        if not 0 < n <= self.n_tokens:
            raise LibraryError(f"there are no logits at place {n - 1} of {self.n_tokens} evaluated tokens")
        if self._logits_all and self._rows[n - 1].any():
            known: Logits = self._rows[n - 1]
            return known
        if self._last is None or self._last[0] != n:
            self._compute(self.input_ids[:n].tolist(), n - 1)
        assert self._last is not None
        _, row = self._last
        return row

    def _compute(self, prompt: list[int], first: int) -> None:
        """Compute the logits of the tokens from position `first` on, or of the last one."""
        found: dict[int, Logits] = {}

        def last(tokens: TokenArray, row: Logits) -> bool:
            found[len(prompt) - 1] = row.copy()
            return True

        def other(place: int, row: Logits) -> None:
            found[place] = row.copy()

        fields: dict[str, Any] = {"until": last}
        if self._logits_all:
            fields["on_prompt_row"] = other
        self._evaluate(prompt, fields)
        if self._logits_all and len(found) < len(prompt) - first:  # cells were in the cache, but not their logits
            self._evaluate(prompt, {**fields, "cache_prompt": False})
        self._last = len(prompt), found[len(prompt) - 1]
        if self._logits_all:
            for place, row in found.items():
                self._rows[place] = row

    def sample(
        self,
        sampling: Sampling,
        vocabulary: EngineVocabulary,
        process: Callable[[TokenArray, Logits], Logits],
        grammar: tuple[LlamaGrammar, Callable[[], Matcher]] | None,
        place: int | None,
    ) -> int:
        """Sample the token after the sequence, or after the token at a position. Raises LlamadoError."""
        row = self.row(place)
        tokens = self.input_ids[: self.n_tokens if place is None else place + 1]
        assert sampling.seed is not None
        sampler = Sampler(
            sampling,
            SamplerSetup(self._n_vocab, vocabulary.eog, vocabulary),
            seed=seed_key(sampling.seed),
            matcher=None if grammar is None else self._matcher(*grammar, tokens.size),
            processor=process,
            weights=False,
        )
        sampler.start(tokens.tolist())
        return sampler.sample(row.copy(), tokens.size)

    def _matcher(self, grammar: LlamaGrammar, start: Callable[[], Matcher], n: int) -> Matcher:
        """Return the matcher of a grammar at position `n`; its text begins where it was first used."""
        if self._grammar is None or self._grammar[0] is not grammar or not self._grammar[1] <= self._grammar[2] <= n:
            self._grammar = grammar, n, n, start()
        _, first, at, matcher = self._grammar
        for token in self.input_ids[at:n].tolist():
            matcher.accept(token)
        self._grammar = grammar, first, n, matcher
        return matcher
