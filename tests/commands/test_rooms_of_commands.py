"""Which rooms the commands that load a model without serving it need."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["chat.run", "chat.local", "plan", "bench.speed", "bench.latency", "bench.perplexity", "bench.roofline", "options"],
)
def test_no_server_is_imported(name: str) -> None:
    code = f"import sys, llamado.commands.{name}, llamado.engine.loaded_model; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not [module for module in done.stdout.split() if module.startswith(("llamado.server", "llamado.router"))]


@pytest.mark.slow
def test_an_answer_into_a_pipe_needs_nothing_that_draws() -> None:
    code = (
        "import sys; from llamado.commands.chat import conversation, local, run; "
        "run.screen_of(markdown=True); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"rich", "markdown_it", "prompt_toolkit"} & {*done.stdout.split()}
