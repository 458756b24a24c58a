"""Load LoRA adapters for a model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from llamado.gguf.reader import GGUFFile
from llamado.models.adapter import Adapter
from llamado.models.base import Model
from llamado.models.batch import BatchShape, Output
from llamado.models.errors import InvalidAdapter
from llamado.models.memory import MemoryOptions

_CELLS = 256


def load_adapters(model: Model, paths: Sequence[str | os.PathLike[str]], *, mmap: bool = True) -> tuple[Adapter, ...]:
    """Open adapter files and attach them to a model, replacing its current adapters.

    The caller closes the files once the model is no longer used. Raises InvalidAdapter or GgufError, naming file and
    tensor.
    """
    adapters: list[Adapter] = []
    files: list[GGUFFile] = []
    before = model.adapters
    try:
        for path in paths:
            files.append(_open(Path(path), mmap))
            adapters.append(
                Adapter(
                    files[-1],
                    len(adapters),
                    architecture=model.architecture,
                    weights=model.weights,
                    roles=model.roles,
                )
            )
        model.adapters = tuple(adapters)
        if adapters:
            _check_used(model)
    except BaseException:
        model.adapters = before
        for file in files:
            file.close()
        raise
    return model.adapters


def _open(path: Path, mmap: bool) -> GGUFFile:
    file = GGUFFile.open(path, mmap=mmap)
    if file.n_shards > 1:
        file.close()
        raise InvalidAdapter(f"{path}: the adapter is split over several files; merge them first")
    return file


def _check_used(model: Model) -> None:
    """Raise InvalidAdapter if a forward pass would ignore a pair, because the results would be wrong."""
    output = Output.LOGITS if model.generates else Output.SCORES
    shape = BatchShape(1, 1, _CELLS, output, (1.0,) * len(model.adapters))
    graph = model.build(shape, model.memory(MemoryOptions(n_cells=_CELLS)))
    used = {source for node in graph.nodes for source in node.src}
    for adapter in model.adapters:
        for weight, pair in adapter.pairs.items():
            if pair.a not in used:
                raise InvalidAdapter(
                    f"{adapter.path}: tensor '{weight}.lora_a' is for a weight '{weight}' that nothing is multiplied "
                    "with"
                )
