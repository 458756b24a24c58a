"""What a tool is: its name, what the model is told of it, and what it does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llamado.tools.errors import BadCall


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call, as the tool gets it."""

    params: Mapping[str, Any] = field(default_factory=dict)
    cwd: str = ""
    """`X-Tool-Cwd`: where relative paths begin; empty: the folder of the tools."""
    runtime: str = ""
    """`X-Tool-Runtime`: where the tool runs; empty: where the server was told to."""
    as_base64: bool = False
    """`X-Resp-Type: base64`: a file's bytes instead of its lines."""
    said: Callable[[str], None] | None = None
    """Takes the output while it comes; None: all of it is in the result."""
    stopped: Callable[[], bool] = lambda: False
    """Whether nobody waits for the result any more."""

    def text(self, name: str) -> str:
        """A text that must be there. Raises BadCall."""
        return text_of(self.params, name)

    def option(self, name: str, default: str) -> str:
        """A text, or what stands for it where none is given."""
        value = self.params.get(name)
        return value if isinstance(value, str) else default

    def number(self, name: str, default: int) -> int:
        """A whole number, or what stands for it where none is given."""
        value = self.params.get(name)
        return int(value) if isinstance(value, (int, float)) and abs(value) < 2**53 else default

    def flag(self, name: str) -> bool:
        """Whether something is switched on."""
        return self.params.get(name) is True


def text_of(params: Mapping[str, Any], name: str) -> str:
    """A text that must be among the parameters. Raises BadCall."""
    value = params.get(name)
    if not isinstance(value, str):
        raise BadCall(f'"{name}" must be a string' if name in params else f'"{name}" is missing')
    return value


class Tool(ABC):
    """What a model can call."""

    name: str
    title: str
    """How a page shows it."""
    description: str
    parameters: Mapping[str, Any]
    """JSON Schema."""
    type = "server"
    writes = False
    """Whether it changes something."""
    streams = False
    """Whether its output can be had while it comes."""
    uses_cwd = True

    @abstractmethod
    async def use(self, call: Call) -> dict[str, Any]:
        """The result. Raises BadCall, and ToolFailed for what the model shall hear."""

    def described(self) -> dict[str, Any]:
        """As `GET /tools` has it."""
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
    """JSON Schema of an object: name → (type, description), and the names that must be given."""
    found: dict[str, Any] = {
        "type": "object",
        "properties": {name: {"type": kind, "description": told} for name, (kind, told) in properties.items()},
    }
    return found | ({"required": required.split()} if required else {})
