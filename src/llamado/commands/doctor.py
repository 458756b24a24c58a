"""`llamado doctor`: diagnose servers, workers, models and this machine, and show the commands that help."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace

from llamado.commands.split_options import listed
from llamado.flags import FlagError, ParsedFlags
from llamado.terminal.text import print


def run_doctor(flags: ParsedFlags, named: Sequence[str]) -> int:
    """Print the findings and return the exit code: 0 none, 1 some, 2 examination failed. Raises FlagError."""
    from llamado.cluster.doctor.examination import examine, parse_targets
    from llamado.cluster.doctor.machine import MachineOptions
    from llamado.devices.split.placement import SplitOptions
    from llamado.engine.options import EngineOptions
    from llamado.errors import LlamadoError
    from llamado.rpc.endpoint import Endpoint

    for key in ("timeout", "patience"):
        if not 0 < flags.values[key] < math.inf:
            raise FlagError(f"--{key}: expected seconds, more than 0, got {flags.values[key]}")
    try:
        what = parse_targets(named)
        models = (*what.models, *(flags.model or ()))
        rpc = tuple(str(Endpoint.parse(text)) for text in [*listed(flags.rpc or []), *what.workers])
        split = SplitOptions(rpc=rpc, gpus=True, joins=False, ca=flags.rpc_ca, cert=flags.rpc_cert, key=flags.rpc_key)
        slots = flags.parallel
        options = EngineOptions(
            n_ctx=flags.ctx_size,
            n_slots=4 if slots < 1 else slots,
            unified=slots < 1,
            type_k=flags.cache_type_k,
            type_v=flags.cache_type_v,
            mlock=flags.mlock,
            split=split,
        )
        machine = MachineOptions(
            host=flags.host,
            port=flags.port,
            threads=flags.threads,
            mlock=flags.mlock,
        )
        found = examine(
            replace(what, models=models),
            options,
            machine,
            split=split if rpc else None,
            context_given=flags.ctx_size > 0,
            key=flags.api_key,
            timeout=flags.timeout,
            patience=flags.patience,
        )
    except LlamadoError as error:
        print(f"llamado: {error}", file=sys.stderr)
        return 2
    print(found.as_json() if flags.json else found)
    return found.exit_code
