"""A smaller draft model: it reads the sequences and continues them, all in one batch.

Its memory is independent of the target's. If a sequence is new, was rewritten or rewound, it reads the tokens that
differ. It samples with the request's random numbers (a token depends only on the request's seed and the token's
position), so drafts are often right at any temperature.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from llamado.devices.device import DeviceError
from llamado.engine.drafts.contract import NO_PROPOSAL, Drafter, DraftKind, Proposal
from llamado.engine.errors import EngineError
from llamado.engine.forward.contract import Forward, ForwardError
from llamado.models.memory import Handle, Span
from llamado.text.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_CATCH_UP = 256  # most tokens of sequences that are read in one call, before other work continues
_BINS = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96, 0.99)  # least probability of each mark
_FIRST_GUESS = 0.85
_COMMON = 32  # tokens that two sequences must have in common for one to reuse the other's memory, unless all are
_ASK_AGAIN = 16  # times after which a drafter that seems not worth it is tried
ANY = -1
"""The mark that each of its tokens has besides its own."""
_MOST_DIFFERENCE, _FIRST_COMPARED = 128, 5  # as in llama.cpp: of vocabulary sizes, and of first tokens


class TokenSampler(Protocol):
    """Samples draft tokens as the request's sampler would."""

    def sample(self, row: NDArray[np.float32], position: int) -> int: ...


class DraftQuery(NamedTuple):
    """A sequence to be continued by the model.

    `place`: index in the request's random numbers of the first token after `history`. `least`: the probability of
    acceptance of all draft tokens below which a token is not worth evaluating, and `least_next` below which it is not
    worth drafting. `confidence`: that of the draft tokens in flight.
    """

    drafter: ModelDrafter
    history: Sequence[int]
    ahead: Sequence[int]
    most: int
    guess: TokenSampler
    place: int
    least: float
    least_next: float
    confidence: float


class ModelDrafter(Drafter):
    """The tokens that the model has read of one sequence."""

    def __init__(self, kind: ModelKind) -> None:
        self._kind = kind
        self.handle: Handle | None = None
        self.read: list[int] = []
        self._agreed = 0  # number of them that are known to match the sequence
        self.base = 0
        """Index in the sequence of the first token that was read."""
        self._passed = 0
        self.t_last = 0.0

    def propose(self, history: Sequence[int], ahead: Sequence[int], most: int) -> Proposal:
        return NO_PROPOSAL  # see ModelKind.propose

    def pass_over(self) -> bool:
        """Count that this drafter seems not worth a call. Return True now and then, so that a change is noticed."""
        self._passed = (self._passed + 1) % _ASK_AGAIN
        return not self._passed

    def forget(self) -> None:
        self._agreed = 0

    def end(self, history: Sequence[int], n_prompt: int) -> None:
        self._kind.leave(self)

    def reset(self) -> None:
        """Forget all tokens."""
        self.read, self._agreed = [], 0

    def take_over(self, other: ModelDrafter, history: Sequence[int]) -> None:
        """Take over the memory of another drafter, whose sequence has the same beginning."""
        self.handle, self.read, self.base, other.handle = other.handle, other.read, other.base, None

    def pending(self, history: Sequence[int], ahead: Sequence[int]) -> list[int]:
        """Rewind to the part of the sequence that it has read, and return the missing tokens; none if it cannot
        continue.
        """
        n, read = self._agreed, self.read
        text = [*history[n:], *ahead]
        same = 0
        for mine, theirs in zip(read[n:], text[:-1], strict=False):
            if mine != theirs:
                break
            same += 1
        assert self.handle is not None
        kept = self._kind.go_back(self.handle, n + same)
        del read[kept:]
        self._agreed = min(kept, len(history))
        return [*history[kept:], *ahead] if kept < n else text[kept - n :]


