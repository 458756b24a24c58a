"""What the built-in tools have in common: a machine to work on, and a thread to work in."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from llamado.tools.machine import ToolMachine
from llamado.tools.tool import Call, Tool

Result = dict[str, Any]


@dataclass(frozen=True)
class Bench:
    """Where built-in tools work."""

    machine: Callable[[Call], ToolMachine]
    """Files and commands for a call. Raises BadCall and ToolFailed."""
    threads: Callable[[str, Callable[[Call], Result], Call], Awaitable[Result]]
    """Runs what blocks in a thread of the named tool; the call it gets there knows when no client waits any more."""


class BuiltinTool(Tool):
    """A tool for files and commands."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    async def use(self, call: Call) -> Result:
        return await self._bench.threads(
            self.name, lambda watched: self.on(self._bench.machine(watched), watched), call
        )

    @abstractmethod
    def on(self, machine: ToolMachine, call: Call) -> Result:
        """The result of a call on a machine; may block. Raises BadCall and ToolFailed."""
