"""Remote tool hosts: a container, or another machine over ssh. Each operation is a command there.

The host needs sh, cat, wc, mkdir, dirname, find and timeout. Spellings are llama-server's
(tools/server/server-tools.cpp, b11434).
"""

from __future__ import annotations

import io
import posixpath
import re
import shlex
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from llamado.numerals import whole_number
from llamado.processes.guarded import PipedProcess
from llamado.processes.secret_values import child_environment
from llamado.tools.commands import CommandResult, CommandRunner
from llamado.tools.errors import ToolsError
from llamado.tools.listing import JUNK, SECONDS, Entry, FolderListing

_FILE_BYTES = 64 << 20
_LIST_BYTES = 8 << 20  # of a file list
# On a remote host, the host is the sandbox. Hooks and monitors in a repository's configuration are disabled.
_GIT_FILES = (
    "git", "-c", "core.fsmonitor=false", "-c", "core.untrackedCache=false", "-c", "core.hooksPath=/dev/null",
    "ls-files", "--cached", "--others", "--exclude-standard", "-z",
)  # fmt: skip
_START_SECONDS = 60.0
_LONGEST_REASON = 500  # characters
_ENGINES = ("docker", "podman")
_FORMS = (*(f"{engine}:IMAGE" for engine in _ENGINES), *(f"{engine}-container:ID" for engine in _ENGINES), "ssh:TARGET")
# Names must not begin with a dash, or the program would parse them as options.
_ID = re.compile("[A-Za-z0-9][A-Za-z0-9._-]*")
_TARGET = re.compile("[A-Za-z0-9._@][A-Za-z0-9._@-]*")
_SSH = (
    "ssh", "-o", "BatchMode=yes", "-o", "PasswordAuthentication=no", "-o", "KbdInteractiveAuthentication=no",
    "-o", "StrictHostKeyChecking=yes",
)  # fmt: skip

CommandWrapper = Callable[[Sequence[str], bool], list[str]]
"""Maps a command to the local command that runs it on the host. The flag is True if the command reads input."""


def command_wrapper(spec: str) -> CommandWrapper:
    """Return the wrapper for a container (`docker-container:ID`) or a machine (`ssh:TARGET`). Raises ToolsError."""
    kind, _, name = spec.partition(":")
    engine = kind.removesuffix("-container")
    if kind == "ssh":
        if not _TARGET.fullmatch(name):
            raise ToolsError(f"invalid ssh target: {name}")
        return lambda command, reads: [*_SSH, *([] if reads else ["-n"]), name, shlex.join(command)]
    if engine not in _ENGINES:
        raise ToolsError(f"unknown tool runtime: {spec}; expected one of {', '.join(_FORMS)}")
    if kind == engine:
        raise ToolsError(f"tool runtime must name a running container: {spec}")
    if not _ID.fullmatch(name):
        raise ToolsError(f"invalid container id: {name}")
    return lambda command, reads: [engine, "exec", *(["-i"] if reads else []), name, *command]


def _files_of_git(output: bytes, depth: int) -> list[Entry]:
    """Parse the output of `git ls-files -z`."""
    names = [name.decode("utf-8", "surrogateescape") for name in output.split(b"\0") if name]
    return [Entry(name, False) for name in names if not depth or name.count("/") < depth]


