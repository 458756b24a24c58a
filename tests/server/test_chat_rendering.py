"""Chat templates that cost too much, and what odd things a client can put into one, over the fake engine."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from fakes import client, run
from test_fuzz import VALUES, mutate

USER = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"
SLOW_WHEN_TOLD = (
    "{% if slow %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}ok"
)


def test_a_template_that_takes_too_long_is_a_400_and_others_are_answered_meanwhile() -> None:
    async def work() -> None:
        async with client(source=SLOW_WHEN_TOLD) as http:
            slow = asyncio.create_task(
                http.post("/apply-template", json={"messages": USER, "chat_template_kwargs": {"slow": True}})
            )
            for _ in range(5):
                assert (await http.get("/health")).status_code == 200
                answer = await http.post("/completion", json={"prompt": "x", "n_predict": 1})
                assert answer.status_code == 200 and not slow.done()
            waiting = asyncio.create_task(http.post("/apply-template", json={"messages": USER}))
            refused, served = await slow, await waiting
            assert refused.status_code == 400
            assert "takes more than 2 s of computing" in refused.json()["error"]["message"]
            assert served.json() == {"prompt": "ok"}

    run(work())


SHOWS_ALL = """
{%- for t in tools %}{{ t.function.name }}{{ t | tojson }}{% endfor -%}
{%- for d in documents %}{{ d.title }}{{ d.text | trim }}{% endfor -%}
{%- for m in messages -%}
<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}</>
{%- endfor -%}
{{ strftime_now('%Y') }}{{ bos_token + eos_token }}{{ date_string | length }}{{ reasoning_effort | upper }}
{%- if enable_thinking %}<think>{% endif %}
"""


@pytest.mark.parametrize("value", [True, 1, "text", {"a": 1}, [1], [None], [[]], [{"title": 1}]])
def test_documents_of_any_type_are_the_templates_matter(value: Any) -> None:
    async def work() -> tuple[int, Any]:
        async with client(source=SHOWS_ALL) as http:
            body = {"messages": USER, "chat_template_kwargs": {"documents": value}, "max_tokens": 1}
            answer = await http.post(CHAT, json=body)
            return answer.status_code, answer.json()

    status, body = run(work())
    assert status == 200 or (status == 400 and "chat template" in body["error"]["message"])


VARIABLES = [
    "documents", "tools", "messages", "self", "bos_token", "eos_token", "date_string", "datetime", "enable_thinking",
    "add_generation_prompt", "reasoning_effort", "preserve_reasoning", "strftime_now", "raise_exception", "range",
    "namespace", "loop", "caller", "environment", "context", "source", "name", "seconds", "m", "t", "__class__", "",
]  # fmt: skip


def test_nothing_that_is_given_to_a_template_is_a_500() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}
    seed = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": "a", "reasoning_content": "r", "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": "1", "name": "f"},
        {"role": "user", "content": "x"},
    ]

    async def work(source: str) -> dict[int, int]:
        rng = random.Random(source)
        seen: dict[int, int] = {}
        async with client(source=source) as http:
            http.engine.answer = "ab"  # type: ignore[attr-defined]
            for _ in range(150):
                kwargs = {rng.choice(VARIABLES): rng.choice(VALUES) for _ in range(rng.randrange(4))}
                body: dict[str, Any] = {"messages": seed, "chat_template_kwargs": kwargs, "max_tokens": 1}
                if rng.random() < 0.5:
                    body["tools"] = [tool]
                if rng.random() < 0.6:
                    body["messages"] = [mutate(m, rng) if rng.random() < 0.5 else m for m in seed]
                if rng.random() < 0.2:
                    body["continue_final_message"] = rng.choice([True, "content", "reasoning_content", 1, None])
                    body["add_generation_prompt"] = rng.choice([True, False])
                path = rng.choice([CHAT, "/apply-template", CHAT + "/input_tokens"])
                answer = await http.post(path, content=json.dumps(body))
                seen[answer.status_code] = seen.get(answer.status_code, 0) + 1
                assert answer.status_code < 500, (body, answer.text)
        return seen

    for source in (SHOWS_ALL, "{{ messages | tojson }}{{ documents }}{{ tools }}"):
        seen = run(work(source))
        assert set(seen) <= {200, 400} and min(seen[200], seen[400]) > 10, seen
