"""Every projector compared with llama.cpp: golden rows of its small files, computed here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from projectors import every, golden_rows
from projectors.golden_rows import FOLDER

PROJECTORS = every()
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))


@pytest.mark.parametrize("name", NAMES)
def test_embeddings_equal_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    ours, theirs = golden_rows.ours(PROJECTORS[name], tmp_path), golden_rows.read(name)
    assert [chunk.get("tokens") or chunk["n_tokens"] for chunk in ours] == [
        chunk.get("tokens") or chunk["n_tokens"] for chunk in theirs
    ]
    for own, golden in zip(ours, theirs, strict=True):
        for row, expected in golden.get("rows", {}).items():
            # llama.cpp rounds keys, values and some weights to float16.
            size = float(np.abs(expected).mean())
            np.testing.assert_allclose(own["rows"][row], expected, atol=0.01 * size, rtol=0, err_msg=f"row {row}")
