"""Hashes of a model's weights, kept on disk: computed once per file, not once per start."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, MutableMapping, Sequence
from pathlib import Path

from llamado.gguf.sources.resolve import cache_dir


class KnownHashes(MutableMapping[str, int]):
    """FNV-1a of weights by tensor name, for the files of one model as they are now (path, size, time of change).

    Several threads may use one. A file of hashes that cannot be read or written only costs computing them again.
    """

    def __init__(self, paths: Sequence[Path], folder: Path | None = None) -> None:
        """`paths`: the model's file, or all its shards; raises OSError if one is not there."""
        stamps = [(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for p in paths]
        name = hashlib.sha256(repr(stamps).encode()).hexdigest()[:32]
        self._path = (folder or cache_dir() / "hashes") / f"{name}.json"
        self._hashes: dict[str, int] = {}
        self._changed = False
        try:
            kept = json.loads(self._path.read_text())
            self._hashes = {str(tensor): int(value, 16) for tensor, value in kept.items()}
        except (OSError, ValueError, AttributeError, TypeError):
            pass

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
        """Keeps what was added, whole or not at all."""
        if not self._changed:
            return
        text = json.dumps({name: f"{value:016x}" for name, value in self._hashes.copy().items()})
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
            return
        self._changed = False
