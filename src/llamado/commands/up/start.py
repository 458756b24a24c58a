"""`llamado up`: workers, taps and a server on this machine from flags or one file, watched until they are ended."""

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
from llamado.flags import FLAGS, UP_SERVER_FLAGS, FlagError, Parsed, refuse_broken_lines, secrets_of
from llamado.installation import own_command
from llamado.processes.secret_values import child_environment, secret
from llamado.terminal.console import Console
from llamado.terminal.text import print

_POLL = 0.05  # seconds between looks at the state of a cluster that starts in the background


class UpFailed(LlamadoError):
    """A cluster in the background ended before it was ready."""


def run_up(flags: Parsed, namespace: argparse.Namespace) -> int:
    """The command: returns when the cluster has ended; with `--detach` when it is ready. Raises LlamadoError."""
    behind = namespace.behind or json.loads(secret(UP_SERVER_FLAGS) or "[]")
    config = cluster_config(flags, namespace.file, behind)
    return run_behind(config, namespace.given, behind) if flags.detach else run_here(config)


def run_here(config: ClusterConfig) -> int:
    """Run a cluster until it is ended. Raises LlamadoError."""
    folder = StateFolder(config.name)
    with folder.locked():
        if config.on == "ray":
            from llamado.cluster.ray.nodes import connect
            from llamado.cluster.ray.services import ray_services

            services = ray_services(config)
            with connect(config.ray, config.name, config.stop_timeout) as nodes:
                return asyncio.run(_Run(config, services, folder, nodes).run())
        services = local_services(config, _model(config))
        return asyncio.run(_Run(config, services, folder).run())


def cluster_config(flags: Parsed, file: str | None, server: Sequence[str]) -> ClusterConfig:
    """What a file says, and what flags say instead; `server`: flags of the server.

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
            raise FlagError(f"--nodes and --latency: {file} says which workers there are")
        changed["workers"] = _workers(flags)
    given = dataclasses.replace(config, **changed)
    behind = server_options(server)
    for name in behind:
        if name in DEDICATED_KEYS and DEDICATED_KEYS[name] in ("model", "host", "port"):
            raise FlagError(f"--{name}: it stands before the --, as a flag of llamado up")
    options = {**given.server, **behind}
    values = {field.name: _plain(getattr(given, field.name)) for field in dataclasses.fields(given)}
    return parse_cluster(values | {"server": _plain(options)}, file or "flags")


def _plain(value: Any) -> Any:
    """As it would stand in a file."""
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _workers(flags: Parsed) -> int | tuple[WorkerConfig, ...]:
    """`--nodes`, this machine's server counted, and `--latency`, a link for each worker."""
    try:
        links = [float(text) for text in re.split("[,/]+", flags.latency or "") if text]
    except ValueError:
        links = [-1.0]
    if any(not 0 <= latency < math.inf for latency in links):
        raise FlagError(f"--latency: expected milliseconds, comma-separated, got {flags.latency!r}")
    nodes = flags.nodes if "nodes" in flags.given else len(links) + 1
    if not len(links) < nodes <= 65:
        least = f"{len(links) + 1}, as --latency has {len(links)} links" if links else "1"
        raise FlagError(f"--nodes: expected {least} to 65, the server counted, got {nodes}")
    if not any(links):
        return int(nodes) - 1
    links += [0.0] * (nodes - 1 - len(links))
    return tuple(WorkerConfig(link=LinkConfig(latency=ms) if ms else None) for ms in links)


def server_options(arguments: Sequence[str]) -> dict[str, Any]:
    """The server's flags after `--`, by their long names. Raises FlagError."""
    known = {name: flag for flag in FLAGS if "serve" in flag.commands for name in flag.names + flag.off_names}
    refuse_broken_lines(arguments, {name for name, flag in known.items() if flag.type != "bool" and flag.bare is None})
    found: dict[str, Any] = {}
    left = list(arguments)
    while left:
        name, equals, value = left.pop(0).partition("=")
        flag = known.get(name)
        if flag is None:
            raise FlagError(f"{name}: no flag of llama-server's (all flags: llamado serve --help)")
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
    """The model's file, fetched where it is not here yet; what no engine of ours runs is only refused for ours."""
    from llamado.engine.options import EngineOptions, ModelSource
    from llamado.engine.supported import fetch_model
    from llamado.gguf.sources.resolve import progress_bar, resolve

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with progress_bar(console, config.model) as progress:
        if config.engine == "llamado":
            source = ModelSource(spec=config.model)
            return fetch_model(source, EngineOptions(), progress=progress, warn=console.print, say=lambda _: None)
        return resolve(config.model, progress=progress)


class _Run:
    """A cluster while it runs: what is seen of it here, and told to other terminals."""

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
        self._told: dict[str, str] = {}

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(sig, self._stop)
        loop.add_signal_handler(signal.SIGUSR1, self._asked)
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

    def _asked(self) -> None:
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
        if self._live is None and self._told.get(state.name) != state.phase:
            self._told[state.name] = state.phase
            pid = f" (process {state.pid})" if state.pid else ""
            message = f": {state.message}" if state.message else ""
            self._console.print(f"{state.name} {state.address} {state.phase}{pid}{message}", markup=False)


def run_behind(config: ClusterConfig, arguments: Sequence[str], behind: Sequence[str]) -> int:
    """Start a cluster that goes on when this process ends. Raises UpFailed and ClusterStateError."""
    own = [word for word in arguments if word not in ("--detach", "-d")]
    state = start_behind(config.name, own, behind)
    print(f"ready: {state.url} (llamado ps, llamado logs, llamado down {config.name})")
    return 0


def start_behind(name: str, arguments: Sequence[str], behind: Sequence[str]) -> ClusterState:
    """Start `llamado up` with arguments as a process of its own, and wait until its cluster, `name`, is ready.

    `behind`: flags of the server. They may hold keys, so they are passed in the environment.

    Raises UpFailed with what it said when it ends instead, and ClusterStateError when one of the name runs already.
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
                UP_SERVER_FLAGS: json.dumps([*behind]),
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
                    said = own.read_text(errors="replace")
                    raise UpFailed(said.rpartition("\nllamado: ")[2].removeprefix("llamado: ").strip())
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
