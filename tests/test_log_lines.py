"""Lines of logs: one line each, and no message that would need two."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[1] / "src" / "llamado"
ON_A_TERMINAL = {"cluster/supervisor.py", "commands/demo.py", "commands/up/start.py"}
"""Files whose errors of several lines are printed by the command that they end, and logged by none."""


def logs(node: ast.AST) -> bool:
    """Return True for a call of one of the logger's methods."""
    called = node.func if isinstance(node, ast.Call) else None
    return isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == "log"


@pytest.mark.slow
def test_errors_and_log_lines_are_one_line() -> None:
    """A log escapes the end of a line, so an error of two lines shows a backslash and an n to its reader."""
    found = []
    for path in sorted(SOURCES.rglob("*.py")):
        text = path.read_text()
        if "\\n" not in text or not ("raise " in text or "log." in text):
            continue
        for node in ast.walk(ast.parse(text)):
            if (isinstance(node, ast.Raise) or logs(node)) and any(
                isinstance(one, ast.Constant) and isinstance(one.value, str) and "\n" in one.value
                for one in ast.walk(node)
            ):
                found.append(f"{path.relative_to(SOURCES)}:{node.lineno}")  # type: ignore[attr-defined]
    assert {one.partition(":")[0] for one in found} == ON_A_TERMINAL, found
