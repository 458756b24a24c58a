"""Gemma."""

from __future__ import annotations

from tiny.llama import ATTENTION, GATED, HEAD, KEYS, N_EMBD, POST_NORMS
from tiny.spec import Tiny

SHARED = {"token_embd": 0.05, "output_norm": 4.0}
"""Deviations where embeddings are scaled and the head shares them: what comes out must not be what went in."""
WIDE = 48
"""Elements of a head that are not the width divided by the number of heads."""
WIDE_KEYS = {**KEYS, "attention.key_length": WIDE, "attention.value_length": WIDE}
WIDE_ATTENTION = {
    **ATTENTION,
    "attn_q.weight": (N_EMBD, 4 * WIDE),
    "attn_k.weight": (N_EMBD, 2 * WIDE),
    "attn_v.weight": (N_EMBD, 2 * WIDE),
    "attn_output.weight": (4 * WIDE, N_EMBD),
}

MODELS = (
    Tiny("gemma", WIDE_KEYS, {**WIDE_ATTENTION, **GATED}, {"output.weight": None}, vocabulary="spm", deviation=SHARED),
    Tiny(
        "gemma2",
        {
            **WIDE_KEYS,
            "attention.sliding_window": 64,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 20.0,
        },
        {**WIDE_ATTENTION, **GATED, **POST_NORMS},
        {"output.weight": None},
        vocabulary="spm",
        deviation=SHARED,
    ),
    Tiny(
        "gemma3",
        {
            **KEYS,
            "attention.key_length": HEAD,
            "attention.value_length": HEAD,
            "attention.sliding_window": 64,
            "attention.sliding_window_pattern": 2,
            "final_logit_softcapping": 30.0,
            "rope.freq_base": 1e6,
        },
        {**ATTENTION, **GATED, **POST_NORMS, "attn_q_norm.weight": HEAD, "attn_k_norm.weight": HEAD},
        vocabulary="spm",
    ),
)
