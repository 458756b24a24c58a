"""Common formats of tool calls: JSON objects, a name before JSON, a name before tagged values.

Each format is described by its tags. Both the reader and the grammar of calls are derived from that description.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from llamado.text.dialects.bare_text import choices, spelled, text_expression
from llamado.text.dialects.dialect import StrictTools
from llamado.text.dialects.reading import Reader, Reading, Tags, TextCut
from llamado.text.dialects.values import MAX_KEY, Show, read_bare, read_string, read_text, read_value, types
from llamado.text.grammar.json_schema.loosen import check_enforced, loosened
from llamado.text.grammar.source import GrammarError, Trigger

MAX_HEAD = 1024
"""Most characters of a call before its name is certain."""

NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True)
class Tools:
    """The tools of a request: the schema of the parameters of each by its name."""

    schemas: Mapping[str, Mapping[str, Any]]
    strict: bool = False
    """True if the schema of any tool must be enforced."""
    loosened: tuple[str, ...] = ()
    """The parts of the schemas that are not enforced: each tool's name, the location and the keyword."""

    @classmethod
    def of(cls, tools: Sequence[Mapping[str, Any]], strict: StrictTools | None = None) -> Tools:
        """Build from OpenAI's list; relax schemas that cannot be enforced.

        `strict`: the tools that are refused instead (see Conversation); None: those with `strict` set. Raises
        GrammarError.
        """
        schemas: dict[str, Mapping[str, Any]] = {}
        loosened_parts: list[str] = []
        any_strict = False
        for tool in tools:
            function = tool.get("function")
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                parameters = function.get("parameters") or NO_ARGUMENTS
                if not isinstance(parameters, Mapping):
                    raise GrammarError(
                        f"the parameters of the tool {function['name'][:100]!r} must be a JSON schema of an object, "
                        f"not {json.dumps(parameters)[:50]}"
                    )
                name = function["name"]
                if function.get("strict") is True if strict is None else name in strict:
                    parameters = (strict or {}).get(name) or parameters
                    check_enforced(parameters, name)
                    any_strict = True
                else:
                    parameters, parts = loosened(parameters, name)
                    loosened_parts += [f"{name} {part}" for part in parts]
                schemas[name] = parameters
        return cls(schemas, any_strict, tuple(loosened_parts))

    def only(self, name: str) -> Tools:
        return Tools({name: self.schemas[name]} if name in self.schemas else {})

    @property
    def longest(self) -> int:
        """Characters of the longest name."""
        return max(map(len, self.schemas), default=0)


class Outcome(Enum):
    """Result of reading a call."""

    NONE = 0
    """Not a call; nothing was taken or emitted."""
    CALL = 1
    BROKEN = 2
    """A call began and was malformed; the remaining text is content."""


class Calls(Protocol):
    """The format in which a family writes calls."""

    @property
    def triggers(self) -> tuple[Trigger, ...]:
        """The texts that begin a call in the middle of an answer."""
        ...

    @property
    def tags(self) -> tuple[str, ...]:
        """The texts that may be special tokens."""
        ...

    def read(self, reader: Reader, tools: Tools, drop: Sequence[str] = ()) -> Reading[None]:
        """Read content and calls to the end; `drop`: tags around content that are not part of it."""
        ...

    def grammar(self, tools: Tools, parallel: bool) -> str:
        """Return Lark rules of one or more calls; the first is `calls`."""
        ...


