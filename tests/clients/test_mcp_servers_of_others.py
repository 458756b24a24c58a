"""The Model Context Protocol's own servers (files, everything, time) behind `--mcp-servers-config`.

Every tool of theirs is called directly, and by a model in a chat.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import running
from openai import OpenAI
from ports import free_port

PROGRAMS = Path(sys.prefix)
NODE = PROGRAMS / "mcp" / "node_modules" / ".bin"
KEY = "sesame"
TEXT = "one\ntwo\nthree\n"
PICTURE = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010806000000 1f15c4890000000d49444154789c6360606060000000050001"
    "a5f645400000000049454e44ae426082".replace(" ", "")
)


class Tools:
    """A server with tools: `call` makes a call, as a page or a client does."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder
        self.http = httpx.Client(base_url=url, timeout=120, headers={"authorization": f"Bearer {KEY}"})
        self.listed = {tool["tool"]: tool for tool in self.http.get("/tools").raise_for_status().json()}

    def call(self, name: str, /, **params: Any) -> dict[str, Any]:
        answer = self.http.post("/tools", json={"tool": name, "params": params})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found


@pytest.fixture(scope="module")
def web() -> Iterator[str]:
    """The server of everything over streamable HTTP."""
    port = free_port()
    process = subprocess.Popen(
        [str(NODE / "mcp-server-everything"), "streamableHttp"],
        env=os.environ | {"PORT": str(port)}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            break
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
    yield f"http://127.0.0.1:{port}/mcp"
    process.terminate()
    process.wait()


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory, web: str) -> Iterator[Tools]:
    base = tmp_path_factory.mktemp("mcp")
    folder = (base / "files").resolve()
    folder.mkdir()
    config = base / "mcp.json"
    servers = {
        "files": {"command": str(NODE / "mcp-server-filesystem"), "args": [str(folder)]},
        "everything": {"command": str(NODE / "mcp-server-everything"), "args": ["stdio"]},
        "time": {"command": str(PROGRAMS / "bin" / "mcp-server-time"), "args": ["--local-timezone", "Europe/Madrid"]},
        "web": {"url": web},
    }
    config.write_text(json.dumps({"mcpServers": servers}))
    os.environ["LLAMA_API_KEY"] = KEY
    options = ("--mcp-servers-config", str(config), "--tools", "all", "--tools-folder", str(folder), "-np", "1")
    try:
        with running(base / "log", *options) as url:
            yield Tools(url, folder)
    finally:
        del os.environ["LLAMA_API_KEY"]


def test_all_examples_are_listed(tools: Tools) -> None:
    found = {name.split("_")[0] for name in tools.listed}
    assert {"files", "everything", "time", "web"} <= found
    assert {"read_file", "exec_shell_command", "files_read_file", "time_get_current_time"} <= tools.listed.keys()
    assert sum(name.startswith("everything_") for name in tools.listed) >= 12
    assert httpx.get(f"{tools.url}/tools").status_code == 401


