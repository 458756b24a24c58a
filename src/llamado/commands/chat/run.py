"""The command `llamado run`: one answer, or a conversation."""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from llamado.commands.options import engine_options, model_source, sampling_defaults
from llamado.engine.options import ModelSource, as_share
from llamado.engine.parameters import PARAMETERS
from llamado.flags import FlagError, ParsedFlags
from llamado.http.monitoring import logs
from llamado.terminal.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llamado.commands.chat.attachments import Part
    from llamado.commands.chat.backend import ChatBackend
    from llamado.commands.chat.screen import Screen

_PATIENCE = 1.0
"""Seconds to wait for standard input before printing a hint."""


def run_chat(flags: ParsedFlags, spec: str | None) -> int:
    """Answer once, or chat until the user quits, and return the exit code. Raises LlamadoError, KeyboardInterrupt."""
    logs.configure(verbosity=9 if flags.verbose else min(flags.log_verbosity, 2))
    question = _question(flags)
    from llamado.commands.chat.attachments import with_attachments
    from llamado.commands.chat.conversation import Chat

    attached = _attached(flags)

    backend = _remote(flags, spec) if flags.url else _here(flags, spec)
    try:
        chat = Chat(system=flags.system_prompt or "", settings=_given(flags))
        if question is not None:
            return _answer_once(backend, chat, with_attachments(question, attached), markdown=flags.markdown)
        _converse(backend, chat, attached, markdown=flags.markdown)
        return 0
    finally:
        backend.close()


def _attached(flags: ParsedFlags) -> list[Part]:
    """Return the pictures and sounds of `--image` and `--audio`. Raises MediaError."""
    from llamado.commands.chat.attachments import attachment
    from llamado.commands.split_options import listed
    from llamado.media.media import MediaKind

    given = ((MediaKind.IMAGE, flags.image), (MediaKind.AUDIO, flags.audio))
    return [attachment(path, kind) for kind, paths in given for path in listed(paths or [])]


def _answer_once(backend: ChatBackend, chat: Any, question: str | list[Part], *, markdown: bool) -> int:
    shown = screen_of(markdown=markdown).show(backend.answer(chat.with_question(question), chat.settings))
    return 0 if shown.stats is not None else 128 + signal.SIGINT


def _converse(backend: ChatBackend, chat: Any, attached: list[Part], *, markdown: bool) -> None:
    from llamado.commands.chat.keyboard import PromptReader, history_file
    from llamado.commands.chat.session import ChatSession

    dim, plain = ("\x1b[2m", "\x1b[0m") if sys.stderr.isatty() else ("", "")

    def say(line: str) -> None:
        sys.stdout.flush()
        print(f"{dim}{printable(line)}{plain}", file=sys.stderr, flush=True)

    session, reader = ChatSession(backend, chat, screen_of(markdown=markdown), say), PromptReader(history_file())
    session.attach(attached)
    say(f"{backend.name}: /help shows the commands, Ctrl-C stops an answer, Ctrl-D quits")
    for note in backend.notes:
        say(note)
    while not session.is_over:
        try:
            text = reader.read()
            if text is None:
                return
            if text:
                session.handle(text)
        except KeyboardInterrupt:
            say("Ctrl-D or /exit quits")


def screen_of(*, markdown: bool) -> Screen:
    """Return the screen for standard output. Markdown needs a terminal that can move the cursor."""
    if not markdown or not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        from llamado.commands.chat.screen import PlainScreen

        return PlainScreen(sys.stdout)
    # Imported late, because rich takes longest to import.
    from llamado.commands.chat.markdown import MarkdownScreen
    from llamado.terminal.console import Console

    return MarkdownScreen(Console(highlight=False))


def _given(flags: ParsedFlags) -> dict[str, Any]:
    """Return request parameters: all given flags for a server; only the length for a local model."""
    if not flags.url:
        return {"n_predict": flags.n_predict} if "n_predict" in flags.given else {}
    defaults = sampling_defaults(flags)
    values = {row.name: getattr(defaults.sampling, row.name, getattr(defaults, row.name, None)) for row in PARAMETERS}
    samplers = {"samplers"} if flags.sampler_seq else set()
    return {name: value for name, value in values.items() if name in flags.given | samplers and value is not None}


def _remote(flags: ParsedFlags, spec: str | None) -> ChatBackend:
    from llamado.commands.chat.remote import RemoteBackend

    names = [*([spec] if spec else []), *(flags.model or [])]
    if len(names) > 1:
        raise FlagError(f"--url: one model is expected, got {len(names)}: {', '.join(names)}")
    return RemoteBackend(flags.url, names[0] if names else None, flags.api_key)


def _here(flags: ParsedFlags, spec: str | None) -> ChatBackend:
    from llamado.commands.chat.local import LocalBackend
    from llamado.engine.loaded_model import LoadedModel

    if spec is None and not flags.model and not flags.hf_repo:
        spec = "smollm2"
    source = ModelSource(spec=spec) if spec is not None else model_source(flags)
    options, defaults = engine_options(flags, n_slots=1), sampling_defaults(flags)
    shown = ""

    def report(share: float, what: str) -> None:
        nonlocal shown
        line = f"{what} {share:.0%}"
        if sys.stderr.isatty() and line != shown:
            # The cursor returns to the start of the line, so that a log line overwrites it.
            print(f"\x1b[K{line}\r", end="", file=sys.stderr, flush=True)
            shown = line

    try:
        llama = LoadedModel.load(source, options, defaults=defaults, progress=as_share(report))
        return LocalBackend(llama, os.path.basename(source.name))
    finally:
        if shown:
            print("\x1b[K", end="", file=sys.stderr, flush=True)


def _question(flags: ParsedFlags) -> str | None:
    """Return the prompt to answer once, or None to chat.

    The prompt is `--prompt`, followed by standard input if that is a file or pipe. Without `--prompt`, or if it is "-",
    the prompt is standard input, unless that is a terminal. Raises FlagError.
    """
    given: str | None = flags.prompt
    if given is None and sys.stdin.isatty():
        return None
    asked = given is not None and given != "-"
    text = _standard_input() if not asked or _is_piped() else ""
    if not asked and not text:
        raise FlagError("no prompt: standard input is empty; give -p TEXT, or run in a terminal to chat")
    return f"{given}\n\n{text}" if asked and text else given if asked else text


def _is_piped() -> bool:
    """Return True if standard input is a file or pipe, not a terminal, a device, or closed."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISREG(mode) or stat.S_ISFIFO(mode)


def _standard_input() -> str:
    try:
        with _hint_after_delay():
            return sys.stdin.read().strip()
    except UnicodeDecodeError as error:
        raise FlagError(f"standard input is not UTF-8: {error}") from None


@contextmanager
def _hint_after_delay() -> Iterator[None]:
    """Print a hint while a pipe stays open without data, which looks like a slow model."""
    hint = "llamado: waiting for the end of standard input (</dev/null skips it)"
    timer = threading.Timer(_PATIENCE, lambda: print(hint, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
