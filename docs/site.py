"""mkdocs hooks: add pages from outside `docs/` to the site, and rewrite links that lead out of `docs/`."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {
    "architecture.md": "ARCHITECTURE.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "benchmarks.md": "benchmarks/README.md",
}
"""Pages of the site that live outside of `docs/`, and where."""

_PLACES = {source: name for name, source in PAGES.items()} | {"README.md": "index.md", "examples": "python.md"}
_LINK = re.compile(r"(?<=\]\()[^)#\s]+(?=[#)])")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that live elsewhere, and the sources that pages lead to, as text."""
    for name, source in PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text()))
    sources = {target for page in (ROOT / "docs").glob("*.md") for target in _outside(f"docs/{page.name}")}
    for target in sorted(sources - _PLACES.keys()):
        files.append(File.generated(config, f"{target}.txt", content=(ROOT / target).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """The page with links to where things are in the site."""
    source = PAGES.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    return _LINK.sub(lambda link: _place(_target(source, link[0])), markdown)


def _outside(source: str) -> set[str]:
    """Return the files outside of `docs/` that a page links to."""
    targets = {_target(source, link) for link in _LINK.findall((ROOT / source).read_text())}
    return {target for target in targets if "://" not in target and not target.startswith("docs/")}


def _target(source: str, link: str) -> str:
    """The path in the repository that a link of a page leads to, or the address."""
    return link if "://" in link else posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def _place(target: str) -> str:
    """Return the file's address in the site."""
    if "://" in target:
        return target
    return _PLACES.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else f"{target}.txt")
