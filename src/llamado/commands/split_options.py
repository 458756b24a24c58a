"""Options for dividing a model among the CPU, graphics cards and other machines, from flags."""

from __future__ import annotations

import math
import re
from dataclasses import replace

from llamado.devices.accelerators import kind_of
from llamado.devices.split.placement import ALL_LAYERS, SplitOptions, share_problem
from llamado.errors import LlamadoError
from llamado.flags import FLAGS, FlagError, ParsedFlags
from llamado.models.parts.name_patterns import EXPERTS, NETWORKS, of_first_layers

_MIN_TIMEOUT = 0.1  # seconds; with less, a busy worker would count as lost
_JOINING = ("cluster_token", "discover", "lab")
"""Flags with which workers join a running server."""
_DEVICE_FLAGS = (
    "tensor_split", "gpu_layers", "device", "override_tensor", "cpu_moe", "n_cpu_moe", "n_cpu_ffn", "split_mode",
    "main_gpu", "kv_offload",
)  # fmt: skip
"""Flags that have no effect where the CPU is the only device."""


def workers(given: list[str]) -> tuple[str, ...]:
    """Return the endpoints of --rpc. Raises FlagError."""
    from llamado.rpc.endpoint import Endpoint

    endpoints: dict[str, None] = {}
    for text in listed(given):
        try:
            endpoint = str(Endpoint.parse(text))
        except LlamadoError as error:
            raise FlagError(f"--rpc: {error}") from None
        if endpoint in endpoints:
            raise FlagError(f"--rpc: {endpoint} is named twice")
        endpoints[endpoint] = None
    if given and not endpoints:
        raise FlagError("--rpc: expected host:port, comma-separated, got an empty text")
    return tuple(endpoints)


def split_options(flags: ParsedFlags) -> SplitOptions | None:
    """Return the options for dividing the model, or None if it stays on the CPU. Raises FlagError."""
    given = [key for key in ("rpc", *_JOINING) if flags.values.get(key)]
    # Invalid values are rejected even if they have no effect.
    tensor_split, n_gpu_layers = _tensor_split(flags.tensor_split), _gpu_layers(flags.gpu_layers)
    devices, overrides = _devices(flags), (*_overrides(flags.override_tensor or []), *_local_weights(flags))
    is_single = flags.split_mode == "none" and not devices
    if flags.split_mode == "none" and tensor_split:
        tensor_split = ()  # one device gets all layers, so shares have no meaning
    if given and flags.split_mode in ("row", "tensor"):
        raise FlagError(f"-sm/--split-mode {flags.split_mode}: not supported; use layer or none")
    named = {
        flag.key: flag.label
        for flag in FLAGS
        if flag.key in _DEVICE_FLAGS and flag.key in flags.given and "serve" in flag.commands
    }
    local = SplitOptions(
        gpus=True,
        joins=False,
        tensor_split=tensor_split,
        n_gpu_layers=n_gpu_layers,
        devices=devices,
        main_gpu=flags.main_gpu if is_single else None,
        mode=flags.split_mode,
        kv_offload=flags.kv_offload,
        overrides=overrides,
        given=tuple(named[key] for key in _DEVICE_FLAGS if key in named),
    )
    if not given:
        return local
    for key, label in (("embedding", "--embeddings"), ("rerank", "--reranking")):
        if flags.values.get(key):
            others = " and ".join(f"--{other.replace('_', '-')}" for other in given)
            raise FlagError(f"{label}: embeddings are computed on this machine only: omit {others}")
    endpoints = workers(flags.rpc or [])
    for key in ("rpc_failover", "rpc_wait", "rpc_request_wait"):
        seconds = flags.values[key]
        if seconds is not None and not 0 <= seconds < math.inf:
            raise FlagError(f"--{key.replace('_', '-')}: expected seconds, 0 or more, got {seconds}")
    for key in ("rpc_connect_timeout", "rpc_alive_timeout"):
        if not _MIN_TIMEOUT <= flags.values[key] < math.inf:
            raise FlagError(
                f"--{key.replace('_', '-')}: expected seconds, {_MIN_TIMEOUT:g} or more, got {flags.values[key]}"
            )
    if bool(flags.rpc_cert) != bool(flags.rpc_key):
        raise FlagError("--rpc-cert and --rpc-key: give both or none")
    return replace(
        local,
        rpc=endpoints,
        joins=any(key in given for key in _JOINING),
        failover=flags.rpc_failover,
        wait=flags.rpc_wait,
        request_wait=flags.rpc_request_wait,
        connect_timeout=flags.rpc_connect_timeout,
        alive_timeout=flags.rpc_alive_timeout,
        ring=flags.rpc_ring == "auto",
        ca=flags.rpc_ca,
        cert=flags.rpc_cert,
        key=flags.rpc_key,
    )


