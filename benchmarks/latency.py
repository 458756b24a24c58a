"""Plain decoding over 2, 3 and 4 workers behind links of 0 to 30 ms: the table of `./bench.sh`, and what is predicted.

N nodes are this process and N−1 workers of one thread each, every worker behind a tap that delays graphs; no drafts.
"Predicted" is the time of a token without a delay, plus the delays of its N−1 links.

usage: latency.py [MODEL] [--nodes 3,4,5] [--latencies 0,5,10,20,30] [--rounds 3 | --quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sides import model_path, our_command, run

_TIMEOUT = 3600.0


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each number of nodes and latency; the first latency of a number of nodes is its baseline."""
    lines = [
        "| nodes | latency, ms | tok/s | vs baseline | predicted tok/s | predicted |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    baselines: dict[int, dict[str, float]] = {}
    for row in rows:
        rates = row["tokens_per_second"]
        first = baselines.setdefault(row["nodes"], rates)
        cells = [f"{row['nodes']}", f"{row['latency_ms']:g}"]
        for column in ("plain", "predicted"):
            cells += [f"{rates[column]:.1f}", f"{rates[column] / first[column]:.2f}×"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--nodes", default="3,4,5")
    parser.add_argument("--latencies", default="0,5,10,20,30", metavar="MS,MS")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="1 round")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    flags = parser.parse_args()
    command = our_command("bench", "-m", str(model_path(flags.model)), "--nodes", flags.nodes)
    command += ["--latency", flags.latencies, "--compare", "predicted"]
    command += ["-r", str(1 if flags.quick else flags.rounds), "-o", "json"]
    rows = json.loads(run(command, timeout=_TIMEOUT))
    for row in rows:
        row["model"] = Path(row["model"]).name
    print(table(rows))
    if flags.json:
        flags.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
