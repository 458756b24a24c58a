"""Bodies with a `prompt`, as `/completion`, `/infill` and OpenAI's completions take them → GenerationRequest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llamado.server.errors import invalid
from llamado.server.generate.constraints import read_limits
from llamado.server.generate.fields import read_fields
from llamado.server.generate.prompts import prompts_in_context
from llamado.server.generate.request import GenerationRequest, make_request
from llamado.server.loaded_model import Served
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
    return make_request(
        fields,
        prompts,
        served,
        switches,
        limits=read_limits(body, served.tokenizer),
        show_prompts=native or fields.get("verbose", switches.verbose),
    )
