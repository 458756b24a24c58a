"""Secrets of this process (keys and tokens), kept where no other process reads them.

Variables that hold secrets are declared by the table of flags. A command takes their values out of `os.environ` when it
starts, so no child inherits them; a child that needs one is given it by name. What the system shows of this process
(`/proc/PID/environ` and `cmdline`, `ps`) is overwritten on Linux.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

_variables: set[str] = set()
_values: dict[str, str] = {}


def declare(variables: Iterable[str]) -> None:
    """These environment variables hold secrets."""
    _variables.update(variables)


def keep(variable: str, value: str) -> None:
    """Keep a secret that is not from the environment under its variable's name."""
    _values[variable] = value


def secret(variable: str) -> str | None:
    """Return the secret of a variable, or None."""
    return _values.get(variable) or os.environ.get(variable) or None


def child_environment() -> dict[str, str]:
    """Return this process's environment without secrets: what every child inherits."""
    return {name: value for name, value in os.environ.items() if name not in _variables}


@contextmanager
def taken(arguments: Sequence[str], flags: Iterable[str]) -> Iterator[Mapping[str, str]]:
    """Take the secrets out of `os.environ` until the end of the block; yield the environment with them.

    `arguments`: this process's command line, in which `flags` are those that take a secret.
    """
    before = {name: os.environ.pop(name) for name in _variables if name in os.environ}
    _values.clear()
    _values.update(before)
    _overwrite({f"{name}=".encode(): value.encode() for name, value in before.items()}, _given(arguments, set(flags)))
    try:
        yield {**os.environ, **before}
    finally:
        _values.clear()
        os.environ.update(before)


def _given(arguments: Sequence[str], flags: set[str]) -> set[bytes]:
    """The arguments that hold a secret."""
    found: set[bytes] = set()
    for i, argument in enumerate(arguments):
        name, equals, _ = argument.partition("=")
        if name in flags:
            found.update(map(os.fsencode, [argument] if equals else arguments[i + 1 : i + 2]))
    return found


def _overwrite(variables: Mapping[bytes, bytes], arguments: set[bytes]) -> None:
    """Overwrite secrets in the memory that the kernel shows as this process's environment and command line."""
    if sys.platform != "linux" or not (variables or arguments):
        return
    try:
        fields = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return
    # Fields 48 to 51 of proc(5), of which the first two stand before the name's end.
    arg_start, arg_end, env_start, env_end = (int(field) for field in fields[45:49])
    for start, end, is_environment in ((arg_start, arg_end, False), (env_start, env_end, True)):
        at = start
        for text in ctypes.string_at(start, end - start).split(b"\0") if start else ():
            name, equals, value = text.partition(b"=")
            if is_environment and variables.get(name + equals) == value:
                ctypes.memset(at + len(name) + 1, ord("x"), len(value))
            if not is_environment and text in arguments:
                kept = len(name) + 1 if text.startswith(b"-") and equals else 0
                ctypes.memset(at + kept, ord("x"), len(text) - kept)
            at += len(text) + 1
