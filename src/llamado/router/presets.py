"""INI presets of models, and flags as mergeable options.

The file format is llama-server's (`tools/server/README.md`, "Model presets"; b11434): sections name models, `[*]`
applies to all, keys are flags without dashes or environment names.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path

from llamado.errors import LlamadoError
from llamado.flags import FLAGS, Flag, Kind, ParsedFlags
from llamado.processes.secret_values import child_environment, secret

log = logging.getLogger("llamado.router")

Options = dict[str, tuple[str, ...]]
"""Values as text by `Flag.key`; switches are "true" or "false"."""


class PresetError(LlamadoError):
    """A preset file cannot be read."""


PRESET_ONLY = ("load-on-startup", "stop-timeout", "dedup-cache-models")
"""Preset keys that are not flags of a model's server."""
DEFAULT_STOP_TIMEOUT = 10.0
_PRESET_ENV = {
    "__PRESET_LOAD_ON_STARTUP": "load-on-startup",
    "__PRESET_STOP_TIMEOUT": "stop-timeout",
    "__PRESET_DEDUP_CACHE_MODELS": "dedup-cache-models",
}
TRUE = frozenset({"on", "enabled", "true", "1", "yes"})

# Flags that the router sets for a model's process: address, name, access, log format.
_CONTROLLED = (
    "alias allowed_hosts api_key api_key_file api_prefix cors cors_credentials cors_headers cors_methods "
    "cors_origins hf_token host list_devices llama_swap log_colors log_disable log_file log_format log_jsonl "
    "log_prefix log_timestamps max_connections models_autoload models_dir models_max models_memory models_preset path "
    "port reuse_port ssl_cert_file ssl_key_file tags chats tools tools_folder tools_runtime mcp_servers_config "
    "mcp_servers_json agent ui_mcp_proxy"
)
CONTROLLED = frozenset(_CONTROLLED.split())
WHICH = frozenset({"model", "model_url", "hf_repo", "hf_file"})
"""Flags that select a model. The router's own values are never inherited."""
_PROJECTOR = frozenset({"mmproj", "mmproj_url"})
"""Flags that select a model's projector; not inherited either."""


def _table() -> tuple[dict[str, Flag], dict[str, tuple[Flag, bool]]]:
    by_key: dict[str, Flag] = {}
    by_name: dict[str, tuple[Flag, bool]] = {}
    for flag in FLAGS:
        if "serve" not in flag.commands:
            continue
        by_key.setdefault(flag.key, flag)
        for names, negative in ((flag.names, False), (flag.off_names, True)):
            for name in names:
                by_name.setdefault(name.lstrip("-"), (flag, negative))
        for env in flag.env:
            by_name.setdefault(env, (flag, False))
    return by_key, by_name


_BY_KEY, _BY_NAME = _table()


def environment() -> dict[str, str]:
    """Return the environment of model processes, without secrets and the router's own settings.

    Log timestamps are off: the router adds them.
    """
    own = {env for key in CONTROLLED | WHICH | _PROJECTOR if key in _BY_KEY for env in _BY_KEY[key].env}
    own |= {env.replace("LLAMA_ARG_", "LLAMA_ARG_NO_", 1) for env in own}
    return {name: value for name, value in child_environment().items() if name not in own} | {
        "LLAMA_ARG_LOG_TIMESTAMPS": "0"
    }


def secrets(options: Options) -> dict[str, str]:
    """Return the secrets for a model's environment: the hub token and secret options."""
    token = secret("HF_TOKEN")
    found = {"HF_TOKEN": token} if token else {}
    for key, texts in options.items():
        if _BY_KEY[key].secret:
            found[_BY_KEY[key].env[0]] = ",".join(texts)
    return found


def command_line(flags: ParsedFlags) -> Options:
    """Return the router's flags that its models inherit, except those they get from the environment."""
    options: Options = {}
    for key in flags.given - CONTROLLED - WHICH - _PROJECTOR:
        flag = _BY_KEY.get(key)
        if flag is None or flag.kind is not Kind.USED:
            continue
        value = flags.values[key]
        if isinstance(value, list):
            texts = tuple(str(v) for v in value)
        elif isinstance(value, bool):
            texts = ("true" if value else "false",)
        else:
            texts = (str(value),)
        inherited = [os.environ[env] for env in flag.env if env in os.environ]
        if inherited and (inherited[0] == texts[-1] or (flag.type == "bool" and is_true(inherited[0]) == value)):
            continue
        options[key] = texts
    return options


def is_true(text: str) -> bool:
    """Return True if a value turns a switch on."""
    return text.strip().lower() in TRUE


