"""Prompt input: line editing with history, completion and multi-line text."""

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
from llamado.commands.chat.session import CHAT_COMMANDS
from llamado.terminal.text import print

_FENCE = '"""'


def history_file() -> Path:
    """Return the history file, in the state folder of the XDG specification."""
    folder = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(folder).expanduser() / "llamado" / "run_history"


class PromptReader:
    """Reads questions and commands from the terminal."""

    def __init__(self, history: Path, *, input: Input | None = None, output: Output | None = None) -> None:
        self._session: PromptSession[str] = PromptSession(
            history=_history(history),
            multiline=True,
            key_bindings=_bindings(),
            completer=CommandCompleter(),
            complete_while_typing=False,
            prompt_continuation="  ",
            input=input,
            # Answers may go to a file; the prompt goes to the terminal.
            output=output or create_output(sys.stdout if sys.stdout.isatty() else sys.stderr),
        )

    def read(self) -> str | None:
        """Read the next input without surrounding spaces; None at the end (Ctrl-D). Raises KeyboardInterrupt."""
        try:
            text = self._session.prompt(ANSI("\x1b[1m>\x1b[0m "))
        except EOFError:
            return None
        return unfenced(text.strip())


def is_open(text: str) -> bool:
    """Return True if a text starts with three quotes that are not closed yet."""
    text = text.strip()
    return text.startswith(_FENCE) and not (len(text) >= 2 * len(_FENCE) and text.endswith(_FENCE))


def unfenced(text: str) -> str:
    """Remove three quotes on both sides of a text."""
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
        print(f"llamado: no history is kept: {path}: {error.strerror}", file=sys.stderr)
        return InMemoryHistory()
    return FileHistory(str(path))


class CommandCompleter(Completer):
    """Completes commands, parameters of `/set`, and files of `/save` and `/load`."""

    def __init__(self) -> None:
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        if not text.startswith("/") or "\n" in text:
            return
        word, space, rest = text.partition(" ")
        if not space:
            for command in CHAT_COMMANDS:
                if command.name.startswith(word):
                    yield Completion(command.name, start_position=-len(word), display_meta=command.help)
        elif word == "/set" and " " not in rest:
            for row in SETTABLE.values():
                if row.name.startswith(rest):
                    yield Completion(row.name, start_position=-len(rest), display_meta=row.help)
        elif word in ("/save", "/load"):
            yield from self._paths.get_completions(Document(rest), complete_event)
