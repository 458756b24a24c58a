"""The endpoints of Ollama's API for a server of one model.

Like llama-server's other endpoints, they use the loaded model, whatever name the body has.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from llamado.http.answer import json_response
from llamado.http.json_body import read_object
from llamado.media.media import MediaKind
from llamado.server.api.infill import PromptBudget, infill_prompt
from llamado.server.api.ollama import bodies, describe
from llamado.server.api.ollama.embed import embed_response, embedding_response
from llamado.server.api.ollama.formats import ChatLines, GenerateLines, RequestTimes, now
from llamado.server.api.ollama.go_template import render
from llamado.server.api.openapi import describe as described
from llamado.server.api.routes import Routes
from llamado.server.errors import invalid, not_supported
from llamado.server.generate.generator import Generator
from llamado.server.generate.json_values import flag, mapping, text
from llamado.server.generate.threads import in_thread
from llamado.server.model import ModelInfo, ServedModel
from llamado.server.model_facts import ModelFacts, read_facts
from llamado.server.state import ServerState
from llamado.text.dialects import thinks

log = logging.getLogger("llamado.server")

_ONE_MODEL = (
    "this server serves one model and changes none: start `llamado serve` without -m, or with several, for a router "
    "that fetches and deletes models; `llamado pull` fetches one"
)


def facts_of(info: ModelInfo) -> ModelFacts:
    """Return the facts of the model's file, or those that the server has if the file is gone."""
    found = read_facts(info.path)
    if found is not None:
        return found
    return ModelFacts(
        n_params=info.n_params,
        quantization=info.ftype,
        n_ctx_train=info.n_ctx_train,
        n_embd=info.n_embd,
        template=info.chat_template,
        size=info.size,
        info={"general.parameter_count": info.n_params},
        path=info.path,
    )


def capabilities(served: ServedModel) -> list[str]:
    """Return Ollama's names of the features of a loaded model."""
    found = []
    if served.grammars is not None:
        found += ["completion", "tools"]
        tokenizer = served.tokenizer
        if None not in (tokenizer.fim_pre, tokenizer.fim_suf, tokenizer.fim_mid):
            found.append("insert")
        if MediaKind.IMAGE in served.media_kinds:
            found.append("vision")
        if MediaKind.AUDIO in served.media_kinds:
            found.append("audio")
        if thinks(served.template):
            found.append("thinking")
    if served.embeddings is not None:
        found.append("embedding")
    return found


