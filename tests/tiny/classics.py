"""Architectures from before Llama, and those that resemble them."""

from __future__ import annotations

from tiny.layer_norms import (
    FUSED_BIAS,
    LAYER_NORM_KEYS,
    NORM_SHIFTS,
    OUT_BIAS,
    OUTPUT_SHIFT,
    UNGATED,
    UNGATED_BIASES,
)
from tiny.llama import ATTENTION, BIASES, EXPERT, EXPERT_KEYS, EXPERTS, FUSED, GATED, HEAD, KEYS, N_EMBD, N_FF
from tiny.spec import Shape, Tiny

BIASED: dict[str, Shape] = {**FUSED, **FUSED_BIAS, **OUT_BIAS, **NORM_SHIFTS, **UNGATED, **UNGATED_BIASES}
"""A layer with layer norms, an ungated network and all biases."""
SMALL, SMALL_HEAD = 32, 16
DEEP: dict[str, Shape] = {
    "attn_norm.weight": SMALL,
    "attn_q.weight": (SMALL, SMALL),
    "attn_k.weight": (SMALL, SMALL),
    "attn_v.weight": (SMALL, SMALL),
    "attn_output.weight": (SMALL, SMALL),
    "ffn_norm.weight": SMALL,
    "ffn_gate.weight": (SMALL, SMALL),
    "ffn_up.weight": (SMALL, SMALL),
    "ffn_down.weight": (SMALL, SMALL),
}
"""Sizes of models that are recognized by their number of layers."""
ONE_KEY = {"attn_k.weight": (N_EMBD, HEAD), "attn_v.weight": (N_EMBD, HEAD)}
VISION: dict[str, Shape] = {
    "vis_attn_qkv.weight": (N_EMBD, 3 * N_EMBD),
    "vis_attn_output.weight": (N_EMBD, N_EMBD),
    "vis_gate.weight": (N_EMBD, N_FF),
    "vis_up.weight": (N_EMBD, N_FF),
    "vis_down.weight": (N_FF, N_EMBD),
}


def without(layer: dict[str, Shape], *names: str) -> dict[str, Shape]:
    return {name: shape for name, shape in layer.items() if name not in names}


MODELS = (
    Tiny(
        "starcoder",
        {**LAYER_NORM_KEYS, "attention.head_count_kv": 1},
        {**BIASED, "attn_qkv.weight": (N_EMBD, 6 * HEAD), "attn_qkv.bias": 6 * HEAD},
        {**OUTPUT_SHIFT, "position_embd.weight": (N_EMBD, 2048), "output.weight": None},
        n_layer=2,
        deviation={"position_embd": 0.2},
    ),
    Tiny(
        "bloom",
        LAYER_NORM_KEYS,
        BIASED,
        {**OUTPUT_SHIFT, "token_embd_norm.weight": N_EMBD, "token_embd_norm.bias": N_EMBD},
        n_layer=2,
    ),
    Tiny(
        "mpt",
        {**LAYER_NORM_KEYS, "attention.clamp_kqv": 0.7, "attention.max_alibi_bias": 8.0},
        {**FUSED, **UNGATED},
        {"output.weight": None},
        n_layer=2,
    ),
    Tiny(
        "mpt",
        {**LAYER_NORM_KEYS, "attention.head_count_kv": 4},
        {
            **BIASED,
            "attn_qkv.weight": (N_EMBD, 12 * HEAD),
            "attn_qkv.bias": 12 * HEAD,
        },
        {**OUTPUT_SHIFT, "position_embd.weight": (N_EMBD, 2048)},
        n_layer=2,
        deviation={"position_embd": 0.2},
        variant="learned",
    ),
    Tiny("refact", {**KEYS, "attention.head_count_kv": 1}, {**ATTENTION, **ONE_KEY, **GATED}, n_layer=2),
    Tiny("codeshell", LAYER_NORM_KEYS, BIASED, OUTPUT_SHIFT, n_layer=2),
    Tiny(
        "olmo",
        {**LAYER_NORM_KEYS, "attention.clamp_kqv": 0.7},
        without({**ATTENTION, **GATED}, "attn_norm.weight", "ffn_norm.weight"),
        {"output.weight": None, "output_norm.weight": None},
        n_layer=2,
    ),
    Tiny("plamo", KEYS, without({**ATTENTION, **GATED}, "ffn_norm.weight"), n_layer=2),
    Tiny(
        "jais",
        {**LAYER_NORM_KEYS, "attention.max_alibi_bias": 8.0},
        {**FUSED, **FUSED_BIAS, **OUT_BIAS, **NORM_SHIFTS, **GATED, **UNGATED_BIASES, "ffn_gate.bias": N_FF},
        OUTPUT_SHIFT,
        n_layer=2,
    ),
    Tiny(
        "jais2",
        LAYER_NORM_KEYS,
        {**ATTENTION, **BIASES, **OUT_BIAS, **NORM_SHIFTS, **UNGATED, **UNGATED_BIASES},
        OUTPUT_SHIFT,
        n_layer=2,
    ),
    *(
        Tiny(
            "baichuan",
            {
                **KEYS,
                "embedding_length": SMALL,
                "feed_forward_length": SMALL,
                "attention.head_count": SMALL // SMALL_HEAD,
                "attention.head_count_kv": SMALL // SMALL_HEAD,
            },
            DEEP,
            n_layer=n,
            variant=variant,
        )
        for n, variant in ((32, ""), (40, "13b"))
    ),
    Tiny(
        "dbrx",
        {**LAYER_NORM_KEYS, **EXPERT_KEYS, "feed_forward_length": EXPERT, "attention.clamp_kqv": 0.7},
        {**FUSED, **without(EXPERTS, "ffn_norm.weight"), "attn_output_norm.weight": N_EMBD},
        n_layer=2,
    ),
    Tiny(
        "arctic",
        {**KEYS, **EXPERT_KEYS, "feed_forward_length": EXPERT},
        {
            **ATTENTION,
            **EXPERTS,
            "ffn_norm_exps.weight": N_EMBD,
            "ffn_gate.weight": (N_EMBD, N_EMBD),
            "ffn_up.weight": (N_EMBD, N_EMBD),
            "ffn_down.weight": (N_EMBD, N_EMBD),
        },
        n_layer=2,
    ),
    Tiny(
        "cogvlm",
        {**KEYS, "attention.head_count_kv": 4, "rope.freq_base": 500000.0},
        {**FUSED, "attn_qkv.weight": (N_EMBD, 3 * N_EMBD), **GATED, **VISION},
        n_layer=2,
    ),
    Tiny(
        "maincoder",
        KEYS,
        {**ATTENTION, **GATED, "attn_q_norm.weight": HEAD, "attn_k_norm.weight": HEAD},
        n_layer=2,
    ),
)
