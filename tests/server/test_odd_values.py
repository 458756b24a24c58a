"""Every field of every body with every odd value: an answer or a client error each time, never a server error.

The fields are those of the OpenAPI document, and every place in bodies with the API's nested forms.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import httpx
import pytest
from fakes import FakeEngine, client
from minilm import make_bert
from tiny_models import make_llama

from llamado.engine.options import EngineOptions, ModelSource
from llamado.engine.request import Defaults
from llamado.server.app import create_app
from llamado.server.load import load_served
from llamado.server.settings import Settings
from llamado.server.state import ServerState
from llamado.server.switches import Switches

# Numbers at and beyond the limits of their types, texts, and each JSON type with odd contents.
ODD: list[Any] = [
    None, True, False, 0, -1, 1.5, 2**31, -(2**31) - 1, 2**63, -(2**70), 10**400, 1e300, -1e300, 1e-320,
    "", "x", "\x00", [], {}, [[]], [None], [{}], [True], [5], [1e300], ["x", 5], [[1e300, 1e300]], {"1": 1e300},
    {"x": None}, [{"id": 1e300}], [{"id": 0, "scale": 1e300}], [{"type": 1e300, "value": "x", "token": 1e300}],
]  # fmt: skip

HI = {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLED = [HI, {"role": "assistant", "content": "x", "tool_calls": [CALL]}, {**HI, "role": "tool", "tool_call_id": "1"}]
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True}}
CHAT = {
    "messages": CALLED, "max_tokens": 1, "tools": [TOOL], "chat_template_kwargs": {"a": 1},
    "tool_choice": {"type": "function", "function": {"name": "f"}}, "stream_options": {"include_usage": True},
}  # fmt: skip
CHAT_LIMITED = {"messages": [HI], "max_tokens": 1, "response_format": SCHEMA, "logprobs": True, "top_logprobs": 2}
NATIVE = {
    "prompt": [1, "a", 2], "n_predict": 1, "stop": ["x"], "logit_bias": [[1, 2.5]], "samplers": ["top_k"],
    "lora": [{"id": 0, "scale": 1.0}], "stream_options": {"include_usage": True}, "response_fields": ["content"],
    "dry_sequence_breakers": ["x"], "grammar": 'root ::= "a"*', "grammar_lazy": True, "preserved_tokens": ["x"],
    "grammar_triggers": [{"type": 2, "value": "x", "token": 1}],
}  # fmt: skip
RESPONSES = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "reasoning", "summary": [], "content": [{"text": "x"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "y"}]},
        {"role": "assistant", "type": "message", "content": [{"type": "output_text", "text": "x"}]},
        {"role": "user", "content": "x"},
    ],
    "max_output_tokens": 1, "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
    "reasoning": {"effort": "low"}, "text": {"format": {"type": "text"}},
}  # fmt: skip
ANTHROPIC = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text"}]}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}, {"type": "text", "text": "x"}]},
        {"role": "user", "content": "x"},
    ],
    "max_tokens": 1, "system": [{"type": "text", "text": "s"}], "stop_sequences": ["x"],
    "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "metadata": {"user_id": "x"},
    "thinking": {"type": "enabled", "budget_tokens": 5},
}  # fmt: skip
GENERATING: list[tuple[str, Any]] = [
    ("/completion", NATIVE),
    (
        "/completion",
        {"prompt": {"prompt_string": "x"}, "n_predict": 1, "n_probs": 2, "json_schema": {"type": "object"}},
    ),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 1, "logprobs": 1, "n": 2}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT_LIMITED),
    ("/v1/chat/completions/input_tokens", {"messages": [HI]}),
    ("/v1/chat/completions/control", {"id": "x", "action": "reasoning_end"}),
    ("/apply-template", {"messages": [HI]}),
    ("/v1/responses", RESPONSES),
    ("/v1/messages", ANTHROPIC),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x"}], "system": "s"}),
    ("/tokenize", {"content": ["x", 5], "add_special": True, "parse_special": True, "with_pieces": True}),
    ("/detokenize", {"tokens": [1, 2]}),
    ("/props", {"a": 1}),
    ("/lora-adapters", [{"id": 0, "scale": 1.0}]),
    ("/slots/0?action=save", {"filename": "x"}),
    ("/slots/0?action=restore", {"filename": "x"}),
    ("/slots/0?action=erase", {}),
]
STREAMS = ("/completion", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
FILLING: list[tuple[str, Any]] = [
    ("/infill", {"input_prefix": "a", "input_suffix": ["b", 5], "input_extra": [{"text": "c", "filename": "d"}]}),
]
EMBEDDING: list[tuple[str, Any]] = [
    ("/embedding", {"content": [{"prompt_string": "x"}, [1, 2], {"content": [{"type": "text", "text": "x"}]}]}),
    ("/v1/embeddings", {"input": ["x", [1, "y"]], "model": "m", "encoding_format": "float", "embd_normalize": 2}),
]
RANKING: list[tuple[str, Any]] = [
    ("/v1/rerank", {"query": "x", "documents": ["a", "b"], "top_n": 1, "model": "m"}),
    ("/rerank", {"query": "x", "texts": ["a", "b"], "return_text": True}),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path to each value in a body, and to the body itself."""
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*path, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from places(inner, (*path, i))


