"""The same prompts as the real llama-server makes of the same conversations, by templates of many families."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from ports import free_port

from llamado.gguf.reader import GGUFFile
from llamado.text.dialects import Content, Conversation, Piece, Reasoning, prepare
from llamado.text.template.chat import ChatTemplate, EndTokens
from llamado.text.template.templates import TEMPLATES
from llamado.text.tokenizer.tokenizer import load_tokenizer

pytestmark = [pytest.mark.interop, pytest.mark.full]

FOLDER = Path(__file__).parent / "templates"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Where"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "noop"}},
]


def call(number: int, name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": f"call{number:05d}", "type": "function", "function": function}


def result(number: int, name: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call{number:05d}", "name": name, "content": content}


USER = {"role": "user", "content": "Weather?"}
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "system": {"messages": [{"role": "system", "content": "Be brief."}, USER]},
    "turns": {
        "messages": [
            {"role": "system", "content": "S"},
            {"role": "user", "content": " Hi "},
            {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "How?\n"},
        ]
    },
    "tools": {"messages": [{"role": "user", "content": "Weather in Köln?"}], "tools": TOOLS},
    "result": {
        "messages": [
            {"role": "system", "content": "S"},
            USER,
            {"role": "assistant", "content": None, "tool_calls": [call(1, "get_weather", city="Köln", days=2)]},
            result(1, "get_weather", '{"sun": true}'),
        ],
        "tools": TOOLS,
    },
    "parallel": {
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": "Let me see.",
                "reasoning_content": "I should look.",
                "tool_calls": [call(1, "get_weather", city='A "b"'), call(2, "noop")],
            },
            result(1, "get_weather", "sun"),
            result(2, "noop", "ok"),
            {"role": "assistant", "content": "Sun."},
            {"role": "user", "content": "Thanks"},
        ],
        "tools": TOOLS,
    },
    "thoughts": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "c", "reasoning_content": "thought"},
            {"role": "user", "content": "d"},
        ],
        "chat_template_kwargs": {"enable_thinking": False},
    },
}


@contextmanager
def server(peer_bin: Path, model: Path, *options: str) -> Iterator[httpx.Client]:
    """A real llama-server."""
    port = free_port()
    command = [
        str(peer_bin / "llama-server"),
        "-m",
        str(model),
        "--port",
        str(port),
        "-c",
        "512",
        "-np",
        "1",
        "-t",
        "1",
    ]
    process = subprocess.Popen(
        [*command, "--no-warmup", "-ngl", "0", *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            for _ in range(2400):
                assert process.poll() is None, "llama-server ended"
                try:
                    if client.get("/health").status_code == 200:
                        break
                except httpx.HTTPError:
                    pass
                time.sleep(0.05)
            yield client
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def ends(smollm2_path: Path) -> tuple[str, str]:
    """Return the texts of the model's first and last token."""
    with GGUFFile.open(smollm2_path) as file:
        tokenizer = load_tokenizer(file.metadata)
        found = []
        for token in (tokenizer.bos, tokenizer.eos):
            assert token is not None
            found.append(tokenizer.piece(token, special=True).decode())
        return found[0], found[1]


@pytest.mark.parametrize("name", NAMES)
def test_prompts_and_capabilities(name: str, peer_bin: Path, smollm2_path: Path, ends: tuple[str, str]) -> None:
    path = FOLDER / f"{name}.jinja"
    template = ChatTemplate(path.read_text(), EndTokens(ends[0], ends[1]))
    with server(peer_bin, smollm2_path, "--jinja", "--chat-template-file", str(path)) as client:
        assert template.caps == client.get("/props").json()["chat_template_caps"]
        for title, conversation in CONVERSATIONS.items():
            if name == "plain" and "tools" in conversation:
                continue  # llama-server says nothing of the tools to a model whose template knows none
            answer = client.post("/apply-template", json=conversation)
            request = Conversation(
                messages=conversation["messages"],
                tools=conversation.get("tools", ()),
                template_options=conversation.get("chat_template_kwargs", {}),
            )
            if answer.status_code != 200:
                with pytest.raises(Exception, match=r"."):
                    prepare(template, request)
                continue
            assert prepare(template, request).prompt == answer.json()["prompt"], title


def told(pieces: list[Piece]) -> tuple[str, str]:
    thoughts = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    return thoughts, "".join(piece.text for piece in pieces if isinstance(piece, Content))


ANSWERS = [
    "<think>\nI'm\nthinking\n</think>\n\nHello ",
    "  <think>a</think>b",
    "<think>  </think>x",
    "x <think>a</think> y",
    "<think>\n\na\n\n</think>\n\n\n\nHello\n\n",
]


def test_thoughts(peer_bin: Path, smollm2_path: Path, ends: tuple[str, str]) -> None:
    """Answers that a grammar forces out of the real server are read alike."""
    path = FOLDER / "hermes.jinja"
    template = ChatTemplate(path.read_text(), EndTokens(ends[0], ends[1]))
    with server(peer_bin, smollm2_path, "--jinja", "--chat-template-file", str(path)) as client:
        for text in ANSWERS:
            for format in ("auto", "none"):
                body = {
                    "messages": [USER],
                    "grammar": "root ::= " + json.dumps(text),
                    "max_tokens": 60,
                    "reasoning_format": format,
                }
                message = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
                parser = prepare(template, Conversation(messages=[USER], reasoning_format=format)).parser()
                assert told(parser.push(text) + parser.finish()) == (
                    message.get("reasoning_content") or "",
                    message["content"],
                ), (text, format)


TALK = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": " U1 "},
    {"role": "assistant", "content": " A1 "},
    {"role": "user", "content": "U2"},
]


@pytest.mark.parametrize("name", ["bailing2", "gigachat", "kimi-k2", "mistral-v3", "openchat", "yandex"])
def test_built_in_templates(name: str, peer_bin: Path, smollm2_path: Path, ends: tuple[str, str]) -> None:
    template = ChatTemplate(TEMPLATES[name], EndTokens(ends[0], ends[1]), as_given=True)
    with server(peer_bin, smollm2_path, "--no-jinja", "--chat-template", name) as client:
        for messages in (TALK, TALK[1:]):
            answer = client.post("/apply-template", json={"messages": messages}).json()
            assert template.render(messages) == answer["prompt"]
