"""Errors of tools."""

from __future__ import annotations

from llamado.errors import LlamadoError


class ToolsError(LlamadoError):
    """Tools cannot be offered: an unknown name, an invalid file of MCP servers, an unsupported platform."""


class InvalidCall(LlamadoError):
    """A malformed call; the client's fault."""


class ToolFailed(LlamadoError):
    """A tool failed; the model gets the message instead of a result."""


class OutsideFolder(ToolFailed):
    """A path leads out of the tools' folder."""
