#!/usr/bin/env python3
"""A slow link before a worker: `llamado tap` under the name that guides to split inference give it.

    python3 latency-proxy.py --listen-port 60052 --target-port 50052 --latency-ms 20

Any Python 3 starts it; what runs is llamado from the `.venv` beside it (`./demo.sh install` makes it), or from PATH.
"""

import os
import shutil
import sys

python = os.path.join(os.path.dirname(os.path.abspath(__file__)), ".venv", "bin", "python")
program = [python, "-P", "-m", "llamado"] if os.access(python, os.X_OK) else [shutil.which("llamado") or ""]
if not program[0]:
    sys.exit("latency-proxy.py: llamado is not installed; ./demo.sh install makes .venv beside this file")
os.execv(program[0], [*program, "tap", *sys.argv[1:]])
