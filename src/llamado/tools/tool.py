"""Base class of tools, and their calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llamado.tools.errors import InvalidCall


@dataclass(frozen=True, kw_only=True)
class Call:
    """One tool call."""

    params: Mapping[str, Any] = field(default_factory=dict)
    cwd: str = ""
    """`X-Tool-Cwd`: base of relative paths; "": the tools' folder."""
    runtime: str = ""
    """`X-Tool-Runtime`: host of the tool; "": the server's default."""
    as_base64: bool = False
    """`X-Resp-Type: base64`: a file's bytes instead of its lines."""
    on_output: Callable[[str], None] | None = None
    """Called with output as it arrives; None: the result holds all output."""
    is_stopped: Callable[[], bool] = lambda: False
    """Returns True if the client has disconnected."""

    def text(self, name: str) -> str:
        """Return a required text. Raises InvalidCall."""
        return text_of(self.params, name)

    def option(self, name: str, default: str) -> str:
        """Return an optional text."""
        value = self.params.get(name)
        return value if isinstance(value, str) else default

    def number(self, name: str, default: int) -> int:
        """Return an optional whole number."""
        value = self.params.get(name)
        return int(value) if isinstance(value, (int, float)) and abs(value) < 2**53 else default

    def flag(self, name: str) -> bool:
        """Return True if a switch is on."""
        return self.params.get(name) is True


def text_of(params: Mapping[str, Any], name: str) -> str:
    """Return a required text parameter. Raises InvalidCall."""
    value = params.get(name)
    if not isinstance(value, str):
        raise InvalidCall(f'"{name}" must be a string' if name in params else f'"{name}" is missing')
    return value


class Tool(ABC):
    """A tool that models can call."""

    name: str
    title: str
    """Display name."""
    description: str
    parameters: Mapping[str, Any]
    """JSON Schema."""
    type = "server"
    writes = False
    """True if it changes files or state."""
    streams = False
    """True if it can stream its output."""
    uses_cwd = True

    @abstractmethod
    async def use(self, call: Call) -> dict[str, Any]:
        """Return the result. Raises InvalidCall, and ToolFailed with a message for the model."""

    def entry(self) -> dict[str, Any]:
        """Return its entry in `GET /tools`."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {
            "display_name": self.title,
            "tool": self.name,
            "type": self.type,
            "permissions": {"write": self.writes},
            "uses_cwd": self.uses_cwd,
            "definition": {"type": "function", "function": function},
        }


def schema(required: str = "", **properties: tuple[str, str]) -> dict[str, Any]:
    """Return the JSON Schema of an object: name → (type, description). `required`: names of required properties."""
    found: dict[str, Any] = {
        "type": "object",
        "properties": {name: {"type": kind, "description": text} for name, (kind, text) in properties.items()},
    }
    return found | ({"required": required.split()} if required else {})
