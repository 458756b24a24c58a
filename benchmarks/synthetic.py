"""Models of real shapes with random weights, to measure speed at sizes no package registry ships.

Blocks hold random bytes under small finite scales, so that logits are finite; text is noise. Which tensor has which
type follows llama.cpp's mix Q4_K_M: Q6_K for the embedding and for part of the layers' V and down projections.

usage: synthetic.py OUT.gguf [--shape 1b] [--mix q4_k_m] [--vocabulary-from MODEL]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, ExpertGatingFuncType, GGUFWriter
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from llamado.gguf.metadata import StringArray
from llamado.gguf.reader import GGUFFile
from llamado.gguf.sources.resolve import resolve


@dataclass(frozen=True)
class Latent:
    """Latent attention: ranks of queries and of the row; elements of a head that are not rotated, that are, and of its
    value.
    """

    q_rank: int
    rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class Delta:
    """The gated delta rule in three of four layers: elements of a head, heads of keys and of values; width of the
    shared expert.
    """

    head: int
    n_keys: int
    n_values: int
    n_ff_shared: int

    @property
    def channels(self) -> int:
        return self.head * (2 * self.n_keys + self.n_values)


@dataclass(frozen=True)
class Shape:
    n_embd: int
    n_layer: int
    n_head: int
    n_head_kv: int
    n_ff: int
    head: int = 0
    """Elements of a head; 0: the width divided by the number of heads."""
    n_experts: int = 0
    """Experts of a layer, of which a token goes through `n_used`; `n_ff` is then each one's."""
    n_used: int = 0
    latent: Latent | None = None
    """Of DeepSeek's architecture, with a shared expert."""
    delta: Delta | None = None
    """Of Qwen3-Next's."""

    @property
    def architecture(self) -> str:
        if self.delta is not None:
            return "qwen3next"
        return "deepseek2" if self.latent is not None else "qwen3moe" if self.n_experts else "llama"

    @property
    def head_dim(self) -> int:
        return self.head or self.n_embd // self.n_head


SHAPES = {
    "tiny": Shape(256, 4, 4, 2, 768),
    "0.3b": Shape(1024, 16, 16, 8, 4096),
    "0.5b": Shape(896, 24, 14, 2, 4864),
    "1b": Shape(2048, 16, 32, 8, 8192),  # Llama 3.2 1B
    "3b": Shape(3072, 28, 24, 8, 8192),  # Llama 3.2 3B
    "8b": Shape(4096, 32, 32, 8, 14336),  # Llama 3.1 8B
    "a3b-4": Shape(2048, 4, 32, 4, 768, head=128, n_experts=128, n_used=8),  # 4 of the 48 layers of Qwen3-30B-A3B
    "a3b-48": Shape(2048, 48, 32, 4, 768, head=128, n_experts=128, n_used=8),  # Qwen3-30B-A3B, 18 GB
    # Half of its layers: what a machine of 24 GB holds a second time, in workers
    "a3b-24": Shape(2048, 24, 32, 4, 768, head=128, n_experts=128, n_used=8),
    # 4 of the 46 layers with experts of GLM-4.7-Flash
    "flash-4": Shape(2048, 4, 20, 1, 1536, n_experts=64, n_used=4, latent=Latent(768, 512, 192, 64, 256)),
    # All of them but the first, which has no experts; 17 GB
    "flash-46": Shape(2048, 46, 20, 1, 1536, n_experts=64, n_used=4, latent=Latent(768, 512, 192, 64, 256)),
    # 4 of the 48 layers of Qwen3-Next-80B-A3B, with a quarter of their 512 experts
    "next-4": Shape(2048, 4, 16, 2, 512, head=256, n_experts=128, n_used=10, delta=Delta(128, 16, 32, 512)),
    # One layer each, the latent one with a quarter of its heads: 32,768 tokens take minutes a layer
    "1b-1": Shape(2048, 1, 32, 8, 8192),
    "a3b-1": Shape(2048, 1, 32, 4, 768, head=128, n_experts=128, n_used=8),
    "flash-1": Shape(2048, 1, 5, 1, 1536, n_experts=64, n_used=4, latent=Latent(768, 512, 192, 64, 256)),
}
# Type of most matrices, and of those that a mix gives more bits.
MIXES = {
    "f16": (Type.F16, Type.F16),
    "bf16": (Type.BF16, Type.BF16),
    "q4_k_m": (Type.Q4_K, Type.Q6_K),
    "q4_0": (Type.Q4_0, Type.Q6_K),
    "q8_0": (Type.Q8_0, Type.Q8_0),
    "q6_k": (Type.Q6_K, Type.Q6_K),
    "q5_k": (Type.Q5_K, Type.Q5_K),
    "q3_k": (Type.Q3_K, Type.Q3_K),
    "q2_k": (Type.Q2_K, Type.Q2_K),
    "iq4_xs": (Type.IQ4_XS, Type.IQ4_XS),
    "mxfp4": (Type.MXFP4, Type.MXFP4),
    "iq1_s": (Type.IQ1_S, Type.IQ1_S),
    "iq1_m": (Type.IQ1_M, Type.IQ1_M),
    "iq2_xxs": (Type.IQ2_XXS, Type.IQ2_XXS),
    "iq2_xs": (Type.IQ2_XS, Type.IQ2_XS),
    "iq2_s": (Type.IQ2_S, Type.IQ2_S),
    "iq3_xxs": (Type.IQ3_XXS, Type.IQ3_XXS),
    "iq3_s": (Type.IQ3_S, Type.IQ3_S),
}
# Offset and value of each f16 of a block that scales its weights (layouts: ggml-common.h); weights come out below 0.1.
_SCALES: dict[Type, tuple[tuple[int, float], ...]] = {
    Type.Q4_K: ((0, 7e-5), (2, 5e-4)),
    Type.Q6_K: ((208, 1e-5),),
    Type.Q5_0: ((0, 1.2e-3),),
    Type.Q4_0: ((0, 2.5e-3),),
    Type.Q8_0: ((0, 1.6e-4),),
    Type.Q5_K: ((0, 3.5e-5), (2, 5e-4)),
    Type.Q3_K: ((108, 1.5e-4),),
    Type.Q2_K: ((80, 1e-3), (82, 1.5e-3)),
    Type.IQ4_XS: ((0, 1.5e-5),),
    Type.IQ1_S: ((0, 5e-3),),
    Type.IQ2_XXS: ((0, 5e-4),),
    Type.IQ2_XS: ((0, 5e-4),),
    Type.IQ2_S: ((0, 5e-4),),
    Type.IQ3_XXS: ((0, 1.5e-4),),
    Type.IQ3_S: ((0, 1.5e-4),),
}
_SPREAD = 5e-3
"""Of an IQ1_M block, whose f16 is spread over the first four bits of its last eight bytes' pairs."""
_EXPONENT = 120
"""Of an MXFP4 block: what makes its weights as large as the others'."""


