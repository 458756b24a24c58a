"""The files that kernels import."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

import llamado

PACKAGE = Path(llamado.__file__).parent


def imported_beyond(sources: Iterable[str], jit: str) -> set[Path]:
    """Return the files of the package that `sources`, its files and folders, import and that are not among them; the
    file `jit` loads kernels, and imports more.
    """
    kept = [PACKAGE / source for source in sources]
    files = {file for path in kept for file in (path.rglob("*.py") if path.is_dir() else [path])}
    imported: set[Path] = set()
    for file in files - {PACKAGE / jit}:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("llamado."):
                path = PACKAGE.joinpath(*node.module.split(".")[1:])
                modules = [path / f"{name.name}.py" for name in node.names]
                imported.update(module for module in modules if module.exists())
                imported.add(path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))
    assert imported
    return imported - files
