"""DeepSeek: R1 and V3 call with JSON in a code fence, V3.1 without one, V3.2 and V4 with tagged values ("DSML")."""

from __future__ import annotations

from llamado.text.dialects.calls import NamedCalls, TaggedCalls
from llamado.text.dialects.family import Family, all_of
from llamado.text.dialects.thinking import ThinkingTags

_SECTION = "<｜tool▁calls▁begin｜>"
_CALL = "<｜tool▁call▁begin｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_CALL_END = "<｜tool▁call▁end｜>"
_SECTION_END = "<｜tool▁calls▁end｜>"

R1 = Family(
    name="DeepSeek R1",
    matches=lambda source: _CALL in source and "```json" in source,
    calls=NamedCalls(
        start=_SECTION,
        each=_CALL,
        before_name="function" + _SEPARATOR,
        name_end="\n",
        also_name_ends=("```json",),
        fence=("```json", "```"),
        end=_CALL_END,
        section_end=_SECTION_END,
        also_starts=(_CALL,),
    ),
)

V31 = Family(
    name="DeepSeek V3.1",
    matches=all_of(_CALL),
    calls=NamedCalls(
        start=_SECTION,
        each=_CALL,
        name_end=_SEPARATOR,
        end=_CALL_END,
        section_end=_SECTION_END,
        also_starts=(_CALL,),
    ),
)


def _dsml(section: str) -> TaggedCalls:
    return TaggedCalls(
        start=f"<｜DSML｜{section}>",
        each="<｜DSML｜invoke",
        before_name='name="',
        name_end='">',
        argument='<｜DSML｜parameter name="',
        argument_name_end='" string="false">',
        string_name_end='" string="true">',
        value_end="</｜DSML｜parameter>",
        name_close="</｜DSML｜invoke>",
        section_end=f"</｜DSML｜{section}>",
        also_starts=(f"\n\n<｜DSML｜{section}>",),  # the empty line in front is not content
        trim=False,
    )


V32 = Family(
    name="DeepSeek V3.2",
    matches=lambda source: "dsml_token" in source and "DSML" in source and "function_calls" in source,
    calls=_dsml("function_calls"),
    thinking=ThinkingTags(
        "<think>", "</think>", 0, 0, also_ends=("\n\n<｜DSML｜function_calls>", "<｜DSML｜function_calls>")
    ),
    preserved=("｜DSML｜",),
)

V4 = Family(
    name="DeepSeek V4",
    matches=lambda source: "dsml_token" in source and "DSML" in source and "tool_calls" in source,
    calls=_dsml("tool_calls"),
    thinking=ThinkingTags("<think>", "</think>", 0, 0, also_ends=("\n\n<｜DSML｜tool_calls>", "<｜DSML｜tool_calls>")),
    preserved=("｜DSML｜",),
)
