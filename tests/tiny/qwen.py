"""Qwen architectures."""

from __future__ import annotations

from tiny.llama import ATTENTION, BIASES, EXPERT_KEYS, EXPERTS, FUSED, GATED, HEAD, KEYS, N_EMBD, N_FF
from tiny.spec import Tiny

WIDE = 40
"""Head size; not the width divided by the number of heads."""
WIDE_KEYS = {**KEYS, "attention.key_length": WIDE, "attention.value_length": WIDE}
WIDE_HEADS = {
    "attn_q.weight": (N_EMBD, 4 * WIDE),
    "attn_k.weight": (N_EMBD, 2 * WIDE),
    "attn_v.weight": (N_EMBD, 2 * WIDE),
    "attn_output.weight": (4 * WIDE, N_EMBD),
    "attn_q_norm.weight": WIDE,
    "attn_k_norm.weight": WIDE,
}
HEAD_NORMS = {"attn_q_norm.weight": HEAD, "attn_k_norm.weight": HEAD}
NARROW_GATED = {"ffn_gate.weight": (N_EMBD, 64), "ffn_up.weight": (N_EMBD, 64), "ffn_down.weight": (64, N_EMBD)}
RANKS = {"pooling_type": 4, "classifier.output_labels": ["yes", "no"]}

MODELS = (
    Tiny("qwen2", KEYS, {**ATTENTION, **BIASES, **GATED}, {"output.weight": None}),
    Tiny("qwen2", KEYS, {**FUSED, **BIASES, **GATED}, variant="fused"),
    Tiny(
        "qwen3",
        {**WIDE_KEYS, "rope.freq_base": 1e6},
        {**ATTENTION, **GATED, **WIDE_HEADS},
    ),
    Tiny(
        "qwen3",
        {**WIDE_KEYS, **RANKS},
        {**ATTENTION, **GATED, **WIDE_HEADS},
        {"output.weight": None, "cls.output.weight": (N_EMBD, 2)},
        variant="ranks",
    ),
    Tiny(
        "qwen2moe",
        {**KEYS, **EXPERT_KEYS, "expert_shared_feed_forward_length": 96},
        {
            **ATTENTION,
            **BIASES,
            **EXPERTS,
            "ffn_gate_inp_shexp.weight": N_EMBD,
            "ffn_gate_shexp.weight": (N_EMBD, 96),
            "ffn_up_shexp.weight": (N_EMBD, 96),
            "ffn_down_shexp.weight": (96, N_EMBD),
        },
    ),
    Tiny(
        "qwen3moe",
        {**WIDE_KEYS, **EXPERT_KEYS},
        {**ATTENTION, **EXPERTS, **WIDE_HEADS},
    ),
    Tiny(
        "grovemoe",
        {
            **KEYS,
            **EXPERT_KEYS,
            "expert_chunk_feed_forward_length": 32,
            "experts_per_group": 2,
            "expert_group_scale": 0.5,
        },
        {
            **ATTENTION,
            **EXPERTS,
            **HEAD_NORMS,
            "ffn_gate_chexps.weight": (N_EMBD, 32, 4),
            "ffn_up_chexps.weight": (N_EMBD, 32, 4),
            "ffn_down_chexps.weight": (32, N_EMBD, 4),
        },
    ),
    Tiny("exaone", KEYS, {**ATTENTION, **GATED}, {"rope_freqs.weight": 16}, n_layer=2),
    Tiny("pangu-embedded", KEYS, {**ATTENTION, **BIASES, "attn_output.bias": N_EMBD, **GATED}, n_layer=2),
    Tiny(
        "qwen",
        {**KEYS, "attention.head_count_kv": 4, "feed_forward_length": 2 * N_FF},
        {**FUSED, "attn_qkv.weight": (N_EMBD, 3 * N_EMBD), "attn_qkv.bias": 3 * N_EMBD, **GATED},
        n_layer=2,
    ),
    Tiny("qwen2vl", {**KEYS, "rope.dimension_sections": [4, 6, 6, 0]}, {**ATTENTION, **BIASES, **GATED}, n_layer=2),
    Tiny("paddleocr", {**KEYS, "rope.dimension_sections": [4, 6, 6, 0]}, {**ATTENTION, **GATED}, n_layer=2),
    # Two of 16 pairs are not rotated, as in the real models.
    Tiny("qwen3vl", {**KEYS, "rope.dimension_sections": [8, 4, 4, 0]}, {**ATTENTION, **GATED, **HEAD_NORMS}, n_layer=2),
    Tiny(
        "qwen3vlmoe",
        {**KEYS, **EXPERT_KEYS, "rope.dimension_sections": [6, 5, 5, 0]},
        {**ATTENTION, **EXPERTS, **HEAD_NORMS},
        n_layer=2,
    ),
    Tiny(
        "openelm",
        {
            **KEYS,
            "attention.head_count": [4, 8],
            "attention.head_count_kv": [1, 2],
            "feed_forward_length": [64, 192],
            "attention.key_length": HEAD,
            "attention.value_length": HEAD,
        },
        {**FUSED, "attn_qkv.weight": (N_EMBD, 6 * HEAD), **HEAD_NORMS, **GATED, **NARROW_GATED},
        {"output.weight": None},
        layers={1: {**GATED, "attn_qkv.weight": (N_EMBD, 12 * HEAD), "attn_output.weight": (8 * HEAD, N_EMBD)}},
        n_layer=2,
    ),
)
