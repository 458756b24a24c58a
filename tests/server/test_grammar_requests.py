"""Odd constraints with the real grammar compiler, in every API: never a 500."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import sys
import threading
from pathlib import Path
from typing import Any

import orjson
import pytest
from fakes import FakeEngine, client, run
from test_chat_api import HERMES
from tiers import first_of
from waiting import GUARD

from llamado.text.grammar.compiler import GrammarCompiler
from llamado.text.grammar.source import GrammarError

sys.path.append(str(Path(__file__).parents[1] / "text"))
from guided import bytes_tokenizer
from test_tool_requests import TOOL, VALUES, places, replaced

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
SEEDS: list[tuple[str, dict[str, Any]]] = [
    ("/completion", {"prompt": "x", "n_predict": 1, "json_schema": SCHEMA}),
    (
        "/completion",
        {
            "prompt": "x",
            "n_predict": 1,
            "grammar": 'root ::= "a"',
            "grammar_lazy": True,
            "grammar_triggers": [{"type": 1, "value": "ab"}, {"type": 0, "value": "x", "token": 3}],
            "preserved_tokens": ["<tool_call>"],
        },
    ),
    ("/completion", {"prompt": "x", "grammar": 'root ::= "a"', "grammar_triggers": [{"type": 2, "value": "(a)"}]}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 1, "json_schema": SCHEMA}),
    ("/v1/chat/completions", {**CHAT, "tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": True}),
    (
        "/v1/chat/completions",
        {**CHAT, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    ),
    (
        "/v1/chat/completions",
        {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
    ),
    ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_object", "schema": SCHEMA}}),
    ("/v1/chat/completions", {**CHAT, "json_schema": SCHEMA, "reasoning_budget_tokens": 5}),
    ("/v1/chat/completions", {**CHAT, "grammar": 'root ::= "a"', "grammar_triggers": [], "grammar_lazy": False}),
    ("/apply-template", {**CHAT, "tools": [TOOL]}),
    (
        "/v1/messages",
        {**CHAT, "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}},
    ),
    ("/v1/messages/count_tokens", {**CHAT, "tools": [{"name": "f", "input_schema": SCHEMA}]}),
    (
        "/v1/responses",
        {
            "input": "hi",
            "tools": [{"type": "function", "name": "f", "parameters": SCHEMA, "strict": True}],
            "tool_choice": "required",
            "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
        },
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("source", first_of([HERMES, PLAIN], ids=["hermes", "plain"]))
def test_odd_constraints_are_used_or_refused(source: str) -> None:
    compiler = GrammarCompiler(bytes_tokenizer())
    chance = random.Random(8)

    async def work() -> set[int]:
        statuses = set()
        async with client(FakeEngine("a"), source=source) as http:
            state = http.state  # type: ignore[attr-defined]
            state.served = dataclasses.replace(state.served, grammars=compiler)
            for path, seed in SEEDS:
                where = [p for p in places(seed) if p and p[0] not in ("messages", "input", "prompt")]
                for place in where:
                    for value in chance.sample([v for v in VALUES if is_json(v)], 3):
                        body = replaced(seed, place, value)
                        response = await http.post(path, content=orjson.dumps(body))
                        assert response.status_code != 500, (path, place, value, response.text)
                        statuses.add(response.status_code)
                        await asyncio.sleep(0)
        return statuses

    assert {200, 400} <= run(work())


def is_json(value: Any) -> bool:
    try:
        orjson.dumps(value)
    except (TypeError, orjson.JSONEncodeError):
        return False
    return True


@pytest.mark.parametrize("source", [HERMES, PLAIN], ids=["hermes", "plain"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "tools": [replaced(TOOL, ("function", "parameters"), True)]}),
        ("/v1/responses", {"input": "hi", "tools": [{"type": "function", "name": "f", "parameters": True}]}),
        ("/completion", {"prompt": "x", "json_schema": {"const": -(2**63)}}),
        ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_object", "schema": {"const": -(2**63)}}}),
        (
            "/completion",
            {
                "prompt": "x",
                "grammar": 'root ::= "a"',
                "grammar_lazy": True,
                "grammar_triggers": [{"type": 2, "value": "(?:(?:ab){300}){300}"}],
            },
        ),
    ],
)
def test_invalid_constraints_are_a_400(source: str, path: str, body: dict[str, Any]) -> None:
    async def work() -> tuple[int, str]:
        async with client(FakeEngine("a"), source=source) as http:
            state = http.state  # type: ignore[attr-defined]
            state.served = dataclasses.replace(state.served, grammars=GrammarCompiler(bytes_tokenizer()))
            response = await http.post(path, content=orjson.dumps(body))
            return response.status_code, response.text

    status, text = run(work())
    assert status == 400, text
    assert "invalid_request_error" in text


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity", "1e400"])
def test_numbers_outside_of_json_are_a_400(number: str) -> None:
    """The type and the token of a grammar trigger are integers of JSON."""
    body = '{"prompt":"x","grammar":"root ::= \\"a\\"","grammar_triggers":[{"type":%s,"value":"a","token":%s}]}'

    async def work() -> int:
        async with client(FakeEngine("a"), source=PLAIN) as http:
            code: int = (await http.post("/completion", content=(body % (number, number)).encode())).status_code
            return code

    assert run(work()) == 400


async def test_a_slow_grammar_delays_no_other_request() -> None:
    """While the vocabulary is prepared for the first grammar, long texts are tokenized and other requests answered."""
    held, many = threading.Event(), 4

    class Slow:
        def compile(self, *given: Any, **more: Any) -> Any:
            held.wait(GUARD)
            raise GrammarError("it took long")

    async with client(FakeEngine()) as http:
        http.state.served = dataclasses.replace(http.state.served, grammars=Slow())
        body = {"prompt": "x", "n_predict": 1, "json_schema": SCHEMA}
        waiting = [asyncio.create_task(http.post("/completion", json=body)) for _ in range(many)]
        await asyncio.sleep(0.1)
        try:
            async with asyncio.timeout(GUARD):
                text = {"content": "a word " * 2_000}
                assert (await http.post("/tokenize", json=text)).status_code == 200
                long = {"prompt": "a word " * 2_000, "n_predict": 1}
                assert (await http.post("/completion", json=long)).status_code == 400  # longer than the context
                assert (await http.get("/health")).status_code == 200
            assert not any(task.done() for task in waiting)
        finally:
            held.set()
        assert {(await task).status_code for task in waiting} == {400}
