"""Small text model that fits a projector, with the special tokens that its prompts have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf_writer import GGUFWriter
from kept_files import kept
from tiny_models import BYTE, CONTROL, NORMAL, UNKNOWN, byte_characters

from projectors.spec import TinyProjector

N_FF, N_HEAD = 32, 4
SECTIONS = {"qwen2vl": [2, 3, 3, 0], "qwen3vl": [3, 3, 2, 0], "hunyuan_vl": [2, 2, 2, 2]}
"""Pairs that each of the four positions rotates, of models with M-RoPE."""
HEAD_NORMS = "qwen3vl", "hunyuan_vl"


def write(tiny: TinyProjector, path: Path, *, spaces: bool = False) -> Path:
    """Write a model with bytes, line ends and the tokens of the projector as its vocabulary.

    It has one layer, and one more for each that gets DeepStack embeddings. `spaces`: a vocabulary of SentencePiece,
    which puts a space in front of texts.
    """
    rng = np.random.default_rng(0)
    chars = byte_characters()
    end = chars[ord("\n")]
    if spaces:
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "\n\n", *tiny.tokens, "▁"]
        types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] + [CONTROL] * len(tiny.tokens) + [NORMAL]
    else:
        tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *chars, end + end, *tiny.tokens]
        types = [CONTROL] * 3 + [NORMAL] * 257 + [CONTROL] * len(tiny.tokens)
    writer = GGUFWriter(path, tiny.text)
    writer.add_name("a small model")
    n_deep = sum(name.endswith(".fc1.weight") for name in tiny.tensors if name.startswith("v.deepstack."))
    n_layer = n_deep + 1
    writer.add_context_length(4096)
    writer.add_block_count(n_layer)
    n_embd = tiny.n_embd
    writer.add_embedding_length(n_embd)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEAD)
    writer.add_head_count_kv(N_HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_rope_dimension_count(n_embd // N_HEAD)
    if tiny.text in SECTIONS:
        writer.add_rope_dimension_sections(SECTIONS[tiny.text])
    if n_deep:
        writer.add_num_deepstack_layers(n_deep)
    writer.add_tokenizer_model("llama" if spaces else "gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if spaces:
        writer.add_token_scores([0.0] * len(tokens))
    else:
        writer.add_tokenizer_pre("smollm")
        writer.add_token_merges([f"{end} {end}"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    shapes = {"token_embd.weight": (len(tokens), n_embd), "output_norm.weight": (n_embd,)}
    for i in range(n_layer):
        layer = {f"{name}.weight": (n_embd,) for name in ("attn_norm", "ffn_norm")}
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up"):
            layer[f"{name}.weight"] = (N_FF if "ffn" in name else n_embd, n_embd)
        layer["ffn_down.weight"] = (n_embd, N_FF)
        if tiny.text in HEAD_NORMS:
            layer |= {f"attn_{which}_norm.weight": (n_embd // N_HEAD,) for which in "qk"}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    for name, shape in shapes.items():
        writer.add_tensor(name, rng.normal(0, 0.1, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


make = kept(write)
