"""Commands import what they need, when they need it: no server for a chat, no terminal packages for a pipe."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiers import first_of

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


THREADS = """
import os, sys, threading
from llamado.commands import cli
cli.main(sys.argv[1:])
others = len(os.listdir("/proc/self/task")) - threading.active_count()
print("numpy" in sys.modules, others, os.environ.get("OPENBLAS_NUM_THREADS"))
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
@pytest.mark.parametrize("given", [None, "1"])
@pytest.mark.parametrize("command", first_of(["worker -t 0", "serve -m none", "run none", "bench -m none"], 2))
def test_numpy_starts_no_threads(command: str, given: str | None) -> None:
    """The setting for it is not passed on to other programs, unless it was given."""
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    if given is not None:
        environment["OPENBLAS_NUM_THREADS"] = given
    process = [sys.executable, "-c", THREADS, *command.split()]
    done = subprocess.run(process, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.split() == ["True", "0", str(given)]
