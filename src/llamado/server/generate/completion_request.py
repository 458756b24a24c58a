"""Bodies with a `prompt`, as `/completion`, `/infill` and OpenAI's completions take them → GenerationRequest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llamado.server.errors import invalid
from llamado.server.generate.constraints import read_limits
from llamado.server.generate.fields import read_fields
from llamado.server.generate.prompts import prompts_in_context
from llamado.server.generate.request import MOST_PROBABILITIES, GenerationRequest, make_request
from llamado.server.model import Served
from llamado.server.switches import Switches


def read_completion(
    body: Mapping[str, Any],
    served: Served,
    switches: Switches,
    *,
    native: bool,
    prompt: Callable[[], list[int]] | None = None,
) -> GenerationRequest:
    """Read a body; `native`: the answer shows the prompt. `prompt` makes it where it is not the body's.

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
    asked = make_request(
        fields,
        prompts,
        served,
        switches,
        limits=read_limits(body, served.tokenizer),
        show_prompts=native or fields.get("verbose", switches.verbose),
        echoed=_echoed(given, prompts, served) if fields.get("echo") and not native else (),
    )
    if asked.echoed and asked.engine.n_probs:
        _show_prompt_probs(asked)
    return asked


def _echoed(given: Any, prompts: list[list[int]], served: Served) -> list[str]:
    """The prompts' texts: as they came, or their tokens'."""
    texts = [given] if isinstance(given, str) else given
    if isinstance(texts, list) and len(texts) == len(prompts) and all(isinstance(text, str) for text in texts):
        return texts
    return [served.tokenizer.decode(prompt, special=True) for prompt in prompts]


def _show_prompt_probs(asked: GenerationRequest) -> None:
    """Have the prompts' tokens shown with their probabilities. Raises ApiError for too many of them."""
    n = asked.engine.n_probs * asked.n * sum(map(len, asked.prompts))
    if n > MOST_PROBABILITIES:
        raise invalid(f"Field 'logprobs': {n} probabilities of prompts; at most {MOST_PROBABILITIES} are allowed")
    asked.engine.prompt_probs, asked.engine.cache_prompt = True, False
