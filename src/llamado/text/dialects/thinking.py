"""Thoughts before an answer: finding the tags of a template, and reading thoughts."""

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
class ThinkingTags:
    """The tags around thoughts, and the whitespace that belongs to the tags rather than to the text around them."""

    start: str
    end: str
    after_start: int = 1
    """Whitespace characters after `start` that are formatting."""
    after_end: int = 2
    also_ends: tuple[str, ...] = ()
    """Tags that also end thoughts, and are not taken: calls without the closing tag."""

    spelled: tuple[str, str] = ("", "")
    """The texts around thoughts in a prompt, if they are more than the tags."""

    @property
    def written(self) -> tuple[str, str]:
        """The texts around thoughts in a prompt."""
        return self.spelled[0] or self.start, self.spelled[1] or self.end

    def read(self, reader: Reader, format: str = "auto") -> Reading[bool]:
        """Read thoughts if the text begins with them; return True if there were tags.

        With `format` none they stay in the content with their tags, with deepseek-legacy in both.
        """
        if not (yield from reader.take(self.start)):
            return False
        echo = reader.content if format in ("none", "deepseek-legacy") else _discard
        echo(self.start)
        echo((yield from reader.space(self.after_start)))
        blank: list[str] | None = []  # whitespace at the beginning; thoughts of whitespace only are dropped

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


def _discard(text: str) -> None:
    pass


def find_thinking(template: ChatTemplate) -> ThinkingTags | None:
    """Return the tags of a template's thoughts; None if it has no thoughts.

    The whitespace that belongs to them is found from how the template writes earlier thoughts.
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
        return ThinkingTags(start, end)
    before, found, behind = text.partition(_THOUGHT)
    between, answered, _ = behind.partition(_ANSWER)
    if not found or not answered or start not in before or end not in between:
        return ThinkingTags(start, end)
    opened = before.rpartition(start)[2]
    closing, _, closed = between.partition(end)
    white = [text if text.isspace() else "" for text in (opened, closing, closed)]
    return ThinkingTags(start, end, len(white[0]), len(white[2]), spelled=(start + white[0], white[1] + end + white[2]))
