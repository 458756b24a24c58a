"""Memory and bandwidth costs of model parts, used by layer placement."""

from __future__ import annotations

from llamado.devices.split.placement import ModelSizes, WeightSize
from llamado.ggml.role import ModelPart, Role
from llamado.gguf.header import ModelFile
from llamado.gguf.types import TensorType
from llamado.models.base import Model
from llamado.models.memory import MemoryOptions

_CONTEXT = 1024
"""Cells that a token attends to in predictions, and the least mask size of attention."""


def model_sizes(file: ModelFile, model: Model, options: MemoryOptions) -> ModelSizes:
    """Return the sizes of a model with a memory of these options.

    Working memory is an upper estimate: inputs, and the activations that a layer has at the same time.
    """
    hp = model.hparams
    weights = weight_sizes(file, model)
    layers, layers_read = [0] * hp.n_layer, [0] * hp.n_layer
    for role, size in weights.items():
        if role.part is ModelPart.LAYER:
            layers[role.layer] += size.held
            layers_read[role.layer] += size.read
    head = [size.held for role, size in weights.items() if role.part is ModelPart.OUTPUT]
    embedding = [size for role, size in weights.items() if role.part is ModelPart.INPUT]
    memory, max_batch = model.memory(options), options.max_batch
    reach = min(_CONTEXT, options.n_cells)
    hidden = 4 * hp.n_embd
    attention = max(
        (2 * hp.head_dim_k * q + 2 * hp.head_dim_k * k for q, k in zip(hp.n_head, hp.n_head_kv, strict=True))
    )
    activations = 4 * (4 * hp.n_embd + max(attention, 3 * max(hp.n_ff)))
    return ModelSizes(
        layers=tuple(layers),
        layers_read=tuple(layers_read),
        kv=tuple(memory.layer_bytes(i) for i in range(hp.n_layer)),
        kv_read=tuple(memory.read_bytes(i, reach) for i in range(hp.n_layer)),
        head=sum(head),
        embedding=sum(size.held for size in embedding),
        embedding_read=sum(size.read for size in embedding),
        hidden=hidden,
        inputs=2 * memory.mask_rows(reach) + 20,
        logits=4 * hp.n_vocab,
        compute=max_batch * (2 * memory.mask_rows(options.n_cells) + 20 + 2 * hidden + activations),
        head_compute=max_batch * 4 * hp.n_vocab,
        tensors={role: size for role, size in weights.items() if role.part in (ModelPart.LAYER, ModelPart.OUTPUT)},
    )


def weight_sizes(file: ModelFile, model: Model) -> dict[Role, WeightSize]:
    """Return the size of each role of each weight, including its adapters; a weight with two roles is listed twice."""
    found = {}
    for name, roles in model.roles.items():
        info = file.tensors[name]
        pairs = [adapter.pairs[name] for adapter in model.adapters if name in adapter.pairs]
        for role in roles:
            held = info.nbytes + sum(pair.a.nbytes + pair.b.nbytes for pair in pairs)
            read = role.bytes_read(info.nbytes, info.type.row_bytes(info.ne[0]))
            read += sum(role.bytes_read(pair.a.nbytes, pair.a.nb[1]) + pair.b.nbytes for pair in pairs)
            found[role] = WeightSize(held, read)
    return found


def usual_weights(file: ModelFile, model: Model) -> tuple[TensorType, int]:
    """Return the type of most bytes of the layers' matrices, and the length of their rows, for speed measurements."""
    n_bytes: dict[TensorType, int] = {}
    for name, roles in model.roles.items():
        info = file.tensors[name]
        if info.ne[1] > 1 and roles[0].part is ModelPart.LAYER:
            n_bytes[info.type] = n_bytes.get(info.type, 0) + info.nbytes
    return max(n_bytes, key=n_bytes.__getitem__, default=TensorType.F16), model.hparams.n_embd
