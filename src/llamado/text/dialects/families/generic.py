"""Models whose templates do not support tools: the tools are described in text, and a grammar enforces JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llamado.text.dialects.calls import JsonCalls, Outcome, Tools, read_after_space, read_object
from llamado.text.dialects.family import Message
from llamado.text.dialects.reading import Reader, Reading
from llamado.text.dialects.values import read_string, read_text, read_value
from llamado.text.grammar.source import GrammarSource

_CALL = JsonCalls(start="", id=("id",))
_KEYS = ("tool_call", "tool_calls", "response")


def with_tools_as_text(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], required: bool
) -> list[Message]:
    """Return the messages with the tools described in the system message."""
    lines = [json.dumps(tool, ensure_ascii=False) for tool in tools]
    answer = 'Answer with one JSON object: {"tool_call": {"name": ..., "arguments": {...}}} uses a tool' + (
        "." if required else ', {"response": ...} answers the user.'
    )
    text = "These tools can be used:\n" + "\n".join(lines) + "\n\n" + answer
    first, rest = (messages[0], messages[1:]) if messages and messages[0].get("role") == "system" else (None, messages)
    if first is not None:
        content = first.get("content")
        parts = content if isinstance(content, Sequence) and not isinstance(content, str) else None
        if parts is not None:
            return [{**first, "content": [*parts, {"type": "text", "text": text}]}, *rest]
        text = f"{content}\n\n{text}" if content else text
    return [{"role": "system", "content": text}, *rest]


def with_calls_as_text(messages: Sequence[Message]) -> list[Message]:
    """Return earlier calls and results as text, for templates that drop them."""
    out: list[Message] = []
    for message in messages:
        calls = message.get("tool_calls")
        if message.get("role") == "assistant" and calls:
            shown = []
            for call in calls:
                function = call.get("function") or {}
                arguments = function.get("arguments")
                if isinstance(arguments, str):
                    try:
                        arguments = json.loads(arguments)
                    except ValueError:
                        pass
                shown.append({"name": function.get("name"), "arguments": arguments})
            text = json.dumps({"tool_calls": shown} if len(shown) > 1 else {"tool_call": shown[0]}, ensure_ascii=False)
            content = message.get("content")
            kept = {key: value for key, value in message.items() if key != "tool_calls"}
            out.append({**kept, "content": f"{content}\n{text}" if isinstance(content, str) and content else text})
        elif message.get("role") == "tool":
            name = message.get("name")
            result = {"tool_response": {**({"tool": name} if name else {}), "content": message.get("content")}}
            out.append({"role": "user", "content": json.dumps(result, ensure_ascii=False)})
        else:
            out.append(message)
    return out


def generic_grammar(tools: Tools, parallel: bool, required: bool, response: Any) -> GrammarSource:
    """Return a grammar of JSON: a call, several if `parallel`, or, unless `required`, a response.

    Each tool's schema is a separate document, which its references point into.
    """
    calls = _CALL.grammar(tools, False).split("\n", 1)[1]
    form = '"\\"tool_calls\\"" COLON "[" SPACE one (SPACE "," SPACE one)* SPACE "]"' if parallel else ""
    forms = [form or '"\\"tool_call\\"" COLON one']
    rules = [calls, "COLON: /[ \\t\\n]{0,8}:[ \\t\\n]{0,8}/"]
    if not required:
        forms.append('"\\"response\\"" COLON response')
        rules.append("response: %json " + json.dumps({"type": "string"} if response is None else response))
    whole = " | ".join(f"({form})" for form in forms)
    return GrammarSource("lark", "\n".join((f'start: "{{" SPACE ({whole}) SPACE "}}"', *rules)) + "\n")


def read_generic(reader: Reader, tools: Tools) -> Reading[None]:
    """Read the object; anything else is content."""
    reader.mark()
    yield from reader.space()
    key = None
    if (yield from reader.take("{")):
        yield from reader.space()
        key = yield from read_text(reader, 16)
        yield from reader.space()
        if not (yield from reader.take(":")):
            key = None
        yield from reader.space()
    if key not in _KEYS:
        reader.reject()
        return
    head = reader.read()
    reader.accept()
    if key == "response":
        if (yield from reader.char()) == '"':
            yield from read_string(reader, _ContentWriter(reader).show)
        else:
            yield from read_value(reader, reader.content)
    else:
        before = ""
        if key == "tool_calls":
            before = "["
        n = 0
        while True:
            outcome = yield from read_object(reader, tools, _CALL, before)
            if outcome is Outcome.NONE and n == 0:
                reader.content(head)
                return
            if outcome is not Outcome.CALL or key == "tool_call":
                break
            before = ","
            n += 1
        if outcome is Outcome.BROKEN:
            return
        yield from read_after_space(reader, "]")
    yield from read_after_space(reader, "}")
    reader.mark()
    yield from reader.space()
    if (yield from reader.at_end()):
        reader.accept()
    else:
        reader.reject()


class _ContentWriter:
    """Emits the value of a JSON string as content; takes it in the pieces that `read_string` emits, with whole
    escapes.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._high = ""  # the first half of a surrogate pair that is escaped in two

    def show(self, text: str) -> None:
        if text == '"':
            return
        if not text.startswith("\\"):
            if self._high:
                self._reader.content("�")
                self._high = ""
            self._reader.content(text)
            return
        meant = json.loads(f'"{self._high}{text}"')
        if len(meant) == 1 and "\ud800" <= meant <= "\udbff":
            self._high = text
            return
        self._high = ""
        self._reader.content("".join("�" if "\ud800" <= c <= "\udfff" else c for c in meant))