def arguments(options: Options) -> list[str]:
    """Return options as arguments of `llamado serve`, in the order of the flags table; without secrets."""
    given: list[str] = []
    for key, flag in _BY_KEY.items():
        if key not in options or flag.secret:
            continue
        name = _long(flag.names)
        if flag.type == "bool":
            if is_true(options[key][-1]):
                given.append(name)
            elif flag.off_names:
                given.append(_long(flag.off_names))
            continue
        for text in options[key]:
            given += argument(name, text)
    return given


def argument(name: str, text: str) -> list[str]:
    """Return a flag with its value. A value like -1 needs `=`, or it would be parsed as a flag."""
    return [f"{name}={text}"] if text.startswith("-") else [name, text]


def _long(names: tuple[str, ...]) -> str:
    return next((name for name in names if name.startswith("--")), names[0])


def ini_text(name: str, options: Options, extra: Mapping[str, str]) -> str:
    """Return options as a preset section; without secrets."""
    lines = [f"[{name}]"]
    for key, flag in _BY_KEY.items():
        for text in options.get(key, ()) if not flag.secret else ():
            escaped = text.replace("\n", "\\\n")
            lines.append(f"{_long(flag.names).lstrip('-')} = {escaped}")
    lines += [f"{key} = {value}" for key, value in extra.items()]
    return "\n".join([*lines, "", ""])


def read_presets(path: str | Path) -> dict[str, tuple[Options, dict[str, str]]]:
    """Read a preset file: by section, the flags and the keys of `PRESET_ONLY`; includes `*`. Raises PresetError."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PresetError(f"--models-preset {path}: {error}") from None
    sections: dict[str, tuple[Options, dict[str, str]]] = {}
    for name, values in _parse(text, path).items():
        options: Options = {}
        extra: dict[str, str] = {}
        for key, value in values.items():
            if key == "version":
                continue
            plain = _PRESET_ENV.get(key, key)
            if plain in PRESET_ONLY:
                extra[plain] = value
                continue
            found = _BY_NAME.get(key) or _BY_NAME.get(key.replace("_", "-"))
            if found is None:
                log.warning("%s [%s]: unknown option %r ignored", path, name, key)
                continue
            flag, negative = found
            if flag.type == "bool" or negative:
                value = "true" if is_true(value) != negative else "false"
            options[flag.key] = (value,)
        if name == "default" and not options and not extra:
            continue
        sections[name] = (options, extra)
    return sections


_HEADER = re.compile(r"\[[ \t]*([^\]]+?)[ \t]*\]")
_ENTRY = re.compile(r"([a-zA-Z_][a-zA-Z0-9_.-]*)[ \t]*=[ \t]*(.*)")


def _parse(text: str, path: str | Path) -> dict[str, dict[str, str]]:
    """Parse an INI text. A later section replaces an earlier one of the same name; `;` and `#` start comments.

    A section with a malformed line is ignored, so that the other models are served.
    """
    sections: dict[str, dict[str, str]] = {}
    bad: set[str] = set()
    current = "default"
    for number, line in enumerate(re.split(r"\r\n|\n|\r", text), 1):
        line = re.split("[;#]", line, maxsplit=1)[0].rstrip(" \t")
        if not line.strip(" \t"):
            continue
        if header := _HEADER.fullmatch(line):
            current = canonical(header[1])
            sections[current] = {}
            bad.discard(current)
        elif entry := _ENTRY.fullmatch(line):
            sections.setdefault(current, {})[entry[1]] = entry[2]
        else:
            bad.add(current)
            message = "%s, line %d: expected [NAME] or KEY = VALUE, got %r; [%s] is ignored"
            log.error(message, path, number, line[:80], current)
    return {name: values for name, values in sections.items() if name not in bad}


def canonical(name: str) -> str:
    """Return a model name with the quantization after its last colon in upper case, as in the hub's file names."""
    repo, colon, tag = name.rpartition(":")
    if not colon:
        return name
    found = re.search(r"[-.]([A-Z0-9_]+)$", tag, re.IGNORECASE)
    return f"{repo}:{(found[1] if found else tag).upper()}"


def stop_timeout(name: str, extra: Mapping[str, str]) -> float:
    """Return the seconds between SIGTERM and SIGKILL."""
    text = extra.get("stop-timeout")
    if text is None:
        return DEFAULT_STOP_TIMEOUT
    try:
        return max(0.0, float(int(text)))
    except ValueError:
        log.warning("[%s]: stop-timeout: expected seconds, got %r; using %g", name, text, DEFAULT_STOP_TIMEOUT)
        return DEFAULT_STOP_TIMEOUT


def is_enabled(key: str, extra: Mapping[str, str]) -> bool:
    """Return True if a preset-only switch is on."""
    return is_true(extra.get(key, ""))
