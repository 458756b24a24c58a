"""The same requests to this server and to llama.cpp's llama-server: status, keys, types, greedy text."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from fakes import events
from ports import free_port
from waiting import GUARD

pytestmark = pytest.mark.interop

USER = [{"role": "user", "content": "Hi"}]
# Intended differences; everything else must be equal.
OWN_FIELDS = {
    "models[].capabilities[]",
    "data[].tags[]",
    "tools_enabled:boolean",  # the page requests tools only if this is true
    "[].choices[].delta.content:null",  # streams begin with an empty string here
}


@dataclass
class Pair:
    """The addresses of both servers."""

    ours: str
    theirs: str


def _wait(process: subprocess.Popen[bytes], url: str) -> None:
    for _ in range(1200):
        assert process.poll() is None, "the server ended"
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.05)
    raise AssertionError(f"{url} is not ready")


@pytest.fixture(scope="module")
def servers(peer_bin: Path, smollm2_path: Path) -> Iterator[Pair]:

    ports = [free_port(), free_port()]
    common = ["-m", str(smollm2_path), "-c", "2048", "-t", "1", "--metrics", "-a", "m", "--port"]
    ours = [sys.executable, "-m", "llamado", "serve", *common, str(ports[0])]
    theirs = [str(peer_bin / "llama-server"), "-ngl", "0", *common, str(ports[1])]
    quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    processes = [subprocess.Popen(command, **quiet) for command in (ours, theirs)]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    try:
        for process, url in zip(processes, urls, strict=True):
            _wait(process, url)
        yield Pair(*urls)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(GUARD)
            except subprocess.TimeoutExpired:
                process.kill()


def shape(value: Any, path: str = "") -> set[str]:
    """Return every path of a JSON value with its type; all elements of a list have one path."""
    if isinstance(value, dict):
        return {f"{path}:object"}.union(*(shape(v, f"{path}.{k}" if path else k) for k, v in value.items()))
    if isinstance(value, list):
        return {f"{path}:array"}.union(*(shape(v, f"{path}[]") for v in value))
    kind = {bool: "boolean", int: "number", float: "number", str: "string", type(None): "null"}[type(value)]
    return {f"{path}:{kind}"}


def ask(url: str, path: str, body: Any) -> tuple[int, Any]:
    response = httpx.post(f"{url}{path}", content=body if isinstance(body, bytes) else orjson.dumps(body), timeout=60)
    if response.headers["content-type"].startswith("text/event-stream"):
        return response.status_code, [e if e == "[DONE]" else orjson.loads(e) for e in events(response.text)]
    return response.status_code, response.json()


GREEDY: dict[str, Any] = {"temperature": 0, "seed": 1}
SAME_TEXT = [
    ("/completion", {"prompt": "The capital of France is", "n_predict": 8}),
    ("/completion", {"prompt": "The capital of France is", "n_predict": 8, "n_probs": 3}),
    ("/completion", {"prompt": "The capital of France is", "n_predict": 4, "n_probs": 2, "post_sampling_probs": True}),
    ("/completion", {"prompt": "1, 2, 3, 4,", "n_predict": 12, "stop": [" 7"], "return_tokens": True}),
    ("/completion", {"prompt": ["Hello", [1, 2, "x"]], "n_predict": 2}),
    ("/completion", {"prompt": "a", "n_predict": 2, "response_fields": ["content", "generation_settings/n_predict"]}),
    ("/completion", {"prompt": "The capital of France is", "n_predict": 6, "stream": True}),
    ("/completion", {"prompt": "1, 2, 3, 4,", "n_predict": 12, "stop": [" 7"], "stream": True}),
    ("/v1/completions", {"prompt": "The capital of France is", "max_tokens": 8}),
    ("/v1/completions", {"prompt": "The capital of France is", "max_tokens": 4, "logprobs": 2}),
    ("/v1/completions", {"prompt": "The capital of France is", "max_tokens": 4, "stream": True}),
    ("/v1/chat/completions", {"messages": USER, "max_tokens": 8}),
    ("/v1/chat/completions", {"messages": USER, "max_tokens": 4, "logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", {"messages": USER, "max_tokens": 4, "n": 2}),
    ("/v1/chat/completions", {"messages": USER, "max_tokens": 4, "stream": True}),
    (
        "/v1/chat/completions",
        {"messages": USER, "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}},
    ),
    (
        "/v1/chat/completions",
        {"messages": [*USER, {"role": "assistant", "content": "The capital of France"}], "max_tokens": 3},
    ),
]


def text_of(answer: Any) -> Any:
    """Return the generated text of an answer in any form."""
    if isinstance(answer, list):
        return [text_of(part) for part in answer if part != "[DONE]"]
    if "choices" in answer:
        return [
            c.get("text") or (c.get("message") or c.get("delta") or {}).get("content") or "" for c in answer["choices"]
        ]
    return answer.get("content")


def joined(answer: Any) -> str:
    text = text_of(answer)
    return "".join(joined_part for part in text for joined_part in part) if isinstance(text, list) else text


@pytest.mark.parametrize(("path", "body"), SAME_TEXT)
def test_answers_have_the_same_shape_and_greedy_text(servers: Pair, path: str, body: dict[str, Any]) -> None:
    request = {**body, **GREEDY}
    ours, theirs = ask(servers.ours, path, request), ask(servers.theirs, path, request)
    assert ours[0] == theirs[0] == 200
    assert shape(ours[1]) - OWN_FIELDS == shape(theirs[1]) - OWN_FIELDS
    assert joined(ours[1]) == joined(theirs[1])


SAME_ANSWER = [
    ("/tokenize", {"content": "héllo <|im_start|> 1234", "with_pieces": True}),
    ("/tokenize", {"content": [1, "a b", 2]}),
    ("/tokenize", {"content": "<|im_start|>", "parse_special": False}),
    ("/tokenize", {}),
    ("/tokenize", b"null"),
    ("/detokenize", {"tokens": [1, 2, 300, 9999]}),
    ("/detokenize", {}),
    ("/apply-template", {"messages": USER}),
    ("/apply-template", {"messages": [*USER, {"role": "assistant", "content": "I think"}]}),
    ("/apply-template", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 2}]}),
    ("/completion", {"prompt": "word " * 3000}),
    ("/completion", {"prompt": []}),
    ("/completion", {"prompt": 5}),
    ("/completion", {"prompt": [1, 999999]}),
    ("/completion", {"prompt": "a", "n_predict": -5}),
    ("/completion", {"prompt": "a", "n": 99}),
    ("/completion", {"prompt": "a", "repeat_last_n": -1}),
    ("/v1/chat/completions", {}),
    ("/v1/chat/completions", {"messages": "x"}),
    ("/v1/chat/completions", {"messages": [{"role": "user"}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}),
    ("/v1/chat/completions", {"messages": USER, "top_logprobs": 5}),
    ("/v1/chat/completions", {"messages": USER, "tool_choice": "zz"}),
    ("/v1/chat/completions", {"messages": USER, "response_format": {"type": "zzz"}}),
    ("/embedding", {"content": "x"}),
    ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ("/props", {}),
    ("/slots/0?action=save", {}),
    ("/nope", {}),
    ("/health", {}),
]


@pytest.mark.parametrize(("path", "body"), SAME_ANSWER)
def test_answers_are_equal(servers: Pair, path: str, body: Any) -> None:
    assert ask(servers.ours, path, body) == ask(servers.theirs, path, body)


SAME_KIND_OF_ERROR = [
    ("/completion", b"{bad"),
    ("/completion", b""),
    ("/completion", {}),
    ("/completion", {"prompt": "a", "n_predict": "x"}),
    ("/completion", {"prompt": "a", "stop": [5]}),
    ("/completion", {"prompt": "a", "stream": "yes"}),
    ("/completion", {"prompt": "a", "cache_prompt": 1}),
    ("/completion", {"prompt": "a", "lora": 5}),
    ("/tokenize", {"content": 5}),
    ("/tokenize", b'{"content":"\xff"}'),
    ("/tokenize", b'{"content":"\\ud800"}'),
    ("/tokenize", b'{"content":NaN}'),
    ("/tokenize", b'{"content":1e999}'),
    ("/detokenize", {"tokens": "x"}),
    ("/infill", {}),
]


@pytest.mark.parametrize(("path", "body"), SAME_KIND_OF_ERROR)
def test_errors_have_the_same_status_and_type(servers: Pair, path: str, body: Any) -> None:
    ours, theirs = ask(servers.ours, path, body), ask(servers.theirs, path, body)
    assert ours[0] == theirs[0] and set(ours[1]["error"]) == set(theirs[1]["error"])
    assert ours[1]["error"]["type"] == theirs[1]["error"]["type"]


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/props", "/slots", "/lora-adapters"])
def test_monitoring_has_the_same_shape(servers: Pair, path: str) -> None:
    ours, theirs = httpx.get(f"{servers.ours}{path}").json(), httpx.get(f"{servers.theirs}{path}").json()
    if path == "/slots":  # the slots' history differs
        assert len(ours) == len(theirs)
        ours, theirs = ([max(slots, key=len)] for slots in (ours, theirs))
    assert shape(ours) - OWN_FIELDS == shape(theirs) - OWN_FIELDS


def test_model_facts_are_equal(servers: Pair) -> None:
    ours, theirs = (httpx.get(f"{url}/v1/models").json()["data"][0] for url in (servers.ours, servers.theirs))
    assert ours["meta"] == theirs["meta"] and ours["id"] == theirs["id"] == "m"
    ours, theirs = (httpx.get(f"{url}/props").json() for url in (servers.ours, servers.theirs))
    for key in ("total_slots", "model_ftype", "chat_template", "bos_token", "eos_token", "chat_template_caps"):
        assert ours[key] == theirs[key], key
    params = ours["default_generation_settings"]["params"]
    for key, value in theirs["default_generation_settings"]["params"].items():
        assert params[key] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), key


def test_metrics_have_the_same_names(servers: Pair) -> None:
    def names(url: str) -> set[str]:
        text = httpx.get(f"{url}/metrics").text
        return {line.split()[0] for line in text.splitlines() if line and not line.startswith("#")}

    # This server has no drafts to count.
    theirs = {name for name in names(servers.theirs) if "spec_decode" not in name}
    assert theirs <= names(servers.ours)
