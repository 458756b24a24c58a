"""Specification of a small projector file (mmproj): keys and tensor shapes; the names determine the random weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from kept_files import kept
from numpy.typing import NDArray
from tiny_models import encode_weight

from llamado.devices.cpu.device import CpuDevice
from llamado.gguf.reader import GGUFFile
from llamado.media.chunks import EncoderInput, Piece, TokenText
from llamado.media.media import MediaKind
from llamado.models.encoders.encoder import EMBEDDINGS, MediaEncoder
from llamado.models.encoders.registry import load_encoders

Shape = int | tuple[int, ...]


@dataclass(frozen=True)
class TinyProjector:
    """A small projector file with one encoder.

    `keys` have no prefix `clip.vision.` (`clip.audio.` for sounds), except those that begin with `clip.`. `tensors` are
    those outside the layers, `layer` those of every layer, by name without the layer's prefix; shapes begin with ne0.
    `layers` adds or replaces tensors of single layers; a shape of None removes one. `text` is the architecture of a
    text model that it fits, whose width is `n_embd`; `tokens` are special tokens that its vocabulary must have.
    """

    projector: str
    keys: Mapping[str, Any]
    layer: Mapping[str, Shape]
    tensors: Mapping[str, Shape]
    n_embd: int
    layers: Mapping[int, Mapping[str, Shape | None]] = field(default_factory=dict)
    kind: MediaKind = MediaKind.IMAGE
    n_layer: int = 2
    stack: str = "v.blk"
    text: str = "llama"
    tokens: tuple[str, ...] = ()
    variant: str = ""
    half: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Projector and variant."""
        return f"{self.projector}-{self.variant}" if self.variant else self.projector

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors by their full names."""
        found: dict[str, Shape | None] = dict(self.tensors)
        for i in range(self.n_layer):
            for name, shape in {**self.layer, **self.layers.get(i, {})}.items():
                found[f"{self.stack}.{i}.{name}"] = shape
        return {
            name: shape if isinstance(shape, tuple) else (shape,) for name, shape in found.items() if shape is not None
        }


def write(tiny: TinyProjector, path: Path, *, wtype: str = "F32", seed: int = 0) -> Path:
    """Write the file. Matrices are of `wtype`, if their rows are whole blocks of it; convolutions are F32 or F16."""
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_name(f"a small projector {tiny.name}")
    is_picture = tiny.kind is MediaKind.IMAGE
    prefix = "clip.vision." if is_picture else "clip.audio."
    writer.add_bool("clip.has_vision_encoder" if is_picture else "clip.has_audio_encoder", True)
    writer.add_string("clip.projector_type", tiny.projector)
    keys: dict[str, Any] = {
        "block_count": tiny.n_layer,
        "projection_dim": tiny.n_embd,
        "attention.layer_norm_epsilon": 1e-5,
    }
    if is_picture:
        keys |= {"image_mean": [0.5, 0.45, 0.4], "image_std": [0.5, 0.55, 0.6]}
    for key, value in (keys | dict(tiny.keys)).items():
        _add(writer, key if key.startswith("clip.") else prefix + key, value)
    rng = np.random.default_rng(seed)
    for name, shape in tiny.shapes().items():
        values = _values(rng, name, shape)
        plain = len(shape) < 2 or not name.endswith(".weight") or any(part in name for part in ("position", "norm"))
        # llama.cpp has these convolutions and codebooks in F32 only.
        plain |= len(shape) > 3 and name.startswith("a.conv1d.")
        plain |= any(part in name for part in (".conv_dw.", ".code"))
        # Its converter writes these of SAM as F32, and it stops with a failed assertion at others.
        plain |= name.startswith("v.sam.") and any(part in name for part in (".pos_", ".neck.", ".net_"))
        is_matrix = len(shape) == 2 and not plain
        type_name = wtype if is_matrix else "F16" if wtype != "F32" and len(shape) > 2 and not plain else "F32"
        # Gemma 3's converter quantizes all but this matrix, which llama.cpp transposes.
        if any(part in name for part in tiny.half) or (is_matrix and wtype != "F32" and ".input_projection." in name):
            type_name = "F16"
        block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]][0]
        if type_name == "F32" or shape[0] % block:
            writer.add_tensor(name, values)
        elif type_name == "F16":
            writer.add_tensor(name, values.astype(np.float16))
        else:
            rows = values.reshape(-1, shape[0])
            data, type = encode_weight(rng, type_name, len(rows), shape[0], float(rows.std()))
            writer.add_tensor(name, data.reshape(*shape[:0:-1], -1), raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


make = kept(write)


def encoder_of(
    path: Path, kind: MediaKind = MediaKind.IMAGE, tokens: Collection[str] = ()
) -> tuple[GGUFFile, MediaEncoder]:
    """Open a projector file; return it and its encoder. `tokens` are special tokens of the text model."""
    file = GGUFFile.open(path)
    return file, load_encoders(file, has_token=tokens.__contains__).of(kind)


def text_of(piece: Piece) -> str:
    """Return the text of a piece that is no chunk."""
    assert isinstance(piece, (str, TokenText))
    return piece if isinstance(piece, str) else piece.text


def encode(device: CpuDevice, file: GGUFFile, encoder: MediaEncoder, given: EncoderInput) -> NDArray[np.float32]:
    """Return the embeddings of an input: float32 [n_tokens, n_embd]."""
    graph = encoder.build(given.shape)
    bytes_of = {name: file.tensors[name] for name in encoder.weights}
    device.load(
        [
            (encoder.weights[name], file.shard_data(info.shard)[info.offset : info.offset + info.nbytes])
            for name, info in bytes_of.items()
        ]
    )
    out = graph.outputs[EMBEDDINGS]
    device.place([*graph.inputs.values(), out])
    for name, tensor in graph.inputs.items():
        array = given.arrays[name]
        assert array.nbytes == tensor.nbytes, (name, array.shape, tensor)
        device.write(tensor, array.reshape(-1).view(np.uint8))
    device.submit(graph)
    rows = device.read(out, 0, out.nbytes).result().view(np.float32).reshape(out.ne[1], out.ne[0])
    return rows.copy()


def _values(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return random values of a tensor, in numpy's order of axes."""
    normal = rng.standard_normal(shape[::-1]).astype(np.float32)
    if name in ("a.window", "a.mel_filters") or name.endswith("_var"):
        return np.abs(normal) + np.float32(0.1)
    if name.endswith(("_min", "_max")):
        return np.full_like(normal, -0.8 if name.endswith("_min") else 0.7)
    if "norm" in name or ".ln" in name or "_ln" in name or "scale" in name or ".ls" in name:
        return np.float32(1) + normal * np.float32(0.2) if not name.endswith("bias") else normal * np.float32(0.2)
    if len(shape) == 1:
        return normal * np.float32(0.2)
    if "position" in name or "pos_embd" in name:
        return normal * np.float32(0.3)
    n = int(np.prod(shape[:-1]))
    return normal * np.float32(n**-0.5)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, np.int32):
        writer.add_int32(key, int(value))
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
