"""Thousands of hostile bodies for every endpoint with a body: each gets an answer, and none a 500."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from fakes import client, run

N = 2_000  # benchmarks/hostile.py sends 10,000 to a real server
SEEDS: list[tuple[str, dict[str, Any]]] = [
    (
        "/completion",
        {
            "prompt": "Hello",
            "n_predict": 3,
            "temperature": 0.5,
            "top_k": 40,
            "stop": ["x", "y"],
            "logit_bias": [[1, 2.5], ["a", False]],
            "samplers": ["top_k", "temperature"],
            "seed": 1,
            "stream": True,
            "n_probs": 2,
            "id_slot": 0,
            "response_fields": ["content"],
        },
    ),
    ("/completion", {"prompt": [1, "a", 2], "n_predict": 2, "cache_prompt": True, "n_keep": 1, "repeat_penalty": 1.1}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2, "logprobs": 2, "n": 2}),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "x"}]},
            ],
            "max_completion_tokens": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
            "logprobs": True,
            "top_logprobs": 3,
            "response_format": {"type": "text"},
            "chat_template_kwargs": {"a": 1},
            "tools": [],
            "tool_choice": "none",
        },
    ),
    ("/apply-template", {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "I"}]}),
    ("/tokenize", {"content": "Hello wörld", "add_special": True, "with_pieces": True}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
    ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
    ("/embedding", {"content": "x"}),
]
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, -(2**31) - 1, 2**53, 2**63 - 1, 2**64, -(2**70), 10**400, 1.5, -0.0, 1e-320,
    1e308, -1e308, float("nan"), float("inf"), "", "x", "-1", "\x00", "é" * 50, "\ud800", "9" * 400, "null", [], {},
    [[]], [None], [[1, 2, 3]], {"a": {"b": {}}}, [1e308], ["", ""], [True], {"": 1}, {"1": 1e300, "x": False},
    [[10**30, 1]], [{}] * 3, "{{ 7*7 }}", "../../etc/passwd", {"type": "json_object"}, {"prompt_string": 5},
    {"self": 1, "messages": 2, "add_generation_prompt": 3}, [{"role": "assistant", "content": None, "tool_calls": 5}],
]  # fmt: skip
KEYS = [
    "prompt",
    "n_predict",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "stop",
    "logit_bias",
    "samplers",
    "seed",
    "stream",
    "n_probs",
    "id_slot",
    "n",
    "n_cmpl",
    "messages",
    "content",
    "tokens",
    "role",
    "max_tokens",
    "mirostat",
    "dry_multiplier",
    "dry_sequence_breakers",
    "xtc_probability",
    "lora",
    "grammar",
    "json_schema",
    "response_format",
    "tools",
    "tool_choice",
    "stream_options",
    "logprobs",
    "top_logprobs",
    "t_max_predict_ms",
    "n_indent",
    "n_keep",
    "min_keep",
    "repeat_last_n",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "ignore_eos",
    "cache_prompt",
    "return_tokens",
    "return_progress",
    "timings_per_token",
    "post_sampling_probs",
    "sse_ping_interval",
    "chat_template_kwargs",
    "reasoning_effort",
    "add_generation_prompt",
    "dynatemp_range",
    "adaptive_target",
    "response_fields",
    "n_discard",
    "verbose",
    "include_usage",
    "type",
    "text",
]


def mutate(value: Any, rng: random.Random, depth: int = 0) -> Any:
    """Return a copy of a JSON value with some of its parts changed."""
    roll = rng.random()
    if roll < 0.12:
        return rng.choice(VALUES)
    if isinstance(value, dict):
        changed = {k: mutate(v, rng, depth + 1) if rng.random() < 0.35 else v for k, v in value.items()}
        if rng.random() < 0.3 and changed:
            changed.pop(rng.choice(list(changed)))
        while rng.random() < 0.4:
            changed[rng.choice(KEYS)] = rng.choice(VALUES)
        return changed
    if isinstance(value, list):
        changed_list = [mutate(v, rng, depth + 1) for v in value]
        if rng.random() < 0.3:
            changed_list.insert(rng.randrange(len(changed_list) + 1), rng.choice(VALUES))
        return changed_list
    return value


def damage(body: bytes, rng: random.Random) -> bytes:
    """Return the bytes with damage."""
    data = bytearray(body)
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(data) + 1)
        roll = rng.randrange(4)
        if roll == 0:
            del data[at : at + rng.randrange(8)]
        elif roll == 1:
            data[at:at] = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 5)))
        elif roll == 2:
            data[at:at] = rng.choice([b"[" * 2000, b'{"a":' * 500, b"\xed\xa0\x80", b"\x00", b"1e999", b'"\\ud800"'])
        elif at < len(data):
            data[at] ^= 1 << rng.randrange(8)
    return bytes(data)


@pytest.mark.slow
def test_hostile_bodies() -> None:
    async def work() -> dict[int, int]:
        rng = random.Random(20240607)
        seen: dict[int, int] = {}
        async with client() as http:
            http.engine.answer = "ab"  # type: ignore[attr-defined]
            for i in range(N):
                path, seed = rng.choice(SEEDS)
                body = json.dumps(mutate(seed, rng)).encode()
                if rng.random() < 0.25:
                    body = damage(body, rng)
                response = await http.post(path, content=body)
                seen[response.status_code] = seen.get(response.status_code, 0) + 1
                assert response.status_code in (200, 400, 501), (i, path, body[:2000], response.text)
                if response.status_code != 200:
                    error = response.json()["error"]
                    assert error["code"] == response.status_code and error["type"] and error["message"]
                elif response.headers["content-type"].startswith("text/event-stream"):
                    assert "server_error" not in response.text, (i, path, body[:2000], response.text)
            assert (await http.get("/health")).status_code == 200
        return seen

    seen = run(work())
    # Some mutations must pass the first checks.
    assert seen[200] > N // 10 and seen[400] > N // 10
