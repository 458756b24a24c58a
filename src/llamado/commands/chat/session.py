"""A chat session: questions and commands such as `/regen` and `/save`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from llamado.commands.chat.attachments import Part, attachment, question_of, with_attachments
from llamado.commands.chat.backend import AnswerStats, ChatBackend, Message
from llamado.commands.chat.conversation import SETTABLE, Chat, ChatError, settable
from llamado.commands.chat.screen import Screen
from llamado.engine.errors import ContextExceeded
from llamado.errors import LlamadoError
from llamado.media.media import MediaKind
from llamado.terminal.text import printable

Say = Callable[[str], None]
"""Callback: shows a line that is not a part of an answer."""


class ChatSession:
    """Handles the input of a user: questions and commands."""

    def __init__(self, backend: ChatBackend, chat: Chat, screen: Screen, say: Say) -> None:
        self._backend, self.chat, self._screen, self._say = backend, chat, screen, say
        self._first_system = chat.system
        self._attached: list[Part] = []
        """Pictures and sounds for the next question."""
        self.is_over = False
        """True after /exit."""

    def handle(self, text: str) -> None:
        """Handle a question or a command. Errors are shown, and leave the conversation unchanged."""
        try:
            # A text of several lines is never a command: it may be a file that starts with a slash.
            if text.startswith("/") and "\n" not in text:
                self._run_command(text)
            else:
                self._ask(self.chat.messages, with_attachments(text, self._attached))
                self._attached = []
        except LlamadoError as error:
            self._say(f"llamado: {error}")
            if isinstance(error, ContextExceeded):
                self._say("/clear starts a new conversation")

    def attach(self, parts: Sequence[Part]) -> None:
        """Add pictures and sounds to the next question."""
        self._attached += parts

    def _ask(self, before: Sequence[Message], question: str | list[Part]) -> None:
        asked = Chat(system=self.chat.system, messages=[*before])
        shown = self._screen.show(self._backend.answer(asked.with_question(question), self.chat.settings))
        if not shown.text and not shown.reasoning and shown.stats is None:
            self._say("stopped before the answer started; the question is dropped")
            return
        asked.add_turn(question, shown.text, shown.reasoning)
        self.chat.messages = asked.messages
        if (stats := shown.stats or shown.so_far) is not None:
            self.chat.answers.append(stats)
            if line := stats_line(stats):
                self._say(line)

    def _run_command(self, text: str) -> None:
        word, _, rest = text.partition(" ")
        command = next((one for one in CHAT_COMMANDS if word in (one.name, *one.aliases)), None)
        if command is None:
            raise ChatError(f"there is no command {word}; /help lists all")
        command.run(self, rest.strip())

    # --- the commands -----------------------------------------------------------------------------------------------
    def help(self, _: str) -> None:
        width = max(len(f"{one.name} {one.argument}") for one in CHAT_COMMANDS)
        for one in CHAT_COMMANDS:
            self._say(f"  {f'{one.name} {one.argument}':{width}}  {one.help}")
        self._say('Alt-Enter inserts a line break. Text between """ and """ and pasted text may have several lines.')
        self._say("Ctrl-C stops an answer, Ctrl-D quits.")

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
            raise ChatError("/save: expected a file")
        path = Path(text).expanduser()
        self.chat.save(path, self._backend.name)
        self._say(f"{len(self.chat.messages)} messages saved to {path}")

    def load(self, text: str) -> None:
        if not text:
            raise ChatError("/load: expected a file")
        self.chat.load(Path(text).expanduser())
        self._say(f"{len(self.chat.messages)} messages loaded")
        if self.chat.messages:
            last = self.chat.messages[-1]
            self._say(f"{last['role']}: {_short(printable(question_of(last['content'])[0]))}")

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

    def image(self, text: str) -> None:
        self._attach("/image", text, MediaKind.IMAGE)

    def audio(self, text: str) -> None:
        self._attach("/audio", text, MediaKind.AUDIO)

    def _attach(self, command: str, text: str, kind: MediaKind) -> None:
        if not text:
            raise ChatError(f"{command}: expected a file")
        self.attach([attachment(text, kind)])
        self._say(f"{text} goes with the next question")

    def stats(self, _: str) -> None:
        answers = self.chat.answers
        made = sum(one.n_predicted or 0 for one in answers)
        speeds = [one.tokens_per_second for one in answers if one.tokens_per_second]
        self._say(f"model: {self._backend.name}")
        self._say(f"messages: {len(self.chat.messages)}, answers: {len(answers)}, generated tokens: {made}")
        if answers and (last := stats_line(answers[-1])):
            self._say(f"last answer: {last}")
        if answers and answers[-1].n_prompt is not None:
            cached = answers[-1].n_cached
            kept = "" if cached is None else f", {cached} of them from the cache"
            self._say(f"last prompt: {answers[-1].n_prompt} tokens{kept}")
        if speeds:
            self._say(f"speed: {sum(speeds) / len(speeds):.1f} tokens/s on average")

    def thoughts(self, _: str) -> None:
        for message in reversed(self.chat.messages):
            if message["role"] == "assistant":
                self._say(printable(message.get("reasoning_content") or "the last answer has no reasoning"))
                return
        raise ChatError("there is no answer yet")

    def clear(self, _: str) -> None:
        self.chat.messages, self.chat.system, self._attached = [], self._first_system, []
        self._say("new conversation")

    def exit(self, _: str) -> None:
        self.is_over = True


@dataclass(frozen=True)
class ChatCommand:
    """A command of the chat."""

    name: str
    argument: str
    help: str
    run: Callable[[ChatSession, str], None]
    aliases: tuple[str, ...] = ()


CHAT_COMMANDS = (
    ChatCommand("/help", "", "show this help", ChatSession.help, ("/?",)),
    ChatCommand("/system", "[TEXT]", "set the system message (none: remove it), or show it", ChatSession.system),
    ChatCommand("/image", "FILE", "attach a picture to the next question", ChatSession.image),
    ChatCommand("/audio", "FILE", "attach a sound to the next question", ChatSession.audio),
    ChatCommand("/regen", "", "answer the last question again", ChatSession.regen),
    ChatCommand("/save", "FILE", "save the conversation", ChatSession.save),
    ChatCommand("/load", "FILE", "load a saved conversation", ChatSession.load),
    ChatCommand("/set", "[NAME [VALUE]]", "set a parameter (default: reset it), or show one or all", ChatSession.set),
    ChatCommand("/stats", "", "show tokens and speed", ChatSession.stats),
    ChatCommand("/thoughts", "", "show the reasoning of the last answer", ChatSession.thoughts),
    ChatCommand("/clear", "", "start a new conversation", ChatSession.clear),
    ChatCommand("/exit", "", "quit", ChatSession.exit, ("/quit", "/bye")),
)


def stats_line(stats: AnswerStats) -> str:
    """Return a line with the statistics of an answer."""
    parts = []
    if stats.n_predicted is not None:
        parts.append(f"{stats.n_predicted} tokens")
    if stats.tokens_per_second is not None:
        parts.append(f"{stats.tokens_per_second:.1f} tokens/s")
    if stats.first_seconds is not None:
        parts.append(f"first after {stats.first_seconds:.2f} s")
    if stats.cut:
        parts.append("cut at the token limit")
    return ", ".join(parts)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 200 else f"{line[:199]}…"
