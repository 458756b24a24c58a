"""`python -m llamado`: the command line."""

from __future__ import annotations

import sys

from llamado.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
