"""What lies below a folder: as git knows it, or as a walk finds it; and patterns of names."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import regex  # type: ignore[import-untyped]

from llamado.tools.commands import Commands
from llamado.tools.errors import Outside
from llamado.tools.folder import Folder

SECONDS = 15.0
"""Time for one list."""
GIT_BYTES = 8 << 20
"""Output of git that is read."""
# Folders that are shown but not gone into: they can be enormous (tools/server/server-tools.cpp, b11434).
JUNK = frozenset({
    ".git", ".svn", ".hg", "node_modules", "__pycache__", ".venv", "venv", "dist", "build", "target", ".cache", ".idea",
    ".vscode",
})  # fmt: skip
# Only names are asked for: nothing that stands in a repository's own settings is run, and nothing is fetched.
GIT = ("git", "-c", "core.fsmonitor=false", "-c", "core.untrackedCache=false", "-c", "core.hooksPath=/dev/null")
GIT_ENVIRONMENT = {
    "GIT_ALLOW_PROTOCOL": "none",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
}
GIT_FILES = ("ls-files", "--cached", "--others", "--exclude-standard", "-z")


class Entry(NamedTuple):
    """A file or a folder; `path` begins at the folder that was listed."""

    path: str
    is_dir: bool


@dataclass
class Listing:
    """`cut`: the time was over, or there was a folder that could not be read."""

    entries: list[Entry] = field(default_factory=list)
    cut: bool = False


def files_of_git(output: bytes, depth: int) -> list[Entry]:
    """What `git ls-files -z` said. `depth`: folders to go down; 0: any number."""
    names = [name.decode("utf-8", "surrogateescape") for name in output.split(b"\0") if name]
    return [Entry(name, False) for name in names if not depth or name.count("/") < depth]


def list_folder(folder: Folder, commands: Commands, base: str, depth: int, kind: str) -> Listing:
    """Files (`file`), folders (`dir`) or both (`all`) below a folder, in the order of their names."""
    if kind == "file":
        fd = folder.open(base, os.O_RDONLY)
        try:
            # The folder that was opened, whatever its path is by now.
            here = f"/proc/self/fd/{fd}" if os.path.isdir("/proc/self/fd") else base
            ran = commands.run(
                [*GIT, *GIT_FILES], limit=GIT_BYTES, seconds=SECONDS, cwd=here, merged=False, env=GIT_ENVIRONMENT
            )
        finally:
            os.close(fd)
        if ran.ok:
            return Listing(files_of_git(ran.output, depth), ran.cut)
    return _walk(folder, base, depth, kind)


def _walk(folder: Folder, base: str, depth: int, kind: str) -> Listing:
    found = Listing()
    deadline = time.monotonic() + SECONDS
    todo = [("", 0)]
    while todo:
        way, level = todo.pop()
        inner: list[tuple[str, int]] = []
        try:
            fd = folder.open(os.path.join(base, way) if way else base, os.O_RDONLY | os.O_DIRECTORY)
        except (OSError, Outside):
            found.cut = True
            continue
        try:
            with os.scandir(fd) as entries:
                for entry in sorted(entries, key=lambda entry: entry.name):
                    if time.monotonic() >= deadline:
                        found.cut = True
                        return found
                    path = f"{way}/{entry.name}" if way else entry.name
                    is_link = entry.is_symlink()
                    what = folder.kind(os.path.join(base, path)) if is_link else _kind(entry)
                    if what and kind in (what, "all"):
                        found.entries.append(Entry(path, what == "dir"))
                    if what == "dir" and not is_link and entry.name not in JUNK and (not depth or level + 1 < depth):
                        inner.append((path, level + 1))
        except OSError:
            found.cut = True
        finally:
            os.close(fd)
        todo += inner[::-1]
    return found


def _kind(entry: os.DirEntry[str]) -> str:
    if entry.is_dir(follow_symlinks=False):
        return "dir"
    return "file" if entry.is_file(follow_symlinks=False) else ""


def matches(pattern: str, path: str) -> bool:
    """Whether a pattern fits a path; one without a slash fits the last name of it, wherever that lies."""
    if "/" not in pattern:
        path = path.rpartition("/")[2]
    elif pattern != "**" and not pattern.startswith(("**/", "/")):
        pattern = "**/" + pattern
    return _compiled(pattern).fullmatch(path) is not None


@lru_cache(maxsize=64)
def _compiled(pattern: str) -> regex.Pattern[str]:
    """`*` is anything within a name, `**` anything, `?` a character of a name, `[a-z]` one of several, `[!a]` none."""
    parts, i = [], 0
    while i < len(pattern):
        c = pattern[i]
        if c == "*":
            end = i + 1
            while pattern[end : end + 1] == "*":
                end += 1
            parts.append(".*" if end > i + 1 else "[^/]*")
            i = end
            continue
        if c == "?":
            parts.append("[^/]")
        elif c == "[" and (end := pattern.find("]", i + (2 if pattern[i + 1 : i + 2] in ("]", "-") else 1))) > 0:
            parts.append(_class(pattern[i + 1 : end]))
            i = end
        else:
            parts.append(regex.escape(c))
        i += 1
    return regex.compile("".join(parts), regex.DOTALL)


def _class(inside: str) -> str:
    negated = inside.startswith("!")
    chosen = inside[negated:]
    first = "\\-" if chosen.startswith("-") else regex.escape(chosen[:1])
    rest = "".join(c if c == "-" else regex.escape(c) for c in chosen[1:])
    if not chosen:
        return "(?!)"
    found = f"[{'^' if negated else ''}{first}{rest}]"
    try:
        regex.compile(found)
    except regex.error:  # a range the wrong way round
        return "(?!)"
    return found
