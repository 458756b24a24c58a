"""Writes quantized files: rows go through in pieces, on all cores, in the order of the file; memory stays small."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from llamado.gguf import GGUFFile
from llamado.gguf.writer import NewFile, alignment_of, header_bytes, padded
from llamado.quantize.errors import QuantizeError
from llamado.quantize.plan import File, FilePlan, QuantizeRequest, Step
from llamado.quantize.rows import convert, is_rounded
from llamado.quantize.types.arithmetic import Bytes, Floats

PIECE = 1 << 16
"""Weights that a thread works on at a time: they and what is computed from them stay in its cache."""
ROUNDED_PIECE = 1 << 19
"""Of those of which nothing but the result is written: more of them, for each piece costs a turn of Python."""
_BYTES = 8 << 20  # of a tensor that is copied, at a time

Progress = Callable[[str, int], None]
"""Is told a tensor's name, and how many bytes of the file came since."""


def output_paths(path: Path, request: QuantizeRequest, n_files: int) -> list[Path]:
    """Where the files go: `path`, or beside it `NAME-00001-of-0000N.gguf`."""
    if not request.keep_split:
        return [path]
    stem = path.name.removesuffix(".gguf")
    return [path.with_name(f"{stem}-{i:05d}-of-{n_files:05d}.gguf") for i in range(1, n_files + 1)]


def write(
    file: GGUFFile,
    what: FilePlan,
    request: QuantizeRequest,
    paths: Sequence[Path],
    *,
    n_threads: int | None = None,
    progress: Progress = lambda name, n: None,
) -> None:
    """Writes the files of a plan; each appears under its name when it is whole. Raises QuantizeError, GgufError."""
    if what.wanting:
        raise QuantizeError(
            f"{what.wanting[0]} and {len(what.wanting) - 1} other tensors would be worth nothing in "
            f"{request.kind.name} without an importance matrix: llamado imatrix makes one, --imatrix takes it"
        )
    for path in paths:
        if any(path.exists() and os.path.samefile(path, one) for one in file.shard_paths):
            raise QuantizeError(f"{path}: the model itself is there; choose another name")
    n = n_threads or len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(n, thread_name_prefix="quantize") as pool:
        for one, path in zip(what.files, paths, strict=True):
            _write_one(file, one, request, path, pool, 2 * n, progress)


def _write_one(
    file: GGUFFile,
    one: File,
    request: QuantizeRequest,
    path: Path,
    pool: ThreadPoolExecutor,
    ahead: int,
    progress: Progress,
) -> None:
    alignment = alignment_of(one.fields)
    waiting: deque[tuple[Step, bool, Future[Bytes]]] = deque()

    with NewFile(path) as out:

        def put() -> None:
            step, is_last, future = waiting.popleft()
            n = out.write(future.result())
            if is_last:
                out.pad(padded(step.target.nbytes, alignment) - step.target.nbytes)
            progress(step.target.name, n)

        try:
            out.write(header_bytes(one.fields, [step.target for step in one.steps]))
            for step in one.steps:
                jobs = list(_pieces(file, step, request))
                for i, job in enumerate(jobs):
                    waiting.append((step, i == len(jobs) - 1, pool.submit(job)))
                    if len(waiting) >= ahead:
                        put()
            while waiting:
                put()
        except BaseException:
            for _, _, future in waiting:
                future.cancel()
            raise


def _pieces(file: GGUFFile, step: Step, request: QuantizeRequest) -> Iterator[Callable[[], Bytes]]:
    """What computes the pieces of a tensor, in order."""
    data = file.data(step.source.name)
    if not step.changes:
        for at in range(0, len(data), _BYTES):
            yield lambda at=at: data[at : at + _BYTES]  # type: ignore[misc]
        return
    n, rows = step.source.ne[0], step.source.ne[1]
    row_bytes = step.source.type.row_bytes(n)
    table = data.reshape(-1, row_bytes)
    weights = request.imatrix.of(step.weights_name, n, step.source.ne[2]) if request.imatrix else None
    for first in range(0, len(table), rows):  # each expert has weights of its own
        columns = None if weights is None else weights[first // rows]
        rounds = is_rounded(step.source.type, step.target.type, columns)
        height = max(1, (ROUNDED_PIECE if rounds else PIECE) // n)
        for at in range(first, first + rows, height):
            part = table[at : min(at + height, first + rows)]
            yield lambda part=part, columns=columns: _convert(part, step, columns)  # type: ignore[misc]


def _convert(rows: Bytes, step: Step, weights: Floats | None) -> Bytes:
    target = step.target.type
    found = convert(rows, step.source.type, step.source.ne[0], target, weights)
    if found is None:
        raise QuantizeError(
            f"{step.source.name}: it has elements that are no numbers, or none in {target.name}; the file is damaged"
        )
    return found
