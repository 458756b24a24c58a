"""Output of `llamado inspect`."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import gguf_bytes as by
from rich.console import Console

from llamado.gguf import inspect
from llamado.gguf.reader import GGUFFile


def rendered(path: Path, *, tensors: bool = True, width: int = 160) -> str:
    out = io.StringIO()
    with GGUFFile.open(path) as file:
        inspect.render(file.header, Console(file=out, width=width, color_system=None), tensors=tensors)
    return out.getvalue()


def test_shows_metadata_tensors_and_totals(tmp_path: Path) -> None:
    content = by.file(
        [
            by.entry("general.name", by.STRING, by.text("a [red]model[/red]\x1b[31m")),
            by.entry("long", by.STRING, by.text("y" * 1000)),
            by.entry("scores", by.ARRAY, by.array(by.F32, 9, struct.pack("<9f", *range(9)))),
            by.entry("words", by.ARRAY, by.array(by.STRING, 2, by.text("one") + by.text("two"))),
        ],
        [by.tensor("blk.0.w[0]", [256, 4], kind=12), by.tensor("n", [10], offset=576)],
        bytes(640),
    )
    shown = rendered(by.save(tmp_path, content))
    assert "a [red]model[/red]\\x1b[31m" in shown  # neither markup nor escapes of a file reach the terminal
    assert "\x1b" not in shown
    assert "(1000 characters)" in shown and "y" * 200 not in shown
    assert "[0, 1, 2, 3, 4, 5, … (9)]" in shown
    assert "['one', 'two']" in shown
    assert "array of float32" in shown
    row = next(line.split() for line in shown.splitlines() if "blk.0.w[0]" in line)
    assert row[:-1] == ["blk.0.w[0]", "Q4_K", "256", "×", "4", "576", "bytes"]
    totals = next(line.split() for line in shown.splitlines() if line.split()[:1] == ["all"])
    assert totals == ["all", "2", "1,034", "616", "bytes", "4.77"]
    assert "blk.0" not in rendered(tmp_path / "model.gguf", tensors=False)


def test_sizes() -> None:
    assert inspect.size_text(999) == "999 bytes"
    assert inspect.size_text(253_113_024) == "253.1 MB"
    assert inspect.size_text(17_000_000_000) == "17.00 GB"
