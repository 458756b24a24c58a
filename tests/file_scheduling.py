"""Distribution of test files among processes that keeps going if a process crashes."""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadFileScheduling


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
