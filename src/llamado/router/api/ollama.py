"""Ollama's API on a router: lists all models; loads, downloads and deletes models by name."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from llamado.gguf.errors import SourceError
from llamado.gguf.sources.stored import stored_models
from llamado.http.answer import App, json_response
from llamado.http.bodies import body_of
from llamado.http.errors import ApiError, invalid, not_supported
from llamado.http.exchange import OLLAMA_POSTS
from llamado.http.json_body import parse_body
from llamado.http.routing import ApiRoute
from llamado.http.streams import PartStream, unless_disconnected
from llamado.router.catalog import RoutedModel
from llamado.router.downloads import Downloads, Updates
from llamado.router.fleet import LOADED, Fleet, Instance
from llamado.server.api.ollama import bodies, describe
from llamado.server.api.ollama.formats import LINES, line, now
from llamado.server.generate.json_values import flag
from llamado.server.model_facts import ModelFacts, read_facts
from llamado.text.dialects import thinks
from llamado.text.template.chat import ChatTemplate, EndTokens

_HUBS = ("hf.co/", "huggingface.co/")

Proxy = Callable[[Request, Instance, dict[str, Any], bytes], App]
"""Returns the response of a model to a request with this body: its fields and its bytes."""


class OllamaApi:
    """Ollama's endpoints. `proxy` proxies a request, `refresh` rereads the catalog, `delete` removes files."""

    def __init__(
        self,
        fleet: Fleet,
        downloads: Downloads,
        *,
        proxy: Proxy,
        refresh: Callable[[], Awaitable[None]],
        delete: Callable[[Instance], Awaitable[None]],
    ) -> None:
        self._fleet = fleet
        self._downloads = downloads
        self._proxy = proxy
        self._refresh = refresh
        self._delete = delete

    def routes(self) -> list[ApiRoute]:
        """Return the routes of all endpoints."""
        return [
            *(ApiRoute("POST", path, self._forward) for path in sorted(OLLAMA_POSTS)),
            ApiRoute("GET", "/api/version", self._version),
            ApiRoute("GET", "/api/tags", self._tags),
            ApiRoute("GET", "/api/ps", self._ps),
            ApiRoute("POST", "/api/show", self._show),
            ApiRoute("POST", "/api/pull", self._pull),
            ApiRoute("DELETE", "/api/delete", self._delete_model),
            *(ApiRoute("POST", path, self._unsupported) for path in ("/api/push", "/api/create", "/api/copy")),
        ]

    def _instance(self, name: str) -> Instance:
        """Return the model with this name, with or without its default tag. Raises ApiError."""
        instance = self._fleet.find(name) or self._fleet.find(describe.untagged(name))
        if instance is None:
            raise ApiError("not_found_error", f"model '{name[:1000]}' not found")
        return instance

    async def _forward(self, request: Request) -> App:
        body, fields = await _read(request)
        instance = self._instance(bodies.model_name(fields))
        seconds = bodies.keep_alive(fields)
        prompt_field = {"/api/chat": "messages", "/api/generate": "prompt"}.get(request.scope["path"])
        if seconds == 0 and prompt_field is not None and not fields.get(prompt_field):
            self._fleet.unload(instance)
            await self._fleet.wait_unloaded([instance])
            is_chat = prompt_field == "messages"
            empty = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
            head = {"model": bodies.model_name(fields), "created_at": now()}
            return _json({**head, **empty, "done": True, "done_reason": "unload"})
        instance.keep_alive = seconds
        return self._proxy(request, instance, fields, body)

    async def _unsupported(self, request: Request) -> App:
        _, fields = await _read(request)
        if request.scope["path"] != "/api/copy":
            bodies.model_name(fields)
        raise not_supported("models are not made, copied or published here; llamado quantize writes smaller ones")

    # Models

    async def _version(self, request: Request) -> App:
        return _json({"version": describe.API_VERSION})

    async def _tags(self, request: Request) -> App:
        models = [instance.model for instance in self._fleet.instances.values() if not instance.model.hidden]
        found = await asyncio.to_thread(_with_facts, models)
        return _json({"models": [describe.listed(model.name, facts) for model, facts in found]})

    async def _show(self, request: Request) -> App:
        _, fields = await _read(request)
        name = bodies.model_name(fields)
        return _json(await asyncio.to_thread(_shown, name, self._instance(name).model, flag(fields, "verbose")))

    async def _delete_model(self, request: Request) -> App:
        _, fields = await _read(request)
        await self._delete(self._instance(bodies.model_name(fields)))
        return json_response(b"")

    async def _ps(self, request: Request) -> App:
        loaded = {i.model.name: i for i in self._fleet.instances.values() if i.status == LOADED and not i.asleep}
        found = await asyncio.to_thread(_with_facts, [instance.model for instance in loaded.values()])
        entries = []
        for model, facts in found:
            instance = loaded[model.name]
            left = instance.expires_at - time.monotonic()
            seconds = max(0.0, left) if left < float("inf") else None
            meta = instance.info.get("meta")
            n_ctx = meta.get("n_ctx", 0) if isinstance(meta, dict) else 0
            entries.append(describe.running(model.name, facts, n_ctx=n_ctx, seconds=seconds))
        return _json({"models": entries})

    # Downloads

    async def _pull(self, request: Request) -> App:
        _, fields = await _read(request)
        name = bodies.model_name(fields)
        model_name = describe.untagged(name)
        for hub in _HUBS:
            model_name = model_name.removeprefix(hub)
        here = self._fleet.find(model_name) is not None
        if not here and model_name not in self._downloads.progress:
            try:
                self._downloads.start(model_name)
            except SourceError:
                raise ApiError(
                    "server_error",
                    f"pull model manifest: '{name[:200]}' is neither in the catalog nor user/model[:quant] of the "
                    "Hugging Face hub, which are what can be fetched here",
                ) from None
        updates = None if here else self._downloads.join(model_name)

        def leave() -> None:
            if updates is not None:
                self._downloads.leave(model_name, updates)

        steps = self._steps(model_name, updates)
        if bodies.streams(fields):
            headers = {"content-type": LINES, "x-accel-buffering": "no"}
            return PartStream(_lines(steps), headers=headers, on_close=leave)
        try:
            last = await unless_disconnected(request.receive, _last(steps))
        finally:
            leave()
        if "error" in last:
            raise ApiError("server_error", last["error"])
        return _json(last)

    async def _steps(self, name: str, updates: Updates | None) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the progress lines of a download; `updates` is None if the model is already present."""
        yield {"status": "pulling manifest"}
        if updates is not None:
            while isinstance(update := await updates.get(), tuple):
                done, total = update
                yield {"status": f"pulling {name}", "digest": name, "total": total, "completed": done}
            if update:
                yield {"error": update}
                return
            await self._refresh()
            yield {"status": "verifying sha256 digest"}
            yield {"status": "writing manifest"}
        yield {"status": "success"}


async def _lines(steps: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[bytes, None]:
    async for step in steps:
        yield line(step)


async def _last(steps: AsyncGenerator[dict[str, Any], None]) -> dict[str, Any]:
    last: dict[str, Any] = {}
    async for step in steps:
        last = step
    return last


async def _read(request: Request) -> tuple[bytes, dict[str, Any]]:
    body = await body_of(request.scope).read(request.scope, request.receive)
    fields = await parse_body(body)
    if not isinstance(fields, dict):
        raise invalid("the request body must be a JSON object")
    return body, fields


def _json(fields: dict[str, Any]) -> Response:
    return json_response(orjson.dumps(fields))


def _with_facts(models: list[RoutedModel]) -> list[tuple[RoutedModel, ModelFacts | None]]:
    """Pair models with the facts in their files; None for models without a known file, such as foreign servers."""
    stored: dict[str, Path] | None = None
    found = []
    for model in models:
        path = Path(model.path)
        if not (model.path.endswith(".gguf") and path.is_file()):
            if stored is None:
                stored = {one.name.lower(): one.path for one in stored_models() if one.is_complete}
            path = stored.get((model.path or model.name).lower(), Path())
        found.append((model, read_facts(path) if path.name else None))
    return found


def _shown(name: str, model: RoutedModel, everything: bool) -> dict[str, Any]:
    ((_, facts),) = _with_facts([model])
    if facts is None:
        facts = ModelFacts(path=model.path)
    can = ["embedding"] if facts.embeds else ["completion", "tools"]
    if facts.template and thinks(ChatTemplate(facts.template, EndTokens("", ""))):
        can.append("thinking")
    if not facts.embeds and "tokenizer.ggml.fim_pre_token_id" in facts.info:
        can.append("insert")
    return describe.shown(name, facts, template=facts.template, parameters="", capabilities=can, everything=everything)
