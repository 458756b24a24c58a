"""Every architecture held to llama.cpp's numbers: golden rows of its small models, computed here in numpy."""

from __future__ import annotations

from pathlib import Path

import golden_logits as golden
import numpy as np
import pytest
from golden_logits import EXCEPTIONS, KEYS
from tiny import TINY

GOLDEN = golden.read()
TOLERANCE = 0.01
"""Of log-probabilities; of vectors and scores, relative to their mean."""


@pytest.mark.parametrize("text", KEYS)
def test_numbers_are_those_of_llama_cpp(text: str, tmp_path: Path) -> None:
    assert text in GOLDEN, (
        f"no golden row: PYTHONPATH=tests python tests/interop/write_golden_logits.py {KEYS[text].name}"
    )
    ours = golden.rows(KEYS[text], tmp_path)
    assert ours.keys() == GOLDEN[text].keys()
    for at, row in GOLDEN[text].items():
        found = ours[at][[*row]]
        np.testing.assert_allclose(found, [*row.values()], atol=TOLERANCE, rtol=0)


def test_every_small_model_has_golden_rows() -> None:
    assert GOLDEN.keys() == KEYS.keys()
    assert EXCEPTIONS.keys() <= TINY.keys()
    assert {TINY[key.name].architecture for key in KEYS.values()} == {tiny.architecture for tiny in TINY.values()}
