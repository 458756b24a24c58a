"""Thoughts in front of an answer: which tags a template puts around them, and reading them."""

from __future__ import annotations

from dataclasses import dataclass

from llamado.text.dialects.reading import Reader, Reading, Tags
from llamado.text.template.chat import ChatTemplate, TemplateError

STYLES = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
)
"""Tags around thoughts."""

_THOUGHT = "llamadothought"
_ANSWER = "llamadoanswer"


@dataclass(frozen=True)
class Thinking:
    """The tags around thoughts and the whitespace that belongs to them rather than to what they stand around."""

    start: str
    end: str
    after_start: int = 1
    """How many white characters behind `start` are formatting."""
    after_end: int = 2
    also_ends: tuple[str, ...] = ()
    """Tags that end thoughts, too, and are not taken: calls that come without the closing tag."""

    spelled: tuple[str, str] = ("", "")
    """What stands around thoughts in a prompt, where it is more than the tags."""

    @property
    def written(self) -> tuple[str, str]:
        """What stands around thoughts in a prompt."""
        return self.spelled[0] or self.start, self.spelled[1] or self.end

    def read(self, reader: Reader, format: str = "auto") -> Reading[bool]:
        """Read thoughts where the text begins with some; whether there were any tags.

        `format` none leaves them in the content with their tags, deepseek-legacy does so as well.
        """
        if not (yield from reader.take(self.start)):
            return False
        echo = reader.content if format in ("none", "deepseek-legacy") else _nowhere
        echo(self.start)
        echo((yield from reader.space(self.after_start)))
        blank: list[str] | None = []  # whitespace at the beginning: thoughts of nothing else are none

        def show(text: str) -> None:
            nonlocal blank
            echo(text)
            if format == "none":
                return
            if blank is not None:
                blank.append(text)
                if text.isspace():
                    return
                text, blank = "".join(blank), None
            reader.reasoning(text)

        tag = yield from reader.until(Tags(self.end, *self.also_ends), show)
        if tag == self.end:
            echo(tag)
            echo((yield from reader.space(self.after_end)))
        elif tag is not None:
            reader.at -= len(tag)
        return True


def _nowhere(text: str) -> None:
    pass


def find_thinking(template: ChatTemplate) -> Thinking | None:
    """The thoughts' tags of a template; None: it knows no thoughts.

    Which whitespace goes with them shows in how the template writes thoughts of the past.
    """
    for start, end in STYLES:
        if end in template.source or (start in template.source and start != "<think>"):
            break
    else:
        return None
    messages = (
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": _ANSWER, "reasoning_content": _THOUGHT, "thinking": _THOUGHT},
    )
    try:
        text = template.render(messages, add_generation_prompt=False)
    except TemplateError:
        return Thinking(start, end)
    before, found, behind = text.partition(_THOUGHT)
    between, answered, _ = behind.partition(_ANSWER)
    if not found or not answered or start not in before or end not in between:
        return Thinking(start, end)
    opened = before.rpartition(start)[2]
    closing, _, closed = between.partition(end)
    white = [text if text.isspace() else "" for text in (opened, closing, closed)]
    return Thinking(start, end, len(white[0]), len(white[2]), spelled=(start + white[0], white[1] + end + white[2]))
