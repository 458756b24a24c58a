"""A chat's conversation → its prompt, the limits on its answer, and how the answer is read."""

from __future__ import annotations

import os
import random
import string
from collections.abc import Callable
from functools import partial

from llamado.text.chat import ChatTemplate
from llamado.text.dialects.dialect import ChatRequest, Prepared
from llamado.text.dialects.reading import Reader, Reading, ReadingParser
from llamado.text.dialects.thinking import find_thinking

_CHARACTERS = string.digits + string.ascii_letters
_random = random.SystemRandom()


def call_id() -> str:
    """An id for a call whose model gives none: 32 random letters and digits, as llama-server's."""
    return "".join(_random.choices(_CHARACTERS, k=32))


def prepare(template: ChatTemplate, request: ChatRequest, new_id: Callable[[], str] = call_id) -> Prepared:
    """Make a conversation ready for the engine; `new_id` names calls. Raises TemplateError."""
    thinking = find_thinking(template)
    extra = dict(request.template_options)
    if request.enable_thinking is not None:
        extra["enable_thinking"] = request.enable_thinking
    render = partial(template.render, request.messages, tools=request.tools or None, **extra)
    bare = render(add_generation_prompt=False)
    prompt, opening = bare, ""
    if request.add_generation_prompt:
        prompt = render(add_generation_prompt=True)
        opening = prompt[len(os.path.commonprefix([bare, prompt])) :]
    before = ""
    if thinking and thinking.start in opening:
        before = opening[opening.index(thinking.start) :]

    def read(reader: Reader) -> Reading[None]:
        if thinking:
            yield from reader.space()
            yield from thinking.read(reader, request.reasoning_format)

    return Prepared(
        prompt=prompt + request.prefill,
        dialect="peg-native",
        parser=lambda: ReadingParser(read, new_id, before),
        generation_prompt=opening,
        thinking=(thinking.start, thinking.end) if thinking else None,
        thinking_open=bool(before) and thinking is not None and thinking.end not in before,
    )
