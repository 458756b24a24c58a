"""Ollama's API on a router: lists all models; loads, downloads and deletes models by name."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import orjson

from llamado.gguf.errors import SourceError
from llamado.gguf.sources.stored import stored_models
from llamado.http.answer import Receive, Scope, Send, answer
from llamado.http.bodies import body_of
from llamado.http.errors import OLLAMA, ApiError, invalid, not_found, not_supported
from llamado.http.exchange import OLLAMA_POSTS
from llamado.http.json_body import parse_body
from llamado.router.catalog import RoutedModel
from llamado.router.downloads import Downloads, Updates
from llamado.router.fleet import LOADED, Fleet, Instance
from llamado.server.api.ollama import bodies, describe
from llamado.server.api.ollama.formats import LINES, line, now
from llamado.server.generate.json_values import flag
from llamado.server.generate.streaming import watch
from llamado.server.model_facts import ModelFacts, read_facts
from llamado.text.dialects import thinks
from llamado.text.template.chat import ChatTemplate

_POSTS = OLLAMA - {"/api/version", "/api/tags", "/api/ps", "/api/delete"}
_HUBS = ("hf.co/", "huggingface.co/")
_SHORT = 12  # digits of a digest in a message


class ForwardToModel(Protocol):
    """Forwards a request, with the given body, to a model."""

    def __call__(
        self, instance: Instance, scope: Scope, receive: Receive, send: Send, fields: dict[str, Any], body: bytes
    ) -> Awaitable[None]: ...


class OllamaApi:
    """Ollama's endpoints. `forward` proxies a request, `refresh` rereads the catalog, `delete` removes files."""

    def __init__(
        self,
        fleet: Fleet,
        downloads: Downloads,
        *,
        forward: ForwardToModel,
        refresh: Callable[[], Awaitable[None]],
        delete: Callable[[Instance], Awaitable[None]],
    ) -> None:
        self._fleet = fleet
        self._downloads = downloads
        self._forward = forward
        self._refresh = refresh
        self._delete = delete

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        if method == "GET" and path == "/api/version":
            await _send_json(send, {"version": describe.API_VERSION})
        elif method == "GET" and path == "/api/tags":
            await _send_json(send, await self._tags())
        elif method == "GET" and path == "/api/ps":
            await _send_json(send, await self._ps())
        elif (method, path) == ("DELETE", "/api/delete"):
            _, fields = await _read(scope, receive)
            await self._delete(self._instance(bodies.model_name(fields)))
            await answer(send, b"")
        elif method == "POST" and path in _POSTS:
            await self._post(scope, receive, send)
        else:
            raise not_found()

    async def _post(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        body, fields = await _read(scope, receive)
        name = bodies.model_name(fields) if path != "/api/copy" else ""
        if path == "/api/pull":
            await self._pull(name, fields, receive, send)
        elif path == "/api/show":
            await _send_json(
                send, await asyncio.to_thread(_shown, name, self._instance(name).model, flag(fields, "verbose"))
            )
        elif path in OLLAMA_POSTS:
            await self._to_model(self._instance(name), scope, receive, send, fields, body)
        else:
            raise not_supported("models are not made, copied or published here; llamado quantize writes smaller ones")

    def _instance(self, name: str) -> Instance:
        """Return the model with this name, with or without its default tag. Raises ApiError."""
        instance = self._fleet.find(name) or self._fleet.find(describe.untagged(name))
        if instance is None:
            raise ApiError("not_found_error", f"model '{name[:1000]}' not found")
        return instance

    async def _to_model(
        self, instance: Instance, scope: Scope, receive: Receive, send: Send, fields: dict[str, Any], body: bytes
    ) -> None:
        seconds = bodies.keep_alive(fields)
        prompt_field = {"/api/chat": "messages", "/api/generate": "prompt"}.get(scope["path"])
        if seconds == 0 and prompt_field is not None and not fields.get(prompt_field):
            self._fleet.unload(instance)
            await self._fleet.wait_unloaded([instance])
            empty = (
                {"message": {"role": "assistant", "content": ""}} if prompt_field == "messages" else {"response": ""}
            )
            head = {"model": bodies.model_name(fields), "created_at": now()}
            await _send_json(send, {**head, **empty, "done": True, "done_reason": "unload"})
            return
        instance.keep_alive = seconds
        await self._forward(instance, scope, receive, send, fields, body)

    # Model lists

    async def _tags(self) -> dict[str, Any]:
        models = [instance.model for instance in self._fleet.instances.values() if not instance.model.hidden]
        return {"models": await asyncio.to_thread(lambda: [describe.listed(m.name, f) for m, f in _with_facts(models)])}

    async def _ps(self) -> dict[str, Any]:
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
        return {"models": entries}

    # Downloads

    async def _pull(self, name: str, fields: dict[str, Any], receive: Receive, send: Send) -> None:
        wanted = describe.untagged(name)
        for hub in _HUBS:
            wanted = wanted.removeprefix(hub)
        here = self._fleet.find(wanted) is not None
        if not here and wanted not in self._downloads.progress:
            try:
                self._downloads.start(wanted)
            except SourceError:
                raise ApiError(
                    "server_error",
                    f"pull model manifest: '{name[:200]}' is neither in the catalog nor user/model[:quant] of the "
                    "Hugging Face hub, which are what can be fetched here",
                ) from None
        updates = None if here else self._downloads.join(wanted)
        steps = self._steps(wanted, updates)
        gone = asyncio.ensure_future(watch(receive, lambda: None))
        try:
            if bodies.streams(fields):
                await self._stream(steps, gone, send)
                return
            last: dict[str, Any] = {}
            while (step := await _next(steps, gone)) is not None:
                last = step
            if not gone.done():
                if "error" in last:
                    raise ApiError("server_error", last["error"])
                await _send_json(send, last)
        finally:
            gone.cancel()
            await steps.aclose()
            if updates is not None:
                self._downloads.leave(wanted, updates)

    async def _stream(self, steps: AsyncIterator[dict[str, Any]], gone: asyncio.Future[None], send: Send) -> None:
        headers = [(b"content-type", LINES.encode()), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while (step := await _next(steps, gone)) is not None:
            await send({"type": "http.response.body", "body": line(step), "more_body": True})
        if not gone.done():
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _steps(self, name: str, updates: Updates | None) -> Any:
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


async def _next(steps: AsyncIterator[dict[str, Any]], gone: asyncio.Future[None]) -> dict[str, Any] | None:
    """Return the next step; None at the end, or if the client disconnects first."""

    async def take() -> dict[str, Any] | None:
        return await anext(steps, None)

    step = asyncio.ensure_future(take())
    either: list[asyncio.Future[Any]] = [step, gone]
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if step.done():
        return step.result()
    step.cancel()
    await asyncio.wait([step])
    return None


async def _read(scope: Scope, receive: Receive) -> tuple[bytes, dict[str, Any]]:
    body = await body_of(scope).read(scope, receive)
    fields = await parse_body(body)
    if not isinstance(fields, dict):
        raise invalid("the request body must be a JSON object")
    return body, fields


async def _send_json(send: Send, fields: dict[str, Any]) -> None:
    await answer(send, orjson.dumps(fields))


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
    if facts.template and thinks(ChatTemplate(facts.template, bos="", eos="")):
        can.append("thinking")
    if not facts.embeds and "tokenizer.ggml.fim_pre_token_id" in facts.info:
        can.append("insert")
    return describe.shown(name, facts, template=facts.template, parameters="", capabilities=can, everything=everything)
