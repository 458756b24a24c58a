"""Files of other users, which not even every root may make."""

from __future__ import annotations

import os
import tempfile

import pytest


def _may_give_files_away() -> bool:
    if not hasattr(os, "chown") or os.getuid() != 0:
        return False
    with tempfile.NamedTemporaryFile() as file:
        try:
            os.chown(file.name, 4711, 4711)
        except OSError:  # the root of a container that has no other users
            return False
    return True


needs_other_owners = pytest.mark.skipif(not _may_give_files_away(), reason="gives files to others, as root may")
