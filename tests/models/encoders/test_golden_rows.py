"""Every projector compared with llama.cpp: golden rows of its small files, computed here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from projectors import every, golden_rows
from projectors.golden_rows import FOLDER
from tiers import chosen

PROJECTORS = every()
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
SLOW = "deepseek4v", "deepseekocr", "deepseekocr2", "gemma3nv", "step3vl"
"""Projectors whose pictures are large."""


def compare(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], tolerance: float) -> None:
    """Compare chunks; rows may differ by a part of their mean."""
    assert [chunk.get("tokens") or chunk["n_tokens"] for chunk in ours] == [
        chunk.get("tokens") or chunk["n_tokens"] for chunk in theirs
    ]
    for own, golden in zip(ours, theirs, strict=True):
        for row, expected in golden.get("rows", {}).items():
            most = tolerance * float(np.abs(expected).mean())
            np.testing.assert_allclose(own["rows"][row], expected, atol=most, rtol=0, err_msg=f"row {row}")


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in NAMES])
def test_embeddings_equal_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    # llama.cpp rounds keys, values and some weights to float16.
    compare(golden_rows.ours(PROJECTORS[name], tmp_path), golden_rows.read(name), 0.01)


@pytest.mark.parametrize("name", chosen(["adapter", "idefics3", "ldp", "llama4", "phi4"], ("idefics3", "ldp")))
def test_files_with_half_precision(name: str, tmp_path: Path) -> None:
    compare(golden_rows.ours(PROJECTORS[name], tmp_path, "F16"), golden_rows.read(name), 0.01)
