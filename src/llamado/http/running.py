"""Registry of running servers: each one keeps a file while it runs, which other terminals read."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import orjson

from llamado.gguf.sources.resolve import cache_dir
from llamado.processes.identity import is_same, start_mark


@dataclass
class RunningServer:
    """A running server, router or gateway."""

    role: str
    """server, router or gateway."""
    addresses: list[str]
    """URLs, or paths of Unix sockets."""
    prefix: str = ""
    """API path prefix."""
    model: str = ""
    """The model's name; "" until it is loaded."""
    path: str = ""
    """Path of the model's file."""
    pid: int = field(default_factory=os.getpid)
    mark: str = field(default_factory=lambda: start_mark(os.getpid()))
    since: float = field(default_factory=time.time)
    """Start time, seconds since 1970."""

    @property
    def memory(self) -> int | None:
        """Resident bytes of its process, including mapped model pages; None if the system does not report them."""
        with suppress(OSError, ValueError, IndexError):
            return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return None


def folder() -> Path:
    """Return the folder of this user's server files."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return (Path(runtime) / "llamado" if runtime else cache_dir()) / "servers"


class ServerFile:
    """This process's entry in the registry. Write errors are ignored: the server works without an entry."""

    def __init__(self, server: RunningServer) -> None:
        self._server = server
        self._file = folder() / f"{server.pid}.json"

    def update(self, **changes: str) -> None:
        """Write the entry with changed fields. Atomic: readers see the old or the new state."""
        for name, value in changes.items():
            setattr(self._server, name, value)
        with suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            new = self._file.with_suffix(".new")
            new.write_bytes(orjson.dumps(asdict(self._server)))
            new.replace(self._file)

    def remove(self) -> None:
        """Delete the entry."""
        with suppress(OSError):
            self._file.unlink(missing_ok=True)


@contextmanager
def announce(role: str, addresses: Sequence[str], prefix: str = "") -> Iterator[ServerFile]:
    """Keep a registry entry for a server of this process."""
    announcement = ServerFile(RunningServer(role, list(addresses), prefix))
    announcement.update()
    try:
        yield announcement
    finally:
        announcement.remove()


def running_servers() -> list[RunningServer]:
    """Return this user's running servers, oldest first. Deletes files of killed ones."""
    found = []
    with suppress(OSError):
        for file in sorted(folder().glob("*.json")):
            try:
                server = RunningServer(**orjson.loads(file.read_bytes()))
                lives = is_same(server.pid, server.mark)
            except (OSError, ValueError, TypeError):
                continue
            if lives:
                found.append(server)
            else:
                file.unlink(missing_ok=True)
    return sorted(found, key=lambda server: server.since)
