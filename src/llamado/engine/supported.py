"""Checks if a model can run, from the header of its file: the one place that decides what is supported."""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from llamado.devices import limits
from llamado.devices.registry import DeviceOptions, backend
from llamado.devices.split.measure import figures_of
from llamado.devices.split.placement import DeviceFigures, NotEnoughMemory, SplitOptions, mib
from llamado.engine.forward.fitting import Fit, fit, memory_request, read_text
from llamado.engine.local_devices import open_accelerators
from llamado.engine.options import EngineOptions, ModelSource
from llamado.gguf.header import Header
from llamado.gguf.inspect import size_text
from llamado.gguf.reader import GGUFFile
from llamado.gguf.report import Progress, Warn
from llamado.gguf.sources.resolve import resolve, resolve_projector
from llamado.models import InvalidModel, UnsupportedModel, find_architecture, load_model
from llamado.models.encoders.registry import load_encoders
from llamado.models.hparams import override_metadata

log = logging.getLogger(__name__)


def check_supported(header: Header, *, workers: bool = False) -> None:
    """Raise `UnsupportedModel` for an unsupported architecture or weight type, with a list of the supported ones.

    With `workers`, weights may be of types that only workers have kernels for.
    """
    find_architecture(header.source, header.metadata)
    check_types(header, workers=workers)


def check_types(header: Header, *, workers: bool = False) -> None:
    """Raise `UnsupportedModel` for a weight type, or a matrix type of an adapter, without kernel.

    With `workers` it may be one that only workers have kernels for.
    """
    types = None if workers else backend("cpu").weight_types()
    if types is None:
        return
    for name, info in header.tensors.items():
        if info.type not in types:
            raise UnsupportedModel(
                f"{header.source}: tensor '{name}' is of type {info.type.name}, which has no kernel here; these types "
                f"have: {', '.join(sorted(type.name for type in types))}"
            )


def fetch_model(
    source: ModelSource,
    options: EngineOptions,
    *,
    progress: Progress | None = None,
    warn: Warn | None = None,
    say: Warn = log.info,
) -> Path:
    """Return the file of a model, fetched first if necessary, if it can run with these options.

    `progress(done, total)` counts bytes, `warn` gets messages for the user (by default they are logged), `say` gets the
    model's memory needs. Raises SourceError, and before anything but the header is fetched the errors of
    `check_before_fetching`.
    """
    return resolve(
        source.spec,
        hf_repo=source.hf_repo,
        hf_file=source.hf_file,
        progress=progress,
        warn=warn,
        check=lambda header: check_before_fetching(header, options, say),
    )


def with_projector(source: ModelSource, options: EngineOptions, *, progress: Progress | None = None) -> EngineOptions:
    """Return the options with the path of the projector file, which is fetched first if necessary.

    One that comes with the model (`mmproj_auto`) is left out, with a warning, if it is of an unsupported kind or the
    model does not generate text. Raises SourceError and GgufError.
    """
    if options.mmproj is not None:
        return replace(options, mmproj=str(resolve(options.mmproj, progress=progress)))
    if not options.mmproj_auto or options.embeds:
        return options
    path = resolve_projector(source.spec, hf_repo=source.hf_repo, hf_file=source.hf_file, progress=progress)
    if path is None:
        return options
    try:
        with GGUFFile.open(path) as file:
            load_encoders(file)
    except (UnsupportedModel, InvalidModel) as error:
        log.warning("%s: pictures and sounds are off: %s", path, error)
        return options
    return replace(options, mmproj=str(path))


def check_before_fetching(header: Header, options: EngineOptions, say: Warn) -> None:
    """Reject a model that would not run here, from its header alone; `say` gets the memory needs of others.

    Raises the errors of `check_supported` and `memory_estimate`; no NotEnoughMemory if `options.fit` is off.
    """
    check_supported(header, workers=options.networked)
    try:
        lines = memory_estimate(header, options)
    except NotEnoughMemory as error:
        if options.fit.on:
            raise NotEnoughMemory(
                f"{header.source} is not fetched: {error} (--fit off fetches it all the same)",
                error.missing,
                error.placement,
            ) from error
        lines = [str(error)]
    for line in lines:
        say(line)


def memory_estimate(header: Header, options: EngineOptions) -> list[str]:
    """Describe the memory that a model takes on this machine and the workers.

    Raises NotEnoughMemory with a list of what would fit, InvalidModel, UnsupportedModel, GgufError, WorkersUnreachable.
    """
    if options.metadata:
        header = replace(header, metadata=override_metadata(header.metadata, options.metadata))
    model = load_model(header, options.rope)
    figures = memory_figures(options.split)
    try:
        found = fit(header, model, memory_request(options), figures, options.split)
    except NotEnoughMemory as error:
        fitting = _fitting(header, sum(error.missing.values()))
        raise NotEnoughMemory(f"{error}{fitting}", error.missing, error.placement) from error
    return [_memory_report(header, found, figures), *found.notes]


def memory_figures(split: SplitOptions | None) -> list[DeviceFigures]:
    """Return the memory of devices; their speeds, which are not measured for this, are set equal.

    Raises WorkersUnreachable.
    """
    here = limits.memory()
    figures = [DeviceFigures(name="CPU", local=True, free=here.free, total=here.total, decode=1.0)]
    if split is None:
        return figures
    with closing(open_accelerators(split)) as accelerators:
        figures += [replace(figures_of(device), decode=1.0) for device in accelerators.devices]
    devices = backend("rpc", split.rpc, DeviceOptions(ca=split.ca, cert=split.cert, key=split.key)).devices()
    try:
        return figures + [replace(figures_of(device), decode=1.0) for device in devices]
    finally:
        for device in devices:
            device.close()


def _memory_report(header: Header, found: Fit, figures: list[DeviceFigures]) -> str:
    sizes = found.sizes
    compute = sizes.compute + sizes.head_compute
    whole = sizes.weights + sum(sizes.kv) + compute  # the embedding, which is read from the file, takes next to nothing
    free = sum(device.free for device in figures)
    return (
        f"{header.source}: {size_text(header.file_bytes)}; it takes {mib(whole)} of memory with {found.n_cells} "
        f"tokens of context (weights {mib(sizes.weights)}{read_text(sizes)}, "
        f"K/V cache {mib(sum(sizes.kv))}, compute {mib(compute)}); {mib(free)} are free"
    )


def _fitting(header: Header, missing: int) -> str:
    """List other files of the same model that are small enough, the largest first."""
    if not header.alternatives:
        return ""
    most = header.file_bytes - missing
    sizes = sorted(((n, name) for name, n in header.alternatives.items() if n <= most), reverse=True)
    if not sizes:
        return ". None of its other quantizations would fit"
    return ". What would fit: " + ", ".join(f"{name} ({size_text(n)})" for n, name in sizes[:3])
