"""The root of every error a user of llamado can meet."""

from __future__ import annotations

from typing import ClassVar


class LlamadoError(Exception):
    """Something a user can cause or meet; its message says what happened, where, and what to do."""

    in_logs: ClassVar[str] = ""
    """Words that operators look for in logs, before the message; "" for none."""

    def as_logged(self) -> str:
        """The message, with the words that operators look for."""
        return f"{self.in_logs}: {self}" if self.in_logs else str(self)
