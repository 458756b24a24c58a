"""Llama 3.x: an answer is one bare object {"name": …, "parameters": {…}}, or follows <|python_tag|>."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from llamado.text.dialects.calls import JsonCalls, Outcome, Tools, read_object
from llamado.text.dialects.family import Family
from llamado.text.dialects.reading import Reader, Reading, Tags
from llamado.text.dialects.values import read_text
from llamado.text.grammar.source import Trigger

_TAG = "<|python_tag|>"
_OBJECTS = JsonCalls(start="", several=True, arguments=("parameters", "arguments"))
_KEYS = ("name", "parameters", "arguments", "function", "type", "id")
_BUILT_IN = re.compile(r"(?P<name>\w+)\.call\((?P<key>\w+)=")


@dataclass(frozen=True)
class LlamaCalls:
    """Objects at the beginning of an answer, one after the other; in older models also built-in tools after the tag."""

    triggers: tuple[Trigger, ...] = (
        Trigger("word", _TAG),
        Trigger("pattern", r'^\s*(\{\s*"(?:name|type|function)"\s*:)'),
    )
    tags: tuple[str, ...] = (_TAG,)

    def read(self, reader: Reader, tools: Tools, drop: Sequence[str] = ()) -> Reading[None]:
        white = yield from reader.space()
        tag = yield from reader.take(_TAG)
        outcome = Outcome.NONE
        if tag or (yield from _sees_call(reader)):
            outcome = yield from read_object(reader, tools, _OBJECTS)
        if outcome is Outcome.NONE and tag:
            outcome = yield from _read_built_in(reader, tools)
        if outcome is Outcome.NONE:
            reader.content(white + (tag or ""))
            yield from self._read_later(reader, tools)
        else:
            yield from self._read_more(reader, tools, outcome)

    def _read_more(self, reader: Reader, tools: Tools, outcome: Outcome) -> Reading[None]:
        while outcome is Outcome.CALL:
            reader.mark()
            yield from reader.space()
            if (yield from reader.at_end()):
                reader.accept()
                return
            yield from reader.take(";", ",", _TAG)
            yield from reader.space()
            if not (yield from reader.peek("{")):
                reader.reject()
                return
            between = reader.read()
            reader.accept()
            outcome = yield from read_object(reader, tools, _OBJECTS)
            if outcome is Outcome.NONE:
                reader.content(between)

    def _read_later(self, reader: Reader, tools: Tools) -> Reading[None]:
        """Read content that ends with a tagged call."""
        while True:
            tag = yield from reader.until(Tags(_TAG), reader.content)
            if tag is None:
                return
            outcome = yield from read_object(reader, tools, _OBJECTS)
            if outcome is Outcome.NONE:
                outcome = yield from _read_built_in(reader, tools)
            if outcome is Outcome.NONE:
                reader.content(tag)
                continue
            yield from self._read_more(reader, tools, outcome)
            return

    def grammar(self, tools: Tools, parallel: bool) -> str:
        rules = _OBJECTS.grammar(tools, False).split("\n", 1)[1]
        more = "(/[;\\n ]{1,3}/ one)*" if parallel else ""
        return f'calls: "{_TAG}"? SPACE one {more}\n{rules}'


def _sees_call(reader: Reader) -> Reading[bool]:
    """Return True if the next object begins like a call; any other object is content and emitted as it arrives."""
    reader.mark()
    key = None
    if (yield from reader.take("{")):
        yield from reader.space()
        key = yield from read_text(reader, 16)
    reader.reject()
    return key in _KEYS


def _read_built_in(reader: Reader, tools: Tools) -> Reading[Outcome]:
    """Read `brave_search.call(query="…")`, Llama 3.1's calls of the tools it was trained with."""
    reader.mark()
    yield from reader.space()
    head = yield from reader.word(Tags("="), tools.longest + 64)
    match = _BUILT_IN.fullmatch(head[0] + "=") if head is not None else None
    value = (yield from read_text(reader, 4096)) if match is not None else None
    if match is None or match["name"] not in tools.schemas or value is None or not (yield from reader.take(")")):
        reader.reject()
        return Outcome.NONE
    reader.accept()
    reader.call(match["name"])
    reader.arguments(_json({match["key"]: value}))
    return Outcome.CALL


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _matches(source: str) -> bool:
    return _TAG in source or ("<|start_header_id|>" in source and '"parameters"' in source)


LLAMA = Family(name="Llama 3.x", matches=_matches, calls=LlamaCalls())
