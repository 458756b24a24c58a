"""Slow chat templates, and odd values of clients in templates, over the fake engine."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeEngine, client, events, run

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from hostile_requests import VALUES, mutate

USER = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"
SLOW_WHEN_TOLD = (
    "{% if slow %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}ok"
)


@pytest.mark.slow
async def test_a_slow_template_is_a_400_and_delays_no_other_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamado.text.template.chat.SECONDS", 0.8)
    async with client(source=SLOW_WHEN_TOLD) as http:
        slow = asyncio.create_task(
            http.post("/apply-template", json={"messages": USER, "chat_template_kwargs": {"slow": True}})
        )
        for _ in range(2):
            assert (await http.get("/health")).status_code == 200
            answer = await http.post("/completion", json={"prompt": "x", "n_predict": 1})
            assert answer.status_code == 200 and not slow.done()
        waiting = asyncio.create_task(http.post("/apply-template", json={"messages": USER}))
        refused, served = await slow, await waiting
        assert refused.status_code == 400
        assert "takes more than 0.8 s of computing" in refused.json()["error"]["message"]
        assert served.json() == {"prompt": "ok"}


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
def test_documents_of_any_type_reach_the_template(value: Any) -> None:
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


@pytest.mark.slow
def test_no_value_given_to_a_template_is_a_500() -> None:
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


# The end of the prompt after the user's message, as llama-server (b11434) renders it with this template.
THINKS = (Path(__file__).parents[1] / "text" / "templates" / "hermes.jinja").read_text()
OPENED = "<|im_start|>assistant\n"
TEXT, EMPTY = {"content": "I th"}, {"content": ""}
PARTS = {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
BOTH, THOUGHTS = {"content": "I th", "reasoning_content": "hm"}, {"content": "", "reasoning_content": "hm"}
VLLM = {"continue_final_message": True, "add_generation_prompt": False}
CONTENT = {"continue_final_message": "content", "add_generation_prompt": False}
REASONING = {"continue_final_message": "reasoning_content", "add_generation_prompt": False}
CONTINUED = [
    *((TEXT, how, OPENED + "<think>\n\n</think>\n\nI th") for how in ({}, VLLM, CONTENT)),
    (TEXT, REASONING, OPENED + "<think>\n"),
    *((PARTS, how, OPENED + "<think>\n\n</think>\n\na\n\nb") for how in ({}, VLLM, CONTENT)),
    *((BOTH, how, OPENED + "<think>\nhm\n</think>\n\nI th") for how in ({}, VLLM, CONTENT)),
    (BOTH, REASONING, OPENED + "<think>\nhm"),
    *((THOUGHTS, how, OPENED + "<think>\nhm") for how in ({}, VLLM, REASONING)),
    (THOUGHTS, CONTENT, OPENED + "<think>\nhm\n</think>\n\n"),
    *((EMPTY, how, "") for how in ({}, VLLM, CONTENT, REASONING)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("message", "how", "end"), CONTINUED)
def test_a_prefilled_answer_is_continued(message: dict[str, Any], how: dict[str, Any], end: str) -> None:
    async def work() -> str:
        async with client(source=THINKS) as http:
            body = {"messages": [*USER, {"role": "assistant", **message}], **how}
            answer = (await http.post("/apply-template", json=body)).json()
            return str(answer["prompt"])

    assert run(work()).partition("<|im_end|>\n")[2] == end


def test_whole_answers_begin_with_the_prefill_and_streams_with_echo() -> None:
    async def ask(message: dict[str, Any], **more: Any) -> Any:
        async with client(FakeEngine("ink"), source=THINKS) as http:
            body = {"messages": [*USER, {"role": "assistant", **message}], **more}
            answer = await http.post(CHAT, json=body)
            if not more.get("stream"):
                return answer.json()["choices"][0]["message"]
            deltas = [json.loads(e)["choices"][0]["delta"] for e in events(answer.text) if e != "[DONE]"]
            return ["".join(d.get(name) or "" for d in deltas) for name in ("reasoning_content", "content")]

    assert run(ask(TEXT, **VLLM)) == {"role": "assistant", "content": "I think"}
    assert run(ask(BOTH)) == {"role": "assistant", "content": "I think", "reasoning_content": "hm\n"}
    assert run(ask(THOUGHTS)) == {"role": "assistant", "content": "", "reasoning_content": "hmink"}
    assert run(ask(BOTH, stream=True)) == ["", "ink"]
    assert run(ask(BOTH, stream=True, echo=True)) == ["hm\n", "I think"]


def test_invalid_continuations_are_a_400() -> None:
    async def refused(*messages: dict[str, Any], **more: Any) -> str:
        async with client(source=THINKS) as http:
            answer = await http.post("/apply-template", json={"messages": [*USER, *messages], **more})
            assert answer.status_code == 400
            return str(answer.json()["error"]["message"])

    begun = {"role": "assistant", "content": "a"}
    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": "{}"}}
    assert "Cannot set both" in run(refused(begun, continue_final_message=True))
    assert "Cannot set both" in run(refused(begun, continue_final_message="content", add_generation_prompt=True))
    assert "2 or more assistant messages" in run(refused(begun, begun))
    assert "contains tool calls" in run(refused({**begun, "tool_calls": [call]}, **VLLM))
