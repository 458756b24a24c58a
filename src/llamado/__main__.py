"""`python -m llamado`, and the program `llamado`: the command line."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Run the command line; returns the exit code. Ctrl-C is no fault even while the command line is imported."""
    try:
        from llamado.commands.cli import main as run
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return run()


if __name__ == "__main__":
    sys.exit(main())
