"""Settings of the tools."""

from __future__ import annotations

from dataclasses import dataclass

from llamado.tools.mcp.config import McpServerConfig


@dataclass(frozen=True, kw_only=True)
class ToolSettings:
    """Tools to offer; none by default."""

    builtin: tuple[str, ...] = ()
    """Names of built-in tools, or `all`."""
    folder: str = "."
    """The folder that they can access."""
    runtime: str = ""
    """Host of the tools: `docker:IMAGE`, `ssh:TARGET` …; "": this machine."""
    servers: tuple[McpServerConfig, ...] = ()
    """MCP servers."""
    proxy: bool = False
    """True if `/cors-proxy` is enabled."""

    @property
    def any(self) -> bool:
        """True if `/tools` is enabled."""
        return bool(self.builtin or self.servers)

    @property
    def reach_out(self) -> bool:
        """True if callers can do more than use the model."""
        return self.any or self.proxy
