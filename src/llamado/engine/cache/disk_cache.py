"""The prompt cache on disk: sequences in a folder, which survive the process and can be shared.

Several processes may share a folder. A file is written under a temporary name and renamed when it is complete, its name
identifies its contents (see blocks.py), and a process that needs room removes the least recently used files. So no
coordination is needed: a file that is gone, or was written by another process, is no error. One thread writes and scans
the folder, and each sequence is read by a thread of its own; the engine's thread looks sequences up and takes them
piece by piece.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import llamado
from llamado.engine.cache.blocks import (
    PART,
    BadBlock,
    Block,
    Tokens,
    name_of,
    path_of,
    read_data,
    read_head,
    regroup,
    write_block,
)
from llamado.engine.cache.prompt_cache import ReadRate, StoredSequence, shared
from llamado.engine.cache.snapshots import NEAR, thin_out
from llamado.engine.errors import EngineError
from llamado.engine.forward.contract import CellKind, Cells, Scales, piece_cells
from llamado.engine.request import DiskCounters

log = logging.getLogger(__name__)

LEAST = 64
"""Least tokens of a sequence: fewer are not worth opening files."""
_LOOK_SECONDS = 1.0
"""Seconds between scans for files of other processes."""
_PENDING_BYTES = 256 << 20
"""Most bytes of sequences that wait to be written; further ones are dropped."""
_REST_SECONDS = 30.0
"""Seconds without writes after the OS refused one."""
_STALE_SECONDS = 3600.0
"""Age at which an unfinished file counts as abandoned."""
_SLACK = 0.05
"""Share of the limit that is freed beyond the needed room, so that it happens rarely."""
_TAILS = 4
"""Tails of a sequence that are kept at any size: those at its end, and the most useful one before."""
_AHEAD = 4
"""Pieces that are read ahead of the engine."""

_ENDS = (".cells", ".tail")


class DiskCacheUnusable(EngineError):
    """The folder of the prompt cache cannot be used."""


class StoredChain(NamedTuple):
    """The part of a sequence that is on disk: its first `n` tokens, and the tail to continue from them."""

    n: int
    blocks: list[Block]
    tail: Block | None


def check_folder(folder: Path) -> None:
    """Create the folder of a cache, readable only by its user. Raises DiskCacheUnusable."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = folder / f".{os.getpid()}-{threading.get_ident()}{PART}"
        with open(os.open(probe, os.O_WRONLY | os.O_CREAT, 0o600), "wb"):
            probe.unlink()
        if os.name == "posix" and folder.stat().st_mode & 0o077:
            log.warning("prompt cache %s: contains users' prompts and is readable by others; run chmod 700", folder)
    except OSError as error:
        raise DiskCacheUnusable(f"--cache-disk {folder}: {error.strerror or error}") from error


class DiskRead(threading.Thread):
    """Thread that reads the blocks of a chain from the token `first` on; `take` returns the pieces."""

    def __init__(
        self, cache: DiskCache, chain: StoredChain, first: int, kind: CellKind, notify: Callable[[], None]
    ) -> None:
        super().__init__(name="llamado-cache-read", daemon=True)
        self.chain = chain
        self.first = first
        self._cache, self._kind, self._notify = cache, kind, notify
        self._pieces: deque[tuple[int, int, Cells]] = deque()
        self._room = threading.Semaphore(_AHEAD)
        self._over = threading.Event()
        self._began = time.perf_counter()
        self.tail: Cells | None = None
        """Available before the first piece."""
        self.failed = self.cancelled = False
        self.start()

    def run(self) -> None:
        try:
            self._read()
        except Exception:
            self.failed = True
            log.exception("prompt cache on disk: reading failed")
        self._over.set()
        self._notify()

    def _read(self) -> None:
        memory, chain = self._kind.memory, self.chain
        wanted = [block for block in chain.blocks if block.end > self.first and block.start < chain.n]
        for block in (*(() if chain.tail is None else (chain.tail,)), *wanted):
            data = self._cache.read(block)
            if data is None:
                self.failed = True
                return
            sound = memory.is_valid_tail(data, block.end) if block.is_tail else memory.is_valid(data, block.tokens.size)
            if not sound:
                self._cache.discard(block, "it contains NaN or infinity")
                self.failed = True
                return
            if block.is_tail:
                self.tail = data
                continue
            while not self._room.acquire(timeout=1.0):
                pass
            if self.cancelled:
                return
            self._pieces.append((block.start, min(block.tokens.size, chain.n - block.start), data))
            self._notify()
        self._cache.used([*chain.blocks, *(() if chain.tail is None else (chain.tail,))])

    def take(self) -> tuple[int, int, Cells] | None:
        """Return the next piece, if there is one: position, number of wanted cells, bytes (perhaps of more cells)."""
        if not self._pieces:
            return None
        self._room.release()
        return self._pieces.popleft()

    @property
    def has_pieces(self) -> bool:
        """True if there is a piece to take, or the thread is done."""
        return bool(self._pieces) or self._over.is_set()

    @property
    def is_finished(self) -> bool:
        """True if all pieces were taken and no more will come."""
        return self._over.is_set() and not self._pieces

    def done(self) -> None:
        """Record that all cells are restored."""
        size = sum(block.n_bytes for block in self.chain.blocks if block.end > self.first)
        self._cache.loaded(size, self.chain.n - self.first, time.perf_counter() - self._began)

    def cancel(self) -> None:
        """Stop reading; the rest is not needed."""
        self.cancelled = True
        self._room.release()


