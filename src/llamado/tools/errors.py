"""What goes wrong with tools."""

from __future__ import annotations

from llamado.errors import LlamadoError


class ToolsError(LlamadoError):
    """Tools that cannot be offered: an unknown name, a file of MCP servers that is none, a platform without them."""


class BadCall(LlamadoError):
    """A call that no tool can make sense of; the caller's fault."""


class ToolFailed(LlamadoError):
    """What the model is told instead of a result."""


class Outside(ToolFailed):
    """A path that leads out of the folder of the tools."""