def quoted(text: str) -> str:
    """Return a Lark expression for a text; "" for an empty one."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def sequence(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def alternatives(names: Sequence[str]) -> str:
    return " | ".join(names)


def members_in_order(rule: str, members: Mapping[str, str], required: Set[str], separator: str) -> list[str]:
    """Return rules for members in their order: those of `required` are mandatory, the others optional.

    `members`: Lark for each member by its name; `separator`: Lark for the text between two. `{rule}_first` matches all
    of them, `{rule}_after_K` the members that may follow the first K.
    """
    rules = []
    names = list(members)
    for k in range(len(names) + 1):
        first, later = [], []
        for j, name in enumerate(names[k:], k):
            member = f"{members[name]} {rule}_after_{j + 1}"
            first.append(member)
            later.append(f"{separator} {member}")
            if name in required:
                break
        else:
            first.append('""')
            later.append('""')
        if k == 0:
            rules.append(f"{rule}_first: " + " | ".join(first))
        rules.append(f"{rule}_after_{k}: " + " | ".join(later))
    return rules


SPACE = r"SPACE: /[ \t\n]{0,8}/"


def required_names(schema: Mapping[str, Any]) -> set[str]:
    """Return the members that an object must have."""
    wanted = schema.get("required")
    return {name for name in wanted if isinstance(name, str)} if isinstance(wanted, list) else set()


def schema_body(schema: Mapping[str, Any]) -> str:
    """Return a rule for arguments that match the schema."""
    if schema.get("type") is None and "properties" in schema:
        schema = {"type": "object", **schema}
    return "%json " + json.dumps(schema, ensure_ascii=False)


def member_body(schema: Mapping[str, Any], name: str) -> str:
    """Return a rule for a single argument; its references point into the tool's whole schema."""
    member = schema["properties"][name]
    if not _has_references(member):
        return schema_body(member if isinstance(member, Mapping) else {})
    place = name.replace("~", "~0").replace("/", "~1").replace("%", "%25")
    whole = _moved(schema, "#/$defs/tool")
    return schema_body({"$ref": f"#/$defs/tool/properties/{place}", "$defs": {"tool": whole}})


_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


def _has_references(node: Any) -> bool:
    if isinstance(node, Mapping):
        return not node.keys().isdisjoint(_REFERENCES) or any(map(_has_references, node.values()))
    return isinstance(node, list) and any(map(_has_references, node))


def _moved(node: Any, place: str) -> Any:
    """Return a schema with references adjusted for its new location `place` in another one."""
    if isinstance(node, list):
        return [_moved(one, place) for one in node]
    if not isinstance(node, Mapping):
        return node
    out = {key: value if key in ("const", "enum", "default") else _moved(value, place) for key, value in node.items()}
    for key in _REFERENCES:
        value = node.get(key)
        if isinstance(value, str) and (value == "#" or value.startswith("#/")):
            out[key] = place + value[1:]
    return out


def word_triggers(*tags: str) -> tuple[Trigger, ...]:
    return tuple(Trigger("word", tag) for tag in dict.fromkeys(tag.strip() for tag in tags))


def read_gap(reader: Reader, *next_tags: str) -> Reading[None]:
    """Take whitespace after a call if the text ends or another call follows."""
    reader.mark()
    yield from reader.space()
    if (yield from reader.at_end()) or (yield from reader.peek(*next_tags)):
        reader.accept()
    else:
        reader.reject()


def read_after_space(reader: Reader, *literals: str) -> Reading[bool]:
    """Take whitespace and one of the literals, or nothing."""
    if not any(literals):
        return False
    reader.mark()
    yield from reader.space()
    if (yield from reader.take(*literals)) is not None:
        reader.accept()
        return True
    reader.reject()
    return False


