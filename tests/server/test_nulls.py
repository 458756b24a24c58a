"""Null counts as absent in every field of every body, as in llama-server and in OpenAI's API."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from fakes import FakeEngine, client
from test_odd_values import ANTHROPIC, CHAT, CHAT_LIMITED, GENERATING, HI, RESPONSES

OLLAMA = {"model": "fake", "stream": False}
BODIES: list[tuple[str, dict[str, Any]]] = [
    *((path, body) for path, body in GENERATING if isinstance(body, dict) and not path.startswith("/slots")),
    ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
    ("/api/chat", {**OLLAMA, "messages": [HI | {"content": "x"}], "options": {"num_predict": 1}}),
    ("/api/generate", {**OLLAMA, "prompt": "x", "options": {"num_predict": 1}}),
    ("/api/show", {"model": "fake"}),
]
NESTED = ("stream_options", "response_format", "tool_choice", "thinking", "reasoning", "text", "metadata", "options")
"""Fields of bodies that are objects of the API."""


async def described(http: Any) -> dict[str, list[str]]:
    """Return the fields of each endpoint's body in the OpenAPI document."""
    document = (await http.get("/openapi.json")).json()
    found = {}
    for path, methods in document["paths"].items():
        schema = methods.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json", {})
        found[path] = list(schema.get("schema", {}).get("properties", {}))
    return found


def variants(body: dict[str, Any], names: list[str]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield each field's name, the body with null in it, and the body without it."""
    for name in {**dict.fromkeys(names), **body}:
        rest = {key: value for key, value in body.items() if key != name}
        yield name, {**rest, name: None}, rest
    for outer in NESTED:
        given = body.get(outer)
        for name in given if isinstance(given, dict) else ():
            if name != "type":
                rest = {key: value for key, value in given.items() if key != name}
                yield f"{outer}.{name}", {**body, outer: {**rest, name: None}}, {**body, outer: rest}


def shown(answer: Any, engine: FakeEngine) -> tuple[Any, ...]:
    """Return status and error of an answer, and prompt and parameters of the engine's request."""
    request = engine.requests[-1] if engine.requests else None
    error = answer.json().get("error") if answer.status_code >= 400 else None
    fields = () if request is None else (request.prompt, request.params)
    engine.requests.clear()
    return answer.status_code, error, fields


@pytest.mark.parametrize(("path", "body"), BODIES, ids=[f"{i}{path}" for i, (path, _) in enumerate(BODIES)])
async def test_null_is_absent(path: str, body: dict[str, Any]) -> None:
    async with client(props=True) as http:
        names = (await described(http)).get(path, [])
        engine: FakeEngine = http.engine  # type: ignore[attr-defined]
        unchanged = shown(await http.post(path, json=body), engine)
        for name, null, absent in variants(copy.deepcopy(body), names):
            found = shown(await http.post(path, json=null), engine)
            expected = unchanged if absent == body else shown(await http.post(path, json=absent), engine)
            assert found == expected, (path, name)


async def test_the_bodies_are_valid() -> None:
    """An invalid body would hide the effect of null behind another error."""
    async with client() as http:
        for path, body in (
            ("/v1/chat/completions", CHAT),
            ("/v1/chat/completions", CHAT_LIMITED),
            ("/v1/responses", RESPONSES),
            ("/v1/messages", ANTHROPIC),
        ):
            assert (await http.post(path, json=body)).status_code == 200, path
