"""`llamado run`: from flags to one answer, or to a conversation."""

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
from llamado.flags import FlagError, Parsed
from llamado.http import logs
from llamado.terminal.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llamado.commands.chat.screen import Screen
    from llamado.commands.chat.speaker import Speaker

_PATIENCE = 1.0
"""Seconds after which whoever waits for standard input says so."""


def run_chat(flags: Parsed, spec: str | None) -> int:
    """Answer once, or converse until the user leaves; the exit code. Raises LlamadoError and KeyboardInterrupt."""
    logs.configure(verbosity=9 if flags.verbose else min(flags.log_verbosity, 2))
    question = _question(flags)
    from llamado.commands.chat.conversation import Chat

    speaker = _remote(flags, spec) if flags.url else _here(flags, spec)
    try:
        chat = Chat(system=flags.system_prompt or "", settings=_given(flags))
        if question is not None:
            return _answer_once(speaker, chat, question, markdown=flags.markdown)
        _converse(speaker, chat, markdown=flags.markdown)
        return 0
    finally:
        speaker.close()


def _answer_once(speaker: Speaker, chat: Any, question: str, *, markdown: bool) -> int:
    shown = screen_of(markdown=markdown).show(speaker.answer(chat.asking(question), chat.settings))
    return 0 if shown.figures is not None else 128 + signal.SIGINT


def _converse(speaker: Speaker, chat: Any, *, markdown: bool) -> None:
    from llamado.commands.chat.keyboard import Keyboard, history_file
    from llamado.commands.chat.talk import Talk

    dim, plain = ("\x1b[2m", "\x1b[0m") if sys.stderr.isatty() else ("", "")

    def say(line: str) -> None:
        sys.stdout.flush()
        print(f"{dim}{printable(line)}{plain}", file=sys.stderr, flush=True)

    talk, keyboard = Talk(speaker, chat, screen_of(markdown=markdown), say), Keyboard(history_file())
    say(f"{speaker.name}: /help shows the commands, Ctrl-C stops an answer, Ctrl-D leaves")
    for note in speaker.notes:
        say(note)
    while not talk.over:
        try:
            text = keyboard.ask()
            if text is None:
                return
            if text:
                talk.hear(text)
        except KeyboardInterrupt:
            say("Ctrl-D or /exit leaves")


def screen_of(*, markdown: bool) -> Screen:
    """The screen for standard output: Markdown is for terminals that can move the cursor."""
    if not markdown or not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        from llamado.commands.chat.screen import PlainScreen

        return PlainScreen(sys.stdout)
    # Drawing takes longer to import than everything else here.
    from llamado.commands.chat.markdown import MarkdownScreen
    from llamado.terminal.console import Console

    return MarkdownScreen(Console(highlight=False))


def _given(flags: Parsed) -> dict[str, Any]:
    """Parameters of each answer: for a server all that flags say, here the length, which has no default."""
    if not flags.url:
        return {"n_predict": flags.n_predict} if "n_predict" in flags.given else {}
    defaults = sampling_defaults(flags)
    values = {row.name: getattr(defaults.sampling, row.name, getattr(defaults, row.name, None)) for row in PARAMETERS}
    of_letters = {"samplers"} if flags.sampler_seq else set()
    return {name: value for name, value in values.items() if name in flags.given | of_letters and value is not None}


def _remote(flags: Parsed, spec: str | None) -> Speaker:
    from llamado.commands.chat.remote import HttpSpeaker

    names = [*([spec] if spec else []), *(flags.model or [])]
    if len(names) > 1:
        raise FlagError(f"--url: one model is expected, got {len(names)}: {', '.join(names)}")
    return HttpSpeaker(flags.url, names[0] if names else None, flags.api_key)


def _here(flags: Parsed, spec: str | None) -> Speaker:
    from llamado.commands.chat.here import EngineSpeaker
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
            # The cursor stays in front, so that a line of the log takes this one's place.
            print(f"\x1b[K{line}\r", end="", file=sys.stderr, flush=True)
            shown = line

    try:
        llama = LoadedModel.load(source, options, defaults=defaults, progress=as_share(report))
        return EngineSpeaker(llama, os.path.basename(source.name))
    finally:
        if shown:
            print("\x1b[K", end="", file=sys.stderr, flush=True)


def _question(flags: Parsed) -> str | None:
    """What is asked once; None: converse.

    `--prompt`, behind it what standard input holds where that is a file or a pipe; without it, or where it is "-", all
    of standard input, unless that is a terminal.
    """
    given: str | None = flags.prompt
    if given is None and sys.stdin.isatty():
        return None
    asked = given is not None and given != "-"
    text = _standard_input() if not asked or _is_piped() else ""
    if not asked and not text:
        raise FlagError("nothing to ask: standard input is empty; give -p TEXT, or run in a terminal to converse")
    return f"{given}\n\n{text}" if asked and text else given if asked else text


def _is_piped() -> bool:
    """Whether standard input is a file or a pipe that somebody named: not a terminal, a device, or closed."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISREG(mode) or stat.S_ISFIFO(mode)


def _standard_input() -> str:
    try:
        with _saying_that_it_waits():
            return sys.stdin.read().strip()
    except UnicodeDecodeError as error:
        raise FlagError(f"standard input is no UTF-8 text: {error}") from None


@contextmanager
def _saying_that_it_waits() -> Iterator[None]:
    """A pipe that nobody writes to looks as if the model were slow."""
    said = "llamado: waiting for the end of standard input (</dev/null leaves it out)"
    timer = threading.Timer(_PATIENCE, lambda: print(said, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
