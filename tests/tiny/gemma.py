"""Gemma."""

from __future__ import annotations

from tiny.llama import ATTENTION, GATED, HEAD, KEYS, N_EMBD
from tiny.spec import Tiny

POST_NORMS = {"post_attention_norm.weight": N_EMBD, "post_ffw_norm.weight": N_EMBD}

MODELS = (
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
