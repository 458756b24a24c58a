"""Build identification: `build_info` and `system_fingerprint` of the APIs."""

from __future__ import annotations

from pathlib import Path

from llamado import __version__

SERVED = "b11434"
"""Build of llama.cpp whose behavior the server follows. `BUILD` starts with it, because clients parse its number."""
COMMIT_FILE = "commit.txt"
"""File beside this one in an installed package, written by hatch_build.py."""
_SHORT = 9  # characters of a commit, as git shows it


def head(repository: Path) -> str:
    """Return the commit of a repository's work tree from git's files, or "" if it is unknown."""
    try:
        folder = repository / ".git"
        if folder.is_file():  # an additional work tree
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
    """Return the commit that a package was built from or runs from, or "" if it is unknown."""
    written = package / COMMIT_FILE
    if written.is_file():
        return written.read_text().strip()[:_SHORT]
    return head(package.parents[1])[:_SHORT] if package.parent.name == "src" else ""


_COMMIT = commit(Path(__file__).resolve().parent)

BUILD = f"{SERVED}-llamado-{__version__}" + (f"+{_COMMIT}" if _COMMIT else "")
