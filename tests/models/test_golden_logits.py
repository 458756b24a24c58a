"""Every architecture compared with llama.cpp: golden rows of its small models, computed here in numpy."""

from __future__ import annotations

from pathlib import Path

import golden_logits as golden
import numpy as np
import pytest
from golden_logits import EXCEPTIONS, KEYS
from tiny import TINY

from llamado.models import ARCHITECTURES

GOLDEN = golden.read()
TOLERANCE = 0.01
ADVICE = "see 'An architecture' in CONTRIBUTING.md"


@pytest.mark.parametrize("text", KEYS)
def test_numbers_are_those_of_llama_cpp(text: str, tmp_path: Path) -> None:
    assert text in GOLDEN, f"no golden rows of {text}: {ADVICE}"
    ours = golden.rows(KEYS[text], tmp_path)
    assert ours.keys() == GOLDEN[text].keys()
    for at, row in GOLDEN[text].items():
        found = ours[at][[*row]]
        message = f"row {at} of {text}; if its small file has changed, {ADVICE}"
        np.testing.assert_allclose(found, [*row.values()], atol=TOLERANCE, rtol=0, err_msg=message)


def test_every_architecture_has_golden_rows() -> None:
    assert GOLDEN.keys() == KEYS.keys()
    assert EXCEPTIONS.keys() <= TINY.keys()
    assert {TINY[key.name].architecture for key in KEYS.values()} == set(ARCHITECTURES)
