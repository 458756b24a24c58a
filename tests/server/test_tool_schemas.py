"""Tools whose schemas cannot be enforced: every API names them in a header, and rejects strict ones."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fakes import FakeEngine, FakeGrammars, send
from test_chat_api import CALLING, HERMES

from llamado.text.grammar.source import GrammarError

SCHEMA = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
LOOSENED = "f #/properties/a: uniqueItems"
USER = [{"role": "user", "content": "Hi"}]


def bodies(**strict: bool) -> dict[str, dict[str, Any]]:
    """Return a request of each API with the tool."""
    function = {"name": "f", "description": "d", "parameters": SCHEMA, **strict}
    tool = {"type": "function", "function": function}
    return {
        "/v1/chat/completions": {"messages": USER, "tools": [tool]},
        "/v1/messages": {
            "max_tokens": 200,
            "messages": USER,
            "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA, **strict}],
        },
        "/v1/responses": {"input": "Hi", "tools": [{"type": "function", **function}]},
        "/api/chat": {"messages": USER, "tools": [tool], "stream": False},
    }


def ask(path: str, body: dict[str, Any]) -> httpx.Response:
    return send(path, {"model": "m", **body}, FakeEngine(CALLING), source=HERMES)


@pytest.mark.parametrize("path", bodies())
def test_only_a_strict_tool_is_refused(path: str) -> None:
    for body in (bodies()[path], bodies(strict=False)[path], {**bodies()[path], "stream": True}):
        response = ask(path, body)
        assert (response.status_code, response.headers.get("llamado-not-enforced")) == (200, LOOSENED), response.text
    response = ask(path, bodies(strict=True)[path])
    assert response.status_code == 400 and "uniqueItems" in response.text
    assert "llamado-not-enforced" not in ask(path, {**bodies()[path], "tools": []}).headers


@pytest.mark.parametrize("path", ["/v1/messages/count_tokens", "/v1/responses/input_tokens", "/apply-template"])
def test_token_counts_accept_the_same_tools(path: str) -> None:
    like = {"/v1/messages/count_tokens": "/v1/messages", "/v1/responses/input_tokens": "/v1/responses"}
    assert ask(path, bodies()[like.get(path, "/v1/chat/completions")]).status_code == 200


def test_a_too_large_grammar_of_tools_is_not_enforced(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile(self: FakeGrammars, *_: Any, **__: Any) -> Any:
        raise GrammarError("too large")

    monkeypatch.setattr(FakeGrammars, "compile", compile)
    path, body = "/v1/chat/completions", bodies()["/v1/chat/completions"]
    answer = ask(path, body)
    assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["tool_calls"]
    assert ask(path, {**body, "tool_choice": "required"}).status_code == 400
