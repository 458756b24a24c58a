"""Qwen."""

from __future__ import annotations

from tiny.llama import ATTENTION, BIASES, GATED, KEYS, N_EMBD
from tiny.spec import Tiny

WIDE = 40
"""Elements of a head that are not the width divided by the number of heads."""

MODELS = (
    Tiny("qwen2", KEYS, {**ATTENTION, **BIASES, **GATED}, {"output.weight": None}),
    Tiny(
        "qwen3",
        {**KEYS, "attention.key_length": WIDE, "attention.value_length": WIDE, "rope.freq_base": 1e6},
        {
            **ATTENTION,
            **GATED,
            "attn_q.weight": (N_EMBD, 4 * WIDE),
            "attn_k.weight": (N_EMBD, 2 * WIDE),
            "attn_v.weight": (N_EMBD, 2 * WIDE),
            "attn_output.weight": (4 * WIDE, N_EMBD),
            "attn_q_norm.weight": WIDE,
            "attn_k_norm.weight": WIDE,
        },
    ),
)
