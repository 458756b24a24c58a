"""Cohere architectures."""

from __future__ import annotations

from tiny.layer_norms import LAYER_NORM_KEYS
from tiny.llama import ATTENTION, GATED
from tiny.spec import Tiny

HEAD, WIDTH = 16, 64
NETWORK = {name: shape for name, shape in GATED.items() if name != "ffn_norm.weight"}

MODELS = (
    Tiny("command-r", {**LAYER_NORM_KEYS, "logit_scale": 0.5}, {**ATTENTION, **NETWORK}, {"output.weight": None}),
    # llama.cpp takes query and key norms from files of 64 layers.
    Tiny(
        "command-r",
        {
            **LAYER_NORM_KEYS,
            "embedding_length": WIDTH,
            "feed_forward_length": WIDTH,
        },
        {
            "attn_norm.weight": WIDTH,
            "attn_q.weight": (WIDTH, WIDTH),
            "attn_k.weight": (WIDTH, 2 * HEAD),
            "attn_v.weight": (WIDTH, 2 * HEAD),
            "attn_output.weight": (WIDTH, WIDTH),
            "attn_q_norm.weight": (HEAD, 4),
            "attn_k_norm.weight": (HEAD, 2),
            "ffn_gate.weight": (WIDTH, WIDTH),
            "ffn_up.weight": (WIDTH, WIDTH),
            "ffn_down.weight": (WIDTH, WIDTH),
        },
        {"output.weight": None},
        n_layer=64,
        variant="plus",
    ),
    Tiny(
        "cohere2",
        {**LAYER_NORM_KEYS, "logit_scale": 0.5, "attention.sliding_window": 64},
        {**ATTENTION, **NETWORK},
        {"output.weight": None},
        n_layer=5,
    ),
)
