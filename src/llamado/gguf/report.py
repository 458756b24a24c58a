"""Callback types for progress and warnings of long operations."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]  # bytes done, total bytes (0 if unknown)
Warn = Callable[[str], None]  # one sentence for the user
