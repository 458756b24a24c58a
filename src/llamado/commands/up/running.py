"""`llamado ps`, `down`, `logs` and `drain`: control clusters of `llamado up` from another terminal."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import orjson

from llamado.cluster.services import ServiceRole
from llamado.cluster.state import (
    GONE,
    READY,
    STARTING,
    ClusterState,
    ClusterStateError,
    ServiceState,
    StateFolder,
    all_clusters,
    end_processes,
    find_cluster,
)
from llamado.cluster.supervisor import DRAINED, DRAINING, RESTART_FAILED, WAITING
from llamado.cluster.table import cluster_table
from llamado.commands.up.servers import servers_json, servers_table
from llamado.http.running import running_servers
from llamado.terminal.console import Console
from llamado.terminal.text import print

_PIPE_WIDTH = 160  # columns of output to a file or pipe
_POLL = 0.1  # seconds
_TAIL = 1 << 16  # bytes at the end of a log to show first


def run_ps(*, clusters_json: bool, as_json: bool, key: str | None = None) -> int:
    """Show all servers and clusters of this user. Return 0 if there is at least one and no cluster was killed.

    `key`: API key of the servers, to show their speed.
    """
    clusters = all_clusters()
    servers = [] if clusters_json else servers_json(running_servers(), key)
    if as_json:
        shown = {"servers": servers, "clusters": [asdict(state) for state in clusters]}
        print(orjson.dumps(shown, option=orjson.OPT_INDENT_2).decode())
    elif clusters_json:
        print(orjson.dumps([asdict(state) for state in clusters], option=orjson.OPT_INDENT_2).decode())
    else:
        console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)
        for state in clusters:
            console.print(cluster_table(state, {one.name: last_line(one) for one in state.services}))
            if state.phase == GONE:
                console.print(f"{state.name} was killed; llamado down {state.name} cleans up", markup=False)
        if servers:
            console.print(servers_table(servers))
        if not clusters and not servers:
            console.print("nothing is running; llamado serve starts a server, llamado up a cluster")
    return 0 if (clusters or servers) and all(state.phase != GONE for state in clusters) else 1


def run_down(name: str | None) -> int:
    """Stop a cluster, and processes left by a killed one, and wait for their end. Raises ClusterStateError."""
    gone = [state for state in all_clusters() if state.phase == GONE and name in (None, state.name)]
    for state in gone:
        with StateFolder(state.name).locked():  # stops remaining processes
            print(f"{state.name} was killed; its remaining processes were stopped")
    if gone and not any(state.phase != GONE and name in (None, state.name) for state in all_clusters()):
        return 0
    state = find_cluster(name)
    folder = StateFolder(state.name)
    os.kill(state.pid, signal.SIGTERM)
    while folder.is_running():
        time.sleep(_POLL)
    # In case a process has survived.
    end_processes([(one.pid, one.mark) for one in state.services], 5.0)
    print(f"{state.name} has stopped")
    return 0


def run_drain(service: str, name: str | None, *, undo: bool = False) -> int:
    """Stop a service after its running requests, and wait for that. The layers of a worker are moved first.

    `undo`: start a drained server again, and wait until it is ready. Raises ClusterStateError.
    """
    state = find_cluster(name)
    before = _service(state, service)
    folder = StateFolder(state.name)
    if undo and before.role != ServiceRole.SERVER:
        raise ClusterStateError(f"{service} is not a server: only a drained server can be started again")
    if undo and before.phase not in (DRAINED, DRAINING):
        raise ClusterStateError(f"{service} is {before.phase}, not drained")
    (folder.request_resume if undo else folder.request_drain)(service)
    os.kill(state.pid, signal.SIGUSR1)
    while True:
        taken = not folder.is_pending(service)
        now = folder.read()
        if now is None or now.phase == GONE:
            raise ClusterStateError(f"{state.name} ended before {service} was {'ready' if undo else 'drained'}")
        after = _service(now, service)
        if after.phase == (READY if undo else DRAINED):
            print(f"{service} is {after.phase}")
            return 0
        waits = after.phase in (DRAINING, DRAINED, WAITING, STARTING) and not after.message.startswith(RESTART_FAILED)
        if taken and not (waits if undo else after.phase == DRAINING):
            aim = "ready" if undo else "drained"
            raise ClusterStateError(f"{service}: {after.message or f'it is {after.phase}, not {aim}'}")
        time.sleep(_POLL)


def run_logs(service: str | None, name: str | None, *, follow: bool) -> int:
    """Print the end of the log of one or all services; `follow`: keep printing new lines. Raises ClusterStateError."""
    state = find_cluster(name)
    shown = [_service(state, service)] if service else [one for one in state.services if one.log]
    if any(not one.log for one in shown):
        raise ClusterStateError(f"{service} runs on another machine, which has its log")
    width = max(len(one.name) for one in shown) if len(shown) > 1 else 0
    tails = [(f"{one.name:{width}} | " if width else "", _lines(Path(one.log))) for one in shown]
    folder = StateFolder(state.name)
    while True:
        running = folder.is_running()  # checked first, so that lines written before the end are read below
        for prefix, lines in tails:
            for line in lines:
                if line is None:
                    break
                print(prefix + line, flush=True)
        if not follow or not running:
            return 0
        time.sleep(_POLL)


def _service(state: ClusterState, name: str) -> ServiceState:
    for one in state.services:
        if one.name == name:
            return one
    raise ClusterStateError(f"{state.name} has no {name!r}, only {', '.join(one.name for one in state.services)}")


def _lines(path: Path) -> Iterator[str | None]:
    """Yield the lines at the end of a log, and None whenever there is no new line yet. Follows a replaced file."""
    file = open(path, "rb")  # noqa: SIM115
    try:
        start = max(0, os.fstat(file.fileno()).st_size - _TAIL)
        file.seek(start)
        if start:
            file.readline()
        partial = b""
        while True:
            line = file.readline()
            partial += line
            if partial.endswith(b"\n"):
                yield partial[:-1].decode("utf-8", "replace")
                partial = b""
            elif not line:
                try:
                    replaced = os.stat(path).st_ino != os.fstat(file.fileno()).st_ino
                except FileNotFoundError:
                    replaced = False
                if replaced and not partial:
                    file.close()
                    file = open(path, "rb")  # noqa: SIM115
                else:
                    yield None
    finally:
        file.close()


def last_line(service: ServiceState) -> str:
    """Return the last complete line of a service's log, or ""."""
    found = ""
    try:
        for line in _lines(Path(service.log)) if service.log else ():
            if line is None:
                break
            found = line or found
    except OSError:
        pass
    return found
