"""Commands import what they need, when they need it: no server for a chat, no terminal packages for a pipe."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Each in the process of those before it.
_STEPS = {
    "a chat in a pipe": """
        from llamado.commands.chat import conversation, local, run
        run.screen_of(markdown=True)
    """,
    "commands with a model": """
        import llamado.commands.plan, llamado.commands.options, llamado.engine.loaded_model
        from llamado.commands.bench import latency, perplexity, roofline, speed
    """,
    "a server": """
        import llamado.commands.cli, llamado.commands.serve, llamado.server.run, llamado.server.load
        import llamado.engine.forward.runner, llamado.text.grammar.compiler
    """,
}


@pytest.fixture(scope="module")
def imported() -> dict[str, set[str]]:
    """The modules after each step."""
    code = "import sys"
    for lines in _STEPS.values():
        code += "\n".join(line.strip() for line in lines.splitlines()) + "\nprint(*sys.modules)\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return dict(zip(_STEPS, map(set, map(str.split, done.stdout.splitlines())), strict=True))


@pytest.mark.slow
def test_no_server_is_imported(imported: dict[str, set[str]]) -> None:
    """Commands that load a model without serving it import no server."""
    modules = imported["commands with a model"]
    assert {"llamado.commands.plan", "llamado.engine.loaded_model"} <= modules
    assert not [module for module in modules if module.startswith(("llamado.server", "llamado.router"))]


@pytest.mark.slow
def test_output_to_a_pipe_imports_no_terminal_packages(imported: dict[str, set[str]]) -> None:
    assert not {"rich", "markdown_it", "prompt_toolkit"} & imported["a chat in a pipe"]


@pytest.mark.slow
def test_a_start_leaves_imports_to_later(imported: dict[str, set[str]]) -> None:
    """Hints of missing extras need importlib.metadata, and the first grammar its reader."""
    assert {"llamado.server.run", "llamado.text.grammar.compiler"} <= imported["a server"]
    later = {"importlib.metadata", "llamado.text.grammar.gbnf_lark", "llamado.text.grammar.lark"}
    assert not imported["a server"] & later
