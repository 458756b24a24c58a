"""Which tools a server offers."""

from __future__ import annotations

from dataclasses import dataclass

from llamado.tools.mcp.config import McpServerConfig


@dataclass(frozen=True, kw_only=True)
class ToolSettings:
    """Nothing is offered unless it is asked for."""

    builtin: tuple[str, ...] = ()
    """Names of built-in tools, or `all`."""
    folder: str = "."
    """What they can reach."""
    runtime: str = ""
    """Where they run: `docker:IMAGE`, `ssh:TARGET` …; empty: here."""
    servers: tuple[McpServerConfig, ...] = ()
    """Of the Model Context Protocol."""
    proxy: bool = False
    """Whether `/cors-proxy` passes requests of pages on."""

    @property
    def any(self) -> bool:
        """Whether `/tools` is there."""
        return bool(self.builtin or self.servers)

    @property
    def reach_out(self) -> bool:
        """Whether whoever may call can do more than ask the model."""
        return self.any or self.proxy
