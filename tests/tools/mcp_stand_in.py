"""A small MCP server with misbehaving tools. Modes: `hang` (never responds), `fail` (exits at once)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

TEXT = {"type": "object", "properties": {"text": {"type": "string"}}}
NAMES = [
    "echo",
    "fail",
    "crash",
    "wait",
    "flood",
    "long_line",
    "stderr",
    "garbage",
    "orphan",
    "many",
    "bad_result",
    "parts",
]


def say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def call(name: str, arguments: dict[str, Any], id: int) -> dict[str, Any] | None:
    text = arguments.get("text", "")
    if name == "crash":
        os._exit(3)
    if name == "wait":
        time.sleep(float(text))
    if name == "flood":
        note = json.dumps({"jsonrpc": "2.0", "method": "notifications/message", "params": {"data": "x"}}) + "\n"
        while True:
            sys.stdout.write(note * 1000)
    if name == "long_line":
        while True:
            sys.stdout.write("x" * 65536)
    if name == "stderr":
        for _ in range(200):
            sys.stderr.write("x" * 65536 + "\n")
    if name == "garbage":
        sys.stdout.write("no json\n[]\n{}\n\n" + '{"jsonrpc": "2.0", "id": 12345, "result": {}}\n')
    if name == "orphan":
        # A grandchild that leaves the process group and keeps the pipes open.
        text = str(subprocess.Popen(["sleep", "60"], start_new_session=True).pid)
    if name == "many":
        for i in range(100):
            say({"jsonrpc": "2.0", "id": f"ask-{i}", "method": "sampling/createMessage", "params": {}})
    if name == "parts":
        return {"content": [{"type": "text", "text": "x"}] * int(text)}
    if name == "bad_result":
        return {"content": 3}
    return {"content": [{"type": "text", "text": text}, {"type": "text", "text": name}], "isError": name == "fail"}


def main() -> None:
    mode = sys.argv[1] if len(sys.argv) > 1 else ""
    if mode == "fail":
        sys.exit("cannot start: no such file")
    if mode == "hang":
        time.sleep(60)
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message or "method" not in message:
            continue
        params = message.get("params", {})
        result: dict[str, Any] | None = {}
        if message["method"] == "initialize":
            info = {"name": "stand-in", "version": "1"}
            result = {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": info}
        elif message["method"] == "tools/list":
            first = not params.get("cursor")
            shown = NAMES[:4] if first else NAMES[4:]
            tools = [{"name": name, "description": f"does {name}", "inputSchema": TEXT} for name in shown]
            result = {"tools": tools, **({"nextCursor": "more"} if first else {})}
        elif message["method"] == "tools/call":
            result = call(params["name"], params.get("arguments", {}), message["id"])
        say({"jsonrpc": "2.0", "id": message["id"], "result": result})


if __name__ == "__main__":
    main()
