"""A folder that paths cannot escape: not by `..`, not by links, not by links created during the access."""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO

from llamado.tools.errors import OutsideFolder, ToolFailed, ToolsError

_MOST_LINKS = 40  # as in Linux
_MOST_BYTES = 4096  # of a path, as in Linux
_MOST_NAMES = 100  # of a path: each may become a folder
_POSIX = hasattr(os, "O_NOFOLLOW") and os.open in os.supports_dir_fd and os.readlink in os.supports_dir_fd
if _POSIX:
    _CAREFUL = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # O_NONBLOCK: opening a pipe does not wait for its writer
    _ENTER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Errors for an unfollowed link: in general, if a folder is expected, and on some BSDs.
_IS_LINK = (errno.ELOOP, errno.ENOTDIR, errno.EMLINK)


def _replace_fd(here: int, there: int) -> int:
    os.close(here)
    return there


class Folder:
    """Files and folders below one folder. Paths are opened name by name, each relative to the one before it."""

    def __init__(self, path: str) -> None:
        """Raises ToolsError if the folder does not exist or the platform cannot confine paths."""
        if not _POSIX:
            raise ToolsError("the built-in tools need a system that opens files by folders (Linux, macOS): not Windows")
        self.path = os.path.realpath(path)
        self._given = os.path.abspath(path)
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ToolsError(f"folder of the tools: {path}: {error.strerror}") from None

    def close(self) -> None:
        """Close the folder; nothing can be opened any more."""
        os.close(self._fd)

    def absolute(self, path: str, cwd: str = "") -> str:
        """Return an absolute path without `~`, `.` and `..`. Raises ToolFailed."""
        if "\0" in path:
            raise ToolFailed("a path has no zero bytes")
        absolute = os.path.normpath(os.path.join(cwd or self.path, os.path.expanduser(path)))
        if len(os.fsencode(absolute)) > _MOST_BYTES or absolute.count("/") > _MOST_NAMES:
            raise ToolFailed(f"a path has at most {_MOST_BYTES} bytes and {_MOST_NAMES} names")
        return absolute

    def _names(self, absolute: str) -> list[str]:
        """Return the names of the path relative to this folder. Raises OutsideFolder."""
        for top in (self.path, self._given):
            if absolute == top or absolute.startswith(top.rstrip("/") + "/"):
                return [name for name in absolute[len(top) :].split("/") if name]
        raise OutsideFolder(f"{absolute} is outside of the folder of the tools, {self.path}")

    def has(self, absolute: str) -> bool:
        """Return True if the path begins with the folder's own."""
        try:
            self._names(absolute)
        except OutsideFolder:
            return False
        return True

    def open(self, absolute: str, flags: int, *, make_folders: bool = False) -> int:
        """Open a path and return its descriptor. Links must stay inside. Raises OSError and OutsideFolder.

        `make_folders`: create missing folders.
        """
        todo = self._names(absolute)[::-1]
        passed: list[str] = []  # names of the folders passed, none of them a link
        here = os.dup(self._fd)
        links = 0
        try:
            while todo:
                if len(passed) + len(todo) > _MOST_NAMES:
                    raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
                name = todo.pop()
                if name == "..":  # in a link's target
                    if not passed:
                        raise OutsideFolder(f"{absolute} leads out of the folder of the tools, {self.path}")
                    # Start again from the top: keeping all folders open would need a descriptor for each.
                    todo += passed[-2::-1]
                    passed.clear()
                    here = _replace_fd(here, os.dup(self._fd))
                    continue
                try:
                    if not todo:
                        return os.open(name, flags | _CAREFUL, 0o666, dir_fd=here)
                    here = _replace_fd(here, os.open(name, _ENTER, dir_fd=here))
                    passed.append(name)
                    continue
                except FileNotFoundError:
                    if not make_folders or not todo:
                        raise
                    os.mkdir(name, dir_fd=here)
                    todo.append(name)
                    continue
                except OSError as error:
                    if error.errno not in _IS_LINK:
                        raise
                    try:
                        target = os.readlink(name, dir_fd=here)
                    except OSError:
                        raise error from None  # not a link: a file is in the way
                links += 1
                if links > _MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                names = [one for one in target.split("/") if one not in ("", ".")]
                if target.startswith("/"):
                    names = self._names("/" + "/".join(names))
                    passed.clear()
                    here = _replace_fd(here, os.dup(self._fd))
                todo += names[::-1]
            # The folder itself, or one reached by the last `..` of a link.
            return os.open(".", flags & ~(os.O_CREAT | os.O_TRUNC) | os.O_CLOEXEC, dir_fd=here)
        finally:
            os.close(here)

    def kind(self, absolute: str) -> str:
        """Return `file`, `dir`, or "" for anything else, missing or outside."""
        try:
            fd = self.open(absolute, os.O_RDONLY)
        except (OSError, OutsideFolder):
            return ""
        try:
            mode = os.fstat(fd).st_mode
        finally:
            os.close(fd)
        return "dir" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else ""

    def read(self, absolute: str) -> BinaryIO:
        """Open a file for reading. Raises OSError and OutsideFolder."""
        return self._file(self.open(absolute, os.O_RDONLY), "rb")

    def write(self, absolute: str, data: bytes) -> None:
        """Create or overwrite a file; create missing folders. Raises OSError and OutsideFolder."""
        # Truncated only after it is known to be a regular file.
        flags = os.O_WRONLY | os.O_CREAT
        with self._file(self.open(absolute, flags, make_folders=True), "wb") as file:
            file.truncate(0)
            file.write(data)

    @staticmethod
    def _file(fd: int, mode: str) -> BinaryIO:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file")
        return os.fdopen(fd, mode)  # type: ignore[return-value]
