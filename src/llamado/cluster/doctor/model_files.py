"""Checks of model files: existence, format, completeness, architecture, and memory with options that would fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from llamado.cluster.doctor.symptoms import Finding, finding
from llamado.devices import limits
from llamado.devices.split.placement import DeviceFigures, NotEnoughMemory, SplitOptions, mib
from llamado.engine.forward.fitting import MemoryRequest, fit, memory_request, sizes_for
from llamado.engine.options import EngineOptions, FitOptions, ModelSource
from llamado.engine.supported import check_supported, memory_figures
from llamado.errors import LlamadoError
from llamado.gguf.errors import GgufError, MissingBlob, SourceError, TruncatedFile
from llamado.gguf.header import Header
from llamado.gguf.reader import GGUFFile
from llamado.gguf.shards import SPLIT_COUNT, SPLIT_NO, SPLIT_TENSORS
from llamado.gguf.sources.catalog import CATALOG, LARGE
from llamado.gguf.sources.resolve import resolve
from llamado.gguf.types import TensorType
from llamado.models import InvalidModel, Model, UnsupportedModel, find_architecture, load_model

_FOREIGN_FORMATS = {
    b"<": "it is a web page: the URL was that of the page, not of the file",
    b"version https://git-lfs": "it is a Git LFS pointer: the repository was cloned without its large files",
    b"PK\x03\x04": "it is a ZIP archive, as PyTorch writes them: convert it with convert_hf_to_gguf.py",
    b"ggml": "it is a GGML file, the format before GGUF",
    b"lmgg": "it is a GGML file, the format before GGUF",
    b"tjgg": "it is a GGJT file, a format before GGUF",
    b"fmgg": "it is a GGMF file, a format before GGUF",
    b"FUGG": "its byte order is big-endian",
}
_PROJECTORS = ("clip", "mmproj")
_SMALLER = (TensorType.Q8_0, TensorType.Q4_0)
_STEP = 1024


def examine_model(spec: str, options: EngineOptions, *, context_given: bool) -> list[Finding]:
    """Return the findings of a model file with these options. `context_given`: the user chose the context size.

    For a model given by name or URL only the header is read, without a download. Raises SourceError if that fails.
    """
    if _is_remote(spec):
        named = {"path": spec, "folder": "."}
        try:
            return list(_examine(ModelSource(spec=spec).header(), options, context_given, named))
        except GgufError as error:
            return [finding("damaged", spec, str(error), **named)]
    try:
        path = resolve(spec) if spec.startswith("ollama:") else Path(spec).expanduser()
    except MissingBlob as error:
        return [finding("ollama-blob", spec, str(error), name=spec.removeprefix("ollama:"))]
    except SourceError as error:
        return [finding("ollama-model", spec, str(error), name=spec.removeprefix("ollama:"))]
    where, facts = str(path), {"path": str(path), "folder": str(path.parent)}
    if path.is_dir():
        inside = sorted(file.name for file in path.glob("*.gguf"))
        shown = ", ".join(inside[:5]) or "no .gguf file"
        return [finding("no-file", where, f"it is a folder that has {shown}", **facts)]
    try:
        with path.open("rb") as file:
            head = file.read(64)
    except FileNotFoundError:
        return [finding("no-file", where, "no such file", **facts)]
    except PermissionError as error:
        return [finding("not-readable", where, error.strerror or str(error), **facts)]
    if not head.startswith(b"GGUF"):
        why = next((text for mark, text in _FOREIGN_FORMATS.items() if head.lstrip().startswith(mark)), "")
        return [finding("not-gguf", where, f"it starts with {head[:16]!r} instead of GGUF", cause=why, **facts)]
    try:
        with GGUFFile.open(path) as opened:
            return list(_examine(opened.header, options, context_given, facts))
    except TruncatedFile as error:
        return [finding("truncated", where, str(error), **facts)]
    except GgufError as error:
        if error.field in (SPLIT_COUNT, SPLIT_NO, SPLIT_TENSORS):
            pattern = f"{path.name.rpartition('-of-')[0].rpartition('-')[0] or path.stem}*"
            return [finding("missing-part", where, str(error), pattern=pattern, **facts)]
        return [finding("damaged", where, str(error), **facts)]


def _is_remote(spec: str) -> bool:
    """Return True if a model is given by a name or URL instead of a path."""
    kind, colon, _ = spec.partition(":")
    named = spec in CATALOG or spec in LARGE or (bool(colon) and kind in ("hf", "pypi", "http", "https"))
    return named and not Path(spec).exists()


def _examine(header: Header, options: EngineOptions, context_given: bool, facts: dict[str, str]) -> Iterator[Finding]:
    where = header.source
    kind, name = header.metadata.str_("general.type", ""), header.metadata.str_("general.architecture", "")
    if kind == "adapter" or kind in _PROJECTORS or name in _PROJECTORS:
        flag = "--lora" if kind == "adapter" else "--mmproj"
        text = f"general.type is {kind!r}, the architecture {name!r}"
        yield finding("no-model", where, text, flag=flag, **facts)
        return
    try:
        find_architecture(where, header.metadata)
    except UnsupportedModel as error:
        instead = str(error).replace(f"{where}: ", "")
        yield finding("architecture", where, f"the architecture is {name!r}", instead=instead)
        return
    try:
        check_supported(header, workers=options.networked)
    except UnsupportedModel as error:
        yield finding("weight-type", where, str(error), **facts)
        return
    try:
        model = load_model(header, options.rope)
    except (InvalidModel, UnsupportedModel) as error:
        yield finding("invalid-model", where, str(error), **facts)
        return
    yield from memory_findings(header, model, options, _figures(options.split), context_given)
    if options.mlock:
        found = limits.memory()
        if header.file_bytes > found.total:
            text = f"the file has {mib(header.file_bytes)}, this process may use {mib(found.total)}"
            yield finding("lock-limit", where, text)


def _figures(split: SplitOptions | None) -> list[DeviceFigures]:
    """Return the memory of the CPU, of graphics cards and of reachable workers. Another check reports unreachable
    ones.
    """
    try:
        return memory_figures(split)
    except LlamadoError:
        return memory_figures(None if split is None else replace(split, rpc=()))


def memory_findings(
    header: Header, model: Model, options: EngineOptions, figures: Sequence[DeviceFigures], context_given: bool
) -> Iterator[Finding]:
    """Yield findings if the model does not fit in the devices' memory, with options that would fit.

    Without a given context size (`context_given`) a shortened context is no finding.
    """
    split = options.split if len(figures) > 1 else None
    wanted = memory_request(options)
    if not context_given:
        n_train = model.hparams.n_ctx_train
        wanted = wanted._replace(n_ctx=min(n_train, max(options.fit.least_context, options.n_slots)))
    exact = wanted._replace(fit=FitOptions(on=False))
    file = replace(header, mapped=False)  # a mapped file larger than memory would be read again for every token
    missing = _missing_memory(file, model, exact, figures, split)
    if missing is None:
        return
    missing_bytes = sum(missing.missing.values())
    sizes = sizes_for(file, model, exact, exact.requested_tokens(model.hparams.n_ctx_train))
    needed = sizes.weights + sum(sizes.kv) + sizes.compute + sizes.head_compute
    free = sum(one.free for one in figures)
    text = (
        f"it needs {mib(needed)} with {exact.n_ctx} tokens of context (weights {mib(sizes.weights)}, KV cache "
        f"{mib(sum(sizes.kv))}); {mib(free)} are free on {', '.join(one.name for one in figures)}"
    )
    found = fitting_options(file, model, exact, figures, split)
    command = f"llamado serve -m {header.source} {found[0]}" if found else _more_memory(header, missing_bytes)
    if len(found) > 1:
        command += "   # or " + "; or ".join(found[1:])
    yield finding("too-large", header.source, text, fits=command)
    here = limits.memory()
    if here.total < here.physical and missing_bytes <= here.physical - here.total:
        text = f"this process may use {mib(here.total)}, the machine has {mib(here.physical)}"
        yield finding("container-memory", header.source, text, needed=f"{-(-(needed + (1 << 29)) >> 30)}G")


def _more_memory(header: Header, missing_bytes: int) -> str:
    smaller = f"a smaller quantization (this file has {mib(header.file_bytes)})"
    start = f"start llamado worker on a machine with {mib(missing_bytes)} free, and add it to --rpc"
    return f"{start}   # or use {smaller}"


def fitting_options(
    file: Header, model: Model, wanted: MemoryRequest, figures: Sequence[DeviceFigures], split: SplitOptions | None
) -> list[str]:
    """Return flags with which the model fits: the longest context, then smaller cache types with their contexts."""
    found: list[str] = []
    requested = wanted.requested_tokens(model.hparams.n_ctx_train)
    least = min(requested, max(_STEP, wanted.n_slots))
    for type in (None, *_SMALLER):
        one = wanted if type is None else wanted._replace(type_k=type, type_v=type)
        cache = "" if type is None else f"-ctk {type.name.lower()} -ctv {type.name.lower()}"
        longest = _longest_context(file, model, one, figures, split, least, requested)
        if longest is None:
            continue
        size = "" if longest == requested else f"-c {longest}"
        if options := " ".join(part for part in (size, cache) if part):
            found.append(options)
        if longest == requested:
            break
    return found


def _longest_context(
    file: Header,
    model: Model,
    wanted: MemoryRequest,
    figures: Sequence[DeviceFigures],
    split: SplitOptions | None,
    least: int,
    requested: int,
) -> int | None:
    """Return the longest context that fits, in steps of 1024 tokens from `least`; None if `least` does not fit."""

    def fits(n_ctx: int) -> bool:
        return _missing_memory(file, model, wanted._replace(n_ctx=n_ctx), figures, split) is None

    if fits(requested):
        return requested
    if not fits(least):
        return None
    low, high = 0, (requested - least) // _STEP
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(least + middle * _STEP) else (low, middle - 1)
    return least + low * _STEP


def _missing_memory(
    file: Header, model: Model, wanted: MemoryRequest, figures: Sequence[DeviceFigures], split: SplitOptions | None
) -> NotEnoughMemory | None:
    try:
        fit(file, model, wanted, figures, split)
    except NotEnoughMemory as error:
        return error
    return None