@dataclass(frozen=True, kw_only=True)
class JsonCalls:
    """Calls that are JSON objects with a name and arguments, each between tags, or several in an array between tags."""

    start: str
    """Before a call or an array of calls."""
    end: str = ""
    also_starts: tuple[str, ...] = ()
    array: bool = False
    several: bool = False
    """True if several objects may follow each other between one `start` and `end` without an array."""
    name: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")
    id: tuple[str, ...] = ()
    late_id: bool = False
    """True if the id follows the arguments, which then have to wait for it."""
    name_is_key: bool = False
    """True if an object is {name: arguments}."""
    written_id: str = ""
    """A regular expression of the ids in the grammar."""

    @property
    def triggers(self) -> tuple[Trigger, ...]:
        return word_triggers(self.start, *self.also_starts)

    @property
    def tags(self) -> tuple[str, ...]:
        return tuple(tag for tag in (self.start, self.end, *self.also_starts) if tag)

    def read(self, reader: Reader, tools: Tools, drop: Sequence[str] = ()) -> Reading[None]:
        starts = Tags(self.start, *self.also_starts)
        stops = Tags(*starts.tags, *drop)
        while True:
            tag = yield from reader.until(stops, reader.content)
            if tag is None:
                return
            if tag in drop:
                continue
            outcome = yield from self.section(reader, tools)
            if outcome is Outcome.NONE:
                reader.content(tag)
            elif outcome is Outcome.BROKEN:
                return
            else:
                yield from read_gap(reader, *starts.tags)

    def section(self, reader: Reader, tools: Tools) -> Reading[Outcome]:
        """Read the text after `start`."""
        opening = "[" if self.array else ""
        first = True
        while True:
            outcome = yield from read_object(reader, tools, self, opening if first else "," if self.array else "")
            if outcome is Outcome.BROKEN or (first and outcome is Outcome.NONE):
                return outcome
            if outcome is Outcome.NONE or not (self.array or self.several):
                break
            first = False
        if self.array:
            yield from read_after_space(reader, "]")
        yield from read_after_space(reader, self.end)
        return Outcome.CALL

    def grammar(self, tools: Tools, parallel: bool) -> str:
        rules = []
        for i, (name, schema) in enumerate(tools.schemas.items()):
            rules.append(f"arguments_{i}: {schema_body(schema)}")
            key = quoted(json.dumps(name, ensure_ascii=False))
            if self.name_is_key:
                rules.append(f'call_{i}: "{{" SPACE {key} SPACE ":" SPACE arguments_{i} SPACE "}}"')
                continue
            named = sequence(quoted(f'"{self.name[0]}"'), 'SPACE ":" SPACE', key)
            filled = sequence(quoted(f'"{self.arguments[0]}"'), f'SPACE ":" SPACE arguments_{i}')
            members = [named, filled]
            if self.written_id:
                member = sequence(quoted(f'"{self.id[0]}"'), 'SPACE ":" SPACE', f"/{self.written_id}/")
                members.insert(len(members) if self.late_id else 0, member)
            rules.append(f'call_{i}: "{{" SPACE ' + ' SPACE "," SPACE '.join(members) + ' SPACE "}"')
        one = "one: " + alternatives([f"call_{i}" for i in range(len(tools.schemas))])
        start, end = quoted(self.start.strip()), quoted(self.end.strip())
        if self.array:
            more = '(SPACE "," SPACE one)*' if parallel else ""
            calls = sequence(start, 'SPACE "[" SPACE one', more, 'SPACE "]"', end and f"SPACE {end}")
        elif self.several:
            more = "(SPACE one)*" if parallel else ""
            calls = sequence(start, "SPACE one", more, end and f"SPACE {end}")
        else:
            section = sequence(start, "SPACE one", end and f"SPACE {end}")
            calls = sequence(section, f"(SPACE {section})*" if parallel else "")
        return "\n".join((f"calls: {calls}", one, *rules, SPACE))


def read_object(reader: Reader, tools: Tools, shape: JsonCalls, before: str = "") -> Reading[Outcome]:
    """Read a call written as an object, after the text `before` and whitespace."""
    return (yield from _ObjectCall(reader, tools, shape).read(before))


