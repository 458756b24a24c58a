"""Configuration of MCP servers: the JSON format of Cursor, Claude Desktop and llama-server.

`{"mcpServers": {"NAME": {"command": …, "args": […], "env": {…}, "cwd": …, "timeout_ms": …}}}`; `"url"` and `"headers"`
instead for a server over streamable HTTP.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from llamado.tools.errors import ToolsError

log = logging.getLogger("llamado.tools")

TIMEOUT_MS = 30_000
"""Default time limit of one call."""


@dataclass(frozen=True, kw_only=True)
class McpServerConfig:
    """One server: a command, or a URL."""

    name: str
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = ""
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout: float = TIMEOUT_MS / 1e3
    """Time limit of one call, in seconds."""


def read_servers(text: str, where: str) -> list[McpServerConfig]:
    """Parse servers from JSON; entries with neither a command nor a URL are ignored. Raises ToolsError."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ToolsError(f"{where}: invalid JSON: {error}") from None
    entries = document.get("mcpServers", {}) if isinstance(document, dict) else None
    if not isinstance(entries, dict):
        raise ToolsError(f'{where}: expected {{"mcpServers": {{"NAME": {{"command": "…"}}}}}}')
    found = [_server(name, entry, f"{where}: server {name}") for name, entry in entries.items()]
    return [server for server in found if server is not None]


def _server(name: str, entry: Any, where: str) -> McpServerConfig | None:
    if not isinstance(entry, dict):
        raise ToolsError(f"{where}: expected an object")
    if entry.get("disabled") is True:
        return None
    command, url, cwd = (_text(entry, key, where) for key in ("command", "url", "cwd"))
    if not command and not url:
        log.warning("%s: ignored, it has neither a command nor a url", where)
        return None
    if url and urlsplit(url).scheme not in ("http", "https"):
        raise ToolsError(f"{where}: url: expected http:// or https://, got {url!r}")
    args = entry.get("args", [])
    if not isinstance(args, list) or not all(isinstance(arg, str) for arg in args):
        raise ToolsError(f"{where}: args: expected an array of strings")
    timeout = entry.get("timeout_ms", TIMEOUT_MS)
    if not isinstance(timeout, (int, float)) or not 0 < timeout < 1e9:
        raise ToolsError(f"{where}: timeout_ms: expected milliseconds, got {timeout!r}")
    return McpServerConfig(
        name=name,
        command=(command, *args) if command else (),
        env=_texts(entry, "env", where),
        cwd=cwd,
        url="" if command else url,
        headers=_texts(entry, "headers", where),
        timeout=timeout / 1e3,
    )


def _text(entry: dict[str, Any], key: str, where: str) -> str:
    value = entry.get(key, "")
    if not isinstance(value, str) or "\0" in value:
        raise ToolsError(f"{where}: {key}: expected a string, got {value!r}")
    return value


def _texts(entry: dict[str, Any], key: str, where: str) -> dict[str, str]:
    value = entry.get(key, {})
    if not isinstance(value, dict) or not all(isinstance(one, str) for one in value.values()):
        raise ToolsError(f"{where}: {key}: expected an object of strings")
    return dict(value)
