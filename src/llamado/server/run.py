"""The server process: its event loop, loading of the model, signals and shutdown."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from functools import partial
from types import FrameType
from typing import Any, cast

import uvicorn

from llamado.errors import LlamadoError
from llamado.http.access import busy_app
from llamado.http.answer import Scope
from llamado.http.connections import HEADER_SECONDS, ConnectionLimits, configure
from llamado.http.running import ServerFile, announce
from llamado.http.signals import GracefulServer
from llamado.http.sockets import address_of
from llamado.processes import memory
from llamado.server.app import ServerApp, create_app
from llamado.server.generate.threads import use_threads
from llamado.server.model import ServedLab, ServedModel
from llamado.server.ops.banner import overview
from llamado.server.ops.discovery import LanWorkers, Listen
from llamado.server.ops.sleep import Sleep
from llamado.server.ops.tracing import open_tracing
from llamado.server.settings import Settings
from llamado.server.state import ServerState
from llamado.tools.api import ToolsApi

log = logging.getLogger("llamado.server")

Report = Callable[[float, str], None]
Load = Callable[[Settings, Report], ServedModel]

PARENT = "LLAMADO_PARENT_FD"
"""Environment variable with the read end of a pipe from the parent process, which closes when the parent ends."""


class _Server(GracefulServer):
    """uvicorn with watcher tasks, and an end when the parent process ends."""

    def __init__(self, config: uvicorn.Config, watchers: Callable[[], list[Coroutine[None, None, None]]]) -> None:
        super().__init__(config)
        self._watchers = watchers
        self._watching: list[asyncio.Task[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        if self.config.is_ssl:
            # uvicorn has no setting for the timeout of TLS handshakes.
            create_server = loop.create_server
            loop.create_server = partial(  # type: ignore[method-assign]
                create_server, ssl_handshake_timeout=HEADER_SECONDS
            )
        await super().startup(sockets)
        self._watching = [asyncio.ensure_future(watcher) for watcher in self._watchers()]
        parent = os.environ.get(PARENT)
        if parent is not None:
            self._watch_parent(parent)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self._watching:
            task.cancel()
        await super().shutdown(sockets)

    def _watch_parent(self, text: str) -> None:
        """Shut down when the other end of the pipe is closed, which happens however the parent ends."""
        loop = asyncio.get_running_loop()
        try:
            fd = int(text)
            os.set_blocking(fd, False)
            os.set_inheritable(fd, False)

            def readable() -> None:
                try:
                    if os.read(fd, 4096):
                        return
                except BlockingIOError:
                    return
                except OSError:
                    pass
                loop.remove_reader(fd)
                log.info("parent process ended: shutting down")
                self.should_exit = True

            loop.add_reader(fd, readable)
        except (ValueError, OSError) as error:
            log.warning("%s=%s: not an open file (%s); the parent process is not watched", PARENT, text, error)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
            return
        self.should_exit = True
        count = len(self.server_state.tasks)
        if count:
            seconds = self.config.timeout_graceful_shutdown
            log.info("shutdown: finishing %d request(s), up to %d s; interrupt again to end them", count, seconds)


def _load(
    server: _Server,
    state: ServerState,
    settings: Settings,
    load: Load,
    addresses: list[str],
    announcement: ServerFile,
) -> None:
    """Load the model, set `state.served` and log it. On failure, `/health` returns the reason, and the server ends."""
    began = time.perf_counter()
    try:
        served = load(settings, state.report)
    except MemoryError:
        state.failure = "the model does not fit this machine's memory"
        log.error("failed to load model: out of memory")
    except LlamadoError as error:
        state.failure = str(error)
        log.error("failed to load model: %s", error.as_logged())
    except Exception as error:
        state.failure = f"{type(error).__name__}: {error}"
        log.exception("failed to load model: unexpected error")
    except BaseException as error:  # a library's SystemExit must not leave the server loading forever
        state.failure = repr(error)
        log.error("failed to load model: %r", error)
    else:
        memory.freeze()
        state.served = served
        state.report(1.0, "ready")
        announcement.update(model=served.info.name, path=served.info.path)
        log.info("model loaded in %.2f s: %s", time.perf_counter() - began, served.info.name)
        for line in overview(settings, served, addresses):
            log.info("%s", line)
        # llama-server's log lines, which scripts wait for.
        for address in addresses:
            log.info("server is listening on %s", address)
        log.info("all slots are idle")
    if state.failure is not None:
        while not server.started:
            time.sleep(0.01)
        time.sleep(0.5)  # clients that poll /health get the reason
        server.should_exit = True


def serve(
    settings: Settings,
    load: Load,
    sockets: list[socket.socket],
    listen: Listen | None = None,
    lab: ServedLab | None = None,
) -> int:
    """Serve until a signal comes or loading fails; return the exit code.

    `load` runs in a thread of its own while `/health` already answers. `listen`: starts a listener for announced
    workers.
    """
    # Three threads share the interpreter: the engine's, between two steps; this one; and those that tokenize long
    # texts. With Python's default of 5 ms per turn, each would wait too long for the others.
    sys.setswitchinterval(0.0005)
    memory.map_large_blocks()
    state = ServerState(access=settings.access, switches=settings.switches, loading_model=settings.names[0])
    logging.getLogger("llamado").addHandler(state.live.log)
    state.lab = lab
    state.tools = ToolsApi.open(settings.tools, settings.access, settings.hosts)
    state.tracing = open_tracing(settings.otel)
    if settings.threads_http is not None:
        use_threads(settings.threads_http)
    lan = None if listen is None else LanWorkers(state, listen)
    gate = ConnectionLimits(settings.max_connections, settings.timeout)
    application: list[ServerApp] = []

    def make_app() -> ServerApp:
        application.append(create_app(state))
        server.access = application[0].access
        return application[0]

    def refused(scope: Scope, status: int) -> None:
        application[0].refused(scope, status)

    refuse = busy_app(lambda: application[0], settings.switches.api_prefix, refused)
    config = configure(make_app, gate, cast(Any, refuse), key=settings.ssl_key, certificate=settings.ssl_cert)

    def watchers() -> list[Coroutine[None, None, None]]:
        always = [state.live.watch(lambda: state.served.snapshot() if state.served else None)]
        seconds = settings.switches.sleep_idle_seconds
        if seconds < 0:
            return always
        state.sleep = Sleep(state, lambda: load(settings, state.report), seconds)
        return [*always, state.sleep.watch()]

    server = _Server(config, watchers)
    addresses = [address_of(sock, tls=bool(settings.ssl_cert)) for sock in sockets]
    for address in addresses:
        log.info("server listening on %s", address)
    for note in settings.notes:
        log.info("%s", note)

    with announce("server", addresses, settings.switches.api_prefix) as announcement:
        loader = threading.Thread(
            target=partial(_load, server, state, settings, load, addresses, announcement),
            name="llamado-load",
            daemon=True,
        )
        loader.start()
        server.run(sockets=sockets)
    code = 0 if state.failure is None else 1
    logging.getLogger("llamado").removeHandler(state.live.log)
    state.tools.close()
    if lan is not None:
        lan.close()
    if state.tracing is not None:
        state.tracing.close()
    if state.served is not None:
        state.served.close(0.0)
    elif loader.is_alive():
        # The loader may be inside native code, which cannot be interrupted.
        log.info("ended")
        _leave(code)
    log.info("ended")
    return code


def _leave(code: int) -> None:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
