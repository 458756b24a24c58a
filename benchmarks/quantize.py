"""`llamado quantize` beside the real llama-quantize: the same file to the byte, and how long each takes.

    python benchmarks/quantize.py MODEL-F16.gguf [--imatrix FILE] [--threads N] [--alternations N] [KIND …]

Prints a Markdown table of medians. Sides alternate, after one run of ours that is not counted, which compiles our
kernels (they are kept on disk) and has the model in memory.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from sides import peer_program

KINDS = ["Q8_0", "Q4_0", "Q5_1", "Q4_K_M", "Q6_K", "Q3_K_M", "Q2_K", "IQ4_XS"]


def seconds(command: list[str]) -> float:
    """Return the seconds that a command takes from start to end."""
    began = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("kinds", nargs="*", default=KINDS)
    parser.add_argument("--imatrix")
    parser.add_argument("--threads", default="2")
    parser.add_argument("--alternations", type=int, default=1)
    given = parser.parse_args()
    more = ["--imatrix", given.imatrix] if given.imatrix else []
    ours = [sys.executable, "-m", "llamado", "quantize", *more, str(given.model)]
    theirs = [peer_program("llama-quantize"), *more, str(given.model)]
    print("| kind | equal | llamado, s | llama-quantize, s | times as fast |\n|---|---|---:|---:|---:|")
    with tempfile.TemporaryDirectory(dir=given.model.parent) as folder:
        left, right = Path(folder) / "ours.gguf", Path(folder) / "theirs.gguf"
        for kind in given.kinds:
            seconds([*ours, str(left), kind, given.threads])
            times = [
                (seconds([*ours, str(left), kind, given.threads]), seconds([*theirs, str(right), kind, given.threads]))
                for _ in range(given.alternations)
            ]
            a, b = (median(side) for side in zip(*times, strict=True))
            equal = "yes" if left.read_bytes() == right.read_bytes() else "no"
            print(
                f"| {kind}{' with an importance matrix' if more else ''} | {equal} | {a:.1f} | {b:.1f} | {b / a:.2f} |"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
