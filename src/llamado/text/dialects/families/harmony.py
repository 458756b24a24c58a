"""gpt-oss and its Harmony format: messages in channels, calls addressed to `functions.NAME`.

An answer begins after `<|start|>assistant`. Each message is a header (a recipient, a channel, a content format, in this
order or with the recipient after the channel), `<|message|>`, a body and `<|end|>`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from llamado.text.dialects.calls import Tools, alternatives, quoted, schema_body
from llamado.text.dialects.family import Family, Message
from llamado.text.dialects.reading import Reader, Reading, Tags
from llamado.text.dialects.thinking import ThinkingTags
from llamado.text.dialects.values import read_value
from llamado.text.grammar.source import Trigger

_START = "<|start|>assistant"
_HEADER = 256  # characters
_MESSAGE = Tags("<|message|>")
_BODY = Tags("<|end|>", "<|call|>", "<|return|>", "<|start|>assistant")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_CALL = r"to=functions\."


@dataclass(frozen=True)
class HarmonyCalls:
    """Calls as messages to a function."""

    triggers: tuple[Trigger, ...] = (
        Trigger("pattern", rf"^(\s+{_CALL})"),
        Trigger("pattern", rf"^(<\|channel\|>(?:commentary|analysis)\s+{_CALL})"),
        Trigger("pattern", rf"<\|start\|>assistant(\s+{_CALL})"),
        Trigger("pattern", rf"<\|start\|>assistant(<\|channel\|>(?:commentary|analysis)\s+{_CALL})"),
    )
    tags: tuple[str, ...] = ("<|channel|>", "<|constrain|>", "<|message|>", "<|start|>", "<|end|>")

    def read(self, reader: Reader, tools: Tools, drop: Sequence[str] = ()) -> Reading[None]:
        yield from read_harmony(reader, tools, "auto")

    def grammar(self, tools: Tools, parallel: bool) -> str:
        """Return rules of one call; a second one would follow the end of the message, which ends the answer."""
        rules = [
            "calls: in_role | in_channel",
            'in_role: " to=functions." named_in_role',
            'in_channel: channel " to=functions." named',
            'channel: "<|channel|>" ("commentary" | "analysis")',
            'form: (" "? "<|constrain|>" "json" | " json")?',
        ]
        names = range(len(tools.schemas))
        rules.append("named_in_role: " + alternatives([f"role_{i}" for i in names]))
        rules.append("named: " + alternatives([f"named_{i}" for i in names]))
        for i, (name, schema) in enumerate(tools.schemas.items()):
            rules.append(f'role_{i}: {quoted(name)} channel form "<|message|>" arguments_{i}')
            rules.append(f'named_{i}: {quoted(name)} form "<|message|>" arguments_{i}')
            rules.append(f"arguments_{i}: {schema_body(schema)}")
        return "\n".join(rules)


def read_harmony(reader: Reader, tools: Tools, format: str) -> Reading[None]:
    """Read messages to the end."""
    first = True
    while True:
        yield from reader.take(_START)
        if (yield from reader.at_end()):
            return
        reader.mark()
        found = None
        if not first or (yield from reader.peek("<|channel|>", " to=")):
            found = yield from reader.word(_MESSAGE, _HEADER)
        if found is None:
            reader.reject()
            if first:
                return
            yield from reader.until(_BODY, reader.content)
            continue
        reader.accept()
        first = False
        header = found[0]
        channel = _CHANNEL.findall(header)
        recipient = _RECIPIENT.search(header)
        to = recipient[1] if recipient is not None else "assistant"
        if to.startswith("functions.") and to[10:] in tools.schemas:
            reader.call(to[10:])
            if (yield from read_value(reader, reader.arguments)):
                yield from reader.space()
            yield from reader.until(_BODY, reader.content)
        elif to not in ("assistant", "user") and not to.startswith("functions."):
            yield from reader.until(_BODY, _discard)  # to one of OpenAI's built-in tools, which do not exist here
        elif channel and channel[-1] == "analysis" and to == "assistant":
            if format == "none":
                reader.content(header + found[1])
                end = yield from reader.until(_BODY, reader.content)
                reader.content(end if end and end != _START else "")
            else:
                if format == "deepseek-legacy":
                    reader.content(header + found[1])
                yield from reader.until(_BODY, reader.reasoning)
        else:
            yield from reader.until(_BODY, reader.content)


def _discard(text: str) -> None:
    pass


def _thoughts(messages: Sequence[Message]) -> list[Message]:
    """Rename thoughts for the template; if there are calls they replace the content."""
    out: list[Message] = []
    for message in messages:
        if isinstance(message.get("reasoning_content"), str):
            message = {**message, "thinking": message["reasoning_content"]}
            if message.get("tool_calls"):
                message = {key: value for key, value in message.items() if key != "content"}
        out.append(message)
    return out


HARMONY = Family(
    name="GPT-OSS",
    matches=lambda source: "<|channel|>" in source,
    calls=HarmonyCalls(),
    thinking=ThinkingTags("<|channel|>analysis<|message|>", "<|end|>", 0, 0),
    adjust=_thoughts,
    reads=read_harmony,
    starts_answer=_START,
    calls_prefix='"<|start|>assistant"?',
    content_prefix='"<|start|>assistant"? "<|channel|>final" (" "? "<|constrain|>"? "json")? "<|message|>"',
    before_content="<|start|>assistant<|channel|>final<|message|>",
    before_answer="<|channel|>final<|message|>",
    preserved=HarmonyCalls.tags,
)
