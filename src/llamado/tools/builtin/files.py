"""`read_file` and `write_file`."""

from __future__ import annotations

import base64
import time
from typing import Any

from llamado.tools.builtin.tool import BuiltinTool
from llamado.tools.errors import ToolFailed
from llamado.tools.host import ToolHost
from llamado.tools.tool import Call, schema

# tools/server/server-tools.cpp, b11434.
TEXT_BYTES = 16 * 1024
"""Most bytes of text returned from a file."""
_BASE64_BYTES = 32 << 20
_LINE_BYTES = 1 << 20  # a longer line counts as several
_SECONDS = 15.0


class ReadFile(BuiltinTool):
    """Reads lines of a file, or its bytes."""

    name, title = "read_file", "Read file"
    description = (
        "Read the contents of a file. Optionally give a range of lines, counted from 1. With append_loc each line "
        'begins with its number (e.g. "1→...").'
    )
    parameters = schema(
        "path",
        path=("string", "Path to the file"),
        start_line=("integer", "First line to read, counted from 1 (default: 1)"),
        end_line=("integer", "Last line to read, itself included (default: the file's last)"),
        append_loc=("boolean", "Begin each line with its number"),
    )

    def run_on(self, host: ToolHost, call: Call) -> dict[str, Any]:
        path = call.text("path")
        first, last, numbered = call.number("start_line", 1), call.number("end_line", -1), call.flag("append_loc")
        size = host.size(path)
        if size is None:
            raise ToolFailed(f"cannot stat file: {path}")
        if call.as_base64:
            if size > _BASE64_BYTES:
                raise ToolFailed(f"file too large ({size} bytes, max {_BASE64_BYTES})")
            with host.read(path) as file:
                data = file.read(_BASE64_BYTES)
            return {"base64": base64.b64encode(data).decode("ascii"), "size_bytes": len(data)}
        if size > TEXT_BYTES and last == -1:
            raise ToolFailed(
                f"file too large ({size} bytes, max {TEXT_BYTES}). Use start_line/end_line to read a portion."
            )
        found, n_bytes, number = [], 0, 0
        deadline = time.monotonic() + _SECONDS
        with host.read(path) as file:
            while line := file.readline(_LINE_BYTES):
                number += 1
                if number < first:
                    if time.monotonic() > deadline or call.is_stopped():
                        raise ToolFailed(f"line {first} of {path} is too far away")
                    continue
                if last != -1 and number > last:
                    break
                text = line.removesuffix(b"\n").decode("utf-8", "replace") + "\n"
                shown = f"{number}→{text}" if numbered else text
                n_bytes += len(shown.encode())
                if n_bytes > TEXT_BYTES:
                    found.append("[output truncated]")
                    break
                found.append(shown)
        return {"plain_text_response": "".join(found)}


class WriteFile(BuiltinTool):
    """Creates or overwrites a file."""

    name, title, writes = "write_file", "Write file", True
    description = (
        "Write content to a file. It is made if it is not there, and so are the folders it lies in. "
        "See edit_file for changes of a file."
    )
    parameters = schema(
        "path content", path=("string", "Path of the file to write"), content=("string", "Content to write")
    )

    def run_on(self, host: ToolHost, call: Call) -> dict[str, Any]:
        path, data = call.text("path"), call.text("content").encode("utf-8", "replace")
        try:
            host.write(path, data)
        except OSError as error:
            raise ToolFailed(f"failed to write file: {path}: {error.strerror or error}") from None
        return {"result": "file written successfully", "path": path, "bytes": len(data)}
