"""Glob patterns, and what a folder's listing has."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from llamado.tools.commands import Commands
from llamado.tools.folder import Folder
from llamado.tools.listing import Listing, list_folder, matches


@pytest.mark.parametrize(
    ("pattern", "fits", "fits_not"),
    [
        ("*.py", ["a.py", "x/y/a.py", ".py"], ["a.pyc", "a.py/b"]),
        ("**", ["a", "a/b"], []),
        ("src/*.c", ["x/src/a.c"], ["src/a.c", "x/src/y/a.c", "x/xsrc/a.c"]),  # "**/src/*.c", as llama-server has it
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
    assert [path for path in fits if not matches(pattern, path)] == []
    assert [path for path in fits_not if matches(pattern, path)] == []


def paths(listing: Listing) -> list[str]:
    return [entry.path + "/" * entry.is_dir for entry in listing.entries]


def test_listings(tmp_path: Path) -> None:
    commands = Commands()
    inside = tmp_path / "in"
    for name in ("b/c/deep.txt", "a.txt", "node_modules/x.js", ".hidden"):
        (inside / name).parent.mkdir(parents=True, exist_ok=True)
        (inside / name).write_text(name)
    os.symlink("b", inside / "inner")
    os.symlink(str(tmp_path), inside / "outer")
    folder = Folder(str(inside))

    def listed(kind: str, depth: int = 0, base: str = "") -> list[str]:
        return paths(list_folder(folder, commands, folder.absolute(base), depth, kind))

    assert listed("file") == [".hidden", "a.txt", "b/c/deep.txt"]
    assert listed("all") == [".hidden", "a.txt", "b/", "inner/", "node_modules/", "b/c/", "b/c/deep.txt"]
    assert listed("all", 1) == [".hidden", "a.txt", "b/", "inner/", "node_modules/"]
    assert listed("dir", 2) == ["b/", "inner/", "node_modules/", "b/c/"]
    assert listed("file", base="b") == ["c/deep.txt"]

    subprocess.run(["git", "init", "-q", str(inside)], check=True)
    (inside / ".gitignore").write_text("*.txt\n")
    (inside / "dist").mkdir()
    (inside / "dist" / "d.js").write_text("")
    assert listed("file") == [".gitignore", ".hidden", "dist/d.js", "inner", "node_modules/x.js", "outer"]
    assert listed("file", 1) == [".gitignore", ".hidden", "inner", "outer"]

    # A repository's own settings may name commands; a model that can write files shall not run any so.
    ran = tmp_path / "ran"
    (inside / "hook").write_text(f"#!/bin/sh\ntouch {ran}\n")
    (inside / "hook").chmod(0o755)
    with (inside / ".git" / "config").open("a") as config:
        config.write(f"[core]\n\tfsmonitor = {inside / 'hook'}\n")
    assert "hook" in listed("file") and not ran.exists()
    subprocess.run(["git", "-C", str(inside), "ls-files", "--others"], check=True, capture_output=True)
    assert ran.exists()  # as git does it by itself
    commands.close()
