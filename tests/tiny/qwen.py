"""Qwen."""

from __future__ import annotations

from tiny.llama import ATTENTION, BIASES, EXPERT_KEYS, EXPERTS, FUSED, GATED, KEYS, N_EMBD
from tiny.spec import Tiny

WIDE = 40
"""Elements of a head that are not the width divided by the number of heads."""
WIDE_KEYS = {**KEYS, "attention.key_length": WIDE, "attention.value_length": WIDE}
WIDE_HEADS = {
    "attn_q.weight": (N_EMBD, 4 * WIDE),
    "attn_k.weight": (N_EMBD, 2 * WIDE),
    "attn_v.weight": (N_EMBD, 2 * WIDE),
    "attn_output.weight": (4 * WIDE, N_EMBD),
    "attn_q_norm.weight": WIDE,
    "attn_k_norm.weight": WIDE,
}
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
)