class _ObjectCall:
    """Reads one call written as an object. The name and id are emitted as soon as they are known; arguments wait for
    them.
    """

    def __init__(self, reader: Reader, tools: Tools, shape: JsonCalls) -> None:
        self._reader, self._tools, self._shape = reader, tools, shape
        self._name: str | None = None
        self._id: str | None = None
        self._depth = 1  # 2 in an inner "function"; 0 after the object
        self._started = False
        self._raw = ""  # text that was accepted and not emitted: up to the end of `_held`
        self._held: list[str] | None = None  # arguments that wait for the name or the id

    def read(self, before: str) -> Reading[Outcome]:
        reader = self._reader
        reader.mark()
        yield from reader.space()
        if before:
            if not (yield from reader.take(before)):
                return self._fail()
            yield from reader.space()
        if not (yield from reader.take("{")):
            return self._fail()
        while self._depth:
            yield from reader.space()
            if (yield from reader.take("}")):
                self._depth -= 1
            elif not (yield from reader.take(",")) and not (yield from self._member()):
                return self._fail()
        if self._name is None:
            return self._fail()
        reader.accept()
        if not self._started:
            reader.call(self._name, self._id)
            reader.arguments("".join(self._held) if self._held else "{}")
        return Outcome.CALL

    def _fail(self) -> Outcome:
        self._reader.reject()
        if self._started:
            return Outcome.BROKEN
        self._reader.content(self._raw)
        return Outcome.BROKEN if self._raw else Outcome.NONE

    def _member(self) -> Reading[bool]:
        """Read a key and its value; False if a call has no such member."""
        reader, shape = self._reader, self._shape
        if len(reader.read()) > MAX_HEAD:
            return False
        key = yield from read_text(reader)
        if key is None:
            return False
        yield from reader.space()
        if not (yield from reader.take(":")):
            return False
        yield from reader.space()
        c = yield from reader.char()
        if shape.name_is_key and self._name is None and key in self._tools.schemas:
            self._name, key = key, shape.arguments[0]
        if key == "function" and c == "{" and not shape.name_is_key:
            reader.at += 1
            self._depth += 1
            return True
        if key in shape.name and self._name is None and c == '"':
            self._name = yield from read_text(reader, self._tools.longest * 6)
            return self._name in self._tools.schemas
        if key in shape.id and self._id is None:
            parts: list[str] = []
            good = yield from read_value(reader, parts.append, MAX_KEY)
            self._id = "".join(parts).strip('"')
            return good
        if key in shape.arguments and not self._started and self._held is None:
            return (yield from self._arguments())
        return (yield from read_value(reader, _discard, MAX_HEAD))

    def _arguments(self) -> Reading[bool]:
        """Emit the arguments as they arrive, or hold them back until the call's name and id are known."""
        reader = self._reader
        if self._name is not None and (self._id is not None or not self._shape.late_id):
            reader.accept()
            reader.call(self._name, self._id)
            self._started = True
            good = yield from _read_arguments(reader, reader.arguments)
            reader.mark()
            return good
        self._raw = reader.read()
        reader.accept()
        self._held = []
        try:
            good = yield from _read_arguments(reader, self._held.append)
        except TextCut:
            if self._name is not None:
                reader.call(self._name, self._id)
                reader.arguments("".join(self._held))
            raise
        reader.mark()
        self._raw += "".join(self._held)
        if good:
            return True
        if self._name is None or not (yield from reader.at_end()):
            return False
        self._depth = 0  # cut off, but it was a call
        return True


def _read_arguments(reader: Reader, show: Show) -> Reading[bool]:
    """Emit an object of arguments; one that is encoded as a string is decoded."""
    if (yield from reader.char()) != '"':
        return (yield from read_value(reader, show))
    parts: list[str] = []
    good = yield from read_string(reader, parts.append)
    text = "".join(parts)
    if good:
        inner = json.loads(text)
        try:
            if isinstance(json.loads(inner), dict):
                text = inner
        except (ValueError, RecursionError):
            pass
    show(text)
    return good


