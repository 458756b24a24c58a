"""The router application: dispatches requests to the processes of the models they name.

Paths, responses and errors are those of llama-server's router (b11434, `tools/server/README.md`, "Using multiple
models"), plus llama-swap's additional endpoints.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import unquote

import orjson
from starlette.requests import Request
from starlette.responses import Response

from llamado.build import BUILD
from llamado.gguf.errors import SourceError
from llamado.http.access import HEALTH
from llamado.http.answer import App, Receive, Scope, Send, handle_errors, json_response
from llamado.http.bodies import body_of
from llamado.http.errors import ApiError, invalid, not_found
from llamado.http.exchange import MODEL, MODEL_POSTS
from llamado.http.form import is_form, read_fields
from llamado.http.json_body import parse_body
from llamado.http.monitoring.exposition import CONTENT_TYPE, merge
from llamado.http.monitoring.metrics import USAGE_PATH, Traffic, ask_usage, is_usage_id
from llamado.http.resumable.proxy import StreamProxy, Upstream
from llamado.http.routing import ANY, ApiRoute, ApiRouter
from llamado.http.streams import OpenStreams, PartStream
from llamado.http.upstream import UpstreamLost, get
from llamado.page.chats_api import CHAT, CHATS, ChatsApi
from llamado.page.files import page_paths, page_response
from llamado.router.api.entries import download_entry, model_entry
from llamado.router.api.live import PATH as LIVE_EVENTS
from llamado.router.api.live import EventHub, ModelEvents, RouterSource, stream_events
from llamado.router.api.ollama import OllamaApi
from llamado.router.catalog import Catalog, RoutedModel
from llamado.router.downloads import Downloads, remove_cached
from llamado.router.fleet import LOADED, Fleet, FleetLimits, Instance
from llamado.router.peers import Peer, Peers
from llamado.router.proxy import ProxiedRequest
from llamado.server.errors import translate
from llamado.server.generate.json_values import number_json
from llamado.server.live.log_tail import LogFollower, LogTail
from llamado.server.live.stream import LiveStream, polled
from llamado.server.settings import Settings
from llamado.tools.api import ToolsApi

log = logging.getLogger("llamado.router")

CHANGING = frozenset({"/unload"})
"""Paths that change state although clients request them with GET, as in llama-swap."""
METRICS_TIMEOUT = 2.0  # seconds for a model's process to return its metrics

_MODEL_GETS = ("/metrics", "/slots", "/lora-adapters", "/props", "/v1/audio/voices")
_UNLOAD = "/api/models/unload"
_NO_SNIFFING = {"x-content-type-options": "nosniff"}
_EVENT_HEADERS = {"content-type": "text/event-stream", "cache-control": "no-cache", "x-accel-buffering": "no"}
_HEALTHY = json_response(b'{"status":"ok"}')
_DONE = b'{"success":true}'

NeedOf = Callable[[RoutedModel], int]


@dataclass(frozen=True, kw_only=True)
class RouterOptions:
    """Options of a router beyond those of any server."""

    limits: FleetLimits
    autoload: bool = True
    """Load models on request."""
    peers: tuple[Peer, ...] = ()
    reread: Callable[[], Catalog] | None = None
    """Reads the catalog again."""
    need_of: NeedOf = lambda model: 0
    """Returns the bytes of memory a model needs, 0 if unknown."""


class Router:
    """The router's ASGI application."""

    def __init__(
        self, catalog: Catalog, settings: Settings, options: RouterOptions, tools: ToolsApi | None = None
    ) -> None:
        self._tools = tools or ToolsApi()
        self._chats = ChatsApi(settings.switches.chats, settings.access)
        self._settings = settings
        self._options = options
        self._stale = False
        # Clients with one of the router's keys need none of the model servers'.
        self._forward_keys = not settings.access.api_keys
        self._events = EventHub()
        self._streams = OpenStreams()
        self.page = page_paths() if settings.switches.page else frozenset[str]()
        self.fleet = Fleet(catalog, options.limits, self._events.notify, options.need_of)
        self.peers = Peers(options.peers)
        self.streams: StreamProxy[Instance] = StreamProxy(_stream_upstream, forward_key=self._forward_keys)
        self.log_tail = LogTail()
        self.traffic = Traffic()
        self._downloads = Downloads(self._events.notify, self._mark_stale)
        self.routes = ApiRouter(self._routes())

    def _routes(self) -> list[ApiRoute]:
        ollama = OllamaApi(
            self.fleet, self._downloads, proxy=self._proxy, refresh=self._refresh, delete=self._remove_model
        )
        routes = [
            *(("POST", path, self._forward_body) for path in sorted(MODEL_POSTS)),
            ("POST", "/slots/{name}", self._forward_body),
            *(("GET", path, self._forward_query) for path in _MODEL_GETS),
            *(("GET", path, self._health) for path in sorted(HEALTH)),
            ("GET", "/models", self._list_models),
            ("GET", "/v1/models", self._list_models),
            ("GET", MODEL + "{name:path}", self._describe_model),
            ("POST", "/models", self._download),
            ("DELETE", "/models", self._delete),
            ("POST", "/models/load", self._load),
            ("POST", "/models/unload", self._unload),
            ("GET", "/models/sse", self._listen),
            ("GET", "/running", self._running),
            ("GET", USAGE_PATH, self._usage),
            ("GET", "/unload", self._unload_all),
            ("POST", "/unload", self._unload_all),
            ("POST", _UNLOAD, self._unload_all),
            ("POST", _UNLOAD + "/{name:path}", self._unload_one),
            ("GET", "/logs", self._logs),
            ("GET", "/logs/stream", self._log_stream),
            ("GET", LIVE_EVENTS, self._live),
            ("GET", CHATS, self._chats.list_chats),
            ("GET", CHAT, self._chats.get_chat),
            ("PUT", CHAT, self._chats.put_chat),
            ("DELETE", CHAT, self._chats.delete_chat),
            ("GET", "/tools", self._tools.list_tools),
            ("POST", "/tools", self._tools.call_tool),
            ("GET", "/cors-proxy", self._tools.pass_on),
            ("POST", "/cors-proxy", self._tools.pass_on),
            (ANY, "/upstream/{name:path}", self._upstream),
            *(("GET", path, self._page) for path in sorted(self.page)),
        ]
        return [
            *(ApiRoute(*route) for route in routes),
            ApiRoute("GET", "/logs/stream/{kind:path}", self._log_stream, name="/logs/stream"),
            *self.streams.routes(),
            *ollama.routes(),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await handle_errors(
            self.routes.app, scope, receive, send, log, translate=translate, is_ending=lambda: self._streams.closed
        )

    def end_streams(self) -> None:
        """End all event streams and downloads."""
        self._downloads.close()
        self._streams.close()

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

    def _loads(self, request: Request) -> bool:
        """Return True if this request may load its model."""
        value = _query(request).get("autoload")
        return value in ("true", "1") if value else self._options.autoload

    def _proxy(self, request: Request, instance: Instance, fields: dict[str, Any], body: bytes) -> App:
        """Return the response of a model to a request with this body."""
        self.streams.claim(request.scope, fields, instance)
        body = _rewrite_body(instance, fields, body)
        return ProxiedRequest(self.fleet, instance, body, forward_key=self._forward_keys, autoload=self._loads(request))

    async def _forward_body(self, request: Request) -> App:
        """Proxy a request to the model that its body names."""
        body = await _read(request)
        kind = request.headers.get("content-type", "")
        fields = await read_fields(body, kind)
        name = _model_of(fields)
        peer = None if self.fleet.find(name) else self.peers.find(name)
        if peer is not None:
            return self.peers.proxy(peer, None if is_form(kind) else fields, body)
        autoload = self._loads(request)
        instance = self._instance(name, autoload)
        self.streams.claim(request.scope, fields, instance)
        if not is_form(kind):  # fields of a form stay as they are
            body = _rewrite_body(instance, fields, body)
        return ProxiedRequest(self.fleet, instance, body, forward_key=self._forward_keys, autoload=autoload)

    async def _forward_query(self, request: Request) -> App:
        """Proxy a GET to the model that its query names. Such requests do not keep a model loaded."""
        name, path = _query(request).get("model", ""), request.scope["path"]
        if not name and path == "/props":
            return json_response(orjson.dumps(self._props()))
        if not name and path == "/metrics":
            return await self._metrics()
        autoload = self._loads(request)
        instance = self._instance(name, autoload)
        return ProxiedRequest(self.fleet, instance, b"", forward_key=self._forward_keys, count=False, autoload=autoload)

    async def _upstream(self, request: Request) -> App:
        """Serve llama-swap's `/upstream/MODEL/PATH`: proxy any request to the model's process."""
        scope = request.scope
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
                location = self._settings.switches.api_prefix + target.decode("latin-1")
                return Response(b"", status, {"location": location})
            body = await _read(request)
            scope["raw_path"] = b"/" + b"/".join(segments[i + 1 :])
            return ProxiedRequest(self.fleet, instance, body, forward_key=self._forward_keys)
        raise invalid("model id required in path")

    # Status

    async def _health(self, request: Request) -> App:
        return _HEALTHY

    async def _page(self, request: Request) -> App:
        return await page_response(request.scope["path"], request.headers)

    def _props(self) -> dict[str, Any]:
        return {
            "role": "router",
            "max_instances": self._options.limits.models_max,
            "models_memory": {
                "limit": self._options.limits.memory,
                "used": sum(one.need or 0 for one in self.fleet.instances.values() if one.running),
            },
            "models_autoload": self._options.autoload,
            "model_alias": "llamado",
            "model_path": "none",
            "default_generation_settings": {"params": None, "n_ctx": 0},
            "ui": self._settings.switches.page,
            "ui_settings": dict(self._settings.switches.page_settings),
            "build_info": BUILD,
            "cors_proxy_enabled": self._tools.proxies,
            "tools_enabled": self._tools.offers,
            **({"chats_kept": True} if self._chats.is_on else {}),
        }

    async def _metrics(self) -> App:
        """Merge the router's metrics (with --metrics) with those of loaded models; slow models are left out."""
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
            from llamado.router.api.metrics import router_metrics

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
        return Response(merge(texts).encode(), headers={"content-type": CONTENT_TYPE.decode()})

    async def _usage(self, request: Request) -> App:
        """Return the token usage of a request that one of the models has answered."""
        id = request.query_params.get("id", "")
        if not is_usage_id(id):
            raise invalid("id: expected 32 hexadecimal digits")
        children = [one.child for one in self.fleet.instances.values() if one.child is not None]
        found = await asyncio.gather(*(ask_usage(child.pool, id) for child in children))
        tokens = next((count for count in found if count is not None), None)
        if tokens is None:
            raise ApiError("not_found_error", "no request of this id has ended")
        return json_response(orjson.dumps({"total_tokens": tokens}))

    async def _running(self, request: Request) -> App:
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
        return json_response(orjson.dumps({"running": running}))

    # Models

    def _mark_stale(self) -> None:
        self._stale = True

    async def _refresh(self) -> None:
        self._stale = False
        if self._options.reread is not None:
            # The folder may be on a slow disk.
            self.fleet.replace(await asyncio.to_thread(self._options.reread))

    async def _list_models(self, request: Request) -> App:
        return json_response(orjson.dumps({"data": await self._entries(request), "object": "list"}))

    async def _describe_model(self, request: Request) -> App:
        name = request.path_params["name"]
        entries = await self._entries(request)
        found = next((one for one in entries if name in (one["id"], *one.get("aliases", ()))), None)
        if found is None:
            raise _no_model(name)
        return json_response(orjson.dumps({**found, "id": name}))

    async def _entries(self, request: Request) -> list[dict[str, Any]]:
        """Return the entries of `/v1/models`: models, their listed aliases, peers' models, downloads."""
        if self._stale or _query(request).get("reload"):
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
        entries: list[dict[str, Any]] = []
        for instance in instances:
            if not instance.model.hidden:
                entries.append(model_entry(instance, now))
                entries += [
                    model_entry(instance, now) | {"id": alias} | ({"name": title} if title else {})
                    for alias, title in instance.model.alias_titles.items()
                ]
        remote = self.peers.by_shortest_name(lambda name: self.fleet.find(name) is not None)
        entries += [found.listed(name, now) for name, found in remote]
        for name, progress in self._downloads.progress.items():
            if self.fleet.find(name) is None:
                entries.append(download_entry(name, progress, now))
        return entries

    async def _load(self, request: Request) -> App:
        instance = self.fleet.find(await _requested_model(request))
        if instance is None:
            raise not_found()
        if instance.running and not instance.stopping:
            raise invalid("model is already running")
        self.fleet.load(instance)
        return json_response(_DONE)

    async def _unload(self, request: Request) -> App:
        name = await _requested_model(request)
        if not self._downloads.cancel(name):
            instance = self.fleet.find(name)
            if instance is None:
                raise invalid("model is not found")
            if not instance.running:
                raise invalid("model is not running")
            self.fleet.unload(instance)
        return json_response(_DONE)

    async def _unload_one(self, request: Request) -> App:
        """Serve llama-swap's `/api/models/unload/NAME`."""
        name = request.path_params["name"]
        instance = self.fleet.find(name)
        if instance is None:
            raise _no_model(name)
        if instance.running:
            self.fleet.unload(instance)
            await self.fleet.wait_unloaded([instance])
        return _text(b"OK")

    async def _unload_all(self, request: Request) -> App:
        instances = [instance for instance in self.fleet.instances.values() if instance.running]
        for instance in instances:
            self.fleet.unload(instance)
        await self.fleet.wait_unloaded(instances)
        return _text(b"OK")

    async def _download(self, request: Request) -> App:
        name = await _requested_model(request)
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
        return json_response(_DONE)

    async def _delete(self, request: Request) -> App:
        name = request.query_params.get("model", "")
        if not name:
            raise invalid("model must be a non-empty string")
        if not self._downloads.cancel(name):
            instance = self.fleet.instances.get(name)
            if instance is None:
                raise ApiError("server_error", f"model name={name[:1000]} is not found")
            await self._remove_model(instance)
        return json_response(_DONE)

    async def _remove_model(self, instance: Instance) -> None:
        """Stop a model and delete its files. Raises ApiError for models that were not downloaded."""
        name = instance.model.name
        if instance.model.source != "cache":
            raise ApiError("server_error", f"model name={name} is not removable (not from cache)")
        if instance.running:
            self.fleet.unload(instance)
            await self.fleet.wait_unloaded([instance])
        removed = await asyncio.to_thread(remove_cached, name)
        log.info("model %s: removed from the cache%s", name, "" if removed else " (there were no files)")
        self._events.notify("model_remove", name, None)
        await self._refresh()

    # Streams

    async def _listen(self, request: Request) -> App:
        queue = self._events.listen()
        events = stream_events(queue, self._settings.switches.sse_ping_interval)
        leave = partial(self._events.leave, queue)
        return PartStream(events, headers=_EVENT_HEADERS, streams=self._streams, on_close=leave)

    async def _live(self, request: Request) -> App:
        if name := request.query_params.get("model"):
            return ModelEvents(self._instance(name, autoload=False), forward_key=self._forward_keys)
        source = RouterSource(self.fleet, self.log_tail)
        messages = polled(source.read, lambda: self._streams.closed)
        return LiveStream(messages, lambda: self._streams.closed)

    async def _logs(self, request: Request) -> App:
        return _text(self.log_tail.history())

    async def _log_stream(self, request: Request) -> App:
        """Stream the log of the router (`proxy`), of all models (`upstream`), of one model, or of all of them."""
        kind = request.path_params.get("kind", "")
        if kind not in ("", "proxy", "upstream"):
            instance = self.fleet.find(kind)
            if instance is None:
                raise invalid("expected proxy, upstream, or a model's name")
            kind = instance.model.name
        follower = self.log_tail.follow(kind)
        history = b"" if "no-history" in request.query_params else self.log_tail.history(kind)
        headers = {"content-type": "text/plain; charset=utf-8", **_NO_SNIFFING}
        lines = _log_lines(history, follower)
        return PartStream(lines, headers=headers, streams=self._streams, on_close=follower.close)


async def _log_lines(history: bytes, follower: LogFollower) -> AsyncGenerator[bytes, None]:
    yield history
    while True:
        yield await follower.read()


def _stream_upstream(instance: Instance) -> Upstream | None:
    child = instance.child
    return None if instance.status != LOADED or child is None else Upstream(child.pool)


def _text(body: bytes) -> Response:
    return Response(body, headers=_NO_SNIFFING, media_type="text/plain")


def _no_model(name: str) -> ApiError:
    return ApiError("not_found_error", f"model '{name[:1000]}' not found")


def _query(request: Request) -> Mapping[str, str]:
    # Parsing takes 10 us, even of an empty query.
    return request.query_params if request.scope["query_string"] else {}


async def _read(request: Request) -> bytes:
    return await body_of(request.scope).read(request.scope, request.receive)


async def _requested_model(request: Request) -> str:
    return _model_of(await parse_body(await _read(request)))


def _model_of(fields: object) -> str:
    """Return the model that a body names; "" if there is none."""
    name = fields.get("model") if isinstance(fields, dict) else None
    return name if isinstance(name, str) else ""


def _rewrite_body(instance: Instance, fields: dict[str, Any], body: bytes) -> bytes:
    """Return the body as the model's process gets it."""
    if not instance.model.rewrite:
        return body
    instance.model.rewrite.apply(fields, str(fields["model"]))
    if isinstance(fields.get("seed"), int):
        fields["seed"] = number_json(fields["seed"])
    return orjson.dumps(fields)