def ollama_router(generator: Generator, state: ServerState) -> Routes:
    """Return the routes of Ollama's API."""
    router = Routes("ollama")
    warned: set[int] = set()

    def apply_options(body: Mapping[str, Any], served: ServedModel) -> None:
        """Apply `keep_alive`, and log a warning, once per value, for a larger context than the server's (`num_ctx`)."""
        seconds = bodies.keep_alive(body)
        if state.sleep is not None:
            state.sleep.stay(seconds)
        wanted = mapping(body, "options").get("num_ctx")
        if isinstance(wanted, int) and wanted > served.info.n_ctx and wanted not in warned and len(warned) < 100:
            warned.add(wanted)
            log.warning("num_ctx %d: this server's context has %d tokens (-c)", wanted, served.info.n_ctx)

    def load_or_unload(body: Mapping[str, Any], content: dict[str, Any]) -> Response:
        """Answer a body without a prompt, which loads the model or, with a `keep_alive` of 0, unloads it."""
        unload = bodies.keep_alive(body) == 0
        if unload and state.sleep is None:
            raise not_supported(
                "this server serves one model and keeps it: --sleep-idle-seconds lets it go, a router unloads models"
            )
        reason = "unload" if unload else "load"
        head = {"model": bodies.model_name(body), "created_at": now()}
        return json_response(orjson.dumps({**head, **content, "done": True, "done_reason": reason}))

    def generating(model: str, feature: str) -> ServedModel:
        """Return the model. Raises ApiError for one that does not generate."""
        served = generator.served
        if served.grammars is None:
            raise invalid(f'"{model}" does not support {feature}')
        return served

    @router.post("/api/chat", **described("ollama_chat"))
    async def chat(request: Request) -> Response:
        times, body = RequestTimes.of_now(), await read_object(request)
        model = bodies.model_name(body)
        served = generating(model, "chat")
        apply_options(body, served)
        if not body.get("messages"):
            return load_or_unload(body, {"message": {"role": "assistant", "content": ""}})
        converted = bodies.chat_body(body, n_ctx=served.info.n_ctx, thinks=thinks(served.template))
        most = converted.get("n_probs", 0) if body.get("top_logprobs") else 0
        return await generator.chat(converted, partial(ChatLines, model=model, times=times, top_logprobs=most))

    @router.post("/api/generate", **described("ollama_generate"))
    async def generate(request: Request) -> Response:
        times, body = RequestTimes.of_now(), await read_object(request)
        model = bodies.model_name(body)
        served = generating(model, "generate")
        apply_options(body, served)
        if not isinstance(body.get("prompt") or "", str):
            raise invalid('"prompt" must be a string')
        if not text(body, "prompt"):
            return load_or_unload(body, {"response": ""})
        raw, context, template = flag(body, "raw"), body.get("context"), text(body, "template")
        if raw and (template or body.get("system") or context):
            raise invalid("raw mode does not support template, system, or context")
        if context is not None and not (isinstance(context, list) and all(type(token) is int for token in context)):
            raise invalid("context must be an array of tokens")
        n_ctx = served.info.n_ctx
        completion = bodies.completion_body(body, n_ctx=n_ctx)
        most = completion.get("n_probs", 0) if body.get("top_logprobs") else 0
        make = partial(GenerateLines, model=model, times=times, top_logprobs=most, shows_context=not raw)
        if text(body, "suffix") and not raw and not template:
            return await generator.complete(completion, make, prompt=lambda: _infill(body, generator))
        if raw or template:
            prompt = text(body, "prompt")
            if template:
                names = {"Prompt": "prompt", "System": "system", "Suffix": "suffix"}
                prompt = render(template, {name: text(body, field) for name, field in names.items()})
            mixed: Any = [*context, prompt] if context else prompt
            if found := bodies.images(body):
                if context:
                    raise invalid("images cannot follow a context: send all messages to /api/chat")
                marked = served.media_marker * len(found) + prompt
                mixed = {"prompt_string": marked, "multimodal_data": found}
            return await generator.complete({**completion, "prompt": mixed}, make)
        converted = bodies.generate_chat(body, n_ctx=n_ctx, thinks=thinks(served.template))
        return await generator.chat(converted, make, prefix=context or ())

    @router.post("/api/embed", **described("ollama_embed"))
    async def embed(request: Request) -> Response:
        times, body = RequestTimes.of_now(), await read_object(request)
        apply_options(body, state.loaded())
        return await embed_response(body, state.loaded(), times)

    @router.post("/api/embeddings", **described("ollama_embeddings"))
    async def embeddings(request: Request) -> Response:
        body = await read_object(request)
        apply_options(body, state.loaded())
        return await embedding_response(body, state.loaded())

    @router.get("/api/tags", **described("ollama_tags"))
    async def tags(_: Request) -> Response:
        info = state.loaded().info
        entry = describe.listed(info.name, await in_thread(partial(facts_of, info)))
        return json_response(orjson.dumps({"models": [entry]}))

    @router.get("/api/ps", **described("ollama_ps"))
    async def ps(_: Request) -> Response:
        info, sleep = state.loaded().info, state.sleep
        entries = []
        if sleep is None or not sleep.asleep:
            facts = await in_thread(partial(facts_of, info))
            left = None if sleep is None else sleep.left
            entries.append(describe.running(info.name, facts, n_ctx=info.n_ctx, seconds=left))
        return json_response(orjson.dumps({"models": entries}))

    @router.post("/api/show", **described("ollama_show"))
    async def show(request: Request) -> Response:
        body = await read_object(request)
        name, served = bodies.model_name(body), state.loaded()
        facts = await in_thread(partial(facts_of, served.info))

        def work() -> bytes:
            return orjson.dumps(
                describe.shown(
                    name,
                    facts,
                    template=served.info.chat_template,
                    parameters=describe.parameter_lines(served.defaults),
                    capabilities=capabilities(served),
                    everything=flag(body, "verbose"),
                )
            )

        return json_response(await in_thread(work))

    @router.get("/api/version", **described("ollama_version"))
    async def version(_: Request) -> Response:
        return json_response(orjson.dumps({"version": describe.API_VERSION}))

    async def change(request: Request) -> Response:
        await read_object(request)
        raise not_supported(_ONE_MODEL)

    for method, path in (
        ("POST", "/api/pull"),
        ("POST", "/api/push"),
        ("POST", "/api/create"),
        ("POST", "/api/copy"),
        ("DELETE", "/api/delete"),
    ):
        router.add(method, path, change, **described("ollama_change"))
    return router


def _infill(body: Mapping[str, Any], generator: Generator) -> list[int]:
    """Return the prompt for text between a body's `prompt` and `suffix`."""
    served = generator.served
    tokenizer = served.tokenizer
    if None in (tokenizer.fim_pre, tokenizer.fim_suf, tokenizer.fim_mid):
        raise invalid(f'"{bodies.model_name(body)}" does not support insert')
    budget = PromptBudget(n_ctx=served.info.n_ctx, n_batch=served.n_batch, n_predict=served.defaults.n_predict)
    given = {"input_prefix": text(body, "prompt"), "input_suffix": text(body, "suffix")}
    return infill_prompt(given, tokenizer, budget, suffix_first=generator.switches.spm_infill)
