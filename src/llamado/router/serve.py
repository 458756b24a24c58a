"""Running a router until a signal arrives."""

from __future__ import annotations

import logging
import socket
from dataclasses import replace
from types import FrameType

from llamado.devices import limits
from llamado.flags import ParsedFlags, memory_size
from llamado.http.access import HEALTH, Access, AccessPaths, busy_app
from llamado.http.bodies import MAX_MEDIA_BODY
from llamado.http.connections import RESERVED_FILES, ConnectionLimits, configure, raise_file_limit
from llamado.http.monitoring.counter import RequestCounter
from llamado.http.running import announce
from llamado.http.signals import GracefulServer
from llamado.http.sockets import address_of
from llamado.processes import memory
from llamado.router import catalog as catalogs
from llamado.router.app import CHANGING, NeedOf, Router, RouterOptions
from llamado.router.catalog import Catalog, CatalogError, RoutedModel
from llamado.router.fleet import FleetLimits
from llamado.router.refusals import RefusalLog
from llamado.router.swap_config import SwapConfig, read_swap_config
from llamado.server.settings import Settings
from llamado.tools.api import ToolsApi

log = logging.getLogger("llamado.router")


class RouterServer(GracefulServer):
    """uvicorn server that stops the model processes before it exits; a second signal kills everything."""

    router: Router | None = None
    tools: ToolsApi | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
            if self.router is not None:
                self.router.fleet.kill()
            return
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        router = self.router
        if router is not None:
            router.end_streams()
        await super().shutdown(sockets)
        if router is not None:
            if self.force_exit:
                router.fleet.kill()
            if self.tools is not None:
                self.tools.close()
            await router.fleet.close()
            router.peers.close()
            logging.getLogger("llamado").removeHandler(router.log_tail)


def _swap_config(flags: ParsedFlags) -> SwapConfig | None:
    """Return llama-swap's configuration if the flags name a file. Raises SwapConfigError."""
    return read_swap_config(flags.llama_swap) if flags.llama_swap else None


def _catalog(flags: ParsedFlags) -> Catalog:
    """Return the models selected by all flags. Raises FlagError, CatalogError, PresetError, SwapConfigError."""
    config = _swap_config(flags)
    return catalogs.load(flags, config.models if config else ())


def make_server(settings: Settings, flags: ParsedFlags, need_of: NeedOf = lambda model: 0) -> RouterServer:
    """Return a server that is ready to run. `need_of`: returns the bytes of memory a model needs, 0 if unknown.

    Raises FlagError, CatalogError, PresetError, SwapConfigError if the models cannot be listed.
    """
    config = _swap_config(flags)
    catalog = catalogs.load(flags, config.models if config else ())
    access = settings.access
    preload = [model.name for model in catalog.models.values() if model.load_on_startup]
    models_max: int = flags.models_max
    if config:
        access = replace(access, api_keys=(*access.api_keys, *(key.encode() for key in config.api_keys)))
        preload += [name for name in config.preload if name not in preload]
        if "models_max" not in flags.given:
            models_max = 0  # llama-swap's groups decide
        if "log_verbosity" not in flags.given and not flags.verbose:
            level = {"debug": logging.DEBUG, "warn": logging.WARNING, "error": logging.ERROR}.get(config.log_level)
            if level is not None:
                log.setLevel(level)
    elif 0 < models_max < len(preload):
        raise CatalogError(
            f"{len(preload)} models are to be loaded on startup, and --models-max is {models_max}: {', '.join(preload)}"
        )
    settings = replace(settings, access=access)
    tools = ToolsApi.open(settings.tools, access, settings.hosts)
    application: list[RequestCounter] = []
    options = RouterOptions(
        limits=FleetLimits(models_max=models_max, memory=_memory_limit(flags), waiting=settings.engine.max_queue),
        autoload=flags.models_autoload,
        peers=config.peers if config else (),
        reread=lambda: _catalog(flags),
        need_of=need_of,
    )

    def make() -> RequestCounter:
        router = server.router = Router(
            catalog,
            settings,
            options,
            tools,
        )
        logging.getLogger("llamado").addHandler(router.log_tail)
        for name in preload:
            instance = router.fleet.find(name)
            if instance is not None:
                router.fleet.load(instance)
        prefix, public = settings.switches.api_prefix, HEALTH | router.page
        access = server.access = Access(
            router,
            settings.access,
            prefix,
            AccessPaths(public=public, changing=CHANGING),
            max_body=lambda: MAX_MEDIA_BODY,
        )
        access.on_drain = router.streams.close
        application.append(RequestCounter(RefusalLog(access), router.traffic, router.routes.endpoint, prefix))
        return application[0]

    # Each request needs a second connection, to its model.
    limit = (raise_file_limit() - RESERVED_FILES) // 2
    connections = ConnectionLimits(min(limit, settings.max_connections or limit), settings.timeout)
    refuse = busy_app(
        lambda: application[0],
        settings.switches.api_prefix,
        lambda *refused: application[0].refused(*refused),
    )
    uvicorn_config = configure(
        make,
        connections,
        refuse,
        key=settings.ssl_key,
        certificate=settings.ssl_cert,
        proxied=False,  # X-Forwarded-For is forwarded unchanged
    )
    server = RouterServer(uvicorn_config)
    server.tools = tools
    _log_models(list(catalog.models.values()))
    for peer in config.peers if config else ():
        log.info("  [peer] %s at %s: %s", peer.name, peer.url, ", ".join(peer.models))
    return server


def _memory_limit(flags: ParsedFlags) -> int:
    """Return the bytes of memory for all models together; 0: no limit. Raises FlagError."""
    if flags.models_memory is None:
        return limits.memory().total
    return 0 if flags.models_memory.strip() == "0" else memory_size(flags.models_memory, "--models-memory")


def serve_router(settings: Settings, flags: ParsedFlags, sockets: list[socket.socket], need_of: NeedOf) -> int:
    """Serve many models until a signal arrives; return the exit code. Raises as `make_server` does."""
    memory.map_large_blocks()
    server = make_server(settings, flags, need_of)
    memory.freeze()
    for note in settings.notes:
        log.info("%s", note)
    addresses = [address_of(sock, tls=bool(settings.ssl_cert)) for sock in sockets]
    for address in addresses:
        log.info("server listening on %s", address)
    with announce("router", addresses, settings.switches.api_prefix):
        try:
            server.run(sockets=sockets)
        finally:
            if server.router is not None:
                server.router.fleet.kill()
    return 0


def _log_models(models: list[RoutedModel]) -> None:
    log.info("router: %d model(s), loaded on request", len(models))
    for model in models:
        aliases = f" (aliases: {', '.join(model.aliases)})" if model.aliases else ""
        tags = f" [tags: {', '.join(model.tags)}]" if model.tags else ""
        log.info("  [%s] %s%s%s", model.source, model.name, aliases, tags)
