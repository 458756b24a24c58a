"""Build hooks: write the commit into the wheel, and render the README as a package index shows it."""

from __future__ import annotations

import posixpath
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)\s#]+)(#[^)\s]*)?\)")
"""A link or picture that leads to a file of the repository: mark, text, path, place in it."""


class CommitHook(BuildHookInterface[Any]):
    """Puts `commit.txt` into the package, so that an installed server can name it; an editable install reads the
    repository itself.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a wheel or an sdist is built; without a repository nothing is written, and a wheel that is
        built of an sdist has what that brought.
        """
        if version == "editable":
            return
        sys.path.insert(0, str(Path(self.root) / "src"))
        from llamado.build import COMMIT_FILE, head

        found = head(Path(self.root))
        if found:
            file = Path(tempfile.mkdtemp()) / COMMIT_FILE
            file.write_text(f"{found}\n")
            build_data["force_include"][str(file)] = (
                f"{'src/' if self.target_name == 'sdist' else ''}llamado/{COMMIT_FILE}"
            )


class ReadmeHook(MetadataHookInterface):
    """Writes `readme` and `urls`; `repository` in pyproject.toml is the address of the sources, or ""."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Called whenever the project's metadata are read."""
        repository = str(self.config.get("repository", "")).rstrip("/")
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": for_an_index(text, repository)}
        metadata["urls"] = urls(repository)


def urls(repository: str) -> dict[str, str]:
    """Return the links that an index shows beside the description; none without an address."""
    if not repository:
        return {}
    return {
        "Source": repository,
        "Documentation": f"{repository}/blob/main/docs/index.md",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }


def for_an_index(text: str, repository: str) -> str:
    """The README where no file of the repository lies beside it: links with the repository's address. Without one a
    link names its file, which the sdist has, and a picture is left out.
    """

    def link(found: re.Match[str]) -> str:
        mark, shown, path, place = found[1], found[2], posixpath.normpath(found[3]), found[4] or ""
        if repository:
            return f"{mark}[{shown}]({repository}/{'raw' if mark else 'blob'}/main/{path}{place})"
        if mark:
            return ""
        return shown if shown.strip("`") == path else f"{shown} (`{path}`)"

    return _LINK.sub(link, text)
