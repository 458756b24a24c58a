"""JSON inside an answer, read while it comes, and values written as bare text made into JSON."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from llamado.text.dialects.reading import Reader, Reading, Tags
from llamado.text.grammar.json_schema.references import anchors, follow

Show = Callable[[str], None]

MAX_KEY = 256
MAX_NUMBER = 512  # characters
MAX_DEPTH = 500
MAX_LITERAL = 1 << 16

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_NUMERIC = re.compile(r"[-+0-9.eE]*")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_HEX = re.compile(r"[0-9a-fA-F]{4}")
_SHORT_ESCAPES = frozenset('"\\/bfnrt')


def escaped(text: str) -> str:
    """`text` as it stands inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def read_string(reader: Reader, show: Show, limit: int | None = None) -> Reading[bool]:
    """Show a JSON string, quotes included; False where the text ends, or `limit` characters go by, without its end.

    Control characters, which models do write, are escaped, and so is a backslash that escapes nothing.
    """
    reader.at += 1
    show('"')
    shown = 0
    while limit is None or shown <= limit:
        c = yield from reader.char()
        if c == '"':
            reader.at += 1
            show('"')
            return True
        if c == "":
            return False
        match = _PLAIN.match(reader.text, reader.at)
        if match is not None:
            show(match[0])
            reader.at = match.end()
            shown += len(match[0])
        elif c != "\\":
            show(escaped(c))
            reader.at += 1
            shown += 1
        else:
            size = yield from _escape_size(reader)
            if not size:
                return False
            show(reader.text[reader.at : reader.at + size] if size > 1 else "\\\\")
            reader.at += size
            shown += size
    return False


def _escape_size(reader: Reader) -> Reading[int]:
    """Characters of the escape that a backslash begins: 1 where it escapes nothing, 0 where the text ends behind it."""
    if not (yield from _ahead(reader, 2)):
        return 0
    kind = reader.text[reader.at + 1]
    if kind != "u":
        return 2 if kind in _SHORT_ESCAPES else 1
    yield from _ahead(reader, 6)
    return 6 if _HEX.match(reader.text, reader.at + 2) else 1


def _ahead(reader: Reader, n: int) -> Reading[bool]:
    """Wait for `n` characters; False where the text ends before them."""
    while len(reader.text) - reader.at < n:
        if not (yield from reader.wait_for_more()):
            return False
    return True


def read_text(reader: Reader, limit: int = MAX_KEY) -> Reading[str | None]:
    """A JSON string's meaning; None where none comes next."""
    if (yield from reader.char()) != '"':
        return None
    parts: list[str] = []
    if not (yield from read_string(reader, parts.append, limit)):
        return None
    text = json.loads("".join(parts))
    return text if isinstance(text, str) else None


def read_value(reader: Reader, show: Show, limit: int | None = None) -> Reading[bool]:
    """Show one JSON value as it is written; False where it is malformed, or longer than about `limit` characters.

    What was shown by then was taken; what breaks the value was not.
    """
    return (yield from _Value(reader, show, limit).read())


class _Value:
    """A JSON value while it is read: the brackets that are open, and what may come next."""

    def __init__(self, reader: Reader, show: Show, limit: int | None) -> None:
        self._reader, self._show, self._limit = reader, show, limit
        self._stack: list[str] = []
        self._state = "value"  # or "first" (a value or the end), "key", "first key", "after"
        self._spent = 0

    def read(self) -> Reading[bool]:
        while self._state != "after" or self._stack:
            white = yield from self._reader.space()
            if white:
                self._count(white)
            if self._limit is not None and self._spent > self._limit:
                return False
            c = yield from self._reader.char()
            if not (yield from self._next(c)):
                return False
        return True

    def _count(self, text: str) -> None:
        self._spent += len(text)
        self._show(text)

    def _take(self, c: str, state: str) -> bool:
        """Show the next character; what may come behind it."""
        self._reader.at += 1
        self._count(c)
        self._state = state
        return True

    def _next(self, c: str) -> Reading[bool]:
        """Show what begins with the next character; False where it may not come here."""
        if self._state == "after":
            return self._after(c)
        if (self._state, c) in (("first", "]"), ("first key", "}")):
            self._stack.pop()
            return self._take(c, "after")
        if self._state in ("key", "first key"):
            return (yield from self._key(c))
        return (yield from self._value(c))

    def _after(self, c: str) -> bool:
        in_object = self._stack[-1] == "{"
        if c == ",":
            return self._take(c, "key" if in_object else "value")
        if c != ("}" if in_object else "]"):
            return False
        self._stack.pop()
        return self._take(c, "after")

    def _key(self, c: str) -> Reading[bool]:
        if c != '"' or not (yield from read_string(self._reader, self._count, self._limit)):
            return False
        white = yield from self._reader.space()
        if not (yield from self._reader.take(":")):
            return False
        self._count(white + ":")
        self._state = "value"
        return True

    def _value(self, c: str) -> Reading[bool]:
        if c == "{" or c == "[":
            if len(self._stack) >= MAX_DEPTH:
                return False
            self._stack.append(c)
            return self._take(c, "first key" if c == "{" else "first")
        self._state = "after"
        if c == '"':
            return (yield from read_string(self._reader, self._count, self._limit))
        if c == "-" or "0" <= c <= "9":
            plain = yield from _number(self._reader)
        elif c in ("t", "f", "n"):
            plain = yield from self._reader.take("true", "false", "null")
        else:
            return False
        if plain is None:
            return False
        self._count(plain)
        return True


