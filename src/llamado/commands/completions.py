"""`llamado completions`: scripts that complete commands, flags, values and model names in bash, zsh and fish.

The scripts are generated from the argument parsers. They run `llamado completions models` to list the models on this
machine.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from llamado.flags import FLAGS

_FILES = re.compile(r"FILE|gguf|yaml|LOG\b|PATH")
_FOLDERS = re.compile(r"FOLDER|\bDIR\b")
_WORDS = re.compile(r"[a-z0-9.+-]+(\|[a-z0-9.+-]+)+")


@dataclass(frozen=True, kw_only=True)
class Argument:
    """Value of a flag, or positional argument."""

    kind: str = "any"
    """any, models, files, folders or choices."""
    choices: tuple[str, ...] = ()
    name: str = "value"


@dataclass(frozen=True, kw_only=True)
class Option:
    """Flag with all its spellings. `value`: None if it takes none."""

    names: tuple[str, ...]
    help: str = ""
    value: Argument | None = None
    has_optional_value: bool = False
    is_repeatable: bool = False


@dataclass(frozen=True, kw_only=True)
class Command:
    """Command with its flags and arguments."""

    name: str
    help: str
    options: tuple[Option, ...]
    positionals: tuple[Argument, ...]
    """Positional arguments. The last one also describes all that follow."""


def command_of(name: str, help: str, parser: argparse.ArgumentParser) -> Command:
    """Describe a command from its parser and the table of flags."""
    choices = {spelling: flag.choices for flag in FLAGS if name in flag.commands for spelling in flag.names}
    options: list[Option] = []
    positionals: list[Argument] = []
    shown = {action.dest for action in parser._actions if action.help is not argparse.SUPPRESS}
    for action in parser._actions:
        if not action.option_strings:
            positionals.append(_value(action.metavar, tuple(action.choices or ())))
        elif action.dest in shown:
            values = tuple(action.choices or ()) or choices.get(action.option_strings[0], ())
            text = "" if action.help is argparse.SUPPRESS else (action.help or "").replace("%%", "%")
            options.append(
                Option(
                    names=tuple(action.option_strings),
                    help=text,
                    value=None if action.nargs == 0 else _value(action.metavar, values),
                    has_optional_value=action.nargs == "?",
                    is_repeatable=isinstance(action, argparse._AppendAction),
                )
            )
    return Command(name=name, help=help_line(help), options=tuple(options), positionals=tuple(positionals))


def help_line(text: str) -> str:
    """Shorten a text to one line of at most 100 characters."""
    line = " ".join(text.split())
    return line if len(line) <= 100 else f"{line[:99]}…"


def _value(metavar: str | tuple[str, ...] | None, choices: Iterable[str]) -> Argument:
    name = metavar if isinstance(metavar, str) else "value"
    found = tuple(str(one) for one in choices)
    if not found and _WORDS.fullmatch(name):
        found = tuple(name.split("|"))
    if found:
        return Argument(kind="choices", choices=found, name=name)
    if re.search(r"\bMODEL\b", name):
        return Argument(kind="models", name=name)
    kind = "folders" if _FOLDERS.search(name) else "files" if _FILES.search(name) else "any"
    return Argument(kind=kind, name=name)


def script(shell: str, commands: Sequence[Command]) -> str:
    """Return the script for a shell: bash, zsh or fish."""
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](commands)


# --- bash -----------------------------------------------------------------------------------------------------------
def _bash(commands: Sequence[Command]) -> str:
    cases = []
    for command in commands:
        names = sorted(name for option in command.options for name in option.names)
        by_reply: dict[str, list[str]] = {}
        for option in command.options:
            if option.value is not None:
                by_reply.setdefault(_bash_reply(option.value, option.has_optional_value), []).extend(option.names)
        inner = "".join(f"        {'|'.join(names)}) {reply} ;;\n" for reply, names in by_reply.items())
        positional = _bash_reply(command.positionals[0]) if command.positionals else "kind=files"
        cases.append(
            f"    {command.name})\n"
            f'      flags="{" ".join(names)}"\n'
            f'      case "$previous" in\n{inner}        *) {positional} ;;\n      esac ;;'
        )
    return f"""\
