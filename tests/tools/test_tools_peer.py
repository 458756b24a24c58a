"""The same calls to llama-server and to llamado, each in its own folder, give the same responses and files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from ports import free_port
from test_mcp_servers import stand_in

pytestmark = [pytest.mark.interop, pytest.mark.full]


@contextmanager
def serving(command: Sequence[str], folder: Path, *options: str) -> Iterator[httpx.Client]:
    """Start a server without a model in a folder; yield its client."""
    port = free_port()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    log = folder.with_suffix(".log")
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--port", str(port), *options], cwd=folder, env=environment, stdout=out, stderr=out
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            deadline = time.monotonic() + 120
            while True:
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                try:
                    if client.get("/health").status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                time.sleep(0.05)
            yield client
    finally:
        process.terminate()
        process.wait()


def fill(folder: Path) -> Path:
    for path, text in {
        "a.txt": "hello\nworld\n\nlast",
        "sub/b.py": "x = 1\nprint('hello')\n",
        "sub/deep/c.md": "".join(f"line {i}\n" for i in range(5000)),
        ".venv/x/y.py": "hello\n",
        "crlf.txt": "one\r\ntwo\r\n",
        "fuzzy.txt": "say “hello”   \nkeep — me  \nnext line\t\nend",
        "dup.txt": "a b\na b \nc\n",
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(text.encode())
    (folder / "bytes.dat").write_bytes(bytes(range(256)))
    (folder / "link").symlink_to("a.txt")
    (folder / "folder").symlink_to("sub")
    return folder


def of(*edits: tuple[str, str]) -> list[dict[str, str]]:
    return [{"old_text": old, "new_text": new} for old, new in edits]


READ: list[dict[str, Any]] = [
    {"path": "a.txt"}, {"path": "a.txt", "start_line": 2, "append_loc": True}, {"path": "none"}, {"path": "sub"},
    {"path": "a.txt", "start_line": 2, "end_line": 2}, {"path": "a.txt", "start_line": "x"}, {}, {"path": 3},
    {"path": "a.txt", "start_line": 2.7}, {"path": "sub/deep/c.md"}, {"path": "sub/deep/c.md", "end_line": 4999},
    {"path": "sub/deep/c.md", "start_line": 3000, "end_line": 3002, "append_loc": True}, {"path": "crlf.txt"},
    {"path": "bytes.dat"}, {"path": "link"}, {"path": "folder/b.py"}, {"path": "sub/../a.txt"},
]  # fmt: skip
RUN: list[dict[str, Any]] = [
    {"command": command}
    for command in (
        "echo hi; exit 3", "kill -9 $$", "exit 130", "echo e >&2; echo o", r"printf '\xff\xfe'", "echo é", "cat",
        "true", "seq 1 100000",
    )
] + [{"command": "sleep 5", "timeout": 1}, {"command": "seq 1 10", "max_output_size": 5}, {}]  # fmt: skip
FIND: list[dict[str, Any]] = [
    {"path": ".", "include": pattern}
    for pattern in (
        "*.py", "**", "sub/*.py", "**/b.py", "sub/**", "[ab].txt", "[!a]*.txt", "?.txt", "*.{py,md}", "/a.txt",
        "deep/*", "[", "[]]", "[z-a]", "*",
    )
] + [
    {"path": ".", "type": "dir"}, {"path": ".", "type": "all"}, {"path": ".", "type": "x"}, {"path": "none"},
    {"path": ".", "type": "all", "max_depth": 1}, {"path": ".", "max_depth": 2}, {"path": ".", "limit": 0},
    {"path": "sub", "exclude": "*.md"}, {"path": "a.txt"}, {"path": "folder"}, {"path": "sub/.."}, {},
]  # fmt: skip
GREP: list[dict[str, Any]] = [
    {"path": ".", "pattern": pattern} for pattern in ("o", "hel+o", "^x", "(", r"print\(", r"\d+$", "line 49..")
] + [
    {"path": "a.txt", "pattern": "o", "context_lines": 1}, {"path": "none", "pattern": "x"}, {"path": "."},
    {"path": "a.txt", "pattern": "HELLO", "ignore_case": True, "return_line_numbers": True},
    {"path": ".", "pattern": "print(", "literal": True, "include": "*.py"}, {"path": "bytes.dat", "pattern": "A"},
    {"path": "sub", "pattern": "line", "exclude": "*.md"}, {"path": "crlf.txt", "pattern": "one$"},
    {"path": "sub/deep", "pattern": "line"},
]  # fmt: skip
WRITE: list[dict[str, Any]] = [
    {"path": "n/w.txt", "content": "héé"}, {"path": "sub", "content": "x"}, {"path": "a.txt/x", "content": "x"},
    {"path": "link", "content": "through\n"}, {"path": "x"}, {"path": "sub/deep/c.md", "content": ""},
]  # fmt: skip
EDIT: list[dict[str, Any]] = [
    {"path": path, "edits": edits}
    for path, edits in (
        ("a.txt", of(("through", "T"))), ("a.txt", []), ("a.txt", of(("zz", "y"))), ("a.txt", of(("", "y"))),
        ("dup.txt", of(("a b", "y"))), ("dup.txt", of(("a b \n", "y"))), ("dup.txt", of(("c", "d"), ("b \nc", "e"))),
        ("fuzzy.txt", of(('say "hello"', "SAID"))), ("fuzzy.txt", of(("keep - me", "KEPT"), ("end", "fin"))),
        ("fuzzy.txt", of(("next line\nfin", "x\ny"))), ("crlf.txt", of(("one\ntwo", "1\n2"))),
        ("crlf.txt", of(("1", "1"))), ("none", of(("a", "b"))), ("bytes.dat", of(("ABC", "abc"))), ("a.txt", "x"),
        ("sub/b.py", of(("x = 1", "x = 2"), ("print('hello')", "print(x)"))), ("a.txt", [{"old_text": "a"}]),
    )
]  # fmt: skip
TABLE = {
    "read_file": READ, "exec_shell_command": RUN, "file_glob_search": FIND, "grep_search": GREP, "write_file": WRITE,
    "edit_file": EDIT, "get_info": [{}], "none": [{}],
}  # fmt: skip


def comparable(answer: httpx.Response, folder: Path) -> Any:
    """Return a response without what may differ: folder, order of results, wording of some errors."""
    if not answer.headers["content-type"].startswith("application/json"):
        return answer.status_code, answer.headers["content-type"], answer.text
    body = json.loads(answer.text.replace(str(folder), "FOLDER"))
    if answer.status_code == 400:
        body["message"] = ""
    if isinstance(body.get("error"), str):
        body["error"] = re.sub(r"(invalid regex|failed to write file: [^:]*):? .*", r"\1", body["error"])
    if (
        "\n---\nTotal matches" in body.get("plain_text_response", "")
        and "limit reached" not in body["plain_text_response"]
    ):
        body["plain_text_response"] = sorted(body["plain_text_response"].split("\n"))
    if "entries" in body:
        body["entries"].sort(key=lambda entry: entry["path"])
    return answer.status_code, answer.headers["content-type"], body


@pytest.fixture(scope="module")
def both(peer_bin: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[tuple[httpx.Client, Path]]]:
    base = tmp_path_factory.mktemp("tools")
    folders = [fill(base / name) for name in ("peer", "ours")]
    config = base / "mcp.json"
    config.write_text(json.dumps({"mcpServers": {"s": stand_in(timeout_ms=1000), "no": {"command": "/no/such"}}}))
    options = ("--tools", "all", "--mcp-servers-config", str(config), "--ui-mcp-proxy")
    peer = serving([str(peer_bin / "llama-server"), "--no-ui"], folders[0], *options)
    ours = serving([sys.executable, "-m", "llamado", "serve"], folders[1], *options)
    with peer as a, ours as b:
        yield [(a, folders[0]), (b, folders[1])]


@pytest.mark.parametrize("tool", TABLE)
def test_calls(both: list[tuple[httpx.Client, Path]], tool: str) -> None:
    for params in TABLE[tool]:
        answers = [
            comparable(http.post("/tools", json={"tool": tool, "params": params}), folder) for http, folder in both
        ]
        assert answers[0] == answers[1], params
    files = [
        {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for _, folder in both
    ]
    assert files[0] == files[1]


def test_headers_and_streams(both: list[tuple[httpx.Client, Path]]) -> None:
    for headers, body in (
        ({"x-resp-type": "base64"}, {"tool": "read_file", "params": {"path": "bytes.dat"}}),
        ({"x-tool-cwd": "{}/sub"}, {"tool": "read_file", "params": {"path": "b.py"}}),
        ({"x-tool-cwd": "{}/sub"}, {"tool": "read_file", "params": {"path": "../dup.txt"}}),
        ({"x-tool-cwd": "{}/sub"}, {"tool": "get_info"}),
        ({}, {"tool": "get_info", "stream": "x"}),
        ({}, {"tool": "get_info", "stream": True}),
        ({}, {"params": {}}),
        ({}, {"tool": "exec_shell_command", "params": {"command": "echo a; sleep 0.5; echo b"}, "stream": True}),
        ({}, {"tool": "exec_shell_command", "params": {"command": "echo a; sleep 9", "timeout": 3}, "stream": True}),
        ({}, {"tool": "s_echo", "params": {"text": "x"}, "stream": True}),
        ({}, {"tool": "s_echo", "params": {"text": "x"}}),
        ({}, {"tool": "s_fail", "params": {"text": "x"}}),
        ({}, {"tool": "s_wait", "params": {"text": "4"}}),
        ({}, {"tool": "s_nothing"}),
    ):
        answers = []
        for http, folder in both:
            named = {name: value.replace("{}", str(folder)) for name, value in headers.items()}
            answers.append(comparable(http.post("/tools", json=body, headers={**named, "connection": "close"}), folder))
        assert answers[0] == answers[1], (headers, body)


def test_lists(both: list[tuple[httpx.Client, Path]]) -> None:
    lists = [http.get("/tools").json() for http, _ in both]
    for tools in lists:
        for tool in tools:
            # Descriptions of tools are our own.
            tool["definition"] = re.sub(r'"description": "([^"\\]|\\.)*"', "", json.dumps(tool["definition"]))
    # llama-server lists only the first page of an MCP server's tools.
    assert lists[0] == lists[1][: len(lists[0])] and len(lists[0]) == 7 + 4 and len(lists[1]) == 7 + 12


def test_the_proxy(both: list[tuple[httpx.Client, Path]]) -> None:
    target = str(both[0][0].base_url)
    for url in (f"{target}/health", f"{target}/none", "", "ftp://x/", "http://u:p@127.0.0.1/"):
        answers = [http.get("/cors-proxy", params={"url": url}) for http, _ in both]
        assert answers[0].status_code == answers[1].status_code, url
        assert answers[0].json() == answers[1].json(), url
