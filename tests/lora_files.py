"""LoRA adapters with random weights, as GGUF files for a given model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf.quants import quantize

from llamado.gguf.reader import GGUFFile

PARTS = ("attn_q", "attn_v", "ffn_down")


def make_adapter(
    path: Path,
    model: Path,
    *,
    parts: Sequence[str] = PARTS,
    weights: Sequence[str] = (),
    rank: int = 8,
    alpha: float | None = 16.0,
    size: float = 0.1,
    seed: int = 0,
    type: str = "F32",
    architecture: str | None = None,
    task: str = "",
    invocation: Sequence[int] = (),
    edit: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    """Write an adapter for the matrices of all layers whose names contain one of `parts`, and for those in `weights`.

    With `invocation` it is an activated LoRA. `size` is the approximate ratio of B(A x) to W x at a scale of
    rank / alpha. `edit` may add tensors and keys.
    """
    rng = np.random.default_rng(seed)
    with GGUFFile.open(model) as file:
        writer = gguf.GGUFWriter(path, architecture or file.metadata.str_("general.architecture"))
        names = [
            name
            for name in file.tensors
            if name in weights or (name.endswith(".weight") and name.split(".")[-2] in parts and "blk." in name)
        ]
        shapes = {name: file.tensors[name].ne[:3] for name in names}
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string("adapter.type", "lora")
    if alpha is not None:
        writer.add_float32("adapter.lora.alpha", alpha)
    if task:
        writer.add_string("adapter.lora.task_name", task)
    if invocation:
        kinds = gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT32
        writer.add_key_value("adapter.alora.invocation_tokens", [*invocation], *kinds)
    for name, (n_in, n_out, n_experts) in shapes.items():
        flipped, each = name == "token_embd.weight", (n_experts,) if n_experts > 1 else ()
        a = rng.standard_normal((n_out, rank) if flipped else (*each, rank, n_in)) * (1.0 if flipped else n_in**-0.5)
        b = rng.standard_normal((*each, n_in if flipped else n_out, rank)) * size * rank**-0.5
        for suffix, values in ((".lora_a", a), (".lora_b", b)):
            data = values.astype(np.float32)
            if type == "F32" or data.shape[-1] % gguf.GGML_QUANT_SIZES[Type[type]][0]:
                writer.add_tensor(name + suffix, data)
            else:
                writer.add_tensor(name + suffix, quantize(data, Type[type]), raw_dtype=Type[type])
    edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
