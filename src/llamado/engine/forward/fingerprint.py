"""What tells models apart whose cells are not interchangeable."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from llamado.engine.forward.contract import Activated
from llamado.ggml.role import ModelPart
from llamado.gguf.reader import GGUFFile
from llamado.models.base import Model
from llamado.models.memory import Memory

# Of each end of a tensor: two fine-tunings of a model differ nearly everywhere, and reading all of it would take as
# long as loading.
_SAMPLE = 2048


def fingerprint(file: GGUFFile, model: Model, memory: Memory, scales: Sequence[float] = ()) -> bytes:
    """SHA-256 of the architecture, the hyper-parameters, and name, shape and ends of each weight that cells depend on.

    These are all but the output's. And of what the context of a sequence makes of positions (see Factors), of whether
    a quantised cache is turned, of the control vector, and of the adapters that work: those with a scale other than 0.
    """
    digest = hashlib.sha256(f"{model.architecture}\n{model.hparams!r}\n".encode())
    if any(name.startswith("rope_factors_") for name in model.weights):
        digest.update(b"long" if memory.n_ctx > model.hparams.n_ctx_short else b"short")
    if memory.unturned:
        digest.update(b"unturned")
    shaping = [name for name, roles in model.roles.items() if any(role.part is not ModelPart.OUTPUT for role in roles)]
    for name in sorted(shaping):
        info = file.tensors[name]
        data = file.data(name)
        digest.update(f"{name} {info.type.name} {info.ne}\n".encode())
        digest.update(data[:_SAMPLE].tobytes())
        digest.update(data[-_SAMPLE:].tobytes())
    if model.control is not None:
        digest.update(b"control " + model.control.stamp)
    for adapter, scale in zip(model.adapters, scales, strict=False):
        adapted = sorted(adapter.pairs.keys() & shaping)
        if not scale or not adapted:
            continue
        digest.update(b"adapter " + struct.pack("<fd", scale, adapter.alpha))
        if isinstance(scales, Activated):
            digest.update(b"from " + struct.pack("<q", scales.start))
        for weight in adapted:
            for tensor in adapter.pairs[weight]:
                data = adapter.data(tensor.name)
                digest.update(f"{weight} {tensor.type.name} {tensor.ne}\n".encode())
                digest.update(data[:_SAMPLE].tobytes())
                digest.update(data[-_SAMPLE:].tobytes())
    return digest.digest()
