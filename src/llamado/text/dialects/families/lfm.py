"""LFM2: calls in Python syntax, <|tool_call_start|>[name(key="value")]<|tool_call_end|>."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llamado.text.dialects.calls import (
    Outcome,
    Tools,
    alternatives,
    member_body,
    members_in_order,
    quoted,
    read_after_space,
    read_gap,
    required_names,
)
from llamado.text.dialects.family import Family, Message
from llamado.text.dialects.reading import Reader, Reading, Tags
from llamado.text.dialects.values import MAX_DEPTH, MAX_KEY, PYTHON, Show, escaped, read_string, read_value
from llamado.text.grammar.source import Trigger

_START = "<|tool_call_start|>"
_END = "<|tool_call_end|>"
_PLAIN = re.compile(r"[^'\\]+")
_OPEN = Tags("(")
_EQUALS = Tags("=", ")")


@dataclass(frozen=True)
class PythonCalls:
    """A Python list of calls with keyword arguments."""

    triggers: tuple[Trigger, ...] = (Trigger("word", _START),)
    tags: tuple[str, ...] = (_START, _END)

    def read(self, reader: Reader, tools: Tools, drop: Sequence[str] = ()) -> Reading[None]:
        starts = Tags(_START)
        while True:
            tag = yield from reader.until(starts, reader.content)
            if tag is None:
                return
            outcome = yield from self._section(reader, tools)
            if outcome is Outcome.NONE:
                reader.content(tag)
            elif outcome is Outcome.BROKEN:
                return
            else:
                yield from read_gap(reader, _START)

    def _section(self, reader: Reader, tools: Tools) -> Reading[Outcome]:
        before = "["
        while True:
            outcome = yield from _read_call(reader, tools, before)
            if outcome is not Outcome.CALL:
                if outcome is Outcome.NONE and before == ",":
                    break
                return outcome
            before = ","
        yield from read_after_space(reader, "]")
        yield from read_after_space(reader, _END)
        return Outcome.CALL

    def grammar(self, tools: Tools, parallel: bool) -> str:
        rules = []
        for i, (name, schema) in enumerate(tools.schemas.items()):
            given = schema.get("properties")
            properties = given if isinstance(given, Mapping) else {}
            for k, key in enumerate(properties):
                rules.append(f"value_{i}_{k}: {member_body(schema, key)}")
            members = {key: f"{quoted(key + '=')} value_{i}_{k}" for k, key in enumerate(properties)}
            rules += members_in_order(f"call_{i}", members, required_names(schema), '"," " "?')
            rules.append(f'call_{i}: {quoted(name)} "(" call_{i}_first ")"')
        one = "one: " + alternatives([f"call_{i}" for i in range(len(tools.schemas))])
        more = '("," " "? one)*' if parallel else ""
        return "\n".join((f'calls: {quoted(_START)} "[" one {more} "]" {quoted(_END)}', one, *rules))


def _read_call(reader: Reader, tools: Tools, before: str) -> Reading[Outcome]:
    reader.mark()
    yield from reader.space()
    found = None
    if (yield from reader.take(before)):
        yield from reader.space()
        found = yield from reader.word(_OPEN, tools.longest + 8)
    name = found[0].strip() if found is not None else ""
    if name not in tools.schemas:
        reader.reject()
        return Outcome.NONE
    reader.accept()
    reader.call(name)
    reader.arguments("{")
    n = 0
    while True:
        reader.mark()
        yield from reader.space()
        if (yield from reader.take(")")):
            reader.accept()
            break
        if n:
            yield from reader.take(",")
            yield from reader.space()
        key = yield from reader.word(_EQUALS, MAX_KEY)
        if key is None or key[1] == ")":
            reader.reject()
            reader.arguments("}")
            return Outcome.BROKEN
        reader.accept()
        reader.arguments(("," if n else "") + json.dumps(key[0].strip(), ensure_ascii=False) + ":")
        if not (yield from _read_python(reader, reader.arguments, 0)):
            return Outcome.BROKEN
        n += 1
    reader.arguments("}")
    return Outcome.CALL


def _read_python(reader: Reader, show: Show, depth: int) -> Reading[bool]:
    """Emit a Python literal as JSON; return False if it is malformed."""
    yield from reader.space()
    c = yield from reader.char()
    if c == "'":
        return (yield from _read_quoted(reader, show))
    if c == '"':
        return (yield from read_string(reader, show))
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
    while True:
        yield from reader.space()
        if (yield from reader.take(close)):
            show(close)
            return True
        if c == "{":
            quote = yield from reader.char()
            if quote not in ("'", '"') or not (yield from _read_python(reader, show, depth + 1)):
                return False
            yield from reader.space()
            if not (yield from reader.take(":")):
                return False
            show(":")
        if not (yield from _read_python(reader, show, depth + 1)):
            return False
        yield from reader.space()
        if (yield from reader.peek(",", close)) == ",":
            reader.at += 1
            yield from reader.space()
            if not (yield from reader.peek(close)):
                show(",")
        elif not (yield from reader.peek(close)):
            return False


def _read_quoted(reader: Reader, show: Show) -> Reading[bool]:
    """Emit a string between apostrophes as a JSON string."""
    reader.at += 1
    show('"')
    while True:
        c = yield from reader.char()
        if c == "":
            return False
        match = _PLAIN.match(reader.text, reader.at)
        if match is not None:
            show(escaped(match[0]))
            reader.at = match.end()
        elif c == "'":
            reader.at += 1
            show('"')
            return True
        else:
            while len(reader.text) - reader.at < 2:
                if not (yield from reader.wait_for_more()):
                    return False
            kind = reader.text[reader.at + 1]
            show(
                {"n": "\\n", "t": "\\t", "r": "\\r", "\\": "\\\\"}.get(kind, escaped(kind) if kind in "'\"" else "\\\\")
            )
            reader.at += 2 if kind in "ntr\\'\"" else 1


def _thoughts(messages: Sequence[Message]) -> list[Message]:
    """Rename thoughts for the template."""
    return [
        {**message, "thinking": message["reasoning_content"]} if message.get("reasoning_content") else message
        for message in messages
    ]


LFM = Family(
    name="LFM2",
    matches=lambda source: (
        "<|tool_list_start|>" in source or "List of tools: [" in source or "<|tool_call_start|>" in source
    ),
    calls=PythonCalls(),
    adjust=_thoughts,
)
