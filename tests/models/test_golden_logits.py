"""Every architecture compared with llama.cpp: golden rows of its small models, computed here in numpy."""

from __future__ import annotations

from pathlib import Path

import golden_logits as golden
import numpy as np
import pytest
from golden_logits import EXCEPTIONS, KEYS
from numpy.typing import NDArray
from tiny import TINY

from llamado.models import ARCHITECTURES, Output

GOLDEN = golden.read()
ADVICE = "see 'An architecture' in CONTRIBUTING.md"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("text", KEYS)
def test_rows_equal_those_of_llama_cpp(text: str, tmp_path: Path) -> None:
    assert text in GOLDEN, f"no golden rows of {text}: {ADVICE}"
    ours, theirs = golden.rows(KEYS[text], tmp_path), GOLDEN[text]
    assert ours.keys() == theirs.keys()
    expected = np.array([value for row in theirs.values() for value in row.values()])
    found = np.array([ours[at][i] for at, row in theirs.items() for i in row])
    mean, most = _tolerances(KEYS[text].output, expected)
    difference = np.abs(found - expected)
    message = f"{text}; if its small file has changed, {ADVICE}"
    assert difference.mean() <= mean, message
    np.testing.assert_allclose(found, expected, atol=most, rtol=0, err_msg=message)


def _tolerances(output: Output, expected: NDArray[np.float64]) -> tuple[float, float]:
    """Return the allowed mean and maximum difference, as in tests/interop: llama.cpp rounds some values to float16."""
    if output is Output.LOGITS:
        return 0.01, 0.05
    if output is Output.SCORES:
        return 2e-3, 2e-3
    size = float(np.abs(expected).mean())
    return 2e-3 * size, 0.01 * size


def test_every_architecture_has_golden_rows() -> None:
    assert GOLDEN.keys() == KEYS.keys()
    assert EXCEPTIONS.keys() <= TINY.keys()
    assert {TINY[key.name].architecture for key in KEYS.values()} == set(ARCHITECTURES)
