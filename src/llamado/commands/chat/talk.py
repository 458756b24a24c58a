"""A conversation with its commands: `/regen`, `/save` and the like, in one table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from llamado.commands.chat.conversation import SETTABLE, Chat, ChatError, settable
from llamado.commands.chat.screen import Screen
from llamado.commands.chat.speaker import Figures, Message, Speaker
from llamado.engine.errors import ContextExceeded
from llamado.errors import LlamadoError
from llamado.terminal.text import printable

Say = Callable[[str], None]
"""Shows a line that is no answer."""


class Talk:
    """What a user says, question or command, and what becomes of it."""

    def __init__(self, speaker: Speaker, chat: Chat, screen: Screen, say: Say) -> None:
        self._speaker, self.chat, self._screen, self._say = speaker, chat, screen, say
        self._first_system = chat.system
        self.over = False
        """Whether the user wants to leave."""

    def hear(self, text: str) -> None:
        """A question, or a command. Faults are said; the conversation stays as it was."""
        try:
            # A text of several lines is never a command: it may be a file that begins with a slash.
            if text.startswith("/") and "\n" not in text:
                self._obey(text)
            else:
                self._ask(self.chat.messages, text)
        except LlamadoError as error:
            self._say(f"llamado: {error}")
            if isinstance(error, ContextExceeded):
                self._say("/clear forgets the conversation")

    def _ask(self, before: Sequence[Message], question: str) -> None:
        asked = Chat(system=self.chat.system, messages=[*before])
        shown = self._screen.show(self._speaker.answer(asked.asking(question), self.chat.settings))
        if not shown.text and not shown.thoughts and shown.figures is None:
            self._say("stopped before an answer began: the question is forgotten")
            return
        asked.took(question, shown.text, shown.thoughts)
        self.chat.messages = asked.messages
        if shown.figures is not None:
            self.chat.answers.append(shown.figures)
            if line := told(shown.figures):
                self._say(line)

    def _obey(self, text: str) -> None:
        word, _, rest = text.partition(" ")
        order = next((one for one in ORDERS if word in (one.name, *one.also)), None)
        if order is None:
            raise ChatError(f"there is no command {word}; /help shows what there is")
        order.do(self, rest.strip())

    # --- the commands -----------------------------------------------------------------------------------------------
    def help(self, _: str) -> None:
        width = max(len(f"{one.name} {one.argument}") for one in ORDERS)
        for one in ORDERS:
            self._say(f"  {f'{one.name} {one.argument}':{width}}  {one.help}")
        self._say('Alt-Enter begins a new line, as do lines between """ and """; what is pasted is one question.')
        self._say("Ctrl-C stops an answer, Ctrl-D leaves.")

    def system(self, text: str) -> None:
        if text:
            self.chat.system = "" if text == "none" else text
        self._say(f"system: {self.chat.system or '(none)'}")

    def regen(self, _: str) -> None:
        before, question = self.chat.last_question()
        if isinstance(self.chat.settings.get("seed"), int):
            self._say("the seed is fixed, so the answer will be the same: /set seed -1")
        self._ask(before, question)

    def save(self, text: str) -> None:
        if not text:
            raise ChatError("/save: which file?")
        path = Path(text).expanduser()
        self.chat.save(path, self._speaker.name)
        self._say(f"{len(self.chat.messages)} messages are in {path}")

    def load(self, text: str) -> None:
        if not text:
            raise ChatError("/load: which file?")
        self.chat.load(Path(text).expanduser())
        self._say(f"{len(self.chat.messages)} messages are back")
        if self.chat.messages:
            last = self.chat.messages[-1]
            self._say(f"{last['role']}: {_short(printable(str(last['content'])))}")

    def set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if value:
            self.chat.set(name, value.strip())
            name = settable(name).name
            self._say(f"{name} = {self.chat.settings.get(name, 'default')}")
            return
        for row in [settable(name)] if name else SETTABLE.values():
            now = self.chat.settings.get(row.name, "default")
            self._say(f"  {row.name:20} {now!s:10} {row.help}")

    def stats(self, _: str) -> None:
        answers = self.chat.answers
        made = sum(one.n_predicted or 0 for one in answers)
        speeds = [one.tokens_per_second for one in answers if one.tokens_per_second]
        self._say(f"model: {self._speaker.name}")
        self._say(f"messages: {len(self.chat.messages)}, answers: {len(answers)}, generated tokens: {made}")
        if answers and (last := told(answers[-1])):
            self._say(f"last answer: {last}")
        if answers and answers[-1].n_prompt is not None:
            cached = answers[-1].n_cached
            kept = "" if cached is None else f", {cached} of them from the cache"
            self._say(f"its prompt: {answers[-1].n_prompt} tokens{kept}")
        if speeds:
            self._say(f"speed: {sum(speeds) / len(speeds):.1f} tokens/s on average")

    def thoughts(self, _: str) -> None:
        for message in reversed(self.chat.messages):
            if message["role"] == "assistant":
                self._say(printable(message.get("reasoning_content") or "the last answer came without thoughts"))
                return
        raise ChatError("there is no answer yet")

    def clear(self, _: str) -> None:
        self.chat.messages, self.chat.system = [], self._first_system
        self._say("the conversation is forgotten")

    def exit(self, _: str) -> None:
        self.over = True


@dataclass(frozen=True)
class Order:
    """A command of the conversation."""

    name: str
    argument: str
    help: str
    do: Callable[[Talk, str], None]
    also: tuple[str, ...] = ()


ORDERS = (
    Order("/help", "", "this", Talk.help, ("/?",)),
    Order("/system", "[TEXT]", "the system message: another one (none: none), or which it is", Talk.system),
    Order("/regen", "", "the last question once more", Talk.regen),
    Order("/save", "FILE", "keep the conversation in a file", Talk.save),
    Order("/load", "FILE", "go on with one that was kept", Talk.load),
    Order("/set", "[NAME [VALUE]]", "a parameter of the answers (default: as at the start), or all of them", Talk.set),
    Order("/stats", "", "tokens and speed", Talk.stats),
    Order("/thoughts", "", "what the model thought before its last answer", Talk.thoughts),
    Order("/clear", "", "forget the conversation", Talk.clear),
    Order("/exit", "", "leave", Talk.exit, ("/quit", "/bye")),
)


def told(figures: Figures) -> str:
    """A line about an answer."""
    parts = []
    if figures.n_predicted is not None:
        parts.append(f"{figures.n_predicted} tokens")
    if figures.tokens_per_second is not None:
        parts.append(f"{figures.tokens_per_second:.1f} tokens/s")
    if figures.first_seconds is not None:
        parts.append(f"first after {figures.first_seconds:.2f} s")
    if figures.cut:
        parts.append("cut: it became too long")
    return ", ".join(parts)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 200 else f"{line[:199]}…"
