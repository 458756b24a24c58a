"""`llamado wait`: wait until a server is ready, or a worker completes the handshake."""

from __future__ import annotations

import ssl
import sys
import time
from collections.abc import Callable

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from llamado.client.health import Phase, StartupWatch, State
from llamado.client.synchronous import LlamaServerClient
from llamado.cluster.greeting import greet
from llamado.terminal.console import Console
from llamado.terminal.text import print

Report = Callable[[State, float], None]
"""Callback: called with the state and the seconds since the start."""
HELLO_TIMEOUT = 5.0


def run_wait(url: str | None, *, timeout: float, interval: float, pid: int | None = None) -> int:
    """Wait for `http(s)://host:port`, or `tcp://host:port` of a worker. Return 0 if it is ready, 1 after the timeout.

    Without a URL, use that of the process `pid` or of the one in this container. A terminal shows a live progress
    line; otherwise a line is printed every `interval` seconds and at each change of state. Raises ServerUnavailable and
    EndpointError for an invalid address, and ListenerError.
    """
    tls: ssl.SSLContext | None = None
    if url is None:
        from llamado.commands.wait.listeners import listener_of

        found = listener_of(pid)
        url, tls = found.url, found.tls
    if url.startswith("tcp://"):
        from llamado.rpc.endpoint import Endpoint

        endpoint = Endpoint.parse(url)

        def wait_for_worker(report: Report) -> State:
            return _wait_for_worker(endpoint.address, timeout, report, tls)

        return _wait_and_print(url, timeout, interval, wait_for_worker)
    with LlamaServerClient(url, startup_timeout=timeout, verify=True if tls is None else tls) as client:

        def wait(report: Report) -> State:
            client.wait_until_ready(report)
            return client.state

        return _wait_and_print(client.base_url, timeout, interval, wait)


def _wait_and_print(url: str, timeout: float, interval: float, wait: Callable[[Report], State]) -> int:
    began = time.monotonic()
    if sys.stdout.isatty():
        with Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=20), TimeElapsedColumn(), transient=True
        ) as bar:
            task = bar.add_task("", total=None)

            def report(state: State, elapsed: float) -> None:
                total = None if state.progress is None else 1.0
                bar.update(task, description=f"{url}: {state.message}", total=total, completed=state.progress or 0)

            state = wait(report)
    else:
        print(f"Waiting for {url} to be ready (timeout: {timeout:g}s)...", flush=True)
        state = wait(_LinePrinter(timeout, interval).report)
    seconds = time.monotonic() - began
    if state.ready:
        print(f"Server is ready! (took {seconds:.0f}s)", flush=True)
        return 0
    Console(stderr=True, soft_wrap=True, highlight=False).print(
        f"ERROR: Timeout waiting for server: after {seconds:.0f}s {url}: {state.message}", markup=False
    )
    return 1


class _LinePrinter:
    """Prints plain lines, for logs."""

    def __init__(self, timeout: float, interval: float) -> None:
        self._timeout, self._interval = timeout, interval
        self._next = 0.0
        self._phase: Phase | None = None

    def report(self, state: State, elapsed: float) -> None:
        if state.ready or (elapsed < self._next and state.phase is self._phase):
            return
        self._next, self._phase = elapsed + self._interval, state.phase
        shown = "" if state.progress is None else f" {100 * state.progress:.0f}%"
        print(f"[{elapsed:.0f}/{self._timeout:g}s] {state.message}{shown}", flush=True)


def _wait_for_worker(address: tuple[str, int], timeout: float, report: Report, tls: ssl.SSLContext | None) -> State:
    began = time.monotonic()
    watch = StartupWatch(timeout)
    while True:
        state = watch.note(greet(address, watch.look_timeout(time.monotonic() - began, HELLO_TIMEOUT), tls))
        elapsed = time.monotonic() - began
        report(state, elapsed)
        if state.ready:
            return state
        pause = watch.pause(elapsed)
        if pause is None:
            return state
        time.sleep(pause)
