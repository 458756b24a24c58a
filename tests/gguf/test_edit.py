"""`llamado gguf split|merge|set`: what they write is whole, and what would not be a model is not written."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import make_llama

from llamado.commands import cli
from llamado.gguf.reader import GGUFFile
from llamado.gguf.writer import read_fields

SPLIT = ("split.no", "split.tensors.count", "split.count")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_llama(tmp_path / "m.gguf")


def contents(path: Path) -> dict[str, bytes]:
    with GGUFFile.open(path) as file:
        return {name: file.data(name).tobytes() for name in file.tensors}


@pytest.mark.parametrize("flags", [["--split-max-tensors", "7"], ["--split_max_size=1M", "--no-tensor-first-split"]])
def test_parts_joined_are_the_file_again(model: Path, flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["gguf", "split", *flags, str(model), str(model.with_name("p"))]) == 0
    parts = sorted(model.parent.glob("p-*.gguf"))
    assert len(parts) > 1 and contents(parts[0]) == contents(model)
    out = model.with_name("joined.gguf")
    assert cli.main(["gguf", "--merge", str(parts[0]), str(out)]) == 0
    assert contents(out) == contents(model)
    fields = read_fields(out)
    assert [*fields][-3:] == [*SPLIT] and fields["split.count"][4:] == b"\0\0"
    assert {key: value for key, value in fields.items() if key not in SPLIT} == read_fields(model)
    capsys.readouterr()
    before = out.read_bytes()
    assert cli.main(["gguf", "merge", str(parts[0]), str(out)]) == 1  # it is there
    assert cli.main(["gguf", "merge", str(model), str(out.with_name("new"))]) == 1  # no part
    assert cli.main(["gguf", "split", str(parts[0]), str(out.with_name("q"))]) == 1  # parts already
    said = capsys.readouterr().err
    assert "already" in said and "not part of" in said and "merge it first" in said and out.read_bytes() == before


def test_a_dry_run_prints_the_plan_and_writes_nothing(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = set(model.parent.iterdir())
    assert (
        cli.main(["gguf", "split", str(model), str(model.with_name("p")), "--split-max-tensors", "9", "--dry-run"]) == 0
    )
    assert "split 00001: n_tensors = 9, total_size = 0M" in capsys.readouterr().out
    assert set(model.parent.iterdir()) == there


def test_setting_a_value_keeps_its_type_and_all_other_bytes(model: Path) -> None:
    before, tensors = read_fields(model), contents(model)
    assert cli.main(["gguf", "set", str(model), "general.name", "another, longer name"]) == 0
    assert cli.main(["gguf", "set", str(model), "llama.rope.freq_base", "5e4"]) == 0
    assert cli.main(["gguf", "set", str(model), "mine.list", "[1, 2]", "--type", "uint8"]) == 0
    after = read_fields(model)
    assert contents(model) == tensors and [*after] == [*before, "mine.list"]
    assert {key for key in before if after[key] != before[key]} == {"general.name", "llama.rope.freq_base"}
    with GGUFFile.open(model) as file:
        assert file.metadata["general.name"] == "another, longer name"
        assert file.metadata["llama.rope.freq_base"] == 5e4 and file.metadata.type_name("mine.list") == "array of uint8"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (["llama.block_count", "7"], "does not run"),
        (["llama.block_count", "many"], "uint32"),
        (["llama.block_count", "-1"], "uint32"),
        (["tokenizer.ggml.tokens", '["a"]'], "does not run"),
        (["tokenizer.ggml.token_type", "[1.5]"], "array of int32"),
        (["general.alignment", "7", "--type", "uint32"], "alignment"),
        (["split.count", "1"], "split and merge"),
        (["mine.key", "1"], "--type"),
        (["Mine Key", "1", "--type", "uint8"], "a key consists"),
        (["general.name", "x", "--type", "uint8"], "cannot change"),
    ],
)
def test_values_that_break_a_model_are_rejected(
    model: Path, given: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = model.read_bytes()
    assert cli.main(["gguf", "set", str(model), *given]) == 1
    assert reason in capsys.readouterr().err and model.read_bytes() == before
    assert [path.name for path in model.parent.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize(
    "given", [[], ["split", "a"], ["split", "a", "b", "--split-max-size", "3K"], ["--split", "--merge", "a", "b"],
              ["split", "a", "b", "--split-max-size", "3M", "--split-max-tensors", "3"]]
)  # fmt: skip
def test_unknown_arguments_are_rejected(given: list[str]) -> None:
    assert cli.main(["gguf", *given]) == 2
