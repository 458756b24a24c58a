"""What tells models apart whose cells are not interchangeable."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from llamado.gguf.reader import GGUFFile
from llamado.models.base import Model

# Of each end of a tensor: two fine-tunings of a model differ nearly everywhere, and reading all of it would take as
# long as loading.
_SAMPLE = 2048


def fingerprint(file: GGUFFile, model: Model, scales: Sequence[float] = ()) -> bytes:
    """SHA-256 of the architecture, the hyper-parameters, the table of tensors and the ends of each tensor's data.

    And of the adapters that work: those with a scale other than 0.
    """
    digest = hashlib.sha256(f"{model.architecture}\n{model.hparams!r}\n".encode())
    for name in sorted(model.weights):
        info = file.tensors[name]
        data = file.data(name)
        digest.update(f"{name} {info.type.name} {info.ne}\n".encode())
        digest.update(data[:_SAMPLE].tobytes())
        digest.update(data[-_SAMPLE:].tobytes())
    for adapter, scale in zip(model.adapters, scales, strict=False):
        if not scale:
            continue
        digest.update(b"adapter " + struct.pack("<fd", scale, adapter.alpha))
        for weight in sorted(adapter.pairs):
            for tensor in adapter.pairs[weight]:
                data = adapter.data(tensor.name)
                digest.update(f"{weight} {tensor.type.name} {tensor.ne}\n".encode())
                digest.update(data[:_SAMPLE].tobytes())
                digest.update(data[-_SAMPLE:].tobytes())
    return digest.digest()