def draft_split(flags: ParsedFlags) -> SplitOptions | None:
    """Return the options for dividing the draft model, or None if it stays on the CPU: by default it is on the graphics
    cards of the model. Raises FlagError.
    """
    devices = listed([flags.spec_draft_device or ""])
    split = split_options(flags)
    layers = _gpu_layers(flags.spec_draft_ngl)
    if split is None or devices == ["none"]:
        return None
    if all(kind_of(name) for name in devices):
        return SplitOptions(gpus=True, joins=False, n_gpu_layers=layers, devices=tuple(devices))
    if not split.networked:
        return None
    return replace(
        split,
        devices=tuple(devices),
        main_gpu=None,
        given=(),
        n_gpu_layers=ALL_LAYERS if layers is None else layers,
        tensor_split=None,
        overrides=(),
        failover=None,
    )


def listed(given: list[str]) -> list[str]:
    """Return the items of a flag that takes comma-separated lists and may be repeated."""
    return [part.strip() for text in given for part in text.split(",") if part.strip()]


def _tensor_split(text: str) -> tuple[float, ...] | None:
    word = text.strip().lower()
    if word == "auto":
        return None
    if word == "memory":
        return ()
    label, shares = "-ts/--tensor-split", []
    for part in re.split("[,/]+", word):
        if not part.strip():
            continue
        try:
            shares.append(float(part))
        except ValueError:
            problem = f"{part.strip()!r} in {text!r} is not a number"
            raise FlagError(f"{label}: expected auto, memory, or proportions such as 3,1; {problem}") from None
    if not shares:
        raise FlagError(f"{label}: expected auto, memory, or proportions such as 3,1, got {text!r}")
    if problem := share_problem(shares):
        raise FlagError(f"{label} {text}: {problem}")
    return tuple(shares)


def _gpu_layers(text: str) -> int | None:
    word = text.strip().lower()
    if word == "auto":
        return None
    if word == "all":
        return ALL_LAYERS
    try:
        n = int(word)
    except ValueError:
        raise FlagError(f"-ngl/--gpu-layers: expected a whole number, all or auto, got {text!r}") from None
    if n < 0:  # as in llama.cpp: -1 is auto, lower numbers are all
        return None if n == -1 else ALL_LAYERS
    return n


def _devices(flags: ParsedFlags) -> tuple[str, ...]:
    given = listed([flags.device]) if flags.device is not None else []
    if flags.device is not None and not given:
        raise FlagError("-dev/--device: expected names of devices, comma-separated, got an empty text")
    if "none" in given and len(given) > 1:
        raise FlagError("-dev/--device: none cannot be combined with other devices")
    if flags.split_mode == "none" and "none" not in given:
        n = flags.main_gpu
        if n < 0 or (given and n >= len(given)):
            among = f" in --device {','.join(given)}" if given else ""
            raise FlagError(f"-mg/--main-gpu: expected the index of a device, counted from 0{among}, got {n}")
        return tuple(given[n : n + 1])
    return tuple(given)


def _overrides(given: list[str]) -> tuple[tuple[str, str], ...]:
    overrides = []
    for item in _split_overrides(given):
        pattern, equals, device = item.rpartition("=")
        if not equals or not pattern or not device:
            raise FlagError(f"-ot/--override-tensor: expected PATTERN=DEVICE, comma-separated, got {item!r}")
        try:
            re.compile(pattern)
        except re.error as error:
            raise FlagError(f"-ot/--override-tensor: {pattern!r} is not a regular expression: {error}") from None
        overrides.append((pattern, device))
    return tuple(overrides)


def _local_weights(flags: ParsedFlags) -> tuple[tuple[str, str], ...]:
    """Return overrides that keep experts, or dense feed-forward networks, with the CPU."""
    patterns = [EXPERTS] if flags.cpu_moe else []
    for key, weights in (("n_cpu_moe", EXPERTS), ("n_cpu_ffn", NETWORKS)):
        n = flags.values[key]
        if n < 0:
            raise FlagError(f"--{key.replace('_', '-')}: expected a number of layers, 0 or more, got {n}")
        if n:
            patterns.append(of_first_layers(weights, n))
    return tuple((pattern, "CPU") for pattern in patterns)


def _split_overrides(given: list[str]) -> list[str]:
    """Split at commas. A comma in front of a part without `=` belongs to the pattern (`blk\\.\\d{1,2}=CPU`)."""
    items: list[str] = []
    for text in given:
        pending = ""
        for part in text.split(","):
            pending = f"{pending},{part}" if pending else part
            if "=" in part:
                items.append(pending.strip())
                pending = ""
        if pending:
            items.append(pending.strip())
    return items
