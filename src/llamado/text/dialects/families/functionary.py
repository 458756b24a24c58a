"""Functionary: 3.1 calls with <function=name>{…}</function>, 3.2 with recipients, >>>name, and >>>all for content."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llamado.text.dialects.calls import NamedCalls, Tools, alternatives, quoted, schema_body
from llamado.text.dialects.family import Family, all_of
from llamado.text.dialects.reading import Reader, Reading, Tags
from llamado.text.dialects.values import read_value
from llamado.text.grammar.source import Trigger

V31 = Family(
    name="Functionary v3.1 Llama 3.1",
    matches=all_of("<function=", "</function>"),
    calls=NamedCalls(start="<function=", name_end=">", end="</function>"),
)

_MARK = ">>>"
_LINE = Tags("\n")


@dataclass(frozen=True)
class RecipientCalls:
    """Parts of an answer, each for a recipient named on its own line; the prompt ends with the first `>>>`."""

    triggers: tuple[Trigger, ...] = (Trigger("pattern", r"(?:^|>>>)((?!all\n)[^\n>]+\n)"),)
    tags: tuple[str, ...] = ()

    def read(self, reader: Reader, tools: Tools, drop: Sequence[str] = ()) -> Reading[None]:
        yield from read_recipients(reader, tools, "auto")

    def grammar(self, tools: Tools, parallel: bool) -> str:
        rules = []
        for i, (name, schema) in enumerate(tools.schemas.items()):
            rules.append(f"call_{i}: {quoted(name + chr(10))} arguments_{i}")
            rules.append(f"arguments_{i}: {schema_body(schema)}")
        one = "one: " + alternatives([f"call_{i}" for i in range(len(tools.schemas))])
        return "\n".join(("calls: one" + (' (">>>" one)*' if parallel else ""), one, *rules))


def read_recipients(reader: Reader, tools: Tools, format: str) -> Reading[None]:
    """Read the parts to the end."""
    stops = Tags(_MARK)
    first = True
    while True:
        reader.mark()
        found = yield from reader.word(_LINE, max(tools.longest, 3) + 8)
        name = found[0].strip().removeprefix(_MARK) if found is not None else ""
        if name == "all":
            reader.accept()
            first = False
            if (yield from reader.until(stops if tools.schemas else Tags(), reader.content)) is None:
                return
            continue
        if name not in tools.schemas or (yield from reader.char()) != "{":
            reader.reject()
            if not first:
                reader.content(_MARK)
            if (yield from reader.until(stops if tools.schemas else Tags(), reader.content)) is None:
                return
            first = False
            continue
        reader.accept()
        first = False
        reader.call(name)
        if not (yield from read_value(reader, reader.arguments)):
            return
        yield from reader.space()
        if not (yield from reader.take(_MARK)):
            return


V32 = Family(
    name="Functionary v3.2",
    matches=all_of(">>>all", ">>>${recipient}"),
    calls=RecipientCalls(),
    reads=read_recipients,
    before_content="all\n",
    before_answer="all\n",
    preserved=(">>>all",),
)
