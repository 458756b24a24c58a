"""Entry point of `python -m llamado` and the `llamado` program."""

from __future__ import annotations

import gc
import signal
import sys

gc.set_threshold(100_000)
"""New objects per collection. Imports create little garbage: Python's 700 would take a tenth of a server's start."""


def main() -> int:
    """Run the command line and return its exit code. Ctrl-C exits quietly even during imports."""
    try:
        from llamado.commands.cli import main as run
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return run()


if __name__ == "__main__":
    sys.exit(main())
