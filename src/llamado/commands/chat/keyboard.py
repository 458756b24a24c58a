"""What a user types: lines with history and completion, several of them where they belong together."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import ANSI
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import Output
from prompt_toolkit.output.defaults import create_output

from llamado.commands.chat.conversation import SETTABLE
from llamado.commands.chat.talk import ORDERS
from llamado.terminal.text import print

_FENCE = '"""'


def history_file() -> Path:
    """Where questions are kept between sessions: the folder for state of the XDG specification."""
    folder = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(folder).expanduser() / "llamado" / "run_history"


class Keyboard:
    """Asks for what is said next."""

    def __init__(self, history: Path, *, input: Input | None = None, output: Output | None = None) -> None:
        self._session: PromptSession[str] = PromptSession(
            history=_history(history),
            multiline=True,
            key_bindings=_bindings(),
            completer=OrderCompleter(),
            complete_while_typing=False,
            prompt_continuation="  ",
            input=input,
            # Answers may go to a file: the prompt does not.
            output=output or create_output(sys.stdout if sys.stdout.isatty() else sys.stderr),
        )

    def ask(self) -> str | None:
        """What the user says next, without spaces around it; None: that was all. Raises KeyboardInterrupt."""
        try:
            text = self._session.prompt(ANSI("\x1b[1m>\x1b[0m "))
        except EOFError:
            return None
        return unfenced(text.strip())


def is_open(text: str) -> bool:
    """Whether a text has begun with three quotes and has none yet that end it."""
    text = text.strip()
    return text.startswith(_FENCE) and not (len(text) >= 2 * len(_FENCE) and text.endswith(_FENCE))


def unfenced(text: str) -> str:
    """A text without three quotes on either side."""
    if text.startswith(_FENCE) and not is_open(text):
        return text[len(_FENCE) : -len(_FENCE)].strip("\n")
    return text


def _bindings() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_open(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")  # Alt-Enter
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _history(path: Path) -> History:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
        path.chmod(0o600)
    except OSError as error:
        print(f"llamado: questions are not kept: {path}: {error.strerror}", file=sys.stderr)
        return InMemoryHistory()
    return FileHistory(str(path))


class OrderCompleter(Completer):
    """Commands, parameters behind `/set`, files behind `/save` and `/load`."""

    def __init__(self) -> None:
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        if not text.startswith("/") or "\n" in text:
            return
        word, space, rest = text.partition(" ")
        if not space:
            for order in ORDERS:
                if order.name.startswith(word):
                    yield Completion(order.name, start_position=-len(word), display_meta=order.help)
        elif word == "/set" and " " not in rest:
            for row in SETTABLE.values():
                if row.name.startswith(rest):
                    yield Completion(row.name, start_position=-len(rest), display_meta=row.help)
        elif word in ("/save", "/load"):
            yield from self._paths.get_completions(Document(rest), complete_event)
