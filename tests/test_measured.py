"""`benchmarks/all.py`: the tables of the pages are what the kept results give."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def measured() -> ModuleType:
    """The script, whose name is a built-in function's."""
    sys.path.append(str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("benchmarks_all", ROOT / "benchmarks" / "all.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def result(part: str, found: dict[str, Any], **about: Any) -> dict[str, Any]:
    return {
        "part": part, "command": f"{part}.py", "time": "2026-02-03T10:00+00:00", "commit": "abc1234", "sources": "s1",
        "changes": False, "processor": "P", "cores": 2, "memory_gib": 8.0, "llama_cpp": "b11434", "seconds": 100,
        "result": found,
    } | about  # fmt: skip


def sides(ours: float, theirs: float) -> dict[str, float]:
    return {"llamado": ours, "llama.cpp": theirs}


def speed_row(model: str, test: str, ours: float, theirs: float) -> dict[str, Any]:
    rates = {side: [rate] for side, rate in sides(ours, theirs).items()}
    return {
        "model": model, "test": test, "tokens_per_second": rates, "median": sides(ours, theirs), "ratio": ours / theirs,
        "peak_memory": {side: [10**8, 2 * 10**8] for side in rates}, "gigaops_per_token": None,
        "gigabytes_per_token": 0.1,
    }  # fmt: skip


SPEED = {"rows": [speed_row("smollm2", "pp512", 2000.0, 400.0), speed_row("smollm2", "tg128", 50.5, 25.25)]}
SERVING = {
    "rows": [
        {
            "model": "smollm2", "clients": clients, "ratio": {"tokens_per_second": 4.0, "ttft_p50_ms": 0.25},
            **{side: {"tokens_per_second": rate, "ttft_p50_ms": 100.0} for side, rate in sides(400, 100).items()},
        }
        for clients in (1, 8)
    ]
}  # fmt: skip


@pytest.mark.parametrize("page", ["README.md", "benchmarks/README.md"])
def test_pages_have_what_the_results_give(measured: ModuleType, page: str) -> None:
    text = (ROOT / page).read_text()
    assert text == measured.written(text, measured.read_results()), "run: python benchmarks/all.py --write"


def test_every_part_has_a_place_and_every_place_a_part(measured: ModuleType) -> None:
    pages = "".join(page.read_text() for page in measured.PAGES)
    places = re.findall(r"<!-- made: ([\w-]+) -->", pages)
    assert sorted(places) == sorted(["head", "front", *(part.name for part in measured.PARTS)])
    assert pages.count("<!-- end -->") == len(places)
    for part in measured.PARTS:
        script = (ROOT / "benchmarks" / part.command[0]).read_text()
        for flag in (*part.command, *part.quick):
            assert not flag.startswith("--") or f'"{flag}"' in script, (part.name, flag)


def test_tables_come_of_results_and_the_text_around_them_stays(measured: ModuleType) -> None:
    page = "Before\n\n<!-- made: speed -->\nold | 1\n<!-- end -->\n\nAfter\n<!-- made: startup -->\n<!-- end -->\n"
    text = measured.written(page, {"speed": result("speed", SPEED)})
    assert text.startswith("Before\n\n<!-- made: speed -->\n`speed.py`, 2 minutes:\n\n| model |") and "old" not in text
    assert (
        "\n| SmolLM2 135M Q4_1 | pp512 | 2,000 / 400 | **5.00** | 2,000 … 2,000 | 200.0 / 40.0 GB/s | 200 / 200 |\n"
        in text
    )
    assert text.endswith(
        "\n<!-- end -->\n\nAfter\n<!-- made: startup -->\n"
        "Not measured yet: `python benchmarks/all.py --only startup`.\n<!-- end -->\n"
    )
    assert measured.written(text, {"speed": result("speed", SPEED)}) == text


def test_a_result_of_other_circumstances_says_so(measured: ModuleType) -> None:
    startup = {
        "rows": [
            {
                "model": "gemma3", "start_seconds": {"llamado": [0.5, 0.7, 0.6], "llama.cpp": [0.3, 0.1, 0.2]},
                "cold_start_seconds": 3.25, "peak_megabytes": {"llamado": [310.0], "llama.cpp": [300.0]},
            }
        ]
    }  # fmt: skip
    newer = result("startup", startup, time="2026-02-03T11:00+00:00", commit="def5678", sources="s2", changes=True)
    older, same = result("speed", SPEED), result("serving", SERVING, sources="s2", changes=True)
    results = {"speed": older, "startup": newer, "serving": same}
    assert measured.made("speed", results).startswith(
        "**Measured on an older tree, `abc1234` of 2026-02-03.**\n\n`speed"
    )
    assert measured.made("serving", results).startswith("`serving.py`")
    shown = measured.made("startup", results)
    assert shown.startswith("`startup.py`") and "| 0.60 / 0.20 | 3.2 | 310 / 300 | +10 |" in shown
    assert measured.made("head", results) == (
        "2 cores of P, 8.0 GiB; 2026-02-03; tree `def5678` with changes; llama.cpp b11434."
    )
    results["speed"] = result("speed", SPEED, sources="s2", changes=True, processor="Q", llama_cpp="b9")
    said = "**Measured on another machine, 2 cores of Q, 8.0 GiB, and another llama.cpp, b9.**"
    assert measured.made("speed", results).startswith(said)


def test_the_first_page_has_the_summary(measured: ModuleType) -> None:
    page = "<!-- made: front -->\nas it was\n<!-- end -->"
    results = {"speed": result("speed", SPEED)}
    assert measured.written(page, results) == page
    results["serving"] = result("serving", SERVING)
    assert measured.written(page, results).splitlines()[2:-1] == [
        "",
        "| llamado / llama.cpp | SmolLM2 135M Q4_1 |",
        "|---|---:|",
        "| prompt, 512 tokens | 2,000 / 400 = **5.0** |",
        "| generation, 128 tokens | 50.5 / 25.2 = **2.0** |",
        "| 8 clients over HTTP, tokens/s in all | 400 / 100 = **4.0** |",
    ]
    results["serving"] = result("serving", SERVING, sources="s2")
    assert "(not all of one tree)" in measured.written(page, results)


def test_rates_that_fall_are_marked(measured: ModuleType) -> None:
    import batches

    rates = [(1, 100.0, 50.0), (2, 180.0, 80.0), (4, 170.0, 79.0), (8, 175.0, 90.0), (16, 200.0, 80.0)]
    rows = [batches.row_of("m", n, {"llamado": [ours], "llama.cpp": [theirs]}) for n, ours, theirs in rates]
    cells = [[cell.strip() for cell in line.split("|")[3:6]] for line in batches.table(rows).splitlines()[2:]]
    assert cells == [
        ["100", "50", "**2.0**"], ["180", "80", "**2.2**"], ["**170** ↓", "79", "**2.2**"],
        ["**175** ↓", "90", "**1.9**"], ["200", "**80** ↓", "**2.5**"],
    ]  # fmt: skip


def test_other_tables(measured: ModuleType) -> None:
    tables = {part.name: part.table for part in measured.PARTS}
    limits = {
        "read_sizes": {"memory": 1 << 30, "L2": 1 << 19},
        "read": {"memory": {"1": 2e10, "2": 3.55e10}, "L2": {"1": 1e11, "2": 2e11}},
        "integer": {"512": {"1": 9e11, "2": 1.7e12}}, "floats": {"256": {"1": 1e11, "2": 2e11}},
        "tiles": {"1": 3e12, "2": 6e12},
    }  # fmt: skip
    assert tables["machine"](limits).splitlines() == [
        "| limit | 1 thread | 2 threads | |",
        "|---|---:|---:|---|",
        "| reading memory (1,024 MiB) | 20.0 | 35.5 | GB/s |",
        "| reading L2 (512 KiB) | 100.0 | 200.0 | GB/s |",
        "| 8-bit products in L1, 512 bits wide | 900 | 1700 | GOP/s |",
        "| float32 multiply-adds of registers, 256 bits wide | 100 | 200 | GOP/s |",
        "| 8-bit products of tile registers (AMX) | 3000 | 6000 | GOP/s |",
    ]
    held = {side: {"one": 1e8, "all": 3e8, "each": 2e8 / 7} for side in ("llamado", "llama.cpp")}
    shown = tables["sessions"]({"sessions": 8, "rows": [{"model": "m", **held}]})
    assert shown.splitlines()[2:] == ["| m | llamado | 100 | 300 | 28.6 |", "| m | llama.cpp | 100 | 300 | 28.6 |"]
    line = {"temperature": 0.0, "plain": 10.0, "drafts": 15.0, "ratio": 1.5, "median": 1.4, "least": 0.9}
    told = json.dumps(line | {"drafted": 40, "accepted": 30})
    assert "| 0 | 10.0 | 15.0 | 1.50 / 1.40 / 0.90 | 40, 30 |" in tables["speculation"]({"tables": told})
    work = {"n_bytes": 10**6, "integer": 2 * 10**6, "floats": 0}
    rows = [
        {"kernel": k, "n": 1, "seconds": 1e-3, "work": work, "least": 5e-4, "of_limit": 0.5} for k in ("a", "in all")
    ]
    test = {"model": "m", "test": "tg1", "limits": {"read": 2e9, "integer": 1e9, "floats": 1e9}, "kernels": rows}
    assert "| a | 1.00 | 100% | 1.0 | 2 | 50% |" in tables["roofline"]({"tests": [test]})


def test_parts_are_chosen_by_name(measured: ModuleType) -> None:
    assert [part.name for part in measured.chosen("startup,speed", "")] == ["speed", "startup"]
    assert "speed" not in {part.name for part in measured.chosen("", "speed")}
    with pytest.raises(SystemExit, match="nothing: no such part; there are machine, speed"):
        measured.chosen("nothing", "")


def test_a_budget_leaves_out_what_takes_longer(
    measured: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "README.md"
    page.write_text("<!-- made: startup -->\n<!-- end -->\n<!-- made: head -->\n<!-- end -->\n")
    monkeypatch.setattr(measured, "PAGES", (page,))
    monkeypatch.setattr(measured, "RESULTS", tmp_path / "results")
    ran: list[tuple[str, bool]] = []

    def run(part: Any, *, quick: bool) -> dict[str, Any] | None:
        ran.append((part.name, quick))
        return result(part.name, SERVING) if part.name == "serving" else None

    monkeypatch.setattr(measured, "run", run)
    monkeypatch.setattr(sys, "argv", ["all.py", "--only", "speed,startup,serving", "--budget", "3.5", "--quick"])
    with pytest.raises(SystemExit, match="failed: speed, startup"):
        measured.main()
    assert ran == [("speed", True), ("startup", True), ("serving", True)]
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["serving.json"]
    assert "2 cores of P" in page.read_text()
    monkeypatch.setattr(sys, "argv", ["all.py", "--only", "speed,startup", "--budget", "3"])
    ran.clear()
    with pytest.raises(SystemExit, match="failed: startup"):
        measured.main()
    assert ran == [("startup", False)] and "speed: left out, it takes about 4 minutes" in capsys.readouterr().err


def test_a_script_is_run_and_what_it_gives_is_kept(
    measured: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "prints.py").write_text("import sys\nprint('| a |\\n|---|\\n| 1 |', *sys.argv[1:])\n")
    (tmp_path / "keeps.py").write_text(
        "import sys\nassert sys.argv[1:3] == ['--fast', '--json']\nopen(sys.argv[3], 'w').write('{\"rows\": [3]}')\n"
    )
    (tmp_path / "fails.py").write_text("raise SystemExit('no')\n")
    monkeypatch.setattr(measured, "circumstances", lambda: {"commit": "abc"})
    monkeypatch.setattr(measured, "HERE", tmp_path)
    parts = sys.modules["parts"]
    shown = measured.run(parts.Part("a", ("prints.py", "x"), 1), quick=True)
    assert shown["result"] == {"tables": "| a |\n|---|\n| 1 | x"} and shown["command"] == "prints.py x"
    assert parts.printed(shown["result"]) == "| a |\n|---|\n| 1 | x"
    kept = measured.run(parts.Part("b", ("keeps.py",), 1, ("--fast",), parts.speed_table), quick=True)
    assert (kept["result"], kept["command"], kept["part"], kept["commit"]) == (
        {"rows": [3]},
        "keeps.py --fast",
        "b",
        "abc",
    )
    assert measured.run(parts.Part("c", ("fails.py",), 1), quick=False) is None
