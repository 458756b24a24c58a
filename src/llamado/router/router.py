"""The router application: dispatches requests to the processes of the models they name.

Paths, responses and errors are those of llama-server's router (b11434, `tools/server/README.md`, "Using multiple
models"), plus llama-swap's additional endpoints.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from types import FrameType
from typing import Any, cast
from urllib.parse import parse_qsl, unquote

import orjson
from starlette.requests import Request
from starlette.responses import Response

from llamado.build import BUILD
from llamado.devices.limits import memory
from llamado.flags import Parsed, memory_size
from llamado.gguf.errors import SourceError
from llamado.http.access import HEALTH, Access, busy_app
from llamado.http.answer import Receive, Scope, Send, answer, answer_faults, error_response
from llamado.http.bodies import body_of
from llamado.http.connections import RESERVED_FILES, ConnectionLimits, configure, raise_file_limit
from llamado.http.errors import OLLAMA, ApiError, invalid, not_found
from llamado.http.exchange import MODEL, MODEL_POSTS
from llamado.http.exposition import CONTENT_TYPE, merge
from llamado.http.json_body import parse_json
from llamado.http.metrics import USAGE_PATH, Traffic, ask_usage, is_usage_id
from llamado.http.monitoring.counter import OTHER, RequestCounter
from llamado.http.running import announce
from llamado.http.signals import GracefulServer
from llamado.http.sockets import address_of
from llamado.http.upstream import UpstreamLost, get
from llamado.page.files import page_paths, page_response
from llamado.router import catalog as catalogs
from llamado.router.catalog import Catalog, CatalogError, RoutedModel
from llamado.router.downloads import Downloads, remove_cached
from llamado.router.fleet import LOADED, UNLOADED, Fleet, FleetLimits, Instance
from llamado.router.live import PATH as LIVE_EVENTS
from llamado.router.live import RouterSource, forward_events
from llamado.router.ollama import OllamaApi
from llamado.router.peers import Peer, Peers
from llamado.router.proxy import ProxiedRequest
from llamado.router.refusals import RefusalLog
from llamado.router.swap_config import SwapConfig, read_swap_config
from llamado.server.errors import translate
from llamado.server.generate.json_values import number_json
from llamado.server.live.log_tail import LogTail
from llamado.server.live.stream import LiveStream, polled
from llamado.server.settings import Settings
from llamado.tools.api import ToolsApi

log = logging.getLogger("llamado.router")

_GET = frozenset({"/metrics", "/slots", "/lora-adapters", "/props", "/v1/audio/voices"})
CHANGING = frozenset({"/unload"})
"""Paths that change state although clients request them with GET, as in llama-swap."""
UNLOAD = "/api/models/unload"
_TEXT = [(b"content-type", b"text/plain; charset=utf-8"), (b"x-content-type-options", b"nosniff")]
_EVENTS = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
_HEALTHY = b'{"status":"ok"}'
_DONE = b'{"success":true}'
METRICS_TIMEOUT = 2.0  # seconds for a model's process to return its metrics
_BEHIND = 1024  # queued events at which a slow client of /models/sse is dropped

NeedOf = Callable[[RoutedModel], int]
Handler = Callable[[Scope, Receive, Send], Awaitable[None]]


class Router:
    """The router's ASGI application. `reread` reads the catalog again."""

    def __init__(
        self,
        catalog: Catalog,
        settings: Settings,
        *,
        limits: FleetLimits,
        autoload: bool = True,
        reread: Callable[[], Catalog] | None = None,
        tools: ToolsApi | None = None,
        peers: Iterable[Peer] = (),
        need_of: NeedOf = lambda model: 0,
    ) -> None:
        tools = self._tools = tools or ToolsApi()
        self._settings = settings
        self._limits = limits
        self._autoload = autoload
        self._reread = reread
        self._stale = False
        self.page = page_paths() if settings.switches.page else frozenset[str]()
        self.fleet = Fleet(catalog, limits, self._notify_listeners, need_of)
        self.peers = Peers(tuple(peers))
        self.log_tail = LogTail()
        self._downloads = Downloads(self._notify_listeners, self._mark_stale)
        self._ollama = OllamaApi(
            self.fleet, self._downloads, forward=self._forward_ollama, refresh=self._refresh, delete=self._remove
        )
        self._listeners: set[asyncio.Queue[bytes | None]] = set()
        self._streams: set[asyncio.Task[Any]] = set()
        self._closing = False
        self.traffic = Traffic()
        self._handlers: dict[tuple[str, str], Handler] = {
            **{("GET", path): self._health for path in HEALTH},
            ("GET", "/models"): self._list,
            ("GET", "/v1/models"): self._list,
            ("POST", "/models"): self._download,
            ("DELETE", "/models"): self._delete,
            ("POST", "/models/load"): self._load,
            ("POST", "/models/unload"): self._unload,
            ("GET", "/models/sse"): self._events,
            ("GET", "/running"): self._running,
            ("GET", USAGE_PATH): self._usage,
            ("GET", "/unload"): self._unload_all,
            ("POST", "/unload"): self._unload_all,
            ("POST", UNLOAD): self._unload_all,
            ("GET", "/logs"): self._logs,
            ("GET", LIVE_EVENTS): self._live,
            ("GET", "/tools"): _answering(tools.list_tools),
            ("POST", "/tools"): _answering(tools.call_tool),
            ("GET", "/cors-proxy"): _answering(tools.pass_on),
            ("POST", "/cors-proxy"): _answering(tools.pass_on),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await answer_faults(
            self._dispatch, scope, receive, send, log, translate=translate, ending=lambda: self._closing
        )

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        if method == "POST" and (path in MODEL_POSTS or _is_slot(path)):
            await self._post(scope, receive, send)
        elif method == "GET" and path in _GET:
            await self._get(scope, receive, send)
        elif handler := self._handlers.get((method, path)):
            await handler(scope, receive, send)
        elif method == "POST" and path.startswith(f"{UNLOAD}/"):
            await self._unload_one(scope, receive, send)
        elif method == "GET" and path.startswith(MODEL):
            await self._model(scope, receive, send)
        elif path in OLLAMA:
            await self._ollama(scope, receive, send)
        elif path.startswith("/upstream/"):
            await self._upstream(scope, receive, send)
        elif method == "GET" and (path == "/logs/stream" or path.startswith("/logs/stream/")):
            await self._log_stream(scope, receive, send)
        elif method == "GET" and path in self.page:
            await self._page(scope, receive, send)
        else:
            await error_response(not_found())(scope, receive, send)

    def endpoint(self, method: str, path: str) -> str:
        """Return a request's endpoint in the metrics: its path, or a pattern for paths with names in them."""
        if (
            path in OLLAMA
            or path in (MODEL_POSTS if method == "POST" else _GET | self.page)
            or (method, path) in self._handlers
        ):
            return path
        for start in (f"{UNLOAD}/", MODEL, "/upstream/", "/slots/"):
            if path.startswith(start):
                return f"{start}{{name}}"
        return "/logs/stream" if path == "/logs/stream" or path.startswith("/logs/stream/") else OTHER

    # Proxied requests

    def _instance(self, name: str, autoload: bool) -> Instance:
        if not name:
            raise invalid("model name is missing from the request")
        instance = self.fleet.find(name)
        if instance is None:
            raise invalid(f"model '{name[:1000]}' not found")
        if not autoload and not instance.running:
            raise invalid("model is not loaded")
        return instance

    def _loads(self, query: dict[str, str]) -> bool:
        """Return True if this request may load its model."""
        said = query.get("autoload", "")
        return said in ("true", "1") if said else self._autoload

    def _proxied(self, scope: Scope, receive: Receive, send: Send, body: bytes) -> ProxiedRequest:
        # With router keys, models are reached without the client's key.
        return ProxiedRequest(self.fleet, scope, receive, send, body, keys=not self._settings.access.api_keys)

    async def _post(self, scope: Scope, receive: Receive, send: Send) -> None:
        autoload = self._loads(_query(scope))
        body = await body_of(scope).read(scope, receive)
        fields = parse_json(body)
        name = _model_of(fields)
        found = None if self.fleet.find(name) else self.peers.find(name)
        if found is not None:
            await self.peers.run(found, scope, receive, send, fields, body)
            return
        instance = self._instance(name, autoload)
        proxied = self._proxied(scope, receive, send, _rewrite_body(instance, fields, body))
        del body  # the passage releases it when the response starts
        await proxied.run(instance, scope["raw_path"], scope["query_string"], count=True, autoload=autoload)

    async def _forward_ollama(
        self, instance: Instance, scope: Scope, receive: Receive, send: Send, fields: dict[str, Any], body: bytes
    ) -> None:
        """Proxy a request whose body has been read."""
        autoload = self._loads(_query(scope))
        proxied = self._proxied(scope, receive, send, _rewrite_body(instance, fields, body))
        del body
        await proxied.run(instance, scope["raw_path"], scope["query_string"], count=True, autoload=autoload)

    async def _get(self, scope: Scope, receive: Receive, send: Send) -> None:
        query = _query(scope)
        if not query.get("model"):
            if scope["path"] == "/props":
                await answer(send, orjson.dumps(self._props()))
                return
            if scope["path"] == "/metrics":
                await self._metrics(send)
                return
        autoload = self._loads(query)
        instance = self._instance(query.get("model", ""), autoload)
        proxied = self._proxied(scope, receive, send, b"")
        # Read-only requests do not keep a model loaded.
        await proxied.run(instance, scope["raw_path"], scope["query_string"], count=False, autoload=autoload)

    async def _upstream(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve llama-swap's `/upstream/MODEL/PATH`: proxy any request to the model's process."""
        segments = scope["raw_path"].split(b"/")[2:]
        name = ""
        for i, segment in enumerate(segments):
            text = unquote(segment.decode("latin-1"))
            name = f"{name}/{text}" if name else text
            instance = self.fleet.find(name) if name else None
            if instance is None:
                continue
            if i + 1 == len(segments):
                # Relative links in the process's pages need the trailing slash.
                target = scope["raw_path"] + b"/"
                if scope["query_string"]:
                    target += b"?" + scope["query_string"]
                status = 301 if scope["method"] == "GET" else 308
                prefix = self._settings.switches.api_prefix.encode()
                await answer(send, b"", status, [(b"location", prefix + target)])
                return
            proxied = self._proxied(scope, receive, send, await body_of(scope).read(scope, receive))
            path = b"/" + b"/".join(segments[i + 1 :])
            await proxied.run(instance, path, scope["query_string"], count=True, autoload=True)
            return
        raise invalid("model id required in path")

    # Model management

    async def _health(self, scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, _HEALTHY)

    async def _page(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        response = await page_response(scope["path"], headers)
        await response(scope, receive, send)

    def _props(self) -> dict[str, Any]:
        return {
            "role": "router",
            "max_instances": self._limits.models_max,
            "models_memory": {
                "limit": self._limits.memory,
                "used": sum(one.need or 0 for one in self.fleet.instances.values() if one.running),
            },
            "models_autoload": self._autoload,
            "model_alias": "llamado",
            "model_path": "none",
            "default_generation_settings": {"params": None, "n_ctx": 0},
            "ui": self._settings.switches.page,
            "ui_settings": dict(self._settings.switches.page_settings),
            "build_info": BUILD,
            "cors_proxy_enabled": self._tools.proxies,
            "tools_enabled": self._tools.offers,
        }

    async def _metrics(self, send: Send) -> None:
        """Send the router's metrics (with --metrics) merged with those of loaded models; slow models are left out."""
        loaded = [
            (instance.model.name, instance.child)
            for instance in self.fleet.instances.values()
            if instance.status == LOADED and instance.child is not None
        ]
        answers = await asyncio.gather(
            *(get(child.pool, "/metrics", timeout=METRICS_TIMEOUT) for _, child in loaded), return_exceptions=True
        )
        texts: list[tuple[dict[str, str], str]] = []
        if self._settings.switches.metrics:
            from llamado.router.metrics import router_metrics

            texts.append(({}, router_metrics(self.traffic)))
        for (name, _), found in zip(loaded, answers, strict=True):
            if isinstance(found, UpstreamLost | TimeoutError):
                log.warning("model %s: no metrics: %s", name, str(found) or f"no answer within {METRICS_TIMEOUT:g} s")
            elif isinstance(found, BaseException):
                raise found
            elif found[0] == 200:
                texts.append(({"model": name}, found[1].decode("utf-8", "replace")))
        if loaded and not texts and all(isinstance(found, tuple) for found in answers):
            message = "no loaded model gives metrics: start the router with --metrics"
            raise ApiError("not_supported_error", message)
        await answer(send, merge(texts).encode(), 200, [(b"content-type", CONTENT_TYPE)])

    async def _usage(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Return the token usage of a request that one of the models has answered."""
        id = _query(scope).get("id", "")
        if not is_usage_id(id):
            raise invalid("id: expected 32 hexadecimal digits")
        children = [one.child for one in self.fleet.instances.values() if one.child is not None]
        found = await asyncio.gather(*(ask_usage(child.pool, id) for child in children))
        tokens = next((count for count in found if count is not None), None)
        if tokens is None:
            raise ApiError("not_found_error", "no request of this id has ended")
        await answer(send, orjson.dumps({"total_tokens": tokens}))

    def _mark_stale(self) -> None:
        self._stale = True

    async def _refresh(self) -> None:
        self._stale = False
        if self._reread is not None:
            # The folder may be on a slow disk.
            self.fleet.replace(await asyncio.to_thread(self._reread))

    async def _list(self, scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, orjson.dumps({"data": await self._model_entries(scope), "object": "list"}))

    async def _model(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve `/v1/models/NAME`: one model."""
        name = scope["path"].removeprefix(MODEL)
        found = next(
            (one for one in await self._model_entries(scope) if name in (one["id"], *one.get("aliases", ()))), None
        )
        if found is None:
            raise ApiError("not_found_error", f"model '{name[:1000]}' not found")
        await answer(send, orjson.dumps({**found, "id": name}))

    async def _model_entries(self, scope: Scope) -> list[dict[str, Any]]:
        if self._stale or _query(scope).get("reload"):
            await self._refresh()
        instances = list(self.fleet.instances.values())
        sleep_checks = [
            self.fleet.update_sleep(instance)
            for instance in instances
            if instance.model.sleeps and instance.status == LOADED
        ]
        if sleep_checks:
            await asyncio.gather(*sleep_checks)
        now = int(time.time())
        data: list[dict[str, Any]] = []
        for instance in instances:
            if not instance.model.hidden:
                data.append(model_json(instance, now))
                data += [
                    model_json(instance, now) | {"id": alias} | ({"name": title} if title else {})
                    for alias, title in instance.model.alias_titles.items()
                ]
        remote = self.peers.by_shortest_name(lambda name: self.fleet.find(name) is not None)
        data += [found.listed(name, now) for name, found in remote]
        for name, progress in self._downloads.progress.items():
            if self.fleet.find(name) is None:
                data.append(_downloading(name, progress, now))
        return data

    async def _requested_model(self, scope: Scope, receive: Receive) -> str:
        """Return the model that the body names."""
        return _model_of(parse_json(await body_of(scope).read(scope, receive)))

    async def _load(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = await self._requested_model(scope, receive)
        instance = self.fleet.find(name)
        if instance is None:
            await error_response(not_found())(scope, receive, send)
            return
        if instance.running and not instance.stopping:
            raise invalid("model is already running")
        self.fleet.load(instance)
        await answer(send, _DONE)

    async def _unload(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = await self._requested_model(scope, receive)
        if not self._downloads.cancel(name):
            instance = self.fleet.find(name)
            if instance is None:
                raise invalid("model is not found")
            if not instance.running:
                raise invalid("model is not running")
            self.fleet.unload(instance)
        await answer(send, _DONE)

    async def _unload_one(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve llama-swap's `/api/models/unload/NAME`."""
        name = scope["path"].removeprefix(f"{UNLOAD}/")
        instance = self.fleet.find(name)
        if instance is None:
            raise ApiError("not_found_error", f"model '{name[:1000]}' not found")
        if instance.running:
            self.fleet.unload(instance)
            await self.fleet.wait_unloaded([instance])
        await answer(send, b"OK", 200, _TEXT)

    async def _unload_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        instances = [instance for instance in self.fleet.instances.values() if instance.running]
        for instance in instances:
            self.fleet.unload(instance)
        await self.fleet.wait_unloaded(instances)
        await answer(send, b"OK", 200, _TEXT)

    async def _download(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = await self._requested_model(scope, receive)
        if not name:
            raise invalid("model must be a non-empty string")
        if name in self._downloads.progress:
            raise invalid(f"model '{name}' is being downloaded already")
        if self.fleet.find(name) is not None:
            raise invalid(f"model '{name}' already exists")
        try:
            self._downloads.start(name)
        except SourceError as error:
            raise invalid(str(error)) from None
        await answer(send, _DONE)

    async def _delete(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = _query(scope).get("model", "")
        if not name:
            raise invalid("model must be a non-empty string")
        if self._downloads.cancel(name):
            await answer(send, _DONE)
            return
        instance = self.fleet.instances.get(name)
        if instance is None:
            raise ApiError("server_error", f"model name={name[:1000]} is not found")
        await self._remove(instance)
        await answer(send, _DONE)

    async def _remove(self, instance: Instance) -> None:
        """Stop a model and delete its files. Raises ApiError for models that were not downloaded."""
        name = instance.model.name
        if instance.model.source != "cache":
            raise ApiError("server_error", f"model name={name} is not removable (not from cache)")
        if instance.running:
            self.fleet.unload(instance)
            await self.fleet.wait_unloaded([instance])
        removed = await asyncio.to_thread(remove_cached, name)
        log.info("model %s: removed from the cache%s", name, "" if removed else " (there were no files)")
        self._notify_listeners("model_remove", name, None)
        await self._refresh()

    async def _running(self, scope: Scope, receive: Receive, send: Send) -> None:
        running = []
        for instance in self.fleet.instances.values():
            child = instance.child
            if child is None:
                continue
            state = "stopping" if instance.stopping else "ready" if instance.status == LOADED else "starting"
            running.append(
                {
                    "model": instance.model.name,
                    "state": state,
                    "cmd": " ".join(child.args),
                    "proxy": str(child.pool.address),
                    "ttl": int(instance.model.ttl),
                    "name": instance.model.title,
                    "description": instance.model.description,
                    "pid": child.pid,
                    "requests": instance.in_flight,
                    "restarts": instance.restarts,
                }
            )
        await answer(send, orjson.dumps({"running": running}))

    # Event streams

    def _notify_listeners(self, event: str, model: str, data: Any) -> None:
        """Send an event to all listeners. Status changes are sent under both event names in use."""
        # llama-server documents `model_status`, but sends `status_change` except for the first event of a load.
        names = ("status_change", "model_status") if event == "status_change" else (event,)
        for name in names:
            fields: dict[str, Any] = {"model": model, "event": name}
            if data is not None:
                fields["data"] = data
            message = b"data: " + orjson.dumps(fields) + b"\n\n"
            for queue in list(self._listeners):
                if queue.full():
                    self._listeners.discard(queue)  # the client reads too slowly
                    queue.get_nowait()
                    queue.put_nowait(None)
                else:
                    queue.put_nowait(message)

    async def _events(self, scope: Scope, receive: Receive, send: Send) -> None:
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(_BEHIND)
        self._listeners.add(queue)
        interval = self._settings.switches.sse_ping_interval

        async def next_part() -> bytes | None:
            try:
                async with asyncio.timeout(interval if interval > 0 else None):
                    return await queue.get()
            except TimeoutError:
                return b":\n\n"

        try:
            await self._stream(receive, send, _EVENTS, next_part)
        finally:
            self._listeners.discard(queue)

    async def _logs(self, scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, self.log_tail.history(), 200, _TEXT)

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        if name := _query(scope).get("model"):
            keys = not self._settings.access.api_keys
            await forward_events(self._instance(name, autoload=False), scope, receive, send, keys=keys)
            return
        source = RouterSource(self.fleet, self.log_tail)
        messages = polled(source.read, lambda: self._closing)
        await LiveStream(messages, lambda: self._closing)(scope, receive, send)

    async def _log_stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["path"].removeprefix("/logs/stream").removeprefix("/")
        if kind not in ("", "proxy", "upstream"):
            instance = self.fleet.find(kind)
            if instance is None:
                raise invalid("expected proxy, upstream, or a model's name")
            kind = instance.model.name
        reader = self.log_tail.follow(kind)
        first = b"" if "no-history" in _query(scope) else self.log_tail.history(kind)
        try:
            await self._stream(receive, send, _TEXT, reader.read, first)
        finally:
            reader.close()

    async def _stream(
        self,
        receive: Receive,
        send: Send,
        headers: list[tuple[bytes, bytes]],
        next_part: Callable[[], Awaitable[bytes | None]],
        first: bytes = b"",
    ) -> None:
        """Send parts until the client disconnects or the router shuts down."""
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": first, "more_body": True})

        async def write() -> None:
            while (part := await next_part()) is not None:
                await send({"type": "http.response.body", "body": part, "more_body": True})

        writer = asyncio.ensure_future(write())
        self._streams.add(writer)
        watcher = asyncio.ensure_future(_gone(receive))
        try:
            if not self._closing:
                await asyncio.wait([writer, watcher], return_when=asyncio.FIRST_COMPLETED)
            if not watcher.done():
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._streams.discard(writer)
            writer.cancel()
            watcher.cancel()

    def end_streams(self) -> None:
        """End all event streams and downloads."""
        self._closing = True
        self._downloads.close()
        for writer in self._streams:
            writer.cancel()


def _answering(endpoint: Callable[[Request], Awaitable[Response]]) -> Handler:
    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        await (await endpoint(Request(scope, receive)))(scope, receive, send)

    return handler


def _rewrite_body(instance: Instance, fields: dict[str, Any], body: bytes) -> bytes:
    """Return the body as the model's process gets it."""
    if not instance.model.rewrite:
        return body
    instance.model.rewrite.apply(fields, str(fields["model"]))
    if isinstance(fields.get("seed"), int):
        fields["seed"] = number_json(fields["seed"])
    return orjson.dumps(fields)


def _model_of(fields: object) -> str:
    """Return the model that a body names; "" if there is none."""
    name = fields.get("model") if isinstance(fields, dict) else None
    return name if isinstance(name, str) else ""


def _is_slot(path: str) -> bool:
    return path.startswith("/slots/") and "/" not in path[7:] and len(path) > 7


def _query(scope: Scope) -> dict[str, str]:
    text = scope["query_string"]
    return dict(parse_qsl(text.decode("latin-1"), keep_blank_values=True)) if text else {}


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def model_json(instance: Instance, now: int) -> dict[str, Any]:
    """Return a model's entry in `/v1/models`, with its process's own fields while it runs."""
    model, child = instance.model, instance.child
    status: dict[str, Any] = {"value": instance.shown_status, "args": list(child.args if child else model.launch.args)}
    if model.preset:
        status["preset"] = model.preset
    if instance.progress is not None:
        status["progress"] = instance.progress
    if instance.status == UNLOADED and (instance.failed or instance.exit_code):
        status |= {"exit_code": instance.exit_code, "failed": True}
        if instance.reason:
            status["reason"] = instance.reason
    architecture = instance.info.get("architecture")
    entry: dict[str, Any] = {
        "id": model.name,
        "aliases": list(model.aliases),
        "tags": list(model.tags),
        "object": "model",
        "owned_by": "llamado",
        "created": now,
        "status": status,
        "architecture": architecture
        if isinstance(architecture, dict)
        else {"input_modalities": ["text"], "output_modalities": ["text"]},
        "source": model.source,
        "can_remove": model.source == "cache",
    }
    if instance.need:
        entry["memory"] = instance.need
    if model.path:
        entry["path"] = model.path
    if model.title:
        entry["name"] = model.title
    if model.description:
        entry["description"] = model.description
    if child is not None:
        entry |= {key: value for key, value in instance.info.items() if key not in entry}
    if model.metadata:
        meta = entry.get("meta")
        entry["meta"] = (meta if isinstance(meta, dict) else {}) | {"llamaswap": dict(model.metadata)}
    return entry


def _downloading(name: str, progress: dict[str, Any], now: int) -> dict[str, Any]:
    return {
        "id": name,
        "aliases": [],
        "tags": [],
        "object": "model",
        "owned_by": "llamado",
        "created": now,
        "status": {"value": "downloading", "progress": progress},
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
        "source": "cache",
        "can_remove": True,
    }


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


def _swap_config(flags: Parsed) -> SwapConfig | None:
    """Return llama-swap's configuration if the flags name a file. Raises SwapConfigError."""
    return read_swap_config(flags.llama_swap) if flags.llama_swap else None


def _catalog(flags: Parsed) -> Catalog:
    """Return the models selected by all flags. Raises FlagError, CatalogError, PresetError, SwapConfigError."""
    config = _swap_config(flags)
    return catalogs.load(flags, config.models if config else ())


def make_server(settings: Settings, flags: Parsed, need_of: NeedOf = lambda model: 0) -> RouterServer:
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
    limits = FleetLimits(models_max=models_max, memory=_memory_limit(flags), waiting=settings.engine.max_queue)

    def make() -> RequestCounter:
        router = server.router = Router(
            catalog,
            settings,
            limits=limits,
            autoload=flags.models_autoload,
            reread=lambda: _catalog(flags),
            tools=tools,
            peers=config.peers if config else (),
            need_of=need_of,
        )
        logging.getLogger("llamado").addHandler(router.log_tail)
        for name in preload:
            instance = router.fleet.find(name)
            if instance is not None:
                router.fleet.load(instance)
        prefix, public = settings.switches.api_prefix, HEALTH | router.page
        access = server.access = Access(router, settings.access, prefix, public=public, changing=CHANGING)
        application.append(RequestCounter(RefusalLog(access), router.traffic, router.endpoint, prefix))
        return application[0]

    # Each request needs a second connection, to its model.
    limit = (raise_file_limit() - RESERVED_FILES) // 2
    connections = ConnectionLimits(min(limit, settings.max_connections or limit), settings.timeout)
    refuse = busy_app(
        lambda: application[0],
        settings.switches.api_prefix,
        lambda *refused: application[0].refused(*refused),
    )
    options = configure(
        make,
        connections,
        cast(Any, refuse),
        key=settings.ssl_key,
        certificate=settings.ssl_cert,
        proxied=False,  # X-Forwarded-For is forwarded unchanged
    )
    server = RouterServer(options)
    server.tools = tools
    _log_models(list(catalog.models.values()))
    for peer in config.peers if config else ():
        log.info("  [peer] %s at %s: %s", peer.name, peer.url, ", ".join(peer.models))
    return server


def _memory_limit(flags: Parsed) -> int:
    """Return the bytes of memory for all models together; 0: no limit. Raises FlagError."""
    if flags.models_memory is None:
        return memory().total
    return 0 if flags.models_memory.strip() == "0" else memory_size(flags.models_memory, "--models-memory")


def serve_router(settings: Settings, flags: Parsed, sockets: list[socket.socket], need_of: NeedOf) -> int:
    """Serve many models until a signal arrives; return the exit code. Raises as `make_server` does."""
    server = make_server(settings, flags, need_of)
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
