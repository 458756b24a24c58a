"""Convert a chat's conversation to its prompt, the constraint of its answer, and the parser of the answer."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from llamado.text.dialects.calls import Tools
from llamado.text.dialects.dialect import Content, ContinuedMessage, Conversation, PreparedChat, Reasoning
from llamado.text.dialects.families.generic import generic_grammar, read_generic, with_calls_as_text, with_tools_as_text
from llamado.text.dialects.family import Family, Message
from llamado.text.dialects.reading import Reader, Reading, ReadingParser, Tags
from llamado.text.dialects.registry import family_of
from llamado.text.dialects.thinking import ThinkingTags, find_thinking
from llamado.text.grammar.source import GrammarError, GrammarSource
from llamado.text.template.chat import ChatTemplate

_CHARACTERS = string.digits + string.ascii_letters
_random = random.SystemRandom()

_PLAIN = Family(name="Content-only", matches=lambda source: True)


def call_id() -> str:
    """Return an id for a call without one: 32 random letters and digits, like llama-server."""
    return "".join(_random.choices(_CHARACTERS, k=32))


@dataclass(frozen=True)
class _TemplateInfo:
    """The properties found of a template."""

    family: Family
    thinking: ThinkingTags | None


_infos: WeakKeyDictionary[ChatTemplate, _TemplateInfo] = WeakKeyDictionary()


def _template_info(template: ChatTemplate) -> _TemplateInfo:
    info = _infos.get(template)
    if info is None:
        family = family_of(template.source) or _PLAIN
        info = _infos[template] = _TemplateInfo(family, family.thinking or find_thinking(template))
    return info


def thinks(template: ChatTemplate) -> bool:
    """Return True if answers to a template's prompts may begin with thoughts."""
    return _template_info(template).thinking is not None


def prepare(template: ChatTemplate, conversation: Conversation, new_id: Callable[[], str] = call_id) -> PreparedChat:
    """Prepare a conversation for the engine; `new_id` creates ids of calls. Raises TemplateError."""
    info = _template_info(template)
    family, thinking = info.family, info.thinking
    wanted = conversation.tools and conversation.tool_choice != "none"
    tools = Tools.of(conversation.tools if wanted else (), conversation.strict_tools)
    generic = bool(tools.schemas) and family.calls is None
    required = conversation.tool_choice == "required" or conversation.tool_choice.startswith("function:")
    callable_tools = tools
    if conversation.tool_choice.startswith("function:"):
        callable_tools = tools.only(conversation.tool_choice.removeprefix("function:"))

    messages: Sequence[Message] = conversation.messages
    if family.calls is None:
        messages = with_calls_as_text(messages)
    if generic:
        messages = with_tools_as_text(messages, conversation.tools, required)
    if family.adjust is not None:
        messages = family.adjust(messages)
    prompt, opening = _render(
        template, messages, conversation, conversation.tools if wanted and not generic else (), thinking is not None
    )

    if (
        family.missing_opening is not None
        and conversation.add_generation_prompt
        and not opening
        and prompt.endswith(family.missing_opening[0])
    ):
        opening = family.missing_opening[1]
        prompt += opening

    before = ""
    if family.reads is not None:
        if family.starts_answer and family.starts_answer in opening:
            before = opening[opening.index(family.starts_answer) + len(family.starts_answer) :]
    elif thinking is not None and thinking.start and thinking.start in opening:
        before = opening[opening.rindex(thinking.start) :]
    thinking_open = thinking is not None and thinking.start.strip() in before and thinking.end not in before
    fresh = True
    given: tuple[Content | Reasoning, ...] = ()
    if conversation.continued is not None:
        given = _given(conversation, thinking)
        base = prompt[: len(prompt) - len(opening)]
        opening = _opened(opening, conversation.continued, thinking, family)
        prompt = base + opening
        fresh = conversation.continued.content is None
        before = family.before_answer if thinking is None or not fresh else thinking.start
        thinking_open = fresh and thinking is not None
    if tools.schemas and not callable_tools.schemas:
        raise GrammarError(f"tool_choice is {conversation.tool_choice!r}, but none of the tools has that name")
    if thinking is not None and family.calls is not None and family.calls_end_thoughts and tools.schemas:
        thinking = replace(thinking, also_ends=tuple(trigger.value for trigger in family.calls.triggers))
    parallel = conversation.parallel_tool_calls
    if parallel is None:
        # A model that was not trained with tools, or must call a given one, would never stop calling.
        named = conversation.tool_choice.startswith("function:")
        parallel = not (generic or named) and bool(tools.schemas and template.caps["supports_parallel_tool_calls"])
    grammar, lazy = _grammar(family, conversation, callable_tools, generic, required, parallel)
    parse = conversation.parse_tool_calls
    reads = partial(
        _read,
        family=family,
        thinking=thinking,
        tools=tools if parse else Tools({}),
        generic=generic and parse,
        format=conversation.reasoning_format,
        fresh=fresh,
    )
    preserved = [*family.preserved, *(family.content or ())]
    if thinking is not None:
        preserved += [thinking.start.strip(), thinking.end.strip()]
    if family.calls is not None and tools.schemas:
        preserved += family.calls.tags
    return PreparedChat(
        prompt=prompt,
        dialect=family.dialect,
        family="Generic" if generic else family.name,
        parser=lambda: ReadingParser(reads, new_id, before),
        generation_prompt=opening,
        given=given,
        grammar=grammar,
        triggers=family.calls.triggers if lazy and family.calls is not None else (),
        strict=not lazy or tools.strict,
        loosened=tools.loosened,
        stops=family.stops,
        preserved=tuple(dict.fromkeys(preserved)),
        thinking=(thinking.start.strip(), thinking.end.strip()) if thinking is not None else None,
        thinking_open=thinking_open,
    )


