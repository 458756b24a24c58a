"""Processes that read all tests begin at different places, and leave out none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from file_scheduling import TESTS, collect_from_own_place


def places(args: list[str], process: int, n_processes: int) -> list[Path]:
    """Return what a process collects when these are the arguments."""
    config = SimpleNamespace(args=args, rootpath=TESTS.parent)
    collect_from_own_place(cast(Any, config), process, n_processes)
    return [Path(arg) for arg in config.args]


@pytest.mark.parametrize("args", [["tests"], [str(TESTS)]])
@pytest.mark.parametrize("n_processes", [1, 4, 64])
def test_every_process_reads_all_test_files(args: list[str], n_processes: int) -> None:
    found = [places(args, process, n_processes) for process in range(n_processes)]
    for paths in found:
        files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("test_*.py"))]
        assert sorted(files) == sorted(TESTS.rglob("test_*.py")) and sorted(paths) == sorted(found[0])
    assert found[0] == sorted(found[0])
    if n_processes == 4:
        assert len({paths[0] for paths in found}) == 4


def test_chosen_tests_stay_as_they_are() -> None:
    assert places(["tests/engine", "tests/page"], 1, 2) == [Path("tests/engine"), Path("tests/page")]
