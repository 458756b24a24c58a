"""Recursive folder listings, without files that git ignores and without junk folders."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from llamado.tools.errors import OutsideFolder
from llamado.tools.folder import Folder
from llamado.tools.ignore import IgnoreRules, rules_below, rules_of_repository

SECONDS = 15.0
"""Time limit of one listing."""
MOST_ENTRIES = 200_000
"""Most entries of one listing."""
# Folders that are listed but not entered, because they can be huge (tools/server/server-tools.cpp, b11434).
JUNK = frozenset({
    ".git", ".svn", ".hg", "node_modules", "__pycache__", ".venv", "venv", "dist", "build", "target", ".cache", ".idea",
    ".vscode",
})  # fmt: skip


class Entry(NamedTuple):
    """A file or a folder; `path` is relative to the listed folder."""

    path: str
    is_dir: bool


@dataclass
class FolderListing:
    """Entries of a folder. `cut`: some are missing, because of a limit or an unreadable folder."""

    entries: list[Entry] = field(default_factory=list)
    cut: bool = False


def list_folder(folder: Folder, base: str, depth: int, kind: str) -> FolderListing:
    """List files (`file`), folders (`dir`) or both (`all`) below a folder.

    Files of a git repository are listed in the order of their paths, without ignored ones. Otherwise the folders in
    `JUNK` are not entered. `depth`: levels to descend; 0: no limit.
    """
    rules = rules_of_repository(folder, base) if kind == "file" else None
    found = FolderListing()
    deadline = time.monotonic() + SECONDS
    todo: list[tuple[str, int, IgnoreRules | None]] = [("", 0, rules)]
    while todo:
        way, level, rules = todo.pop()
        path = os.path.join(base, way) if way else base
        inner: list[tuple[str, int, IgnoreRules | None]] = []
        if rules is not None and way:
            rules = rules_below(folder, path, rules)
        try:
            fd = folder.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except (OSError, OutsideFolder):
            found.cut = True
            continue
        try:
            with os.scandir(fd) as entries:
                for entry in sorted(entries, key=lambda entry: entry.name):
                    if time.monotonic() >= deadline or len(found.entries) >= MOST_ENTRIES:
                        found.cut = True
                        return found
                    what = _kind(folder, path, entry, rules)
                    if not what:
                        continue
                    name = f"{way}/{entry.name}" if way else entry.name
                    if kind in (what, "all"):
                        found.entries.append(Entry(name, what == "dir"))
                    gone_into = rules is not None or entry.name not in JUNK
                    if what == "dir" and gone_into and not entry.is_symlink() and (not depth or level + 1 < depth):
                        inner.append((name, level + 1, rules))
        except OSError:
            found.cut = True
        finally:
            os.close(fd)
        todo += inner[::-1]
    if rules is not None:
        found.entries.sort(key=lambda entry: os.fsencode(entry.path))
    return found


def _kind(folder: Folder, path: str, entry: os.DirEntry[str], rules: IgnoreRules | None) -> str:
    """Return `file`, `dir`, or "" for an entry that is not listed. In a repository links are files, as in git."""
    if entry.is_symlink():
        what = "file" if rules is not None else folder.kind(os.path.join(path, entry.name))
    elif entry.is_dir(follow_symlinks=False):
        what = "dir"
    else:
        what = "file" if entry.is_file(follow_symlinks=False) else ""
    if rules is not None and (entry.name == ".git" or rules.ignores(os.path.join(path, entry.name), what == "dir")):
        return ""
    return what
