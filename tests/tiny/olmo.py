"""OLMo architectures."""

from __future__ import annotations

from tiny.llama import ATTENTION, GATED, HEAD, KEYS, N_EMBD, POST_NORMS
from tiny.spec import Tiny

NORMS_BEFORE = ("attn_norm.weight", "ffn_norm.weight")
LAYER = {
    **{name: shape for name, shape in {**ATTENTION, **GATED}.items() if name not in NORMS_BEFORE},
    **POST_NORMS,
    "attn_q_norm.weight": N_EMBD,
    "attn_k_norm.weight": 2 * HEAD,
}

MODELS = (
    Tiny("olmo2", KEYS, LAYER),
    Tiny(
        "olmo2",
        {
            **KEYS,
            "attention.sliding_window": 64,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 128,
        },
        LAYER,
        n_layer=5,
        variant="windows",
    ),
)
