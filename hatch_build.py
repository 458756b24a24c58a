"""Writes the commit into the wheel, so that an installed server can name it."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CommitHook(BuildHookInterface[Any]):
    """Puts `commit.txt` into the package; an editable install reads the repository itself."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a wheel is built; without a repository nothing is written."""
        if version == "editable":
            return
        sys.path.insert(0, str(Path(self.root) / "src"))
        from llamado.build import COMMIT_FILE, head

        found = head(Path(self.root))
        if found:
            file = Path(tempfile.mkdtemp()) / COMMIT_FILE
            file.write_text(f"{found}\n")
            build_data["force_include"][str(file)] = f"llamado/{COMMIT_FILE}"
