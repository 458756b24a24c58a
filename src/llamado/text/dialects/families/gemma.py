"""Gemma 4: <|tool_call>call:name{key:value}<tool_call|>, strings between <|"|>, thoughts in a channel."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llamado.text.dialects.calls import (
    Outcome,
    Tools,
    alternatives,
    members_in_order,
    quoted,
    read_after_space,
    read_gap,
    required_names,
)
from llamado.text.dialects.family import Family, Message
from llamado.text.dialects.reading import Reader, Reading, Tags
from llamado.text.dialects.thinking import ThinkingTags
from llamado.text.dialects.values import MAX_DEPTH, MAX_KEY, PYTHON, Show, escaped, read_value, types
from llamado.text.grammar.source import Trigger

_CALL = "<|tool_call>"
_CALL_END = "<tool_call|>"
_RESPONSE = "<|tool_response>"  # the model writes this where it expects the result
_QUOTE = '<|"|>'
_THOUGHT = "<|channel>"
_THOUGHT_END = "<channel|>"
_KEY = Tags(":")
_STRING = Tags(_QUOTE)
_NAME = Tags("{")


@dataclass(frozen=True)
class GemmaCalls:
    """Calls in Gemma's own notation of values."""

    triggers: tuple[Trigger, ...] = (Trigger("word", _CALL),)
    tags: tuple[str, ...] = (_CALL, _CALL_END, _THOUGHT, _THOUGHT_END, _QUOTE)

    def read(self, reader: Reader, tools: Tools, drop: Sequence[str] = ()) -> Reading[None]:
        yield from read_gemma(reader, tools, "auto")

    def grammar(self, tools: Tools, parallel: bool) -> str:
        rules = []
        for i, (name, schema) in enumerate(tools.schemas.items()):
            rules += _object(f"object_{i}", schema, schema, 0)
            rules.append(f"call_{i}: {quoted(name)} object_{i}")
        call = f'{quoted(_CALL)} "call:" one {quoted(_CALL_END)}'
        one = "one: " + alternatives([f"call_{i}" for i in range(len(tools.schemas))])
        return "\n".join((f"calls: {call}" + (f" ({call})*" if parallel else ""), one, *rules, *_ANY))


_ANY = (
    "any: any_object | any_array | any_string | any_number | any_word",
    'any_object: "{" (any_member ("," any_member)*)? "}"',
    'any_member: /[^:{},<"]+/ ":" any',
    'any_array: "[" (any ("," any)*)? "]"',
    # The quote is one token in some vocabularies and several letters in others; a text ends with either.
    f"any_string: {quoted(_QUOTE)} (letters | TEXT {quoted(_QUOTE)})",
    "letters[suffix=QUOTE]: /(?s:.*)/",
    f"QUOTE: {quoted(_QUOTE)}",
    r'TEXT: /(?s:.*)/ & ~/(?s:.*)<\|"\|>(?s:.*)/',
    r"any_number: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?/",
    'any_word: "true" | "false" | "null"',
)


def _object(rule: str, schema: Any, root: Mapping[str, Any], depth: int) -> list[str]:
    """Return rules for an object's notation: members in order, required ones mandatory, the others optional."""
    given = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(given, Mapping) or not given:
        return [f"{rule}: " + ('"{" "}"' if depth == 0 else "any_object")]
    rules: list[str] = []
    for k, name in enumerate(given):
        rules += _value(f"{rule}_{k}", given[name], root, depth + 1)
    members = {name: f"{quoted(name + ':')} {rule}_{k}" for k, name in enumerate(given)}
    rules += members_in_order(rule, members, required_names(schema), '","')
    return [f'{rule}: "{{" {rule}_first "}}"', *rules]


def _value(rule: str, schema: Any, root: Mapping[str, Any], depth: int) -> list[str]:
    kinds = types(schema, root)
    choices = schema.get("enum") if isinstance(schema, Mapping) else None
    if isinstance(choices, list) and choices and all(isinstance(c, (str, int, float)) or c is None for c in choices):
        texts = [_QUOTE + c + _QUOTE if isinstance(c, str) else json.dumps(c) for c in choices]
        return [f"{rule}: " + " | ".join(quoted(text) for text in texts)]
    if kinds == {"object"} and depth < 6:
        return _object(rule, schema, root, depth)
    if kinds == {"array"} and depth < 6:
        items = schema.get("items") if isinstance(schema, Mapping) else None
        return [f'{rule}: "[" ({rule}_item ("," {rule}_item)*)? "]"', *_value(f"{rule}_item", items, root, depth + 1)]
    ways = {
        "string": "any_string",
        "number": "any_number",
        "integer": "/-?(0|[1-9][0-9]*)/",
        "boolean": '"true" | "false"',
        "null": '"null"',
        "object": "any_object",
        "array": "any_array",
    }
    return [f"{rule}: " + " | ".join(way for kind, way in ways.items() if kind in kinds)]


