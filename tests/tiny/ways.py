"""Architectures with gates, bounds or several kinds of layers."""

from __future__ import annotations

from typing import Any

from tiny.granite import FACTORS
from tiny.layer_norms import LAYER_NORM_KEYS
from tiny.llama import (
    ATTENTION,
    EXPERT,
    EXPERT_KEYS,
    EXPERTS,
    FUSED,
    GATED,
    GATED_FUSED,
    HEAD,
    KEYS,
    N_EMBD,
    POST_NORMS,
    SHARED,
)
from tiny.spec import Shape, Tiny

HEAD_NORMS: dict[str, Shape] = {"attn_q_norm.weight": HEAD, "attn_k_norm.weight": HEAD}
NO_EXPERTS = {name: None for name in (*EXPERTS, *SHARED) if name != "ffn_norm.weight"}
DENSE = {**NO_EXPERTS, "exp_probs_b.bias": None, **GATED}
WINDOW = {"attention.sliding_window": 64}
WINDOWS = {**WINDOW, "attention.sliding_window_pattern": [True, False]}
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 128,
}
RANK, NOPE, ROPE, VALUE = 48, 24, 16, 32
LATENT: dict[str, Shape] = {
    "attn_norm.weight": N_EMBD,
    "attn_kv_a_mqa.weight": (N_EMBD, RANK + ROPE),
    "attn_kv_a_norm.weight": RANK,
    "attn_kv_b.weight": (RANK, 4 * (NOPE + VALUE)),
    "attn_output.weight": (4 * VALUE, N_EMBD),
}
LATENT_KEYS = {
    **KEYS,
    "attention.head_count_kv": 4,
    "attention.key_length": NOPE + ROPE,
    "attention.value_length": VALUE,
    "attention.kv_lora_rank": RANK,
    "rope.dimension_count": ROPE,
}
EQUAL = {
    "attn_k.weight": (N_EMBD, 4 * HEAD),
    "attn_v.weight": (N_EMBD, 4 * HEAD),
}


def without(layer: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: shape for name, shape in layer.items() if name not in names}


