"""Distribution of test files among processes: where each begins to read them, and what follows a crash."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

TESTS = Path(__file__).parent


def collect_from_own_place(config: pytest.Config, process: int, n_processes: int) -> None:
    """Let each of several processes begin to collect at another folder, if they collect all tests.

    All of them read all test files. The first to read a file compiles it, which takes most of the time, and the others
    find it compiled; in the same order all would compile all of them at the same time.
    """
    if [Path(config.rootpath, arg) for arg in config.args] != [TESTS]:
        return
    sizes: dict[Path, int] = {}
    for path in sorted(TESTS.iterdir()):
        files = [path] if path.match("test_*.py") else path.rglob("*.py")
        if size := sum(file.stat().st_size for file in files):
            sizes[path] = size
    places, begin, before = list(sizes), 0, 0
    while before < sum(sizes.values()) * process // n_processes:
        before += sizes[places[begin]]
        begin += 1
    config.args = [str(path) for path in places[begin:] + places[:begin]]


class FileScheduling(LoadFileScheduling):
    """pytest-xdist's `--dist loadfile`, except for what follows the crash of a process.

    The test that crashed fails, and the process's other tests run elsewhere. pytest-xdist 3.8 itself runs the test that
    crashed again, and waits forever for a new process that got no test or only one: a process does not begin a test
    before it knows the next one or that there is none.
    """

    def remove_node(self, node: Any) -> str | None:
        """Remove a process. Return the test that it was running, if it crashed."""
        left = []
        for scope, tests in self.assigned_work.pop(node).items():
            left += [(scope, test) for test, done in tests.items() if not done]
        if not left:
            return None
        for scope, test in left[1:]:
            self.workqueue.setdefault(scope, {})[test] = False
        for other in self.assigned_work.keys() & self.registered_collections.keys():
            self._reschedule(other)
        return left[0][1]

    def _reschedule(self, node: Any) -> None:
        if node.shutting_down:
            return
        while self.workqueue and self._pending_of(self.assigned_work[node]) <= 2:
            self._assign_work_unit(node)
        if not self.workqueue:
            node.shutdown()  # after the tests that it has
