"""Bodies with a `prompt`, as of `/completion`, `/infill` and OpenAI's completions, read into a GenerationRequest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from llamado.media.chunks import MediaPrompt
from llamado.server.errors import invalid
from llamado.server.generate.constraints import read_constraints
from llamado.server.generate.fields import read_fields
from llamado.server.generate.prompts import prompt_text, prompts_in_context
from llamado.server.generate.request import MOST_PROBABILITIES, GenerationRequest, make_request
from llamado.server.model import ServedModel
from llamado.server.switches import Switches


def read_completion(
    body: Mapping[str, Any],
    served: ServedModel,
    switches: Switches,
    *,
    native: bool,
    prompt: Callable[[], list[int]] | None = None,
) -> GenerationRequest:
    """Check a body and tokenize its prompt.

    `native`: the answer shows the prompt. `prompt`: returns the prompt's tokens, for bodies without a field for it.
    Raises LlamadoError.
    """
    if prompt is None:
        if "prompt" not in body:
            raise invalid("key 'prompt' not found")
        given = body["prompt"]
    else:
        given = prompt()
    prompts = prompts_in_context(given, served, most=switches.max_prompts)
    fields = read_fields(body, served.tokenizer, served.n_slots)
    request = make_request(
        fields,
        prompts,
        served,
        switches,
        constraints=read_constraints(body, served.tokenizer),
        show_prompts=native or fields.get("verbose", switches.verbose),
        echoed=_prompt_texts(given, prompts, served) if fields.get("echo") and not native else (),
    )
    return _with_prompt_probs(request) if request.echoed and request.params.n_probs else request


def _prompt_texts(given: Any, prompts: Sequence[MediaPrompt], served: ServedModel) -> list[str]:
    """Return the prompts as text: as the client sent them, or decoded if it sent tokens."""
    texts = [given] if isinstance(given, str) else given
    if isinstance(texts, list) and len(texts) == len(prompts) and all(isinstance(text, str) for text in texts):
        return texts
    return [prompt_text(prompt, served.tokenizer, served.media_marker) for prompt in prompts]


def _with_prompt_probs(request: GenerationRequest) -> GenerationRequest:
    """Request probabilities of the prompts' tokens. Raises ApiError for more than MOST_PROBABILITIES."""
    if any(request.spans):
        raise invalid("Field 'logprobs': prompts with pictures or sounds have no probabilities: leave out 'echo'")
    n = request.params.n_probs * request.n * sum(map(len, request.prompts))
    if n > MOST_PROBABILITIES:
        raise invalid(f"Field 'logprobs': {n} probabilities of prompts; at most {MOST_PROBABILITIES} are allowed")
    return replace(request, params=replace(request.params, prompt_probs=True, cache_prompt=False))
