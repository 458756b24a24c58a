"""git's ignore rules (`.gitignore`), read without running git: a repository's configuration is not trusted.

The syntax is that of gitignore(5). Tracked files that match a rule count as ignored.
"""

from __future__ import annotations

import os
import stat
from typing import NamedTuple

from llamado.patterns import MAX_LENGTH, LinearPattern, PatternError, quoted
from llamado.tools.errors import OutsideFolder
from llamado.tools.folder import Folder
from llamado.tools.globs import character_class

_FILE_BYTES = 64 << 10  # read from one file; the rest is ignored
MAX_SIZE = 50_000
"""Most instructions of all rules of a folder; further rules are ignored."""


class _Group(NamedTuple):
    """Consecutive rules with the same effect, as one pattern."""

    pattern: LinearPattern
    negated: bool
    only_folders: bool


class IgnoreRules:
    """The rules of one folder: its own file's, then those of the folders above."""

    def __init__(self, base: str, text: str, above: IgnoreRules | None = None) -> None:
        """`base`: the absolute path of the folder. `text`: a file of rules; the last matching rule decides."""
        self._prefix = base.rstrip("/") + "/"
        self._above = above
        self._groups: list[_Group] = []
        self._size: int = above._size if above else 0
        pending: list[str] = []
        kind = (False, False)
        for line in text.split("\n"):
            rule = _rule(line)
            if rule is None:
                continue
            if self._size > MAX_SIZE:
                break
            expression, *flags = rule
            if pending and (tuple(flags) != kind or sum(map(len, pending)) + len(expression) > MAX_LENGTH // 4):
                self._add(pending, *kind)
                pending = []
            kind = (flags[0], flags[1])
            pending.append(expression)
        if pending:
            self._add(pending, *kind)

    def _add(self, expressions: list[str], negated: bool, only_folders: bool) -> None:
        try:
            pattern = LinearPattern("|".join(expressions), dot_matches_newline=True)
        except PatternError:
            return  # git ignores malformed rules, too
        self._size += pattern.size
        if self._size <= MAX_SIZE:
            self._groups.append(_Group(pattern, negated, only_folders))

    def ignores(self, path: str, is_folder: bool) -> bool:
        """Return True if the rules exclude an entry of this folder or of one below. `path` is absolute."""
        relative = path.removeprefix(self._prefix).encode("utf-8", "replace")
        for group in reversed(self._groups):
            if (is_folder or not group.only_folders) and group.pattern.matches_all(relative):
                return not group.negated
        return self._above.ignores(path, is_folder) if self._above else False


def rules_of_repository(folder: Folder, base: str) -> IgnoreRules | None:
    """Return the rules for a folder in a git repository; None outside of one. `base` is absolute.

    Folders above the tools' folder are searched, too: a server may run inside a repository.
    """
    folders = [base]
    while not _exists(folder, os.path.join(folders[-1], ".git")):
        if folders[-1] == "/":
            return None
        folders.append(os.path.dirname(folders[-1]))
    rules = IgnoreRules(folders[-1], _text(folder, os.path.join(folders[-1], ".git", "info", "exclude")))
    for path in reversed(folders):
        rules = rules_below(folder, path, rules)
    return rules


def rules_below(folder: Folder, path: str, above: IgnoreRules) -> IgnoreRules:
    """Return a folder's rules, given those of the folder above."""
    text = _text(folder, os.path.join(path, ".gitignore"))
    return IgnoreRules(path, text, above) if text else above


def _exists(folder: Folder, path: str) -> bool:
    return folder.kind(path) != "" if folder.has(path) else os.path.exists(path)


def _text(folder: Folder, path: str) -> str:
    """Return the beginning of a regular file; "" if there is none. Follows links as far as the folder allows."""
    try:
        if folder.has(path):
            with folder.read(path) as file:
                data = file.read(_FILE_BYTES)
        else:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            with os.fdopen(fd, "rb") as file:
                data = file.read(_FILE_BYTES) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    except (OSError, OutsideFolder):
        return ""
    return data.decode("utf-8", "replace")


def _rule(line: str) -> tuple[str, bool, bool] | None:
    """Return a line's expression, True if it is negated, True if it is for folders only; None if it is no rule."""
    line = line.removesuffix("\r")
    while line.endswith(" ") and not line.endswith("\\ "):
        line = line[:-1]
    if not line or line.startswith("#"):
        return None
    negated = line.startswith("!")
    line = line[negated:]
    only_folders = line.endswith("/")
    line = line.removesuffix("/")
    if not line:
        return None
    anchored = "/" in line
    line = line.removeprefix("/")
    return ("" if anchored else "(?:.*/)?") + _expression(line), negated, only_folders


def _expression(glob: str) -> str:
    parts, i = [], 0
    while i < len(glob):
        c = glob[i]
        if glob.startswith("**/", i) and (i == 0 or glob[i - 1] == "/"):
            parts.append("(?:.*/)?")
            i += 3
            continue
        if c == "*":
            end = i + 1
            while glob[end : end + 1] == "*":
                end += 1
            whole = end == i + 2 and end == len(glob) and i > 0 and glob[i - 1] == "/"
            parts.append(".+" if whole else "[^/]*")
            i = end
            continue
        if c == "[" and (found := character_class(glob, i, "!^")):
            expression, i = found
            parts.append(expression)
        elif c == "?":
            parts.append("[^/]")
        else:
            if c == "\\" and i + 1 < len(glob):
                i += 1
            parts.append(quoted(glob[i]))
        i += 1
    return "".join(parts)