class ModelKind(DraftKind):
    """Drafts of a model whose forward pass is `forward`. Tokens from `n_vocab` on do not exist in the target's
    vocabulary.

    `least`: probability below which a token is not drafted. `ends`: tokens that end an answer.
    """

    at_once = False
    """True if all tokens of a draft are computed at once."""

    def __init__(
        self, forward: Forward, n_vocab: int, *, name: str = "draft-simple", least: float = 0.0, ends: frozenset[int]
    ) -> None:
        self.name = name
        self._forward = forward
        self._n_vocab = min(n_vocab, forward.n_vocab)
        self._least = least
        self._ends = ends
        self._drafters: list[ModelDrafter] = []
        self._left: list[ModelDrafter] = []
        self._seconds = 0.0
        self.lost = False
        """True if one of its devices is lost; then nothing is drafted."""

    def drafter(self) -> ModelDrafter:
        drafter = self._new_drafter()
        self._drafters.append(drafter)
        return drafter

    def _new_drafter(self) -> ModelDrafter:
        return ModelDrafter(self)

    def first_guess(self, mark: int) -> float:
        """Return the model's own probability. ANY starts high, because without drafts nothing is learned."""
        return _FIRST_GUESS if mark == ANY else 0.5 * ((0.0, *_BINS)[mark] + (*_BINS, 1.0)[mark])

    def leave(self, drafter: ModelDrafter) -> None:
        """Keep the memory of a drafter that is not used any more: the next sequence may have the same beginning."""
        self._drafters.remove(drafter)
        if drafter.handle is not None:
            self._left.append(drafter)

    def go_back(self, handle: Handle, n: int) -> int:
        """Rewind to the first `n` tokens of a sequence, or further if necessary. Return the new length."""
        memory = self._forward.memory
        n, need = memory.reach(handle, n), handle.need
        memory.rewind(handle, n)
        handle.need = need  # it is about to continue
        return n

    def seconds(self, n_sequences: int) -> float:
        """Return the seconds per token and sequence, with that many sequences."""
        return self._seconds / max(n_sequences, 1)

    def propose(self, queries: Sequence[DraftQuery], chance: Sequence[ChanceOf]) -> list[Proposal]:
        """Continue these sequences, all at once. `chance`: for each, the acceptance rate of a mark."""
        if self.lost:
            return [NO_PROPOSAL] * len(queries)
        try:
            return self._propose(queries, chance)
        except (DeviceError, ForwardError) as error:
            log.warning("draft model: disabled: %s", error)
            self.lost = True
            return [NO_PROPOSAL] * len(queries)

    def _propose(self, queries: Sequence[DraftQuery], chance: Sequence[ChanceOf]) -> list[Proposal]:
        found = [Proposal([], []) for _ in queries]
        pending: dict[int, list[int]] = {}
        room = min(_CATCH_UP, self._forward.max_batch)
        for i, query in enumerate(queries):
            if self._make_room(query.drafter, query.history, len(query.ahead) + query.most):
                tokens = query.drafter.pending(query.history, query.ahead)
                if self._forward.memory.has_states:  # what is drafted behind `history` may be wrong
                    assert query.drafter.handle is not None
                    self._forward.memory.mark(query.drafter.handle, len(query.history))
                if tokens and max(tokens) < self._forward.n_vocab:
                    pending[i] = tokens
        late = {i: tokens for i, tokens in pending.items() if len(tokens) > 8}
        for i, tokens in late.items():
            while len(tokens) > 1 and room > 0:
                n = min(len(tokens) - 1, room, self._forward.max_batch)
                self._read([queries[i].drafter], [tokens[:n]], outputs=False)
                del tokens[:n]
                room -= n
            if len(tokens) > 1:
                del pending[i]  # the rest is read the next time
        confidence = [query.confidence for query in queries]
        while pending:
            which = list(pending)[: self._forward.max_batch // 8 or 1]
            began = time.perf_counter()
            rows = self._read([queries[i].drafter for i in which], [pending[i] for i in which], outputs=True)
            for i, row in zip(which, rows, strict=True):
                query, (tokens, marks) = queries[i], found[i]
                token, probability = self._choose(query, row[: self._n_vocab], len(query.ahead) + len(tokens))
                mark = mark_of(probability)
                confidence[i] *= chance[i](mark)
                if confidence[i] <= query.least or probability < self._least:
                    del pending[i]
                    continue
                tokens.append(token)
                marks.append(mark)
                pending[i] = [token]
                too_unsure = confidence[i] * chance[i](ANY) <= query.least_next
                if len(tokens) >= query.most or token in self._ends or too_unsure:
                    del pending[i]
            seconds = time.perf_counter() - began
            self._seconds = 0.9 * self._seconds + 0.1 * seconds if self._seconds else seconds
        return found

    def _choose(self, query: DraftQuery, row: NDArray[np.float32], behind: int) -> tuple[int, float]:
        token = query.guess.sample(row, query.place + behind)
        with np.errstate(over="ignore"):
            return token, 1.0 / float(np.exp(row - row[token]).sum())

    def _read(
        self, drafters: Sequence[ModelDrafter], pieces: Sequence[list[int]], *, outputs: bool
    ) -> NDArray[np.float32]:
        """Read tokens of sequences; return the logits after each one's last token, if requested."""
        spans, ends, n = [], [], 0
        n_before = self._forward.memory.n_before
        for drafter, tokens in zip(drafters, pieces, strict=True):
            assert drafter.handle is not None
            before = drafter.read[-n_before:] if n_before else []
            spans.append(Span(drafter.handle, drafter.handle.used, len(tokens), before=before))
            n += len(tokens)
            ends.append(n - 1)
        batch = np.array([token for tokens in pieces for token in tokens], np.int32)
        rows = self._forward.start(batch, spans, np.array(ends if outputs else [], np.int32)).result()
        for drafter, tokens in zip(drafters, pieces, strict=True):
            assert drafter.handle is not None
            drafter.handle.used += len(tokens)
            drafter.read += tokens
        return rows

    def _make_room(self, drafter: ModelDrafter, history: Sequence[int], more: int) -> bool:
        """Allocate cells for a sequence and `more` tokens; take them from the least recently drafted sequences if
        necessary.
        """
        memory = self._forward.memory
        need = len(history) + more
        drafter.t_last = time.monotonic()
        if drafter.handle is None:
            self._take_over(drafter, history)
        while True:
            if drafter.handle is None:
                drafter.handle = memory.allocate(need, need + _CATCH_UP)
                if drafter.handle is not None:
                    return True
            elif memory.grow(drafter.handle, need, need + _CATCH_UP):
                return True
            others = [*self._left, *(other for other in self._drafters if other.t_last < drafter.t_last)]
            others = [other for other in others if other.handle is not None]
            if not others:
                return False
            oldest = min(others, key=lambda other: other.t_last)
            assert oldest.handle is not None
            memory.free(oldest.handle)
            oldest.handle = None
            self._left = [other for other in self._left if other.handle is not None]

    def _take_over(self, drafter: ModelDrafter, history: Sequence[int]) -> None:
        """Take over the memory of a released drafter whose sequence has the same beginning."""
        drafter.reset()
        for other in reversed(self._left):
            n = min(_COMMON, len(history) - other.base - 1)
            if n > 0 and other.read[:n] == history[other.base : other.base + n]:
                self._left.remove(other)
                drafter.take_over(other, history)
                return


def mark_of(probability: float) -> int:
    """Return the mark of a token by its probability in the model."""
    return sum(probability >= least for least in _BINS)


class ChanceOf(Protocol):
    """The acceptance rate of a mark."""

    def __call__(self, mark: int, /) -> float: ...


def check_vocabularies(target: Tokenizer, draft: Tokenizer, types: tuple[str, str]) -> None:
    """Raise `EngineError` if the tokens of two models differ, by llama.cpp's rule.

    `types`: of their vocabularies (`tokenizer.ggml.model`).
    """
    why = ""
    mine, theirs = target.vocabulary.strings, draft.vocabulary.strings
    if types[0] != types[1]:
        why = f"its vocabulary is of type {types[1]}, the model's of type {types[0]}"
    elif (target.add_bos, target.bos if target.add_bos else 0) != (draft.add_bos, draft.bos if draft.add_bos else 0):
        why = "its texts do not begin with the same token as the model's"
    elif (target.add_eos, target.eos if target.add_eos else 0) != (draft.add_eos, draft.eos if draft.add_eos else 0):
        why = "its texts do not end with the same token as the model's"
    elif abs(len(mine) - len(theirs)) > _MOST_DIFFERENCE:
        why = f"its vocabulary has {len(theirs)} tokens, the model's {len(mine)}"
    else:
        for i in range(_FIRST_COMPARED, min(len(mine), len(theirs))):
            if mine[i] != theirs[i]:
                why = f"its token {i} is {theirs[i]!r}, the model's {mine[i]!r}"
                break
    if why:
        raise EngineError(f"the draft model cannot draft for this model: {why}; give one of the same family with -md")
