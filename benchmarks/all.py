"""Run the other scripts in turn and, with `--write`, make the tables of `benchmarks/README.md` and `README.md`.

Results are kept in `results/PART.json` with the machine, the day, the tree and the peers' builds. A page has the
figures of one tree, one machine and one day: those of the newest result. A part without a result of these
circumstances is a line that names its script.

usage: all.py [--only PART,PART] [--skip PART,PART] [--quick] [--budget MINUTES] [--write]
       all.py --pages | --list
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
from peer import build_of, programs_of  # noqa: E402
from speed import PEERS  # noqa: E402

from llamado.commands.plan import processor  # noqa: E402
from llamado.devices import limits  # noqa: E402

PAGES, RESULTS = (HERE / "README.md", HERE.parent / "README.md"), HERE / "results"
_MADE = re.compile(r"<!-- made: ([\w-]+) -->\n.*?<!-- end -->", re.DOTALL)
Results = Mapping[str, dict[str, Any]]


# --- running ----------------------------------------------------------------------------------------------------------


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=HERE, capture_output=True, text=True, check=True).stdout.strip()


def circumstances() -> dict[str, Any]:
    """Return a measurement's time, machine, tree and peers. `sources` is git's name of the contents of `src/`."""
    now = datetime.now(UTC)
    return {
        "time": now.isoformat(timespec="minutes"),
        "date": f"{now:%Y-%m-%d}",
        "commit": git("rev-parse", "--short", "HEAD"),
        "sources": git("rev-parse", "--short", "HEAD:src"),
        "changes": bool(git("status", "--porcelain", "--", "../src")),
        "processor": processor(),
        "cores": limits.cores(),
        "memory_gib": round(limits.memory().physical / (1 << 30), 1),
        "peers": {peer: build_of(peer) for peer in PEERS if programs_of(peer).exists()},
    }


def run(part: Part, date: str, *, quick: bool) -> dict[str, Any] | None:
    """Return a part's result, of the day that all began on; None if its script ends with an error, which it prints."""
    script, *given = part.command
    command = [sys.executable, str(HERE / script), *given, *(part.quick if quick else ())]
    about = {**circumstances(), "date": date}
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
    """Return the stored results by part."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}


def of_one_tree(results: Results) -> Results:
    """Return the newest result and those of the same tree, machine, day and builds of the peers."""
    last = max(results.values(), key=lambda one: one["time"], default=None)
    if last is None:
        return {}
    same = ("date", "sources", "changes", "processor", "cores", "memory_gib")

    def is_alike(one: Mapping[str, Any]) -> bool:
        builds = all(one["peers"].get(peer, build) == build for peer, build in last["peers"].items())
        return builds and all(one[key] == last[key] for key in same)

    return {name: one for name, one in results.items() if is_alike(one)}


def head(results: Results) -> str:
    """Return the circumstances of results of one tree, as a sentence."""
    last = max(results.values(), key=lambda one: one["time"], default=None)
    if last is None:
        return "Not measured: `python benchmarks/all.py --write`."
    machine = f"{last['cores']} cores of {last['processor']}, {last['memory_gib']} GiB"
    tree = f"tree `{last['commit']}`{' with changes' if last['changes'] else ''}"
    peers = {peer: build for one in results.values() for peer, build in one["peers"].items()}
    builds = [f"{peer} {peers[peer]}" for peer in PEERS if peer in peers]
    return f"{'; '.join([machine, last['date'], tree, *builds])}."


def made(name: str, results: Results) -> str:
    """Return what belongs between a part's marks, of results of one tree."""
    if name == "head":
        return head(results)
    if name == "front":
        if "speed" not in results:
            return "Not measured on this tree: `python benchmarks/all.py --only speed,serving --write`."
        serving = results["serving"]["result"] if "serving" in results else None
        return f"{head(results)}\n\n{front_table(results['speed']['result'], serving)}"
    part = next(part for part in PARTS if part.name == name)
    if name not in results:
        return f"Not measured on this tree: `{' '.join(part.command)}`."
    one = results[name]
    minutes = max(1, round(one["seconds"] / 60))
    return f"`{one['command']}`, {minutes} minute{'s' * (minutes > 1)}:\n\n{part.table(one['result'])}"


def written(text: str, results: Results) -> str:
    """Return a page with all its tables made anew."""
    alike = of_one_tree(results)
    return _MADE.sub(lambda found: f"<!-- made: {found[1]} -->\n{made(found[1], alike)}\n<!-- end -->", text)


def write() -> None:
    """Write the tables of all pages from the stored results."""
    for page in PAGES:
        page.write_text(written(page.read_text(), read_results()))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", metavar="PART,PART", help="these alone")
    parser.add_argument("--skip", default="", metavar="PART,PART", help="all but these")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--budget", type=float, metavar="MINUTES", help="leave out what would take longer than is left")
    parser.add_argument("--write", action="store_true", help="make the pages' tables, anew after each part")
    parser.add_argument("--pages", action="store_true", help="measure nothing, make the tables of what is kept")
    parser.add_argument("--list", action="store_true", help="the parts, and about how long each takes")
    flags = parser.parse_args()
    parts = chosen(flags.only, flags.skip)
    if flags.list:
        for part in parts:
            print(f"{part.name:<12} {part.minutes:>4g} min  {' '.join(part.command)}")
        return
    failed, began = [], time.monotonic()
    RESULTS.mkdir(exist_ok=True)
    date = circumstances()["date"]
    for part in () if flags.pages else parts:
        spent = (time.monotonic() - began) / 60
        takes = part.minutes / (2 if flags.quick and part.quick else 1)
        if flags.budget is not None and spent + takes > flags.budget:
            print(f"{part.name}: left out, it takes about {takes:g} minutes", file=sys.stderr, flush=True)
            continue
        print(f"{part.name}, after {spent:.1f} minutes", file=sys.stderr, flush=True)
        result = run(part, date, quick=flags.quick)
        if result is None:
            failed.append(part.name)
            continue
        (RESULTS / f"{part.name}.json").write_text(json.dumps(result, indent=1) + "\n")
        if flags.write:
            write()
    if flags.pages:
        write()
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
