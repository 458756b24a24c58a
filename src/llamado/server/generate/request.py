"""What a body asks for, by whichever API it came: read once, and all that the way to the answer and its form need."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llamado.engine.parameters import BY_NAME
from llamado.engine.request import Request
from llamado.server.errors import invalid
from llamado.server.generate.constraints import Limits
from llamado.server.model import ModelOrigin, Served
from llamado.server.switches import Switches
from llamado.text.dialects.answer import random_id

if TYPE_CHECKING:
    from llamado.text.dialects.dialect import PreparedChat
    from llamado.text.grammar.source import GrammarSource

# Probabilities of one answer: all of a vocabulary of 262,144 at four tokens, or 20 at 50,000. As JSON they are 100 MB.
MOST_PROBABILITIES = 1 << 20
# Tokens that an answer without a limit is thought to have at least.
LONG_ANSWER = 4096


def completion_id() -> str:
    """A fresh `chatcmpl-…` id; the OpenAI endpoints and Anthropic's use this form."""
    return "chatcmpl-" + random_id()


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """A body, read and checked; the fields that bodies have are named as in the table of parameters."""

    engine: Request
    """What the engine is given for each answer, but for the prompt, what limits tokens, and further answers' seeds."""
    prompts: Sequence[list[int]] = ()
    texts: Sequence[str] = ()
    """The prompts as text, where the answer shows them."""
    n: int = 1
    """Answers per prompt."""
    limits: Limits = field(default_factory=Limits)
    grammar: GrammarSource | None = None
    """The grammar in force: that of `limits`, or the server's."""
    id: str = field(default_factory=completion_id)
    model: str = ""
    stream: bool = False
    include_usage: bool = False
    sse_ping_interval: int = 30
    response_fields: Sequence[str] = ()
    verbose: bool = False
    receipt: bool = False
    """Whether the answer says what it was made with."""
    origin: ModelOrigin | None = None
    """What the model was loaded from, where the answer says so."""
    echo: bool = False
    echoed: Sequence[str] = ()
    """The prompts as text, where answers begin with them (`echo` of `/v1/completions`)."""
    backend_sampling: bool = False
    banned: Sequence[int] = ()
    """Tokens that cannot come because the answer shall not end by itself."""
    # of chats
    prepared: PreparedChat | None = None
    """The conversation as a prompt, and how the answer to it is read."""
    reasoning_format: str = "none"
    client_stops: Sequence[str] = ()
    """The stops that the client named, beside those of the model's family."""
    control: bool = False
    """Whether the client may end the thoughts."""

    @property
    def n_answers(self) -> int:
        return len(self.prompts) * self.n

    def prompt(self, index: int) -> list[int]:
        """The prompt of an answer by the answer's number."""
        return self.prompts[index // self.n]

    def text(self, index: int) -> str:
        """That prompt as text, "" where the answer does not show it."""
        return self.texts[index // self.n] if self.texts else ""


_OWN = frozenset(f.name for f in dataclasses.fields(GenerationRequest))


def make_request(
    given: Mapping[str, Any],
    prompts: Sequence[list[int]],
    served: Served,
    switches: Switches,
    *,
    limits: Limits,
    show_prompts: bool = False,
    **more: Any,
) -> GenerationRequest:
    """Of the parameters that a body gives, its prompts and what limits its tokens; the server's words elsewhere.

    `more`: further fields of GenerationRequest. Raises ApiError and InvalidRequest.
    """
    own: dict[str, Any] = {"sse_ping_interval": switches.sse_ping_interval, "verbose": switches.verbose}
    own |= {name: value for name, value in given.items() if name in _OWN}
    fields = {name: value for name, value in given.items() if BY_NAME[name].of != "server"}
    # The engine takes no prompt without tokens, but such a one is answered, too.
    engine = served.defaults.request([0], preserved=limits.preserved, **fields)
    engine.n_predict = _bounded(engine, len(prompts) * own.get("n", 1), served.info.n_ctx)
    texts = [served.tokenizer.decode(prompt, special=True) for prompt in prompts] if show_prompts else []
    return GenerationRequest(
        engine=engine,
        prompts=prompts,
        texts=texts,
        limits=limits,
        grammar=_in_force(limits, switches.grammar),
        model=served.info.name,
        banned=sorted(served.tokenizer.eog) if given.get("ignore_eos") else (),
        **own,
        **more,
    )


def _in_force(limits: Limits, usual: GrammarSource | None) -> GrammarSource | None:
    if limits.lazy and not limits.triggers:
        return None  # it would never begin
    return usual if limits.source is None else limits.source


def _bounded(engine: Request, n_answers: int, n_ctx: int) -> int:
    """`n_predict`, made smaller where an answer without an end would hold more probabilities than one may.

    Raises ApiError where what is asked for is more than that.
    """
    each = engine.n_probs * n_answers
    if not each:
        return engine.n_predict
    endless = not 0 <= engine.n_predict < n_ctx
    most = MOST_PROBABILITIES // each
    n_tokens = min(n_ctx, LONG_ANSWER) if endless else engine.n_predict
    if n_tokens > most:
        raise invalid(
            f"Field 'n_probs': {each} probabilities at each of {n_tokens} tokens; at most {MOST_PROBABILITIES} are "
            "allowed in one answer: ask for fewer (n_probs, top_logprobs), or for fewer tokens (n_predict, max_tokens)"
        )
    return most if endless and most < n_ctx else engine.n_predict