def _discard(text: str) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class NamedCalls:
    """Calls that are a name between tags, followed by a JSON object."""

    start: str
    """Before the first call: a section's tag or the call's own."""
    each: str = ""
    """Before each call of a section; "": same as `start`."""
    before_name: str = ""
    name_end: str
    also_name_ends: tuple[str, ...] = ()
    id_tag: str = ""
    """After the name, before an id that `name_end` ends."""
    id_first: str = ""
    """Between an id and the name."""
    name_pattern: str = ""
    """The text in place of the name: a regular expression with the group `name`; its whole match is the id."""
    written_id: str = ""
    """A regular expression of the ids in the grammar; with `name_pattern`: of the text after the name."""
    fence: tuple[str, str] = ("", "")
    """Around the arguments."""
    end: str = ""
    section_end: str = ""
    also_starts: tuple[str, ...] = ()

    @property
    def triggers(self) -> tuple[Trigger, ...]:
        return word_triggers(self.start, *self.also_starts)

    @property
    def tags(self) -> tuple[str, ...]:
        found: tuple[str, ...] = (self.start, self.each, self.before_name, self.name_end, self.id_tag, self.id_first)
        return tuple(
            dict.fromkeys(t.strip() for t in (*found, self.end, self.section_end, *self.also_starts) if t.strip())
        )

    def read(self, reader: Reader, tools: Tools, drop: Sequence[str] = ()) -> Reading[None]:
        starts = Tags(self.start, *self.also_starts)
        stops = Tags(*starts.tags, *drop)
        while True:
            tag = yield from reader.until(stops, reader.content)
            if tag is None:
                return
            if tag in drop:
                continue
            begun = not self.each or tag == self.each
            outcome = yield from self.section(reader, tools, begun)
            if outcome is Outcome.NONE:
                reader.content(tag)
            elif outcome is Outcome.BROKEN:
                return
            else:
                yield from read_gap(reader, *starts.tags)

    def section(self, reader: Reader, tools: Tools, begun: bool) -> Reading[Outcome]:
        """Read the text after `start`; `begun`: the tag of the first call was taken with it."""
        first = True
        while True:
            outcome = yield from self.call(reader, tools, "" if first and begun else self.each)
            if outcome is Outcome.BROKEN or (first and outcome is Outcome.NONE):
                return outcome
            if outcome is Outcome.NONE or not self.each:
                break
            first = False
        yield from read_after_space(reader, self.section_end)
        return Outcome.CALL

    def call(self, reader: Reader, tools: Tools, before: str) -> Reading[Outcome]:
        ends = Tags(self.name_end, *self.also_name_ends, self.id_tag, self.id_first)
        reader.mark()
        if before:
            yield from reader.space()
            if not (yield from reader.take(before)):
                reader.reject()
                return Outcome.NONE
        yield from reader.space()
        if self.before_name:
            yield from reader.take(self.before_name)
        id: str | None = None
        found = yield from reader.word(ends, tools.longest + 64)
        if found is not None and self.id_first and found[1] == self.id_first:
            id = found[0].strip()
            found = yield from reader.word(ends, tools.longest + 8)
        elif found is not None and self.id_tag and found[1] == self.id_tag:
            behind = yield from reader.word(ends, 64)
            id = behind[0].strip() if behind else None
            found = (found[0], behind[1]) if behind else None
        if found is None:
            reader.reject()
            return Outcome.NONE
        name = found[0].strip()
        if found[1] in self.also_name_ends:
            reader.at -= len(found[1])
        if self.name_pattern:
            match = re.fullmatch(self.name_pattern, name)
            if match is not None:
                name, id = match["name"], match[0]
        yield from reader.space()
        if self.fence[0] and (yield from reader.take(self.fence[0])):
            yield from reader.space()
        if name not in tools.schemas or (yield from reader.char()) != "{":
            reader.reject()
            return Outcome.NONE
        reader.accept()
        reader.call(name, id)
        if not (yield from read_value(reader, reader.arguments)):
            return Outcome.BROKEN
        yield from read_after_space(reader, self.fence[1])
        yield from read_after_space(reader, self.end)
        return Outcome.CALL

    def grammar(self, tools: Tools, parallel: bool) -> str:
        rules = []
        for i, (name, schema) in enumerate(tools.schemas.items()):
            rules.append(f"arguments_{i}: {schema_body(schema)}")
            written = quoted(name)
            if self.name_pattern:
                prefix = self.name_pattern.partition("(?P<name>")[0].strip("()?").replace("\\", "")
                written = sequence(quoted(prefix), written, f"/{self.written_id}/")
            elif self.id_first:
                written = sequence(f"/{self.written_id}/", quoted(self.id_first), written)
            elif self.id_tag and self.written_id:
                written = sequence(written, quoted(self.id_tag), f"/{self.written_id}/")
            rules.append(
                f"call_{i}: "
                + sequence(
                    written,
                    quoted(self.name_end),
                    quoted(self.fence[0] and self.fence[0] + "\n"),
                    f"arguments_{i}",
                    quoted(self.fence[1] and "\n" + self.fence[1]),
                )
            )
        one = "one: " + alternatives([f"call_{i}" for i in range(len(tools.schemas))])
        end = self.end and f"SPACE {quoted(self.end)}"
        call = sequence(quoted(self.each or self.start), quoted(self.before_name), "one", end)
        more = f"(SPACE {call})*" if parallel else ""
        if self.each and self.each != self.start:
            section_end = self.section_end and f"SPACE {quoted(self.section_end)}"
            calls = sequence(quoted(self.start), "SPACE", call, more, section_end)
            if self.each in self.also_starts:
                calls += " | " + sequence(call, more, section_end)
        else:
            calls = sequence(call, more)
        return "\n".join((f"calls: {calls}", one, *rules, SPACE))


