"""Phi architectures."""

from __future__ import annotations

from tiny.layer_norms import LAYER_NORM_KEYS, OUT_BIAS, OUTPUT_SHIFT, UNGATED, UNGATED_BIASES
from tiny.llama import ATTENTION, BIASES, FUSED, GATED_FUSED, HEAD, KEYS, LONGROPE, LONGROPE_KEYS, N_EMBD
from tiny.spec import N_VOCAB, Tiny

NETWORK = {name: shape for name, shape in UNGATED.items() if name != "ffn_norm.weight"}

MODELS = (
    Tiny(
        "phi2",
        {**LAYER_NORM_KEYS, "rope.dimension_count": HEAD // 2},
        {**ATTENTION, **BIASES, **OUT_BIAS, "attn_norm.bias": N_EMBD, **NETWORK, **UNGATED_BIASES},
        {**OUTPUT_SHIFT, "output.bias": N_VOCAB},
    ),
    Tiny("phi3", {**KEYS, "rope.dimension_count": HEAD}, {**FUSED, **GATED_FUSED}),
    Tiny(
        "phi3",
        {**KEYS, **LONGROPE_KEYS, "rope.dimension_count": HEAD},
        {**FUSED, **GATED_FUSED},
        LONGROPE,
        variant="longrope",
    ),
)
