"""`llamado ps`, `down`, `logs` and `drain`: clusters of `llamado up`, from another terminal."""

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

_PIPED = 160  # columns of what goes to a file or a pipe
_POLL = 0.1  # seconds
_TAIL = 1 << 16  # bytes of a log that are shown at first


def run_ps(*, clusters_json: bool, as_json: bool, key: str | None = None) -> int:
    """Show all servers and clusters of this user; the exit code is 0 when there is one and all of it runs.

    `key`: what servers want to be told before they say how fast they are.
    """
    clusters = all_clusters()
    servers = [] if clusters_json else servers_json(running_servers(), key)
    if as_json:
        shown = {"servers": servers, "clusters": [asdict(state) for state in clusters]}
        print(orjson.dumps(shown, option=orjson.OPT_INDENT_2).decode())
    elif clusters_json:
        print(orjson.dumps([asdict(state) for state in clusters], option=orjson.OPT_INDENT_2).decode())
    else:
        console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPED)
        for state in clusters:
            console.print(cluster_table(state, {one.name: last_line(one) for one in state.services}))
            if state.phase == GONE:
                console.print(f"{state.name} was killed; llamado down {state.name} forgets it", markup=False)
        if servers:
            console.print(servers_table(servers))
        if not clusters and not servers:
            console.print("nothing runs; llamado serve starts a server, llamado up a cluster")
    return 0 if (clusters or servers) and all(state.phase != GONE for state in clusters) else 1


def run_down(name: str | None) -> int:
    """End a cluster and wait until it has ended; what a killed one left is ended, too. Raises ClusterStateError."""
    gone = [state for state in all_clusters() if state.phase == GONE and name in (None, state.name)]
    for state in gone:
        with StateFolder(state.name).locked():  # ends what is left
            print(f"{state.name} was killed; nothing of it is left")
    if gone and not any(state.phase != GONE and name in (None, state.name) for state in all_clusters()):
        return 0
    state = find_cluster(name)
    folder = StateFolder(state.name)
    os.kill(state.pid, signal.SIGTERM)
    while folder.is_running():
        time.sleep(_POLL)
    # Nothing should be left of it; this makes sure.
    end_processes([(one.pid, one.mark) for one in state.services], 5.0)
    print(f"{state.name} has ended")
    return 0


def run_drain(service: str, name: str | None, *, undo: bool = False) -> int:
    """Have a service finish what it is doing and end, and wait for that; a worker's layers move before.

    `undo`: start a drained server again, and wait until it is ready. Raises ClusterStateError.
    """
    state = find_cluster(name)
    before = _service(state, service)
    folder = StateFolder(state.name)
    if undo and before.role != ServiceRole.SERVER:
        raise ClusterStateError(f"{service} is no server: only a drained server can be started again")
    if undo and before.phase not in (DRAINED, DRAINING):
        raise ClusterStateError(f"{service} is {before.phase}, and not drained")
    (folder.request_resume if undo else folder.request_drain)(service)
    os.kill(state.pid, signal.SIGUSR1)
    while True:
        taken = not folder.is_pending(service)
        now = folder.read()
        if now is None or now.phase == GONE:
            raise ClusterStateError(f"{state.name} ended before {service} was {'ready' if undo else 'drained'}")
        one = _service(now, service)
        if one.phase == (READY if undo else DRAINED):
            print(f"{service} is {one.phase}")
            return 0
        waits = one.phase in (DRAINING, DRAINED, WAITING, STARTING) and not one.message.startswith(RESTART_FAILED)
        if taken and not (waits if undo else one.phase == DRAINING):
            aim = "ready" if undo else "drained"
            raise ClusterStateError(f"{service}: {one.message or f'it is {one.phase}, and not {aim}'}")
        time.sleep(_POLL)


def run_logs(service: str | None, name: str | None, *, follow: bool) -> int:
    """Print the end of a service's log, or of all of them; then, if asked, what is added. Raises ClusterStateError."""
    state = find_cluster(name)
    shown = [_service(state, service)] if service else [one for one in state.services if one.log]
    if any(not one.log for one in shown):
        raise ClusterStateError(f"{service} runs on another machine: its log is there")
    width = max(len(one.name) for one in shown) if len(shown) > 1 else 0
    tails = [(f"{one.name:{width}} | " if width else "", _lines(Path(one.log))) for one in shown]
    folder = StateFolder(state.name)
    while True:
        running = folder.is_running()  # asked first: what was written before the end is still read below
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
    raise ClusterStateError(f"{state.name} has no {name!r}: there are {', '.join(one.name for one in state.services)}")


def _lines(path: Path) -> Iterator[str | None]:
    """The lines of a log from near its end on; None where no more is there yet. One that is begun anew is followed."""
    file = open(path, "rb")  # noqa: SIM115
    try:
        start = max(0, os.fstat(file.fileno()).st_size - _TAIL)
        file.seek(start)
        if start:
            file.readline()
        begun = b""
        while True:
            line = file.readline()
            begun += line
            if begun.endswith(b"\n"):
                yield begun[:-1].decode("utf-8", "replace")
                begun = b""
            elif not line:
                try:
                    replaced = os.stat(path).st_ino != os.fstat(file.fileno()).st_ino
                except FileNotFoundError:
                    replaced = False
                if replaced and not begun:
                    file.close()
                    file = open(path, "rb")  # noqa: SIM115
                else:
                    yield None
    finally:
        file.close()


def last_line(service: ServiceState) -> str:
    """The last whole line of a service's log; "" where there is none."""
    found = ""
    try:
        for line in _lines(Path(service.log)) if service.log else ():
            if line is None:
                break
            found = line or found
    except OSError:
        pass
    return found
