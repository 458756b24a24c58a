"""Ownership checks for files that are read back from disk and then executed or computed with."""

from __future__ import annotations

import os
import stat

_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def foreign(status: os.stat_result) -> str | None:
    """Return why another user may have written a file or folder; None if only this user or root can have."""
    if not hasattr(os, "getuid"):
        return None
    if status.st_uid not in (0, os.getuid()):
        return f"it belongs to user {status.st_uid}"
    if status.st_mode & _OTHERS:
        return f"others may write to it (mode {stat.S_IMODE(status.st_mode):o})"
    return None
