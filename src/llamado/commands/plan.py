"""`llamado plan`: layer placement and predicted time per token; and `--list-devices`."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from llamado.commands.options import engine_options, model_source
from llamado.commands.split_options import split_options
from llamado.devices.split.explain import idle, shares_text
from llamado.devices.split.placement import (
    DeviceFigures,
    ModelSizes,
    NotEnoughMemory,
    Placement,
    Share,
    SplitOptions,
    check_memory,
    mib,
    predict,
)
from llamado.devices.split.rules import place
from llamado.engine.options import EngineOptions
from llamado.errors import LlamadoError
from llamado.flags import ParsedFlags
from llamado.terminal.text import print

if TYPE_CHECKING:
    from rich.table import Table

    from llamado.devices.accelerators import Accelerators
    from llamado.devices.device import Device
    from llamado.devices.registry import Backend
    from llamado.engine.drafts.sizes import PlannedDraft
    from llamado.gguf.header import Header
    from llamado.models.base import Model

_MIB = 1 << 20
_WIDTH = 150  # columns of output to a pipe or file

AUTO = "auto: least time per token"
CARDS = "auto: as much as fits the graphics cards"
MEMORY = "memory: by free memory, as llama.cpp does"


def list_devices(flags: ParsedFlags) -> int:
    """Print the devices of this machine and of all workers, as llama.cpp does. Return 1 if a worker does not answer."""
    from llamado.devices.accelerators import Accelerators
    from llamado.devices.cards import has_card
    from llamado.devices.registry import DeviceOptions, Unreachable, open_device

    split = split_options(flags)
    print("Available devices:")
    here = open_device("cpu", DeviceOptions(n_threads=1))
    print(f"  CPU: {processor()} ({_memory(here)})", flush=True)
    here.close()
    failed = False
    accelerators = Accelerators()
    for device in accelerators.devices:
        print(f"  {device.name}: {device.details} ({_memory(device)})", flush=True)
    accelerators.close()
    for kind, problem in accelerators.problems.items():
        if has_card(kind):
            print(f"  {kind.upper()}: not available: {problem}")
    number = 0
    for worker in _workers(split).connect() if split is not None and split.rpc else ():
        if isinstance(worker, Unreachable):
            print(f"  RPC{number}: {worker.where} (not available: {worker.why})")
            failed, number = True, number + 1
            continue
        for device in worker:
            try:
                print(f"  RPC{number}: {device.endpoint} ({_memory(device)})")
            except LlamadoError as error:
                print(f"  RPC{number}: {device.endpoint} (not available: {error})")
                failed = True
            number += 1
            device.close()
    return int(failed)


def _memory(device: Device) -> str:
    free, total = device.memory()
    return f"{total // _MIB} MiB, {free // _MIB} MiB free"


def processor() -> str:
    """Return the model name of this machine's processor."""
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name.strip() == "model name" and value.strip():
                    return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


# --- the plan ---------------------------------------------------------------------------------------------------------


class Candidate(NamedTuple):
    """A placement by one rule, and the reason if it is impossible."""

    rule: str
    placement: Placement | None
    problem: LlamadoError | None = None


