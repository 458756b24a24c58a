"""Mistral: Nemo calls with [TOOL_CALLS][{…}], later models with [TOOL_CALLS]name[ARGS]{…}; Magistral thinks in
[THINK].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llamado.text.dialects.calls import JsonCalls, NamedCalls
from llamado.text.dialects.family import Family, Message, all_of
from llamado.text.dialects.thinking import ThinkingTags

_ID = "[a-zA-Z0-9]{9}"

NEMO = Family(
    name="Mistral Nemo",
    matches=all_of("[TOOL_CALLS]"),
    calls=JsonCalls(
        start="[TOOL_CALLS]",
        array=True,
        arguments=("arguments", "parameters"),
        id=("id",),
        late_id=True,
        written_id=f'"{_ID}"',
    ),
)

SMALL = Family(
    name="Mistral Small 3.2",
    matches=all_of("[TOOL_CALLS]", "[ARGS]"),
    calls=NamedCalls(
        start="[TOOL_CALLS]",
        name_end="[ARGS]",
        id_tag="[CALL_ID]",
        written_id=_ID,
        also_name_ends=("{",),
    ),
)


def _blocks(messages: Sequence[Message]) -> list[Message]:
    """Return content as parts, with thoughts as a separate part."""
    out: list[Message] = []
    for message in messages:
        if message.get("role") not in ("system", "assistant"):
            out.append(message)
            continue
        parts: list[Any] = []
        if isinstance(message.get("reasoning_content"), str):
            parts.append({"type": "thinking", "thinking": message["reasoning_content"]})
        content = message.get("content") or ""
        if isinstance(content, str):
            parts.append({"type": "text", "text": content})
        elif isinstance(content, Sequence):
            parts += content
        out.append({**{k: v for k, v in message.items() if k != "reasoning_content"}, "content": parts})
    return out


MINISTRAL = Family(
    name="Ministral 3",
    matches=lambda source: (
        all(tag in source for tag in ("[SYSTEM_PROMPT]", "[TOOL_CALLS]", "[ARGS]")) and "[CALL_ID]" not in source
    ),
    calls=NamedCalls(start="[TOOL_CALLS]", name_end="[ARGS]", also_name_ends=("{",)),
    thinking=ThinkingTags("[THINK]", "[/THINK]", after_start=0, after_end=64),
    adjust=_blocks,
)
