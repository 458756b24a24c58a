"""A folder that no path leads out of: neither by `..`, nor by links, nor by links that are made while one looks."""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO

from llamado.tools.errors import Outside, ToolFailed, ToolsError

_MOST_LINKS = 40  # as Linux has it
_MOST_BYTES = 4096  # of a path, as Linux has it
_MOST_NAMES = 100  # of a path: each may become a folder
_POSIX = hasattr(os, "O_NOFOLLOW") and os.open in os.supports_dir_fd and os.readlink in os.supports_dir_fd
if _POSIX:
    _CAREFUL = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe that nobody writes to holds nobody up
    _ENTER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# A link that is not followed; the second where a folder was asked for, the third on some BSDs.
_IS_LINK = (errno.ELOOP, errno.ENOTDIR, errno.EMLINK)


def _moved(here: int, there: int) -> int:
    os.close(here)
    return there


class Folder:
    """Files and folders below one folder, opened name by name, each from the one before it."""

    def __init__(self, path: str) -> None:
        """Raises ToolsError where there is no such folder, or no way to hold paths inside of it."""
        if not _POSIX:
            raise ToolsError("the built-in tools need a system that opens files by folders (Linux, macOS): not Windows")
        self.path = os.path.realpath(path)
        self._given = os.path.abspath(path)
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ToolsError(f"folder of the tools: {path}: {error.strerror}") from None

    def close(self) -> None:
        """Nothing is opened any more."""
        os.close(self._fd)

    def absolute(self, path: str, cwd: str = "") -> str:
        """A path without `~`, `.` and `..`, from the root of the file system. Raises ToolFailed."""
        if "\0" in path:
            raise ToolFailed("a path has no zero bytes")
        absolute = os.path.normpath(os.path.join(cwd or self.path, os.path.expanduser(path)))
        if len(os.fsencode(absolute)) > _MOST_BYTES or absolute.count("/") > _MOST_NAMES:
            raise ToolFailed(f"a path has at most {_MOST_BYTES} bytes and {_MOST_NAMES} names")
        return absolute

    def _names(self, absolute: str) -> list[str]:
        """The way to a path, from this folder. Raises Outside."""
        for top in (self.path, self._given):
            if absolute == top or absolute.startswith(top.rstrip("/") + "/"):
                return [name for name in absolute[len(top) :].split("/") if name]
        raise Outside(f"{absolute} is outside of the folder of the tools, {self.path}")

    def has(self, absolute: str) -> bool:
        """Return True if the path begins with the folder's own."""
        try:
            self._names(absolute)
        except Outside:
            return False
        return True

    def open(self, absolute: str, flags: int, *, make_folders: bool = False) -> int:
        """A file descriptor. Links are followed as long as they stay inside. Raises OSError and Outside.

        `make_folders`: those on the way that are missing.
        """
        todo = self._names(absolute)[::-1]
        way: list[str] = []  # names of the folders gone through, none of which was a link
        here = os.dup(self._fd)
        links = 0
        try:
            while todo:
                if len(way) + len(todo) > _MOST_NAMES:
                    raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
                name = todo.pop()
                if name == "..":  # of a link's target
                    if not way:
                        raise Outside(f"{absolute} leads out of the folder of the tools, {self.path}")
                    # From the top again: holding all folders open would take a descriptor for each.
                    todo += way[-2::-1]
                    way.clear()
                    here = _moved(here, os.dup(self._fd))
                    continue
                try:
                    if not todo:
                        return os.open(name, flags | _CAREFUL, 0o666, dir_fd=here)
                    here = _moved(here, os.open(name, _ENTER, dir_fd=here))
                    way.append(name)
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
                        raise error from None  # no link: what stands in the way is a file
                links += 1
                if links > _MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                names = [one for one in target.split("/") if one not in ("", ".")]
                if target.startswith("/"):
                    names = self._names("/" + "/".join(names))
                    way.clear()
                    here = _moved(here, os.dup(self._fd))
                todo += names[::-1]
            # The folder itself, or one that a link's last `..` led to.
            return os.open(".", flags & ~(os.O_CREAT | os.O_TRUNC) | os.O_CLOEXEC, dir_fd=here)
        finally:
            os.close(here)

    def kind(self, absolute: str) -> str:
        """`file`, `dir`, or "" for what is neither, is not there, or is outside."""
        try:
            fd = self.open(absolute, os.O_RDONLY)
        except (OSError, Outside):
            return ""
        try:
            mode = os.fstat(fd).st_mode
        finally:
            os.close(fd)
        return "dir" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else ""

    def read(self, absolute: str) -> BinaryIO:
        """A file to read. Raises OSError and Outside."""
        return self._file(self.open(absolute, os.O_RDONLY), "rb")

    def write(self, absolute: str, data: bytes) -> None:
        """Make a file, and the folders it lies in, or write it anew. Raises OSError and Outside."""
        # It is emptied once it is known to be a file.
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
