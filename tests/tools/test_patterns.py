"""Glob patterns and folder listings."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from llamado.tools.folder import Folder
from llamado.tools.globs import Glob
from llamado.tools.ignore import MAX_SIZE, IgnoreRules
from llamado.tools.listing import FolderListing, list_folder


@pytest.mark.parametrize(
    ("pattern", "fits", "fits_not"),
    [
        ("*.py", ["a.py", "x/y/a.py", ".py"], ["a.pyc", "a.py/b"]),
        ("**", ["a", "a/b"], []),
        ("src/*.c", ["x/src/a.c"], ["src/a.c", "x/src/y/a.c", "x/xsrc/a.c"]),  # "**/src/*.c", as in llama-server
        ("src/**", ["x/src/a/b"], ["src/a", "src"]),
        ("**/a", ["x/a", "x/y/a"], ["a", "x/ab"]),
        ("[ab]?.txt", ["a1.txt", "x/b2.txt"], ["c1.txt", "a.txt"]),
        ("[!a]", ["b"], ["a", ""]),
        ("[a-c]", ["b"], ["d", "-"]),
        ("[]]", ["]"], ["["]),
        ("[-a]", ["-", "a"], ["b"]),
        ("[z-a]", [], ["a", "m", "z"]),
        ("a+(b).txt", ["a+(b).txt"], ["aab.txt"]),
        ("/a", ["/a"], ["a"]),
    ],
)
def test_patterns(pattern: str, fits: list[str], fits_not: list[str]) -> None:
    glob = Glob(pattern)
    assert [path for path in fits if not glob.matches(path)] == []
    assert [path for path in fits_not if glob.matches(path)] == []


def paths(listing: FolderListing) -> list[str]:
    return [entry.path + "/" * entry.is_dir for entry in listing.entries]


def test_listings(tmp_path: Path) -> None:
    inside = tmp_path / "in"
    for name in ("b/c/deep.txt", "a.txt", "node_modules/x.js", ".hidden"):
        (inside / name).parent.mkdir(parents=True, exist_ok=True)
        (inside / name).write_text(name)
    os.symlink("b", inside / "inner")
    os.symlink(str(tmp_path), inside / "outer")
    folder = Folder(str(inside))

    def listed(kind: str, depth: int = 0, base: str = "") -> list[str]:
        return paths(list_folder(folder, folder.absolute(base), depth, kind))

    assert listed("file") == [".hidden", "a.txt", "b/c/deep.txt"]
    assert listed("all") == [".hidden", "a.txt", "b/", "inner/", "node_modules/", "b/c/", "b/c/deep.txt"]
    assert listed("all", 1) == [".hidden", "a.txt", "b/", "inner/", "node_modules/"]
    assert listed("dir", 2) == ["b/", "inner/", "node_modules/", "b/c/"]
    assert listed("file", base="b") == ["c/deep.txt"]

    (inside / ".git").mkdir()
    (inside / ".gitignore").write_text("*.txt\n")
    (inside / "dist").mkdir()
    (inside / "dist" / "d.js").write_text("")
    assert listed("file") == [".gitignore", ".hidden", "dist/d.js", "inner", "node_modules/x.js", "outer"]
    assert listed("file", 1) == [".gitignore", ".hidden", "inner", "outer"]


def test_a_repository_cannot_redirect_a_listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository's configuration is not read: no foreign work tree, no file of secrets."""
    monkeypatch.setattr(subprocess, "Popen", None)
    inside, outside = tmp_path / "in", tmp_path / "out"
    (inside / ".git" / "info").mkdir(parents=True)
    outside.mkdir()
    (outside / "private.txt").write_text("")
    (outside / "secret").write_text("a.txt\n")
    (inside / "a.txt").write_text("")
    (inside / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    config = f"[core]\n\tworktree = {outside}\n\texcludesFile = {outside / 'secret'}\n"
    (inside / ".git" / "config").write_text(config)
    (inside / ".gitignore").symlink_to(outside / "secret")
    (inside / ".git" / "info" / "exclude").symlink_to(outside / "secret")
    assert paths(list_folder(Folder(str(inside)), str(inside), 0, "file")) == [".gitignore", "a.txt"]


RULES = """
# a comment
*.o
!keep.o
/top
sub/*.log
build/
**/any/x
a/**/z
all/**
\\#odd
trailing\\\x20
[ab].c
[!x-z].d
"""


@pytest.mark.parametrize(
    ("path", "ignored"),
    [
        ("x.o", True), ("d/x.o", True), ("keep.o", False), ("d/keep.o", False), ("top", True), ("d/top", False),
        ("sub/a.log", True), ("sub/d/a.log", False), ("d/sub/a.log", False), ("build/", True), ("d/build/", True),
        ("build", False), ("any/x", True), ("d/e/any/x", True), ("a/z", True), ("a/b/c/z", True), ("all/b", True),
        ("all/", False), ("#odd", True), ("# a comment", False), ("trailing ", True), ("a.c", True), ("c.c", False),
        ("a.d", True), ("x.d", False), ("plain", False),
    ],
)  # fmt: skip
def test_ignore_rules(path: str, ignored: bool) -> None:
    assert IgnoreRules("/w", RULES).ignores("/w/" + path.rstrip("/"), path.endswith("/")) is ignored


def test_ignore_rules_of_deeper_folders_have_precedence(tmp_path: Path) -> None:
    for name in (".git/", "a/", "a/b/"):
        (tmp_path / name).mkdir()
    for name in ("x.o", "a/x.o", "a/b/x.o", "a/b/y.c"):
        (tmp_path / name).write_text("")
    (tmp_path / ".gitignore").write_text("*.o\n*.c\n")
    (tmp_path / "a" / ".gitignore").write_text("!x.o\n")
    (tmp_path / "a" / "b" / ".gitignore").write_text("/x.o\n!y.c\n")
    for top in (tmp_path, tmp_path / "a"):  # rules above the tools' folder count, too
        listed = paths(list_folder(Folder(str(top)), str(tmp_path / "a"), 0, "file"))
        assert listed == [".gitignore", "b/.gitignore", "b/y.c", "x.o"]


def test_ignore_rules_are_bounded() -> None:
    """Models may write these files, so their rules take linear time and little memory."""
    slow = IgnoreRules("/w", "*a" * 300 + "b\n" + "[a-z]" * 900 + "\n" + "!x\ny\n" * 20_000)
    assert sum(group.pattern.size for group in slow._groups) <= MAX_SIZE
    assert slow.ignores("/w/" + "a" * 200, False) is False
