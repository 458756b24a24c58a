"""Families with a single architecture."""

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
from tiny.olmo import NORMS_BEFORE, POST_NORMS
from tiny.qwen import WIDE, WIDE_KEYS
from tiny.spec import Shape, Tiny

PARTLY_ROTATED = {**LAYER_NORM_KEYS, "rope.dimension_count": HEAD // 4}
HEAD_NORMS = {"attn_q_norm.weight": HEAD, "attn_k_norm.weight": HEAD}
N_DEEP = 64
"""Number of layers, head size (of 4 query heads and 2 KV heads) and width of models recognized by their depth."""
SMALL_HEAD, SMALL = 16, 64


def without(layer: dict[str, Shape], *names: str) -> dict[str, Shape]:
    return {name: shape for name, shape in layer.items() if name not in names}


HRM: dict[str, Shape] = {
    **without({**ATTENTION, **GATED}, "attn_norm.weight", "ffn_norm.weight"),
    "attn_gate.weight": (N_EMBD, 4 * HEAD),
}

MODELS = (
    Tiny(
        "hrm_text",
        {**KEYS, "embedding_scale": 2.0, "hrm.layers_per_stack": 2, "hrm.h_cycles": 2, "hrm.l_cycles": 2},
        HRM,
        {"output_norm.weight": None, "hrm.z_l_init": N_EMBD},
        layers={i: dict.fromkeys(HRM) for i in range(4, 12)},
        n_layer=12,
        deviation={"z_l_init": 1.0},
    ),
    Tiny(
        "bitnet",
        KEYS,
        {
            **ATTENTION,
            **GATED,
            "attn_sub_norm.weight": N_EMBD,
            "ffn_sub_norm.weight": N_FF,
            **{f"{name.removesuffix('.weight')}.scale": 1 for name in (*ATTENTION, *GATED) if "norm" not in name},
        },
        {"output.weight": None},
    ),
    Tiny(
        "ernie4_5",
        WIDE_KEYS,
        {
            **ATTENTION,
            **GATED,
            "attn_q.weight": (N_EMBD, 4 * WIDE),
            "attn_k.weight": (N_EMBD, 2 * WIDE),
            "attn_v.weight": (N_EMBD, 2 * WIDE),
            "attn_output.weight": (4 * WIDE, N_EMBD),
        },
    ),
    Tiny("exaone4", KEYS, {**without({**ATTENTION, **GATED}, *NORMS_BEFORE), **POST_NORMS, **HEAD_NORMS}),
    # Files of 64 layers have windows.
    Tiny(
        "exaone4",
        {**KEYS, "embedding_length": SMALL, "feed_forward_length": SMALL, "attention.sliding_window": 64},
        {
            "attn_q.weight": (SMALL, SMALL),
            "attn_k.weight": (SMALL, 2 * SMALL_HEAD),
            "attn_v.weight": (SMALL, 2 * SMALL_HEAD),
            "attn_output.weight": (SMALL, SMALL),
            "attn_q_norm.weight": SMALL_HEAD,
            "attn_k_norm.weight": SMALL_HEAD,
            "post_attention_norm.weight": SMALL,
            "ffn_gate.weight": (SMALL, SMALL),
            "ffn_up.weight": (SMALL, SMALL),
            "ffn_down.weight": (SMALL, SMALL),
            "post_ffw_norm.weight": SMALL,
        },
        n_layer=N_DEEP,
        variant="windows",
    ),
    Tiny(
        "falcon",
        {**LAYER_NORM_KEYS, "attention.head_count_kv": 1},
        {
            **without({**FUSED, **UNGATED}, "ffn_norm.weight"),
            "attn_norm.bias": N_EMBD,
            "attn_qkv.weight": (N_EMBD, 6 * HEAD),
        },
        {**OUTPUT_SHIFT, "output.weight": None},
    ),
    Tiny(
        "falcon",
        LAYER_NORM_KEYS,
        {
            **without({**FUSED, **UNGATED}, "ffn_norm.weight"),
            "attn_norm.bias": N_EMBD,
            "attn_norm_2.weight": N_EMBD,
            "attn_norm_2.bias": N_EMBD,
        },
        OUTPUT_SHIFT,
        variant="two-norms",
    ),
    Tiny(
        "gpt2",
        {**LAYER_NORM_KEYS, "attention.head_count_kv": 4},
        {
            **FUSED,
            "attn_qkv.weight": (N_EMBD, 12 * HEAD),
            "attn_qkv.bias": 12 * HEAD,
            **OUT_BIAS,
            **NORM_SHIFTS,
            **UNGATED,
            **UNGATED_BIASES,
        },
        {**OUTPUT_SHIFT, "position_embd.weight": (N_EMBD, 2048), "output.weight": None},
        deviation={"position_embd": 0.2},
    ),
    *(
        Tiny(
            "gptneox",
            {**PARTLY_ROTATED, "use_parallel_residual": parallel},
            {**FUSED, **FUSED_BIAS, **OUT_BIAS, **NORM_SHIFTS, **UNGATED, **UNGATED_BIASES},
            OUTPUT_SHIFT,
            variant=variant,
        )
        for parallel, variant in ((True, ""), (False, "sequential"))
    ),
    Tiny("hunyuan-dense", {**KEYS, "rope.scaling.alpha": 1000.0}, {**ATTENTION, **GATED, **HEAD_NORMS}),
    # Fewer sections than pairs, so that they repeat.
    Tiny(
        "hunyuan-dense",
        {**KEYS, "rope.dimension_sections": [4, 4, 3, 0]},
        {**ATTENTION, **GATED, **HEAD_NORMS},
        variant="sections",
    ),
    Tiny(
        "nemotron",
        {**LAYER_NORM_KEYS, "rope.dimension_count": HEAD // 2},
        {**ATTENTION, **OUT_BIAS, **NORM_SHIFTS, **UNGATED, **UNGATED_BIASES},
        OUTPUT_SHIFT,
    ),
    Tiny(
        "gpt-oss",
        {
            **KEYS,
            **EXPERT_KEYS,
            "rope.dimension_count": HEAD,
            "attention.sliding_window": 64,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 8.0,
            "rope.scaling.original_context_length": 128,
        },
        {
            **ATTENTION,
            **BIASES,
            **OUT_BIAS,
            **without(EXPERTS, "ffn_norm.weight"),
            "attn_sinks.weight": 4,
            "post_attention_norm.weight": N_EMBD,
            "ffn_gate_inp.bias": 8,
            "ffn_gate_exps.bias": (EXPERT, 8),
            "ffn_up_exps.bias": (EXPERT, 8),
            "ffn_down_exps.bias": (N_EMBD, 8),
        },
        deviation={"attn_sinks": 2.0, "exps.bias": 0.5},
    ),
    Tiny(
        "seed_oss",
        KEYS,
        {**ATTENTION, **BIASES, **without(GATED, "ffn_norm.weight"), "post_attention_norm.weight": N_EMBD},
    ),
    Tiny(
        "orion",
        {**LAYER_NORM_KEYS, "rope.dimension_count": HEAD},
        {**ATTENTION, **NORM_SHIFTS, **GATED},
        OUTPUT_SHIFT,
    ),
    Tiny("stablelm", PARTLY_ROTATED, {**ATTENTION, **BIASES, **NORM_SHIFTS, **GATED}, OUTPUT_SHIFT),
    Tiny(
        "stablelm",
        PARTLY_ROTATED,
        {
            **ATTENTION,
            **without(GATED, "ffn_norm.weight"),
            "attn_norm.bias": N_EMBD,
            "attn_q_norm.weight": (HEAD, 4),
            "attn_k_norm.weight": (HEAD, 2),
        },
        OUTPUT_SHIFT,
        variant="one-norm",
    ),
    Tiny(
        "starcoder2",
        LAYER_NORM_KEYS,
        {**ATTENTION, **BIASES, **OUT_BIAS, **NORM_SHIFTS, **UNGATED, **UNGATED_BIASES},
        {**OUTPUT_SHIFT, "output.weight": None},
    ),
    Tiny("xverse", KEYS, {**ATTENTION, **GATED}, n_layer=2),
    Tiny(
        "hunyuan_vl", {**KEYS, "rope.dimension_sections": [6, 5, 5, 0]}, {**ATTENTION, **GATED, **HEAD_NORMS}, n_layer=2
    ),
)
