"""`benchmarks/all.py`: the tables of the pages are what the kept results give."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
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
        "part": part, "command": f"{part}.py", "time": "2026-02-03T10:00+00:00", "date": "2026-02-03",
        "commit": "abc1234", "sources": "s1", "changes": False, "processor": "P", "cores": 2, "memory_gib": 8.0,
        "peers": {"llama.cpp": "b11434 (clang 19.1.7)"}, "seconds": 100, "result": found,
    } | about  # fmt: skip


def sides(ours: float, theirs: float) -> dict[str, float]:
    return {"llamado": ours, "llama.cpp": theirs}


def speed_row(model: str, test: str, **rates: float) -> dict[str, Any]:
    """A row of speed.py, of sides by their names with a `_` for each dot."""
    import speed

    found = {side.replace("_cpp", ".cpp"): rate for side, rate in rates.items()}
    row = speed.Row(model, test, tuple(found), gigabytes_per_token=0.1)
    for side, rate in found.items():
        row.add(side, rate, 10**8)
        row.add(side, rate, 2 * 10**8)
    return row.summary()


@pytest.fixture
def speed_result(measured: ModuleType) -> dict[str, Any]:
    rows = [("pp512", 2000.0, 400.0), ("tg128", 50.5, 25.25)]
    return {"rows": [speed_row("smollm2", test, llamado=ours, llama_cpp=theirs) for test, ours, theirs in rows]}


SERVING = {
    "rows": [
        {
            "model": "smollm2", "clients": clients, "ratio": {"tokens_per_second": 4.0, "ttft_p50_ms": 0.25},
            **{side: {"tokens_per_second": rate, "ttft_p50_ms": 100.0} for side, rate in sides(400, 100).items()},
        }
        for clients in (1, 8)
    ]
}  # fmt: skip


LATENCY = {
    "rows": [
        {"nodes": 3, "latency_ms": latency, "tokens_per_second": {"plain": plain, "predicted": predicted}}
        for latency, plain, predicted in ((0.0, 50.0, 50.0), (20.0, 15.0, 16.7))
    ]
}


@pytest.mark.parametrize("page", ["README.md", "benchmarks/README.md"])
def test_pages_have_what_the_results_give(measured: ModuleType, page: str) -> None:
    text = (ROOT / page).read_text()
    assert text == measured.written(text, measured.read_results()), "run: python benchmarks/all.py --pages"


def test_every_part_has_a_place_and_every_place_a_part(measured: ModuleType) -> None:
    pages = "".join(page.read_text() for page in measured.PAGES)
    places = re.findall(r"<!-- made: ([\w-]+) -->", pages)
    assert sorted(places) == sorted(["head", "front", *(part.name for part in measured.PARTS)])
    assert pages.count("<!-- end -->") == len(places)
    for part in measured.PARTS:
        script = (ROOT / "benchmarks" / part.command[0]).read_text()
        for flag in (*part.command, *part.quick):
            assert not flag.startswith("--") or f'"{flag}"' in script, (part.name, flag)


def test_tables_come_of_results_and_the_text_around_them_stays(
    measured: ModuleType, speed_result: dict[str, Any]
) -> None:
    page = "Before\n\n<!-- made: speed -->\nold | 1\n<!-- end -->\n\nAfter\n<!-- made: startup -->\n<!-- end -->\n"
    text = measured.written(page, {"speed": result("speed", speed_result)})
    assert text.startswith("Before\n\n<!-- made: speed -->\n`speed.py`, 2 minutes:\n\n| model |") and "old" not in text
    assert (
        "\n| SmolLM2 135M Q4_1 | pp512 | 2,000 / 400 | **5.00** | 2,000 … 2,000 | 200.0 / 40.0 GB/s | 200 / 200 |\n"
        in text
    )
    assert text.endswith(
        "\n<!-- end -->\n\nAfter\n<!-- made: startup -->\nNot measured on this tree: `startup.py`.\n<!-- end -->\n"
    )
    assert measured.written(text, {"speed": result("speed", speed_result)}) == text


def test_a_table_has_a_column_for_each_peer(measured: ModuleType) -> None:
    row = speed_row("m", "pp512", llamado=1000.0, llama_cpp=250.0, ik_llama_cpp=800.0)
    head, *lines = sys.modules["speed"].table([row]).splitlines()
    assert head.startswith("| model | test | llamado / llama.cpp / ik_llama.cpp, tokens/s | ratio |")
    assert lines == [
        "|---|---|---:|---:|---:|---:|---:|",
        "| m | pp512 | 1,000 / 250 / 800 | **4.00** / **1.25** | 1,000 … 1,000 | 100.0 / 25.0 / 80.0 GB/s "
        "| 200 / 200 / 200 |",
    ]


@pytest.mark.parametrize(
    "other",
    [
        {"sources": "s2"},
        {"changes": True},
        {"processor": "Q"},
        {"cores": 4},
        {"date": "2026-02-02"},
        {"peers": {"llama.cpp": "b11434 (GCC 12.2.0, AMX off)"}},
    ],
)
def test_figures_of_other_circumstances_leave_the_page(
    measured: ModuleType, speed_result: dict[str, Any], other: dict[str, Any]
) -> None:
    older = result("speed", speed_result, **({"time": "2026-02-03T09:00+00:00"} | other))
    results = {"speed": older, "latency": result("latency", LATENCY)}
    page = "".join(f"<!-- made: {name} -->\n<!-- end -->\n" for name in ("head", "speed", "latency", "front"))
    text = measured.written(page, results)
    assert "2 cores of P, 8.0 GiB; 2026-02-03; tree `abc1234`; llama.cpp b11434 (clang 19.1.7)." in text
    assert "\nNot measured on this tree: `speed.py`.\n" in text and "2,000" not in text
    assert "\nNot measured on this tree: `python benchmarks/all.py --only speed,serving --write`.\n" in text
    assert "| 3 | 0 | 50.0 | 1.00× | 50.0 | 1.00× |\n| 3 | 20 | 15.0 | 0.30× | 16.7 | 0.33× |" in text


def test_the_head_names_every_peer(measured: ModuleType, speed_result: dict[str, Any]) -> None:
    peers = {"llama.cpp": "b11434 (clang 19.1.7)", "ik_llama.cpp": "of ik-llama-cpp-python 0.1.5 (GCC 12.2.0)"}
    results = {
        "speed": result("speed", speed_result, peers=peers, changes=True),
        "startup": result("startup", {"rows": []}, time="2026-02-03T11:00+00:00", changes=True),
    }
    assert measured.head(measured.of_one_tree(results)) == (
        "2 cores of P, 8.0 GiB; 2026-02-03; tree `abc1234` with changes; llama.cpp b11434 (clang 19.1.7); "
        "ik_llama.cpp of ik-llama-cpp-python 0.1.5 (GCC 12.2.0)."
    )
    assert measured.head({}) == "Not measured: `python benchmarks/all.py --write`."


def test_the_first_page_has_the_summary(measured: ModuleType) -> None:
    page = "<!-- made: front -->\nold\n<!-- end -->"
    rows = [
        speed_row("smollm2", "pp512", llamado=2000.0, llama_cpp=400.0, ik_llama_cpp=1000.0),
        speed_row("smollm2", "tg128", llamado=50.5, llama_cpp=25.25, ik_llama_cpp=50.5),
    ]
    results = {"speed": result("speed", {"rows": rows})}
    lines = [
        "",
        "| llamado / the other, tokens/s = ratio | SmolLM2 135M Q4_1 |",
        "|---|---:|",
        "| prompt, 512 tokens, llama.cpp | 2,000 / 400 = **5.0** |",
        "| generation, 128 tokens, llama.cpp | 50.5 / 25.2 = **2.0** |",
        "| prompt, 512 tokens, ik_llama.cpp | 2,000 / 1,000 = **2.0** |",
        "| generation, 128 tokens, ik_llama.cpp | 50.5 / 50.5 = **1.0** |",
    ]
    assert measured.written(page, results).splitlines()[2:-1] == lines
    results["serving"] = result("serving", SERVING)
    lines.append("| 8 clients over HTTP, llama.cpp | 400 / 100 = **4.0** |")
    assert measured.written(page, results).splitlines()[2:-1] == lines


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
        {"kernel": k, "n": 1, "seconds": 1e-3, "work": work, "least": 5e-4, "of_limit": 0.5} for k in ("a", "total")
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

    def run(part: Any, date: str, *, quick: bool) -> dict[str, Any] | None:
        ran.append((part.name, quick))
        return result(part.name, SERVING) if part.name == "serving" else None

    monkeypatch.setattr(measured, "run", run)
    monkeypatch.setattr(
        sys, "argv", ["all.py", "--only", "speed,startup,serving", "--budget", "5", "--quick", "--write"]
    )
    with pytest.raises(SystemExit, match="failed: speed, startup"):
        measured.main()
    assert ran == [("speed", True), ("startup", True), ("serving", True)]
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["serving.json"]
    assert "2 cores of P" in page.read_text()
    monkeypatch.setattr(sys, "argv", ["all.py", "--only", "speed,startup", "--budget", "3"])
    ran.clear()
    with pytest.raises(SystemExit, match="failed: startup"):
        measured.main()
    assert ran == [("startup", False)] and "speed: left out, it takes about 6.5 minutes" in capsys.readouterr().err


def test_a_script_is_run_and_what_it_gives_is_kept(
    measured: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "prints.py").write_text("import sys\nprint('| a |\\n|---|\\n| 1 |', *sys.argv[1:])\n")
    (tmp_path / "keeps.py").write_text(
        "import sys\nassert sys.argv[1:3] == ['--fast', '--json']\nopen(sys.argv[3], 'w').write('{\"rows\": [3]}')\n"
    )
    (tmp_path / "fails.py").write_text("raise SystemExit('no')\n")
    monkeypatch.setattr(measured, "circumstances", lambda: {"commit": "abc", "date": "2026-02-04"})
    monkeypatch.setattr(measured, "HERE", tmp_path)
    parts = sys.modules["parts"]
    shown = measured.run(parts.Part("a", ("prints.py", "x"), 1), "2026-02-03", quick=True)
    assert shown["result"] == {"tables": "| a |\n|---|\n| 1 | x"} and shown["command"] == "prints.py x"
    assert parts.printed(shown["result"]) == "| a |\n|---|\n| 1 | x"
    kept = measured.run(parts.Part("b", ("keeps.py",), 1, ("--fast",), parts.speed_table), "2026-02-03", quick=True)
    assert [kept[key] for key in ("result", "command", "part", "commit", "date")] == [
        {"rows": [3]}, "keeps.py --fast", "b", "abc", "2026-02-03",
    ]  # fmt: skip
    assert measured.run(parts.Part("c", ("fails.py",), 1), "2026-02-03", quick=False) is None


@pytest.mark.parametrize("installed", [True, False])
def test_speed_of_a_second_peer(
    measured: ModuleType,
    installed: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import speed

    for peer in speed.PEERS[: 1 + installed]:
        (tmp_path / peer).mkdir()
        (tmp_path / peer / "llama-bench").touch()
    rates = {"llamado": 400.0, "old": 200.0, "llama.cpp": 100.0, "ik_llama.cpp": 250.0}
    commands: list[list[str]] = []

    def run(command: list[str], *, timeout: float) -> Any:
        commands.append(command)
        rate = rates[Path(command[0]).parent.name if "llama-bench" in command[0] else command[0]]
        rate /= 2 if command[-2:] == ["-rtr", "0"] else 1  # repacked weights are faster
        test = "pp64 @ d128" if "128" in command else "pp64"
        ours = {"test": test, "tokens_per_second": rate, "gigabytes_per_second": None, "gigaops_per_second": rate}
        theirs = {"n_prompt": 64, "n_gen": 0, "avg_ts": rate}
        return SimpleNamespace(printed=json.dumps([theirs if "llama-bench" in command[0] else ours]), peak_memory=10**6)

    monkeypatch.setattr(speed, "measured", run)
    monkeypatch.setattr(speed, "limits", dict)
    monkeypatch.setattr(speed, "limits_table", str)
    monkeypatch.setattr(speed, "model_path", Path)
    monkeypatch.setattr(speed, "programs_of", lambda peer: tmp_path / peer)
    monkeypatch.setattr(speed, "peer_program", lambda name, peer: str(tmp_path / peer / name))
    monkeypatch.setattr(speed, "our_command", lambda *arguments: ["llamado", *arguments])
    kept = tmp_path / "kept.json"
    options = ["--prompt", "64", "--generate", "0", "--quick", "--before", "old", "--json", str(kept)]
    monkeypatch.setattr(sys, "argv", ["speed.py", "m", *options])
    speed.main()
    (row,) = json.loads(kept.read_text())["rows"]
    ratios = {"before": 2.0, "llama.cpp": 4.0} | ({"ik_llama.cpp": 1.6} if installed else {})
    assert row["ratio"] == ratios and row["sides"] == ["llamado", *ratios]
    assert row["options"].get("ik_llama.cpp") == (["-rtr 1"] * 2 if installed else None)
    assert ("LEFT OUT: ik_llama.cpp is not installed" in capsys.readouterr().err) is not installed
    order = [Path(command[0]).parent.name or command[0] for command in commands if command[-2:] != ["-rtr", "0"]]
    assert order == [*row["sides"][:1], "old", *row["sides"][2:], *reversed(row["sides"][2:]), "old", "llamado"]
    commands.clear()
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--depths", "128"])
    speed.main()
    assert not any("ik_llama.cpp" in command[0] for command in commands)
