"""A server starts without importing modules that only some requests or errors need."""

from __future__ import annotations

import subprocess
import sys

START = (
    "llamado.commands.cli",
    "llamado.commands.serve",
    "llamado.server.run",
    "llamado.server.load",
    "llamado.engine.loaded_model",
    "llamado.engine.forward.runner",
    "llamado.text.grammar.compiler",
)
LATER = {
    "importlib.metadata",  # hints that name the command that installs an extra
    "llamado.text.grammar.gbnf_lark",  # the first grammar
    "llamado.text.grammar.lark",
}


def test_a_start_leaves_imports_to_later() -> None:
    code = f"import sys, {', '.join(START)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    assert set(START) <= imported
    assert not imported & LATER
