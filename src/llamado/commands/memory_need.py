"""Memory need of a server process, computed from its command line as in `llamado plan`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from llamado.commands.options import engine_options
from llamado.engine.options import ModelSource
from llamado.errors import LlamadoError
from llamado.flags import FlagParser, ParsedFlags, add_flags, parse

log = logging.getLogger("llamado.router")

_SERVERS = frozenset(("llama-server", "llama-server.exe"))


def memory_need(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Return the bytes of this machine's memory that a command of `llamado serve` or llama-server needs.

    0 means unknown: another program, unknown flags, or a model that is not on this machine yet. A context of automatic
    size counts with the minimum to which it may be reduced.
    """
    arguments = _arguments(command)
    if arguments is None:
        return 0
    parser = FlagParser(prog="llamado serve", allow_abbrev=False, add_help=False)
    add_flags(parser, "serve")
    try:
        return _need(parse(parser, "serve", arguments, environment)[0])
    except LlamadoError as error:
        log.debug("memory need of %s unknown: %s", " ".join(command)[:500], error)
        return 0


def _arguments(command: Sequence[str]) -> Sequence[str] | None:
    """Return the flags in a server's command, or None for another program."""
    if Path(command[0]).name in _SERVERS:
        return command[1:]
    for i, word in enumerate(command[:5]):
        if word == "serve" and i and Path(command[i - 1]).name == "llamado":
            return command[i + 1 :]
    return None


def _need(flags: ParsedFlags) -> int:
    from llamado.engine.forward.fitting import memory_request, sizes_for
    from llamado.gguf.sources.resolve import is_fetched_whole
    from llamado.models import load_model

    options = engine_options(flags)
    if options.split is not None and not options.split.networked:
        options = replace(options, split=None)  # the part of graphics cards is not subtracted
    models = [*(flags.model or ()), *([flags.model_url] if flags.model_url else ())]
    source = ModelSource(spec=models[0] if models else None, hf_repo=flags.hf_repo, hf_file=flags.hf_file)
    if is_fetched_whole(source.spec, hf_repo=source.hf_repo):
        return 0
    header = source.header()
    model = load_model(header, options.rope)
    wanted = memory_request(options)
    n_ctx = wanted.requested_tokens(model.hparams.n_ctx_train)
    if wanted.fit.on and not wanted.n_ctx:
        n_ctx = min(n_ctx, max(wanted.fit.least_context * wanted.n_streams, wanted.n_slots))
    sizes = sizes_for(header, model, wanted, n_ctx)
    own = sizes.embedding + sizes.compute + sizes.head_compute
    if options.split is not None:
        return own  # the rest is on the workers
    return own + sizes.weights + sum(sizes.kv)
