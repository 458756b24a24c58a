"""Hashes of a model's weights on disk: computed once per file, not once per start."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, MutableMapping, Sequence
from pathlib import Path

from llamado.gguf.sources.resolve import cache_dir

FNV1A_DIGITS, SHA256_DIGITS = 16, 64


class KnownHashes(MutableMapping[str, int]):
    """Hashes of weights by tensor name, for one state of a model's files (path, inode, size, times).

    Safe to use from several threads. If the file of hashes cannot be read or written, they are computed again.
    """

    def __init__(self, paths: Sequence[Path], folder: Path | None = None, digits: int = FNV1A_DIGITS) -> None:
        """`paths`: the model's file or all its shards. `digits`: hex digits of a hash. Raises OSError."""
        stamps = []
        for path in paths:
            status = path.stat()
            stamps.append((str(path.resolve()), status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
        name = hashlib.sha256(repr((digits, stamps)).encode()).hexdigest()[:32]
        self._path = (folder or cache_dir() / "hashes") / f"{name}.json"
        self._digits = digits
        self._changed = False
        self._hashes = self._stored()

    def _stored(self) -> dict[str, int]:
        try:
            stored = json.loads(self._path.read_text())
            return {str(tensor): int(value, 16) for tensor, value in stored.items()}
        except (OSError, ValueError, AttributeError, TypeError):
            return {}

    def __getitem__(self, name: str) -> int:
        return self._hashes[name]

    def __setitem__(self, name: str, value: int) -> None:
        self._hashes[name] = value
        self._changed = True

    def __delitem__(self, name: str) -> None:
        del self._hashes[name]
        self._changed = True

    def __iter__(self) -> Iterator[str]:
        return iter(self._hashes.copy())

    def __len__(self) -> int:
        return len(self._hashes)

    def save(self) -> None:
        """Write added hashes to the file atomically, together with those that other processes added meanwhile."""
        if not self._changed:
            return
        self._changed = False
        known = self._stored() | self._hashes.copy()
        text = json.dumps({name: f"{value:0{self._digits}x}" for name, value in known.items()})
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._path.parent, delete=False) as file:
                try:
                    file.write(text)
                    file.flush()
                    os.replace(file.name, self._path)
                except OSError:
                    os.unlink(file.name)
        except OSError:
            pass
