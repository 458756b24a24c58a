"""GLM 4.5 and later, and all who call in their way: <tool_call>name<arg_key>…</arg_key><arg_value>…</arg_value>."""

from __future__ import annotations

from llamado.text.dialects.calls import TaggedCalls
from llamado.text.dialects.family import Family, all_of

GLM = Family(
    name="GLM 4.5",
    knows=all_of("<tool_call>", "<arg_key>"),
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
