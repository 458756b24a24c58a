"""GLM 4.5 and later, and models with the same calls: <tool_call>name<arg_key>…</arg_key><arg_value>…</arg_value>."""

from __future__ import annotations

from dataclasses import replace

from llamado.text.dialects.calls import TaggedCalls
from llamado.text.dialects.family import Family, all_of
from llamado.text.dialects.thinking import ThinkingTags

GLM = Family(
    name="GLM 4.5",
    matches=all_of("<tool_call>", "<arg_key>"),
    calls=TaggedCalls(
        start="<tool_call>",
        name_end="\n",
        argument="<arg_key>",
        argument_name_end="</arg_key>",
        value="<arg_value>",
        value_end="</arg_value>",
        end="</tool_call>",
        trim=False,
    ),
)

LING = replace(
    GLM,
    name="Ling 3",
    matches=all_of("<role>ASSISTANT</role>", "<arg_key>"),
    calls_end_thoughts=True,
    stops=("<|role_end|>",),
)

LAGUNA = replace(
    GLM,
    name="Laguna",
    matches=all_of("laguna_glm_thinking", "<arg_key>"),
    stops=("</assistant>",),  # sometimes spelled out instead of the token
)

_HY = ":opensource"  # ends every tag of the open Hunyuan 3

HUNYUAN = Family(
    name="Hunyuan 3",
    matches=all_of("toolcalls_begin_token", f"'{_HY}'"),
    calls=TaggedCalls(
        start=f"<tool_calls{_HY}>",
        each=f"<tool_call{_HY}>",
        name_end=f"<tool_sep{_HY}>",
        argument=f"<arg_key{_HY}>",
        argument_name_end=f"</arg_key{_HY}>",
        value=f"<arg_value{_HY}>",
        value_end=f"</arg_value{_HY}>",
        end=f"</tool_call{_HY}>",
        section_end=f"</tool_calls{_HY}>",
        trim=False,
    ),
    thinking=ThinkingTags(f"<think{_HY}>", f"</think{_HY}>", 1, 1),
)
