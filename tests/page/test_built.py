"""The checked-in build of the page: current and small."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from llamado.page.files import BUILT, load_file

WEB = Path(__file__).parents[2] / "web"
SOURCES = ("index.html", "package.json", "package-lock.json", "tsconfig.json", "vite.config.ts", "public", "src")


def test_the_build_is_current() -> None:
    digest = sha256()
    roots = [WEB / name for name in SOURCES]
    paths = [path for root in roots for path in ([root] if root.is_file() else root.rglob("*")) if path.is_file()]
    for name, path in sorted((path.relative_to(WEB).as_posix(), path) for path in paths):
        digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    built = (BUILT / "sources.sha256").read_text().strip()
    assert built == digest.hexdigest(), "the build is older than web/: cd web && npm ci && npm run build"


def test_compressed_files_fit_the_budget() -> None:
    first = [path for path in BUILT.rglob("*") if path.suffix in (".js", ".css", ".html") and "pdf" not in path.name]
    assert sum(len(load_file("/" + path.relative_to(BUILT).as_posix())[1]) for path in first) <= 250_000