class DiskCache:
    """Sequences in `folder`, `limit` bytes in all. Raises DiskCacheUnusable.

    `kind` returns the meaning of bytes that were computed with given adapter scales, and `numerics` the fingerprint of
    the devices. If that is unknown, nothing is written and nothing is found.
    """

    def __init__(
        self, folder: Path, limit: int, kind: Callable[[Scales], CellKind], numerics: Callable[[], str | None]
    ) -> None:
        self._folder, self._limit = folder, limit
        self._kind, self._numerics = kind, numerics
        check_folder(folder)
        self._lock = threading.Lock()
        self._children: dict[bytes, dict[bytes, Block]] = {}
        self._sizes: dict[str, tuple[int, int]] = {}
        """File name → size in bytes, time of last use in ns."""
        self._looked: int | None = None
        self._roots: dict[tuple[str, Scales], bytes] = {}
        self._family = ""
        self._waiting: deque[tuple[StoredSequence, str]] = deque()
        self._pending = 0
        self._wake = threading.Condition()
        self._closing = self._warned = False
        self._deadline = 0.0
        self._rest_until = 0.0
        self._rate = ReadRate()
        self._counts = DiskCounters()
        self._thread = threading.Thread(target=self._work, name="llamado-cache-write", daemon=True)
        self._thread.start()

    # -- the engine's thread -----------------------------------------------------------------------------------------

    def find(
        self, tokens: Tokens, scales: Scales, reach: Callable[[int, int], int], has_tails: bool
    ) -> StoredChain | None:
        """Find the longest usable beginning of a sequence; `reach` is Memory.tail_reach, or accepts fewer."""
        best: StoredChain | None = None
        numerics = self._numerics()
        with self._lock:
            if not self._children or numerics is None:
                return None
            at, parent = 0, self._root(scales, numerics)
            path: list[Block] = []
            while True:
                children = self._children.get(parent, {}).values()
                cover, last, tails = at, None, []
                for block in children:
                    same = at + shared(block.tokens, tokens[at : at + block.tokens.size])
                    if block.is_tail:
                        tails.append((block, same))
                    elif same > cover:
                        cover, last = same, block
                blocks = [*path, last] if last is not None else path
                if not has_tails and (n := reach(cover, cover)):
                    best = StoredChain(n, blocks, None)
                for block, same in tails:
                    n = reach(block.end, min(same, cover))
                    if n and (best is None or n > best.n):
                        best = StoredChain(n, blocks, block)
                if last is None or cover < last.end:
                    return best
                at, parent, path = cover, last.name, blocks

    def pays(self, chain: StoredChain, first: int, pace: float) -> bool:
        """Return True if reading is faster than computing at `pace` tokens per second."""
        size = sum(block.n_bytes for block in chain.blocks if block.end > first)
        size += chain.tail.n_bytes if chain.tail is not None else 0
        return self._rate.pays(size, chain.n - first, pace)

    def load(self, chain: StoredChain, first: int, scales: Scales, notify: Callable[[], None]) -> DiskRead:
        """Start reading a chain from the token `first` on; `notify` is called whenever there is a new piece."""
        return DiskRead(self, chain, first, self._kind(scales), notify)

    def put(self, stored: StoredSequence) -> None:
        """Queue a sequence, just computed by the present devices, for writing, unless the queue takes too much
        memory.
        """
        numerics = self._numerics()
        if numerics is None:
            if not self._warned:
                self._warned = True
                log.warning(
                    "prompt cache on disk: disabled, because a worker does not report its numerics (ggml's workers "
                    "do not), and another worker's numbers may differ"
                )
            return
        with self._wake:
            if self._waiting and self._pending + stored.nbytes > _PENDING_BYTES and not self._closing:
                self._count(failures=1)
                return
            self._waiting.append((stored, numerics))
            self._pending += stored.nbytes
            self._wake.notify()

    def finish(self, stored: list[StoredSequence], seconds: float) -> None:
        """Write these sequences in order, then stop; after `seconds` the rest is skipped."""
        with self._wake:  # the writing thread ends once it sees that nothing waits and this is set
            self._closing = True
            self._deadline = time.monotonic() + seconds
            for one in stored:
                self.put(one)
            self._wake.notify()
        self._thread.join()

    # -- any thread --------------------------------------------------------------------------------------------------

    @property
    def counters(self) -> DiskCounters:
        """Counters of reads and writes, and the present files."""
        sizes = self._sizes
        return self._counts._replace(files=len(sizes), bytes=sum(size for size, _ in [*sizes.values()]))

    def read(self, block: Block) -> Cells | None:
        """Return the data of a file; None if it is gone or damaged."""
        try:
            data = read_data(block)
        except BadBlock as error:
            self.discard(block, str(error))
            return None
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                log.warning("prompt cache on disk: %s: %s", block.path, error.strerror or error)
            self._forget(block)
            return None
        self._count(bytes_read=data.size)
        return data

    def discard(self, block: Block, why: str) -> None:
        """Remove an unusable file."""
        self._forget(block)
        self._remove(block.path, why)

    def used(self, blocks: list[Block]) -> None:
        """Mark blocks as used now, with the first ones newest: eviction takes the ends of sequences before their
        beginnings.
        """
        now = time.time_ns()
        for i, block in enumerate(reversed(blocks)):
            try:
                os.utime(block.path, ns=(now + i, now + i))
                self._sizes[block.path.name] = block.file_bytes, now + i
            except OSError:
                self._forget(block)

    def loaded(self, size: int, n: int, seconds: float) -> None:
        """Record that a sequence of `size` bytes was restored in `seconds`, of which `n` tokens are used."""
        self._rate.note(size, seconds)
        self._count(hits=1, tokens_read=n)

    def _count(self, **more: int) -> None:
        with self._wake:
            self._counts = self._counts._replace(**{k: getattr(self._counts, k) + n for k, n in more.items()})

    def _root(self, scales: Scales, numerics: str) -> bytes:
        """Return the hash of the meaning of bytes, which is the parent name of first blocks."""
        root = self._roots.get((numerics, scales))
        if root is None:
            kind = self._kind(scales)
            text = f"{llamado.__version__}\n{numerics}\n{kind.memory.kind}\n{kind.memory.token_bytes}\n{scales}\n"
            root = hashlib.sha256(kind.model + text.encode()).digest()[:16]
            self._roots[numerics, scales] = root
        return root

    def _add_known(self, block: Block) -> None:
        with self._lock:
            self._children.setdefault(block.parent, {})[block.name] = block

    def _forget(self, block: Block) -> None:
        with self._lock:
            self._children.get(block.parent, {}).pop(block.name, None)
            if not self._children.get(block.parent, True):
                del self._children[block.parent]
        self._sizes.pop(block.path.name, None)

    def _remove(self, path: Path, why: str) -> None:
        log.warning("prompt cache on disk: %s removed: %s", path, why)
        self._count(failures=1)
        self._unlink(path)

    def _unlink(self, path: Path) -> None:
        self._sizes.pop(path.name, None)
        try:
            path.unlink()
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                log.warning("prompt cache on disk: cannot remove %s: %s", path, error.strerror or error)

    # -- the thread that writes --------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            try:
                self._scan()
            except Exception as error:
                if not isinstance(error, OSError):
                    log.exception("prompt cache on disk: scan failed")
            with self._wake:
                if not self._waiting:
                    if self._closing:
                        return
                    self._wake.wait(_LOOK_SECONDS)
                waiting = self._waiting.popleft() if self._waiting else None
            if waiting is None:
                continue
            stored, numerics = waiting
            if not self._is_past_deadline():
                self._write(stored, numerics)
            with self._wake:
                self._pending -= stored.nbytes

    def _is_past_deadline(self) -> bool:
        return self._closing and time.monotonic() >= self._deadline

    def _scan(self) -> None:
        """Update the index if files were added or removed."""
        changed = self._folder.stat().st_mtime_ns
        if changed == self._looked:
            return
        if not self._family:
            kind = self._kind(())
            self._family = hashlib.sha256(kind.model + kind.memory.kind.encode()).hexdigest()[:16]
        known = {block.path.name: block for blocks in [*self._children.values()] for block in [*blocks.values()]}
        self._sizes = sizes = self._list()
        for name in known.keys() - sizes.keys():
            self._forget(known[name])
        for name in sizes.keys() - known.keys():
            if not name.startswith(self._family):
                continue
            path = self._folder / name
            try:
                self._add_known(read_head(path))
            except BadBlock as error:
                self._remove(path, str(error))
            except OSError:
                continue
        self._looked = changed

    def _list(self) -> dict[str, tuple[int, int]]:
        """List the files of all prompt caches, also with other meanings; remove abandoned unfinished files."""
        found = {}
        with os.scandir(self._folder) as entries:
            for entry in entries:
                try:
                    if entry.name.endswith(_ENDS) and len(entry.name) > 40:
                        status = entry.stat(follow_symlinks=False)
                        found[entry.name] = status.st_size, status.st_mtime_ns
                    elif entry.name.startswith(".") and entry.name.endswith(PART) and _is_old(entry):
                        os.unlink(entry.path)
                except OSError:
                    continue
        return found

    def _write(self, stored: StoredSequence, numerics: str) -> None:
        """Write the missing blocks of a sequence."""
        if time.monotonic() < self._rest_until:
            self._count(failures=1)
            return
        try:
            self._write_blocks(stored, numerics)
        except OSError as error:
            self._rest_until = time.monotonic() + _REST_SECONDS
            self._count(failures=1)
            log.warning(
                "prompt cache on disk: %s: %s; paused for %.0f s",
                self._folder, error.strerror or error, _REST_SECONDS,
            )  # fmt: skip

    def _write_blocks(self, stored: StoredSequence, numerics: str) -> None:
        memory = self._kind(stored.scales).memory
        size = piece_cells(memory.token_bytes)
        parent = root = self._root(stored.scales, numerics)
        parents, chain, start = [root], [], 0
        for n, data in regroup(stored.cells, memory.row_sizes, size):
            if self._is_past_deadline():
                return
            block = self._put_block(parent, start, stored.tokens[start : start + n], False, data)
            if block is None:
                return
            chain.append(block)
            start, parent = start + n, block.name
            if n == size:
                parents.append(block.name)
        wanted = _select_tails(stored, sum(memory.row_sizes))
        if wanted:
            self._drop_tails(stored.tokens, parents, size, wanted)
        for n in wanted:
            at = (n - 1) // size
            if not self._is_past_deadline():
                block = self._put_block(parents[at], at * size, stored.tokens[at * size : n], True, stored.tails[n])
                if block is not None:
                    chain.append(block)
        self.used(chain)

    def _drop_tails(self, tokens: Tokens, parents: list[bytes], size: int, wanted: list[int]) -> None:
        """Remove the tails of earlier, shorter versions of a sequence that it does not need any more."""
        for at, parent in enumerate(parents):
            for block in [*self._children.get(parent, {}).values()]:
                n = at * size + shared(block.tokens, tokens[at * size :])
                if block.is_tail and n == block.end and n not in wanted:
                    self._forget(block)
                    self._unlink(block.path)

    def _put_block(self, parent: bytes, start: int, tokens: Tokens, is_tail: bool, data: Cells) -> Block | None:
        """Return a block's file, written if it does not exist; None if there is no room for it."""
        name = name_of(parent, tokens, is_tail)
        known = self._children.get(parent, {}).get(name)
        if known is not None:
            return known
        path = path_of(self._folder, self._family, name, is_tail)
        if not self._make_room(data.size + 4 * tokens.size + 256):
            return None
        block = write_block(path, parent, start, tokens.copy(), is_tail, data)
        self._count(writes=1, bytes_written=block.file_bytes)
        self._sizes[path.name] = block.file_bytes, time.time_ns()
        for other in [*self._children.get(parent, {}).values()]:
            # a shorter block with the same first tokens is obsolete
            if not is_tail and not other.is_tail and shared(other.tokens, tokens) == other.tokens.size:
                self._forget(other)
                self._unlink(other.path)
        self._add_known(block)
        return block

    def _make_room(self, size: int) -> bool:
        """Remove the least recently used files of any process; return False if the new file exceeds the limit."""
        total = sum(size for size, _ in [*self._sizes.values()])
        if total + size <= self._limit:
            return True
        if size > self._limit:
            return False
        self._sizes = self._list()  # others may have used some of them
        most = min(self._limit - size, int(self._limit * (1 - _SLACK)))
        total = sum(size for size, _ in [*self._sizes.values()])
        for name, (freed, _) in sorted([*self._sizes.items()], key=lambda item: item[1][1]):
            if total <= most:
                break
            self._unlink(self._folder / name)
            total -= freed
        self._looked = None
        self._scan()
        return True


def _select_tails(stored: StoredSequence, token_bytes: int) -> list[int]:
    """Return the token counts at which a sequence's tails are worth their room.

    A window of 512 tokens may take as much as the cells of thousands. So, beyond a few, tails take no more room than
    cells: those that are quickest to recompute from the one before are dropped first.
    """
    found: list[int] = []
    for n in sorted(n for n, tail in stored.tails.items() if tail.size):
        if not found or n - found[-1] >= NEAR or n == stored.tokens.size:
            found.append(n)
    largest = max((stored.tails[n].size for n in found), default=1)
    return thin_out(found, _TAILS + stored.tokens.size * token_bytes // largest)


def _is_old(entry: os.DirEntry[str]) -> bool:
    return time.time() - entry.stat(follow_symlinks=False).st_mtime > _STALE_SECONDS
