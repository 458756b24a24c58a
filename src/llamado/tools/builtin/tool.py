"""Base of the built-in tools: they work on a host, in a thread."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from llamado.tools.host import ToolHost
from llamado.tools.tool import Call, Tool

Result = dict[str, Any]


@dataclass(frozen=True)
class ToolEnvironment:
    """The environment of built-in tools."""

    host: Callable[[Call], ToolHost]
    """Returns the host for a call. Raises InvalidCall and ToolFailed."""
    run_in_thread: Callable[[str, Callable[[Call], Result], Call], Awaitable[Result]]
    """Runs blocking work in a thread of the named tool. The call passed on is stopped if its client disconnects."""


class BuiltinTool(Tool):
    """A tool that works on files or runs commands."""

    def __init__(self, environment: ToolEnvironment) -> None:
        self._environment = environment

    async def use(self, call: Call) -> Result:
        return await self._environment.run_in_thread(
            self.name, lambda watched: self.run_on(self._environment.host(watched), watched), call
        )

    @abstractmethod
    def run_on(self, host: ToolHost, call: Call) -> Result:
        """Return the result of a call on a host; may block. Raises InvalidCall and ToolFailed."""
