"""Hyper-parameters of every small model, also without each key, with other values and with more layers, as digests.

Golden rows compare the values that small files give; these digests also hold the defaults of missing keys, which values
are refused, and the patterns of deep models, and the entry `ranges` holds the valid ranges of all keys.
`PYTHONPATH=tests python tests/models/test_read_hparams.py` writes the digests anew, and with an entry's name prints
what it is made of.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import TINY, Tiny

from llamado.gguf.errors import GgufError
from llamado.gguf.metadata import Metadata, StringArray, Value
from llamado.models import ARCHITECTURES
from llamado.models.errors import InvalidModel, UnsupportedModel
from llamado.models.keys import FLOATS, INTEGERS, Keys

PATH = Path(__file__).parent / "hparams.json"
DEEP = 14
"""Number of layers of deep models."""


def _metadata(tiny: Tiny, n_layer: int) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for key, value in {"block_count": n_layer, "context_length": 2048, **tiny.keys}.items():
        if isinstance(value, (list, tuple)):
            if n_layer != tiny.n_layer and len(value) == tiny.n_layer:  # one value per layer
                value = [value[i % len(value)] for i in range(n_layer)]
            value = StringArray.of(value) if isinstance(value[0], str) else np.array(value)
        found[key if key.startswith(("tokenizer.", "xielu.")) else f"{tiny.architecture}.{key}"] = value
    return found | {"general.architecture": tiny.architecture}


def _read(architecture: str, metadata: dict[str, Value]) -> str:
    """Return the hyper-parameters and the model's own constants, with floats of seven digits; or the kind of error."""
    loaded = ARCHITECTURES[architecture].load()
    model: Any = loaded.__new__(loaded)
    try:
        found = model._read_hparams(Keys(Metadata(metadata)), 512)
    except (GgufError, InvalidModel, UnsupportedModel) as error:
        return type(error).__name__
    text = re.sub(r" at 0x\w+", "", f"{found} {sorted(vars(model).items())}")
    return re.sub(r"\d+\.\d+(e[+-]?\d+)?", lambda match: f"{float(match[0]):.7g}", text)


def lines(tiny: Tiny) -> Iterator[str]:
    for n_layer in (tiny.n_layer, DEEP):
        metadata = _metadata(tiny, n_layer)
        whole = _read(tiny.architecture, metadata)
        yield f"{n_layer} layers: {whole}"
        for key in sorted(metadata.keys() - {"general.architecture"}):
            less = _read(tiny.architecture, {name: value for name, value in metadata.items() if name != key})
            yield f"{n_layer} layers without {key}: {'the same' if less == whole else less}"
    if tiny.variant:
        return
    metadata = _metadata(tiny, tiny.n_layer)
    for key in sorted(metadata.keys() - {"general.architecture"}):
        for value in _others(metadata[key]):
            yield f"{key} = {value}: {_read(tiny.architecture, {**metadata, key: value})}"


def _others(value: Value) -> list[Value]:
    """Return other values than a key's: some of them are wrong."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, (int, float)):
        return [0, 1, -1, value + 1, 2 * value, 100 * value]
    if isinstance(value, np.ndarray):
        return [value[:-1], value[::-1], 0 * value, value + 1, 2 * value]
    return ["other"] if isinstance(value, str) else []


def ranges() -> Iterator[str]:
    """Yield the valid range of each key."""
    for table in (INTEGERS, FLOATS):
        for key, range in table.items():
            yield f"{key}: {range}"


def _digest(given: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(given).encode()).hexdigest()[:12]


def _digests() -> dict[str, str]:
    return {"ranges": _digest(ranges()), **{name: _digest(lines(TINY[name])) for name in sorted(TINY)}}


@pytest.mark.slow
def test_hyper_parameters_and_their_defaults() -> None:
    assert _digests() == json.loads(PATH.read_text())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(*(ranges() if sys.argv[1] == "ranges" else lines(TINY[sys.argv[1]])), sep="\n")
    else:
        PATH.write_text(json.dumps(_digests(), indent=0) + "\n")
