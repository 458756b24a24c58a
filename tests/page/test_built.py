"""The checked-in build of the page: current and small."""

from __future__ import annotations

import json
import re
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


def compressed(names: set[str]) -> int:
    """Return the bytes of files in `assets/` as the server sends them."""
    return sum(len(load_file(f"/assets/{name}")[1]) for name in names)


def first_load() -> set[str]:
    """Return the files in `assets/` that the browser fetches for the chat, the view that opens first."""
    html = (BUILT / "index.html").read_text()
    found = set(re.findall(r"assets/([\w.-]+)", html))
    (entry,) = (name for name in found if re.fullmatch(r"index-.*\.js", name))
    script = (BUILT / "assets" / entry).read_text()
    found |= set(re.findall(r'from"\./([\w.-]+)"', script))
    dependencies = json.loads(re.search(r"m\.f=(\[[^]]*\])", script)[1])  # type: ignore[index]
    chat = re.search(r"import\(`\./Chat-[^`]*`\).*?__vite__mapDeps\((\[[\d,]*\])\)", script)
    return found | {dependencies[number].removeprefix("./") for number in json.loads(chat[1])}  # type: ignore[index]


def test_the_first_load_fits_the_budget() -> None:
    names = first_load()
    for part in ("index-", "ui-", "Chat-", "chat-"):
        assert any(name.startswith(part) for name in names), part
    for rare in ("de-", "tex-", "highlight-", "Live-", "pdf", "diagrams"):
        assert not any(name.startswith(rare) for name in names), rare
    assert compressed(names) <= 130_000


def test_compressed_files_fit_the_budget() -> None:
    """All views and one language, without the libraries for PDF and diagrams."""
    rare = re.compile(r"pdf|diagrams|(de|es|zh)-")
    names = {path.name for path in (BUILT / "assets").iterdir() if path.suffix in (".js", ".css")}
    assert compressed({name for name in names if not rare.match(name)}) <= 280_000
