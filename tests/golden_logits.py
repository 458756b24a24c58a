"""Golden rows: llama.cpp's largest values for every small model, stored in `models/golden_logits.json`.

`interop/write_golden_logits.py` writes the file; `models/test_golden_logits.py` compares our models with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from own_device import OwnDevice
from tiny import TINY, Tiny
from tiny.spec import write as write_model

from llamado.engine.embedding.embedder import Embedder
from llamado.engine.embedding.load import pair
from llamado.engine.forward.options import RunnerOptions
from llamado.engine.forward.runner import ModelRunner
from llamado.gguf.reader import GGUFFile
from llamado.models import ARCHITECTURES, Output, Pooling, load_model
from llamado.models.encoder import Encoder
from llamado.models.memory import Span
from llamado.text.tokenizer.tokenizer import load_tokenizer

Rows = dict[int, NDArray[np.float32]]
"""Logits of one text: complete rows by token position, or pooled rows by document number."""

PATH = Path(__file__).parent / "models" / "golden_logits.json"
N_CTX = 512
TOKENS = np.random.default_rng(5).integers(3, 300, 150).astype(np.int32)
TOKENS[[30, 60, 90]] = 119, 290, 100  # tokens that switch the adapter of graniteswitch
POSITIONS = (40, 100, 149)
QUERY, DOCUMENTS = "Where is Paris?", ("Paris is in France.", "A fox jumps.", "One two three four five six.")
N_KEPT = 6
"""Number of values stored per row, the largest."""

EXCEPTIONS = {
    "deepseek2-glm-4.7-flash": "its graph is that of deepseek2; only its vocabulary is large, and takes long to write",
}
"""Small models without golden rows, and why."""


class Key(NamedTuple):
    """A small model and the output that is compared."""

    name: str
    output: Output

    def __str__(self) -> str:
        return f"{self.name} {self.output.value}"


def _keys(tiny: Tiny) -> Iterator[Key]:
    if tiny.name not in EXCEPTIONS:
        encoder = issubclass(ARCHITECTURES[tiny.architecture].load(), Encoder)
        yield Key(tiny.name, Output.HIDDEN if encoder else Output.LOGITS)
        if any(name.startswith("cls.") for name in tiny.shapes()):
            yield Key(tiny.name, Output.SCORES)


KEYS = {str(key): key for tiny in TINY.values() for key in _keys(tiny)}


class _Device(OwnDevice):
    dtype = np.float32


@contextmanager
def _runner(path: Path, output: Output) -> Iterator[ModelRunner]:
    """Open a model on the numpy device, without compiling."""
    with GGUFFile.open(path) as file:
        runner = ModelRunner(
            file,
            load_model(file),
            [_Device("HERE")],
            RunnerOptions(n_cells=N_CTX, max_batch=len(TOKENS), whole=output is not Output.LOGITS, output=output),
        )
        try:
            yield runner
        finally:
            runner.close()


def rows(key: Key, folder: Path) -> Rows:
    """Return the rows that llamado computes."""
    with _runner(write_model(TINY[key.name], folder / "m.gguf"), key.output) as runner:
        if key.output is Output.LOGITS:
            handle = runner.memory.allocate(len(TOKENS))
            assert handle is not None
            outputs = np.array(POSITIONS, np.int32)
            logits = runner.start(TOKENS, [Span(handle, 0, len(TOKENS), before=[])], outputs).result()
            return {at: log_softmax(row) for at, row in zip(POSITIONS, logits, strict=True)}
        pooling = Pooling.RANK if key.output is Output.SCORES else Pooling.NONE
        embedder = Embedder(runner, pooling=pooling, causal=runner.model.hparams.causal, n_ctx=N_CTX)
        if key.output is Output.HIDDEN:
            vectors = embedder.submit([TOKENS.tolist()]).result()[0].vectors
            found = {at: vectors[at] for at in POSITIONS}
        else:
            tokenizer = load_tokenizer(runner.file.metadata)
            pairs = [pair(QUERY, document, tokenizer, "") for document in DOCUMENTS]
            found = {i: one.vectors[0] for i, one in enumerate(embedder.submit(pairs).result())}
        embedder.close()
        return found


def log_softmax(row: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the log-probabilities of a row of logits."""
    shifted = row - row.max()
    result: NDArray[np.float32] = shifted - np.log(np.exp(shifted).sum())
    return result


Golden = dict[str, dict[int, dict[int, float]]]
"""Log-probabilities, vector elements or scores by key, position and index in the row."""


def read() -> Golden:
    """Return the golden rows of the file."""
    if not PATH.exists():
        return {}
    found = json.loads(PATH.read_text())
    return {
        key: {int(at): {int(i): value for i, value in row.items()} for at, row in kept.items()}
        for key, kept in found.items()
    }


def write(golden: Golden) -> None:
    """Write the file, one line per key."""
    lines = [f"{json.dumps(key)}: {json.dumps(golden[key], separators=(',', ':'))}" for key in sorted(golden)]
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n")
