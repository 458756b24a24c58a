"""Record the session in docs/terminal.md: `python tests/commands/record_terminal.py` types it and updates the page.

The answers of SmolLM2 have the same bytes on every machine; only speeds differ.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from terminals import Terminal

PAGE = Path(__file__).parents[2] / "docs" / "terminal.md"
COMMAND = "llamado run smollm2 --temp 0 -n 200"
_BLOCK = re.compile(r"(?<=```console\n).*?(?=```\n)", re.DOTALL)
_MEASURED = re.compile(r"\d+\.\d+(?= (tokens/s|s\b))")


def recorded() -> str:
    """Type the session in a terminal and return its text."""
    with tempfile.TemporaryDirectory() as folder:
        terminal = Terminal(COMMAND.split()[1:], environ={"XDG_STATE_HOME": folder}, rows=50, columns=100)
        try:
            terminal.prompt()
            terminal.paste(
                "Write a Python function that\nreturns the largest of three numbers.\nThen explain it in one sentence."
            )
            _answered(terminal, 1)
            terminal.type("/set temperature 0.7\r")
            terminal.prompt()
            terminal.type("/set seed 4\r")
            terminal.prompt()
            terminal.type("Give it a good name.")
            _answered(terminal, 2)
            terminal.type("/stats\r")
            terminal.prompt()
            terminal.type(f"/save {folder}/fruit.json\r")
            terminal.prompt()
            terminal.type("/exit\r")
            terminal.exit_code()
            return f"$ {COMMAND}\n{terminal.text}\n".replace(f"{folder}/", "")
        finally:
            terminal.close()


def _answered(terminal: Terminal, count: int) -> None:
    terminal.type("\r")
    terminal.until(r"^\d+ tokens, ", 120, count=count)
    terminal.prompt()


def lasting(text: str) -> str:
    """Replace measured numbers in a text."""
    return _MEASURED.sub("…", text)


def shown() -> str:
    """Return the session in the page."""
    found = _BLOCK.search(PAGE.read_text())
    assert found is not None
    return found[0]


if __name__ == "__main__":
    text = recorded()
    PAGE.write_text(_BLOCK.sub(lambda _: text, PAGE.read_text(), count=1))
