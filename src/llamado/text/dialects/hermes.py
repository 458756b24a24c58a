"""Hermes 2 and 3, Qwen 2.5 and 3, and all who call like them: <tool_call>{"name": …, "arguments": {…}}</tool_call>."""

from __future__ import annotations

from llamado.text.dialects.calls import JsonCalls, TaggedCalls
from llamado.text.dialects.family import Family, all_of

HERMES = Family(
    name="Hermes 2 Pro",
    knows=all_of("<tool_call>"),
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
    also_starts=("<function=",),  # the models leave the tag in front out now and then
)

QWEN_CODER = Family(
    name="Qwen3 Coder",
    knows=all_of("<tool_call>", "<function=", "<parameter="),
    calls=_CODER,
    calls_end_thoughts=True,
)

SEED = Family(
    name="Seed-OSS",
    knows=all_of("seed:tool_call", "<function="),
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
