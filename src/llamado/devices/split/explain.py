"""Explanations of a placement: what each device holds and why, and its share of `--tensor-split`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llamado.devices.split.filling import moved_experts
from llamado.devices.split.placement import (
    DeviceFigures,
    ModelSizes,
    Placement,
    SplitOptions,
    describe_layers,
    describe_parts,
    mib,
    predict,
)
from llamado.devices.split.rules import selected, sharing
from llamado.devices.split.shares import local_device, workers


def shares_text(figures: Sequence[DeviceFigures], options: SplitOptions) -> str:
    """Return a text with each device's share of --tensor-split; empty if no proportions are given."""
    if not options.tensor_split:
        return ""
    parts = [
        f"{_named(figures[number])} {share:g}"
        for number, share in zip(sharing(figures, options), _shares(figures, options), strict=True)
    ]
    return f"--tensor-split: {', '.join(parts)}"


def holdings(
    sizes: ModelSizes,
    figures: Sequence[DeviceFigures],
    options: SplitOptions,
    placement: Placement,
    why: str = "",
) -> dict[int, str]:
    """Return a text for each device with a part of the model, and for this machine: what it holds and why. Keys are
    device numbers.

    `why`: one reason for all of them, instead of the reasons that follow from the options.
    """
    shares, words, home = predict(sizes, figures, placement).shares, describe_parts(placement), local_device(figures)
    whole = len({*placement.layers, placement.head}) == 1 and placement.cache is None and not placement.overrides
    found = {}
    for number, share in enumerate(shares):
        if number in words:
            holds = f"everything, {words[number]}" if whole else words[number]
        elif layers := moved_experts(sizes, placement, number):
            holds = f"experts of {describe_layers(layers)}"
        elif share.weights:
            holds = "single weights"
        elif share.kv:
            holds = "the K/V cache of all layers"
        elif number == home:
            found[number] = f"the embedding alone: {why or _why_nothing(sizes, figures, options, placement, number)}"
            continue
        else:
            continue
        memory = f"{mib(share.weights)} of weights, {mib(share.kv)} of K/V cache"
        found[number] = f"{holds} ({memory}): {why or _why(sizes, figures, options, placement, number)}"
    return found


def idle(
    sizes: ModelSizes, figures: Sequence[DeviceFigures], options: SplitOptions, placement: Placement
) -> dict[int, str]:
    """Return the reason why each idle worker or accelerator holds nothing, by device number."""
    used = {*placement.layers, placement.head, *(device for _, device in placement.overrides)}
    return {
        number: _why_nothing(sizes, figures, options, placement, number)
        for number in workers(figures)
        if number not in used
    }


def _why(
    sizes: ModelSizes, figures: Sequence[DeviceFigures], options: SplitOptions, placement: Placement, number: int
) -> str:
    """Return the reasons for a device's part."""
    home, reasons = local_device(figures), []
    given = sharing(figures, options)
    n = options.n_gpu_layers
    if number == home and all(device.local for device in figures):
        return "there are no workers"
    if number == home and not options.kv_offload:
        reasons.append("--no-kv-offload keeps the K/V cache here")
    if number == home and (lacks := _lacking(sizes, figures, options, placement)):
        reasons.append(lacks)
    if number == home and n is not None and n < sizes.n_layer + 1:
        everything = "everything" if n == 0 else f"all but the last {n} layers (the head counts as one)"
        reasons.append(f"--n-gpu-layers {n} leaves {everything} on this machine")
    if number in given and n != 0:
        if options.tensor_split:
            shares = _shares(figures, options)
            reasons.append(f"its share of --tensor-split is {shares[given.index(number)]:g} of {sum(shares):g}")
        elif options.devices and len(given) == 1:
            reasons.append("--device names it alone")
        elif options.main_gpu is not None:
            reasons.append(f"--split-mode none takes one device, --main-gpu {options.main_gpu}")
        elif options.tensor_split is not None:
            free = [figures[i].free or figures[home].free for i in given]
            reasons.append(
                f"--tensor-split memory: it has {mib(free[given.index(number)])} of the {mib(sum(free))} that are free"
            )
        elif not any(figures[i].remote for i in given):
            reasons += _filled(sizes, figures, options, placement, number)
        elif number != home or n is None:
            reasons.append(_fastest(sizes, figures, placement, number))
    elif number == home and not given:
        reasons.append("--device names no worker")
    if any(number in selected(figures, [name]) for _, name in options.overrides):
        reasons.append("--override-tensor sends weights to it")
    return "; ".join(reasons) or "nothing else may have it"


def _filled(
    sizes: ModelSizes, figures: Sequence[DeviceFigures], options: SplitOptions, placement: Placement, number: int
) -> list[str]:
    """Return the reasons for a device's part where accelerators are filled."""
    gpus = [i for i in sharing(figures, options) if figures[i].accelerator]
    names = " and ".join(figures[i].name for i in gpus)
    is_full = options.n_gpu_layers is None and (
        bool(placement.overrides and not options.overrides)
        or any(
            device not in gpus and not any(item in figures[i].lacks for i in gpus)
            for item, device in enumerate((*placement.layers, placement.head))
        )
    )
    if figures[number].accelerator:
        return [f"{'as much as fits: ' if is_full else ''}{mib(figures[number].free)} of memory were free"]
    if not gpus:
        return ["--device names no other device"] if options.devices else []
    return [f"{names} {'have' if len(gpus) > 1 else 'has'} no room for it"] if is_full else []