def changed(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of a body with another value at a place."""
    if not path:
        return value
    body = copy.deepcopy(body)
    inner = body
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return body


def variants(document: Any, path: str, body: Any, covered: set[str]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield each place, and each field that no earlier endpoint has, with each odd value.

    Streams get every third value, different ones at each place, because their bodies are read by the same code.
    """
    operation = document["paths"].get(path.partition("?")[0].replace("/0", "/{id_slot}"), {}).get("post", {})
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    names = set(content.get("schema", {}).get("properties", {})) - covered if isinstance(body, dict) else set()
    covered |= names
    ways = [*places(body), *((name,) for name in sorted(names) if name not in body)]
    streams = isinstance(body, dict) and "stream" in body
    if streams:  # nested fields are read by the same code
        ways = [way for way in ways if len(way) == 1]
    for i, way in enumerate(ways):
        for value in ODD[i % 3 :: 3] if streams else ODD:
            yield way, changed(body, way, value)


async def send_all(
    http: httpx.AsyncClient, asks: list[tuple[str, Any]], covered: set[str], seen: Counter[int]
) -> list[str]:
    """Send all variants, also as streams where possible; return those that are server errors."""
    document = (await http.get("/openapi.json")).json()
    faults = []
    for path, base in asks:
        fields = set(covered)
        for stream in (False, True) if path in STREAMS else (False,):
            body = {**base, "stream": True} if stream else base
            for way, given in variants(document, path, body, covered if not stream else set(fields)):
                sent = json.dumps(given)
                try:
                    response = await http.post(path, content=sent)
                except Exception as error:  # during a stream
                    faults.append(f"{path} {way} {sent[:400]}: {error!r}")
                    continue
                fault = '"server_error"' in response.text or '"api_error"' in response.text
                if fault or response.status_code not in (200, 400, 404, 501):
                    faults.append(f"{path} {way} {sent[:400]}: {response.status_code} {response.text[:300]}")
                seen[response.status_code] += 1
    return faults


def load(path: Path, **options: Any) -> Any:
    engine = EngineOptions(n_threads=1, n_slots=2, n_ctx=128, **options)
    settings = Settings(source=ModelSource(spec=str(path)), engine=engine, defaults=Defaults(n_predict=3))
    return load_served(settings, lambda share, what: None)


@pytest.mark.full
def test_no_value_is_a_server_error(tmp_path: Path) -> None:
    generating = load(make_llama(tmp_path / "m.gguf", n_embd=32, n_ff=32, n_layer=1))
    encoder = load(make_bert(tmp_path / "e.gguf"), embeddings=True)
    ranker = load(
        make_bert(tmp_path / "r.gguf", classifier=True, n_scores=1, pooling=gguf.PoolingType.RANK), reranking=True
    )
    switches = Switches(props=True, slot_save_path=str(tmp_path))

    seen: Counter[int] = Counter()
    covered: set[str] = set()

    async def work() -> list[str]:
        faults: list[str] = []
        async with AsyncExitStack() as stack:
            https = []
            for served in (generating, encoder, ranker):
                state = ServerState(switches=switches, served=replace(served, n_slots=served.n_slots))
                transport = httpx.ASGITransport(app=create_app(state), raise_app_exceptions=False)
                https.append(
                    await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://localhost"))
                )
            https.append(await stack.enter_async_context(client(FakeEngine("ab"))))
            for http, asks in zip(https, (GENERATING, EMBEDDING, RANKING, FILLING), strict=True):
                faults += await send_all(http, asks, covered, seen)
        return faults

    try:
        faults = asyncio.run(work())
    finally:
        for served in (generating, encoder, ranker):
            served.close(0.0)
    assert not faults, f"{len(faults)} faults:\n" + "\n".join(faults[:300])
    assert seen[200] > 1000 and seen[400] > 1000, seen  # some values pass the first checks, others do not