def _render(
    template: ChatTemplate,
    messages: Sequence[Message],
    conversation: Conversation,
    tools: Sequence[Mapping[str, Any]],
    thinks: bool,
) -> tuple[str, str]:
    """Return the prompt, and the end of it that opens the answer."""
    extra = {"enable_thinking": thinks, **conversation.template_options}
    if conversation.enable_thinking is not None:
        extra["enable_thinking"] = conversation.enable_thinking
    if not (conversation.add_generation_prompt or conversation.continued):
        return template.render(messages, tools=tools or None, add_generation_prompt=False, **extra), ""
    bare, prompt = template.render_both(messages, tools=tools or None, **extra)
    differ = (i for i, c in enumerate(prompt) if bare[i : i + 1] != c)
    return prompt, prompt[len(bare) if prompt.startswith(bare) else next(differ, len(prompt)) :]


def _opened(opening: str, continued: ContinuedMessage, thinking: ThinkingTags | None, family: Family) -> str:
    """Return the opening of an answer that has begun: its thoughts, and its content if it has any."""
    if thinking is not None:
        start = thinking.written[0]
        at = opening.find(thinking.start.strip())
        opening = (opening if at < 0 else opening[:at]) + start + continued.reasoning
        if continued.content is not None:
            opening += thinking.written[1]
    return opening if continued.content is None else opening + family.before_content + continued.content


def _given(conversation: Conversation, thinking: ThinkingTags | None) -> tuple[Content | Reasoning, ...]:
    continued, pieces = conversation.continued or ContinuedMessage(), list[Content | Reasoning]()
    if continued.reasoning and thinking is not None and conversation.reasoning_format != "none":
        behind = "" if continued.content is None else thinking.written[1].partition(thinking.end)[0]
        pieces.append(Reasoning(continued.reasoning + behind))
    if continued.content:
        pieces.append(Content(continued.content))
    return tuple(pieces)


def _grammar(
    family: Family, conversation: Conversation, tools: Tools, generic: bool, required: bool, parallel: bool
) -> tuple[GrammarSource | None, bool]:
    """Return the answer's grammar, and True if it is lazy."""
    schema = conversation.json_schema
    response = "" if schema is None else f"response: %json {json.dumps(schema)}\n"
    shown = "response"
    if family.content_prefix:
        shown = f"{family.content_prefix} response"
    elif family.content is not None:
        shown = f"{json.dumps(family.content[0])}? response {json.dumps(family.content[1])}?"
    if tools.schemas and generic:
        return generic_grammar(tools, parallel, required, schema), False
    if tools.schemas and family.calls is not None:
        calls = family.calls.grammar(tools, parallel)
        if required:
            return GrammarSource("lark", f"start: {family.calls_prefix} calls\n{calls}\n"), False
        if schema is not None:
            start = f"start: {family.calls_prefix} calls | {shown}\n"
            return GrammarSource("lark", f"{start}{response}{calls}\n"), False
        return GrammarSource("lark", f"start: calls\n{calls}\n"), True
    if schema is None:
        return conversation.grammar, False
    if shown == "response":
        return GrammarSource("json_schema", json.dumps(schema)), False
    return GrammarSource("lark", f"start: {shown}\n{response}"), False


def _read(
    reader: Reader,
    *,
    family: Family,
    thinking: ThinkingTags | None,
    tools: Tools,
    generic: bool,
    format: str,
    fresh: bool,
) -> Reading[None]:
    """Read a whole answer; `fresh`: from its beginning."""
    if family.reads is not None:
        yield from family.reads(reader, tools, format)
        return
    if thinking is not None and fresh:
        yield from reader.space()
        yield from thinking.read(reader, format)
    if generic:
        yield from read_generic(reader, tools)
    elif tools.schemas and family.calls is not None:
        yield from family.calls.read(reader, tools, family.content or ())
    elif family.content is not None:
        tags = Tags(*family.content)
        while (yield from reader.until(tags, reader.content)) is not None:
            pass
