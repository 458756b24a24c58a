"""Entry point of `python -m llamado` and the `llamado` program."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Run the command line and return its exit code. Ctrl-C exits quietly even during imports."""
    try:
        from llamado.commands.cli import main as run
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return run()


if __name__ == "__main__":
    sys.exit(main())
