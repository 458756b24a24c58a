"""`exec_shell_command` and `get_info`."""

from __future__ import annotations

from typing import Any

from llamado.tools.builtin.tool import BuiltinTool
from llamado.tools.host import ToolHost
from llamado.tools.tool import Call, schema

# tools/server/server-tools.cpp, b11434.
_SECONDS, _MOST_SECONDS = 10, 60
_BYTES = 16 * 1024
_INFO_BYTES, _INFO_SECONDS = 4096, 5.0


class ExecShellCommand(BuiltinTool):
    """Runs a shell command and returns its output."""

    name, title, writes, streams = "exec_shell_command", "Execute shell command", True, True
    description = "Execute a shell command and give its output (what it prints, errors among it)."
    parameters = schema(
        "command",
        command=("string", "Shell command to execute"),
        timeout=("integer", f"Seconds it may take (default {_SECONDS}, max {_MOST_SECONDS})"),
        max_output_size=("integer", f"Bytes of output at most (default {_BYTES})"),
    )

    def run_on(self, host: ToolHost, call: Call) -> dict[str, Any]:
        limit = call.number("max_output_size", _BYTES)
        result = host.run(
            ["sh", "-c", call.text("command").replace("\0", "")],
            limit=min(limit, _BYTES) if limit >= 0 else _BYTES,
            seconds=min(call.number("timeout", _SECONDS), _MOST_SECONDS),
            on_output=call.on_output,
            is_stopped=call.is_stopped,
        )
        end = f"\n[exit code: {result.code}]" + (" [exit due to timed out]" if result.timed_out else "")
        if call.on_output is not None:
            call.on_output(end)
            return {}
        return {"plain_text_response": result.text + end}


class GetInfo(BuiltinTool):
    """Reports the system and the working directory."""

    name, title = "get_info", "Get Runtime Info"
    description = "Tells the name and version of the operating system, and the current working directory"
    parameters = schema()

    def run_on(self, host: ToolHost, call: Call) -> dict[str, Any]:
        system = host.run(["uname", "-a"], limit=_INFO_BYTES, seconds=_INFO_SECONDS)
        cwd = host.cwd
        if not cwd:
            result = host.run(["pwd"], limit=_INFO_BYTES, seconds=_INFO_SECONDS)
            cwd = result.text.strip() if result.ok else "unknown"
        return {"os": system.text.strip() if system.ok else "unknown", "cwd": cwd}
