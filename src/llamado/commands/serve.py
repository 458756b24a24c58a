"""`llamado serve`: make the settings from the flags and run a server of one model, or a router for several."""

from __future__ import annotations

import gc
import json
import logging
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamado.commands.http_options import access_rules, configure_logs, hosts_of, metrics_labels
from llamado.commands.options import engine_options, model_source, read_file, sampling_defaults, use_hub
from llamado.commands.split_options import listed
from llamado.engine.options import ModelSource
from llamado.flags import FlagError, ParsedFlags, api_prefix, check_port
from llamado.http import sockets
from llamado.server.settings import Settings
from llamado.server.switches import PredictRoutes, Switches
from llamado.text.grammar.source import GrammarSource
from llamado.tools.mcp.config import McpServerConfig, read_servers
from llamado.tools.settings import ToolSettings

if TYPE_CHECKING:
    from llamado.server.ops.discovery import Listen

_MOST_LAB_WORKERS = 16
VERBOSE = 10
"""Minimum `--verbosity` at which responses include `__verbose`, as in llama-server."""


def serves_many(flags: ParsedFlags) -> bool:
    """Return True if the flags ask for a router for several models instead of a server of one model."""
    many = flags.models_dir or flags.models_preset or flags.llama_swap or len(flags.model or []) > 1
    return bool(many) or not (flags.model or flags.model_url or flags.hf_repo)


def serve_settings(flags: ParsedFlags) -> Settings:
    """Return the settings of the server, or of its router for several models or none. Raises FlagError."""
    kwargs = _template_kwargs(flags)
    check_port("--port", flags.port)
    try:
        predict = PredictRoutes.read(os.environ)
    except ValueError as error:
        raise FlagError(f"AIP_HTTP_PORT: expected 0 to 65535, got {os.environ['AIP_HTTP_PORT']!r}") from error
    hosts = hosts_of(flags)
    _check_numbers(flags)
    prefix = api_prefix(flags.api_prefix)
    many = serves_many(flags)
    if many:
        use_hub(flags)
    settings = Settings(
        source=ModelSource() if many else model_source(flags),
        engine=engine_options(flags),
        access=access_rules(flags),
        switches=_switches(flags, kwargs, prefix, predict),
        defaults=sampling_defaults(flags),
        hosts=hosts,
        port=flags.port if predict is None else predict.port,
        reuse_port=flags.reuse_port,
        ssl_key=flags.ssl_key_file,
        ssl_cert=flags.ssl_cert_file,
        aliases=() if many else _names(flags.alias or []),
        tags=_names([flags.tags]),
        notes=(*flags.warnings, *_chats_note(flags, hosts)),
        timeout=flags.timeout,
        threads_http=None if flags.threads_http < 0 else flags.threads_http,
        max_connections=None if flags.max_connections < 0 else flags.max_connections,
        otel=flags.otel,
        tools=_tools(flags),
    )
    _check_lab(flags, settings)
    return settings


def _template_kwargs(flags: ParsedFlags) -> dict[str, Any]:
    """Return additional variables of the chat template. Raises FlagError."""
    if not flags.chat_template_kwargs:
        return {}
    try:
        kwargs = json.loads(flags.chat_template_kwargs)
    except ValueError:
        kwargs = None
    if not isinstance(kwargs, dict):
        raise FlagError(f"--chat-template-kwargs: expected a JSON object, got {flags.chat_template_kwargs!r}")
    return kwargs


