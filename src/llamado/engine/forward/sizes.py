"""What a model's parts take of memory and links, for placing them on devices."""

from __future__ import annotations

import re

from llamado.devices.split.placement import ModelSizes
from llamado.gguf.reader import GGUFFile
from llamado.gguf.types import TensorType
from llamado.models.base import Model

_LAYER = re.compile(r"blk\.(\d+)\.")
_CONTEXT = 1024
"""Cells that a predicted token attends to, and the least that attention is given a mask for."""


def model_sizes(
    file: GGUFFile,
    model: Model,
    *,
    n_cells: int,
    max_batch: int = 512,
    type_k: TensorType = TensorType.F16,
    type_v: TensorType = TensorType.F16,
) -> ModelSizes:
    """Sizes of a model that runs with a cache of `n_cells` cells and batches of up to `max_batch` tokens.

    Working memory is estimated from above: inputs, and the activations that a layer has at the same time.
    """
    hp = model.hparams
    layers, head = [0] * hp.n_layer, 0
    tensors = {
        name: file.tensors[name].nbytes + sum(adapter.nbytes(name) for adapter in model.adapters)
        for name in model.weights
    }
    for name, size in tensors.items():
        found = _LAYER.match(name)
        if found:
            layers[int(found[1])] += size
        elif name.startswith("output"):
            head += size
    embedding = tensors["token_embd.weight"]
    if "output.weight" not in tensors:
        head += embedding  # the device with the head needs the embedding's matrix too
    cell = [type_k.row_bytes(hp.n_embd_k(i)) + type_v.row_bytes(hp.n_embd_v(i)) for i in range(hp.n_layer)]
    reach = min(_CONTEXT, n_cells)
    seen = [min(reach, hp.n_swa) if hp.is_swa(i) else reach for i in range(hp.n_layer)]
    n_masks = 2 if hp.n_swa and not all(hp.is_swa(i) for i in range(hp.n_layer)) else 1
    hidden = 4 * hp.n_embd
    attention = max(
        (2 * hp.head_dim_k * q + 2 * hp.head_dim_k * k for q, k in zip(hp.n_head, hp.n_head_kv, strict=True))
    )
    activations = 4 * (4 * hp.n_embd + max(attention, 3 * max(hp.n_ff)))
    return ModelSizes(
        layers=tuple(layers),
        kv=tuple(size * n_cells for size in cell),
        kv_read=tuple(size * n for size, n in zip(cell, seen, strict=True)),
        head=head,
        embedding=embedding,
        hidden=hidden,
        inputs=n_masks * 2 * reach + 20,
        logits=4 * hp.n_vocab,
        compute=max_batch * (n_masks * 2 * n_cells + 20 + 2 * hidden + activations),
        head_compute=max_batch * 4 * hp.n_vocab,
        tensors=tensors,
    )


def usual_weights(file: GGUFFile, model: Model) -> tuple[TensorType, int]:
    """The type that most bytes of the layers' matrices have, and the length of their rows: what speeds depend on."""
    n_bytes: dict[TensorType, int] = {}
    for name in model.weights:
        info = file.tensors[name]
        if info.ne[1] > 1 and _LAYER.match(name):
            n_bytes[info.type] = n_bytes.get(info.type, 0) + info.nbytes
    return max(n_bytes, key=n_bytes.__getitem__, default=TensorType.F16), model.hparams.n_embd
