"""Families that differ from the common formats only in their tags."""

from __future__ import annotations

from llamado.text.dialects.calls import JsonCalls, NamedCalls, TaggedCalls
from llamado.text.dialects.family import Family, all_of, any_of

KIMI = Family(
    name="Kimi K2",
    matches=all_of("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    calls=NamedCalls(
        start="<|tool_calls_section_begin|>",
        each="<|tool_call_begin|>",
        name_end="<|tool_call_argument_begin|>",
        name_pattern=r"functions\.(?P<name>.+):[0-9]+",
        written_id=":[0-9]{1,4}",
        end="<|tool_call_end|>",
        section_end="<|tool_calls_section_end|>",
        also_starts=("<|tool_call_begin|>",),
    ),
    calls_end_thoughts=True,
)

SOLAR = Family(
    name="Solar Open",
    matches=all_of("<|tool_call:name|>", "<|tool_call:args|>"),
    calls=NamedCalls(
        start="<|tool_calls|>",
        each="<|tool_call:begin|>",
        id_first="<|tool_call:name|>",
        written_id="[a-z0-9]{10}",
        name_end="<|tool_call:args|>",
        end="<|tool_call:end|>",
        section_end="<|calls|>",
        also_starts=("<|tool_call:begin|>",),
    ),
)

MINIMAX_M2 = Family(
    name="MiniMax M2",
    matches=all_of("minimax:tool_call", "<invoke name="),
    calls=TaggedCalls(
        start="<minimax:tool_call>",
        each="<invoke",
        before_name='name="',
        name_end='">',
        argument='<parameter name="',
        argument_name_end='">',
        value_end="</parameter>",
        name_close="</invoke>",
        section_end="</minimax:tool_call>",
        trim=False,
    ),
)

MINICPM = Family(
    name="MiniCPM5",
    matches=all_of('<function name="', '<param name="'),
    calls=TaggedCalls(
        start="<function",
        before_name='name="',
        name_end='">',
        argument='<param name="',
        argument_name_end='">',
        value_end="</param>",
        name_close="</function>",
        quote=("<![CDATA[", "]]>"),
        trim=False,
    ),
)

MINIMAX_M1 = Family(
    name="MiniMax M1",
    matches=all_of("<tool_calls>", "</tool_calls>"),
    calls=JsonCalls(start="<tool_calls>", end="</tool_calls>", several=True),
)

APRIEL = Family(
    name="Apriel",
    matches=all_of("<tool_calls>["),
    calls=JsonCalls(start="<tool_calls>", end="</tool_calls>", array=True, id=("id",), late_id=False),
)

NEMOTRON = Family(
    name="Nemotron Nano v2",
    matches=all_of("<TOOLCALL>"),
    calls=JsonCalls(start="<TOOLCALL>", end="</TOOLCALL>", array=True),
)

GRANITE = Family(
    name="Granite",
    matches=all_of("<|tool_call|>"),
    calls=JsonCalls(start="<|tool_call|>", array=True),
)

APERTUS = Family(
    name="Apertus",
    matches=all_of("<|tools_prefix|>"),
    calls=JsonCalls(start="<|tools_prefix|>", end="<|tools_suffix|>", array=True, name_is_key=True),
)

FIREFUNCTION = Family(
    name="FireFunction v2",
    matches=all_of("functools["),
    calls=JsonCalls(start=" functools", also_starts=("functools",), array=True),
)

GIGACHAT = Family(
    name="GigaChat",
    matches=lambda source: "<|role_sep|>" in source and "<|message_sep|>" in source,
    calls=JsonCalls(start="<|message_sep|>\n\nfunction call<|role_sep|>", also_starts=("<|function_call|>",)),
)

COMMAND_R = Family(
    name="Command R7B",
    matches=any_of("<|START_ACTION|>"),
    calls=JsonCalls(
        start="<|START_ACTION|>",
        end="<|END_ACTION|>",
        array=True,
        name=("tool_name", "name"),
        arguments=("parameters", "arguments"),
        id=("tool_call_id",),
        written_id='"[0-9]{1,4}"',
    ),
    content=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
)

COHERE_MOE = Family(
    name="Cohere2 MoE",
    matches=all_of("<|START_TEXT|>", "<|START_ACTION|>"),
    calls=COMMAND_R.calls,
    content=("<|START_TEXT|>", "<|END_TEXT|>"),
)

COMMAND_R_PLUS = Family(
    name="Command R+",
    matches=all_of("<|CHATBOT_TOKEN|>", '"tool_name"'),
    calls=JsonCalls(
        start="Action: ```json",
        end="```",
        also_starts=("Action:\n```json", "Action:```json"),
        array=True,
        name=("tool_name", "name"),
        arguments=("parameters", "arguments"),
    ),
)
