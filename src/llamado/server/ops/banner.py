"""The overview that a server logs when it is ready: the model, its context, addresses and endpoints."""

from __future__ import annotations

from collections.abc import Sequence

from llamado.devices.limits import cores
from llamado.devices.split.placement import Placement
from llamado.server.model import ServedModel
from llamado.server.settings import Settings


def overview(settings: Settings, served: ServedModel, addresses: list[str]) -> list[str]:
    """Return the overview as lines for the log."""
    info, engine, switches = served.info, settings.engine, settings.switches
    size = f"{info.size / 1e9:.1f} GB" if info.size >= 1e9 else f"{info.size / 1e6:.0f} MB"
    parameters = f"{info.n_params / 1e9:.1f} B" if info.n_params >= 1e9 else f"{info.n_params / 1e6:.0f} M"
    share = "shared by" if engine.unified else "for each of"
    slots = "1 slot" if served.n_slots == 1 else f"{share} {served.n_slots} slots"
    lines = [
        f"  model    {info.name}: {parameters} parameters, {info.ftype}, {size}",
        f"  context  {info.n_ctx} tokens{', ' if served.n_slots == 1 else ' '}{slots}",
    ]
    for address in addresses:
        lines.append(f"  address  {address}{switches.api_prefix}")
    if switches.page and not switches.static_path:
        for address in [one for one in addresses if one.startswith("http")][:1]:
            # A browser cannot open the wildcard addresses 0.0.0.0 and [::].
            everywhere = address.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
            elsewhere = ", elsewhere by this machine's name" if everywhere != address else ""
            lines.append(f"  page     {everywhere}{switches.api_prefix}/ (open it in a browser{elsewhere})")
    if engine.n_threads and engine.n_threads > (n := cores()):
        lines.append(f"  threads  {engine.n_threads} on {n} processors: each step waits for the last; leave out -t")
    paths = ["OpenAI and Anthropic /v1", "Ollama /api", "health /health", "properties /props"]
    if switches.slots:
        paths.append("slots /slots")
    if switches.metrics:
        paths.append("metrics /metrics")
    if settings.tools.any:
        paths.append("tools /tools")
    if switches.static_path:
        paths.append(f"files of {switches.static_path} /")
    lines.append(f"  paths    {', '.join(paths)}")
    if settings.access.api_keys:
        n = len(settings.access.api_keys)
        lines.append(f"  keys     {'1 key' if n == 1 else f'one of {n} keys'} as Authorization: Bearer, or X-Api-Key")
    if switches.sleep_idle_seconds > 0:
        lines.append(f"  sleep    after {switches.sleep_idle_seconds} s without a request")
    return lines


def layer_devices(names: Sequence[str], placement: Placement | None, n_layer: int) -> list[str]:
    """Return lines for the most verbose log with the device of each layer; without a placement, all on the first."""
    placement = placement or Placement((0,) * n_layer, 0)
    lines = [f"layer {i}: {names[device]}" for i, device in enumerate(placement.layers)]
    lines += [f"head: {names[placement.head]}", f"embedding: {names[placement.embedding]}"]
    lines += [f"{pattern}: {names[device]}" for pattern, device in placement.overrides]
    return lines
