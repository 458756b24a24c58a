"""The command `llamado gateway`: make the options from flags and a file, and serve."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from llamado.commands.http_options import access_rules, configure_logs, hosts_of, metrics_labels
from llamado.flags import FlagError, ParsedFlags, check_port
from llamado.gateway import serve
from llamado.gateway.options import GatewayOptions, ReplicaOptions, read_config, read_keys
from llamado.http import sockets

_TIMES = ("health_interval", "health_timeout", "stall_timeout", "patience")


def gateway_options(flags: ParsedFlags) -> GatewayOptions:
    """Merge flags and the file of `--config`; flags take precedence. Raises FlagError, GatewayError."""
    settings: dict[str, Any] = read_config(flags.gateway_config) if flags.gateway_config else {}
    replicas = list(settings.pop("replicas", ()))
    keys = [*settings.pop("keys", ()), *(read_keys(flags.key_file) if flags.key_file else ())]
    for urls, backup in ((flags.replica, False), (flags.backup, True)):
        for given in urls or []:
            replicas += [ReplicaOptions(url=url.strip(), backup=backup) for url in given.split(",") if url.strip()]
    if flags.replica_key:
        replicas = [r if r.key else replace(r, key=flags.replica_key) for r in replicas]
    for name in _TIMES:
        if not 0 <= flags.values[name] < math.inf:
            raise FlagError(f"--{name.replace('_', '-')}: expected seconds, got {flags.values[name]}")
        if name in flags.given or name not in settings:
            settings[name] = flags.values[name]
    if flags.quota_file:
        settings["quota_file"] = Path(flags.quota_file)
    admin_key = flags.admin_key or settings.pop("admin_key", "")
    settings.pop("admin_key", None)
    if not replicas and not admin_key:
        raise FlagError("no replicas: give --replica http://host:port, or --admin-key KEY to add them later")
    return GatewayOptions(
        **{**settings, "labels": {**settings.get("labels", {}), **dict(metrics_labels(flags.metrics_labels) or ())}},
        replicas=tuple(replicas),
        keys=tuple(keys),
        admin_key=admin_key,
        access=access_rules(flags),
        ssl_key=flags.ssl_key_file,
        ssl_cert=flags.ssl_cert_file,
        timeout=flags.timeout,
    )


def run_gateway(flags: ParsedFlags) -> int:
    """Serve until the process is asked to stop, and return the exit code. Raises LlamadoError."""
    options = gateway_options(flags)
    hosts, port = hosts_of(flags), check_port("--port", flags.port)
    configure_logs(flags)
    if options.ssl_key and options.ssl_cert:
        sockets.check_tls(options.ssl_key, options.ssl_cert)
    warning = sockets.exposure_warning(hosts, keys=bool(options.access.api_keys or options.keys))
    if warning is not None:
        logging.getLogger("llamado.gateway").warning("%s", warning)
    listening = sockets.listen(hosts, port)

    return serve.serve_gateway(options, listening)
