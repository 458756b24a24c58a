"""A smaller model that drafts: it reads what the sequences say and goes on with them, all of them in one batch.

Its memory is its own, and of use to nobody else: where a sequence was rewritten, went back or is new, it reads what
differs. As it draws with the same random numbers as the request does (what is chosen at a place depends on the
request's seed and that place alone), drafts are right often at any temperature.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from llamado.devices.device import DeviceError
from llamado.engine.drafts.contract import NOTHING, Drafter, DraftKind, Proposal
from llamado.engine.errors import EngineError
from llamado.engine.forward.contract import Forward, ForwardError
from llamado.models.memory import Handle, Span
from llamado.text.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_CATCH_UP = 256  # tokens of sequences that are read in one go, before all else has its turn
_BINS = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96, 0.99)  # probabilities, at least, for each mark
_FIRST_GUESS = 0.85
_COMMON = 32  # tokens with which sequences must begin alike for one to go on with what was read of the other, or all
_ASK_AGAIN = 16  # times after which one is asked that seems not to be worth it
ANY = -1
"""The mark that each of its tokens has besides its own."""
_MOST_DIFFERENCE, _FIRST_COMPARED = 128, 5  # llama.cpp's: sizes of vocabularies, and tokens that may differ in any way


class Guess(Protocol):
    """Draws tokens as a request would; see Sampler."""

    def sample(self, row: NDArray[np.float32], position: int) -> int: ...


class Ask(NamedTuple):
    """A sequence that the model is to go on with.

    `place`: that of the first token behind `said` among the request's random numbers. `least`: the chance that all
    drafted tokens are right below which one is not worth being evaluated, and `least_next` below which it is not worth
    being drafted; `trust`: that those ahead are.
    """

    drafter: ModelDrafter
    said: Sequence[int]
    ahead: Sequence[int]
    most: int
    guess: Guess
    place: int
    least: float
    least_next: float
    trust: float


class ModelDrafter(Drafter):
    """What the model has read of one sequence."""

    def __init__(self, kind: ModelKind) -> None:
        self._kind = kind
        self.handle: Handle | None = None
        self.read: list[int] = []
        self._agreed = 0  # of them, tokens that are known to be the sequence's
        self.base = 0
        """Which token of the sequence is the first of them."""
        self._passed = 0
        self.t_last = 0.0

    def propose(self, said: Sequence[int], ahead: Sequence[int], most: int) -> Proposal:
        return NOTHING  # see ModelKind.propose

    def pass_over(self) -> bool:
        """It does not seem worth being asked; whether it is nevertheless, lest nobody learn that things changed."""
        self._passed = (self._passed + 1) % _ASK_AGAIN
        return not self._passed

    def forget(self) -> None:
        self._agreed = 0

    def end(self, said: Sequence[int], n_prompt: int) -> None:
        self._kind.leave(self)

    def reset(self) -> None:
        """Nothing is read any more."""
        self.read, self._agreed = [], 0

    def take_over(self, other: ModelDrafter, said: Sequence[int]) -> None:
        """Has what another one read, of a sequence that began as this one does."""
        self.handle, self.read, self.base, other.handle = other.handle, other.read, other.base, None

    def pending(self, said: Sequence[int], ahead: Sequence[int]) -> list[int]:
        """Goes back to what it has of a sequence, and gives the tokens that it lacks; none where it cannot go on."""
        n, read = self._agreed, self.read
        text = [*said[n:], *ahead]
        same = 0
        for mine, theirs in zip(read[n:], text[:-1], strict=False):
            if mine != theirs:
                break
            same += 1
        assert self.handle is not None
        kept = self._kind.go_back(self.handle, n + same)
        del read[kept:]
        self._agreed = min(kept, len(said))
        return [*said[kept:], *ahead] if kept < n else text[kept - n :]


class ModelKind(DraftKind):
    """Drafts of a model whose forward pass is `forward`; the tokens from `n_vocab` on are none of the other model's.

    `least`: probability below which a token is not drafted. `ends`: tokens behind which nothing comes.
    """

    at_once = False
    """Whether the tokens of a draft are made at once, not one after the other."""

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
        """Whether a device of it is gone; nothing is drafted then."""

    def drafter(self) -> ModelDrafter:
        drafter = self._new_drafter()
        self._drafters.append(drafter)
        return drafter

    def _new_drafter(self) -> ModelDrafter:
        return ModelDrafter(self)

    def first_guess(self, mark: int) -> float:
        """As often as the model itself believes; it is given a chance, as nobody learns from drafts never made."""
        return _FIRST_GUESS if mark == ANY else 0.5 * ((0.0, *_BINS)[mark] + (*_BINS, 1.0)[mark])

    def leave(self, drafter: ModelDrafter) -> None:
        """Nobody asks this one any more; what it read may be how the next sequence begins."""
        self._drafters.remove(drafter)
        if drafter.handle is not None:
            self._left.append(drafter)

    def go_back(self, handle: Handle, n: int) -> int:
        """To the first `n` tokens of a sequence, or as far before as it has to be."""
        memory = self._forward.memory
        n, need = memory.reach(handle, n), handle.need
        memory.rewind(handle, n)
        handle.need = need  # it is about to go on
        return n

    def seconds(self, n_sequences: int) -> float:
        """What a token takes, of each of so many sequences."""
        return self._seconds / max(n_sequences, 1)

    def propose(self, asks: Sequence[Ask], chance: Sequence[ChanceOf]) -> list[Proposal]:
        """Goes on with these sequences, all of them at once. `chance`: by its mark, that a token of each is right."""
        if self.lost:
            return [NOTHING] * len(asks)
        try:
            return self._propose(asks, chance)
        except (DeviceError, ForwardError) as error:
            log.warning("draft model: disabled: %s", error)
            self.lost = True
            return [NOTHING] * len(asks)

    def _propose(self, asks: Sequence[Ask], chance: Sequence[ChanceOf]) -> list[Proposal]:
        found = [Proposal([], []) for _ in asks]
        pending: dict[int, list[int]] = {}
        room = min(_CATCH_UP, self._forward.max_batch)
        for i, ask in enumerate(asks):
            if self._make_room(ask.drafter, ask.said, len(ask.ahead) + ask.most):
                tokens = ask.drafter.pending(ask.said, ask.ahead)
                if self._forward.memory.has_states:  # what is drafted behind `said` may be wrong
                    assert ask.drafter.handle is not None
                    self._forward.memory.mark(ask.drafter.handle, len(ask.said))
                if tokens and max(tokens) < self._forward.n_vocab:
                    pending[i] = tokens
        late = {i: tokens for i, tokens in pending.items() if len(tokens) > 8}
        for i, tokens in late.items():
            while len(tokens) > 1 and room > 0:
                n = min(len(tokens) - 1, room, self._forward.max_batch)
                self._read([asks[i].drafter], [tokens[:n]], outputs=False)
                del tokens[:n]
                room -= n
            if len(tokens) > 1:
                del pending[i]  # the rest is read the next time
        trust = [ask.trust for ask in asks]
        while pending:
            which = list(pending)[: self._forward.max_batch // 8 or 1]
            began = time.perf_counter()
            rows = self._read([asks[i].drafter for i in which], [pending[i] for i in which], outputs=True)
            for i, row in zip(which, rows, strict=True):
                ask, (tokens, marks) = asks[i], found[i]
                token, probability = self._choose(ask, row[: self._n_vocab], len(ask.ahead) + len(tokens))
                mark = mark_of(probability)
                trust[i] *= chance[i](mark)
                if trust[i] <= ask.least or probability < self._least:
                    del pending[i]
                    continue
                tokens.append(token)
                marks.append(mark)
                pending[i] = [token]
                too_unsure = trust[i] * chance[i](ANY) <= ask.least_next
                if len(tokens) >= ask.most or token in self._ends or too_unsure:
                    del pending[i]
            seconds = time.perf_counter() - began
            self._seconds = 0.9 * self._seconds + 0.1 * seconds if self._seconds else seconds
        return found

    def _choose(self, ask: Ask, row: NDArray[np.float32], behind: int) -> tuple[int, float]:
        token = ask.guess.sample(row, ask.place + behind)
        with np.errstate(over="ignore"):
            return token, 1.0 / float(np.exp(row - row[token]).sum())

    def _read(
        self, drafters: Sequence[ModelDrafter], pieces: Sequence[list[int]], *, outputs: bool
    ) -> NDArray[np.float32]:
        """Reads tokens of sequences; of each the logits behind its last one, if they are wanted."""
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

    def _make_room(self, drafter: ModelDrafter, said: Sequence[int], more: int) -> bool:
        """Cells for a sequence and `more` tokens, taken from those that were not drafted for longest."""
        memory = self._forward.memory
        need = len(said) + more
        drafter.t_last = time.monotonic()
        if drafter.handle is None:
            self._take_over(drafter, said)
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

    def _take_over(self, drafter: ModelDrafter, said: Sequence[int]) -> None:
        """What one that was left has read, where a sequence begins in the same way."""
        drafter.reset()
        for other in reversed(self._left):
            n = min(_COMMON, len(said) - other.base - 1)
            if n > 0 and other.read[:n] == said[other.base : other.base + n]:
                self._left.remove(other)
                drafter.take_over(other, said)
                return


def mark_of(probability: float) -> int:
    """The mark of a token that a model finds so probable."""
    return sum(probability >= least for least in _BINS)


class ChanceOf(Protocol):
    """The chance that a token of a mark is right."""

    def __call__(self, mark: int, /) -> float: ...


def check_vocabularies(target: Tokenizer, draft: Tokenizer, types: tuple[str, str]) -> None:
    """Raises EngineError where the tokens of two models are not the same, by llama.cpp's rule.

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