def _lacking(sizes: ModelSizes, figures: Sequence[DeviceFigures], options: SplitOptions, placement: Placement) -> str:
    """Return the layers that are with the CPU because other devices cannot run them, and why; empty if there are
    none.
    """
    home = local_device(figures)
    items = [*placement.layers, placement.head]
    found: dict[str, list[int]] = {}
    for i in sharing(figures, options):
        for item, why in figures[i].lacks.items():
            if items[item] == home:
                found.setdefault(f"{figures[i].name} has no {why}", []).append(item)
    texts = []
    for why, lacking in found.items():
        layers = [item for item in lacking if item < sizes.n_layer]
        parts = [describe_layers(layers)] if layers else []
        parts += ["the head"] if sizes.n_layer in lacking else []
        texts.append(f"{why}, which {' and '.join(parts)} {'need' if len(lacking) > 1 else 'needs'}")
    return "; ".join(texts)


def _fastest(sizes: ModelSizes, figures: Sequence[DeviceFigures], placement: Placement, number: int) -> str:
    """Return why a device's part gives the least time per token."""
    home = local_device(figures)
    alone = Placement((home,) * sizes.n_layer, home, home)
    now, other = (predict(sizes, figures, one) for one in (placement, alone))
    if now.seconds is None:
        return "the least time per token"
    text = f"the least time per token, {1e3 * now.seconds:.2f} ms predicted"
    if {*placement.layers, placement.head} != {home}:
        here = figures[home].name
        if other.shares[home].memory > figures[home].room:
            text += f"; {here} has no room for everything"
        elif other.seconds is not None:
            text += f", {1e3 * other.seconds:.2f} ms with everything on {here}"
    return f"{text} ({_speed(figures[number])})"


def _why_nothing(
    sizes: ModelSizes, figures: Sequence[DeviceFigures], options: SplitOptions, placement: Placement, number: int
) -> str:
    """Return the reason why a device holds nothing."""
    given, n = sharing(figures, options), options.n_gpu_layers
    if options.devices and number not in given:
        return "--device does not name it"
    if n == 0:
        return "--n-gpu-layers 0 leaves everything on this machine"
    if options.tensor_split:
        if number not in given:
            return "--tensor-split has no share for it"
        if not _shares(figures, options)[given.index(number)]:
            return "its share of --tensor-split is 0"
        return "its share of --tensor-split is less than a layer"
    if options.main_gpu is not None and number not in given:
        return f"--split-mode none takes one device, --main-gpu {options.main_gpu}"
    if figures[number].accelerator and len(figures[number].lacks) > sizes.n_layer:
        return f"it has no {next(iter(figures[number].lacks.values()))}"
    others = "the workers" if any(device.remote for device in figures) else "the GPUs"
    if figures[number].local and number not in given:
        return f"--tensor-split memory divides among {others} alone"
    if figures[number].local and n is not None:
        return f"--n-gpu-layers {n} gives every layer to {others}"
    if not any(figures[i].remote for i in given):
        return _no_room(sizes, figures, placement, number)
    return _too_slow_or_full(sizes, figures, placement, number)


def _no_room(sizes: ModelSizes, figures: Sequence[DeviceFigures], placement: Placement, number: int) -> str:
    """Return why a device holds nothing where accelerators are filled."""
    used = [device.name for i, device in enumerate(figures) if i in (*placement.layers, placement.head)]
    if figures[number].local:
        return f"everything fits {' and '.join(used)}"
    need = min((a + b for a, b in zip(sizes.layers, sizes.kv, strict=True)), default=0) + sizes.compute
    return f"a layer takes {mib(need)}, and it has {mib(figures[number].free)} free"


def _too_slow_or_full(sizes: ModelSizes, figures: Sequence[DeviceFigures], placement: Placement, number: int) -> str:
    """Return the time of a token with a layer on this device, or the memory the device lacks for one."""
    device = figures[number]
    layer = min(range(sizes.n_layer), key=lambda i: sizes.layers[i] + sizes.kv[i], default=None)
    if layer is None:
        return "the model has no layers"
    need = sizes.layers[layer] + sizes.kv[layer] + sizes.compute
    if need > device.room:
        return f"a layer takes {mib(need)}, and it has {mib(device.free)} free"
    now = predict(sizes, figures, placement).seconds
    moved = [
        replace(placement, layers=(*placement.layers[:i], number, *placement.layers[i + 1 :]))
        for i in range(sizes.n_layer)
    ]
    with_it = [seconds for move in moved if (seconds := predict(sizes, figures, move).seconds) is not None]
    if now is None or not with_it or not device.decode:
        return f"by free memory nothing is left for it: it has {mib(device.free)}"
    return (
        f"it would make answers slower: a token takes {1e3 * now:.2f} ms without it and {1e3 * min(with_it):.2f} ms "
        f"with a layer on it ({_speed(device)}); --tensor-split gives it a part all the same"
    )


def _speed(device: DeviceFigures) -> str:
    reads = f"it reads {(device.decode or 0.0) / 1e9:.1f} GB/s"
    return reads if device.local else f"{reads}, a round trip takes {1e3 * device.round_trip:.2f} ms"


def _shares(figures: Sequence[DeviceFigures], options: SplitOptions) -> list[float]:
    """The proportions of the devices that take layers; 0 for devices that get none."""
    given = sharing(figures, options)
    return [*(options.tensor_split or ()), *(0.0 for _ in given)][: len(given)]


def _named(device: DeviceFigures) -> str:
    return f"{device.name} (this machine)" if device.local else device.name
