"""Hermes 2 and 3, Qwen 2.5 and 3, and models with the same calls: <tool_call>{"name": …, "arguments":
{…}}</tool_call>.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llamado.text.dialects.calls import JsonCalls, TaggedCalls
from llamado.text.dialects.family import Family, Message, all_of

HERMES = Family(
    name="Hermes 2 Pro",
    matches=lambda source: "<tool_call>" in source and "]<]minimax[>[" not in source,
    calls=JsonCalls(start="<tool_call>", end="</tool_call>"),
)

_CODER = TaggedCalls(
    start="<tool_call>",
    before_name="<function=",
    name_end=">",
    argument="<parameter=",
    argument_name_end=">",
    value_end="</parameter>",
    name_close="</function>",
    end="</tool_call>",
    also_starts=("<function=",),  # the models sometimes omit the tag in front
)

QWEN_CODER = Family(
    name="Qwen3 Coder",
    matches=all_of("<tool_call>", "<function=", "<parameter="),
    calls=_CODER,
    calls_end_thoughts=True,
)


def _trimmed(messages: Sequence[Message]) -> list[Message]:
    """Strip whitespace around texts, which causes endless thoughts in these models."""
    out: list[Message] = []
    for message in messages:
        texts = {key: message[key].strip() for key in ("content", "reasoning_content") if _is_text(message.get(key))}
        parts = message.get("content")
        if isinstance(parts, Sequence) and not isinstance(parts, str):
            texts["content"] = [
                {**part, "text": part["text"].strip()} if _is_text(part.get("text")) else part for part in parts
            ]
        out.append({**message, **texts})
    return out


def _is_text(value: object) -> bool:
    return isinstance(value, str)


_STEP = "You have access to the following functions in JSONSchema format"

STEP = replace(QWEN_CODER, name="Step 3.5", matches=lambda s: QWEN_CODER.matches(s) and _STEP in s, adjust=_trimmed)

SEED = Family(
    name="Seed-OSS",
    matches=all_of("seed:tool_call", "<function="),
    calls=TaggedCalls(
        start="<seed:tool_call>",
        before_name="<function=",
        name_end=">",
        argument="<parameter=",
        argument_name_end=">",
        value_end="</parameter>",
        name_close="</function>",
        end="</seed:tool_call>",
        trim=False,
    ),
)
