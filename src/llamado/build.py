"""Which build this is, and whose behaviour it serves: `build_info` and `system_fingerprint` of the APIs."""

from __future__ import annotations

from pathlib import Path

from llamado import __version__

SERVED = "b11434"
"""The build of llama.cpp that the server behaves like; clients read a build number at the beginning."""
COMMIT_FILE = "commit.txt"
"""Beside this file in an installed package: written when the wheel is built (hatch_build.py)."""
_SHORT = 9  # characters of a commit, as git shows it


def head(repository: Path) -> str:
    """The commit that a repository's work tree stands on, from git's own files; "" where that cannot be told."""
    try:
        folder = repository / ".git"
        if folder.is_file():  # a further work tree
            folder = repository / folder.read_text().removeprefix("gitdir:").strip()
        found = (folder / "HEAD").read_text().strip()
        if not found.startswith("ref:"):
            return found
        name = found.removeprefix("ref:").strip()
        shared = folder / "commondir"
        common = folder / shared.read_text().strip() if shared.exists() else folder
        if (common / name).is_file():
            return (common / name).read_text().strip()
        for line in (common / "packed-refs").read_text().splitlines():
            if line.endswith(f" {name}"):
                return line.partition(" ")[0]
    except (OSError, UnicodeDecodeError):
        pass
    return ""


def commit(package: Path) -> str:
    """The commit a package was built from, or runs from; "" where nobody knows."""
    written = package / COMMIT_FILE
    if written.is_file():
        return written.read_text().strip()[:_SHORT]
    return head(package.parents[1])[:_SHORT] if package.parent.name == "src" else ""


_COMMIT = commit(Path(__file__).resolve().parent)

BUILD = f"{SERVED}-llamado-{__version__}" + (f"+{_COMMIT}" if _COMMIT else "")
