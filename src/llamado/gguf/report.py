"""How long work tells its caller what goes on."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]  # bytes done, bytes in all (0 where unknown)
Warn = Callable[[str], None]  # one sentence for the user
