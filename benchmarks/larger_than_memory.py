"""Models larger than memory: `llamado bench` and llama-bench in turns, each in a control group with less memory than
the file has bytes, none of which is in memory when one begins.

Needs root, or a control group of one's own to make groups in; says so and ends where there is none.

usage: larger_than_memory.py [MODEL …] [--memory 0.6] [--alternations 3] [--prompt 128] [--generate 16] [--json FILE]
MODEL: synthetic-3b and synthetic-a3b-4 by default, or as in speed.py
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sides import SIDES, measured, model_path, our_command, peer_program
from speed import Row, table

MODELS = ("synthetic-3b", "synthetic-a3b-4")
_CGROUPS = Path("/sys/fs/cgroup")


@contextmanager
def memory_limit(size: int) -> Iterator[Path]:
    """A control group whose processes may use `size` bytes, page cache included, and no swap; gives its folder.

    Ends the script where no group can be made.
    """
    first = (_CGROUPS / "memory").is_dir()  # version 1
    own = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if not first or ":memory:" in line)
    folder = (_CGROUPS / "memory" if first else _CGROUPS) / f"llamado-benchmark-{os.getpid()}"
    limits = {"memory.limit_in_bytes": size, "memory.swappiness": 0} if first else {"memory.max": size}
    try:
        folder.mkdir()
        for name, value in limits.items():
            (folder / name).write_text(str(value))
        if not first:
            (folder / "memory.swap.max").write_text("0")
    except OSError as error:
        if folder.is_dir():
            folder.rmdir()
        sys.exit(f"SKIPPED: no control group with a limit can be made here ({own}): {error}; run this as root")
    try:
        yield folder
    finally:
        folder.rmdir()


def forget(path: Path) -> None:
    """Takes a file out of memory."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def inside(group: Path, command: list[str]) -> list[str]:
    """A command that runs in a control group."""
    return ["/bin/sh", "-c", f'echo $$ > "{group}/cgroup.procs" && exec "$@"', "sh", *command]


def ours(path: Path, test: list[str]) -> tuple[list[str], Callable[[str], float]]:
    """Our command, and how its answer is read."""
    command = our_command("bench", "-m", str(path), *test, "-r", "1", "-o", "json")
    return command, lambda said: float(json.loads(said)[0]["tokens_per_second"])


def theirs(path: Path, test: list[str]) -> tuple[list[str], Callable[[str], float]]:
    """The same of llama.cpp, told to leave weights in the file: its copies in another layout do not fit."""
    stay = ["--repack", "0", "-lm", "mmap"]
    command = [peer_program("llama-bench"), "-m", str(path), *test, *stay, "-r", "1", "-o", "json"]
    return command, lambda said: float(json.loads(said)[0]["avg_ts"])


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"default: {' '.join(MODELS)}")
    parser.add_argument("--memory", type=float, default=0.6, help="of the file's size, or bytes where more than 1")
    parser.add_argument("--alternations", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--generate", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    flags = parser.parse_args()
    tests = {f"pp{flags.prompt}": (flags.prompt, 0), f"tg{flags.generate}": (0, flags.generate)}
    rows = []
    for name in flags.models or MODELS:
        path = model_path(name)
        size = path.stat().st_size
        limit = int(flags.memory * size if flags.memory <= 1 else flags.memory)
        print(f"{name}: a file of {size / 1e9:.2f} GB, {limit / 1e9:.2f} GB of memory", flush=True)
        with memory_limit(limit) as group:
            for test, (prompt, generate) in tests.items():
                row = Row(name, test, SIDES)
                rows.append(row)
                options = ["-p", str(prompt), "-n", str(generate), "-t", str(flags.threads)]
                for turn in range(flags.alternations):
                    for side in SIDES if turn % 2 == 0 else SIDES[::-1]:
                        command, read = (ours if side == SIDES[0] else theirs)(path, options)
                        forget(path)
                        done = measured(inside(group, command))
                        row.add(side, read(done.printed), done.peak_memory)
                        print(
                            f"{name} {test} {side} {row.tokens_per_second[side][-1]:.2f}", file=sys.stderr, flush=True
                        )
    print(table([row.summary() for row in rows]))
    if flags.json:
        flags.json.write_text(json.dumps([row.summary() for row in rows], indent=2) + "\n")
    print(f"\nmedian ratio {statistics.median(row.ratio[SIDES[1]] for row in rows):.2f}")


if __name__ == "__main__":
    main()