def _page_settings(flags: ParsedFlags) -> dict[str, Any]:
    """Return the initial settings of the web UI. Those of `--ui-config` replace those of the file. Raises FlagError."""
    settings: dict[str, Any] = {}
    for flag, path, text in (
        ("--ui-config-file", flags.ui_config_file, None),
        ("--ui-config", None, flags.ui_config),
    ):
        try:
            given = Path(path).read_text() if path else text
            found = json.loads(given) if given else {}
        except OSError as error:
            raise FlagError(f"{flag}: {path} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise FlagError(f"{flag}: invalid JSON: {error}") from None
        if not isinstance(found, dict):
            raise FlagError(f"{flag}: expected a JSON object, got {given!r:.200}")
        settings |= found
    return settings


def _check_numbers(flags: ParsedFlags) -> None:
    for key, least in (("timeout", 1), ("max_prompts", 1), ("models_max", 0), ("reasoning_budget", -1)):
        if flags.values[key] < least:
            raise FlagError(f"--{key.replace('_', '-')}: expected {least} or more, got {flags.values[key]}")
    for key in ("threads_http", "max_connections", "sleep_idle_seconds"):
        if flags.values[key] == 0 or flags.values[key] < -1:
            raise FlagError(f"--{key.replace('_', '-')}: expected 1 or more, or -1, got {flags.values[key]}")


def _switches(flags: ParsedFlags, kwargs: dict[str, Any], prefix: str, predict: PredictRoutes | None) -> Switches:
    return Switches(
        metrics=flags.metrics,
        metrics_labels=metrics_labels(flags.metrics_labels),
        slots=flags.slots,
        props=flags.props,
        prefill_assistant=flags.prefill_assistant,
        sse_ping_interval=flags.sse_ping_interval,
        chat_template_kwargs=kwargs,
        jinja=flags.jinja,
        skip_chat_parsing=flags.skip_chat_parsing,
        reasoning_format=flags.reasoning_format,
        reasoning=flags.reasoning,
        reasoning_budget=flags.reasoning_budget,
        reasoning_budget_message=flags.reasoning_budget_message,
        reasoning_effort=flags.reasoning_effort,
        reasoning_preserve=flags.reasoning_preserve,
        slot_save_path=_folder("--slot-save-path", flags.slot_save_path),
        api_prefix=prefix,
        media_path=_folder("--media-path", flags.media_path),
        media_url=flags.media_url,
        static_path=_folder("--path", flags.path),
        page=flags.ui,
        page_settings=_page_settings(flags),
        chats=_chats_folder(flags.chats),
        max_prompts=flags.max_prompts,
        sleep_idle_seconds=flags.sleep_idle_seconds,
        hang_timeout=_hang_timeout(flags),
        cluster_token=flags.cluster_token or None,
        spm_infill=flags.spm_infill,
        predict=predict,
        verbose=flags.verbose or flags.log_verbosity >= VERBOSE,
        grammar=_grammar(flags),
    )


def _tools(flags: ParsedFlags) -> ToolSettings:
    """Return the settings of tools, which act with the rights of this user. Raises FlagError."""
    builtin = tuple(listed([flags.tools])) if flags.tools else ()
    if flags.agent and not builtin:
        builtin = ("all",)
    return ToolSettings(
        builtin=builtin,
        folder=_folder("--tools-folder", flags.tools_folder) or ".",
        runtime=flags.tools_runtime or "",
        servers=_mcp_servers(flags),
        proxy=flags.ui_mcp_proxy or (flags.agent and "ui_mcp_proxy" not in flags.given),
    )


def _mcp_servers(flags: ParsedFlags) -> tuple[McpServerConfig, ...]:
    """Return the MCP servers of the file and the flag; for each name, the file counts. Raises FlagError, ToolsError."""
    found: dict[str, McpServerConfig] = {}
    if path := flags.mcp_servers_config:
        text = read_file("--mcp-servers-config", path)
        found |= {server.name: server for server in read_servers(text, f"--mcp-servers-config {path}")}
    if text := flags.mcp_servers_json:
        found = {server.name: server for server in read_servers(text, "--mcp-servers-json")} | found
    return tuple(found.values())


def _hang_timeout(flags: ParsedFlags) -> float:
    seconds: float = flags.hang_timeout
    if not 0 <= seconds < math.inf:
        raise FlagError(f"--hang-timeout: expected seconds, 0 or more, got {seconds}")
    return seconds


def _names(given: list[str]) -> tuple[str, ...]:
    """Return unique names in byte order, as llama-server does; the first alias is the ID of the model."""
    return tuple(sorted(set(listed(given)), key=str.encode))


def _grammar(flags: ParsedFlags) -> GrammarSource | None:
    """Return the grammar or JSON schema for all outputs. Raises FlagError."""
    given = [
        (name, value)
        for name, value in (
            ("--grammar", flags.grammar),
            ("--grammar-file", flags.grammar_file),
            ("-j/--json-schema", flags.json_schema),
            ("-jf/--json-schema-file", flags.json_schema_file),
        )
        if value
    ]
    if not given:
        return None
    if len(given) > 1:
        raise FlagError(f"{given[0][0]} and {given[1][0]}: give one of them")
    (name, text) = given[0]
    if name.endswith("-file"):
        text = read_file(name, text)
    if "schema" not in name:
        return GrammarSource("gbnf", text)
    try:
        json.loads(text)
    except ValueError as error:
        raise FlagError(f"{name}: invalid JSON: {error}") from None
    return GrammarSource("json_schema", text)


def _folder(flag: str, path: str | None) -> str | None:
    if path is not None and not Path(path).is_dir():
        raise FlagError(f"{flag} {path}: no such folder")
    return path


def _chats_folder(path: str | None) -> str | None:
    """Create the folder of chats. Raises FlagError."""
    if path is not None:
        try:
            Path(path).mkdir(0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise FlagError(f"--chats {path}: cannot be created: {error.strerror}") from None
    return path


def _chats_note(flags: ParsedFlags, hosts: Sequence[str]) -> list[str]:
    """Return a warning if other machines can read the chats without a key."""
    if flags.chats is None or access_rules(flags).api_keys or all(map(sockets.is_local, hosts)):
        return []
    return ["--chats without --api-key: all who reach this server share one list of chats"]


def run_serve(flags: ParsedFlags) -> int:
    """Serve until the process is asked to stop, and return the exit code. Raises LlamadoError."""
    # Objects created while a model loads live on: collecting garbage among them would take a tenth of the loading time.
    gc.disable()
    try:
        return _run_serve(flags)
    finally:
        gc.enable()


def _run_serve(flags: ParsedFlags) -> int:
    settings = serve_settings(flags)
    configure_logs(flags)
    if settings.ssl_key and settings.ssl_cert:
        sockets.check_tls(settings.ssl_key, settings.ssl_cert)
    warning = sockets.exposure_warning(settings.hosts, keys=bool(settings.access.api_keys))
    if warning is not None:
        logging.getLogger("llamado.server").warning("%s", warning)
    listening = sockets.listen(settings.hosts, settings.port, reuse_port=settings.reuse_port)
    if serves_many(flags):
        from llamado.commands.memory_need import memory_need
        from llamado.router.serve import serve_router

        return serve_router(settings, flags, listening, lambda model: memory_need(model.launch.args, model.launch.env))

    from llamado.server.load import load_served
    from llamado.server.run import serve

    listen: Listen | None = None
    if flags.discover:
        from llamado.rpc.discovery import Discovery

        listen = Discovery
    if flags.lab is None:
        return serve(settings, load_served, listening, listen)

    from llamado.cluster.latency_lab import LatencyLab

    split = settings.engine.split
    assert split is not None
    lab = LatencyLab(split.rpc, flags.lab)
    try:
        drafts = settings.engine.drafts
        if drafts.kinds is None:  # drafts would hide the cost of a link: several tokens per round trip
            drafts = replace(drafts, kinds=())
        behind_taps = replace(settings.engine, split=replace(split, rpc=lab.endpoints), drafts=drafts)
        return serve(replace(settings, engine=behind_taps), load_served, listening, listen, lab)
    finally:
        lab.close()


def _check_lab(flags: ParsedFlags, settings: Settings) -> None:
    """Raise FlagError if the latency lab has no links, or if other machines could use it without a key."""
    if flags.lab is None:
        return
    if not 0 <= flags.lab <= _MOST_LAB_WORKERS:
        raise FlagError(f"--lab: expected 0 to {_MOST_LAB_WORKERS} workers, got {flags.lab}")
    if serves_many(flags):
        raise FlagError("--lab: it needs the workers of one model: give -m MODEL")
    if not flags.lab and not flags.rpc:
        raise FlagError("--lab: there are no links: give --rpc HOST:PORT, or --lab N for workers on this machine")
    if not settings.access.api_keys and (open_ := [host for host in settings.hosts if not sockets.is_local(host)]):
        raise FlagError(
            f"--lab with --host {', '.join(open_)}: any client could slow this server down and kill its workers; "
            "give --api-key KEY, or --host 127.0.0.1"
        )