MODELS = (
    Tiny(
        "bailingmoe",
        {**KEYS, **EXPERT_KEYS, "expert_shared_count": 1, "expert_weights_norm": True, "expert_weights_scale": 1.5},
        {**ATTENTION, **EXPERTS, **SHARED},
        n_layer=2,
    ),
    Tiny(
        "deepseek2-ocr",
        {
            **KEYS,
            **EXPERT_KEYS,
            "attention.head_count_kv": 4,
            "expert_shared_count": 1,
            "expert_weights_scale": 1.0,
            "leading_dense_block_count": 1,
        },
        {**ATTENTION, **EQUAL, **EXPERTS, **SHARED},
        layers={0: DENSE},
        n_layer=2,
    ),
    Tiny("minicpm", KEYS, {**ATTENTION, **GATED}, {"output.weight": None}, n_layer=2),
    Tiny(
        "minicpm",
        {
            **KEYS,
            "expert_count": 8,
            "expert_used_count": 2,
            "feed_forward_length": EXPERT,
            "embedding_scale": 2.0,
            "residual_scale": 0.5,
            "logit_scale": 3.0,
        },
        {**ATTENTION, **EXPERTS},
        n_layer=2,
        variant="experts",
    ),
    Tiny(
        "minicpm3",
        {**LATENT_KEYS, "attention.q_lora_rank": 56, "rope.scaling.original_context_length": 256},
        {
            **LATENT,
            "attn_q_a.weight": (N_EMBD, 56),
            "attn_q_a_norm.weight": 56,
            "attn_q_b.weight": (56, 4 * (NOPE + ROPE)),
            **GATED,
        },
        {"rope_factors_short.weight": ROPE // 2, "rope_factors_long.weight": ROPE // 2},
        n_layer=2,
    ),
    Tiny(
        "plm",
        LATENT_KEYS,
        {**LATENT, "attn_q.weight": (N_EMBD, 4 * (NOPE + ROPE)), **without(GATED, "ffn_gate.weight")},
        {"output.weight": None},
        n_layer=2,
    ),
    Tiny(
        "grok",
        {**KEYS, **EXPERT_KEYS, "embedding_scale": 2.0, "attention.output_scale": 0.3, "logit_scale": 2.0},
        {**ATTENTION, **EXPERTS, "attn_output_norm.weight": N_EMBD, "layer_output_norm.weight": N_EMBD},
        n_layer=2,
    ),
    Tiny(
        "grok",
        {
            **KEYS,
            **EXPERT_KEYS,
            **YARN,
            "rope.scaling.yarn_ext_factor": 0.7,
            "rope.scaling.yarn_beta_slow": 0.5,
            "embedding_scale": 2.0,
            "attention.output_scale": 0.3,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 10.0,
        },
        {**ATTENTION, **EXPERTS, **GATED, "attn_output_norm.weight": N_EMBD, "post_ffw_norm.weight": N_EMBD},
        n_layer=2,
        variant="two",
    ),
    Tiny(
        "plamo3",
        {**KEYS, **WINDOW, "attention.sliding_window_pattern": 2, "rope.freq_base": 1e6},
        {**FUSED, **HEAD_NORMS, **GATED_FUSED, "post_attention_norm": N_EMBD, "post_ffw_norm": N_EMBD},
        n_layer=2,
        deviation={"post_": 0.3},
    ),
    Tiny("smallthinker", {**KEYS, **EXPERT_KEYS, "expert_gating_func": 2}, {**ATTENTION, **EXPERTS}, n_layer=2),
    Tiny(
        "smallthinker",
        {**KEYS, **EXPERT_KEYS, **WINDOW, "expert_gating_func": 1},
        {**ATTENTION, **EXPERTS},
        n_layer=2,
        variant="windows",
    ),
    Tiny(
        "mellum",
        {**KEYS, **EXPERT_KEYS, **YARN, **WINDOWS},
        {**ATTENTION, **HEAD_NORMS, **EXPERTS},
        n_layer=2,
    ),
    Tiny(
        "maple",
        {**KEYS, **EXPERT_KEYS, **WINDOWS, "swiglu_clamp_exp": [0.5, 0.7]},
        {**ATTENTION, **HEAD_NORMS, **EXPERTS},
        n_layer=2,
    ),
    Tiny(
        "mimo2",
        {
            **KEYS,
            **EXPERT_KEYS,
            **WINDOWS,
            "attention.head_count_kv": [4, 2],
            "attention.value_length": 24,
            "attention.value_scale": 0.7,
            "rope.freq_base": 5e6,
            "rope.dimension_count": HEAD // 2,
        },
        {
            **ATTENTION,
            "attn_v.weight": (N_EMBD, 2 * 24),
            "attn_output.weight": (4 * 24, N_EMBD),
            **EXPERTS,
            "exp_probs_b.bias": 8,
        },
        layers={
            0: {
                **DENSE,
                "attn_k.weight": (N_EMBD, 4 * HEAD),
                "attn_v.weight": (N_EMBD, 4 * 24),
                "attn_sinks.weight": 4,
            }
        },
        n_layer=2,
        deviation={"attn_sinks": 2.0},
    ),
    Tiny(
        "step35",
        {
            **KEYS,
            **EXPERT_KEYS,
            **WINDOWS,
            "attention.head_count": [8, 4],
            "attention.key_length": HEAD,
            "attention.value_length": HEAD,
            "expert_shared_feed_forward_length": EXPERT,
            "expert_weights_scale": 1.5,
            "expert_weights_norm": True,
            "rope.freq_base": 5e6,
            "rope.dimension_count": HEAD,
            "rope.dimension_count_swa": HEAD // 2,
            "swiglu_clamp_exp": [0.0, 0.7],
            "swiglu_clamp_shexp": [0.4, 0.5],
        },
        {
            **ATTENTION,
            **HEAD_NORMS,
            "attn_gate.weight": (N_EMBD, 4),
            **EXPERTS,
            **SHARED,
            "exp_probs_b.bias": 8,
        },
        {"rope_freqs.weight": HEAD // 4},
        layers={
            0: {
                **DENSE,
                "attn_q.weight": (N_EMBD, 8 * HEAD),
                "attn_output.weight": (8 * HEAD, N_EMBD),
                "attn_gate.weight": (N_EMBD, 8),
            }
        },
        n_layer=2,
    ),
    Tiny(
        "spark2_5",
        {**KEYS, **WINDOWS, "rope.dimension_count": HEAD // 2, "rope.dimension_count_swa": HEAD},
        {**ATTENTION, "attn_gate.weight": (N_EMBD, 4), **GATED},
        n_layer=2,
    ),
    Tiny(
        "granite_swa",
        {**KEYS, **FACTORS, **WINDOWS, "attention.rope_pattern": [True, False]},
        {**ATTENTION, **GATED, "attn_sinks.weight": 4},
        n_layer=2,
        deviation={"attn_sinks": 2.0},
    ),
    Tiny(
        "granite_swa",
        {
            **KEYS,
            **FACTORS,
            **WINDOWS,
            "expert_count": 8,
            "expert_used_count": 3,
            "expert_shared_feed_forward_length": EXPERT,
            "feed_forward_length": EXPERT,
        },
        {
            **ATTENTION,
            **EXPERTS,
            "attn_sinks.weight": 4,
            "ffn_up_shexp.weight": (N_EMBD, 2 * EXPERT),
            "ffn_down_shexp.weight": (EXPERT, N_EMBD),
        },
        {"output.weight": None},
        n_layer=2,
        variant="experts",
    ),
    Tiny(
        "apertus",
        {
            **KEYS,
            "xielu.alpha_n": [0.5, 0.2],
            "xielu.alpha_p": [0.3, 0.8],
            "xielu.beta": [0.5, 0.4],
            "xielu.eps": [-1e-6, -1e-6],
        },
        {**ATTENTION, **HEAD_NORMS, **without(GATED, "ffn_gate.weight")},
        {"rope_freqs.weight": HEAD // 2},
        n_layer=2,
    ),
    Tiny(
        "laguna",
        {
            **KEYS,
            **EXPERT_KEYS,
            **YARN,
            **WINDOW,
            "attention.sliding_window_pattern": [False, True],
            "attention.head_count": [4, 8],
            "attention.key_length": HEAD,
            "attention.value_length": HEAD,
            "expert_shared_feed_forward_length": EXPERT,
            "expert_weights_scale": 1.5,
            "expert_weights_norm": True,
            "leading_dense_block_count": 1,
            "rope.freq_base": 5e5,
            "rope.freq_base_swa": 10000.0,
            "rope.dimension_count": HEAD // 2,
            "rope.dimension_count_swa": HEAD,
        },
        {
            **ATTENTION,
            **HEAD_NORMS,
            "attn_q.weight": (N_EMBD, 8 * HEAD),
            "attn_output.weight": (8 * HEAD, N_EMBD),
            "attn_gate.weight": (N_EMBD, 8),
            **EXPERTS,
            **SHARED,
            "exp_probs_b.bias": 8,
        },
        layers={
            0: {
                **DENSE,
                "attn_q.weight": (N_EMBD, 4 * HEAD),
                "attn_output.weight": (4 * HEAD, N_EMBD),
                "attn_gate.weight": (N_EMBD, 4 * HEAD),
            }
        },
        n_layer=2,
    ),
    Tiny(
        "cohere2moe",
        {
            **LAYER_NORM_KEYS,
            **EXPERT_KEYS,
            **WINDOW,
            "attention.sliding_window_pattern": [False, True, False],
            "expert_shared_count": 1,
            "expert_weights_norm": True,
            "leading_dense_block_count": 1,
            "logit_scale": 0.5,
        },
        {**ATTENTION, **without(EXPERTS, "ffn_norm.weight"), **SHARED},
        {"output.weight": None},
        layers={0: {**without(DENSE, "ffn_norm.weight")}},
        n_layer=3,
    ),
    Tiny(
        "muse-glimmer",
        {
            **KEYS,
            **WINDOW,
            "attention.sliding_window_pattern": 2,
            "logit_scale": 0.5,
            "final_logit_softcapping": 8.0,
        },
        {**ATTENTION, **HEAD_NORMS, "attn_gate.weight": (N_EMBD, 4 * HEAD), **POST_NORMS, **GATED},
        n_layer=2,
    ),
    Tiny(
        "talkie",
        {**KEYS, "logit_scale": 0.7},
        {
            **without({**ATTENTION, **GATED}, "attn_norm.weight", "ffn_norm.weight"),
            "attn_q_norm.weight": (1, 4),
            "layer_output_scale.weight": 1,
        },
        {"output_norm.weight": None},
        n_layer=2,
    ),
)