CALLS: list[tuple[str, dict[str, Any], str]] = [
    ("files_write_file", {"path": "PLACE/new.txt", "content": TEXT}, "Successfully wrote"),
    ("files_read_file", {"path": "PLACE/new.txt"}, TEXT),
    ("files_read_text_file", {"path": "PLACE/new.txt", "head": 1}, "one"),
    ("files_read_media_file", {"path": "PLACE/dot.png"}, ""),
    ("files_read_multiple_files", {"paths": ["PLACE/new.txt", "PLACE/dot.png"]}, "three"),
    ("files_edit_file", {"path": "PLACE/new.txt", "edits": [{"oldText": "two", "newText": "2"}]}, "+2"),
    ("files_create_directory", {"path": "PLACE/inner"}, "Successfully created"),
    ("files_list_directory", {"path": "PLACE"}, "] inner"),
    ("files_list_directory_with_sizes", {"path": "PLACE"}, "new.txt"),
    ("files_directory_tree", {"path": "PLACE"}, '"inner"'),
    ("files_move_file", {"source": "PLACE/new.txt", "destination": "PLACE/inner/moved.txt"}, "Successfully moved"),
    ("files_search_files", {"path": "PLACE", "pattern": "**/*.txt"}, "moved.txt"),
    ("files_get_file_info", {"path": "PLACE/inner/moved.txt"}, "size: 12"),
    ("files_list_allowed_directories", {}, "PLACE"),
    ("everything_echo", {"message": "hello"}, "Echo: hello"),
    ("everything_get-annotated-message", {"messageType": "success"}, "success"),
    ("everything_get-env", {}, "PATH"),
    ("everything_get-resource-links", {"count": 2}, "resource links"),
    ("everything_get-resource-reference", {"resourceType": "Text", "resourceId": 1}, "resource"),
    ("everything_get-structured-content", {"location": "Chicago"}, "temperature"),
    ("everything_get-sum", {"a": 2, "b": 40}, "42"),
    ("everything_get-tiny-image", {}, "image"),
    ("everything_gzip-file-as-resource", {"name": "a", "data": "data:text/plain,hi", "outputType": "resourceLink"}, ""),
    ("everything_toggle-simulated-logging", {}, "ogging"),
    ("everything_toggle-subscriber-updates", {}, "updat"),
    ("everything_trigger-long-running-operation", {"duration": 0.2, "steps": 2}, "completed"),
    ("time_get_current_time", {"timezone": "Asia/Tokyo"}, "+09:00"),
    ("time_convert_time", {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"}, "21:00"),
    ("web_echo", {"message": "over HTTP"}, "Echo: over HTTP"),
    ("web_get-sum", {"a": 1, "b": 2}, "3"),
]  # fmt: skip


def test_every_tool_called_directly(tools: Tools) -> None:
    (tools.folder / "dot.png").write_bytes(PICTURE)
    place = str(tools.folder)
    for name, params, expected in CALLS:
        found = tools.call(name, **json.loads(json.dumps(params).replace("PLACE", place)))
        assert list(found) == ["plain_text_response"], (name, found)
        assert expected.replace("PLACE", place) in found["plain_text_response"], (name, found)
        assert KEY not in found["plain_text_response"], name  # not in what get-env says, either
    left = tools.listed.keys() - {name for name, *_ in CALLS}
    assert all(not name.startswith(("files_", "time_")) for name in left)
    assert "error" in tools.call("files_read_file", path="/etc/passwd")
    assert "error" in tools.call("time_get_current_time", timezone="Nowhere")


def test_every_tool_called_by_a_model(tools: Tools) -> None:
    """The model names a tool and arguments; the client requests the call and sends the result back."""
    client = OpenAI(base_url=f"{tools.url}/v1", api_key=KEY)
    harmful = {"exec_shell_command"}  # the model is small, and its commands are not reviewed
    for name, tool in tools.listed.items():
        if name in harmful:
            continue
        messages: list[Any] = [{"role": "user", "content": f"Use {name} now, with short arguments."}]
        answer = client.chat.completions.create(
            model="smollm2",
            messages=messages,
            tools=[tool["definition"]],
            tool_choice={"type": "function", "function": {"name": name}},
            max_tokens=96,
            temperature=0,
        )
        (call,) = answer.choices[0].message.tool_calls or [None]
        assert call is not None and call.function.name == name, name
        try:
            arguments = json.loads(call.function.arguments)
        except ValueError:  # it went on with a text until its tokens were spent
            assert answer.choices[0].finish_reason in ("length", "tool_calls")
            arguments = {}
        if name in ("everything_trigger-long-running-operation", "web_trigger-long-running-operation"):
            arguments = {"duration": 0.1, "steps": 1}
        answered = tools.http.post("/tools", json={"tool": name, "params": arguments})
        assert answered.status_code in (200, 400), (name, answered.text)
        messages += [
            answer.choices[0].message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": answered.text[:500]},
        ]
        told = client.chat.completions.create(model="smollm2", messages=messages, max_tokens=4)
        assert told.choices[0].message.content is not None


def test_no_slot_is_held_while_a_tool_runs(tools: Tools) -> None:
    """A chat gets the only slot while two slow tools run."""
    names = ("exec_shell_command", {"command": "sleep 20", "timeout": 30}), (
        "everything_trigger-long-running-operation", {"duration": 20, "steps": 2},
    )  # fmt: skip
    running = [threading.Thread(target=tools.call, args=(name,), kwargs=params, daemon=True) for name, params in names]
    for thread in running:
        thread.start()
    time.sleep(0.3)
    assert [slot["is_processing"] for slot in tools.http.get("/slots").json()] == [False]
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    assert tools.http.post("/v1/chat/completions", json=body).status_code == 200
    assert all(thread.is_alive() for thread in running)
