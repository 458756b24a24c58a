"""`/tools`: llama-server's bodies, and access."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes import client, events
from waiting import GUARD

from llamado.http.access import AccessRules
from llamado.tools import toolbox
from llamado.tools.api import ToolsApi
from llamado.tools.builtin import search, shell
from llamado.tools.errors import ToolsError
from llamado.tools.settings import ToolSettings

LOCAL = {"host": "localhost:8080"}


def settings(folder: Path, names: str = "all") -> ToolSettings:
    return ToolSettings(builtin=tuple(names.split(",")), folder=str(folder))


async def call(http: httpx.AsyncClient, tool: str, headers: dict[str, str] | None = None, **params: Any) -> Any:
    answer = await http.post("/tools", json={"tool": tool, "params": params}, headers=LOCAL | (headers or {}))
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_no_tools_are_offered_by_default() -> None:
    async with client() as http:
        for answer in (
            await http.get("/tools", headers=LOCAL),
            await http.post("/tools", json={"tool": "get_info"}, headers=LOCAL),
        ):
            assert answer.status_code == 403
            error = {"message": "this feature is disabled", "type": "feature_disabled"}
            assert answer.json() == {"error": error}


async def test_tools_are_listed(tmp_path: Path) -> None:
    async with client(tools=settings(tmp_path, "get_info,read_file")) as http:
        listed = (await http.get("/tools", headers=LOCAL)).json()
        assert [tool["tool"] for tool in listed] == ["read_file", "get_info"]
        first = listed[0]
        assert first["permissions"] == {"write": False} and first["uses_cwd"] and first["type"] == "server"
        assert first["definition"]["function"]["parameters"]["required"] == ["path"]
        answer = await http.post("/tools", json={"tool": "write_file", "params": {}}, headers=LOCAL)
        assert answer.status_code == 404


async def test_calls(tmp_path: Path) -> None:
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "secret").write_text("secret")
    os.symlink("../secret", tmp_path / "in" / "link")

    async with client(tools=settings(tmp_path / "in")) as http:
        written = await call(http, "write_file", path="sub/new/a.txt", content="one\ntwo é\nthree\n")
        assert written == {"result": "file written successfully", "path": "sub/new/a.txt", "bytes": 17}
        assert await call(http, "read_file", path="sub/new/a.txt", start_line=2, end_line=2, append_loc=True) == {
            "plain_text_response": "2→two é\n"
        }
        edit = [{"old_text": "two", "new_text": "2"}]
        assert await call(http, "edit_file", {"x-tool-cwd": "sub/new"}, path="a.txt", edits=edit) == {
            "result": "file edited successfully", "path": "a.txt", "edits_applied": 1,
        }  # fmt: skip
        found = await call(http, "read_file", {"x-resp-type": "base64"}, path="sub/new/a.txt")
        assert base64.b64decode(found["base64"]).decode() == "one\n2 é\nthree\n" and found["size_bytes"] == 15
        found = await call(http, "grep_search", path=".", pattern="T.*E", ignore_case=True, context_lines=1)
        assert found["plain_text_response"] == (
            "sub/new/a.txt-2-2 é\nsub/new/a.txt:3:three\n--\n\n---\nTotal matches: 1\n"
        )
        found = await call(http, "file_glob_search", path=".", include="*.txt")
        assert found["entries"] == [{"path": "sub/new/a.txt", "type": "file"}]
        assert found["base"] == str(tmp_path / "in")
        info = await call(http, "get_info", {"x-tool-cwd": str(tmp_path / "in" / "sub")})
        assert info == {"os": info["os"], "cwd": str(tmp_path / "in" / "sub")} and os.uname().release in info["os"]
        ran = await call(http, "exec_shell_command", command="echo here; pwd; exit 4")
        assert ran == {"plain_text_response": f"here\n{tmp_path / 'in'}\n\n[exit code: 4]"}

        for path in ("../secret", str(tmp_path / "secret"), "link", "~/.ssh"):
            for name, more in (
                ("read_file", {}),
                ("write_file", {"content": "x"}),
                ("grep_search", {"pattern": "s"}),
            ):
                found = await call(http, name, path=path, **more)
                assert list(found) == ["error"], (path, name)
            found = await call(http, "file_glob_search", path=path)
            assert list(found) == ["error"], path
        for cwd in ("..", "/", "link", "none"):
            assert "error" in await call(http, "read_file", {"x-tool-cwd": cwd}, path="sub/new/a.txt"), cwd
        # A model cannot set these.
        assert "error" in await call(http, "read_file", path="a.txt", cwd="sub/new", resp_type="base64")
    assert (tmp_path / "secret").read_text() == "secret"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({}, '"tool" must be a string'),
        ({"tool": "read_file"}, '"path" is missing'),
        ({"tool": "read_file", "params": {"path": 3}}, '"path" must be a string'),
        ({"tool": "get_info", "stream": "x"}, '"stream" must be true or false'),
        ({"tool": "edit_file", "params": {"path": "a", "edits": [3]}}, '"edits" must hold objects'),
    ],
)
async def test_invalid_calls(tmp_path: Path, body: Any, why: str) -> None:
    async with client(tools=settings(tmp_path)) as http:
        answer = await http.post("/tools", json=body, headers=LOCAL)
        assert answer.status_code == 400
        assert answer.json() == {"code": 400, "message": why, "type": "invalid_request_error"}


async def test_output_is_streamed_while_a_command_runs(tmp_path: Path) -> None:
    async with client(tools=settings(tmp_path)) as http:
        body = {"tool": "exec_shell_command", "params": {"command": "echo a; exit 2"}, "stream": True}
        answer = await http.post("/tools", json=body, headers=LOCAL)
        assert answer.headers["content-type"] == "text/event-stream"
        reply = [json.loads(event) for event in events(answer.text)]
        assert reply == [{"chunk": "a\n"}, {"chunk": "\n[exit code: 2]"}, {"done": True}]
        body["params"] = {}
        reply = [json.loads(e) for e in events((await http.post("/tools", json=body, headers=LOCAL)).text)]
        assert reply == [{"done": True, "error": '"command" is missing'}]
        body = {"tool": "read_file", "params": {"path": "a"}, "stream": True}
        assert (await http.post("/tools", json=body, headers=LOCAL)).status_code == 404


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("(a|aa)+$", "Total matches: 0\nEND"),
        ("(a+)+$", "Total matches: 0\nEND"),
        ("a{1000000000}", "repeats too often"),
        ("((a{100}){100}){100}", "invalid repetition size"),
        ("(?R)", "look-around and back-references are not supported"),
        ("|".join(f"word{i}" for i in range(200_000)), "at most 4000 are allowed"),
        (r"(?:\pL\pN){100}", "too large"),
        ("(", "missing )"),
    ],
    ids=lambda value: str(value)[:20],
)
async def test_patterns_of_models_take_linear_time(tmp_path: Path, pattern: str, found: str) -> None:
    """A backtracking engine needs minutes for the first two, and gigabytes for the others."""
    (tmp_path / "a").write_text("a" * 60 + "b\n")

    async with client(tools=settings(tmp_path)) as http:
        result = await call(http, "grep_search", path="a", pattern=pattern)
        assert found in result.get("error", "") + result.get("plain_text_response", "") + "END"
        for name in ("include", "exclude"):
            result = await call(http, "file_glob_search", path=".", **{name: "*a" * 1500 + pattern})
            assert "error" in result or "Total matches: " in result["plain_text_response"]


async def test_slow_commands_delay_no_other_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("text")
    os.mkfifo(tmp_path / "never")
    monkeypatch.setattr(toolbox, "AT_ONCE", 2)
    command = "touch started-$$; read x < never"

    async with client(tools=settings(tmp_path)) as http, asyncio.timeout(60):
        slow = [asyncio.ensure_future(call(http, "exec_shell_command", command=command, timeout=60)) for _ in range(4)]
        while len(list(tmp_path.glob("started-*"))) < 2:
            await asyncio.sleep(0.01)
        assert await call(http, "read_file", path="a") == {"plain_text_response": "text\n"}
        assert not any(task.done() for task in slow)
        for task in slow:
            task.cancel()
        await asyncio.wait(slow)


async def test_a_search_ends_at_its_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("line\n")
    monkeypatch.setattr(search, "SECONDS", -1.0)

    async with client(tools=settings(tmp_path)) as http:
        found = await call(http, "grep_search", path="a", pattern="line")
        assert found["plain_text_response"].startswith("\n---\nTotal matches: 0\n[results truncated: time budget")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "127.0.0.1:8080"}, 200),
        ({"host": "[::1]:8080"}, 200),
        ({"host": "a.localhost"}, 200),
        ({"origin": "http://localhost:5173"}, 200),
        ({"host": "192.168.0.7:8080", "origin": "http://192.168.0.7:8080"}, 200),
        ({"host": "evil.example:8080"}, 403),
        ({"host": "evil.example:8080", "origin": "http://evil.example:8080", "sec-fetch-site": "same-origin"}, 403),
        ({"host": "localhost.evil.example"}, 403),
        ({"host": "127.0.0.1.evil.example"}, 403),
        ({"host": "[::1"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"x-forwarded-for": "10.0.0.1"}, 403),
        ({"forwarded": "for=10.0.0.1"}, 403),
        ({"x-forwarded-host": "localhost:8080"}, 403),
        ({"x-real-ip": "10.0.0.1"}, 403),
    ],
)
async def test_without_a_key_only_clients_of_this_machine_may_call(
    tmp_path: Path, headers: dict[str, str], status: int
) -> None:
    async with client(tools=settings(tmp_path)) as http:
        given = LOCAL | headers
        assert (await http.get("/tools", headers=given)).status_code == status
        assert (await http.post("/tools", json={"tool": "get_info"}, headers=given)).status_code == status

    async with client(tools=settings(tmp_path), access=AccessRules(api_keys=(b"sesame",))) as http:
        assert (await http.get("/tools", headers=given)).status_code == 401
        given["authorization"] = "Bearer sesame"
        assert (await http.get("/tools", headers=given)).status_code == 200


def test_a_key_is_required_if_other_machines_could_call() -> None:
    tools = ToolSettings(builtin=("get_info",))
    keys = AccessRules(api_keys=(b"k",))
    for hosts in (["0.0.0.0"], ["127.0.0.1", "192.168.0.7"], ["::"], ["my-machine"]):
        with pytest.raises(ToolsError, match="--api-key"):
            ToolsApi.open(tools, AccessRules(), hosts)
        ToolsApi.open(tools, keys, hosts).close()
        ToolsApi.open(ToolSettings(), AccessRules(), hosts)
    for hosts in (["127.0.0.1"], ["::1", "localhost"], ["/run/l.sock"]):
        ToolsApi.open(tools, AccessRules(), hosts).close()
    with pytest.raises(ToolsError, match="--cors-origins"):
        ToolsApi.open(tools, AccessRules(cors_origins="*"), ["127.0.0.1"])
    with pytest.raises(ToolsError, match=r'unknown tool "shell"\. available tools: read_file, file_glob_search'):
        ToolsApi.open(ToolSettings(builtin=("shell",)), AccessRules(), ["127.0.0.1"])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_disconnect_ends_its_command(
    tmp_path: Path, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell, "_MOST_SECONDS", 10 * GUARD)

    params = {"command": "sleep 1000 & echo $! > pid; wait", "timeout": 1000}
    body = {"tool": "exec_shell_command", "params": params, "stream": stream}
    async with client(tools=settings(tmp_path)) as http:
        messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
                await asyncio.sleep(0.02)
            return {"type": "http.disconnect"}

        async def send(_: Any) -> None:
            pass

        scope = {
            "type": "http", "method": "POST", "path": "/tools", "raw_path": b"/tools", "query_string": b"",
            "headers": [(b"host", b"localhost")], "client": ("127.0.0.1", 1), "asgi": {"spec_version": "2.3"},
        }  # fmt: skip
        try:
            await http._transport.app(scope, receive, send)  # type: ignore[attr-defined]
        except Exception as error:
            assert "went away" in str(error)
        pid = int((tmp_path / "pid").read_text())
        async with asyncio.timeout(GUARD):
            while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
                await asyncio.sleep(0.05)
