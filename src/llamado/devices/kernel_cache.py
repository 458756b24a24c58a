"""The kernel cache: machine code of compiled kernels on disk, for the CPU and for cards.

The name of a file is a hash of the kernel sources (for a kernel defined elsewhere also its file), of the machine that
the code is for, and of the kernel's parameters. So an edited kernel is compiled anew, and one folder serves many
machines. Files are written atomically. A file that cannot be read, or that another user may have written, is ignored.
The least recently used files are deleted beyond `DISK_BYTES`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from llamado.devices.kernel import Kernel, Trace
from llamado.devices.owned import foreign

log = logging.getLogger("llamado.devices")

DISK_BYTES = 256 << 20
"""Most bytes of compiled kernels on disk; one model on one machine has about two million."""
_LOOK_AFTER = 64
"""Kernels written between checks of the folder's size."""
_DAY = 24 * 3600.0
_MAGIC = b"llamado kernel 2"
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0)

_PACKAGE = Path(__file__).parents[1]
SHARED_SOURCES = (
    *(
        f"devices/{name}"
        for name in ("control_flow.py", "drawing.py", "kernel.py", "kernels", "lowering.py", "simd.py")
    ),
    *("ggml/ops.py", "gguf/codebooks.py", "gguf/types.py"),
)
"""Files and folders of the package that kernels of all devices import, and which decide what a kernel compiles to."""


@cache
def source_hash(*sources: str) -> bytes:
    """Hash these files, and all files in these folders, of the package."""
    digest = hashlib.sha256()
    for source in sources:
        path = _PACKAGE / source
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    return digest.digest()


@cache
def own_source(trace: Trace, sources: tuple[str, ...]) -> bytes:
    """Return the source of a kernel that is not in `sources`: its file, or its code if it was typed interactively.
    Return nothing for the other kernels.
    """
    assert isinstance(trace, FunctionType)
    path = Path(trace.__code__.co_filename)
    if any(path.is_relative_to(_PACKAGE / source) for source in sources):
        return b""
    try:
        return path.read_bytes()
    except OSError:
        return _code_text(trace.__code__).encode()


def _code_text(code: CodeType) -> str:
    """A function's instructions, names and constants; the same in every process."""
    constants = [_code_text(one) if isinstance(one, CodeType) else repr(one) for one in code.co_consts]
    return repr((code.co_code, code.co_names, constants))


def cache_folder() -> Path:
    """Return the folder of compiled kernels: `$LLAMADO_CACHE/kernels`, by default under the user's cache folder."""
    root = os.environ.get("LLAMADO_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "llamado") / "kernels"


class KernelCache:
    """Compiled kernels of one machine in a folder."""

    def __init__(
        self, sources: tuple[str, ...], machine: Sequence[str], folder: Path | None = None, *, warns: bool = True
    ) -> None:
        """`sources`: files and folders of the package that decide what a kernel compiles to. `machine`: all else that
        does, besides the kernel's parameters. `folder`: default `cache_folder()`. `warns`: log why nothing can be kept.
        """
        import llvmlite

        self.folder = folder or cache_folder()
        self._sources = sources
        identity = "\0".join([llvmlite.__version__, *machine])
        self._identity = hashlib.sha256(source_hash(*sources) + identity.encode())
        self._folder_is_ours: bool | None = None
        self._warned = not warns
        self._written = 0

    def symbol(self, kernel: Kernel, parameters: Mapping[str, Any], *more: Any) -> str:
        """Return the name of a kernel with these parameters. `more`: further numbers that its code depends on."""
        numbers = repr((kernel.name, kernel.fields, sorted(parameters.items()), *more)).encode()
        return self.entry(kernel.name, own_source(kernel.trace, self._sources) + numbers)

    def entry(self, name: str, parameters: bytes) -> str:
        """Return the full name of an entry that depends on these parameters."""
        digest = self._identity.copy()
        digest.update(parameters)
        return f"{name}_{digest.hexdigest()[:32]}"

    def path(self, symbol: str) -> Path:
        """Return the file of a kernel."""
        return self.folder / f"{symbol}.o"

    def read(self, symbol: str) -> bytes | None:
        """Return the code of a kernel; None if it is not here, its checksum is wrong, or another user may have written
        it.
        """
        if not self._is_usable():
            return None
        path = self.path(symbol)
        try:
            with open(path, "rb", opener=lambda name, flags: os.open(name, flags | _NO_LINKS)) as file:
                status = os.fstat(file.fileno())
                if (reason := foreign(status)) is not None:
                    self._warn(path, reason)
                    return None
                data = file.read()
            if time.time() - status.st_mtime > _DAY:
                os.utime(path)  # it is in use
        except OSError:
            return None
        n = len(_header(symbol, b""))
        return data[n:] if data[:n] == _header(symbol, data[n:]) else None

    def write(self, symbol: str, code: bytes) -> None:
        """Store the code of a kernel, if the folder is writable."""
        if not self._is_usable():
            return
        try:
            with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:
                try:
                    file.write(_header(symbol, code) + code)
                    file.flush()
                    os.replace(file.name, self.path(symbol))
                except OSError:  # a full disk: leave no partial file behind
                    os.unlink(file.name)
                    raise
            if self._written % _LOOK_AFTER == 0:
                _prune(self.folder)
            self._written += 1
        except OSError as error:
            self._warn_not_kept(error)

    def _is_usable(self) -> bool:
        """Return True if only this user can have written to the folder. Creates it if it does not exist."""
        if self._folder_is_ours is None:
            try:
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                reason = foreign(self.folder.stat())
            except OSError as error:
                self._folder_is_ours = False
                self._warn_not_kept(error)
            else:
                self._folder_is_ours = reason is None
                if reason is not None:
                    self._warn(self.folder, reason)
        return self._folder_is_ours

    def _warn(self, path: Path, reason: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "compiled kernels in %s: ignored and compiled anew, because %s; delete it, or set another folder with "
                "$LLAMADO_CACHE", path, reason,
            )  # fmt: skip

    def _warn_not_kept(self, error: OSError) -> None:
        """Warn once that every start has to compile the kernels again."""
        if not self._warned:
            self._warned = True
            log.warning(
                "compiled kernels cannot be kept in %s (%s): every start compiles them anew; name a folder that can be "
                "written with $LLAMADO_CACHE", self.folder, error.strerror,
            )  # fmt: skip


def _header(symbol: str, code: bytes) -> bytes:
    """The first bytes of a file; they fit neither other code nor another kernel."""
    return _MAGIC + hashlib.sha256(symbol.encode() + b"\0" + code).digest()


def _prune(folder: Path) -> None:
    """Delete the least recently used files down to three quarters of the limit, if the folder exceeds it."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            if entry.is_file(follow_symlinks=False):
                found.append((status.st_mtime, status.st_size, entry.path))
    size = sum(bytes_ for _, bytes_, _ in found)
    if size <= DISK_BYTES:
        return
    for _, bytes_, path in sorted(found):
        if size <= DISK_BYTES * 3 // 4:
            break
        os.unlink(path)
        size -= bytes_