class Container:
    """A container owned by the server (`docker:IMAGE`); restarted after it exits, and ends with the server."""

    def __init__(self, spec: str, commands: CommandRunner) -> None:
        """Start it. Raises ToolsError."""
        self._engine, _, self._image = spec.partition(":")
        if not self._image or self._image.startswith("-"):
            raise ToolsError(f"--tools-runtime {spec}: expected {self._engine}:IMAGE")
        self._commands = commands
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._process: PipedProcess | None = None
        self._id = ""
        self.spec()

    def spec(self) -> str:
        """Return the spec of the running container, starting it if necessary. Raises ToolsError."""
        with self._lock:
            if self._process is None or self._ended.is_set():
                self._start()
            return f"{self._engine}-container:{self._id}"

    def _start(self) -> None:
        ended = self._ended = threading.Event()
        with tempfile.TemporaryDirectory() as folder:
            id_file, log_file = Path(folder, "id"), Path(folder, "said")
            # Its shell reads from this process's pipe and exits when the pipe closes, however this process ends.
            command = [self._engine, "run", "--rm", "-i", "--cidfile", str(id_file), self._image, "sh"]
            try:
                with open(log_file, "wb") as errors:
                    self._process = PipedProcess(
                        command,
                        child_environment(),
                        self._commands.guard,
                        on_exit=lambda _: ended.set(),
                        stderr=errors.fileno(),
                    )
            except OSError as error:
                raise ToolsError(
                    f"--tools-runtime: {self._engine} cannot be run: {error.strerror}; is it installed, and in PATH?"
                ) from None
            deadline = time.monotonic() + _START_SECONDS
            while not (id_file.exists() and (found := id_file.read_text().strip())):
                if ended.wait(0.05) or time.monotonic() > deadline:
                    lines = log_file.read_text(errors="replace").split("\n")
                    why = next((f": {line.strip()}" for line in lines if line.strip()), "")
                    raise ToolsError(
                        f"{self._engine} run {self._image}: the container did not start{why[:_LONGEST_REASON]}"
                    )
        self._id = found

    def close(self) -> None:
        """Stop it."""
        if self._process is not None:
            self._process.stdin.close()
            if not self._ended.wait(3.0):
                self._process.signal(signal.SIGKILL)


class RemoteToolHost:
    """A container or another machine. Paths are not confined to a folder there."""

    def __init__(self, wrap: CommandWrapper, commands: CommandRunner, cwd: str = "") -> None:
        self._wrap = wrap
        self._commands = commands
        self.cwd = cwd

    def absolute(self, path: str) -> str:
        return posixpath.join(self.cwd, path)

    def _sh(self, script: str, path: str, limit: int = 4096) -> CommandResult:
        command = self._wrap(["sh", "-c", script, "_", self.absolute(path)], False)
        return self._commands.run(command, limit=limit, seconds=SECONDS, merge_stderr=False)

    def kind(self, path: str) -> str:
        result = self._sh('if [ -d "$1" ]; then echo dir; elif [ -f "$1" ]; then echo file; fi', path)
        return result.text.strip() if result.ok else ""

    def size(self, path: str) -> int | None:
        result = self._sh('[ -f "$1" ] && wc -c < "$1"', path)
        return whole_number(result.text.strip()) if result.ok else None

    def read(self, path: str) -> BinaryIO:
        result = self._sh('cat -- "$1"', path, _FILE_BYTES)
        if not result.ok:
            raise OSError(f"cannot read {path}")
        return io.BytesIO(result.output)

    def write(self, path: str, data: bytes) -> None:
        script = 'mkdir -p "$(dirname "$1")" && cat > "$1"'
        command = self._wrap(["sh", "-c", script, "_", self.absolute(path)], True)
        if not self._commands.run(command, limit=4096, seconds=SECONDS, input_bytes=data).ok:
            raise OSError(f"cannot write {path}")

    def entries(self, path: str, depth: int, kind: str) -> FolderListing:
        if kind == "file":
            result = self._sh('cd "$1" && ' + shlex.join(_GIT_FILES), path, _LIST_BYTES)
            if result.ok:
                return FolderListing(_files_of_git(result.output, depth), result.cut)
        names = " -o ".join(f"-name {name}" for name in sorted(JUNK))
        levels = f" -maxdepth {depth}" if depth else ""
        found = FolderListing()
        for what in ("dir", "file") if kind == "all" else (kind,):
            shown = r"-print -o -type d -print" if what == "dir" else "-o -type f -print"
            script = f'cd "$1" && find . -mindepth 1{levels} \\( {names} \\) -prune {shown}'
            result = self._sh(script, path, _LIST_BYTES)
            found.cut = found.cut or result.cut or result.timed_out
            found.entries += [
                Entry(line.removeprefix("./"), what == "dir") for line in sorted(result.text.splitlines())
            ]
        return found

    def run(
        self,
        command: Sequence[str],
        *,
        limit: int,
        seconds: float,
        on_output: Callable[[str], None] | None = None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> CommandResult:
        # Killing the local program does not stop the command there; `timeout` does.
        inner = ["timeout", f"{max(seconds, 1):g}s", *command]
        if self.cwd:
            inner = ["sh", "-c", 'cd "$1" || exit 127; shift; exec "$@"', "_", self.cwd, *inner]
        wrapped = self._wrap(inner, True)
        return self._commands.run(wrapped, limit=limit, seconds=seconds + 5, on_output=on_output, is_stopped=is_stopped)