def plan(flags: ParsedFlags) -> int:
    """Print the placement of the model, and those by other rules. Raises LlamadoError if it does not fit."""
    from llamado.engine.drafts.sizes import planned_draft
    from llamado.engine.forward.device_pool import without
    from llamado.engine.forward.fitting import context_size, fit, memory_request, read_text, sizes_for
    from llamado.engine.local_devices import with_accelerators
    from llamado.engine.supported import check_supported
    from llamado.gguf.sources.resolve import progress_bar
    from llamado.models import load_model
    from llamado.models.hparams import override_metadata
    from llamado.terminal.console import Console

    options, source = engine_options(flags), model_source(flags)
    errors = Console(stderr=True)
    with progress_bar(errors, source.name) as progress:
        header = source.header(progress=progress, warn=errors.print)
    if options.metadata:
        header = replace(header, metadata=override_metadata(header.metadata, options.metadata))
    header = replace(header, mapped=header.mapped and options.mmap)
    check_supported(header, workers=options.networked)
    model = load_model(header, options.rope)
    options, accelerators = with_accelerators(options)
    draft = planned_draft(header, options)
    figures = _figures(options, accelerators, header, model)
    if draft is not None:
        figures[0] = replace(figures[0], free=max(figures[0].free - draft.reserve.cpu, 0))
        figures = without(figures, draft.reserve.accelerators)
    wanted = memory_request(options)
    n_ctx = wanted.requested_tokens(model.hparams.n_ctx_train)
    n_cells = context_size(n_ctx, options.n_slots, options.unified)[1]
    sizes = sizes_for(header, model, wanted, n_ctx)
    notes: tuple[str, ...] = ()
    n_ctx_slot = wanted.shape(n_ctx)[0]
    with suppress(NotEnoughMemory):  # raised again below, after the tables
        found = fit(header, model, wanted, figures, options.split)
        sizes, n_cells, notes, n_ctx_slot = found.sizes, found.n_cells, found.notes, found.n_ctx_slot
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    console.print(
        f"{header.source.rpartition('/')[2]}: {sizes.n_layer} layers and the head, {mib(sizes.weights)} of weights"
        f"{read_text(sizes)}, embedding of {mib(sizes.embedding)} on this machine; "
        f"{n_cells} tokens of context: {mib(sum(sizes.kv))} of K/V cache",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    if draft is not None:
        console.print(draft_text(draft, n_ctx_slot), highlight=False, markup=False, soft_wrap=True)
    for note in notes:
        errors.print(note, highlight=False, markup=False, soft_wrap=True)
    console.print(devices_table(figures))
    first, *others = candidates(sizes, figures, options.split)
    if options.split is not None and (text := shares_text(figures, options.split)):
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    for candidate in (first, *others):
        console.print(placement_table(sizes, figures, candidate))
    if options.split is not None and first.placement is not None and first.problem is None:
        for number, why in idle(sizes, figures, options.split, first.placement).items():
            line = f"{figures[number].name}: no layers: {why}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    if others:
        console.print(comparison(sizes, figures, [first, *others]), highlight=False, markup=False)
    if first.problem is not None:
        raise first.problem
    return 0


def draft_text(draft: PlannedDraft, n_ctx: int) -> str:
    """Describe the memory and place of a draft model for a context of `n_ctx` tokens."""
    sizes = draft.sizes(n_ctx)
    cache = "" if sizes is None else f", {mib(sum(sizes.kv))} of K/V cache"
    cpu, cards = draft.reserve
    where = (
        "on the workers of --spec-draft-device"
        if draft.elsewhere
        else f"on this machine, which reserves {mib(cpu or cards)} of its free memory for it"
        f"{', on graphics cards' if cards else ''}"
    )
    return f"draft model {draft.where} ({draft.kind}): {mib(draft.weights)} of weights{cache}, {where}"


def _figures(options: EngineOptions, accelerators: Accelerators, header: Header, model: Model) -> list[DeviceFigures]:
    """Measure the CPU, the accelerators, and the devices of all workers. Raises WorkersUnreachable, which names the
    workers.
    """
    from llamado.devices.split.measure import measure_all
    from llamado.engine.forward.device_pool import with_lacks
    from llamado.engine.forward.fitting import memory_request
    from llamado.engine.forward.sizes import usual_weights

    devices: list[Device] = [options.device(), *accelerators.take()]
    try:
        if options.split is not None and options.split.rpc:
            devices += _workers(options.split).devices()
        type, width = usual_weights(header, model)
        return with_lacks(devices, measure_all(devices, type=type, width=width), model, memory_request(options))
    finally:
        for device in devices:
            device.close()


def _workers(split: SplitOptions) -> Backend:
    from llamado.devices.registry import backend

    return backend("rpc", split.rpc, split.device_options())


def candidates(sizes: ModelSizes, figures: Sequence[DeviceFigures], split: SplitOptions | None) -> list[Candidate]:
    """Return the placement by the options, then those by other rules."""
    if split is None:
        alone = Placement((0,) * sizes.n_layer, 0, 0)
        try:
            check_memory(sizes, figures, alone)
        except NotEnoughMemory as error:
            return [Candidate("this machine", alone, error)]
        return [Candidate("this machine", alone)]
    given = split.tensor_split
    shares = "/".join(f"{share:g}" for share in given or ())
    auto = AUTO if any(device.remote for device in figures) else CARDS
    wanted = [(auto if given is None else MEMORY if not given else f"--tensor-split {shares}", split)]
    wanted += [
        (rule, replace(split, tensor_split=other)) for rule, other in ((auto, None), (MEMORY, ())) if other != given
    ]
    return [_candidate(rule, sizes, figures, options) for rule, options in wanted]


def _candidate(rule: str, sizes: ModelSizes, figures: Sequence[DeviceFigures], options: SplitOptions) -> Candidate:
    try:
        return Candidate(rule, place(sizes, figures, options))
    except NotEnoughMemory as error:
        return Candidate(rule, error.placement, error)


# --- tables -----------------------------------------------------------------------------------------------------------


def _table(title: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column(columns[0], no_wrap=True)
    for column in columns[1:]:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def devices_table(figures: Sequence[DeviceFigures]) -> Table:
    """Return a table of the measured devices."""
    table = _table("Devices", "device", "memory free", "of", "GB/s at 1 token", "at 512", "round trip ms", "MB/s")
    for device in figures:
        table.add_row(
            _plain(device.name),
            mib(device.free) if device.total else "unknown",
            mib(device.total) if device.total else "",
            _number(device.decode, 1e9, 1),
            _number(device.prefill, 1e9, 3),
            "" if device.local else f"{1e3 * device.round_trip:.2f}",
            _number(device.bandwidth, 1e6, 0),
        )
    return table


def placement_table(sizes: ModelSizes, figures: Sequence[DeviceFigures], candidate: Candidate) -> Table:
    """Return a table of the layers, memory and time of each device."""
    rule, placement, problem = candidate
    title = f"{rule} — does not fit" if problem is not None else rule
    table = _table(title, "device", "layers", "weights", "K/V cache", "compute", "free", "ms per token", "of it link")
    if placement is None:
        table.add_row("(no placement)")
        return table
    prediction = predict(sizes, figures, placement)
    for device, share in zip(figures, prediction.shares, strict=True):
        free = device.room - share.memory
        table.add_row(
            _plain(device.name),
            layers_text(share, placement, sizes.n_layer) if share.weights else "–",
            mib(share.weights),
            mib(share.kv),
            mib(share.compute),
            "unknown" if free == float("inf") else f"[red]{mib(-free)} missing[/]" if free < 0 else mib(free),
            _number(None if share.seconds is None else share.seconds + share.link_seconds, 1e-3, 2),
            _number(share.link_seconds, 1e-3, 2) if share.link_seconds else "",
        )
    table.add_section()
    table.add_row(
        "total",
        f"{sizes.n_layer} + head",
        mib(sum(share.weights for share in prediction.shares)),
        mib(sum(share.kv for share in prediction.shares)),
        mib(sum(share.compute for share in prediction.shares)),
        "",
        _number(prediction.seconds, 1e-3, 2),
        _number(sum(share.link_seconds for share in prediction.shares), 1e-3, 2),
    )
    return table


def layers_text(share: Share, placement: Placement, n_layer: int) -> str:
    """Return the layers of a device as ranges, such as "0-14, 29, head"."""
    runs: list[list[int]] = []
    for layer in share.layers:
        if runs and runs[-1][1] == layer - 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    if share.head:
        parts.append("head")
    return ", ".join(parts) or "individual weights"


def comparison(sizes: ModelSizes, figures: Sequence[DeviceFigures], found: Sequence[Candidate]) -> str:
    """Return the predicted speed of each rule in comparison with the split by free memory."""
    seconds = {
        one.rule: None if one.placement is None or one.problem else predict(sizes, figures, one.placement).seconds
        for one in found
    }
    naive = seconds.get(MEMORY)
    lines = []
    for rule, time in seconds.items():
        line = f"{rule.partition(':')[0]}: "
        line += "does not fit" if not time else f"{1 / time:.1f} tokens/s, {1e3 * time:.2f} ms per token"
        if time and naive and rule != MEMORY:
            line += f", {naive / time:.2f} times as fast as by memory"
        lines.append(line)
    lines += ring_gain(sizes, figures, found[0])
    return "\n".join(lines)


def ring_gain(sizes: ModelSizes, figures: Sequence[DeviceFigures], found: Candidate) -> list[str]:
    """Compare the worker ring with results passing through this machine; [] if they take the same time."""
    placement = found.placement
    if placement is None or found.problem is not None:
        return []
    ring = predict(sizes, figures, placement).seconds
    star = predict(sizes, [replace(device, links=False) for device in figures], placement).seconds
    if not ring or not star or ring == star:
        return []
    return [
        f"worker ring: {1e3 * ring:.2f} ms per token; through this machine (--rpc-ring off): "
        f"{1e3 * star:.2f} ms, {1 / star:.1f} tokens/s"
    ]


def _number(value: float | None, unit: float, digits: int) -> str:
    return "" if value is None else f"{value / unit:,.{digits}f}"


def _plain(text: str) -> str:
    """Escape rich markup."""
    from rich.markup import escape

    return escape(text)
