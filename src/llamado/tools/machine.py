"""Where tools find files and run commands: this machine, or what stands for it (a container, another machine)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from llamado.tools.commands import Commands, Ran
from llamado.tools.errors import ToolFailed
from llamado.tools.folder import Folder
from llamado.tools.listing import Listing, list_folder


class ToolMachine(Protocol):
    """Files and commands as the built-in tools need them. Relative paths begin at `cwd`."""

    cwd: str
    """The folder it works in; "" where only a command can tell."""

    def absolute(self, path: str) -> str:
        """The whole of a path. Raises ToolFailed."""

    def kind(self, path: str) -> str:
        """`file`, `dir` or ""."""

    def size(self, path: str) -> int | None:
        """Bytes of a file; None where there is none."""

    def read(self, path: str) -> BinaryIO:
        """A file to read. Raises OSError and Outside."""

    def write(self, path: str, data: bytes) -> None:
        """Make or write a file, and the folders it lies in. Raises OSError and Outside."""

    def entries(self, path: str, depth: int, kind: str) -> Listing:
        """What lies below a folder (see `list_folder`)."""

    def run(
        self,
        command: Sequence[str],
        *,
        limit: int,
        seconds: float,
        said: Callable[[str], None] | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Ran:
        """Run a command."""


class Host:
    """This machine: files of one folder, and commands that begin in it."""

    def __init__(self, folder: Folder, commands: Commands, cwd: str = "") -> None:
        """`cwd`: a folder within the other. Raises Outside and ToolFailed."""
        self._folder = folder
        self._commands = commands
        self.cwd = folder.absolute(cwd)
        if cwd and folder.kind(self.cwd) != "dir":
            folder.open(self.cwd, 0)  # Outside says so itself
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

    def entries(self, path: str, depth: int, kind: str) -> Listing:
        return list_folder(self._folder, self.absolute(path), depth, kind)

    def run(
        self,
        command: Sequence[str],
        *,
        limit: int,
        seconds: float,
        said: Callable[[str], None] | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Ran:
        return self._commands.run(
            command, limit=limit, seconds=seconds, cwd=str(Path(self.cwd)), said=said, stopped=stopped
        )
