"""Commands that load a model without serving it do not import the server."""

from __future__ import annotations

import subprocess
import sys

import pytest

COMMANDS = "chat.run chat.local plan bench.speed bench.latency bench.perplexity bench.roofline options"


@pytest.mark.slow
def test_no_server_is_imported() -> None:
    modules = ", ".join(f"llamado.commands.{name}" for name in COMMANDS.split())
    code = f"import sys, {modules}, llamado.engine.loaded_model; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not [module for module in done.stdout.split() if module.startswith(("llamado.server", "llamado.router"))]


@pytest.mark.slow
def test_output_to_a_pipe_imports_no_terminal_packages() -> None:
    code = (
        "import sys; from llamado.commands.chat import conversation, local, run; "
        "run.screen_of(markdown=True); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"rich", "markdown_it", "prompt_toolkit"} & {*done.stdout.split()}
