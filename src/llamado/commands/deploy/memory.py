"""Memory limits of a deployment, computed from the header of the model file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from llamado.cluster.deploy.containers import MODELS
from llamado.cluster.deploy.deployment import Deployment
from llamado.cluster.deploy.from_file import IN_CONTAINERS
from llamado.commands.options import engine_options
from llamado.commands.serve import serves_many
from llamado.devices.split.placement import DeviceFigures, mib, predict
from llamado.engine.drafts.sizes import planned_draft
from llamado.engine.errors import EngineError
from llamado.engine.forward.fitting import fit, memory_request
from llamado.engine.supported import check_supported
from llamado.flags import FlagParser, add_flags, parse
from llamado.gguf.reader import GGUFFile
from llamado.gguf.sources.stored import file_of
from llamado.models import load_model
from llamado.models.hparams import override_metadata

_SERVER, _WORKER = 768 << 20, 512 << 20
"""Bytes of a process besides the model: interpreter, libraries, kernels, requests."""
_STEP = 64 << 20


class PlannedMemory(NamedTuple):
    """Limits in the format of `--memory`, and a text that explains their parts."""

    server: str
    worker: str
    text: str


def planned_memory(deployment: Deployment, target: str) -> PlannedMemory:
    """Return the memory of servers and workers, each with an equal share of the layers.

    The context size is that of the flags, or the server's default without a memory limit. A worker shared by several
    servers holds the layers of each. Raises LlamadoError if the model file is not on this machine.
    """
    flags = deployment.parsed
    if serves_many(flags):
        raise EngineError("a router loads several models")
    if flags.rpc:
        raise EngineError("a part of the model is on the workers of --rpc")
    names = [f"worker-{i}:1" for i in range(deployment.workers)]
    parser = FlagParser(prog="llamado serve", allow_abbrev=False)
    add_flags(parser, "serve")
    rpc = ["--rpc", ",".join(names)] if names else []
    options = engine_options(parse(parser, "serve", [*deployment.serve, *rpc], {})[0])
    split = options.split if names else None
    if split is not None and not split.tensor_split:
        split = replace(split, tensor_split=(1.0,) * (len(names) + 1))
    draft_split = options.drafts.split
    if draft_split is not None and not draft_split.networked:
        options = replace(options, drafts=replace(options.drafts, split=None))
    options = replace(options, split=split)
    with GGUFFile.open(model_file(deployment, target)) as file:
        header = file.header
    if options.metadata:
        header = replace(header, metadata=override_metadata(header.metadata, options.metadata))
    check_supported(header, workers=split is not None)
    model = load_model(header, options.rope)
    figures = [DeviceFigures(name=name, local=name == "CPU", free=0, total=0, decode=1.0) for name in ("CPU", *names)]
    found = fit(header, model, memory_request(options), figures, split)
    local, *remote = predict(found.sizes, figures, found.placement).shares
    if (draft_model := options.drafts.model) is not None:
        file_of(draft_model.name)  # raises SourceError if its header would have to be fetched
    draft = planned_draft(header, options)
    needed = local.memory + found.sizes.embedding + (0 if draft is None else draft.reserve.cpu) + _SERVER
    # The prompt cache grows to half of the limit, or to the size of its flag if that is smaller.
    prompts = needed if options.cache_ram < 0 else min(options.cache_ram << 20, needed)
    clients = 1 if deployment.leader_worker_set else deployment.replicas
    worker = max((share.memory for share in remote), default=0) * clients + _WORKER
    sizes = found.sizes
    text = (
        f"weights {mib(sizes.weights)}, K/V cache of {found.n_cells} tokens {mib(sum(sizes.kv))}, batches "
        f"{mib(sizes.compute + sizes.head_compute)}, prompt cache {mib(prompts)} (-c and -cram change them)"
    )
    return PlannedMemory(_size(needed + prompts), _size(worker), text)


def model_file(deployment: Deployment, target: str) -> Path:
    """Return the path of the model on this machine. Raises LlamadoError."""
    flags = deployment.parsed
    name = flags.model[0] if flags.model else flags.hf_repo or flags.model_url
    if target in IN_CONTAINERS and name.startswith(f"{MODELS}/"):
        inside = Path(deployment.models, name.removeprefix(f"{MODELS}/"))
        if inside.exists():
            return inside
    return file_of(name)


def _size(n: int) -> str:
    return f"{-(-n // _STEP) * _STEP >> 20}M"
