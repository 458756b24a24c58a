"""Write quantized files: pieces of rows are converted on all cores and written in file order, with little memory."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from llamado.gguf import GGUFFile
from llamado.gguf.writer import NewFile, alignment_of, header_bytes, padded
from llamado.quantize.errors import QuantizeError
from llamado.quantize.plan import FilePlan, OutputFile, QuantizeRequest, TensorPlan
from llamado.quantize.rows import convert, is_rounded
from llamado.quantize.types.arithmetic import Bytes, Floats

PIECE = 1 << 16
"""Weights converted at a time by a thread, so that they and intermediate results fit its cache."""
ROUNDED_PIECE = 1 << 19
"""Weights converted at a time without intermediate results; larger, because each piece costs Python overhead."""
_BYTES = 8 << 20  # copied at a time

Progress = Callable[[str, int], None]
"""Callback with a tensor's name and the number of bytes written since the last call."""


def output_paths(path: Path, request: QuantizeRequest, n_files: int) -> list[Path]:
    """Return the paths of the files: `path`, or `NAME-00001-of-0000N.gguf` beside it."""
    if not request.keep_split:
        return [path]
    stem = path.name.removesuffix(".gguf")
    return [path.with_name(f"{stem}-{i:05d}-of-{n_files:05d}.gguf") for i in range(1, n_files + 1)]


def write(
    file: GGUFFile,
    plan: FilePlan,
    request: QuantizeRequest,
    paths: Sequence[Path],
    *,
    n_threads: int | None = None,
    progress: Progress = lambda name, n: None,
) -> None:
    """Write the files of a plan, each atomically. Raises QuantizeError, GgufError."""
    if plan.needing_imatrix:
        raise QuantizeError(
            f"{plan.needing_imatrix[0]} and {len(plan.needing_imatrix) - 1} other tensors are useless in "
            f"{request.kind.name} without an importance matrix: compute one with "
            "llamado imatrix and pass it with --imatrix"
        )
    for path in paths:
        if any(path.exists() and os.path.samefile(path, one) for one in file.shard_paths):
            raise QuantizeError(f"{path}: this is the model itself; choose another name")
    n = n_threads or len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(n, thread_name_prefix="quantize") as pool:
        for one, path in zip(plan.files, paths, strict=True):
            _write_one(file, one, request, path, pool, 2 * n, progress)


def _write_one(
    file: GGUFFile,
    one: OutputFile,
    request: QuantizeRequest,
    path: Path,
    pool: ThreadPoolExecutor,
    ahead: int,
    progress: Progress,
) -> None:
    alignment = alignment_of(one.fields)
    waiting: deque[tuple[TensorPlan, bool, Future[Bytes]]] = deque()

    with NewFile(path) as out:

        def put() -> None:
            tensor_plan, is_last, future = waiting.popleft()
            n = out.write(future.result())
            if is_last:
                out.pad(padded(tensor_plan.target.nbytes, alignment) - tensor_plan.target.nbytes)
            progress(tensor_plan.target.name, n)

        try:
            out.write(header_bytes(one.fields, [tensor_plan.target for tensor_plan in one.tensor_plans]))
            for tensor_plan in one.tensor_plans:
                jobs = list(_pieces(file, tensor_plan, request))
                for i, job in enumerate(jobs):
                    waiting.append((tensor_plan, i == len(jobs) - 1, pool.submit(job)))
                    if len(waiting) >= ahead:
                        put()
            while waiting:
                put()
        except BaseException:
            for _, _, future in waiting:
                future.cancel()
            raise


def _pieces(file: GGUFFile, tensor_plan: TensorPlan, request: QuantizeRequest) -> Iterator[Callable[[], Bytes]]:
    """Yield the functions that compute the pieces of a tensor, in order."""
    data = file.data(tensor_plan.source.name)
    if not tensor_plan.is_changed:
        for at in range(0, len(data), _BYTES):
            yield lambda at=at: data[at : at + _BYTES]  # type: ignore[misc]
        return
    n, rows = tensor_plan.source.ne[0], tensor_plan.source.ne[1]
    row_bytes = tensor_plan.source.type.row_bytes(n)
    table = data.reshape(-1, row_bytes)
    weights = request.imatrix.of(tensor_plan.weights_name, n, tensor_plan.source.ne[2]) if request.imatrix else None
    for first in range(0, len(table), rows):  # each expert has its own weights
        columns = None if weights is None else weights[first // rows]
        rounds = is_rounded(tensor_plan.source.type, tensor_plan.target.type, columns)
        height = max(1, (ROUNDED_PIECE if rounds else PIECE) // n)
        for at in range(first, first + rows, height):
            part = table[at : min(at + height, first + rows)]
            yield lambda part=part, columns=columns: _convert(part, tensor_plan, columns)  # type: ignore[misc]


def _convert(rows: Bytes, tensor_plan: TensorPlan, weights: Floats | None) -> Bytes:
    target = tensor_plan.target.type
    found = convert(rows, tensor_plan.source.type, tensor_plan.source.ne[0], target, weights)
    if found is None:
        raise QuantizeError(
            f"{tensor_plan.source.name}: it has elements that are not finite, or not in {target.name}; "
            "the file is damaged"
        )
    return found
