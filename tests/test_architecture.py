"""ARCHITECTURE.md matches the source: packages, imports, paths and names."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "src" / "llamado"
PAGE = (ROOT / "ARCHITECTURE.md").read_text()
PACKAGES = {path.name for path in SOURCES.iterdir() if (path / "__init__.py").exists()}
MOST_FILES = 15

Graph = dict[str, set[str]]


_IMPORT = re.compile(r"^ *((?:from llamado[\w.]* import (?:\([^)]*\)|[^(\n]*))|import llamado[^\n]*)", re.MULTILINE)
_CONSTRUCTOR = re.compile(r"(def __init__\([\s\S]*?\) -> None:)")


@cache
def texts() -> dict[Path, str]:
    return {path: path.read_text() for path in SOURCES.rglob("*.py")}


def parsed(pattern: re.Pattern[str], path: Path, rest: str = "") -> Iterator[ast.stmt]:
    """Statements of a module that match, each with `rest` behind it. Reading only these is quick."""
    for statement in pattern.findall(texts()[path]):
        yield from ast.parse(statement + rest).body


@cache
def imports() -> Graph:
    """Map each module to our modules that it imports, including for types only."""
    paths = {path.relative_to(SOURCES.parent).with_suffix(""): path for path in texts()}
    modules = {".".join(name.parts).removesuffix(".__init__"): path for name, path in paths.items()}
    found: Graph = defaultdict(set)
    for module, path in modules.items():
        for node in parsed(_IMPORT, path):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                while name not in modules and "." in name:
                    name = name.rpartition(".")[0]
                if name.startswith("llamado.") and name != module:
                    found[module].add(name)
    return found


def package_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def reaches(graph: Graph, start: str) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for name in graph.get(waiting.pop(), ()):
            if name not in found:
                found.add(name)
                waiting.append(name)
    return found


@pytest.mark.slow
def test_the_graph_shows_the_imports() -> None:
    """Each import between packages is an arrow, unless a longer path of arrows covers it."""
    packages: Graph = defaultdict(set)
    for module, imported in imports().items():
        for name in imported:
            a, b = package_of(module), package_of(name)
            if a != b and {a, b} <= PACKAGES:
                packages[a].add(b)
    direct = {
        (a, b)
        for a, below in packages.items()
        for b in below
        if not any(b in reaches(packages, other) for other in below if other != b)
    }
    (picture,) = re.findall(r"^```mermaid\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    drawn = set(re.findall(r"^ *(\w+)(?:\[.*?\])? --> (\w+)", picture, re.MULTILINE))
    assert drawn == direct


def test_packages_are_folders() -> None:
    rows = re.findall(r"^\| `(\w+)/` \|", PAGE, re.MULTILINE)
    assert sorted(rows) == sorted(PACKAGES)


def test_paths_exist() -> None:
    named = set(re.findall(r"`((?:\w+/)+\w+\.py|(?:\w+/)+)`", PAGE))
    assert len(named) > 40
    assert not [path for path in sorted(named) if not ((SOURCES / path).exists() or (ROOT / path).exists())]


def test_functions_and_classes_exist() -> None:
    """The page names them as `file.py` (`name`)."""
    named = re.findall(r"`((?:\w+/)+\w+\.py)` \(`([\w.]+)`", PAGE)
    assert len(named) > 8
    for path, name in named:
        text = (SOURCES / path).read_text()
        for part in name.split("."):
            assert re.search(rf"^ *(?:async )?(?:def|class) {part}\b", text, re.MULTILINE), (path, name)


@pytest.mark.parametrize("folder", sorted({path.parent for path in SOURCES.rglob("*.py")}), ids=lambda p: p.name)
def test_a_folder_can_be_read(folder: Path) -> None:
    assert len([path for path in folder.glob("*.py") if path.name != "__init__.py"]) <= MOST_FILES


def test_constructors_take_few_parameters() -> None:
    """More than six belong into a record of options (see engine/options.py)."""
    found = {}
    for path, text in texts().items():
        constructors = [*parsed(_CONSTRUCTOR, path, " ...")]
        assert len(constructors) == text.count("def __init__("), path
        for number, node in enumerate(constructors):
            assert isinstance(node, ast.FunctionDef)
            given = node.args
            n = len([*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))])
            found[f"{path.relative_to(SOURCES)}: constructor {number}"] = n - 1
    assert {place: n for place, n in found.items() if n > 6} == {}
