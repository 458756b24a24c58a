"""llama.cpp's sampler chain: choose one token from one row of logits.

The semantics of each sampler are those of llama.cpp's `src/llama-sampler.cpp`. The chain is built as in its
`common/sampling.cpp`: logit bias first, then the samplers in the requested order, then a draw from the remaining
candidates. Three things differ on purpose:

- ties are broken by the lower token id, so that a result never depends on a sort's internals;
- the random number of a token is a pure function of the request's seed and the token's position in its sequence, so
  that neither neighbors in the batch, nor a restart in the middle of an answer, nor a discarded draft changes it;
- a constraint applies before all samplers, so that an answer follows the model's probabilities of the allowed tokens.
  (llama.cpp draws first, and once more if the token is forbidden.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.devices.drawing import Cut, Drawing
from llamado.engine.errors import ConstraintFailed
from llamado.engine.sampling import samplers
from llamado.engine.sampling.candidates import (
    F32,
    HUGE,
    MOST_WANTED,
    Candidates,
    Found,
    RowFinder,
    Top,
    WantedOfRow,
    no_numbers,
    top_k,
    top_rows_numpy,
)
from llamado.engine.sampling.dry import Breakers, Dry
from llamado.engine.sampling.params import Sampling
from llamado.engine.sampling.penalties import Penalties
from llamado.engine.sampling.rng import uniform
from llamado.engine.sampling.samplers import SamplerVocabulary, Step
from llamado.engine.sampling.selectors import AdaptiveP, Chooser, Draw, Mirostat, Weights

if TYPE_CHECKING:
    from llamado.text.grammar.compiler import Matcher

__all__ = ["Sampler", "SamplerVocabulary", "uniform"]

# A mask with at most this many nonzero words is used as a list of tokens.
_FEW_WORDS = 64

# Additional logits beyond top-k, because a constraint may forbid some of the largest.
_SPARE = 24

# Samplers that use only a row of logits.
_INDEPENDENT = frozenset({"top_k", "typ_p", "top_p", "min_p", "top_n_sigma", "temperature"})

# Samplers that a device can run after top-k (see Drawing), and their numbers there.
_CUTS = {"top_p": Cut.TOP_P, "min_p": Cut.MIN_P, "temperature": Cut.TEMPERATURE}

# Samplers that need a whole row with any constraint, and keep the largest logit the largest.
_HARMLESS = frozenset({"top_k", "top_p", "min_p", "top_n_sigma"})


class _AllowedTokens(NamedTuple):
    """The tokens that the constraint allows next."""

    mask: NDArray[np.uint32] | None
    """None: all tokens."""
    ids: NDArray[np.intp] | None = None
    """The allowed tokens, ascending, if there are few."""


_EVERYTHING = _AllowedTokens(None)


class SamplerSetup(NamedTuple):
    """Setup that all samplers of a model share."""

    n_vocab: int
    eog: Collection[int] = ()
    """Ids that end an answer."""
    vocabulary: SamplerVocabulary | None = None
    """Without one, DRY has no sequence breakers and there is no infill."""
    top_rows: RowFinder = top_rows_numpy
    """A faster kernel."""


class Sampler:
    """The sampler chain of one request.

    For each token of the answer call `sample`, then `accept` with its result. `matcher`: the constraint of the answer;
    `query_constraint` queries it ahead of time. `processor`: changes the logits of each token before all else.
    `weights`: True if `candidates` will be called, which rules out drawing in the kernel.

    The largest logits of many samplers' rows can be found together: `prepare` returns how many of which row it needs,
    or the parameters of a draw from them, and `sample` takes the result.
    """

    def __init__(
        self,
        sampling: Sampling,
        setup: SamplerSetup,
        *,
        seed: int,
        matcher: Matcher | None = None,
        processor: Callable[[NDArray[np.intc], F32], F32] | None = None,
        weights: bool = True,
    ) -> None:
        s = sampling
        n_vocab, eog, vocabulary, top_rows = setup
        self._sampling, self._setup, self._top_rows = sampling, setup, top_rows
        self._seed = seed
        self._n_vocab = n_vocab
        self._matcher = matcher
        self._processor = processor
        self._sequence = np.empty(0, np.intc)  # the sequence so far, for the processor
        self._row: F32 | None = None
        self._allowed: _AllowedTokens | None = None
        bias = {token: value for token, value in s.logit_bias.items() if 0 <= token < n_vocab}
        if s.ignore_eos:
            bias |= {token: -math.inf for token in eog if 0 <= token < n_vocab}
        self._banned = [token for token, value in bias.items() if value == -math.inf]
        bias = {token: value for token, value in bias.items() if value > -math.inf}
        self._bias_ids = np.array(list(bias), np.int64)
        self._bias = np.array(list(bias.values()), np.float64)

        self._penalties: Penalties | None = None
        self._dry: Dry | None = None
        names: list[str] = []
        chain: list[Step] = []
        for name in ("temperature",) if s.mirostat else s.samplers:
            step = self._step(name, s, names.count("xtc"), eog, vocabulary)
            if step is not None:
                names.append(name)
                chain.append(step)
        n_first = next((i for i, name in enumerate(names) if name not in ("penalties", "dry")), len(names))
        self._first, self._rest = chain[:n_first], chain[n_first:]
        self._k_next = s.top_k if names[n_first : n_first + 1] == ["top_k"] else 0
        # then the whole chain is one arg-max, after the steps that change logits
        until = names[n_first : names.index("temperature")] if "temperature" in names else ["never"]
        dynamic = s.dynatemp_range > 0.0 and not s.mirostat
        self._greedy = s.temperature <= 0.0 and not dynamic and _HARMLESS.issuperset(until)

        self._chooser: Chooser
        if s.mirostat:
            self._chooser = Mirostat(s.mirostat, s.mirostat_tau, s.mirostat_eta, n_vocab)
        elif "adaptive_p" in s.samplers:
            self._chooser = AdaptiveP(s.adaptive_target, s.adaptive_decay)
        else:
            self._chooser = Draw()
        self._steps = None if weights else self._drawn_steps(names[n_first:])
        if self._greedy:
            self._steps = np.empty((0, 3))
        # a row that is drawn from unchanged needs no candidates
        untouched = not (self._first or self._banned or self._bias_ids.size)
        k = 1 if self._greedy else self._k_next
        self._k_drawn = k if untouched and self._steps is not None and k <= MOST_WANTED else 0
        self._candidates = Candidates()
        self._begun = False
        self._wanted: WantedOfRow | None = None
        self._prepared = False
        self._weights: Weights | None = None

    def _step(
        self, name: str, s: Sampling, n_xtc: int, eog: Iterable[int], vocabulary: SamplerVocabulary | None
    ) -> Step | None:
        """Return a sampler by name; None if it is off. `n_xtc`: number of XTC samplers before it."""
        match name:
            case "penalties":
                lowers = s.repeat_penalty != 1.0 or s.frequency_penalty != 0.0 or s.presence_penalty != 0.0
                if lowers and s.repeat_last_n and self._penalties is None:
                    self._penalties = Penalties(s)
                return self._penalties
            case "dry":
                on = s.dry_multiplier != 0.0 and s.dry_base >= 1.0 and s.dry_penalty_last_n != 0
                if on and self._dry is None:
                    breakers = None if vocabulary is None else Breakers(s.dry_sequence_breakers, vocabulary)
                    self._dry = Dry(s, breakers)
                return self._dry
            case "top_n_sigma":
                return samplers.top_n_sigma(s.top_n_sigma) if s.top_n_sigma > 0.0 else None
            case "top_k":
                return samplers.top_k(s.top_k) if s.top_k > 0 else None
            case "typ_p":
                return samplers.typical(s.typical_p, s.min_keep) if s.typical_p < 1.0 else None
            case "top_p":
                return samplers.top_p(s.top_p, s.min_keep) if s.top_p < 1.0 else None
            case "min_p":
                return samplers.min_p(s.min_p, s.min_keep) if s.min_p > 0.0 else None
            case "xtc":
                on = s.xtc_probability > 0.0 and s.xtc_threshold <= 0.5
                # the first stream of random numbers is for the token's own draw
                draw = samplers.xtc(s.xtc_probability, s.xtc_threshold, s.min_keep, self._seed, n_xtc + 1)
                return draw if on else None
            case "temperature":
                if s.dynatemp_range > 0.0 and not s.mirostat:
                    return samplers.dynamic_temperature(s.temperature, s.dynatemp_range, s.dynatemp_exponent)
                return samplers.temperature(s.temperature) if s.temperature != 1.0 else None
            case "infill":
                return None if vocabulary is None else samplers.Infill(vocabulary, eog)
        return None

    def _drawn_steps(self, names: Sequence[str]) -> NDArray[np.float64] | None:
        """Return the steps of a Drawing that is equivalent to the samplers of these names and a draw; None if there is
        none.
        """
        s, rest = self._sampling, names[1:]
        drawn = names[:1] == ["top_k"] and isinstance(self._chooser, Draw) and _CUTS.keys() >= set(rest)
        dynamic = s.dynatemp_range > 0.0 and not s.mirostat
        if not drawn or ("temperature" in rest and (dynamic or s.temperature < samplers.LEAST_DIVISOR)):
            return None
        values = {
            "top_p": (s.top_p, s.min_keep),
            "min_p": (math.log(s.min_p) if s.min_p > 0 else 0.0, max(s.min_keep, 1)),
            "temperature": (min(s.temperature, HUGE), 0),
        }
        return np.array([(_CUTS[name], *values[name]) for name in rest], np.float64).reshape(-1, 3)

    def guess(self) -> Sampler:
        """Return a sampler with the same random numbers that ignores earlier tokens."""
        names = tuple(name for name in self._sampling.samplers if name in _INDEPENDENT)
        plain = replace(self._sampling, samplers=names, mirostat=0)
        return Sampler(plain, self._setup._replace(vocabulary=None), seed=self._seed, weights=False)

    def start(self, tokens: Sequence[int]) -> None:
        """Begin a sequence with the prompt's tokens, which count for penalties and DRY."""
        if self._processor is not None:
            self._sequence = np.array(tokens, np.intc)
        if self._penalties is not None:
            self._penalties.start(tokens)
        if self._dry is not None:
            self._dry.start(tokens)

    def accept(self, token: int) -> None:
        """Record the answer's next token."""
        if self._processor is not None:
            self._sequence = np.append(self._sequence, np.intc(token))
        if self._penalties is not None:
            self._penalties.accept(token)
        if self._dry is not None:
            self._dry.accept(token)
        self._chooser.accept(token)
        if self._matcher is not None:
            self._allowed = None
            self._matcher.accept(token)

    def query_constraint(self) -> None:
        """Query the constraint for the next token ahead of time. Optional; may be called again."""
        if self._allowed is None:
            self._allowed = self._ask()

    def prepare(self, row: F32, position: int) -> WantedOfRow | None:
        """Begin to choose the token at `position` of the sequence from its logits `[n_vocab]`.

        Return the part of the row that `sample` needs; None for nothing. `row` is changed from here to the end of
        `sample`, which must follow; a read-only row is copied. Raises ComputeFailed and LlamadoError like `sample`.
        """
        if self._allowed is None:
            self._allowed = self._ask()
        if self._processor is not None:
            row = self._processor(self._sequence, row.copy())
        self._row = row
        mask, ids = self._allowed
        self._wanted, self._prepared, self._begun = None, True, False
        if ids is not None and ids.size == 1:
            return None
        if self._k_drawn and mask is None:
            assert self._steps is not None
            u = 0.0 if self._greedy else uniform(self._seed, position)
            self._wanted = WantedOfRow(row, min(self._k_drawn, row.size), Drawing(self._steps, u))
            return self._wanted
        self._begun = True
        candidates = self._candidates
        candidates.begin(row, mask)
        candidates.ban(self._banned)
        if self._bias_ids.size or self._first:
            with np.errstate(over="ignore", invalid="ignore"):
                if self._bias_ids.size:
                    candidates.change(self._bias_ids, lambda own, which: own + self._bias[which])
                for step in self._first:
                    step(candidates, position)
        if ids is None:
            k = 1 if self._greedy else self._k_next + (_SPARE if self._k_next and mask is not None else 0)
            if 0 < k <= MOST_WANTED and (k < row.size or mask is None):
                steps = self._steps if mask is None else None
                drawing = None if steps is None else Drawing(steps, uniform(self._seed, position))
                self._wanted = WantedOfRow(candidates.logits, min(k, row.size), drawing)
        return self._wanted

    def sample(self, row: F32, position: int, found: Found = None) -> int:
        """Choose the token at `position` of the sequence from its logits `[n_vocab]`.

        `found`: the result for the request that `prepare` returned. The row is unchanged on return. Raises
        ComputeFailed if the logits are not numbers, LlamadoError if the constraint fails.
        """
        self._weights = None
        try:
            wanted = None if self._prepared else self.prepare(row, position)
            if wanted is not None:
                (found,) = self._top_rows([wanted.row], [wanted.k], [wanted.drawing])
            self._prepared = False
            if isinstance(found, int):
                return found
            assert self._row is not None
            row = self._row
            assert self._allowed is not None
            ids = self._allowed.ids
            if ids is not None and ids.size == 1:
                token = int(ids[0])
                self._chooser.forced(token)
                return token
            if not self._begun:
                self._candidates.begin(row, None)
            if found is None and (self._wanted is not None or not float(row.max()) < math.inf):
                raise no_numbers()
            # logits may be -inf and options of any size; values that overflow are out of reach anyway
            with np.errstate(over="ignore", invalid="ignore"):
                return self._run(self._allowed, position, found)
        finally:
            self._candidates.restore()
            self._row = None

    def _run(self, allowed: _AllowedTokens, position: int, top: Top | None) -> int:
        candidates, (mask, ids) = self._candidates, allowed
        if self._greedy:
            return self._best(ids, top)
        rest = self._rest
        if ids is not None:
            candidates.only(ids)
        elif mask is not None:
            if top is not None and candidates.keep_top_allowed(self._k_next, top):
                rest = rest[1:]
            else:
                candidates.only_allowed()
        elif top is not None:
            candidates.take(*top)
            rest = rest[1:]
        for step in rest:
            step(candidates, position)
        if (candidates.logits[0] if candidates.few else candidates.logits.max()) == -math.inf:
            return self._first_allowed()  # the request banned all candidates
        place, self._weights = self._chooser.choose(candidates, uniform(self._seed, position))
        return candidates.id_at(place)

    def candidates(self, n: int, token: int) -> tuple[float, list[tuple[int, float]]]:
        """Return the probability of `token` and the up to `n` most likely `(id, probability)` after the last `sample`'s
        chain.

        Tokens that the chain cut have probability 0 and are left out.
        """
        weights, ids = self._weights, self._candidates.ids
        if weights is None:
            return 1.0, [(token, 1.0)][:n]
        total = float(weights.sum(dtype=np.float64))
        at = token if ids is None else int(np.flatnonzero(ids == token)[0])
        own = float(weights[at]) / total
        if n <= 0:
            return own, []
        places, top = top_k(weights.astype(np.float32, copy=False), n)
        named = places if ids is None else ids[places]
        return own, [(i, p / total) for i, p in zip(named.tolist(), top.tolist(), strict=True) if p > 0]

    def _ask(self) -> _AllowedTokens:
        mask = None if self._matcher is None else self._matcher.mask()
        if mask is None:
            return _EVERYTHING
        words = np.flatnonzero(mask)
        if words.size > _FEW_WORDS:
            return _AllowedTokens(mask)
        bits = np.unpackbits(mask[words].view(np.uint8), bitorder="little").reshape(-1, 32)
        of, bit = np.nonzero(bits)
        ids = 32 * words[of] + bit
        ids = ids[ids < self._n_vocab]
        if not ids.size:
            raise ConstraintFailed("the constraint of this request allows no token at all; its grammar cannot be met")
        return _AllowedTokens(mask, ids)

    def _best(self, ids: NDArray[np.intp] | None, top: Top | None) -> int:
        """Return the allowed token with the largest logit."""
        candidates = self._candidates
        if ids is not None:
            return int(ids[candidates.logits[ids].argmax()])
        best = int(candidates.logits.argmax()) if top is None else int(top[0][0])
        if candidates.allows(best):
            return best
        candidates.only_allowed()
        best = int(candidates.logits.argmax())
        return best if candidates.allows(best) else self._first_allowed()

    def _first_allowed(self) -> int:
        mask = self._candidates.mask
        if mask is None:
            return self._candidates.id_at(0)
        word = int(np.flatnonzero(mask)[0])
        bits = int(mask[word])
        return 32 * word + (bits & -bits).bit_length() - 1
