"""The generation request: a body of any API, read and checked once, for the engine and for the format of the answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llamado.engine.parameters import BY_NAME
from llamado.engine.request import GenerationParams
from llamado.server.errors import invalid
from llamado.server.generate.constraints import OutputConstraints
from llamado.server.generate.prompts import prompt_text
from llamado.server.model import ModelOrigin, ServedModel
from llamado.server.switches import Switches
from llamado.text.dialects.answer import random_id

if TYPE_CHECKING:
    from llamado.media.chunks import MediaPrompt, MediaSpan
    from llamado.text.dialects.dialect import PreparedChat
    from llamado.text.grammar.source import GrammarSource

# Most probabilities of one answer: a vocabulary of 262,144 at four tokens, or 20 at 50,000. As JSON they are 100 MB.
MOST_PROBABILITIES = 1 << 20
# Tokens that an answer without a limit is expected to have.
LONG_ANSWER = 4096


def completion_id() -> str:
    """Return a new `chatcmpl-…` id, the form of the OpenAI endpoints and of Anthropic's."""
    return "chatcmpl-" + random_id()


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """A body, read and checked. Fields of bodies are named as in the table of parameters."""

    params: GenerationParams
    prompts: Sequence[list[int]] = ()
    spans: Sequence[tuple[MediaSpan, ...]] = ()
    """The pictures and sounds of each prompt."""
    texts: Sequence[str] = ()
    """The prompts as text, if the answer shows them."""
    n: int = 1
    """Answers per prompt."""
    constraints: OutputConstraints = field(default_factory=OutputConstraints)
    grammar: GrammarSource | None = None
    """The grammar to enforce: of `constraints`, or the server's default."""
    id: str = field(default_factory=completion_id)
    model: str = ""
    stream: bool = False
    include_usage: bool = False
    sse_ping_interval: int = 30
    response_fields: Sequence[str] = ()
    verbose: bool = False
    receipt: bool = False
    """The answer has a receipt."""
    origin: ModelOrigin | None = None
    """The files of the model, for the receipt."""
    echo: bool = False
    echoed: Sequence[str] = ()
    """The prompts as text, if answers begin with them (`echo` of `/v1/completions`)."""
    backend_sampling: bool = False
    banned: Sequence[int] = ()
    """End-of-generation tokens, if `ignore_eos` bans them."""
    # Only of chats:
    prepared: PreparedChat | None = None
    """The rendered conversation, and the parser of its answer."""
    reasoning_format: str = "none"
    client_stops: Sequence[str] = ()
    """The stop strings that the client sent, without those of the chat template."""
    control: bool = False
    """The client may end the reasoning (`reasoning_control`)."""

    @property
    def n_answers(self) -> int:
        return len(self.prompts) * self.n

    def prompt(self, index: int) -> list[int]:
        """Return the prompt of an answer by its index."""
        return self.prompts[index // self.n]

    def text(self, index: int) -> str:
        """Return the prompt of an answer as text, or "" if the answer does not show it."""
        return self.texts[index // self.n] if self.texts else ""


_OWN = frozenset(f.name for f in dataclasses.fields(GenerationRequest))


def make_request(
    given: Mapping[str, Any],
    prompts: Sequence[MediaPrompt],
    served: ServedModel,
    switches: Switches,
    *,
    constraints: OutputConstraints,
    show_prompts: bool = False,
    **more: Any,
) -> GenerationRequest:
    """Return the request for the parameters `given` in a body, with the server's defaults for the others.

    `more`: further fields of GenerationRequest. Raises ApiError and InvalidRequest.
    """
    own: dict[str, Any] = {"sse_ping_interval": switches.sse_ping_interval, "verbose": switches.verbose}
    own |= {name: value for name, value in given.items() if name in _OWN}
    fields = {name: value for name, value in given.items() if BY_NAME[name].of != "server"}
    params = served.defaults.params(preserved=constraints.preserved, **fields)
    n_predict = _bounded_n_predict(params, len(prompts) * own.get("n", 1), served.info.n_ctx)
    texts = [_text(prompt, served) for prompt in prompts] if show_prompts else []
    return GenerationRequest(
        params=dataclasses.replace(params, n_predict=n_predict),
        prompts=[prompt.tokens for prompt in prompts],
        spans=[prompt.spans for prompt in prompts],
        texts=texts,
        constraints=constraints,
        grammar=_enforced_grammar(constraints, switches.grammar),
        model=served.info.name,
        banned=sorted(served.tokenizer.eog) if given.get("ignore_eos") else (),
        **own,
        **more,
    )


def _text(prompt: MediaPrompt, served: ServedModel) -> str:
    if prompt.spans:
        return prompt_text(prompt, served.tokenizer, served.media_marker)
    return served.tokenizer.decode(prompt.tokens, special=True)


def _enforced_grammar(constraints: OutputConstraints, default: GrammarSource | None) -> GrammarSource | None:
    if constraints.lazy and not constraints.triggers:
        return None  # nothing could trigger it
    return default if constraints.source is None else constraints.source


def _bounded_n_predict(params: GenerationParams, n_answers: int, n_ctx: int) -> int:
    """Return `n_predict`; for an answer without a limit, so many tokens that it has at most MOST_PROBABILITIES.

    Raises ApiError for a request for more probabilities.
    """
    each = params.n_probs * n_answers
    if not each:
        return params.n_predict
    endless = not 0 <= params.n_predict < n_ctx
    most = MOST_PROBABILITIES // each
    n_tokens = min(n_ctx, LONG_ANSWER) if endless else params.n_predict
    if n_tokens > most:
        raise invalid(
            f"Field 'n_probs': {each} probabilities at each of {n_tokens} tokens; at most {MOST_PROBABILITIES} are "
            "allowed in one answer: ask for fewer (n_probs, top_logprobs), or for fewer tokens (n_predict, max_tokens)"
        )
    return most if endless and most < n_ctx else params.n_predict
