"""The command `llamado up`: run workers, taps and a server on this machine, from flags or a file."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import math
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.live import Live

from llamado.cluster.file import DEDICATED_KEYS, ClusterConfig, LinkConfig, WorkerConfig, parse_cluster, read_cluster
from llamado.cluster.services import Service, local_services
from llamado.cluster.state import (
    READY,
    STARTING,
    STOPPING,
    ClusterState,
    StateFolder,
)
from llamado.cluster.supervisor import Nodes, ServiceStatus, Supervisor
from llamado.cluster.table import cluster_table
from llamado.errors import LlamadoError
from llamado.flags import FLAGS, UP_SERVER_FLAGS, FlagError, ParsedFlags, refuse_broken_lines, secrets_of
from llamado.installation import own_command
from llamado.processes.secret_values import child_environment, secret
from llamado.terminal.console import Console
from llamado.terminal.text import print

_POLL = 0.05  # seconds between reads of the state of a cluster that starts in the background


class UpError(LlamadoError):
    """A cluster in the background ended before it was ready."""


def run_up(flags: ParsedFlags, namespace: argparse.Namespace) -> int:
    """Run the command until the cluster has ended, or with `--detach` until it is ready. Raises LlamadoError."""
    server_flags = namespace.server_flags or json.loads(secret(UP_SERVER_FLAGS) or "[]")
    config = cluster_config(flags, namespace.file, server_flags)
    return run_in_background(config, namespace.given, server_flags) if flags.detach else run_in_foreground(config)


def run_in_foreground(config: ClusterConfig) -> int:
    """Run a cluster until it is stopped. Raises LlamadoError."""
    folder = StateFolder(config.name)
    with folder.locked():
        if config.on == "ray":
            from llamado.cluster.ray.nodes import connect
            from llamado.cluster.ray.services import ray_services

            services = ray_services(config)
            with connect(config.ray, config.name, config.stop_timeout) as nodes:
                return asyncio.run(_ClusterRun(config, services, folder, nodes).run())
        services = local_services(config, _model(config))
        return asyncio.run(_ClusterRun(config, services, folder).run())


def cluster_config(flags: ParsedFlags, file: str | None, server: Sequence[str]) -> ClusterConfig:
    """Return the configuration of a file, changed by flags. `server`: flags of the server.

    Raises FlagError and ClusterFileError.
    """
    config = read_cluster(Path(file)) if file else parse_cluster({}, "flags")
    changed: dict[str, Any] = {}
    for key in ("name", "host", "port", "engine", "replicas", "log_folder", "on"):
        if key in flags.given:
            changed[key] = flags.values[key]
    if "model" in flags.given:
        if len(flags.model) > 1:
            raise FlagError(f"-m/--model: one model is expected, got {len(flags.model)}")
        changed["model"] = flags.model[0]
    if "nodes" in flags.given or "latency" in flags.given:
        if file and config.workers:
            raise FlagError(f"--nodes and --latency: {file} already defines the workers")
        changed["workers"] = _workers(flags)
    given = dataclasses.replace(config, **changed)
    options = server_options(server)
    for name in options:
        if name in DEDICATED_KEYS and DEDICATED_KEYS[name] in ("model", "host", "port"):
            raise FlagError(f"--{name}: give it before the --, as a flag of llamado up")
    options = {**given.server, **options}
    values = {field.name: _plain(getattr(given, field.name)) for field in dataclasses.fields(given)}
    return parse_cluster(values | {"server": _plain(options)}, file or "flags")


def _plain(value: Any) -> Any:
    """Convert a value to the form it has in a file."""
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _workers(flags: ParsedFlags) -> int | tuple[WorkerConfig, ...]:
    """Return the workers of `--nodes` and `--latency`. Raises FlagError."""
    try:
        links = [float(text) for text in re.split("[,/]+", flags.latency or "") if text]
    except ValueError:
        links = [-1.0]
    if any(not 0 <= latency < math.inf for latency in links):
        raise FlagError(f"--latency: expected milliseconds, comma-separated, got {flags.latency!r}")
    nodes = flags.nodes if "nodes" in flags.given else len(links) + 1
    if not len(links) < nodes <= 65:
        least = f"{len(links) + 1} (--latency has {len(links)} links)" if links else "1"
        raise FlagError(f"--nodes: expected {least} to 65, including the server, got {nodes}")
    if not any(links):
        return int(nodes) - 1
    links += [0.0] * (nodes - 1 - len(links))
    return tuple(WorkerConfig(link=LinkConfig(latency=ms) if ms else None) for ms in links)


def server_options(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the values of the server's flags after `--` by their long names. Raises FlagError."""
    known = {name: flag for flag in FLAGS if "serve" in flag.commands for name in flag.names + flag.off_names}
    refuse_broken_lines(arguments, {name for name, flag in known.items() if flag.type != "bool" and flag.bare is None})
    found: dict[str, Any] = {}
    left = list(arguments)
    while left:
        name, equals, value = left.pop(0).partition("=")
        flag = known.get(name)
        if flag is None:
            raise FlagError(f"{name}: not a flag of llamado serve (all flags: llamado serve --help-all)")
        long = next((n.removeprefix("--") for n in flag.names if n.startswith("--")), "")
        if name in flag.off_names or flag.type == "bool":
            found[long] = name not in flag.off_names
        elif equals or (left and (flag.bare is None or left[0].partition("=")[0] not in known)):
            text = value if equals else left.pop(0)
            found[long] = [*found.get(long, []), text] if flag.many else text
        elif flag.bare is not None:
            found[long] = flag.bare
        else:
            raise FlagError(f"{name}: expected a value")
    return found


