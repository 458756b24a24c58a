"""Importance matrices: sums of squares of each weight's input columns, as written by llama-imatrix.

Two formats: GGUF (`general.type` is `imatrix`; tensors `NAME.in_sum2` float32[experts, columns], `NAME.counts`
float32[experts, 1], and in newer files `NAME.in_sum`, the plain sums), and the older binary format (`.dat`). Source:
tools/imatrix/imatrix.cpp and common/imatrix-loader.cpp of llama.cpp.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.gguf import GgufError, GGUFFile
from llamado.gguf.metadata import StringArray, ValueType
from llamado.gguf.types import TensorType
from llamado.gguf.writer import NewFile, NewTensor, encode, write_gguf
from llamado.quantize.errors import QuantizeError
from llamado.quantize.mixture import EMBEDDINGS, OUTPUT
from llamado.quantize.statistics import SCHEMA, TensorSums, statistics
from llamado.quantize.types.arithmetic import Floats

DATASETS, CHUNK_COUNT, CHUNK_SIZE = "imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size"
SUM2, SUM, COUNTS, STATS = ".in_sum2", ".in_sum", ".counts", ".stats"


class ColumnSums(NamedTuple):
    """Sums over a weight's inputs: `squares` and `plain` are float32[experts, columns], `counts` the number of rows.

    `counts` is int64[experts], or has one element if all experts have the same count. In the older format, `squares`
    are means times the number of chunks, and the count is the number of chunks.
    """

    squares: Floats
    counts: NDArray[np.int64]
    plain: Floats | None = None


@dataclass(frozen=True)
class Imatrix:
    """An importance matrix: sums by weight name, and the data they were computed from."""

    source: Path
    entries: Mapping[str, ColumnSums]
    datasets: tuple[str, ...] = ()
    chunk_count: int = -1
    chunk_size: int = 0
    legacy: bool = False
    weights: dict[str, Floats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, sums in self.entries.items():
            counts = sums.counts.astype(np.float32)[:, None]
            if self.legacy:
                found = sums.squares / counts if counts[0, 0] > 0 else sums.squares
            else:
                table = sums.squares.reshape(len(counts), -1)
                found = np.where(counts > 0, table / np.where(counts > 0, counts, np.float32(1)), np.float32(1))
            if not np.isfinite(found).all():
                raise QuantizeError(f"{self.source}: {name} has sums that are not finite; the file is damaged")
            self.weights[name] = found.reshape(-1)

    def filtered(self, include: Collection[str], exclude: Collection[str]) -> Imatrix:
        """Return only the entries whose names contain one of `include`, or, if that is empty, none of `exclude`."""
        kept = {
            name: sums
            for name, sums in self.entries.items()
            if (any(part in name for part in include) if include else not any(part in name for part in exclude))
        }
        return replace(self, entries=kept, weights={})

    def overrides(self) -> list[tuple[str, int | str]]:
        """Return the key-values that a quantized file stores about the matrix."""
        found: list[tuple[str, int | str]] = [("quantize.imatrix.file", str(self.source))]
        if self.datasets:
            found.append(("quantize.imatrix.dataset", self.datasets[0]))
        found.append(("quantize.imatrix.entries_count", len(self.entries)))
        if self.chunk_count > 0:
            found.append(("quantize.imatrix.chunks_count", self.chunk_count))
        return found

    def of(self, name: str, n: int, experts: int) -> Floats | None:
        """Return the importance of a weight's columns, float32[experts, n]; None if it has no entry.

        Raises QuantizeError if the entry has another shape.
        """
        found = self.weights.get(name)
        if found is None:
            return None
        if found.size != n * experts:
            if name in EMBEDDINGS:
                return None
            raise QuantizeError(
                f"{self.source}: {found.size} sums for {name} of {experts} × {n} columns; it is for another model"
            )
        return found.reshape(experts, n)


def is_observed(name: str, *, head: bool) -> bool:
    """Return True if the weight `name` gets sums: weights of layers, and with `head` the output matrix."""
    return name.startswith("blk.") or (head and name in (OUTPUT, EMBEDDINGS[0]))


def read_imatrix(path: Path) -> Imatrix:
    """Read either format. Raises QuantizeError, GgufError."""
    try:
        with open(path, "rb") as stream:
            start = stream.read(4)
    except OSError as error:
        raise QuantizeError(f"{path}: the importance matrix cannot be read: {error.strerror}") from None
    return _read_gguf(path) if start == b"GGUF" else _read_legacy(path)


def _read_gguf(path: Path) -> Imatrix:
    with GGUFFile.open(path) as file:
        missing = [key for key in (DATASETS, CHUNK_COUNT, CHUNK_SIZE) if key not in file.metadata]
        if missing:
            raise QuantizeError(f"{path}: a GGUF file, but not an importance matrix ({missing[0]} is missing)")
        entries: dict[str, ColumnSums] = {}
        for key in sorted(file.tensors):
            if not key.endswith(SUM2):
                continue
            name = key.removesuffix(SUM2)
            if name + COUNTS not in file.tensors:
                raise QuantizeError(f"{path}: sums without counts for {name}; the file is damaged")
            counts = _floats(file, name + COUNTS).reshape(-1)
            squares = _floats(file, key).reshape(len(counts), -1)
            plain = _floats(file, name + SUM).reshape(squares.shape) if name + SUM in file.tensors else None
            entries[name] = ColumnSums(squares, np.rint(counts).astype(np.int64), plain)
        datasets = file.metadata.get(DATASETS)
        return Imatrix(
            path,
            entries,
            tuple(datasets) if isinstance(datasets, StringArray) else (),
            file.metadata.int_(CHUNK_COUNT),
            file.metadata.int_(CHUNK_SIZE),
        )


def _floats(file: GGUFFile, name: str) -> Floats:
    info = file.tensors[name]
    if info.type is not TensorType.F32:
        raise GgufError(f"sums are float32, not {info.type.name}", path=file.path, field=name)
    return file.data(name).view(np.float32).reshape(info.ne[1], info.ne[0]).copy()


def _read_legacy(path: Path) -> Imatrix:
    data = path.read_bytes()
    at = 0

    def number() -> int:
        nonlocal at
        at += 4
        return int(struct.unpack_from("<i", data, at - 4)[0])

    def take(n: int) -> bytes:
        nonlocal at
        if n < 0 or at + n > len(data):
            raise struct.error
        at += n
        return data[at - n : at]

    entries: dict[str, ColumnSums] = {}
    chunks = 0
    datasets: tuple[str, ...] = ()
    try:
        for _ in range(number()):
            name = take(number()).decode()
            count, n = number(), number()
            entries[name] = ColumnSums(np.frombuffer(take(4 * n), "<f4")[None, :].astype(np.float32), np.array([count]))
        if at < len(data):
            chunks = number()
            if at < len(data):
                datasets = (take(number()).decode("utf-8", "replace"),)
    except (struct.error, UnicodeDecodeError):
        entries = {}
    if not entries:
        raise QuantizeError(f"{path}: not an importance matrix, or a damaged one")
    return Imatrix(path, entries, datasets, chunks, legacy=True)


def write_imatrix(path: Path, given: Imatrix, *, legacy: bool = False) -> None:
    """Write either format, with entries sorted by name. Raises GgufError."""
    entries = sorted(given.entries.items())
    if legacy:
        with NewFile(path) as file:
            kept = [(name, sums) for name, sums in entries if sums.counts.any()]
            file.write(struct.pack("<i", len(kept)))
            for name, sums in kept:
                calls = -(-int(sums.counts.max()) // given.chunk_size)
                counts = sums.counts.astype(np.float32)[:, None]
                table = sums.squares.reshape(len(counts), -1)
                means = np.where(counts > 0, table / np.where(counts > 0, counts, np.float32(1)), np.float32(1))
                raw = name.encode()
                file.write(struct.pack("<i", len(raw)) + raw + struct.pack("<ii", calls, means.size))
                file.write((means * np.float32(calls)).astype("<f4"))
            dataset = given.datasets[-1].encode() if given.datasets else b""
            file.write(struct.pack("<ii", given.chunk_count, len(dataset)) + dataset)
        return
    fields = {
        "general.type": encode("imatrix"),
        DATASETS: encode(StringArray.of(given.datasets)),
        CHUNK_COUNT: encode(given.chunk_count, ValueType.UINT32),
        CHUNK_SIZE: encode(given.chunk_size, ValueType.UINT32),
        "imatrix.stats_schema": encode(StringArray.of(SCHEMA)),
    }
    found = statistics({name: TensorSums(*sums) for name, sums in entries})
    tensors: list[NewTensor] = []
    data: list[Floats] = []
    for name, sums in entries:
        table = sums.squares.reshape(len(sums.counts), -1)
        rows = [(SUM2, table), (COUNTS, sums.counts.astype(np.float32)[:, None])]
        if sums.plain is not None:
            rows.append((SUM, sums.plain.reshape(table.shape)))
        rows.append((STATS, np.array([found[name]], np.float32)))
        for suffix, array in rows:
            tensors.append(NewTensor(name + suffix, TensorType.F32, (array.shape[1], array.shape[0])))
            data.append(np.ascontiguousarray(array, "<f4"))
    write_gguf(path, fields, tensors, data)


def merge(parts: Sequence[Imatrix], chunk_size: int) -> Imatrix:
    """Merge several matrices as if they had been computed at once. Raises QuantizeError if their models differ."""
    entries: dict[str, ColumnSums] = {}
    for part in parts:
        for name, sums in part.entries.items():
            if part.legacy:  # means times the number of chunks
                sums = ColumnSums(sums.squares * np.float32(chunk_size), sums.counts * chunk_size)
            known = entries.get(name)
            if known is None:
                entries[name] = sums
                continue
            counts = sums.counts if len(sums.counts) >= len(known.counts) else np.resize(sums.counts, len(known.counts))
            if known.squares.size != sums.squares.size or len(known.counts) not in (1, len(counts)):
                raise QuantizeError(f"{part.source}: {name} has other columns than in {parts[0].source}")
            plain = None
            if known.plain is not None and sums.plain is not None:
                plain = known.plain.reshape(sums.plain.shape) + sums.plain
            squares = known.squares.reshape(sums.squares.shape) + sums.squares
            entries[name] = ColumnSums(squares, known.counts + counts, plain)
    most = max((int(sums.counts.max()) for sums in entries.values()), default=0)
    datasets = tuple(name for part in parts for name in part.datasets)
    chunks = (most + chunk_size // 2) // chunk_size
    return Imatrix(parts[0].source, entries, datasets, chunks, chunk_size)
