"""A stand-in for llama.cpp's llama-bench and llama-batched-bench: it prints the same rows with made-up rates."""

from __future__ import annotations

import argparse
import json
import sys


def main() -> None:
    batched = sys.argv[1:2] == ["batched"]
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for flag in ("-m", "-p", "-n", "-d", "-r", "-o", "-npl", "-npp", "-ntg", "-c", "--output-format"):
        parser.add_argument(flag)
    flags = parser.parse_args(sys.argv[2:] if batched else sys.argv[1:])
    if batched:
        for n in map(int, flags.npl.split(",")):
            print(json.dumps({"pl": n, "speed_tg": 10.0 * n}))
        return
    rows = [
        {"n_prompt": prompt, "n_gen": generate, "n_depth": int(depth), "avg_ts": 10.0}
        for depth in flags.d.split(",")
        for prompt, generate in ((int(flags.p), 0), (0, int(flags.n)))
    ]
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
