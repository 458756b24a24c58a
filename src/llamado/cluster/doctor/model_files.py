"""A model's file: whether it is there, whole, known here, and fits memory; and what would fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from llamado.cluster.doctor.symptoms import Finding, finding
from llamado.devices import limits
from llamado.devices.registry import DeviceOptions, backend
from llamado.devices.split.measure import figures_of
from llamado.devices.split.placement import DeviceFigures, NotEnoughMemory, SplitOptions, mib
from llamado.engine.forward.fitting import MemoryRequest, fit, memory_request, sizes_for
from llamado.engine.options import EngineOptions, FitOptions, ModelSource
from llamado.engine.supported import check_supported
from llamado.errors import LlamadoError
from llamado.gguf.errors import GgufError, MissingBlob, SourceError, TruncatedFile
from llamado.gguf.header import Header
from llamado.gguf.reader import GGUFFile
from llamado.gguf.shards import SPLIT_COUNT, SPLIT_NO, SPLIT_TENSORS
from llamado.gguf.sources.catalog import CATALOG, LARGE
from llamado.gguf.sources.resolve import resolve
from llamado.gguf.types import TensorType
from llamado.models import InvalidModel, Model, UnsupportedModel, find_architecture, load_model

_OTHERS = {
    b"<": "it is a page of the web: the address was that of the page, not of the file",
    b"version https://git-lfs": "it is a pointer of Git LFS: the repository was cloned without its large files",
    b"PK\x03\x04": "it is a ZIP archive, as PyTorch writes them: convert_hf_to_gguf.py makes a GGUF of it",
    b"ggml": "it is a GGML file, the format before GGUF",
    b"lmgg": "it is a GGML file, the format before GGUF",
    b"tjgg": "it is a GGJT file, a format before GGUF",
    b"fmgg": "it is a GGMF file, a format before GGUF",
    b"FUGG": "its bytes are in the order of another kind of machine",
}
_PROJECTORS = ("clip", "mmproj")
_SMALLER = (TensorType.Q8_0, TensorType.Q4_0)
_STEP = 1024


def examine_model(spec: str, options: EngineOptions, *, asked: bool) -> list[Finding]:
    """All that ails a model's file, with these options; `asked`: whether someone gave the size of the context.

    Of a model that has a name or a URL the header alone is read, wherever it is. Raises SourceError where that fails.
    """
    if _is_elsewhere(spec):
        named = {"path": spec, "folder": "."}
        try:
            return list(_examine(ModelSource(spec=spec).header(), options, asked, named))
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
        return [finding("no-file", where, f"it is a folder, with {', '.join(inside[:5]) or 'no .gguf file'}", **facts)]
    try:
        with path.open("rb") as file:
            begins = file.read(64)
    except FileNotFoundError:
        return [finding("no-file", where, "there is no such file", **facts)]
    except PermissionError as error:
        return [finding("not-readable", where, error.strerror or str(error), **facts)]
    if not begins.startswith(b"GGUF"):
        why = next((text for mark, text in _OTHERS.items() if begins.lstrip().startswith(mark)), "")
        return [finding("not-gguf", where, f"it begins with {begins[:16]!r}, not with GGUF", cause=why, **facts)]
    try:
        with GGUFFile.open(path) as opened:
            return list(_examine(opened.header, options, asked, facts))
    except TruncatedFile as error:
        return [finding("truncated", where, str(error), **facts)]
    except GgufError as error:
        if error.field in (SPLIT_COUNT, SPLIT_NO, SPLIT_TENSORS):
            pattern = f"{path.name.rpartition('-of-')[0].rpartition('-')[0] or path.stem}*"
            return [finding("missing-part", where, str(error), pattern=pattern, **facts)]
        return [finding("damaged", where, str(error), **facts)]


def _is_elsewhere(spec: str) -> bool:
    """Whether a model is not named by its path."""
    kind, colon, _ = spec.partition(":")
    named = spec in CATALOG or spec in LARGE or (bool(colon) and kind in ("hf", "pypi", "http", "https"))
    return named and not Path(spec).exists()


def _examine(header: Header, options: EngineOptions, asked: bool, facts: dict[str, str]) -> Iterator[Finding]:
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
        check_supported(header, workers=options.split is not None)
    except UnsupportedModel as error:
        yield finding("weight-type", where, str(error), **facts)
        return
    try:
        model = load_model(header, options.rope)
    except (InvalidModel, UnsupportedModel) as error:
        yield finding("invalid-model", where, str(error), **facts)
        return
    yield from memory_findings(header, model, options, _figures(options.split), asked)
    if options.mlock:
        found = limits.memory()
        if header.file_bytes > found.total:
            text = f"{mib(header.file_bytes)} are to be locked, this process may have {mib(found.total)}"
            yield finding("lock-limit", where, text)


def _figures(split: SplitOptions | None) -> list[DeviceFigures]:
    """Memory of this machine and of the workers that answer; those that do not are another check's business."""
    here = limits.memory()
    figures = [DeviceFigures(name="CPU", local=True, free=here.free, total=here.total, decode=1.0)]
    if split is None:
        return figures
    options = DeviceOptions(ca=split.ca, cert=split.cert, key=split.key)
    try:
        devices = backend("rpc", split.rpc, options).devices()
    except LlamadoError:
        return figures
    try:
        return figures + [replace(figures_of(device), decode=1.0) for device in devices]
    finally:
        for device in devices:
            device.close()


