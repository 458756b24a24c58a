"""Folder of the chats of one API key: one file for each chat, with a revision that detects concurrent changes.

A file has a line of JSON (`revision`, `bytes`) and then the chat as the page sent it, which the server does not read.
The revision is a hash of the chat. Deleted chats leave a mark, so that other devices delete their copies.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import orjson

from llamado.errors import LlamadoError

if sys.platform != "win32":
    import fcntl

MAX_CHATS = 5000
"""Chats of one key."""
MAX_CHAT_BYTES = 32 * 2**20
DAMAGED = "damaged"
"""Revision of a file that is incomplete or was changed by another program."""
_MAX_HEAD = 200  # bytes of the first line
_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
# The prefix avoids names that Windows reserves, such as "con".
_CHAT, _MARK = "chat-{}.json", "deleted-{}"
_CHAT_NAME = re.compile(rf"chat-({_ID.pattern})\.json")
_MARK_NAME = re.compile(rf"deleted-({_ID.pattern})")


_Version = tuple[int, int, int]  # time of the last change, size, and inode of a file


class ChatError(LlamadoError):
    """A chat cannot be read or stored."""


class UnknownChat(ChatError):
    """There is no chat with this id."""


class ChatConflict(ChatError):
    """The chat was changed since the revision that the client knows."""


class TooManyChats(ChatError):
    """The folder is full."""


@dataclass(frozen=True)
class ChatEntry:
    """A chat in the list. `updated`: Unix seconds of the last change."""

    id: str
    revision: str
    updated: float
    bytes: int


def is_chat_id(text: str) -> bool:
    """Return True for an id that is safe in file names of every system."""
    return _ID.fullmatch(text) is not None


class ChatFolder:
    """The chats in `path`, which is created with the first one. All methods are for any thread, and raise OSError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._listed: dict[str, tuple[_Version, ChatEntry]] = {}
        """The entries of the last list, with the versions of their files."""

    def entries(self) -> tuple[list[ChatEntry], list[str]]:
        """Return all chats, and the ids of deleted ones."""
        listed = {id: found for id in self._ids(_CHAT_NAME) if (found := self._list_entry(id)) is not None}
        self._listed = listed  # replaced as a whole: other threads may list, too
        return [entry for _, entry in listed.values()], self._ids(_MARK_NAME)

    def read(self, id: str) -> tuple[bytes, str]:
        """Return a chat and its revision. Raises UnknownChat, and ChatError for a damaged file."""
        try:
            head, _, chat = self._file(id).read_bytes().partition(b"\n")
        except FileNotFoundError:
            raise UnknownChat(f"there is no chat {id}") from None
        revision = _revision(chat)
        if _read_head(head) != (revision, len(chat)):
            raise ChatError(f"the file of chat {id} is damaged: another device may have a copy")
        return chat, revision

    def write(self, id: str, chat: bytes, expected: str | None) -> ChatEntry:
        """Store a chat in place of its revision `expected`; None: a new one. Raises ChatConflict, TooManyChats."""
        with self._locked():
            self._check(id, expected)
            if expected is None and len(self._ids(_CHAT_NAME)) >= MAX_CHATS:
                raise TooManyChats(f"more than {MAX_CHATS} chats are stored: delete some")
            file = self._file(id)
            if expected == DAMAGED:
                os.replace(file, file.with_suffix(".damaged"))
            part = file.with_suffix(".part")
            head = orjson.dumps({"revision": _revision(chat), "bytes": len(chat)})
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stream:
                stream.write(head + b"\n" + chat)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(part, file)
            self._mark(id).unlink(missing_ok=True)
        entry = self._entry(id)
        assert entry is not None
        return entry

    def delete(self, id: str, expected: str) -> None:
        """Delete the revision `expected` of a chat. Raises UnknownChat, ChatConflict."""
        with self._locked():
            if self._entry(id) is None:
                raise UnknownChat(f"there is no chat {id}")
            self._check(id, expected)
            self._drop_old_marks()
            self._mark(id).touch(0o600)
            self._file(id).unlink()

    def _check(self, id: str, expected: str | None) -> None:
        entry = self._entry(id)
        found = None if entry is None else entry.revision
        if found != expected:
            state = "was deleted" if found is None else "exists" if expected is None else "was changed"
            raise ChatConflict(f"chat {id} {state} meanwhile: read it again, and then change it")

    def _list_entry(self, id: str) -> tuple[_Version, ChatEntry] | None:
        """Return the version of a chat's file and its entry, which is read only if the file has changed."""
        try:
            status = self._file(id).stat()
        except FileNotFoundError:
            return None
        version = (status.st_mtime_ns, status.st_size, status.st_ino)
        before = self._listed.get(id)
        if before is not None and before[0] == version:
            return before
        entry = self._entry(id)
        return None if entry is None else (version, entry)

    def _entry(self, id: str) -> ChatEntry | None:
        """Return the entry of a chat by the first line of its file; None if there is none."""
        try:
            with self._file(id).open("rb") as stream:
                line, status = stream.readline(_MAX_HEAD), os.fstat(stream.fileno())
        except FileNotFoundError:
            return None
        revision, size = _read_head(line)
        if len(line) + size != status.st_size:
            revision = DAMAGED
        return ChatEntry(id, revision, status.st_mtime, status.st_size)

    def _ids(self, pattern: re.Pattern[str]) -> list[str]:
        """Return the ids in the names of files."""
        try:
            names = os.listdir(self._path)
        except FileNotFoundError:
            return []
        return [found[1] for name in names if (found := pattern.fullmatch(name))]

    def _drop_old_marks(self) -> None:
        marks = [self._mark(id) for id in self._ids(_MARK_NAME)]
        if len(marks) > MAX_CHATS:
            for mark in sorted(marks, key=lambda one: one.stat().st_mtime)[: MAX_CHATS // 2]:
                mark.unlink(missing_ok=True)

    def _file(self, id: str) -> Path:
        return self._path / _CHAT.format(id)

    def _mark(self, id: str) -> Path:
        return self._path / _MARK.format(id)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Exclude other threads, and other servers with the same folder except on Windows."""
        self._path.mkdir(0o700, parents=True, exist_ok=True)
        with self._lock, open(os.open(self._path / ".lock", os.O_RDWR | os.O_CREAT, 0o600), "r+b") as lock:
            if sys.platform != "win32":
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _revision(chat: bytes) -> str:
    return blake2b(chat, digest_size=12).hexdigest()


def _read_head(line: bytes) -> tuple[str, int]:
    """Return revision and bytes of the first line of a file; DAMAGED if it is not one."""
    try:
        head = orjson.loads(line)
        revision, size = head["revision"], head["bytes"]
    except (ValueError, TypeError, KeyError):
        return DAMAGED, -1
    return (revision, size) if isinstance(revision, str) and isinstance(size, int) else (DAMAGED, -1)