def read_gemma(reader: Reader, tools: Tools, format: str) -> Reading[None]:
    """Read content with thoughts and calls in any order to the end."""
    stops = Tags(_CALL, _RESPONSE, _THOUGHT, _THOUGHT_END) if tools.schemas else Tags(_THOUGHT, _THOUGHT_END)
    while True:
        tag = yield from reader.until(stops, reader.content)
        if tag is None:
            return
        if tag == _THOUGHT:
            yield from _read_thought(reader, format)
        elif tag == _CALL:
            outcome = yield from _read_call(reader, tools)
            if outcome is Outcome.NONE:
                reader.content(tag)
            elif outcome is Outcome.BROKEN:
                return
            else:
                yield from read_gap(reader, _CALL)


def _read_thought(reader: Reader, format: str) -> Reading[None]:
    if not (yield from reader.take("thought")):
        return  # a channel without a name
    white = yield from reader.space(1)
    if format in ("none", "deepseek-legacy"):
        reader.content(_THOUGHT + "thought" + white)

    def show(text: str) -> None:
        if format in ("none", "deepseek-legacy"):
            reader.content(text)
        if format != "none":
            reader.reasoning(text)

    end = yield from reader.until(Tags(_THOUGHT_END), show)
    if format in ("none", "deepseek-legacy"):
        reader.content(end or "")


def _read_call(reader: Reader, tools: Tools) -> Reading[Outcome]:
    reader.mark()
    yield from reader.take("call:")
    found = yield from reader.word(_NAME, tools.longest + 8)
    if found is None or found[0].strip() not in tools.schemas:
        reader.reject()
        return Outcome.NONE
    reader.accept()
    reader.at -= 1
    reader.call(found[0].strip())
    if not (yield from _read_value(reader, reader.arguments, 0)):
        return Outcome.BROKEN
    yield from read_after_space(reader, _CALL_END)
    return Outcome.CALL


def _read_value(reader: Reader, show: Show, depth: int) -> Reading[bool]:
    """Emit one value of Gemma's notation as JSON; return False if it is malformed."""
    yield from reader.space()
    if (yield from reader.take(_QUOTE)):
        show('"')
        end = yield from reader.until(_STRING, lambda text: show(escaped(text)))
        if end is None:
            return False
        show('"')
        return True
    c = yield from reader.char()
    if c in ("T", "F", "N"):
        word = yield from reader.take(*PYTHON)
        show(PYTHON[word] if word else "")
        return word is not None
    if c not in ("{", "["):
        return (yield from read_value(reader, show)) if c else False
    if depth >= MAX_DEPTH // 5:
        return False
    close = "}" if c == "{" else "]"
    reader.at += 1
    show(c)
    yield from reader.space()
    if (yield from reader.take(close)):
        show(close)
        return True
    while True:
        if c == "{":
            key = yield from reader.word(_KEY, MAX_KEY)
            if key is None:
                return False
            name = key[0].strip().removeprefix(_QUOTE).removesuffix(_QUOTE).strip('"')
            show(json.dumps(name, ensure_ascii=False) + ":")
        if not (yield from _read_value(reader, show, depth + 1)):
            return False
        yield from reader.space()
        if (yield from reader.take(close)):
            show(close)
            return True
        if not (yield from reader.take(",")):
            return False
        show(",")
        yield from reader.space()


def _with_responses(messages: Sequence[Message]) -> list[Message]:
    """Move results of calls, and the answer that follows them, into the turn that called: older templates need it."""
    out: list[Message] = []
    pending = list(reversed(messages))
    while pending:
        message = pending.pop()
        calls = message.get("tool_calls")
        if message.get("role") != "assistant" or not calls:
            out.append(message)
            continue
        turn: dict[str, Any] = {"role": "assistant", "tool_calls": calls}
        if message.get("reasoning_content"):
            turn["reasoning_content"] = message["reasoning_content"]
        responses: list[Any] = []
        while pending and pending[-1].get("role") == "tool":
            result = pending.pop()
            response = result.get("content")
            if isinstance(response, str):
                try:
                    response = json.loads(response)
                except ValueError:
                    pass
            function = calls[len(responses)].get("function", {}) if len(responses) < len(calls) else {}
            responses.append({"name": function.get("name") or result.get("tool_call_id", ""), "response": response})
        if responses:
            turn["tool_responses"] = responses
        last = pending[-1] if pending else {}
        if last.get("role") == "assistant" and last.get("content") and not last.get("tool_calls"):
            turn["content"] = pending.pop()["content"]
        out.append(turn)
    return out


_SIGN = "'<|tool_call>call:'"

GEMMA = Family(
    name="Gemma 4",
    matches=lambda source: _SIGN in source,
    calls=GemmaCalls(),
    thinking=ThinkingTags("<|channel>thought\n", "<channel|>", 0, 0),
    reads=read_gemma,
    missing_opening=("<turn|>\n", "<|turn>model\n"),
    dialect="peg-gemma4",
    preserved=(*GemmaCalls.tags, "<|turn>"),
)

OLD_GEMMA = replace(
    GEMMA,
    matches=lambda source: _SIGN in source and "{#- OpenAI Chat Completions:" not in source,
    adjust=_with_responses,
)