def memory_findings(
    header: Header, model: Model, options: EngineOptions, figures: Sequence[DeviceFigures], asked: bool
) -> Iterator[Finding]:
    """Whether the model fits devices of these figures, and which options would.

    Where nobody said how long the context is (`asked`), one that is cut is no fault.
    """
    split = options.split if len(figures) > 1 else None
    wanted = memory_request(options)
    if not asked:
        n_train = model.hparams.n_ctx_train
        wanted = wanted._replace(n_ctx=min(n_train, max(options.fit.least_context, options.n_slots)))
    exact = wanted._replace(fit=FitOptions(on=False))
    file = replace(header, mapped=False)  # what is read from the disk again and again does not fit
    lacking = _lacking(file, model, exact, figures, split)
    if lacking is None:
        return
    missing = sum(lacking.missing.values())
    sizes = sizes_for(file, model, exact, exact.requested_tokens(model.hparams.n_ctx_train))
    whole = sizes.weights + sum(sizes.kv) + sizes.compute + sizes.head_compute
    free = sum(one.free for one in figures)
    text = (
        f"it takes {mib(whole)} with {exact.n_ctx} tokens of context (weights {mib(sizes.weights)}, K/V cache "
        f"{mib(sum(sizes.kv))}); {mib(free)} are free on {', '.join(one.name for one in figures)}"
    )
    found = fitting_options(file, model, exact, figures, split)
    command = f"llamado serve -m {header.source} {found[0]}" if found else _more_memory(header, missing)
    if len(found) > 1:
        command += "   # or " + "; or ".join(found[1:])
    yield finding("too-large", header.source, text, fits=command)
    here = limits.memory()
    if here.total < here.physical and missing <= here.physical - here.total:
        text = f"this process may have {mib(here.total)}, the machine has {mib(here.physical)}"
        yield finding("container-memory", header.source, text, needed=f"{-(-(whole + (1 << 29)) >> 30)}G")


def _more_memory(header: Header, missing: int) -> str:
    smaller = f"a smaller quantization than this of {mib(header.file_bytes)}"
    return f"start llamado worker on a machine with {mib(missing)} free, and give it to --rpc   # or take {smaller}"


def fitting_options(
    file: Header, model: Model, wanted: MemoryRequest, figures: Sequence[DeviceFigures], split: SplitOptions | None
) -> list[str]:
    """Flags with which the model fits, those that change least first: the type of the cache, the context, both."""
    found: list[str] = []
    asked = wanted.requested_tokens(model.hparams.n_ctx_train)
    least = min(asked, max(_STEP, wanted.n_slots))
    for type in (None, *_SMALLER):
        one = wanted if type is None else wanted._replace(type_k=type, type_v=type)
        cache = "" if type is None else f"-ctk {type.name.lower()} -ctv {type.name.lower()}"
        longest = _longest(file, model, one, figures, split, least, asked)
        if longest is None:
            continue
        size = "" if longest == asked else f"-c {longest}"
        if options := " ".join(part for part in (size, cache) if part):
            found.append(options)
        if longest == asked:
            break
    return found


def _longest(
    file: Header,
    model: Model,
    wanted: MemoryRequest,
    figures: Sequence[DeviceFigures],
    split: SplitOptions | None,
    least: int,
    asked: int,
) -> int | None:
    """The longest context that fits, in steps of 1024 tokens above the least; None where not even that does."""

    def fits(n_ctx: int) -> bool:
        return _lacking(file, model, wanted._replace(n_ctx=n_ctx), figures, split) is None

    if fits(asked):
        return asked
    if not fits(least):
        return None
    low, high = 0, (asked - least) // _STEP
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(least + middle * _STEP) else (low, middle - 1)
    return least + low * _STEP


def _lacking(
    file: Header, model: Model, wanted: MemoryRequest, figures: Sequence[DeviceFigures], split: SplitOptions | None
) -> NotEnoughMemory | None:
    try:
        fit(file, model, wanted, figures, split)
    except NotEnoughMemory as error:
        return error
    return None
