"""From a generation request to the engine's requests: one per prompt and answer, with one compiled constraint."""

from __future__ import annotations

import dataclasses
import logging
import math
from functools import partial
from typing import TYPE_CHECKING

from llamado.engine.request import GenerationParams, Request
from llamado.engine.sampling.params import RANDOM_SEED
from llamado.engine.sampling.rng import Seed
from llamado.server.errors import invalid, not_supported
from llamado.server.generate.request import GenerationRequest
from llamado.server.generate.threads import off_loop, off_loop_grammar
from llamado.server.model import Grammars
from llamado.text.grammar.source import GrammarError

if TYPE_CHECKING:
    from llamado.text.grammar.compiler import Constraint


log = logging.getLogger("llamado.server")


async def engine_requests(request: GenerationRequest, grammars: Grammars | None) -> list[Request]:
    """Return the engine's requests. Compiles the grammar in a thread, which may take seconds. Raises ApiError."""
    make = partial(_requests, request, grammars)
    if request.grammar is not None:
        return await off_loop_grammar(make)
    return await off_loop(make, 64 * request.n_answers if request.constraints.reasoning is None else math.inf)


def _requests(request: GenerationRequest, grammars: Grammars | None) -> list[Request]:
    constraint = _constraint(request, grammars)
    # Without prompts, because an idle slot keeps its last request, whose settings `/slots` shows.
    tag = dataclasses.replace(request, prompts=(), spans=(), texts=())
    params = [_nth_params(request.params, i) for i in range(request.n)]
    return [
        Request(prompt=prompt, media=media, params=own, constraint=constraint, tag=tag)
        for prompt, media in zip(request.prompts, request.spans, strict=True)
        for own in params
    ]


def _nth_params(params: GenerationParams, i: int) -> GenerationParams:
    """Return the parameters of answer `i` of a prompt, which differ in seed and slot."""
    if not i:
        return params
    sampling = dataclasses.replace(params.sampling, seed=_nth_seed(params.sampling.seed, i))
    return dataclasses.replace(params, sampling=sampling, id_slot=-1)


def _constraint(request: GenerationRequest, grammars: Grammars | None) -> Constraint | None:
    """Compile the constraint of the answers. Raises ApiError."""
    given = request.constraints
    if request.grammar is None and given.reasoning is None:
        return None
    if grammars is None:
        raise not_supported("This server's model does not generate")
    constraint: Constraint | None = None
    try:
        if request.grammar is not None:
            try:
                constraint = grammars.compile(request.grammar, triggers=given.triggers if given.lazy else ())
            except GrammarError as error:
                if not given.optional:
                    raise
                log.warning("tools of request %s: their schemas are not enforced: %s", request.id, error)
        if given.reasoning is None:
            return constraint
        return grammars.with_reasoning(constraint, **dataclasses.asdict(given.reasoning))
    except GrammarError as error:
        raise invalid(f"Field '{given.field}': {error}" if given.field else str(error)) from None


def _nth_seed(seed: Seed | None, i: int) -> Seed | None:
    """Return the seed of answer `i` of a prompt: `i` steps away from 0, so that only -1 itself means a random seed."""
    if seed is None or seed == RANDOM_SEED:
        return seed
    if isinstance(seed, str):
        return f"{seed}+{i}"
    return seed + i if seed >= 0 else seed - i
