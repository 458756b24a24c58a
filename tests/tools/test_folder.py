"""Paths cannot escape the tools' folder."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from llamado.tools.errors import OutsideFolder, ToolFailed, ToolsError
from llamado.tools.folder import Folder


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "in" / "a.txt").write_text("inside")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "secret").write_text("secret")
    return Folder(str(tmp_path / "in"))


def read(folder: Folder, path: str) -> str:
    with folder.read(folder.absolute(path)) as file:
        return file.read().decode()


@pytest.mark.parametrize("path", ["a.txt", "./a.txt", "sub/../a.txt", "sub/./../a.txt", "sub//..//a.txt"])
def test_paths_inside(folder: Folder, path: str) -> None:
    assert read(folder, path) == read(folder, f"{folder.path}/{path}") == "inside"


@pytest.mark.parametrize(
    "path", ["../out/secret", "/etc/passwd", "sub/../../out/secret", "~/x", "{}/../out/secret", "{}x"]
)
def test_paths_outside(folder: Folder, path: str) -> None:
    where = folder.absolute(path.format(folder.path))
    for use in (folder.read, lambda path: folder.write(path, b"x")):
        with pytest.raises(OutsideFolder):
            use(where)
    assert folder.kind(where) == ""


@pytest.mark.parametrize(
    "target",
    [
        "../out/secret",
        "{out}/secret",
        "sub/../../out/secret",
        "/etc/passwd",
        "/proc/self/cwd/../out/secret",
        "{in}/../out/secret",
    ],
)
def test_links_outside(folder: Folder, tmp_path: Path, target: str) -> None:
    text = target.replace("{out}", str(tmp_path / "out")).replace("{in}", folder.path)
    os.symlink(text, tmp_path / "in" / "link")
    os.symlink(os.path.dirname(text), tmp_path / "in" / "folder")
    for path in ("link", "folder/secret", "folder/passwd"):
        with pytest.raises((OutsideFolder, FileNotFoundError)):
            read(folder, path)
        with pytest.raises((OutsideFolder, FileNotFoundError)):
            folder.write(folder.absolute(path), b"overwritten")
    assert (tmp_path / "out" / "secret").read_text() == "secret"
    assert folder.kind(folder.absolute("link")) == ""


def test_links_inside(folder: Folder, tmp_path: Path) -> None:
    inside = tmp_path / "in"
    os.symlink("../a.txt", inside / "sub" / "up")
    os.symlink(str(inside / "sub"), inside / "whole")
    os.symlink("sub/up", inside / "twice")
    os.symlink(".", inside / "here")
    os.symlink("sub/..", inside / "top")
    for path in ("sub/up", "whole/up", "twice", "here/here/a.txt", "top/a.txt", "whole/up"):
        assert read(folder, path) == "inside", path
    assert folder.kind(folder.absolute("top")) == folder.kind(folder.path) == "dir"
    folder.write(folder.absolute("whole/new/deep.txt"), b"made")
    assert (inside / "sub" / "new" / "deep.txt").read_text() == "made"


def test_circular_links(folder: Folder, tmp_path: Path) -> None:
    os.symlink("b", tmp_path / "in" / "c")
    os.symlink("c", tmp_path / "in" / "b")
    with pytest.raises(OSError):
        read(folder, "b")


def test_long_paths_take_one_descriptor_and_make_no_folders(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: set[int] = set()
    most = 0
    real_open, real_dup, real_close = os.open, os.dup, os.close

    def count(fd: int) -> int:
        nonlocal most
        opened.add(fd)
        most = max(most, len(opened))
        return fd

    def close(fd: int) -> None:
        opened.discard(fd)
        real_close(fd)

    monkeypatch.setattr(os, "open", lambda *args, **options: count(real_open(*args, **options)))
    monkeypatch.setattr(os, "dup", lambda fd: count(real_dup(fd)))
    monkeypatch.setattr(os, "close", close)
    deep = "d/" * (90 - folder.path.count("/")) + "file"
    folder.write(folder.absolute(deep), b"inside")
    os.symlink("../" * 3 + "d/d/d/file", tmp_path / "in" / os.path.dirname(deep) / "link")
    assert read(folder, os.path.dirname(deep) + "/link") == "inside"
    monkeypatch.undo()
    assert most <= 4
    for path in ("a/" * 60_000 + "b", "b/" * 101 + "c", "x" * 5000):
        with pytest.raises(ToolFailed, match="at most 4096 bytes and 100 names"):
            folder.absolute(path)
    os.symlink("/".join(["d"] * 60), tmp_path / "in" / "far")
    with pytest.raises(OSError, match="too long"):
        folder.write(folder.absolute("far/" + "e/" * 60 + "f"), b"x")
    assert not (tmp_path / "in" / ("d/" * 60) / "e").exists()


def test_a_link_without_a_target_is_not_written_through(folder: Folder, tmp_path: Path) -> None:
    os.symlink(str(tmp_path / "out" / "new"), tmp_path / "in" / "dangling")
    with pytest.raises(OutsideFolder):
        folder.write(folder.absolute("dangling"), b"x")
    assert not (tmp_path / "out" / "new").exists()


def test_only_files_are_read_and_written(folder: Folder, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "in" / "pipe")
    for path in ("pipe", "sub"):  # opening a pipe does not wait for a writer
        with pytest.raises(OSError):
            read(folder, path)
        with pytest.raises(OSError):
            folder.write(folder.absolute(path), b"x")


def test_writing_truncates(folder: Folder) -> None:
    folder.write(folder.absolute("a.txt"), b"in")
    assert read(folder, "a.txt") == "in"


@pytest.mark.slow
def test_swapping_a_folder_for_a_link_during_access(folder: Folder, tmp_path: Path) -> None:
    """While a folder is swapped for a link to an outside folder again and again, nothing outside is read or written."""
    inside, swapped = tmp_path / "in", tmp_path / "in" / "swapped"
    (inside / "real").mkdir()
    (inside / "real" / "secret").write_text("inside")
    os.symlink(str(tmp_path / "out"), inside / "link")
    os.rename(inside / "real", swapped)
    done = threading.Event()

    def swap() -> None:
        while not done.is_set():
            os.rename(swapped, inside / "real")
            os.rename(inside / "link", swapped)
            os.rename(swapped, inside / "link")
            os.rename(inside / "real", swapped)

    swapper = threading.Thread(target=swap)
    swapper.start()
    seen = set()
    n = 0
    try:
        while n < 2000 or len(seen) < 2:
            n += 1
            try:
                seen.add(read(folder, "swapped/secret"))
                with os.fdopen(folder.open(folder.absolute("swapped/secret"), os.O_WRONLY), "wb") as file:
                    file.write(b"inside")
            except (OSError, OutsideFolder):
                seen.add("")
    finally:
        done.set()
        swapper.join()
    assert "secret" not in seen and len(seen) == 2
    assert (tmp_path / "out" / "secret").read_text() == "secret"


def test_the_folder_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ToolsError, match="No such file"):
        Folder(str(tmp_path / "none"))
