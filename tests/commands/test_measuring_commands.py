"""The commands `bench`, `perplexity` and `pull`, with a tiny model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tiny_models import CORPUS, make_llama

from llamado.commands import cli


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(CORPUS)
    return str(path)


@pytest.mark.slow
def test_bench(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "-m", tiny, "-p", "8,24,0", "-n", "4", "-r", "2", "-d", "0,6"]) == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head == "| model | device | test | tokens/s | weights GB/s | GOP/s |"
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    tests = ["pp8", "pp24", "tg4"]
    assert [row[:3] for row in cells] == [[tiny, "CPU", test] for test in (*tests, *(f"{test} @ d6" for test in tests))]
    assert all(re.fullmatch(r"\d+\.\d\d ± \d+\.\d\d", row[3]) for row in cells)
    # Prompts have GOP/s, generation has GB/s.
    assert [(bool(row[4]), bool(row[5])) for row in cells] == 2 * [(False, True), (False, True), (True, False)]


@pytest.mark.full
def test_bench_as_json_with_a_profile(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "-m", tiny, "-p", "8", "-n", "2", "-r", "1", "-o", "json", "--profile"]) == 0
    prompt, generation = json.loads(capsys.readouterr().out)
    assert (prompt["model"], prompt["device"], prompt["test"], generation["test"]) == (tiny, "CPU", "pp8", "tg2")
    for row in (prompt, generation):
        assert row["tokens_per_second"] > 0 and row["deviation"] == 0
        assert row["profile"] and all(part["n"] >= 1 and part["work"] >= 0 for part in row["profile"])
    assert prompt["gigabytes_per_second"] is None and generation["gigabytes_per_second"] > 0
    assert generation["gigaops_per_second"] is None and prompt["gigaops_per_second"] > 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["-p", "0", "-n", "0"], "nothing to measure: give -p or -n a length"),
        (["-p", "x"], "-p/--n-prompt: expected whole numbers"),
        (["-r", "0"], "-r/--repetitions: expected 1 or more, got 0"),
    ],
)
def test_invalid_bench_flags(tiny: str, capsys: pytest.CaptureFixture[str], flags: list[str], said: str) -> None:
    assert cli.main(["bench", "-m", tiny, *flags]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.full
def test_perplexity(tiny: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["perplexity", "-m", tiny, "-f", text, "-c", "16"]) == 0
    chunks, final = capsys.readouterr().out.splitlines()
    values = [float(value) for value in re.findall(r"\[\d+\](\d+\.\d{4}),", chunks)]
    assert [int(i) for i in re.findall(r"\[(\d+)\]", chunks)] == list(range(1, len(values) + 1)) and len(values) > 4
    found = re.fullmatch(r"Final estimate: PPL = (\d+\.\d{4}) \+/- (\d+\.\d{5})", final)
    assert found is not None and float(found[1]) == values[-1] and float(found[2]) > 0
    assert all(value > 10 for value in values)  # random weights predict badly
    assert cli.main(["perplexity", "-m", tiny, "-f", text, "-c", "16", "--chunks", "2"]) == 0
    first, final = capsys.readouterr().out.splitlines()
    assert chunks.startswith(first) and f"PPL = {values[1]:.4f} " in final
    assert cli.main(["perplexity", "-m", tiny, "-f", text, "-c", "32"]) == 0
    assert len(re.findall(r"\[\d+\]", capsys.readouterr().out)) == len(values) // 2


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "-f/--file: expected a text file"),
        (["-f", "no-such-file"], "-f/--file no-such-file: "),
        (["-f", "@text", "-c", "4096"], "needs at least"),
        (["-f", "@text", "-c", "2"], "nothing to score"),
        (["-f", "@text", "--chunks", "0"], "nothing to score"),
        (["-f", "@model"], "utf-8"),
    ],
)
def test_what_perplexity_cannot_score(
    tiny: str, text: str, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    named = {"@text": text, "@model": tiny}
    assert cli.main(["perplexity", "-m", tiny, *(named.get(flag, flag) for flag in flags)]) == 2
    assert said in capsys.readouterr().err


def test_pull(tiny: str, smollm2_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The path of a file, or of a model that was fetched before, alone on standard output."""
    for spec, path in ((tiny, tiny), ("smollm2", str(smollm2_path))):
        assert cli.main(["pull", spec]) == 0
        said = capsys.readouterr()
        assert (said.out, said.err) == (f"{path}\n", "")
    assert cli.main(["pull", str(tmp_path / "missing.gguf")]) == 1
    said = capsys.readouterr()
    assert not said.out and "missing.gguf" in said.err and "Traceback" not in said.err
    assert said.err.startswith("llamado: ")