def random_rows(random: np.random.Generator, type_: Type, rows: int, columns: int) -> NDArray[np.uint8]:
    """Rows of random weights: u8[rows, bytes of a row]."""
    if type_ in (Type.F16, Type.BF16):
        numbers = random.standard_normal((rows, columns), np.float32) * np.float32(0.02)
        halves = numbers.astype(np.float16) if type_ is Type.F16 else (numbers.view(np.uint32) >> 16).astype(np.uint16)
        return halves.view(np.uint8)
    block, n_bytes = GGML_QUANT_SIZES[type_]
    blocks = random.integers(0, 256, (rows * columns // block, n_bytes), dtype=np.uint8)
    if type_ is Type.MXFP4:
        blocks[:, 0] = _EXPONENT
    if type_ is Type.IQ1_M:
        bits = int.from_bytes(np.float16(_SPREAD).tobytes(), "little")
        blocks[:, 49::2] = blocks[:, 49::2] & 15 | np.array([bits >> 4 * k << 4 & 0xF0 for k in range(4)], np.uint8)
    for offset, value in _SCALES.get(type_, ()):
        blocks[:, offset : offset + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)
    return blocks.reshape(rows, -1)


def has_more_bits(layer: int, n_layer: int) -> bool:
    """Return True if llama.cpp gives a layer's V and down projections more bits (llama-quant.cpp, use_more_bits)."""
    eighth = n_layer // 8
    return layer < eighth or layer >= 7 * n_layer // 8 or (layer - eighth) % 3 == 2


def write_vocabulary(writer: GGUFWriter, model: Path) -> int:
    """Write the tokenizer of another model; return the number of its tokens."""
    with GGUFFile.open(model) as file:
        metadata = file.metadata
        tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
        assert isinstance(tokens, StringArray) and isinstance(merges, StringArray)
        writer.add_vocab_size(len(tokens))
        writer.add_tokenizer_model(metadata.str_("tokenizer.ggml.model"))
        writer.add_tokenizer_pre(metadata.str_("tokenizer.ggml.pre"))
        writer.add_token_list(list(tokens))
        writer.add_token_types(list(metadata.ints("tokenizer.ggml.token_type")))
        writer.add_token_merges(list(merges))
        writer.add_bos_token_id(metadata.int_("tokenizer.ggml.bos_token_id"))
        writer.add_eos_token_id(metadata.int_("tokenizer.ggml.eos_token_id"))
        return len(tokens)


def write_model(out: Path, shape: Shape, mix: str, vocabulary_from: Path, seed: int = 0) -> None:
    """Writes a model of a shape's architecture, with the tokenizer of another model."""
    low, high = MIXES[mix]
    random = np.random.default_rng(seed)
    head, latent, delta = shape.head_dim, shape.latent, shape.delta
    n_q, n_kv = shape.n_head * head, shape.n_head_kv * head
    writer = GGUFWriter(out, shape.architecture)
    writer.add_name(out.stem)
    writer.add_context_length(65536)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layer)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    writer.add_rope_dimension_count(head // 4 if delta is not None else head if latent is None else latent.rope)
    if latent is not None:
        writer.add_key_length(latent.rank + latent.rope)
        writer.add_value_length(latent.rank)
        writer.add_key_length_mla(latent.nope + latent.rope)
        writer.add_value_length_mla(latent.value)
        writer.add_q_lora_rank(latent.q_rank)
        writer.add_kv_lora_rank(latent.rank)
        writer.add_expert_shared_count(1)
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_norm(True)
        writer.add_expert_weights_scale(1.8)
    if delta is not None:
        writer.add_ssm_conv_kernel(4)
        writer.add_ssm_state_size(delta.head)
        writer.add_ssm_group_count(delta.n_keys)
        writer.add_ssm_time_step_rank(delta.n_values)
        writer.add_ssm_inner_size(delta.head * delta.n_values)
        writer.add_expert_shared_feed_forward_length(delta.n_ff_shared)
    if shape.n_experts:
        if latent is None:
            writer.add_key_length(head)
            writer.add_value_length(head)
        writer.add_expert_count(shape.n_experts)
        writer.add_expert_used_count(shape.n_used)
        writer.add_expert_feed_forward_length(shape.n_ff)
    n_vocab = write_vocabulary(writer, vocabulary_from)

    made: list[Callable[[], NDArray[Any]]] = []  # one after the other, as they are written: all do not fit memory

    def plain(name: str, ne: tuple[int, ...], make: Callable[[], NDArray[np.float32]]) -> None:
        writer.add_tensor_info(name, ne, np.dtype(np.float32), 4 * prod(ne))
        made.append(make)

    def norm(name: str, n: int = shape.n_embd) -> None:
        plain(name, (n,), lambda: np.ones(n, np.float32))

    def matrix(name: str, type_: Type, rows: int, columns: int, *each: int) -> None:
        block, n_bytes = GGML_QUANT_SIZES[type_]
        n_rows, row = prod(each) * rows, columns // block * n_bytes
        writer.add_tensor_info(name, (*each, rows, row), np.dtype(np.uint8), n_rows * row, raw_dtype=type_)
        made.append(lambda: random_rows(random, type_, n_rows, columns))

    def router() -> NDArray[np.float32]:
        small = np.float32(shape.n_embd**-0.5)
        return random.standard_normal((shape.n_experts, shape.n_embd), np.float32) * small

    def experts(name: str, type_: Type, rows: int, columns: int) -> None:
        matrix(name, type_, rows, columns, shape.n_experts)

    def delta_net(prefix: str, sizes: Delta) -> None:
        inner = sizes.head * sizes.n_values
        matrix(prefix + "attn_qkv.weight", low, sizes.channels, shape.n_embd)
        matrix(prefix + "attn_gate.weight", low, inner, shape.n_embd)
        matrix(prefix + "ssm_ba.weight", low, 2 * sizes.n_values, shape.n_embd)
        plain(prefix + "ssm_conv1d.weight", (sizes.channels, 4), lambda: np.full((sizes.channels, 4), 0.25, np.float32))
        plain(prefix + "ssm_dt.bias", (sizes.n_values,), lambda: np.zeros(sizes.n_values, np.float32))
        plain(prefix + "ssm_a", (sizes.n_values,), lambda: np.full(sizes.n_values, -0.1, np.float32))
        norm(prefix + "ssm_norm.weight", sizes.head)
        matrix(prefix + "ssm_out.weight", low, shape.n_embd, inner)

    def shared_expert(prefix: str, n_ff: int) -> None:
        plain(prefix + "ffn_gate_inp_shexp.weight", (shape.n_embd,), lambda: np.zeros(shape.n_embd, np.float32))
        matrix(prefix + "ffn_gate_shexp.weight", low, n_ff, shape.n_embd)
        matrix(prefix + "ffn_up_shexp.weight", low, n_ff, shape.n_embd)
        matrix(prefix + "ffn_down_shexp.weight", high, shape.n_embd, n_ff)

    def attention(prefix: str, some: Type) -> None:
        matrix(prefix + "attn_q.weight", low, n_q if delta is None else 2 * n_q, shape.n_embd)
        matrix(prefix + "attn_k.weight", low, n_kv, shape.n_embd)
        matrix(prefix + "attn_v.weight", some, n_kv, shape.n_embd)
        matrix(prefix + "attn_output.weight", low, shape.n_embd, n_q)
        if shape.n_experts:
            norm(prefix + "attn_q_norm.weight", head)
            norm(prefix + "attn_k_norm.weight", head)

    def latent_attention(prefix: str, sizes: Latent) -> None:
        n = shape.n_head
        matrix(prefix + "attn_q_a.weight", low, sizes.q_rank, shape.n_embd)
        norm(prefix + "attn_q_a_norm.weight", sizes.q_rank)
        matrix(prefix + "attn_q_b.weight", low, n * (sizes.nope + sizes.rope), sizes.q_rank)
        matrix(prefix + "attn_kv_a_mqa.weight", low, sizes.rank + sizes.rope, shape.n_embd)
        norm(prefix + "attn_kv_a_norm.weight", sizes.rank)
        # rows that are no whole super-blocks: what llama-quantize takes instead
        for name, type_, rows, columns in (
            ("attn_k_b", Type.Q5_0, sizes.rank, sizes.nope),
            ("attn_v_b", low, sizes.value, sizes.rank),
        ):
            matrix(f"{prefix}{name}.weight", type_, rows, columns, n)
        matrix(prefix + "attn_output.weight", low, shape.n_embd, n * sizes.value)
        for name, type_, rows, columns in (
            ("ffn_gate_shexp", low, shape.n_ff, shape.n_embd),
            ("ffn_up_shexp", low, shape.n_ff, shape.n_embd),
            ("ffn_down_shexp", high, shape.n_embd, shape.n_ff),
        ):
            matrix(f"{prefix}{name}.weight", type_, rows, columns)

    matrix("token_embd.weight", high, n_vocab, shape.n_embd)
    norm("output_norm.weight")
    for layer in range(shape.n_layer):
        some = high if has_more_bits(layer, shape.n_layer) else low
        prefix = f"blk.{layer}."
        norm(prefix + "attn_norm.weight")
        norm(prefix + ("ffn_norm.weight" if delta is None else "post_attention_norm.weight"))
        if delta is not None:
            shared_expert(prefix, delta.n_ff_shared)
        if delta is not None and layer % 4 != 3:
            delta_net(prefix, delta)
        elif latent is None:
            attention(prefix, some)
        else:
            latent_attention(prefix, latent)
        if shape.n_experts:
            plain(prefix + "ffn_gate_inp.weight", (shape.n_experts, shape.n_embd), router)
            experts(prefix + "ffn_gate_exps.weight", low, shape.n_ff, shape.n_embd)
            experts(prefix + "ffn_up_exps.weight", low, shape.n_ff, shape.n_embd)
            experts(prefix + "ffn_down_exps.weight", some, shape.n_embd, shape.n_ff)
            continue
        matrix(prefix + "ffn_gate.weight", low, shape.n_ff, shape.n_embd)
        matrix(prefix + "ffn_up.weight", low, shape.n_ff, shape.n_embd)
        matrix(prefix + "ffn_down.weight", some, shape.n_embd, shape.n_ff)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for make in made:
        writer.write_tensor_data(make())
    writer.close()


def synthetic_model(shape: str, mix: str = "q4_k_m") -> Path:
    """The model of a shape's name, written into the cache on first use."""
    if shape not in SHAPES:
        sys.exit(f"synthetic-{shape}: no such shape; known are {', '.join(SHAPES)}")
    return kept(f"{shape}-{mix}.gguf", lambda path: write_model(path, SHAPES[shape], mix, resolve("smollm2")))


def kept(name: str, write: Callable[[Path], None]) -> Path:
    """The file `name` in the cache, written there on first use."""
    root = os.environ.get("LLAMADO_CACHE")
    path = (Path(root) if root else Path.home() / ".cache" / "llamado") / "synthetic" / name
    if not path.exists():
        print(f"writing {path}", file=sys.stderr)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        write(unfinished)
        unfinished.replace(path)
    return path


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--mix", choices=MIXES, default="q4_k_m")
    parser.add_argument("--vocabulary-from", default="smollm2", help="a model with a BPE vocabulary")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    write_model(flags.out, SHAPES[flags.shape], flags.mix, resolve(flags.vocabulary_from), flags.seed)


if __name__ == "__main__":
    main()
