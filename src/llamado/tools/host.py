"""Hosts on which tools access files and run commands: this machine, a container, or another machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from llamado.tools.commands import CommandResult, CommandRunner
from llamado.tools.errors import ToolFailed
from llamado.tools.folder import Folder
from llamado.tools.listing import FolderListing, list_folder


class ToolHost(Protocol):
    """Files and commands for the built-in tools. Relative paths begin at `cwd`."""

    cwd: str
    """The working directory; "" if only a command can determine it."""

    def absolute(self, path: str) -> str:
        """Return the absolute path. Raises ToolFailed."""

    def kind(self, path: str) -> str:
        """Return `file`, `dir` or ""."""

    def size(self, path: str) -> int | None:
        """Return the size of a file in bytes; None if there is none."""

    def read(self, path: str) -> BinaryIO:
        """Open a file for reading. Raises OSError and OutsideFolder."""

    def write(self, path: str, data: bytes) -> None:
        """Create or overwrite a file; create missing folders. Raises OSError and OutsideFolder."""

    def entries(self, path: str, depth: int, kind: str) -> FolderListing:
        """List the contents of a folder (see `list_folder`)."""

    def run(
        self,
        command: Sequence[str],
        *,
        limit: int,
        seconds: float,
        on_output: Callable[[str], None] | None = None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> CommandResult:
        """Run a command."""


class LocalToolHost:
    """This machine: files of one folder, and commands run in it."""

    def __init__(self, folder: Folder, commands: CommandRunner, cwd: str = "") -> None:
        """`cwd`: a folder within `folder`. Raises OutsideFolder and ToolFailed."""
        self._folder = folder
        self._commands = commands
        self.cwd = folder.absolute(cwd)
        if cwd and folder.kind(self.cwd) != "dir":
            folder.open(self.cwd, 0)  # raises OutsideFolder if that is the reason
            raise ToolFailed(f"no such folder: {self.cwd}")

    def absolute(self, path: str) -> str:
        return self._folder.absolute(path, self.cwd)

    def kind(self, path: str) -> str:
        return self._folder.kind(self.absolute(path))

    def size(self, path: str) -> int | None:
        try:
            with self.read(path) as file:
                return file.seek(0, 2)
        except OSError:
            return None

    def read(self, path: str) -> BinaryIO:
        return self._folder.read(self.absolute(path))

    def write(self, path: str, data: bytes) -> None:
        self._folder.write(self.absolute(path), data)

    def entries(self, path: str, depth: int, kind: str) -> FolderListing:
        return list_folder(self._folder, self.absolute(path), depth, kind)

    def run(
        self,
        command: Sequence[str],
        *,
        limit: int,
        seconds: float,
        on_output: Callable[[str], None] | None = None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> CommandResult:
        return self._commands.run(
            command, limit=limit, seconds=seconds, cwd=str(Path(self.cwd)), on_output=on_output, is_stopped=is_stopped
        )
