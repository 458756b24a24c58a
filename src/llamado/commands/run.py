"""Chat in the terminal: `llamado run`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llamado.commands.options import engine_options, model_source, sampling_defaults
from llamado.engine.options import ModelSource, as_share
from llamado.errors import LlamadoError
from llamado.flags import FlagError, Parsed
from llamado.http import logs

if TYPE_CHECKING:
    from llamado.engine.loaded_model import LoadedModel

HELP = "/exit leaves, /clear forgets the conversation; Ctrl-C stops an answer, or leaves at the prompt."


def _load(flags: Parsed, spec: str | None) -> LoadedModel:
    if spec is None and not flags.model and not flags.hf_repo:
        spec = "smollm2"
    source = ModelSource(spec=spec) if spec is not None else model_source(flags)
    shown = ""

    def report(share: float, what: str) -> None:
        nonlocal shown
        line = f"{what} {share:.0%}"
        if sys.stderr.isatty() and line != shown:
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
            shown = line

    try:
        from llamado.engine.loaded_model import LoadedModel

        options, defaults = engine_options(flags, n_slots=1), sampling_defaults(flags)
        return LoadedModel.load(source, options, defaults=defaults, progress=as_share(report))
    finally:
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _answer(llama: LoadedModel, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> str:
    """Stream one answer to stdout; an interrupt ends it and keeps what is there."""
    pieces: list[str] = []
    stream = llama.chat(messages, stream=True, **options)
    try:
        for piece in stream:
            pieces.append(piece)
            sys.stdout.write(piece)
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stdout.write(" …")
    sys.stdout.write("\n")
    return "".join(pieces)


def _prompt(flags: Parsed) -> str | None:
    """What is asked once: `--prompt`, or all of standard input where that is "-" or no terminal; None: converse."""
    given: str | None = flags.prompt
    if given != "-" and (given is not None or sys.stdin.isatty()):
        return given
    try:
        text = sys.stdin.read().strip()
    except UnicodeDecodeError as error:
        raise FlagError(f"standard input is no UTF-8 text: {error}") from None
    if not text:
        raise FlagError("nothing to ask: standard input is empty; give -p TEXT, or run in a terminal to converse")
    return text


def run_chat(flags: Parsed, spec: str | None) -> int:
    """Answer `--prompt` or standard input once, or converse until the user leaves. Raises LlamadoError."""
    logs.configure(verbosity=9 if flags.verbose else min(flags.log_verbosity, 2))
    system = [{"role": "system", "content": flags.system_prompt}] if flags.system_prompt else []
    options = {"n_predict": flags.n_predict} if "n_predict" in flags.given else {}
    prompt = _prompt(flags)
    with _load(flags, spec) as llama:
        if prompt is not None:
            _answer(llama, [*system, {"role": "user", "content": prompt}], options)
            return 0
        print(HELP, file=sys.stderr)
        import readline  # noqa: F401  (line editing for input())

        messages: list[dict[str, Any]] = list(system)
        while True:
            try:
                text = input("> ").strip()
            except (EOFError, KeyboardInterrupt):
                print(file=sys.stderr)
                return 0
            if not text:
                continue
            if text in ("/exit", "/quit", "/bye"):
                return 0
            if text == "/clear":
                messages = list(system)
                continue
            if text.startswith("/"):
                print(HELP, file=sys.stderr)
                continue
            messages.append({"role": "user", "content": text})
            try:
                messages.append({"role": "assistant", "content": _answer(llama, messages, options)})
            except LlamadoError as error:
                print(f"llamado: {error}", file=sys.stderr)
                messages.pop()
