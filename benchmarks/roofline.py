"""Share of this machine's limits that our kernels reach: `llamado bench --roofline` of a prompt and of a token.

usage: roofline.py [MODEL …] [--prompt 512] [--generate 128] [--depth 0] [--threads 2] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from sides import model_path, our_command, run


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help="default: smollm2 synthetic-1b")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--generate", type=int, default=128)
    parser.add_argument("--depth", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    flags = parser.parse_args()
    tests = []
    for name in flags.models or ("smollm2", "synthetic-1b"):
        lengths = ["-p", str(flags.prompt), "-n", str(flags.generate), "-d", str(flags.depth)]
        options = ["-m", str(model_path(name)), "--roofline", *lengths, "-t", str(flags.threads)]
        print(run(our_command("bench", *options)) if not flags.json else f"{name} …", flush=True)
        if flags.json:
            tests += [{**test, "model": name} for test in json.loads(run(our_command("bench", *options, "-o", "json")))]
    if flags.json:
        flags.json.write_text(json.dumps({"tests": tests}, indent=2) + "\n")


if __name__ == "__main__":
    main()