# llamado completions bash > ~/.local/share/bash-completion/completions/llamado
_llamado() {{
  local IFS=$'\\n' current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}"
  local at=$COMP_CWORD prefix="" flags="" kind="" words=""
  # bash also splits words at = and :, as in --flag=value and hf:user/model.
  if [ "$current" = "=" ]; then current=""; fi
  if [ "$previous" = "=" ]; then previous="${{COMP_WORDS[COMP_CWORD-2]}}"; fi
  if [ "$current" = ":" ] && [ "$at" -gt 2 ]; then
    prefix="$previous:"; current="$prefix"; previous="${{COMP_WORDS[at-2]}}"
  elif [ "$previous" = ":" ] && [ "$at" -gt 3 ]; then
    prefix="${{COMP_WORDS[at-2]}}:"; current="$prefix$current"; previous="${{COMP_WORDS[at-3]}}"
  fi
  COMPREPLY=()
  if [ "$at" -eq 1 ]; then
    words="{" ".join(command.name for command in commands)}"
    COMPREPLY=($(compgen -W "${{words// /$IFS}}" -- "$current"))
    return
  fi
  case "${{COMP_WORDS[1]}}" in
{chr(10).join(cases)}
  esac
  if [[ "$current" == -* ]]; then
    COMPREPLY=($(compgen -W "${{flags// /$IFS}}" -- "$current"))
    return
  fi
  [ -n "$words" ] && COMPREPLY=($(compgen -W "${{words// /$IFS}}" -- "$current"))
  [ "$kind" = models ] && COMPREPLY=($(compgen -W "$("$1" completions models 2>/dev/null)" -- "$current"))
  case "$kind" in
    models|files) COMPREPLY+=($(compgen -f -- "$current")) ;;
    folders) COMPREPLY+=($(compgen -d -- "$current")) ;;
  esac
  COMPREPLY=("${{COMPREPLY[@]#"$prefix"}}")
}}
complete -o filenames -F _llamado llamado
"""


def _bash_reply(value: Argument, is_optional: bool = False) -> str:
    if value.kind == "choices":
        return f'words="{" ".join(value.choices)}"'
    return ":" if value.kind == "any" and not is_optional else f"kind={'files' if is_optional else value.kind}"


# --- zsh ------------------------------------------------------------------------------------------------------------
def _zsh(commands: Sequence[Command]) -> str:
    listed = "\n".join(f"    {_quoted(f'{command.name}:{command.help}')}" for command in commands)
    cases = []
    for command in commands:
        specs = [_zsh_option(option) for option in command.options]
        for i, value in enumerate(command.positionals):
            position = "*" if i == len(command.positionals) - 1 else str(i + 1)
            specs.append(_quoted(f"{position}:{_zsh_text(value.name)}:{_zsh_action(value)}"))
        if not command.positionals:
            specs.append("'*:file:_files'")
        lines = " \\\n        ".join(specs)
        cases.append(f"    {command.name})\n      _arguments \\\n        {lines} ;;")
    return f"""\
#compdef llamado
# llamado completions zsh > "${{fpath[1]}}/_llamado"
_llamado_models() {{
  local -a models
  models=(${{(f)"$($_llamado_program completions models 2>/dev/null)"}})
  compadd -a models
  _files -g '*.gguf'
}}

_llamado() {{
  local -a commands
  local _llamado_program=$words[1]
  commands=(
{listed}
  )
  if (( CURRENT == 2 )); then
    _describe -t commands 'command' commands
    return
  fi
  local command=$words[2]
  shift words
  (( CURRENT-- ))
  case $command in
{chr(10).join(cases)}
  esac
}}

if [ "$funcstack[1]" = _llamado ]; then
  _llamado "$@"
else
  compdef _llamado llamado
fi
"""


def _zsh_option(option: Option) -> str:
    names = option.names
    value = ""
    if option.value is not None:
        colons = "::" if option.has_optional_value else ":"
        value = f"{colons}{_zsh_text(option.value.name)}:{_zsh_action(option.value)}"
    tail = _quoted(f"[{_zsh_text(help_line(option.help))}]{value}")
    if option.is_repeatable:
        return f"'*'{_braced(names)}{tail}"
    exclusive = _quoted(f"({' '.join(names)})") if len(names) > 1 else ""
    return f"{exclusive}{_braced(names)}{tail}"


def _braced(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{{{','.join(names)}}}"


def _zsh_action(value: Argument) -> str:
    actions = {"models": "_llamado_models", "files": "_files", "folders": "_files -/", "any": ""}
    return f"({' '.join(value.choices)})" if value.kind == "choices" else actions[value.kind] or " "


def _zsh_text(text: str) -> str:
    return re.sub(r"([\[\]:\\])", r"\\\1", text)


# --- fish -----------------------------------------------------------------------------------------------------------
def _fish(commands: Sequence[Command]) -> str:
    lines = [
        "# llamado completions fish > ~/.config/fish/completions/llamado.fish",
        "function __llamado_models",
        "    command llamado completions models 2>/dev/null",
        "end",
        "complete -c llamado -e",
        "complete -c llamado -n __fish_use_subcommand -f",
    ]
    for command in commands:
        lines.append(f"complete -c llamado -n __fish_use_subcommand -a {command.name} -d {_fish_text(command.help)}")
    for command in commands:
        here = f"complete -c llamado -n '__fish_seen_subcommand_from {command.name}'"
        for option in command.options:
            names = " ".join(_fish_name(name) for name in option.names)
            help = f" -d {_fish_text(help_line(option.help))}" if option.help else ""
            lines.append(f"{here} {names}{_fish_value(option)}{help}")
        if command.positionals:
            value = command.positionals[0]
            only = " -f" if value.kind == "choices" else ""
            words = " ".join(value.choices) if value.kind == "choices" else ""
            words = "(__llamado_models)" if value.kind == "models" else words
            if words:
                lines.append(f"{here}{only} -a {_fish_text(words)}")
    return "\n".join([*lines, ""])


def _fish_name(name: str) -> str:
    if name.startswith("--"):
        return f"-l {name[2:]}"
    return f"-s {name[1:]}" if len(name) == 2 else f"-o {name[1:]}"


def _fish_value(option: Option) -> str:
    value = option.value
    if value is None:
        return ""
    if value.kind == "choices":
        return f" -x -a {_fish_text(' '.join(value.choices))}"
    by_kind: Mapping[str, str] = {
        "models": " -r -a '(__llamado_models)'", "files": " -r -F", "folders": " -x -a '(__fish_complete_directories)'",
        "any": " -x",
    }  # fmt: skip
    return by_kind[value.kind]


def _fish_text(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _quoted(text: str) -> str:
    """Quote a text for bash and zsh."""
    escaped = text.replace("'", "'\\''")
    return f"'{escaped}'"
