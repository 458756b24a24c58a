"""Runs the other scripts in turn and writes what they found into `benchmarks/README.md` and the project's first page.

A part's figures are kept in `results/PART.json` with machine, day, tree and llama.cpp's build, so that parts can be run
again alone; the tables between `<!-- made: PART -->` and `<!-- end -->` are always made of all the files there.

usage: all.py [--only PART,PART] [--skip PART,PART] [--quick] [--budget MINUTES] [--write] [--list]
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.append(str(HERE))  # for a test, which is elsewhere

from parts import PARTS, Part, front_table  # noqa: E402
from sides import peer_program  # noqa: E402

from llamado.commands.plan import processor  # noqa: E402
from llamado.devices import limits  # noqa: E402

PAGES, RESULTS = (HERE / "README.md", HERE.parent / "README.md"), HERE / "results"
_MADE = re.compile(r"<!-- made: ([\w-]+) -->\n.*?<!-- end -->", re.DOTALL)
Results = Mapping[str, dict[str, Any]]


# --- running ----------------------------------------------------------------------------------------------------------


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=HERE, capture_output=True, text=True, check=True).stdout.strip()


def circumstances() -> dict[str, Any]:
    """Of a measurement: when and where, and what was measured. `sources` is git's name of what `src/` holds."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="minutes"),
        "commit": git("rev-parse", "--short", "HEAD"),
        "sources": git("rev-parse", "--short", "HEAD:src"),
        "changes": bool(git("status", "--porcelain", "--", "../src")),
        "processor": processor(),
        "cores": limits.cores(),
        "memory_gib": round(limits.memory().physical / (1 << 30), 1),
        "llama_cpp": Path(peer_program("llama-server")).parents[2].name,  # the folder of its build
    }


def run(part: Part, *, quick: bool) -> dict[str, Any] | None:
    """A part's result; None where its script ends with an error, which it has said itself."""
    script, *given = part.command
    command = [sys.executable, str(HERE / script), *given, *(part.quick if quick else ())]
    about = circumstances()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "result.json"
        if part.has_rows:
            command += ["--json", str(kept)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            return None
        found = json.loads(kept.read_text()) if part.has_rows else {}
    shown = " ".join([script, *given, *(part.quick if quick else ())])
    seconds = round(time.monotonic() - began)
    result = found if part.has_rows else {"tables": done.stdout.strip()}
    return {"part": part.name, "command": shown, **about, "seconds": seconds, "result": result}


def chosen(only: str, skip: str) -> list[Part]:
    """Parts by name, comma-separated: `only` (all), without `skip`; ends the script for a name that is none."""
    names = {part.name for part in PARTS}
    wanted, unwanted = ({name for name in text.split(",") if name} for text in (only, skip))
    if unknown := (wanted | unwanted) - names:
        sys.exit(f"{', '.join(sorted(unknown))}: no such part; there are {', '.join(part.name for part in PARTS)}")
    return [part for part in PARTS if part.name in (wanted or names) and part.name not in unwanted]


# --- writing ----------------------------------------------------------------------------------------------------------


def read_results() -> dict[str, dict[str, Any]]:
    """What is kept, by part."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}


def newest(results: Results) -> dict[str, Any] | None:
    """The result that was taken last: of its tree all others should be."""
    return max(results.values(), key=lambda one: one["time"], default=None)


def tree(one: Mapping[str, Any]) -> str:
    """A commit, and whether the sources had changes beside it."""
    return f"`{one['commit']}`{' with changes' if one['changes'] else ''}"


def machine_of(one: Mapping[str, Any]) -> str:
    return f"{one['cores']} cores of {one['processor']}, {one['memory_gib']} GiB"


def head(results: Results) -> str:
    """On what, when and of what tree the newest figures are."""
    last = newest(results)
    if last is None:
        return "Nothing is measured yet: `python benchmarks/all.py`."
    return f"{machine_of(last)}; {last['time'][:10]}; tree {tree(last)}; llama.cpp {last['llama_cpp']}."


def differences(one: Mapping[str, Any], last: Mapping[str, Any]) -> str:
    """What a result has otherwise than the newest, as a line; empty where nothing is."""
    said = []
    if (one["sources"], one["changes"]) != (last["sources"], last["changes"]):
        said.append(f"an older tree, {tree(one)} of {one['time'][:10]}")
    if machine_of(one) != machine_of(last):
        said.append(f"another machine, {machine_of(one)}")
    if one["llama_cpp"] != last["llama_cpp"]:
        said.append(f"another llama.cpp, {one['llama_cpp']}")
    return f"**Measured on {', and '.join(said)}.**\n\n" if said else ""


def made(name: str, results: Results) -> str:
    """What stands between a part's marks."""
    if name == "head":
        return head(results)
    if name == "front":
        of_one_tree = {differences(results[part], results["speed"]) for part in ("speed", "serving")}
        about = "" if of_one_tree == {""} else " (not all of one tree)"
        table = front_table(results["speed"]["result"], results["serving"]["result"])
        return f"{head({'speed': results['speed']})}{about}\n\n{table}"
    part = next(part for part in PARTS if part.name == name)
    one, last = results.get(name), newest(results)
    if one is None or last is None:
        return f"Not measured yet: `python benchmarks/all.py --only {name}`."
    minutes = max(1, round(one["seconds"] / 60))
    took = f"{minutes} minute{'s' * (minutes > 1)}"
    return f"{differences(one, last)}`{one['command']}`, {took}:\n\n{part.table(one['result'])}"


def written(text: str, results: Results) -> str:
    """A page with all its tables made anew; the summary stays as it is until what it is made of is there."""

    def new(found: re.Match[str]) -> str:
        if found[1] == "front" and not {"speed", "serving"} <= results.keys():
            return found[0]
        return f"<!-- made: {found[1]} -->\n{made(found[1], results)}\n<!-- end -->"

    return _MADE.sub(new, text)


def write() -> None:
    """Makes the tables of all pages of what is kept."""
    for page in PAGES:
        page.write_text(written(page.read_text(), read_results()))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", metavar="PART,PART", help="these alone")
    parser.add_argument("--skip", default="", metavar="PART,PART", help="all but these")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--budget", type=float, metavar="MINUTES", help="leave out what would take longer than is left")
    parser.add_argument("--write", action="store_true", help="measure nothing, make the tables of what is kept")
    parser.add_argument("--list", action="store_true", help="the parts, and about how long each takes")
    flags = parser.parse_args()
    parts = chosen(flags.only, flags.skip)
    if flags.list:
        for part in parts:
            print(f"{part.name:<12} {part.minutes:>4g} min  {' '.join(part.command)}")
        return
    failed, began = [], time.monotonic()
    RESULTS.mkdir(exist_ok=True)
    for part in () if flags.write else parts:
        spent = (time.monotonic() - began) / 60
        takes = part.minutes / (2 if flags.quick and part.quick else 1)
        if flags.budget is not None and spent + takes > flags.budget:
            print(f"{part.name}: left out, it takes about {takes:g} minutes", file=sys.stderr, flush=True)
            continue
        print(f"{part.name}, after {spent:.1f} minutes", file=sys.stderr, flush=True)
        result = run(part, quick=flags.quick)
        if result is None:
            failed.append(part.name)
            continue
        (RESULTS / f"{part.name}.json").write_text(json.dumps(result, indent=1) + "\n")
        write()  # each time: a later part may be broken off
    write()
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
