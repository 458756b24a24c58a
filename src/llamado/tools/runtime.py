"""Tools that work elsewhere: in a container, or on another machine over ssh. Each step is a command there.

What stands there must have sh, cat, wc, mkdir, dirname, find and timeout. Spellings are llama-server's
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
from llamado.tools.commands import Commands, Ran
from llamado.tools.errors import ToolsError
from llamado.tools.listing import JUNK, SECONDS, Entry, Listing

_FILE_BYTES = 64 << 20
_LIST_BYTES = 8 << 20  # of a list of files
# The container or the other machine is the bound there; nothing that a repository's configuration names is run.
_GIT_FILES = (
    "git", "-c", "core.fsmonitor=false", "-c", "core.untrackedCache=false", "-c", "core.hooksPath=/dev/null",
    "ls-files", "--cached", "--others", "--exclude-standard", "-z",
)  # fmt: skip
_START_SECONDS = 60.0
_LONGEST_REASON = 500  # characters
_ENGINES = ("docker", "podman")
_FORMS = (*(f"{engine}:IMAGE" for engine in _ENGINES), *(f"{engine}-container:ID" for engine in _ENGINES), "ssh:TARGET")
# A name that begins with a dash would be an option of the program that gets it.
_ID = re.compile("[A-Za-z0-9][A-Za-z0-9._-]*")
_TARGET = re.compile("[A-Za-z0-9._@][A-Za-z0-9._@-]*")
_SSH = (
    "ssh", "-o", "BatchMode=yes", "-o", "PasswordAuthentication=no", "-o", "KbdInteractiveAuthentication=no",
    "-o", "StrictHostKeyChecking=yes",
)  # fmt: skip

Wrap = Callable[[Sequence[str], bool], list[str]]
"""A command there → the command here that runs it; whether it reads something."""


def wrapping(spec: str) -> Wrap:
    """What reaches a running container (`docker-container:ID`) or another machine (`ssh:TARGET`). Raises ToolsError."""
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
    """Entries of what `git ls-files -z` printed."""
    names = [name.decode("utf-8", "surrogateescape") for name in output.split(b"\0") if name]
    return [Entry(name, False) for name in names if not depth or name.count("/") < depth]


class Container:
    """A container of the server's own (`docker:IMAGE`), made again when it has ended; it ends with the server."""

    def __init__(self, spec: str, commands: Commands) -> None:
        """Make it. Raises ToolsError."""
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
        """What names it, running. Raises ToolsError."""
        with self._lock:
            if self._process is None or self._ended.is_set():
                self._start()
            return f"{self._engine}-container:{self._id}"

    def _start(self) -> None:
        ended = self._ended = threading.Event()
        with tempfile.TemporaryDirectory() as folder:
            note, said = Path(folder, "id"), Path(folder, "said")
            # Its shell waits for input: it ends when nobody is there any more to give some, however that comes.
            command = [self._engine, "run", "--rm", "-i", "--cidfile", str(note), self._image, "sh"]
            try:
                with open(said, "wb") as errors:
                    self._process = PipedProcess(
                        command,
                        child_environment(),
                        self._commands.guard,
                        ended=lambda _: ended.set(),
                        stderr=errors.fileno(),
                    )
            except OSError as error:
                raise ToolsError(
                    f"--tools-runtime: {self._engine} cannot be run: {error.strerror}; is it installed, and in PATH?"
                ) from None
            deadline = time.monotonic() + _START_SECONDS
            while not (note.exists() and (found := note.read_text().strip())):
                if ended.wait(0.05) or time.monotonic() > deadline:
                    lines = said.read_text(errors="replace").split("\n")
                    why = next((f": {line.strip()}" for line in lines if line.strip()), "")
                    raise ToolsError(
                        f"{self._engine} run {self._image}: no container came of it{why[:_LONGEST_REASON]}"
                    )
        self._id = found

    def close(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.stdin.close()
            if not self._ended.wait(3.0):
                self._process.signal(signal.SIGKILL)


class Elsewhere:
    """A container or another machine, as tools see it; nothing is kept in a folder there."""

    def __init__(self, wrap: Wrap, commands: Commands, cwd: str = "") -> None:
        self._wrap = wrap
        self._commands = commands
        self.cwd = cwd

    def absolute(self, path: str) -> str:
        return posixpath.join(self.cwd, path)

    def _sh(self, script: str, path: str, limit: int = 4096) -> Ran:
        command = self._wrap(["sh", "-c", script, "_", self.absolute(path)], False)
        return self._commands.run(command, limit=limit, seconds=SECONDS, merged=False)

    def kind(self, path: str) -> str:
        ran = self._sh('if [ -d "$1" ]; then echo dir; elif [ -f "$1" ]; then echo file; fi', path)
        return ran.text.strip() if ran.ok else ""

    def size(self, path: str) -> int | None:
        ran = self._sh('[ -f "$1" ] && wc -c < "$1"', path)
        return whole_number(ran.text.strip()) if ran.ok else None

    def read(self, path: str) -> BinaryIO:
        ran = self._sh('cat -- "$1"', path, _FILE_BYTES)
        if not ran.ok:
            raise OSError(f"cannot read {path}")
        return io.BytesIO(ran.output)

    def write(self, path: str, data: bytes) -> None:
        script = 'mkdir -p "$(dirname "$1")" && cat > "$1"'
        command = self._wrap(["sh", "-c", script, "_", self.absolute(path)], True)
        if not self._commands.run(command, limit=4096, seconds=SECONDS, given=data).ok:
            raise OSError(f"cannot write {path}")

    def entries(self, path: str, depth: int, kind: str) -> Listing:
        if kind == "file":
            ran = self._sh('cd "$1" && ' + shlex.join(_GIT_FILES), path, _LIST_BYTES)
            if ran.ok:
                return Listing(_files_of_git(ran.output, depth), ran.cut)
        names = " -o ".join(f"-name {name}" for name in sorted(JUNK))
        levels = f" -maxdepth {depth}" if depth else ""
        found = Listing()
        for what in ("dir", "file") if kind == "all" else (kind,):
            shown = r"-print -o -type d -print" if what == "dir" else "-o -type f -print"
            script = f'cd "$1" && find . -mindepth 1{levels} \\( {names} \\) -prune {shown}'
            ran = self._sh(script, path, _LIST_BYTES)
            found.cut = found.cut or ran.cut or ran.timed_out
            found.entries += [Entry(line.removeprefix("./"), what == "dir") for line in sorted(ran.text.splitlines())]
        return found

    def run(
        self,
        command: Sequence[str],
        *,
        limit: int,
        seconds: float,
        said: Callable[[str], None] | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Ran:
        # The end of the program here does not end what runs there.
        inner = ["timeout", f"{max(seconds, 1):g}s", *command]
        if self.cwd:
            inner = ["sh", "-c", 'cd "$1" || exit 127; shift; exec "$@"', "_", self.cwd, *inner]
        wrapped = self._wrap(inner, True)
        return self._commands.run(wrapped, limit=limit, seconds=seconds + 5, said=said, stopped=stopped)
