"""From a generation request to the engine's requests: one per prompt and answer, with one compiled constraint."""

from __future__ import annotations

import dataclasses
import logging
import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from llamado.engine.request import Request
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


@dataclass(slots=True, kw_only=True)
class SubmittedRequest(Request):
    """An engine request with the generation request that it is part of, for `/slots` to show its settings.

    `source` is without prompts, because an idle slot keeps its last request.
    """

    source: GenerationRequest


async def engine_requests(request: GenerationRequest, grammars: Grammars | None) -> list[SubmittedRequest]:
    """Return the engine's requests. Compiles the grammar in a thread, which may take seconds. Raises ApiError."""
    make = partial(_requests, request, grammars)
    if request.grammar is not None:
        return await off_loop_grammar(make)
    return await off_loop(make, 64 * request.n_answers if request.constraints.reasoning is None else math.inf)


def _requests(request: GenerationRequest, grammars: Grammars | None) -> list[SubmittedRequest]:
    shared: dict[str, Any] = {f.name: getattr(request.engine, f.name) for f in dataclasses.fields(Request)}
    shared["constraint"] = _constraint(request, grammars)
    source = dataclasses.replace(request, prompts=(), texts=())
    requests = []
    for prompt in request.prompts:
        for i in range(request.n):
            own: dict[str, Any] = {"prompt": prompt}
            if i:
                sampling = request.engine.sampling
                own["sampling"] = dataclasses.replace(sampling, seed=_nth_seed(sampling.seed, i))
                own["id_slot"] = -1
            requests.append(SubmittedRequest(**(shared | own), source=source))
    return requests


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
