"""`llamado quantize`: flags of llama-quantize, and the same output byte for byte."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from llamado.commands.options import metadata_overrides
from llamado.flags import FlagError, ParsedFlags
from llamado.gguf import GGUFFile
from llamado.gguf.sources.stored import file_of
from llamado.gguf.types import TensorType
from llamado.quantize.file_types import COPY, FILE_TYPES, FileType, find_file_type, tensor_type
from llamado.quantize.imatrix import Imatrix, read_imatrix
from llamado.quantize.mixture import TypeOptions
from llamado.quantize.plan import FilePlan, QuantizeRequest, plan
from llamado.quantize.write import output_paths, write
from llamado.terminal.console import Console


def run_quantize(flags: ParsedFlags, words: list[str]) -> int:
    """Run the command. `words`: IN [OUT] TYPE [THREADS]. Raises LlamadoError."""
    source, given, kind, n_threads = _words(words)
    request = _request(flags, kind)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    began = time.monotonic()
    with GGUFFile.open(source) as file:
        file_plan = plan(file, request)
        for name in file_plan.fallbacks:
            console.print(f"{name}: its rows do not fit the blocks of the usual type; using another type", markup=False)
        # As in llama-quantize, next to the input file; the files of named models are in a cache.
        beside = source.parent if Path(words[0]).expanduser().exists() else Path()
        path = given or beside / f"ggml-model-{kind.name}.gguf"
        paths = output_paths(path, request, len(file_plan.files))
        _print_summary(console, file, file_plan)
        if flags.dry_run:
            if file_plan.needing_imatrix:
                console.print(f"{kind.name} needs an importance matrix (--imatrix); llamado imatrix computes one")
            return 0
        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=file_plan.nbytes)
            write(
                file, file_plan, request, paths, n_threads=n_threads,
                progress=lambda name, n: bar.update(task, advance=n, description=name),
            )  # fmt: skip
    console.print(f"{', '.join(map(str, paths))}: written in {time.monotonic() - began:.1f} s", markup=False)
    return 0


def types_table() -> str:
    """Return the file types for `--help`, smallest first: name, bits per weight, purpose."""
    kinds = sorted(FILE_TYPES, key=lambda kind: kind.bits)
    rows = [f"  {kind.name:<9}  {kind.bits:>5g}  {kind.about}" for kind in kinds]
    rows.append(f"  {COPY.name:<9}  {'':>5}  {COPY.about}")
    return "\n".join(["TYPE, bits per weight of most tensors, and purpose:", *rows])


def _words(words: list[str]) -> tuple[Path, Path | None, FileType, int | None]:
    if len(words) < 2:
        raise FlagError("expected a model and a type: llamado quantize IN.gguf [OUT.gguf] TYPE; --help lists the types")
    source, *rest = words
    kind = find_file_type(rest[0])
    out = None
    if kind is None:
        out = Path(rest.pop(0))
        kind = find_file_type(rest[0]) if rest else None
    if kind is None:
        name = rest[0] if rest else str(out)
        raise FlagError(f"{name!r} is not a type: expected one of {', '.join(k.name for k in (*FILE_TYPES, COPY))}")
    n_threads = None
    if len(rest) > 1:
        if not rest[1].isdigit():
            raise FlagError(f"expected a number of threads, got {rest[1]!r}")
        n_threads = int(rest[1]) or None
    if len(rest) > 2:
        raise FlagError(f"unexpected argument {rest[2]!r}: llamado quantize IN.gguf [OUT.gguf] TYPE [THREADS]")
    return file_of(source), out, kind, n_threads


def _request(flags: ParsedFlags, kind: FileType) -> QuantizeRequest:
    types = [_pattern("--tensor-type", text) for text in flags.tensor_type or []]
    if flags.tensor_type_file:
        try:
            words = Path(flags.tensor_type_file).read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError) as error:
            raise FlagError(f"--tensor-type-file {flags.tensor_type_file}: {error}") from None
        types += [_pattern("--tensor-type-file", text) for text in words]
    type_options = TypeOptions(
        pure=flags.pure,
        keep_output=flags.leave_output_tensor,
        output=tensor_type(flags.output_tensor_type) if flags.output_tensor_type else None,
        embedding=tensor_type(flags.token_embedding_type) if flags.token_embedding_type else None,
        types=types,
    )
    return QuantizeRequest(
        kind,
        type_options,
        _imatrix(flags),
        allow_requantize=flags.allow_requantize,
        prune=_layers(flags.prune_layers),
        overrides=metadata_overrides(flags.override_kv or []),
        keep_split=flags.keep_split,
    )


def _imatrix(flags: ParsedFlags) -> Imatrix | None:
    include, exclude = flags.include_weights or [], flags.exclude_weights or []
    if include and exclude:
        raise FlagError("--include-weights and --exclude-weights: give one of them")
    if not flags.imatrix:
        return None
    found = read_imatrix(Path(flags.imatrix))
    if include or exclude:
        found = found.filtered(include, exclude)
    return found if found.entries else None


def _pattern(flag: str, text: str) -> tuple[str, TensorType]:
    name, _, type_ = text.partition("=")
    if not name or not type_:
        raise FlagError(f"{flag}: expected NAME=TYPE, got {text!r}")
    try:
        re.compile(name.lower())
    except re.error as error:
        raise FlagError(f"{flag}: {name!r} is not a regular expression: {error}") from None
    return name.lower(), tensor_type(type_)


def _layers(text: str | None) -> frozenset[int]:
    if not text:
        return frozenset()
    numbers = text.split(",")
    if not all(number.isdigit() for number in numbers):
        raise FlagError(f"--prune-layers: expected comma-separated layer numbers, got {text!r}")
    return frozenset(map(int, numbers))


def _print_summary(console: Console, file: GGUFFile, file_plan: FilePlan) -> None:
    """Print the sizes before and after, and the number of tensors of each type."""
    steps = [step for one in file_plan.files for step in one.tensor_plans]
    counts: dict[str, int] = {}
    for step in steps:
        counts[step.target.type.name] = counts.get(step.target.type.name, 0) + 1
    n = sum(step.source.n_elements for step in steps) or 1
    console.print("tensors: " + ", ".join(f"{count} {name}" for name, count in sorted(counts.items())))
    for label, size in (("model", file.nbytes), ("quantized", file_plan.nbytes)):
        console.print(f"{label:9} {size / 2**20:9.2f} MiB, {8 * size / n:.2f} bits per weight")
    sys.stderr.flush()
