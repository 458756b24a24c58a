"""What is asked for → what the engine is given: one request per prompt and answer, under one compiled constraint."""

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
    """A request to the engine that knows what it is part of: what the engine's snapshots show has it at hand.

    `asked` is without prompts: a slot shows its last request for as long as it rests.
    """

    asked: GenerationRequest


async def engine_requests(asked: GenerationRequest, grammars: Grammars | None) -> list[SubmittedRequest]:
    """The engine's requests; in a thread where a grammar is to be compiled, which may take seconds. Raises ApiError."""
    make = partial(_requests, asked, grammars)
    if asked.grammar is not None:
        return await off_loop_grammar(make)
    return await off_loop(make, 64 * asked.n_answers if asked.limits.reasoning is None else math.inf)


def _requests(asked: GenerationRequest, grammars: Grammars | None) -> list[SubmittedRequest]:
    """The answers of one prompt get seeds counted up from the given one."""
    shared: dict[str, Any] = {f.name: getattr(asked.engine, f.name) for f in dataclasses.fields(Request)}
    shared["constraint"] = _constraint(asked, grammars)
    settings = dataclasses.replace(asked, prompts=(), texts=())
    made = []
    for prompt in asked.prompts:
        for i in range(asked.n):
            own: dict[str, Any] = {"prompt": prompt}
            if i:
                sampling = asked.engine.sampling
                own["sampling"] = dataclasses.replace(sampling, seed=_counted_up(sampling.seed, i))
                own["id_slot"] = -1
            made.append(SubmittedRequest(**(shared | own), asked=settings))
    return made


def _constraint(asked: GenerationRequest, grammars: Grammars | None) -> Constraint | None:
    """What the engine holds the answers to."""
    limits = asked.limits
    if asked.grammar is None and limits.reasoning is None:
        return None
    if grammars is None:
        raise not_supported("This server's model does not generate")
    constraint: Constraint | None = None
    try:
        if asked.grammar is not None:
            try:
                constraint = grammars.compile(asked.grammar, triggers=limits.triggers if limits.lazy else ())
            except GrammarError as error:
                if not limits.optional:
                    raise
                log.warning("tools of request %s: their schemas are not enforced: %s", asked.id, error)
        if limits.reasoning is None:
            return constraint
        return grammars.with_reasoning(constraint, **dataclasses.asdict(limits.reasoning))
    except GrammarError as error:
        raise invalid(f"Field '{limits.field}': {error}" if limits.field else str(error)) from None


def _counted_up(seed: Seed | None, i: int) -> Seed | None:
    """The seed of a further answer; never -1 where the first is not."""
    if seed is None or seed == RANDOM_SEED:
        return seed
    if isinstance(seed, str):
        return f"{seed}+{i}"
    return seed + i if seed >= 0 else seed - i
