"""Specification of a small model: keys and tensor shapes; the names determine the random weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf_writer import GGUFWriter
from kept_files import kept
from tiny_models import add_bpe_vocabulary, add_rwkv_vocabulary, add_spm_vocabulary, encode_weight

Shape = int | tuple[int, ...]

N_VOCAB = 512


@dataclass(frozen=True)
class Tiny:
    """A small model.

    `keys` have no architecture prefix. `tensors` are those outside the layers, `layer` those of every layer, by name
    without the layer's prefix (`attn_q.weight`); shapes begin with ne0. `layers` adds or replaces tensors of single
    layers; a shape of None removes one. `stack` is the prefix of layer numbers.

    Weights of norms are about 1, frequency factors above 1, decay rates about -1, biases and other vectors about 0, and
    matrices preserve the magnitude of their input. `deviation` overrides standard deviations by name. `pre` is the
    pre-tokenizer of a byte-pair vocabulary. `variant` distinguishes models of one architecture.
    """

    architecture: str
    keys: Mapping[str, Any]
    layer: Mapping[str, Shape]
    tensors: Mapping[str, Shape | None] = field(default_factory=dict)
    layers: Mapping[int, Mapping[str, Shape | None]] = field(default_factory=dict)
    n_layer: int = 4
    vocabulary: str = "bpe"
    pre: str = "smollm"
    n_vocab: int = N_VOCAB
    deviation: Mapping[str, float] = field(default_factory=dict)
    variant: str = ""
    stack: str = "blk"

    @property
    def name(self) -> str:
        """Architecture and variant."""
        return f"{self.architecture}-{self.variant}" if self.variant else self.architecture

    @property
    def n_embd(self) -> int:
        n: int = self.keys["embedding_length"]
        return n

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors by their full names."""
        n_vocab = self.n_vocab
        found: dict[str, Shape | None] = {"token_embd.weight": (self.n_embd, n_vocab)}
        found |= {"output_norm.weight": self.n_embd, "output.weight": (self.n_embd, n_vocab), **self.tensors}
        for i in range(self.n_layer):
            for name, shape in {**self.layer, **self.layers.get(i, {})}.items():
                found[f"{self.stack}.{i}.{name}"] = shape
        return {
            name: shape if isinstance(shape, tuple) else (shape,) for name, shape in found.items() if shape is not None
        }

    def values(self, rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        """Return random values of a tensor, in numpy's order of axes."""
        normal = rng.standard_normal(shape[::-1]).astype(np.float32)
        for part, deviation in self.deviation.items():
            if part in name:
                return normal * np.float32(deviation)
        if name.endswith("ssm_a"):
            return -np.exp(normal)  # decay rates
        if name.endswith("ssm_d"):
            return 1 + normal * np.float32(0.2)
        if name.endswith(("norm", "norm.weight")) or ("_norm_" in name and name.endswith(".weight")):
            return 1 + normal * np.float32(0.2)
        if name.endswith(".scale"):
            return 1 + normal * np.float32(0.2)
        if "rope" in name:
            return 1 + 4 * np.abs(normal)
        if len(shape) == 1:
            return normal * np.float32(0.2)
        if name == "token_embd.weight":  # smaller if tied, to limit the logits
            tied = "output.weight" not in self.shapes()
            return normal * np.float32(3 * shape[0] ** -0.5 if tied else 1.0)
        return normal * np.float32((3 if name == "output.weight" else 1) * shape[0] ** -0.5)


def write(tiny: Tiny, path: Path, *, wtype: str = "F32", wtypes: tuple[str, ...] = (), seed: int = 0) -> Path:
    """Write the file.

    Matrices of layers are of `wtype`, those of the first layers of `wtypes`, if their rows are whole blocks of it.
    """
    writer = GGUFWriter(path, tiny.architecture)
    writer.add_name("a small model")  # some vocabularies are recognized by the model's name
    writer.add_block_count(tiny.n_layer)
    for key, value in {"context_length": 2048, **tiny.keys}.items():
        _add(writer, key if key.startswith(("tokenizer.", "xielu.")) else f"{tiny.architecture}.{key}", value)
    if tiny.vocabulary == "spm":
        add_spm_vocabulary(writer, tiny.n_vocab)
    elif tiny.vocabulary == "rwkv":
        add_rwkv_vocabulary(writer, tiny.n_vocab)
    else:
        add_bpe_vocabulary(writer, tiny.n_vocab, tiny.pre)
    rng = np.random.default_rng(seed)
    types = dict(enumerate(wtypes))
    for name, shape in tiny.shapes().items():
        values = tiny.values(rng, name, shape)
        layer = re.match(r"blk\.(\d+)\.", name)
        type_name = wtype if layer is None else types.get(int(layer[1]), wtype)
        block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]][0]
        if (
            type_name == "F32"
            or len(shape) < 2
            or shape[0] % block
            or not name.startswith("blk.")
            or "bias" in name
            or "norm" in name
            or "_first" in name
        ):
            writer.add_tensor(name, values)
            continue
        rows = values.reshape(-1, shape[0])
        data, type = encode_weight(rng, type_name, len(rows), shape[0], float(rows.std()))
        writer.add_tensor(name, data.reshape(*shape[:0:-1], -1), raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


make = kept(write)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, np.ndarray):  # values of more than 32 bits
        assert value.dtype == np.uint64
        writer.add_key_value(key, value.tolist(), gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT64)
    else:
        writer.add_array(key, value)
