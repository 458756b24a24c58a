"""`exec_shell_command` and `get_info`."""

from __future__ import annotations

from typing import Any

from llamado.tools.builtin.tool import BuiltinTool
from llamado.tools.machine import ToolMachine
from llamado.tools.tool import Call, schema

# tools/server/server-tools.cpp, b11434.
_SECONDS, _MOST_SECONDS = 10, 60
_BYTES = 16 * 1024
_INFO_BYTES, _INFO_SECONDS = 4096, 5.0


class ExecShellCommand(BuiltinTool):
    """A command of the shell, and what it says."""

    name, title, writes, streams = "exec_shell_command", "Execute shell command", True, True
    description = "Execute a shell command and give its output (what it prints, errors among it)."
    parameters = schema(
        "command",
        command=("string", "Shell command to execute"),
        timeout=("integer", f"Seconds it may take (default {_SECONDS}, max {_MOST_SECONDS})"),
        max_output_size=("integer", f"Bytes of output at most (default {_BYTES})"),
    )

    def on(self, machine: ToolMachine, call: Call) -> dict[str, Any]:
        limit = call.number("max_output_size", _BYTES)
        ran = machine.run(
            ["sh", "-c", call.text("command").replace("\0", "")],
            limit=min(limit, _BYTES) if limit >= 0 else _BYTES,
            seconds=min(call.number("timeout", _SECONDS), _MOST_SECONDS),
            said=call.said,
            stopped=call.stopped,
        )
        end = f"\n[exit code: {ran.code}]" + (" [exit due to timed out]" if ran.timed_out else "")
        if call.said is not None:
            call.said(end)
            return {}
        return {"plain_text_response": ran.text + end}


class GetInfo(BuiltinTool):
    """The system, and the folder that tools work in."""

    name, title = "get_info", "Get Runtime Info"
    description = "Tells the name and version of the operating system, and the current working directory"
    parameters = schema()

    def on(self, machine: ToolMachine, call: Call) -> dict[str, Any]:
        system = machine.run(["uname", "-a"], limit=_INFO_BYTES, seconds=_INFO_SECONDS)
        cwd = machine.cwd
        if not cwd:
            ran = machine.run(["pwd"], limit=_INFO_BYTES, seconds=_INFO_SECONDS)
            cwd = ran.text.strip() if ran.ok else "unknown"
        return {"os": system.text.strip() if system.ok else "unknown", "cwd": cwd}