def _model(config: ClusterConfig) -> Path:
    """Return the path of the model, which is downloaded if needed.

    The engine llama.cpp may run models that llamado does not support, so they are checked for llamado only.
    """
    from llamado.engine.options import EngineOptions, ModelSource
    from llamado.engine.supported import fetch_model
    from llamado.gguf.sources.resolve import progress_bar, resolve

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with progress_bar(console, config.model) as progress:
        if config.engine == "llamado":
            source = ModelSource(spec=config.model)
            return fetch_model(source, EngineOptions(), progress=progress, warn=console.print, say=lambda _: None)
        return resolve(config.model, progress=progress)


class _ClusterRun:
    """A running cluster: supervises it, shows its state here, and writes it for other terminals."""

    def __init__(
        self,
        config: ClusterConfig,
        services: Sequence[Service],
        folder: StateFolder,
        nodes: Nodes | None = None,
    ) -> None:
        logs = Path(config.log_folder) if config.log_folder else folder.path / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._state = ClusterState(name=config.name, url=services[-1].url, log_folder=str(logs.resolve()))
        self._supervisor = Supervisor(services, config.restart, config.stop_timeout, logs, self._changed, nodes)
        self._state.services = [one.state for one in self._supervisor.statuses.values()]
        self._console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
        self._live: Live | None = None
        self._printed: dict[str, str] = {}  # phase by service

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(sig, self._stop)
        loop.add_signal_handler(signal.SIGUSR1, self._take_orders)
        self._folder.write(self._state)
        if not sys.stdout.isatty():
            await self._supervisor.run()
            return 0
        with Live(console=self._console, auto_refresh=False) as self._live:
            showing = asyncio.create_task(self._show())
            try:
                await self._supervisor.run()
            finally:
                showing.cancel()
                self._live.update(self._table(), refresh=True)
        return 0

    def _table(self) -> Any:
        return cluster_table(self._state, {name: one.last_line for name, one in self._supervisor.statuses.items()})

    async def _show(self) -> None:
        assert self._live is not None
        while True:
            self._live.update(self._table(), refresh=True)
            await asyncio.sleep(0.25)

    def _stop(self) -> None:
        self._state.phase = STOPPING
        self._supervisor.stop()

    def _take_orders(self) -> None:
        for name in self._folder.take_drains():
            self._supervisor.drain(name)
        for name in self._folder.take_resumes():
            self._supervisor.resume(name)
        for name in self._folder.take_kills():
            self._supervisor.kill(name)

    def _changed(self, one: ServiceStatus) -> None:
        state = one.state
        if self._state.phase != STOPPING:
            ready = self._supervisor.ready
            if ready and self._state.phase == STARTING and self._live is None:
                self._console.print(f"ready: {self._state.url}")
            self._state.phase = READY if ready else STARTING
        self._folder.write(self._state)
        if self._live is None and self._printed.get(state.name) != state.phase:
            self._printed[state.name] = state.phase
            pid = f" (process {state.pid})" if state.pid else ""
            message = f": {state.message}" if state.message else ""
            self._console.print(f"{state.name} {state.address} {state.phase}{pid}{message}", markup=False)


def run_in_background(config: ClusterConfig, arguments: Sequence[str], server_flags: Sequence[str]) -> int:
    """Start a cluster that outlives this process, and wait until it is ready. Raises UpError and ClusterStateError."""
    own = [word for word in arguments if word not in ("--detach", "-d")]
    state = start_in_background(config.name, own, server_flags)
    print(f"ready: {state.url} (llamado ps, llamado logs, llamado down {config.name})")
    return 0


def start_in_background(name: str, arguments: Sequence[str], server_flags: Sequence[str]) -> ClusterState:
    """Start `llamado up` with `arguments` as a separate process, and wait until its cluster `name` is ready.

    `server_flags` may contain keys, so they are passed in the environment. Raises UpError with the last output of the
    process if it ends, and ClusterStateError if a cluster of this name is running.
    """
    folder = StateFolder(name)
    folder.check_free()
    folder.path.mkdir(parents=True, exist_ok=True, mode=0o700)
    own = folder.path / "up.log"
    with open(own, "wb") as log:
        process = subprocess.Popen(
            own_command("up", *arguments),
            env={
                **child_environment(),
                **secrets_of("serve"),
                **secrets_of("gateway"),
                UP_SERVER_FLAGS: json.dumps([*server_flags]),
            },
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        with Console(stderr=True, highlight=False).status("starting") as status:
            while True:
                state = folder.read()
                if process.poll() is not None:
                    output = own.read_text(errors="replace")
                    raise UpError(output.rpartition("\nllamado: ")[2].removeprefix("llamado: ").strip())
                if state is not None and state.pid == process.pid:
                    if state.phase == READY:
                        return state
                    slow = next((one for one in state.services if one.phase != READY), None)
                    if slow is not None:
                        status.update(f"{slow.name} {slow.phase} {slow.message}")
                time.sleep(_POLL)
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise
