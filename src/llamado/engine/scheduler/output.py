"""From logits to answers: the next token, its text, and the end of the answer."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llamado.engine.media.spans import fitted_discard, text_tokens
from llamado.engine.options import SchedulerOptions
from llamado.engine.request import Done, Result, StopType, Token, TokenProb, TokenProbs, TopTokens
from llamado.engine.sampling import samplers
from llamado.engine.sampling.candidates import F32, Found, RowFinder, log_softmax_top
from llamado.engine.scheduler.queue import Queue
from llamado.engine.scheduler.slots import Slot, Task
from llamado.engine.scheduler.statistics import Statistics

log = logging.getLogger(__name__)


class EngineVocabulary(samplers.SamplerVocabulary, Protocol):
    """The part of a tokenizer that the engine uses."""

    @property
    def eog(self) -> frozenset[int]: ...

    @property
    def control(self) -> NDArray[np.int32]:
        """Control tokens, ascending: they do not stand for text, and messages begin and end with them."""
        ...

    add_bos: bool
    """True if texts begin with a special token, which stays when a full context is shifted."""

    def piece(self, token: int, *, special: bool = False) -> bytes: ...


class OutputProcessor:
    """Continues and ends answers. `shift` drops part of a slot's sequence (see SequenceCache.shift)."""

    def __init__(
        self,
        tokenizer: EngineVocabulary,
        queue: Queue,
        stats: Statistics,
        options: SchedulerOptions,
        top_rows: RowFinder,
        shift: Callable[[Slot, int, int], None],
    ) -> None:
        self._shift_slot = shift
        self._tokenizer = tokenizer
        self._queue = queue
        self._stats = stats
        self._context_shift = options.context_shift
        self._top_rows = top_rows

    def find(self, tasks: Sequence[Task], rows: Sequence[F32]) -> list[Found]:
        """Return the results that `advance` needs for rows of logits, computed for all of them together."""
        asked = []
        for i, (task, row) in enumerate(zip(tasks, rows, strict=True)):
            if task.generated or task.params.n_predict != 0:
                with suppress(Exception):  # `advance` gets the same error
                    wanted = task.sampler.prepare(row, task.n_prompt + len(task.generated))
                    if wanted is not None:
                        asked.append((i, *wanted))
        found: list[Found] = [None] * len(tasks)
        if asked:
            places, wanted_rows, ks, drawings = zip(*asked, strict=True)
            for i, one in zip(places, self._top_rows(wanted_rows, ks, drawings), strict=True):
                found[i] = one
        return found

    def note_prompt(self, task: Task, first: int, rows: NDArray[np.float32]) -> None:
        """Record what a request needs of its prompt's tokens after position `first`: logits, or probabilities."""
        for place, row in enumerate(rows, first + 1):
            if task.request.on_prompt_row is not None:
                task.request.on_prompt_row(place - 1, row)
            if not task.params.prompt_probs or task.request.prompt[place] < 0:
                continue
            task.prompt_probs[place] = self._raw_probs(task, row, task.request.prompt[place], special=True)

    def advance(self, slot: Slot, task: Task, row: F32, found: Found = None) -> int | None:
        """Choose the next token of a sequence from its logits; return None if the answer ends with it.

        `found`: the result of `find`, if it was called.
        """
        request, params = task.request, task.params
        now = time.perf_counter()
        if task.generated:
            self._stats.inter_token.add(now - task.t_last)
        else:
            task.t_first = now
            self._stats.first_token.add(now - task.t_arrival)
            if params.n_predict == 0:
                self._finish(slot, task, "limit")
                return None
        if request.until is not None and request.until(_text_of(slot), row):
            text = task.answer.finish()
            if text:
                task.queue_event(Token(text, [], None, len(task.generated)))
            self._finish(slot, task, "eos")
            return None
        # the position in the whole answer, also after a context shift: no random number is used twice
        token = task.sampler.sample(row, task.n_prompt + len(task.generated), found)
        probs = self._probs(task, row, token) if params.n_probs else None
        task.sampler.accept(token)
        task.ahead.verify(token)
        task.generated.append(token)
        task.t_last = now
        self._stats.n_predicted += 1

        answer = task.answer
        begin = answer.length
        text = answer.push(self._tokenizer.piece(token, special=params.special or token in params.preserved))
        if probs is not None:
            task.probs.append(probs)
            task.probs_at.append(begin)

        stop: StopType = "none"
        full = slot.length + 1 >= slot.n_ctx
        shift = self._plan_shift(slot, task) if full else None
        if token in self._tokenizer.eog:
            stop = "eos"
        elif answer.stopping_word:
            stop = "word"
        elif answer.outdented or params.n_predict == len(task.generated):
            stop = "limit"
        elif full and shift is None:
            stop, task.truncated = "limit", True
        elif 0 < params.t_max_predict_ms < 1e3 * (now - task.t_first) and "\n" in text:
            stop = "limit"
        if stop != "none":
            text += answer.finish()

        timings = task.timings() if params.timings_per_token else None
        index = len(task.generated) - 1
        before = () if index else self._prompt_probs(task)
        task.queue_event(Token(text, [token], None if probs is None else [probs], index, timings, before))
        if stop != "none":
            self._finish(slot, task, stop)
            return None
        if shift is not None:
            n_keep, n_discard = shift
            log.info(
                "task %d: context full, %d of %d tokens dropped behind %d", task.id, n_discard, slot.length, n_keep
            )
            self._shift_slot(slot, n_keep, n_discard)
            task.truncated = True
        slot.append(token)
        return token

    def _plan_shift(self, slot: Slot, task: Task) -> tuple[int, int] | None:
        """Return the tokens of a full context to keep, and to drop behind them, by llama-server's rule; None if the
        answer ends instead.
        """
        if not self._context_shift or slot.n_ctx <= 2:  # of two tokens there is none to drop
            return None
        params = task.params
        n_keep = task.n_prompt if params.n_keep < 0 else params.n_keep
        n_keep = max(0, min(n_keep + self._tokenizer.add_bos, slot.n_ctx - 4))
        n_left = slot.length - n_keep
        return fitted_discard(slot.spans, slot.length, n_keep, min(params.n_discard or n_left // 2, n_left - 1))

    def _probs(self, task: Task, row: NDArray[np.float32], token: int) -> TokenProbs:
        if not task.params.post_sampling_probs:
            return self._raw_probs(task, row, token, special=task.params.special)
        own, top = task.sampler.candidates(task.params.n_probs, token)
        found = [(i, p, math.log(p) if p > 0 else -math.inf) for i, p in [(token, own), *top]]
        return self._named(found, special=task.params.special)

    def _raw_probs(self, task: Task, row: NDArray[np.float32], token: int, *, special: bool) -> TokenProbs:
        own, top = log_softmax_top(row, task.params.n_probs, token)
        return self._named([(i, math.exp(logp), logp) for i, logp in [(token, own), *top]], special=special)

    def _named(self, found: Sequence[tuple[int, float, float]], *, special: bool) -> TokenProbs:
        """Return a token's probability, the first of `found`, and those of the most likely tokens."""
        (token, prob, logprob), *others = found
        piece = partial(self._tokenizer.piece, special=special)
        return TokenProbs(TokenProb(token, piece(token), prob, logprob), TopTokens(others, piece))

    def _prompt_probs(self, task: Task) -> list[TokenProbs]:
        if not task.params.prompt_probs:
            return []
        first = task.request.prompt[0]
        found = [self._named([(first, math.nan, math.nan)], special=True)] if first >= 0 else []
        return [*found, *(probs for _, probs in sorted(task.prompt_probs.items()))]

    def _finish(self, slot: Slot, task: Task, stop: StopType) -> None:
        content = task.answer.content
        probs = task.probs
        if stop == "word":
            probs = [item for item, at in zip(task.probs, task.probs_at, strict=True) if at < len(content)]
        timings = task.timings()
        self._stats.finished(len(task.generated), timings)
        result = Result(
            content=content,
            tokens=task.generated,
            probs=probs,
            stop_type=stop,
            stopping_word=task.answer.stopping_word,
            truncated=task.truncated,
            n_prompt=task.n_prompt,
            n_cached=task.n_cached,
            n_predicted=len(task.generated),
            n_tokens_cached=slot.used,
            has_new_line=task.answer.has_new_line,
            timings=timings,
            id_slot=slot.id,
            id_task=task.id,
            seed=task.seed,
            request=task.request,
            prompt_probs=self._prompt_probs(task),
        )
        self._queue.release(slot)
        task.queue_event(Done(result))


def _text_of(slot: Slot) -> NDArray[np.int32]:
    """Return a copy of the slot's sequence, without media."""
    tokens = slot.tokens[: slot.length].copy()
    return np.array(text_tokens(tokens.tolist()), np.int32) if slot.spans else tokens
