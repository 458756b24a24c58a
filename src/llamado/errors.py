"""Base class of the errors that users can see."""

from __future__ import annotations

from typing import ClassVar


class LlamadoError(Exception):
    """Error for users: its message states the problem, its place and the remedy."""

    in_logs: ClassVar[str] = ""
    """Prefix of the message in logs, for operators to search for; "" for none."""

    def as_logged(self) -> str:
        """Return the message with the prefix for logs."""
        return f"{self.in_logs}: {self}" if self.in_logs else str(self)