def _number(reader: Reader) -> Reading[str | None]:
    while True:
        match = _NUMERIC.match(reader.text, reader.at, reader.at + MAX_NUMBER)
        assert match is not None
        if match.end() < len(reader.text) or not (yield from reader.wait_for_more()):
            break
    number = match[0]
    if _NUMBER.fullmatch(number) is None:
        return None
    reader.at = match.end()
    return number


# Values that stand in an answer as bare text, typed by a tool's schema

TYPES = frozenset(("string", "number", "integer", "boolean", "object", "array", "null"))
PYTHON = {"True": "true", "False": "false", "None": "null"}


def types(schema: Any, root: Any, depth: int = 0) -> frozenset[str]:
    """JSON types that a schema's instances may have; all where it says nothing that is understood here."""
    if not isinstance(schema, Mapping) or depth > 20:
        return TYPES
    found = TYPES
    given = schema.get("type")
    if isinstance(given, str):
        found &= {given}
    elif isinstance(given, list):
        found &= {name for name in given if isinstance(name, str)}
    if "const" in schema:
        found &= {_type(schema["const"])}
    if isinstance(schema.get("enum"), list):
        found &= {_type(value) for value in schema["enum"]}
    reference = schema.get("$ref")
    if isinstance(reference, str):
        found &= types(resolve(reference, root), root, depth + 1)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            found &= frozenset().union(*(types(one, root, depth + 1) for one in schema[key]))
    if isinstance(schema.get("allOf"), list):
        for one in schema["allOf"]:
            found &= types(one, root, depth + 1)
    if found != TYPES:
        return found
    if "properties" in schema:
        return frozenset(("object",))
    if "items" in schema:
        return frozenset(("array",))
    if "pattern" in schema or "minLength" in schema or "maxLength" in schema or "format" in schema:
        return frozenset(("string",))
    return TYPES


def _type(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    if value is None:
        return "null"
    return "array" if isinstance(value, list) else "object"


def resolve(reference: str, root: Any) -> Any:
    """Return the target of a reference in a tool's schema, or None if there is none."""
    if not reference.startswith("#"):
        return None
    if reference[1:2] not in ("", "/"):
        return anchors(root).get(reference[1:])
    try:
        return follow(reference, root)
    except LookupError:
        return None


def as_json(text: str, wanted: frozenset[str]) -> str:
    """Bare text as the JSON value that the types allow; a string where it is no such value."""
    bare = text.strip()
    bare = PYTHON.get(bare, bare)
    if wanted != {"string"}:
        try:
            value = json.loads(bare, parse_constant=_refuse)
        except (ValueError, RecursionError):
            if bare[:1] in ("{", "[") and wanted & {"object", "array"}:
                return _from_python(bare) or json.dumps(text, ensure_ascii=False)
        else:
            kind = _type(value)
            if kind in wanted or (kind in ("integer", "number") and wanted & {"number", "integer"}):
                return bare
    return json.dumps(text, ensure_ascii=False)


def _from_python(text: str) -> str | None:
    """JSON of a list or dictionary as Python writes it, which some templates show their models."""
    if len(text) > MAX_LITERAL or text.count("[") + text.count("{") > MAX_DEPTH // 5:
        return None
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def read_bare(reader: Reader, ends: Tags, wanted: frozenset[str], trim: bool, show: Show) -> Reading[str | None]:
    """Show a value written as bare text up to one of `ends`, as JSON; returns that end, None where the text ends first.

    Strings are shown as they come. `trim`: one line feed at either side of the value is formatting.
    """
    if trim:
        yield from reader.take("\n")
    if wanted != {"string"}:
        held: list[str] = []
        end = yield from reader.until(ends, held.append)
        text = "".join(held)
        if end is None:
            if text.strip():
                show(as_json(text, wanted))
            return None
        show(as_json(text.removesuffix("\n") if trim else text, wanted))
        return end
    show('"')
    kept = ""

    def string(text: str) -> None:
        nonlocal kept
        text = kept + text
        kept = ""
        if trim and text.endswith("\n"):
            text, kept = text[:-1], "\n"
        if text:
            show(escaped(text))

    end = yield from reader.until(ends, string)
    if end is None:
        if kept:
            show(escaped(kept))
        return None
    show('"')
    return end
