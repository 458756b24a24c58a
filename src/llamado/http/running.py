"""Which servers run on this machine: each tells so in a file of its own while it lives, for other terminals."""

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
    """A server, router or gateway as it tells of itself."""

    role: str
    """server, router or gateway."""
    addresses: list[str]
    """URLs, or paths of Unix sockets."""
    prefix: str = ""
    """What all of its paths begin with."""
    model: str = ""
    """Its model's name, once it is loaded."""
    path: str = ""
    """The model's file."""
    pid: int = field(default_factory=os.getpid)
    mark: str = field(default_factory=lambda: start_mark(os.getpid()))
    since: float = field(default_factory=time.time)
    """Seconds since 1970."""

    @property
    def memory(self) -> int | None:
        """Bytes of memory that its process holds, its model's pages among them; None where nobody says."""
        with suppress(OSError, ValueError, IndexError):
            return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return None


def folder() -> Path:
    """Where servers of this user tell that they run."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return (Path(runtime) / "llamado" if runtime else cache_dir()) / "servers"


class ServerFile:
    """What this process tells of its server. A disk that cannot be written to keeps no server from running."""

    def __init__(self, server: RunningServer) -> None:
        self._server = server
        self._file = folder() / f"{server.pid}.json"

    def tell(self, **changes: str) -> None:
        """Tell it, with what has changed; who reads sees the old state or the new one."""
        for name, value in changes.items():
            setattr(self._server, name, value)
        with suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            new = self._file.with_suffix(".new")
            new.write_bytes(orjson.dumps(asdict(self._server)))
            new.replace(self._file)

    def withdraw(self) -> None:
        """The server has ended."""
        with suppress(OSError):
            self._file.unlink(missing_ok=True)


@contextmanager
def announced(role: str, addresses: Sequence[str], prefix: str = "") -> Iterator[ServerFile]:
    """Tell that a server runs in this process."""
    announcement = ServerFile(RunningServer(role, list(addresses), prefix))
    announcement.tell()
    try:
        yield announcement
    finally:
        announcement.withdraw()


def running_servers() -> list[RunningServer]:
    """The servers of this user that run, the oldest first; files of killed ones are deleted."""
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