@dataclass(frozen=True, kw_only=True)
class TaggedCalls:
    """Calls whose arguments are bare texts, each between tags."""

    start: str
    each: str = ""
    """Before each call of a section; "": same as `start`."""
    before_name: str = ""
    """Between the tag before a call and its name."""
    name_end: str
    argument: str
    """Before an argument's name."""
    argument_name_end: str
    string_name_end: str = ""
    """After an argument's name if the value is a string, in families that mark strings."""
    value: str = ""
    """Before a value, if more than the end of the name precedes it."""
    value_end: str
    name_close: str = ""
    """After the arguments."""
    end: str = ""
    section_end: str = ""
    also_starts: tuple[str, ...] = ()
    trim: bool = True
    """True if line feeds around values are formatting."""
    quote: tuple[str, str] = ("", "")
    """Quotes that may enclose a value that contains tags."""

    @property
    def triggers(self) -> tuple[Trigger, ...]:
        return word_triggers(self.start, *self.also_starts)

    @property
    def tags(self) -> tuple[str, ...]:
        found: tuple[str, ...] = (self.start, self.each, self.before_name, self.argument, self.value)
        found += (self.value_end, self.name_close, self.end, self.section_end, *self.also_starts)
        return tuple(dict.fromkeys(tag.strip() for tag in found if tag.strip()))

    def read(self, reader: Reader, tools: Tools, drop: Sequence[str] = ()) -> Reading[None]:
        starts = Tags(self.start, *self.also_starts)
        stops = Tags(*starts.tags, *drop)
        while True:
            tag = yield from reader.until(stops, reader.content)
            if tag is None:
                return
            if tag in drop:
                continue
            outcome = yield from self.section(reader, tools, tag if tag in self.also_starts else "", not self.each)
            if outcome is Outcome.NONE:
                reader.content(tag)
            elif outcome is Outcome.BROKEN:
                return
            else:
                yield from read_gap(reader, *starts.tags)

    def section(self, reader: Reader, tools: Tools, taken: str, begun: bool) -> Reading[Outcome]:
        """Read the text after `start`; `taken`: a tag closer to the name that was taken."""
        first = True
        while True:
            outcome = yield from self.call(reader, tools, "" if first and begun else self.each, taken if first else "")
            if outcome is Outcome.BROKEN or (first and outcome is Outcome.NONE):
                return outcome
            if outcome is Outcome.NONE or not self.each:
                break
            first = False
        yield from read_after_space(reader, self.section_end)
        return Outcome.CALL

    def call(self, reader: Reader, tools: Tools, before: str, taken: str) -> Reading[Outcome]:
        reader.mark()
        if before:
            yield from reader.space()
            if not (yield from reader.take(before)):
                reader.reject()
                return Outcome.NONE
        yield from reader.space()
        if self.before_name and self.before_name != taken and not (yield from reader.take(self.before_name)):
            reader.reject()
            return Outcome.NONE
        close = self.name_close or self.end
        found = yield from reader.word(Tags(self.name_end, self.argument, close), tools.longest + 8)
        if found is None or found[0].strip() not in tools.schemas:
            reader.reject()
            return Outcome.NONE
        if found[1] != self.name_end:
            reader.at -= len(found[1])
        reader.accept()
        name = found[0].strip()
        schema = tools.schemas[name]
        properties = schema.get("properties")
        reader.call(name)
        reader.arguments("{")
        n = 0
        while True:
            reader.mark()
            yield from reader.space()
            if not (yield from reader.take(self.argument)):
                reader.reject()
                break
            ends = Tags(self.argument_name_end, self.string_name_end)
            key = yield from reader.word(ends, MAX_KEY)
            if key is not None and self.value:
                yield from reader.space()
                if not (yield from reader.take(self.value)):
                    key = None
            if key is None:
                reader.reject()
                reader.arguments("}")
                return Outcome.BROKEN
            reader.accept()
            parameter = key[0].strip()
            if self.string_name_end and key[1] == self.string_name_end:
                wanted = frozenset(("string",))
            else:
                wanted = types(properties.get(parameter) if isinstance(properties, Mapping) else None, schema)
            reader.arguments(("," if n else "") + json.dumps(parameter, ensure_ascii=False) + ":")
            in_quotes = bool(self.quote[0]) and bool((yield from reader.take(self.quote[0])))
            ends = Tags(self.quote[1] if in_quotes else self.value_end)
            if (yield from read_bare(reader, ends, wanted, self.trim, reader.arguments)) is None:
                return Outcome.BROKEN
            if in_quotes:
                yield from read_after_space(reader, self.value_end)
            n += 1
        reader.arguments("}")
        yield from read_after_space(reader, self.name_close)
        yield from read_after_space(reader, self.end)
        return Outcome.CALL

    def grammar(self, tools: Tools, parallel: bool) -> str:
        rules = []
        for i, (name, schema) in enumerate(tools.schemas.items()):
            arguments, more_rules = self._arguments(f"{i}", schema)
            rules += more_rules
            rules.append(f"call_{i}: " + sequence(quoted(name), quoted(self.name_end.strip()), "SPACE", arguments))
        one = "one: " + alternatives([f"call_{i}" for i in range(len(tools.schemas))])
        call = sequence(
            quoted(self.each or self.start),
            self.before_name and "SPACE " + quoted(self.before_name),
            "one",
            self.name_close and quoted(self.name_close),
            self.end and "SPACE " + quoted(self.end),
        )
        more = f"(SPACE {call})*" if parallel else ""
        if self.each:
            section_end = self.section_end and f"SPACE {quoted(self.section_end)}"
            calls = sequence(quoted(self.start), "SPACE", call, more, section_end)
        else:
            calls = sequence(call, more)
        for start in self.also_starts:  # a call without the tag in front
            if start == self.before_name:
                bare = sequence(quoted(start), "one", self.name_close and quoted(self.name_close))
                calls += " | " + sequence(bare, self.end and f"(SPACE {quoted(self.end)})?", more)
        return "\n".join((f"calls: {calls}", one, *rules, SPACE))

    def _arguments(self, at: str, schema: Mapping[str, Any]) -> tuple[str, list[str]]:
        """Return a rule's name, and rules, for all arguments: few in any order, many in the schema's order."""
        given = schema.get("properties")
        properties: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
        required = required_names(schema)
        rules: list[str] = []
        names = list(properties)
        for k, name in enumerate(names):
            rules += self._argument(f"{at}_{k}", name, properties[name], schema)
        if not names:
            return "", []
        if len(names) > 6:
            parts = [f"argument_{at}_{k}" + ("" if name in required else "?") for k, name in enumerate(names)]
            return f"arguments_{at}", [f"arguments_{at}: " + " ".join(parts), *rules]
        for left in range(1 << len(names)):
            ways = [
                f"argument_{at}_{k}" + (f" arguments_{at}_{left & ~(1 << k)}" if left & ~(1 << k) else "")
                for k in range(len(names))
                if left >> k & 1
            ]
            if left and not any(left >> k & 1 and name in required for k, name in enumerate(names)):
                ways.append('""')
            if ways:
                rules.append(f"arguments_{at}_{left}: " + " | ".join(ways))
        return f"arguments_{at}_{(1 << len(names)) - 1}", rules

    def _argument(self, at: str, name: str, schema: Any, root: Mapping[str, Any]) -> list[str]:
        """Return rules for one argument; the first is `argument_{at}`."""
        kinds = types(schema, root)
        line = "\n" if self.trim else ""
        ending = line + self.value_end
        name_end = self.string_name_end if self.string_name_end and kinds == {"string"} else self.argument_name_end
        head = sequence(
            quoted(self.argument), quoted(name), quoted(name_end), self.value and f"SPACE {quoted(self.value)}"
        )
        head = sequence(head, quoted(line))
        if "string" not in kinds:
            return [
                f"argument_{at}: {head} value_{at} {quoted(ending)} SPACE",
                f"value_{at}: {member_body(root, name)}",
            ]
        values = choices(schema, root)
        if values:
            texts = " | ".join(quoted(spelled(value)) or '""' for value in values)
            return [f"argument_{at}: {head} ({texts}) {quoted(ending)} SPACE"]
        return [
            f"argument_{at}: {head} value_{at} SPACE",
            f"END_{at}: {quoted(ending)}",
            f"TEXT_{at}: {text_expression(schema, root)}",
            f"value_{at}[suffix=END_{at}]: TEXT_{at}",
        ]
